"""Whole runs that generate while the actor learns: how old what is learned may be, and that it is learned from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.e2e.language import INLINE, tiny
from tests.e2e.overlap_run import EARLY, witness
from tests.e2e.training import placed, train

APART = (*INLINE, *placed("0", "1", "2"))


@pytest.mark.parametrize("ahead", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_nothing_is_learned_that_is_older_than_allowed(
    model: Path, tmp_path: Path, ahead: int
) -> None:
    seen = witness(
        model, tmp_path, "algorithm.max_new_tokens=16", ahead=ahead, iterations=10
    )
    for version, sample in seen.learned:
        ages = version - sample.versions[sample.mask]
        assert 0 <= ages.min() <= ages.max() <= ahead
        assert (np.diff(sample.versions[sample.mask]) >= 0).all()
    for version in range(
        ahead, 10
    ):  # each began as early as it may, and went on with what was pushed meanwhile
        long = [s for s in seen.of(version) if s.response_tokens > EARLY + 1]
        assert long
        for sample in long:
            assert set(sample.versions[sample.mask]) >= {
                version - ahead,
                version - ahead + 1,
            }
    assert [line["actor/age_max"] for line in seen.metrics] == [
        min(ahead, i) for i in range(10)
    ]
    assert all(line["actor/age_mixed"] > 0 for line in seen.metrics[ahead:])
    rewards = [line["actor/reward"] for line in seen.metrics]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1


def test_steps_are_made_of_the_first_groups_that_are_whole(
    model: Path, tmp_path: Path
) -> None:
    seen = witness(
        model,
        tmp_path,
        "algorithm.train_batch=16",
        "algorithm.max_new_tokens=12",
        ahead=1,
        iterations=4,
    )
    assert [line["actor/optimizer_steps"] for line in seen.metrics] == [2] * 4
    for version in range(4):
        assert sorted({sample.group for sample in seen.of(version)}) == [0, 1, 2, 3]
        assert len(seen.of(version)) == 32


@pytest.mark.slow
def test_held_out_prompts_are_answered_when_nothing_else_is(
    model: Path, tmp_path: Path
) -> None:
    asked = (
        "algorithm.max_staleness=2",
        "runner.total_iterations=5",
        "runner.eval_every=2",
        "runner.eval_prompts=4",
    )
    run = train(
        "disaggregated_grpo_llm",
        tmp_path,
        *tiny(model),
        *APART,
        *asked,
        "algorithm.train_batch=16",
    )
    assert run.code == 0, run.err
    assert list(run.summary()["evaluations"]) == ["0", "2", "4", "5"]
    lines = run.metrics()
    evaluated = [line["iteration"] for line in lines if "eval/reward" in line]
    assert evaluated == [0, 2, 4, 5]
    del lines[0]
    assert all(line["actor/samples"] == line["rollout/answers"] == 32 for line in lines)
    assert max(line["actor/age_max"] for line in lines) <= 2
    assert all(0 <= line["time/overlap_share"] <= 1 for line in lines)


def test_critic_and_scorers_keep_up_with_what_runs_ahead(
    models: tuple[str, ...], tmp_path: Path
) -> None:
    """Actor and reference take turns; a reward of its own accelerator scores while samples are drawn."""
    apart = {
        "actor": "0",
        "reference": "0",
        "critic": "1",
        "env": "2",
        "rollout": "2",
        "reward": "3",
    }
    where = [
        f"cluster.component_placement.{component}={text}"
        for component, text in apart.items()
    ]
    asked = (
        "+algorithm.max_staleness=2",
        "runner.total_iterations=5",
        "cluster.launcher=inline",
    )
    run = train(
        "rlhf_tiny",
        tmp_path,
        *models,
        *where,
        *asked,
        "cluster.accelerators_per_node=4",
    )
    assert run.code == 0, run.err
    lines = run.metrics()
    assert len(lines) == 5
    for version, line in enumerate(lines):
        assert line["actor/samples"] == line["rollout/answers"] == line["env/episodes"]
        assert line["actor/age_max"] <= min(2, version)
    assert (
        max(line["actor/age_max"] for line in lines) >= 1
    )  # the next is begun when the first is drawn
    assert all(
        "critic/value_loss" in line and "actor/kl_reference" in line for line in lines
    )


def test_what_fails_while_the_actor_learns_ends_the_run_and_is_named(
    model: Path, tmp_path: Path
) -> None:
    asked = (
        "algorithm.max_staleness=1",
        "env.rewards=[{name: tests.odd_rewards:not_a_number}]",
    )
    run = train("disaggregated_grpo_llm", tmp_path, *tiny(model), *APART, *asked)
    assert run.code == 1
    assert "[reward-not-finite]" in run.err
    assert "stage rollout, policy version 0" in run.err
