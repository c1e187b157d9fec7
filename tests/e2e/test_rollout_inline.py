"""The rollout stage over real simulators, policies and channels: the same samples in every layout, and nothing lost."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from rlplace.checkpoints import written
from rlplace.trajectory import Trajectory, concat
from tests.rollout_stage import Layout, RolloutStage

STEPS, ITERATIONS, ROWS = 10, 3, 24
FLOATS = (
    "actions",
    "logprobs",
    "values",
    "rewards",
    "observations",
    "last_observations",
    "final_observations",
)
# cuts in every iteration, ends in most
PENDULUM = {"id": "InvertedPendulum-v5", "max_episode_steps": 8, "total_num_envs": ROWS}
CARTPOLE = {"id": "CartPole-v1", "max_episode_steps": 12, "total_num_envs": ROWS}
LAYOUTS = [
    Layout(env=2),
    Layout(rollout=3),
    Layout(stage_groups=2),
    Layout(env=1, rollout=4, actor=3, stage_groups=2),
    Layout(env=4, rollout=3, actor=8, stage_groups=3),
]


def sampled(
    layout: Layout,
    env: dict[str, object],
    *,
    first: int = 0,
    load: Path | None = None,
    save: Path | None = None,
) -> list[Trajectory]:
    """One trajectory of all rows per iteration; new weights before each, as a sync would bring.

    Env workers save after the first iteration, and load before the one that is `first`.
    """
    stage = RolloutStage(layout, env, steps=STEPS)
    for worker in stage.env if load else ():
        worker.read_state(str(load))
    whole = []
    for iteration in range(first, ITERATIONS):
        stage.load(seed=iteration, version=iteration)
        stage.run(iteration)
        whole.append(
            concat([piece for rank in stage.trajectories().values() for piece in rank])
        )
        assert all(
            channel.stats().depth_items == 0 for channel in stage.channels.values()
        )
        for worker in stage.env if save and iteration == 0 else ():
            worker.write_state(str(save))
    stage.close()
    return whole


@pytest.fixture(
    scope="module", params=[PENDULUM, CARTPOLE], ids=["continuous", "discrete"]
)
def env(request: pytest.FixtureRequest) -> dict[str, object]:
    return dict(request.param)


@pytest.fixture(scope="module")
def alone(env: dict[str, object]) -> list[Trajectory]:
    """What one env and one rollout rank sample."""
    return sampled(Layout(), env)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_samples_the_same(
    layout: Layout, env: dict[str, object], alone: list[Trajectory]
) -> None:
    for iteration, (expected, got) in enumerate(
        zip(alone, sampled(layout, env), strict=True)
    ):
        assert (got.first_row, got.rows, got.steps) == (0, ROWS, STEPS)
        assert (got.version_min, got.version_max) == (iteration, iteration)
        for name in ("terminated", "truncated"):
            assert np.array_equal(getattr(got, name), getattr(expected, name)), name
        for name in FLOATS:
            np.testing.assert_allclose(
                getattr(got, name),
                getattr(expected, name),
                rtol=1e-3,
                atol=1e-4,
                err_msg=name,
            )


@pytest.mark.parametrize("layout", LAYOUTS[:-2] + LAYOUTS[-1:], ids=str)
def test_every_layout_goes_on_from_the_episodes_of_another(
    layout: Layout, env: dict[str, object], alone: list[Trajectory], tmp_path: Path
) -> None:
    sampled(LAYOUTS[-2], env, save=tmp_path)
    assert written(tmp_path, LAYOUTS[-2].env)
    for expected, got in zip(
        alone[1:], sampled(layout, env, first=1, load=tmp_path), strict=True
    ):
        assert np.array_equal(got.terminated, expected.terminated)
        for name in FLOATS:
            np.testing.assert_allclose(
                getattr(got, name),
                getattr(expected, name),
                rtol=1e-3,
                atol=1e-4,
                err_msg=name,
            )


def test_the_samples_hold_together(alone: list[Trajectory]) -> None:
    """Iterations join without a gap, episodes end and are cut, and final observations are no first ones."""
    for before, after in itertools.pairwise(alone):
        assert np.array_equal(before.last_observations, after.observations[0])
    assert sum(int(t.terminated.sum()) for t in alone) > 0
    assert sum(int(t.truncated.sum()) for t in alone) > 0
    first = alone[0]
    cuts = np.argwhere(first.truncated[:-1])
    following = first.observations[cuts[:, 0] + 1, cuts[:, 1]]
    assert not np.any(
        np.all(first.final_observations[: len(cuts)] == following, axis=1)
    )


def test_the_same_seed_gives_the_same_bits(env: dict[str, object]) -> None:
    layout = Layout(env=2, rollout=2, stage_groups=2)
    for a, b in zip(sampled(layout, env), sampled(layout, env), strict=True):
        assert np.array_equal(a.observations, b.observations)
        assert np.array_equal(a.actions, b.actions)
        assert np.array_equal(a.logprobs, b.logprobs)
