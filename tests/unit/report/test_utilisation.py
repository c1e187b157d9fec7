"""Seconds of ranks x their accelerators -> what accelerators did."""

from __future__ import annotations

import pytest

from rlplace.metrics import Metric
from rlplace.report.utilisation import (
    StageUse,
    Usage,
    bottleneck,
    overhead,
    usage_rows,
)

OCCUPANCY = {
    "actor": [(0,), (1,), (2,), (3,)],
    "env": [(0,), (1,)],
    "rollout": [(2, 3)],
    "reward": [()],
}


def iteration(usage: Usage) -> dict[str, float]:
    """Ten seconds: 1 of moves, 1 of sync, 4 of rollout, 3 of learning, 1 that no stage accounts for."""
    usage.worked("actor", [1.0] * 4, [{}] * 4)
    usage.stage_ended("sync", moves_s=0.25, seconds=1.0, sync_s=1.0)
    usage.worked(
        "env",
        [4.0, 3.0],
        [
            {"env/wait_s": Metric(2.0)},
            {"env/wait_s": Metric(1.0), "env/put_s": Metric(1.0)},
        ],
    )
    usage.worked(
        "rollout",
        [4.0],
        [
            {
                "rollout/wait_s": Metric(1.0, "max"),
                "rollout/policy_s": Metric(3.0, "max"),
            }
        ],
    )
    usage.worked("reward", [4.0], [{}])
    usage.stage_ended("rollout", moves_s=0.5, seconds=4.0)
    usage.worked("actor", [3.0, 3.0, 3.0, 3.0], [{}] * 4)
    usage.stage_ended("learn", moves_s=0.25, seconds=3.0)
    return usage.iteration_ended(10.0)


def test_every_second_of_every_accelerator_is_counted_once() -> None:
    metrics = iteration(Usage(OCCUPANCY))
    assert metrics == {
        "util/busy_share": pytest.approx((2.0 + 1.0 + 3.0 + 3.0 + 4 * 3.0) / 40),
        "util/bubble_share": pytest.approx((2.0 + 3.0 + 1.0 + 1.0) / 40),
        "util/moves_share": pytest.approx(0.1),
        "util/sync_share": pytest.approx(0.1),
    }
    assert sum(metrics.values()) == pytest.approx(0.9)


def test_a_run_is_summed_by_stage_and_accelerator() -> None:
    usage = Usage(OCCUPANCY)
    for _ in range(2):
        iteration(usage)
    record = usage.record({"rollout": 4, "learn": 4})
    assert record["accelerators"] == 4
    assert record["accelerator_hours"] == pytest.approx(80 / 3600)
    assert record["stages"]["rollout"] == {
        "seconds": 8.0,
        "sync_s": 0.0,
        "moves_s": 1.0,
        "at_work": pytest.approx(9 / 4),
        "planned_at_work": 4,
    }
    assert record["stages"]["sync"]["planned_at_work"] is None
    assert record["by_accelerator"]["0"]["rollout"] == {"busy_s": 4.0, "idle_s": 4.0}
    assert len(usage.last) == 3
    assert usage_rows(record) == [
        (
            "at work",
            "52% of the time of 4 accelerators, idle 18%, moves 10%, sync 10%; 0.0222 accelerator hours",
        ),
        (
            "",
            "rollout 2.2 (4), learn 4.0 (4)   accelerators at work, measured (planned)",
        ),
    ]


def test_sending_weights_is_sync_in_a_stage_of_any_name() -> None:
    usage = Usage({"actor": [(0,)]})
    usage.stage_ended("send", moves_s=0.0, seconds=1.0, sync_s=1.0)
    usage.worked("actor", [3.0], [{}])
    usage.stage_ended("learn", moves_s=0.0, seconds=5.0, sync_s=2.0)
    metrics = usage.iteration_ended(8.0)
    assert metrics["util/sync_share"] == pytest.approx(3 / 8)
    assert metrics["util/busy_share"] == pytest.approx(3 / 8)
    assert metrics["util/bubble_share"] == 0.0
    record = usage.record({})
    # What a stage does besides sending is what its accelerators are at work for.
    assert record["stages"]["learn"]["at_work"] == 1.0
    assert record["by_accelerator"]["0"] == {"learn": {"busy_s": 3.0, "idle_s": 0.0}}
    ((_, whole), (_, stages)) = usage_rows(record)
    assert "sync 38%" in whole
    assert stages.startswith("learn 1.0   ")


