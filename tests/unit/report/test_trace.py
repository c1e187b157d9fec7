"""Calls -> events as the trace format of Chrome asks for them."""

from __future__ import annotations

import pytest

from rlplace.report import trace
from rlplace.report.calls import IterationCalls
from rlplace.report.trace import render_trace
from tests.iterations import call, iteration, read_trace, slot, spans


def test_nodes_are_processes_ranks_are_threads_and_laps_are_inside_of_calls() -> None:
    events = read_trace(render_trace([iteration(4, each_node=2)]))
    names = {
        (e["name"], e["pid"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "process_name"
    }
    assert sorted(names.values()) == ["driver", "node 0", "node 1"]
    threads = {
        e["args"]["name"]: (e["pid"], e["tid"])
        for e in events
        if e["name"] == "thread_name"
    }
    assert threads["stages"] == (0, 0)
    assert [threads[f"actor rank {rank}"][0] for rank in range(4)] == [1, 1, 2, 2]
    stages = [
        (e["name"], e["ts"], e["dur"])
        for e in events
        if e["ph"] == "X" and e["pid"] == 0
    ]
    assert stages == [
        ("iteration 5", 0, 1_000_000),
        ("sync", 0, 100_000),
        ("rollout", 100_000, 600_000),
        ("learn", 700_000, 300_000),
    ]
    actor = [
        e["name"]
        for e in events
        if e["ph"] == "X" and (e["pid"], e["tid"]) == threads["actor rank 0"]
    ]
    assert actor == [
        "push_weights",
        "move full",
        "learn",
        "wait",
        "learn",
        "minibatch",
        "exchange",
    ]


def test_laps_that_would_cross_are_cut_and_calls_follow_each_other() -> None:
    made, at = iteration(0), slot("env", 0, [0])
    made.calls = [
        call(
            at,
            "run",
            "rollout",
            0.2,
            0.4,
            spans(0.2, ("sim", 0.3), ("wait", 0.4)),
            spans(0.25, ("put", 0.35)),
        ),
        call(at, "move off", "rollout", 0.3999995, 0.5),  # its clock was read again
    ]
    events = [
        e for e in read_trace(render_trace([made])) if e["ph"] == "X" and e["pid"] == 1
    ]
    assert [(e["name"], e["ts"], e["dur"]) for e in events] == [
        ("run", 200_000, 200_000),
        ("sim", 200_000, 100_000),
        ("put", 250_000, 50_000),
        ("wait", 300_000, 100_000),
        ("move off", 400_000, 100_000),
    ]


def test_of_too_many_laps_the_longest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_LAPS", 10)
    events = [
        e for e in read_trace(render_trace([iteration(4, laps=100)])) if e["ph"] == "X"
    ]
    calls_and_stages = 4 * 5 + 4
    assert calls_and_stages < len(events) <= calls_and_stages + 10


def test_a_run_without_a_whole_iteration_has_an_empty_trace() -> None:
    assert {e["ph"] for e in read_trace(render_trace(list[IterationCalls]()))} == {"M"}
