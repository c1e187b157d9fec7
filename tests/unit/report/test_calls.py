"""What is kept of the calls of an iteration, and the clocks of nodes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from rlplace.report.calls import (
    CallLog,
    IterationCalls,
    RankCall,
    StageTime,
    clock_offsets,
)
from rlplace.stopwatch import Part
from tests.iterations import BEGAN_S, call, iteration, slot


def two_stages(*calls: tuple[str, float, float]) -> IterationCalls:
    """Rollout is from 0 to 1 s, learn from 1 to 2 s. `calls`: of node 1, in a stage, begun and ended."""
    stages = [
        StageTime("rollout", BEGAN_S, BEGAN_S + 1),
        StageTime("learn", BEGAN_S + 1, BEGAN_S + 2),
    ]
    found = [
        call(slot("actor", 0, [0], node=1), "learn", stage, began, ended)
        for stage, began, ended in calls
    ]
    return IterationCalls(0, BEGAN_S, 0.0, seconds=2.0, stages=stages, calls=found)


def test_a_clock_that_is_late_or_early_is_moved_by_the_least_that_explains_its_calls() -> (
    None
):
    late = two_stages(("rollout", 0.5, 1.4), ("learn", 1.5, 2.2))
    early = two_stages(("rollout", -0.3, 0.5), ("learn", 0.8, 1.7))
    assert clock_offsets([late]) == {1: pytest.approx(-0.4)}
    assert clock_offsets([early]) == {1: pytest.approx(0.3)}
    assert clock_offsets([two_stages(("rollout", 0.0, 1.0))]) == {1: 0.0}


def test_where_generation_runs_ahead_only_the_ends_of_calls_tell_of_the_clock() -> None:
    assert clock_offsets([two_stages(("learn", 0.2, 1.9), ("learn", 1.0, 1.95))]) == {
        1: 0.0
    }
    assert clock_offsets([two_stages(("learn", 0.2, 2.3))]) == {1: pytest.approx(-0.3)}


def test_calls_between_iterations_are_of_none() -> None:
    log, saved = CallLog(), call(slot("actor", 0, [0]), "write_state", "learn", 0, 1)
    ended = SimpleNamespace(
        record=saved.record, slot=saved.slot, method=saved.name, work=None
    )
    log.begin(0)
    log.end(1.0)
    log.took("learn", [SimpleNamespace(calls=[ended])])
    assert [kept.calls for kept in log.iterations] == [[]]


def test_an_iteration_without_learning_is_an_evaluation() -> None:
    made = iteration(2)
    assert made.title == "iteration 5"
    made.calls = [c for c in made.calls if c.name != "learn"]
    assert made.title == "evaluation"


def computed(
    component: str, rank: int, name: str, stage: str, node: int = 0, **cpu_s: float
) -> RankCall:
    """A call whose laps took processor time, on a node of two cores."""
    made = call(slot(component, rank, [rank], node=node), name, stage, 0.0, 1.0)
    parts = tuple(
        Part(part, 16.0, 1, 9.0, seconds, seconds, 0.0)
        for part, seconds in cpu_s.items()
    )
    return made._replace(record=dataclasses.replace(made.record, parts=parts, cores=2))


def test_work_on_cores_is_processor_time_of_all_ranks_of_the_busiest_node() -> None:
    made = IterationCalls(0, BEGAN_S, 0.0)
    made.calls = [
        computed(
            "env", 0, "run", "rollout", sim=9.0
        ),  # of an evaluation: the samples' own is the last
        *(
            computed("env", rank, "run", "rollout", sim=1.0, wait=0.5, put=0.25)
            for rank in range(3)
        ),
        computed(
            "rollout", 0, "generate", "learn", policy=0.5, put=2.0
        ),  # that ran ahead
        computed("env", 3, "run", "rollout", node=1, sim=3.0),
        computed("actor", 0, "learn", "learn", learn=2.0, minibatch=1.0, exchange=0.5),
        computed("actor", 0, "move full", "learn"),
    ]
    assert made.on_cores() == {"rollout": (3 * 1.0 + 0.5) / 2, "learn": (2.0 - 0.5) / 2}
