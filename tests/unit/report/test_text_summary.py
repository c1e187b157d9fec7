"""The end of a run with text tasks in numbers and in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlplace.report.text_summary import TextProgress, text_summary, text_summary_text


def iteration(reward: float, **more: float) -> dict[str, float]:
    stages = {"time/rollout_s": 2.0, "time/learn_s": 3.0, "time/iteration_s": 6.0, "time/overhead_s": 1.5}
    return {"actor/reward": reward, "rollout/tokens": 100.0, "actor/tokens_learned": 90.0, **stages, **more}


def test_rewards_held_out_prompts_and_tokens_are_summed_up() -> None:
    progress = TextProgress(began=0.0, start_s=4.0)
    progress.add(iteration(0.1, **{"eval/reward": 0.05, "time/evaluate_s": 1.0}))
    progress.add(iteration(0.4))
    progress.add_evaluation({"eval/reward": 0.5, "time/evaluate_s": 1.0}, iteration=2)
    report = text_summary(progress, Path("runs/x"))
    assert (report["reward_first"], report["reward_last"]) == (0.1, 0.4)
    assert report["evaluations"] == {"0": 0.05, "2": 0.5}
    assert (report["tokens_generated"], report["tokens_learned"], report["iterations"]) == (200, 180, 2)
    assert report["seconds"]["evaluate"] == 2.0
    assert report["overhead_share"] == 0.25
    text = text_summary_text(report)
    assert "reward     0.100 -> 0.400" in text
    assert "held out   0.050 -> 0.500   (mean reward of greedy answers, after 0 and 2 iterations)" in text
    assert "200 generated, 50 per second; 180 learned, 30 per second; 2 iterations" in text
    assert "rollout 4.0, learn 6.0, evaluate 2.0" in text


def test_a_run_that_never_learned_says_so() -> None:
    text = text_summary_text(text_summary(TextProgress(began=0.0), Path("runs/x")))
    assert "reward     none -> none" in text
    assert "held out" not in text


@pytest.mark.parametrize(("goal", "reached"), [(None, False), (0.4, True), (0.41, False)])
def test_the_last_iteration_decides_whether_the_goal_is_reached(goal: float | None, reached: bool) -> None:
    progress = TextProgress(began=0.0)
    assert not progress.reached(goal)
    progress.add(iteration(0.9))
    progress.add(iteration(0.4))
    assert progress.reached(goal) == reached
