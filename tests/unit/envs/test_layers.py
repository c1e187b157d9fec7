"""What is below wrappers: observations are checked before a wrapper reads them, and returns are of own rewards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.spaces import Box

from rlplace.config.blocks.simulator import SimulatorEnvConfig, WrapperConfig
from rlplace.envs.contract import Remarking
from rlplace.envs.gymnasium_vector import GymnasiumVector
from rlplace.envs.layers import InnerCheck
from rlplace.envs.registry import make_simulator
from rlplace.errors import SimulatorError
from tests.odd_gyms import BYTES, RIGHT, Odd

Wrap = Callable[[Any], Any]
PARTS = Box(-1.0, 1.0, (1,))


def stacked(env: Any) -> Any:
    return wrappers.FrameStackObservation(env, 2)


def rescaled(env: Any) -> Any:
    return wrappers.RescaleObservation(env, np.float32(0), np.float32(1))


def halves(env: Any) -> Any:
    return wrappers.ResizeObservation(env, (18, 18))


class Plain(gymnasium.ObservationWrapper[Any, Any, Any]):
    """A user's wrapper that changes nothing."""

    def observation(self, observation: Any) -> Any:
        return observation


class Twice(gymnasium.ObservationWrapper[Any, Any, Any]):
    """A user's wrapper that uses an attribute of its environment."""

    def observation(self, observation: Any) -> Any:
        self.env.seen = True  # type: ignore[attr-defined]
        return np.broadcast_to(observation, (2,)) * self.env._step  # type: ignore[attr-defined]


def vector(wrap: Wrap, rows: int = 2, **odd: Any) -> GymnasiumVector:
    made = [wrap(Odd(**odd)) for _ in range(rows)]
    return GymnasiumVector(made, max_episode_steps=7, name="odd:Odd")


def played(envs: GymnasiumVector, steps: int = 4) -> list[Any]:
    results: list[Any] = [envs.reset([0, 1])]
    results += [envs.step(np.zeros(2, np.int64)) for _ in range(steps)]
    return results


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize(
    ("space", "shown", "wrap"),
    [
        ("choice", -1, wrappers.FlattenObservation),
        ("choice", -1, stacked),
        ("image", BYTES / 255, wrappers.FlattenObservation),
        ("image", BYTES / 255, wrappers.GrayscaleObservation),
        ("image", BYTES / 255, stacked),
        ("image", BYTES / 255, halves),
        ("pair", RIGHT[:1], wrappers.NormalizeObservation),
        ("pair", RIGHT[:1], rescaled),
        ("pair", RIGHT[:1], stacked),
        ("nested", {"arm": {"place": RIGHT}}, wrappers.FlattenObservation),
        # Others between that change nothing
        (
            "choice",
            -1,
            lambda env: wrappers.FlattenObservation(
                wrappers.TimeLimit(wrappers.ClipReward(env, -1, 1), 9)
            ),
        ),
        # The innermost one is the first that reads
        ("choice", -1, lambda env: Plain(wrappers.FlattenObservation(env))),
    ],
)
def test_a_wrapper_makes_nothing_of_a_wrong_observation(
    space: str, shown: Any, wrap: Wrap, at: int
) -> None:
    envs = vector(wrap, space=space, shown=shown, at=at)
    with pytest.raises(SimulatorError) as caught:
        played(envs)
    assert caught.value.code == "environment-interface"
    assert "odd:Odd" in str(caught.value)


def test_chunks_of_actions_are_checked_too() -> None:
    config = SimulatorEnvConfig(
        id="tests.odd_gyms:Odd",
        kwargs={"space": "choice", "shown": -1, "at": 2},
        wrappers=(WrapperConfig(name="gymnasium.wrappers:FlattenObservation"),),
    )
    envs = make_simulator(config, 1, 3)
    envs.reset([0])
    with pytest.raises(SimulatorError, match="not in its space"):
        envs.step(np.zeros((1, 3), np.int64))


@pytest.mark.parametrize(
    ("space", "wrap", "shape"),
    [
        ("image", wrappers.FlattenObservation, (36 * 36 * 3,)),
        ("image", wrappers.GrayscaleObservation, (36, 36)),
        ("image", halves, (18, 18, 3)),
        ("pair", stacked, (2, 2)),
        ("choice", wrappers.FlattenObservation, (5,)),
        ("nested", wrappers.FlattenObservation, (2 + 36 * 36 * 3,)),
        (
            "pair",
            lambda env: wrappers.TransformObservation(env, lambda o: o[:1], PARTS),
            (1,),
        ),
        ("tuple", wrappers.FlattenObservation, (5,)),
    ],
)
def test_a_wrapper_may_change_shapes(
    space: str, wrap: Wrap, shape: tuple[int, ...]
) -> None:
    envs = vector(wrap, space=space)
    assert played(envs)[-1].observations.shape == (2, *shape)
    assert list(envs.remarks) == []


