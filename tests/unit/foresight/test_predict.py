"""Predicted iterations of jobs whose work takes round numbers, against sums that can be done by hand."""

from __future__ import annotations

import pytest

from rlplace.foresight.profile import ACCELERATOR
from rlplace.foresight.world import WANTED
from tests.foreseen import MS, PLACE, timed

APART = (PLACE + "actor=0", PLACE + "env=1", PLACE + "rollout=2")
STEPS = 32  # of configs/hybrid_ppo


def test_simulator_and_policy_take_turns_with_one_stage_group_and_overlap_with_two() -> (
    None
):
    work = {"env.run/sim": 2.0, "rollout.generate/policy": 1.0}
    alone = timed(work, *APART, "rollout.pipeline_stage_num=1")
    assert alone.numbers["time/rollout_s"] == pytest.approx(STEPS * 3 * MS)
    assert (alone.numbers["env/sim_s"], alone.numbers["env/wait_s"]) == pytest.approx(
        (STEPS * 2 * MS, STEPS * MS)
    )
    both = timed(work, *APART, "rollout.pipeline_stage_num=2")
    # Each group's steps take as long as a whole one's here; but for the first decision, the policy is hidden.
    assert both.numbers["time/rollout_s"] == pytest.approx((2 * STEPS * 2 + 1) * MS)
    assert both.queues == {
        "observations": 1,
        "actions": 1,
        "trajectories": 1,
        "weights": 0,
    }
    slow = timed(work, *APART, "rollout.pipeline_stage_num=2", cores=1)
    assert slow.numbers["time/rollout_s"] == pytest.approx(2 * STEPS * 3 * MS)


def test_env_and_rollout_of_one_process_decide_in_turn_and_share_no_channel() -> None:
    work = {
        "env.run/sim": 2.0,
        "rollout.generate/policy": 1.0,
        "env.run/direct_wait": 1.5,
    }
    found = timed(
        work, "rollout.pipeline_stage_num=1", config="collocated_ppo_one_process"
    )
    assert found.numbers["time/rollout_s"] == pytest.approx(STEPS * 3.5 * MS)
    assert found.numbers["rollout/policy_s"] == pytest.approx(STEPS * MS)
    assert "observations" not in found.queues


def test_ranks_that_learn_meet_in_every_minibatch_and_share_the_processors() -> None:
    work = {"actor.learn/minibatch": 1.0, "actor.learn/exchange": 0.5}
    place = (PLACE + "env=4", PLACE + "rollout=5")
    steps = 5 * 4  # epochs x minibatches
    one = timed(work, PLACE + "actor=0", *place)
    assert one.numbers["time/learn_s"] == pytest.approx((steps * 1.5 + 0.5) * MS)
    four = timed(work, PLACE + "actor=0-3", *place, cores=2)
    turns_s = (steps * 1.5 + 0.5) * 2 * MS
    assert (
        turns_s < four.numbers["time/learn_s"] < turns_s / WANTED
    )  # not all the time more want one than there are


def test_the_moves_are_those_of_the_schedule_and_calls_cost_the_driver_and_the_ranks() -> (
    None
):
    moves = {
        "actor.move_full/rest": 10.0,
        "env.move_off/rest": 4.0,
        "rollout.move_weights/rest": 1.0,
    }
    shared = timed(moves, cores=16)
    # Into sync: rollout's weights; into learn: env goes, then the actor comes.
    assert shared.numbers["time/moves_s"] == pytest.approx((1.0 + 4.0 + 10.0) * MS)
    apart = timed(moves, *APART)
    assert apart.numbers["time/moves_s"] == 0.0
    calls = timed({"driver/ray_call": 1.0, "env/ray_call": 2.0}, *APART)
    # The driver sends in half of its time and takes results in the other. sync: two calls of no work; rollout: env is
    # there after 0.5 + 2 ms, then both have ended at once; learn: one call.
    assert calls.seconds == pytest.approx((2 * 1.0 + (0.5 + 2.0 + 2 * 0.5) + 1.0) * MS)
    stages = calls.iterations[-1].stages
    assert calls.numbers["time/iteration_s"] == pytest.approx(
        sum(s.ended_s - s.began_s for s in stages)
    )


def test_what_is_asked_of_a_rank_between_two_waits_costs_the_driver_and_the_rank_once() -> (
    None
):
    one = (PLACE + "actor=0", PLACE + "env=0", PLACE + "rollout=0")
    found = timed({"driver/ray_call": 1.0}, *one)
    calls = found.iterations[-1].calls
    # 13 calls: moves of the actor out of learn and out of sync; push; pull and run and generate and learn, with the
    # moves before and behind them.
    assert (len(calls), sum(call.work for call in calls)) == (13, 7)
    assert {call.name for call in calls if not call.work} == {
        "move full",
        "move off",
        "move weights",
    }
    assert found.seconds == pytest.approx(7 * 1.0 * MS)
    assert timed({"env/ray_call": 2.0}, *one).seconds == pytest.approx(2.0 * MS)


def test_work_grows_with_the_rows_of_a_rank() -> None:
    work, sizes = {"env.run/sim": 1.0}, {"env.run/sim": 8.0}
    few = timed(
        work, PLACE + "env=0-3", sizes=sizes
    )  # 128 environments, 4 ranks, 2 stage groups: 16 rows
    many = timed(work, PLACE + "env=0-1", sizes=sizes)
    assert few.numbers["env/sim_s"] == pytest.approx(2 * STEPS * 2 * MS)
    assert many.numbers["env/sim_s"] == pytest.approx(2 * STEPS * 4 * MS)
    assert many.costs.stretched == {"env.run/sim": 32.0}


def test_accelerators_work_side_by_side_and_each_for_one_rank_at_a_time() -> None:
    work = {"actor.learn/minibatch": 1.0}
    apart = timed(work, PLACE + "actor=0-7", on=ACCELERATOR, cores=1)
    assert apart.numbers["time/learn_s"] == pytest.approx(5 * 4 * MS)
    crowded = timed(
        work, PLACE + "actor=0-3:0-7", on=ACCELERATOR, cores=1
    )  # two ranks on each
    assert crowded.numbers["time/learn_s"] == pytest.approx(2 * 5 * 4 * MS)


def test_what_the_profile_lacks_is_told() -> None:
    found = timed({"env.run/sim": 1.0})
    assert {
        "rollout.generate/policy",
        "actor.learn/minibatch",
        "driver/ray_call",
    } <= set(found.costs.missing)
