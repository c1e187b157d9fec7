"""A small transformer learns to say four actions at once, of which only the first is decided on what they are about."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import rlplace
from rlplace.cli.evaluate import main as evaluate
from tests.e2e.training import INLINE_LAUNCHER, Finished, placed, train

DICTATION = (
    *(
        "cluster.accelerators_per_node=3",
        "cluster.accelerator.kind=emulated",
        INLINE_LAUNCHER,
    ),
    *(
        "env.id=tests.gyms:Dictation-v0",
        "env.total_num_envs=32",
        "runner.seed=1",
        "rollout.action_chunk=4",
    ),
    *(
        "algorithm.rollout_steps=16",
        "algorithm.gae_lambda=0.0",
        "algorithm.num_minibatches=4",
    ),
    *("actor.optimizer.lr=1e-3", "actor.optimizer.schedule=constant"),
)
TRANSFORMER = "actor.model={kind: transformer, width: 32, layers: 1}"


def learn(
    output: Path,
    *overrides: str,
    groups: int = 1,
    at: tuple[str, str, str] = ("0", "0", "0"),
) -> Finished:
    where = (*placed(*at), f"rollout.pipeline_stage_num={groups}")
    run = train("hybrid_ppo_cartpole", output, *DICTATION, *where, *overrides)
    assert run.code == 0, run.err
    return run


def test_a_chunk_is_learned_and_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = learn(
        tmp_path, TRANSFORMER, "runner.total_iterations=60", "runner.stop_at_return=3.8"
    )
    first = run.metrics()[0]
    assert first["env/return"] < 2.5  # by chance it is two of four
    assert (
        first["env/steps"],
        first["env/episode_length"],
        first["actor/samples"],
    ) == (32 * 16 * 4, 4, 32 * 16)
    assert first["env_steps"] == first["env/steps"]
    assert first["env/steps_per_s"] == pytest.approx(
        first["env/steps"] / first["time/iteration_s"]
    )
    assert run.summary()["return_last"] >= 3.8
    signs = np.array([[1, -1, -1, 1], [-1, 1, 1, 1]], np.float32)
    assert rlplace.load_policy(run.folder).act(signs).tolist() == [
        [1, 0, 0, 1],
        [0, 1, 1, 1],
    ]
    capsys.readouterr()
    assert evaluate([str(run.folder), "episodes=32", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["return"]["mean"] >= 3.8


def test_the_placement_changes_nothing(tmp_path: Path) -> None:
    """Any network decides chunks; episodes of five steps end within them."""
    found = []
    for name, at, groups in (
        ("one", ("0", "0", "0"), 1),
        ("many", ("0", "0-1", "1-2"), 2),
    ):
        env = ("env.id=tests.gyms:Counter-v0", "+env.kwargs={terminate_at: 5}")
        run = learn(
            tmp_path / name, *env, "runner.total_iterations=3", groups=groups, at=at
        )
        found.append(
            [
                [row[key] for key in ("actor/policy_loss", "actor/entropy")]
                for row in run.metrics()
            ]
        )
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3, atol=1e-6)
