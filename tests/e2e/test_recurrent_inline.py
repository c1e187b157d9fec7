"""Whole runs of policies with memory: they learn what others cannot, in any placement, and go on where they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rlplace
from rlplace.cli.evaluate import main as evaluate
from rlplace.cli.export import main as export
from tests.e2e.training import INLINE_LAUNCHER, Finished, placed, train

LEARNED = ("actor/policy_loss", "actor/value_loss", "actor/entropy", "actor/approx_kl")
RECALL = (
    *(
        "cluster.accelerators_per_node=4",
        "cluster.accelerator.kind=emulated",
        INLINE_LAUNCHER,
    ),
    *(
        "env.id=tests.gyms:Recall-v0",
        "env.total_num_envs=16",
        "runner.seed=1",
        "actor.model.hidden=[16]",
    ),
    *(
        "actor.model.memory=gru",
        "+actor.model.memory_size=16",
        "algorithm.gamma=0.9",
        "algorithm.num_minibatches=4",
    ),
    *(
        "algorithm.rollout_steps=32",
        "+algorithm.unroll_steps=16",
        "+algorithm.burn_in=4",
    ),
    *(
        "actor.optimizer.lr=5e-3",
        "actor.optimizer.schedule=constant",
        "rollout.pipeline_stage_num=1",
    ),
)


def learn(
    output: Path, *overrides: str, at: tuple[str, str, str] = ("0", "0", "0")
) -> Finished:
    run = train("hybrid_ppo_cartpole", output, *RECALL, *placed(*at), *overrides)
    assert run.code == 0, run.err
    return run


@pytest.mark.parametrize(
    "memory", ["gru", pytest.param("lstm", marks=pytest.mark.slow)]
)
def test_what_was_seen_is_remembered_and_played_so(
    memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = learn(
        tmp_path,
        f"actor.model.memory={memory}",
        "runner.total_iterations=60",
        "runner.stop_at_return=0.95",
    )
    assert run.metrics()[0]["env/return"] < 0.75  # by chance it is one half
    assert run.summary()["return_last"] >= 0.95
    assert evaluate([str(run.folder), "episodes=64", "--format", "json"]) == 0
    policy = rlplace.load_policy(run.folder)
    signs = np.array([[1.0], [-1.0], [1.0]], np.float32)
    policy.act(signs, begins=True)
    for _ in range(4):
        policy.act(np.zeros_like(signs))
    named = policy.act(np.zeros_like(signs))
    assert named.tolist() == [1, 0, 1]
    forgetful = [policy.act(np.zeros_like(signs), begins=True) for _ in range(2)]
    assert len(set(forgetful[1].tolist())) == 1, "all rows have seen the same since"


def test_without_a_memory_it_stays_at_chance(tmp_path: Path) -> None:
    none = (
        "actor.model.memory=none",
        "algorithm.unroll_steps=null",
        "algorithm.burn_in=0",
    )
    run = learn(tmp_path, *none, "runner.total_iterations=30")
    assert run.summary()["return_last"] < 0.75


@pytest.mark.slow
def test_the_placement_changes_nothing(tmp_path: Path) -> None:
    """One process that decides by a call, stage groups and channels, several ranks of each."""
    found = []
    for name, at, groups in (
        ("one", ("0", "0", "0"), 1),
        ("groups", ("0", "1", "2"), 2),
        ("many", ("0", "0-1", "2-3"), 2),
    ):
        run = learn(
            tmp_path / name,
            f"rollout.pipeline_stage_num={groups}",
            "runner.total_iterations=3",
            at=at,
        )
        found.append(
            [[row[key] for key in (*LEARNED, "env/return")] for row in run.metrics()]
        )
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_run_goes_on_in_the_middle_of_episodes_with_what_it_remembered(
    tmp_path: Path,
) -> None:
    whole = learn(tmp_path / "whole", "runner.total_iterations=3", "checkpoint.every=1")
    learn(tmp_path / "cut", "runner.total_iterations=2", "checkpoint.every=1")
    resumed = learn(
        tmp_path / "cut",
        "runner.total_iterations=3",
        "checkpoint.every=1",
        "resume=auto",
    )
    assert [whole.metrics()[-1][name] for name in LEARNED] == [
        resumed.metrics()[-1][name] for name in LEARNED
    ]


def test_an_export_has_its_config_and_plays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = learn(tmp_path, "runner.total_iterations=1")
    assert export([str(run.folder), str(tmp_path / "out")]) == 0
    assert export([str(run.folder), str(tmp_path / "out.pt")]) == 2
    assert "it has a memory" in capsys.readouterr().err
    assert rlplace.load_policy(tmp_path / "out").act(np.ones(1, np.float32)).shape == ()
