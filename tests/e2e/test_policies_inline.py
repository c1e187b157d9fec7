"""Whole runs of policies that are no MLP: they learn what their network is for, save, resume and are predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.training import INLINE_LAUNCHER, Finished, placed, train

IMAGES = "actor.model={kind: cnn, network: impala, channels: [8], hidden: [32]}"
CORNER = (
    *(
        "cluster.accelerators_per_node=2",
        "cluster.accelerator.kind=emulated",
        INLINE_LAUNCHER,
        *placed("0", "0", "1"),
    ),
    *(
        "env.id=tests.gyms:Corner-v0",
        "env.total_num_envs=16",
        "rollout.pipeline_stage_num=1",
        "runner.seed=1",
    ),
)


def learn(output: Path, *overrides: str) -> Finished:
    run = train("hybrid_ppo_cartpole", output, *CORNER, *overrides)
    assert run.code == 0, run.err
    return run


@pytest.mark.slow
def test_convolutions_learn_to_see_and_their_memory_is_what_was_planned(
    tmp_path: Path,
) -> None:
    run = learn(
        tmp_path, IMAGES, "runner.total_iterations=20", "runner.stop_at_return=9"
    )
    assert (
        run.metrics()[0]["env/return"] < 4.5
    )  # of four corners it names one by chance
    assert run.summary()["return_last"] >= 9
    weights = next(line for line in run.out.splitlines() if "actor: weights" in line)
    measured, predicted = (
        weights.partition("weights ")[2].partition(",")[0].rstrip(")").split(" (")
    )
    assert measured == predicted


@pytest.mark.slow  # tests/contract/test_policies.py has its head, the test below its network
def test_several_choices_at_once_are_learned(tmp_path: Path) -> None:
    run = learn(
        tmp_path,
        IMAGES,
        "+env.kwargs.split=true",
        "runner.total_iterations=20",
        "runner.stop_at_return=8.5",
    )
    assert run.summary()["return_last"] >= 8.5


@pytest.mark.slow
def test_an_image_and_numbers_in_a_dict_are_learned_from_together(
    tmp_path: Path,
) -> None:
    """Neither says by itself which action is paid."""
    asked = (
        IMAGES,
        "+env.kwargs.beside=true",
        "runner.total_iterations=60",
        "runner.stop_at_return=7.5",
    )
    assert learn(tmp_path, *asked).summary()["return_last"] >= 7.5


def test_a_network_of_ones_own_is_resumed_to_the_same_numbers(tmp_path: Path) -> None:
    own = "actor.model={kind: module, name: tests.own_network:Own, kwargs: {width: 32}}"
    asked = (
        own,
        "+env.kwargs.beside=true",
        "checkpoint.every=1",
        "actor.optimizer.schedule=constant",
    )
    whole = learn(tmp_path / "whole", *asked, "runner.total_iterations=3")
    learn(tmp_path / "cut", *asked, "runner.total_iterations=2")
    resumed = learn(
        tmp_path / "cut", *asked, "runner.total_iterations=3", "resume=auto"
    )
    names = ("actor/policy_loss", "actor/value_loss", "actor/entropy")
    assert [whole.metrics()[-1][name] for name in names] == [
        resumed.metrics()[-1][name] for name in names
    ]
