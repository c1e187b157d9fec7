"""Configs of what policies see and do: each runs where its library is installed. Their results stand in the docs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.e2e.training import train

NEEDED = {
    "cartpole_memory": "gymnasium",
    "minigrid": "minigrid",
    "fetch_reach": "gymnasium_robotics",
    "lunar_lander": "Box2D",
    "pong": "ale_py",
}
SLOW = {"cartpole_memory", "minigrid", "pong"}
SMALL = (
    "env.total_num_envs=8",
    "algorithm.rollout_steps=32",
    "algorithm.epochs=1",
    "algorithm.num_minibatches=2",
)


@pytest.mark.parametrize(
    "name",
    [
        # Runs with a memory are in test_recurrent_inline.py, and with images in test_policies_inline.py.
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in NEEDED
    ],
)
def test_two_iterations_run(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(NEEDED[name]) is None:
        pytest.skip(f"needs {NEEDED[name]}")
    run = train(name, tmp_path, *SMALL, "runner.total_iterations=2")
    assert run.code == 0, run.err
    assert [row["actor/samples"] for row in run.metrics()] == [8 * 32] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "goal"),
    [("cartpole_memory", 400), ("minigrid", 0.93), ("fetch_reach", -2.0)],
)
def test_it_is_learned_as_the_guide_says(
    name: str, goal: float, tmp_path: Path
) -> None:
    if importlib.util.find_spec(NEEDED[name]) is None:
        pytest.skip(f"needs {NEEDED[name]}")
    run = train(name, tmp_path)
    assert run.code == 0, run.err
    assert run.summary()["return_last"] >= goal