def test_a_stage_called_sync_that_sends_nothing_is_no_sync() -> None:
    usage = Usage({"actor": [(0,)]})
    usage.worked("actor", [1.0], [{}])
    usage.stage_ended("sync", moves_s=0.0, seconds=2.0)
    metrics = usage.iteration_ended(2.0)
    assert (metrics["util/sync_share"], metrics["util/busy_share"]) == (0.0, 0.5)


def test_sending_in_a_stage_that_works_too_may_be_the_bottleneck() -> None:
    numbers = {
        "time/iteration_s": 4.0,
        "time/learn_s": 1.0,
        "time/learn_weights_s": 3.0,
    }
    text = bottleneck(numbers, {"learn": ("actor",)})
    assert text == "learn weights, 3.00 of 4.00 s"


def test_residents_that_work_at_once_do_not_make_an_accelerator_busier_than_the_stage() -> (
    None
):
    usage, on_host = (
        Usage({"env": [(0,)], "rollout": [(0,)]}),
        Usage({"env": [()], "rollout": [()]}),
    )
    for each in (usage, on_host):
        each.worked("env", [3.0], [{}])
        each.worked("rollout", [3.0], [{}])
        each.stage_ended("rollout", moves_s=0.0, seconds=4.0)
    assert usage.iteration_ended(4.0)["util/busy_share"] == 1.0
    assert usage.last[0].work == {0: {"env": 3.0, "rollout": 3.0}}
    assert (
        on_host.iteration_ended(4.0) == {}
    )  # without accelerators there are no shares
    assert usage_rows(on_host.record({})) == []


def test_where_generation_runs_ahead_all_stages_but_sync_count_as_one() -> None:
    usage = Usage({"actor": [(0,)], "rollout": [(1,)]}, merged=True)
    usage.stage_ended("sync", moves_s=0.0, seconds=1.0, sync_s=1.0)
    usage.worked("actor", [3.0], [{}])
    usage.stage_ended("learn 1", moves_s=0.5, seconds=3.0)
    usage.worked("rollout", [4.0], [{}])
    usage.stage_ended("learn 2", moves_s=0.0, seconds=1.0)
    usage.iteration_ended(5.5)
    work = {0: {"actor": 3.0}, 1: {"rollout": 4.0}}
    assert usage.last[1:] == (
        StageUse(stage="rollout || learn", moves_s=0.5, seconds=4.0, work=work),
    )


def test_overhead_is_what_is_left_of_the_slowest_rank_or_of_all_on_their_cores() -> (
    None
):
    works = {
        "sync": ("actor", "rollout"),
        "rollout": ("env", "rollout"),
        "learn": ("actor",),
    }
    numbers = {
        "time/iteration_s": 10.0,
        "env/sim_s": 2.0,
        "rollout/policy_s": 1.0,
        "actor/learn_s": 3.0,
    }
    alone = overhead(numbers, works, {"rollout": 1.5, "learn": 3.0})
    assert alone == {"time/overhead_s": 5.0, "time/overhead_share": 0.5}, (
        "no rank waited for a core"
    )
    evaluated = overhead(numbers | {"time/evaluate_s": 4.0}, works, {})
    assert evaluated["time/overhead_s"] == 5.0, "an evaluation is not in the iteration"
    crowded = overhead(numbers, works, {"rollout": 4.0, "learn": 3.0, "sync": 1.0})
    assert crowded["time/overhead_s"] == 3.0, (
        "the cores had 4 s to do; sync is no work, whatever it computes"
    )
