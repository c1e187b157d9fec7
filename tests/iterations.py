"""Iterations as a run keeps them, made up; and what a trace of any is."""

from __future__ import annotations

import itertools
import json
import random
from array import array
from collections.abc import Iterable
from typing import Any

from rlplace.placement.language.slots import Slot
from rlplace.report.calls import IterationCalls, RankCall, StageTime
from rlplace.report.utilisation import Usage
from rlplace.stopwatch import CallRecord, Spans

BEGAN_S = 1_800_000_000.0
_REQUIRED = {"ph": str, "name": str, "pid": int, "tid": int}
STAGES = ("sync", 0.0, 0.1), ("rollout", 0.1, 0.7), ("learn", 0.7, 1.0)


def slot(component: str, rank: int, accelerators: Iterable[int], node: int = 0) -> Slot:
    held = tuple(accelerators)
    return Slot(
        component=component,
        rank=rank,
        node=node,
        local_rank=rank,
        accelerators=held,
        local_accelerators=held,
    )


def spans(began_s: float, *laps: tuple[str, float]) -> Spans:
    """`laps`: parts and when they end."""
    names = tuple(dict.fromkeys(name for name, _ in laps))
    which = bytes(names.index(name) for name, _ in laps)
    return Spans(
        BEGAN_S + began_s, names, which, array("d", (BEGAN_S + end for _, end in laps))
    )


def call(
    at: Slot, name: str, stage: str, began_s: float, ended_s: float, *watches: Spans
) -> RankCall:
    record = CallRecord(
        method=name,
        began_s=BEGAN_S + began_s,
        seconds=ended_s - began_s,
        cpu_s=0.0,
        process=1,
        process_cpu_s=0.0,
        parts=(),
        spans=watches,
    )
    return RankCall(stage, at, name, record)


def turns(stages: int, began_s: float, ended_s: float, draw: random.Random) -> Spans:
    """A rank that works and waits by turns, `stages` times."""
    cuts = sorted(draw.uniform(began_s, ended_s) for _ in range(2 * stages - 1))
    return spans(
        began_s,
        *(
            ("wait" if at % 2 else "sim", end)
            for at, end in enumerate([*cuts, ended_s])
        ),
    )


def iteration(
    accelerators: int, laps: int = 8, index: int = 4, each_node: int = 8
) -> IterationCalls:
    """One second in which half of the accelerators simulate, half of them generate, and all learn."""
    made = IterationCalls(index, BEGAN_S, 0.0, seconds=1.0)
    made.stages = [
        StageTime(stage, BEGAN_S + begin, BEGAN_S + end) for stage, begin, end in STAGES
    ]
    draw, usage = (
        random.Random(0),
        Usage({"actor": [(a,) for a in range(accelerators)]}),
    )
    for a in range(accelerators):
        role = "env" if a < accelerators // 2 else "rollout"
        near, actor = (
            slot(role, a, [a], a // each_node),
            slot("actor", a, [a], a // each_node),
        )
        end = draw.uniform(0.5, 0.7)
        learn = (
            spans(0.75, ("wait", 0.76), ("learn", end + 0.29)),
            spans(0.77, ("minibatch", 0.8), ("exchange", 0.9)),
        )
        made.calls += [
            call(actor, "push_weights", "sync", 0.02, 0.09),
            call(near, "move full", "rollout", 0.1, 0.15),
            call(near, "run", "rollout", 0.15, end, turns(laps, 0.16, end, draw)),
            call(actor, "move full", "learn", 0.7, 0.75),
            call(actor, "learn", "learn", 0.75, end + 0.3, *learn),
        ]
    for stage, begin, end in STAGES:
        if stage == "learn":
            usage.worked("actor", [0.25] * accelerators, [{}] * accelerators)
        sync_s = 0.0
        if stage == "sync":
            sync_s = end - begin
        usage.stage_ended(stage, moves_s=0.0, seconds=end - begin, sync_s=sync_s)
    usage.iteration_ended(1.0)
    made.uses = usage.last
    return made


def read_trace(text: str) -> list[dict[str, Any]]:
    """The events, checked: complete, numbers whole, each inside of the one around it on its thread."""
    events = json.loads(text)["traceEvents"]
    for event in events:
        assert {name: type(event[name]) for name in _REQUIRED} == _REQUIRED
        assert event["ph"] in ("M", "X")
        if event["ph"] == "X":
            assert isinstance(event["ts"], int)
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
    spans_of = [e for e in events if e["ph"] == "X"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in spans_of} <= named
    for _, thread in itertools.groupby(spans_of, key=lambda e: (e["pid"], e["tid"])):
        around: list[int] = []
        for event in thread:
            while around and around[-1] <= event["ts"]:
                around.pop()
            assert event["ts"] + event["dur"] <= min(
                around, default=event["ts"] + event["dur"]
            )
            around.append(event["ts"] + event["dur"])
    return events