def test_what_a_wrapper_of_the_user_may_mend_is_said_once() -> None:
    """Its environment declares something else than it shows: the wrapper may be there for that."""
    for wrap in (
        Twice,
        lambda env: wrappers.TransformObservation(
            env, lambda o: np.broadcast_to(o, (2,)), None
        ),
    ):
        envs = vector(wrap, shown=RIGHT[:1])
        assert isinstance(envs, Remarking)
        played(envs)
        (remark,) = envs.remarks
        assert "not in its space" in remark
        assert "numbers of shape (2,)" in remark


def test_a_wrapper_finds_the_attributes_of_its_environment() -> None:
    envs = vector(Twice)
    played(envs)
    env: Any = envs._envs[0]
    assert isinstance(env.env, InnerCheck)
    assert env.unwrapped.seen
    again = copy.deepcopy(env)
    again.step(0)
    assert (again.unwrapped._step, env.unwrapped._step) == (5, 4)
    with pytest.raises(AttributeError):
        _ = env.env.nothing


# ── rewards ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Vectors(Odd):
    """Has rewards of two numbers."""

    def step(self, action: Any) -> Any:
        shown, _, *rest = super().step(action)
        return shown, np.array([1.0, 2.0]), *rest


class Summed(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> float:
        return float(np.sum(reward))


class Task(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A task on an environment that has none."""

    def step(self, action: Any) -> Any:
        shown, _, *rest = self.env.step(action)
        return shown, 5.0, *rest


class Skipping(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Makes two steps at once, and adds their rewards."""

    def step(self, action: Any) -> Any:
        _, first, *_ = self.env.step(action)
        shown, second, *rest = self.env.step(action)
        return shown, float(first) + float(second), *rest


def skipped(**odd: Any) -> Any:
    """Two steps of the environment at once, outside of a wrapper that changes rewards."""
    return Skipping(wrappers.ClipReward(Odd(**odd), -1.0, 1.0))


def normalized(**odd: Any) -> Any:
    return wrappers.NormalizeReward(Odd(**odd))


def scaled(**odd: Any) -> Any:
    return wrappers.TimeLimit(
        wrappers.TransformReward(
            wrappers.ClipReward(Odd(**odd), -1.0, 1.0), lambda r: 0.01 * r
        ),
        99,
    )


def task(**odd: Any) -> Any:
    return wrappers.NormalizeReward(Task(Odd(**odd)))


def vectors(**odd: Any) -> Any:
    return Summed(Vectors(**odd))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("make", "total"),
    [
        ("normalized", 14.0),
        ("scaled", 14.0),
        ("task", 35.0),
        ("vectors", 21.0),
        ("skipped", 28.0),
    ],
)
def test_returns_are_of_the_rewards_below_wrappers_within_a_factory(
    make: str, total: float, wrapped: bool
) -> None:
    outer = WrapperConfig(name="gymnasium.wrappers:NormalizeReward")
    config = SimulatorEnvConfig(
        id=f"{__name__}:{make}",
        kwargs={"reward": 2.0},
        max_episode_steps=7,
        wrappers=(outer,) if wrapped else (),
    )
    envs = make_simulator(config, 2, 1)
    envs.reset([0, 1])
    results = [envs.step(np.zeros(2, np.int64)) for _ in range(7)]
    if make == "vectors" and wrapped:
        # There is no number below the wrapper that makes one
        assert results[-1].episode_returns[0] != total
        return
    assert list(results[-1].episode_returns) == [total, total]
    learned = sum(float(result.rewards[0]) for result in results)
    assert learned != total or make == "vectors"


def skipping(**odd: Any) -> Any:
    return Skipping(Odd(**odd))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("make", "said"), [("task", "Task: 5 for 2"), ("skipping", ""), ("scaled", "")]
)
def test_a_wrapper_of_the_user_that_changes_rewards_is_said(
    make: str, said: str, wrapped: bool
) -> None:
    """Its rewards count, since it may be a part of the task. In env.wrappers they would not."""
    outer = WrapperConfig(name=f"{__name__}:Task")
    config = SimulatorEnvConfig(
        id=f"{__name__}:{make}",
        kwargs={"reward": 2.0},
        max_episode_steps=7,
        wrappers=(outer,) if wrapped else (),
    )
    envs = make_simulator(config, 2, 1)
    assert isinstance(envs, Remarking)
    envs.reset([0, 1])
    for _ in range(3):
        envs.step(np.zeros(2, np.int64))
    told = [remark for remark in envs.remarks if "changes rewards" in remark]
    assert len(told) == bool(said)
    assert all(said in remark for remark in told)
