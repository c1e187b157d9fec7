"""EnvPool's simulators keep the contract; the library is an extra of its own."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
import pytest

from rlplace.config.blocks.simulator import SimulatorEnvConfig, WrapperConfig
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.envs.registry import check, describe, find_adapter, row_seeds
from rlplace.errors import ConfigError
from rlplace.extras import install_command
from tests import fake_envpool

installed = pytest.mark.skipif(
    importlib.util.find_spec("envpool") is None, reason="needs rlplace[envpool]"
)


def config(
    name: str = "CartPole-v1", limit: int | None = None, **kwargs: object
) -> SimulatorEnvConfig:
    return SimulatorEnvConfig(
        kind="envpool", id=name, max_episode_steps=limit, kwargs=kwargs
    )


def test_without_envpool_a_plan_is_possible_and_a_run_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    assert not check(config())
    with pytest.raises(ConfigError) as caught:
        describe(config())
    (problem,) = caught.value.problems
    assert (problem.code, problem.fix) == (
        "missing-library",
        install_command("envpool"),
    )


@installed
def test_describe() -> None:
    assert describe(config()) == Spaces(
        observation_shape=(4,), actions=DiscreteActions(n=2)
    )
    bounds = ContinuousActions(shape=(1,), low=(-2.0,), high=(2.0,))
    assert describe(config("Pendulum-v1")) == Spaces(
        observation_shape=(3,), actions=bounds
    )


@installed
@pytest.mark.parametrize(
    ("broken", "code"),
    [
        (config("CartPole-v9"), "unknown-simulator"),
        (config(gravty=9.8), "bad-simulator-kwargs"),
        (config(seed=3), "bad-simulator-kwargs"),  # ours to give
        (config("MiniGrid-Empty-5x5-v0"), "unsupported-space"),
    ],
)
def test_what_cannot_run(broken: SimulatorEnvConfig, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        describe(broken)
    assert [problem.code for problem in caught.value.problems] == [code]


@installed
def test_a_row_follows_from_its_seed_and_episodes_end_in_the_step_that_ends_them() -> (
    None
):
    pair = [find_adapter("envpool").make(config(limit=12), rows) for rows in (3, 2)]
    three, two = (
        each.reset(seeds) for each, seeds in zip(pair, ([5, 6, 7], [7, 5]), strict=True)
    )
    assert np.array_equal(three[[2, 0]], two)
    lengths, cut = np.zeros(3, int), 0
    for step in range(60):
        actions = np.array([step % 2, 1, 0])  # the first balances, the others fall
        wide, narrow = pair[0].step(actions), pair[1].step(actions[[2, 0]])
        assert np.array_equal(wide.observations[[2, 0]], narrow.observations)
        assert not (wide.terminated & wide.truncated).any()
        assert len(wide.final_observations) == wide.truncated.sum()
        lengths += 1
        ended = wide.terminated | wide.truncated
        assert list(wide.episode_lengths) == lengths[ended].tolist()
        assert (
            list(wide.episode_returns) == lengths[ended].tolist()
        )  # one point for each step
        assert (lengths[wide.truncated] == 12).all()
        assert (
            np.abs(wide.observations[ended]) <= 0.05
        ).all()  # the first of the next episode
        lengths[ended] = 0
        cut += int(wide.truncated.sum())
    assert cut >= 3
    begun = pair[0].restart([1, 0])
    assert begun.shape == (2, 4)
    assert not pair[0].step(np.array([0, 1, 0])).terminated[1]
    for each in pair:
        each.close()


@installed
def test_actions_are_clipped_to_the_bounds() -> None:
    pair = [find_adapter("envpool").make(config("Pendulum-v1"), 1) for _ in range(2)]
    for each in pair:
        each.reset([3])
    far, at_bound = (
        each.step(np.full((1, 1), action, np.float32))
        for each, action in zip(pair, (9.0, 2.0), strict=True)
    )
    assert np.array_equal(far.observations, at_bound.observations)
    assert far.rewards == at_bound.rewards
    for each in pair:
        each.close()


def test_wrappers_are_refused() -> None:
    wrapper = WrapperConfig(name="gymnasium.wrappers:ClipReward")
    (found,) = check(
        SimulatorEnvConfig(kind="envpool", id="Pong-v5", wrappers=(wrapper,))
    )
    assert (found.code, found.fix) == ("wrappers-not-applied", "wrappers: []")


# ── with a stand-in for the library ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", fake_envpool)


def made(rows: int, name: str = "Walk-v5", **fields: Any) -> Any:
    return find_adapter("envpool").make(config(name, **fields), rows)


@pytest.mark.usefixtures("fake")
def test_each_row_has_the_episodes_of_its_own_seed() -> None:
    envs, other = made(3, ends=4), made(2, ends=4)
    seeds = row_seeds(0, 0, 3)
    first = envs.reset(seeds)
    assert len(set(first[:, 0].tolist())) == 3
    # The same seeds give the same first observations, and rows do not depend on their neighbours
    assert np.array_equal(envs.reset(seeds), first)
    assert np.array_equal(other.reset(seeds[1:]), first[1:])
    for _ in range(12):
        wide, narrow = envs.step(np.zeros(3)), other.step(np.zeros(2))
        assert np.array_equal(wide.observations[1:], narrow.observations)
    # Episodes of a row differ
    assert (envs.step(np.zeros(3)).observations[:, 0] != first[:, 0]).any()


@pytest.mark.usefixtures("fake")
def test_a_time_limit_truncates_and_shows_the_last_observation() -> None:
    envs = made(2, limit=3, ends=4)
    first = envs.reset([5, 6])
    results = [envs.step(np.ones(2)) for _ in range(3)]
    assert [result.truncated.any() for result in results] == [False, False, True]
    end = results[-1]
    assert end.truncated.all()
    assert not end.terminated.any()
    assert end.final_observations.tolist() == [[luck, 3.0] for luck in first[:, 0]]
    assert end.observations[:, 1].tolist() == [0.0, 0.0]
    assert end.episode_lengths == [3, 3]
    assert end.episode_returns == [3.0, 3.0]


@pytest.mark.usefixtures("fake")
def test_a_time_limit_that_terminates_and_numbers_out_of_bounds_are_said() -> None:
    envs = made(4, ends=3, scale=-1.0)
    envs.reset([5, 6, 7, 8])
    for _ in range(18):
        envs.step(np.zeros(4))
    said = " ".join(envs.remarks)
    assert "terminated after the same number of steps: 3 steps" in said
    assert "outside of its observation_space" in said
    well = made(4, limit=3)
    well.reset([5, 6, 7, 8])
    for _ in range(18):
        well.step(np.zeros(4))
    assert not well.remarks


@pytest.mark.usefixtures("fake")
def test_returns_are_of_the_rewards_of_the_game_and_lives_are_said() -> None:
    envs = made(2, "Game-v5", ends=3, episodic_life=True)
    envs.reset([5, 6])
    results = [envs.step(np.ones(2)) for _ in range(3)]
    # Learned is from the clipped rewards
    assert results[0].rewards.tolist() == [1.0, 1.0]
    assert results[2].episode_returns == [21.0, 21.0]
    (said,) = envs.remarks
    assert "each life of Game-v5 is an episode" in said
    whole = made(2, "Game-v5", ends=3)
    whole.reset([5, 6])
    for _ in range(3):
        whole.step(np.ones(2))
    assert not whole.remarks
