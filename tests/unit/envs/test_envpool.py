"""EnvPool's simulators keep the contract; the library is an extra of its own."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest

from rlplace.config.blocks.simulator import SimulatorEnvConfig, WrapperConfig
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.envs.registry import check, describe, find_adapter
from rlplace.errors import ConfigError
from rlplace.extras import install_command

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
