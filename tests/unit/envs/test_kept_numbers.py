"""Running statistics of a user's wrapper: they go on after a resume, are played with, or it is said."""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.wrappers import NormalizeObservation

from rlplace.config.blocks.simulator import SimulatorEnvConfig, WrapperConfig
from rlplace.envs import kept_numbers
from rlplace.envs.contract import Normalizing
from rlplace.envs.gymnasium_vector import GymnasiumVector
from rlplace.envs.play import play
from rlplace.envs.registry import describe, make_simulator

ROWS = 2


class Plain(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Normalizes by numbers of its own: of how many observations, their mean and their variance."""

    def __init__(self, env: Any, scale: float = 1.0) -> None:
        super().__init__(env)
        shape = env.observation_space.shape
        self.n, self.m, self.v = 0, np.zeros(shape), np.ones(shape)
        self.scale = scale
        self.observation_space = Box(-np.inf, np.inf, shape, np.float32)

    def observation(self, observation: Any) -> Any:
        self.n += 1
        off = observation - self.m
        self.m = self.m + off / self.n
        self.v = self.v + (off * (observation - self.m) - self.v) / self.n
        shown = self.scale * (observation - self.m) / np.sqrt(self.v + 1e-8)
        return shown.astype(np.float32)


class Listed(Plain):
    """Has a list, too."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.seen: list[Any] = []

    def observation(self, observation: Any) -> Any:
        self.seen.append(observation)
        return super().observation(observation)


class Window(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Normalizes by the last observations, which it keeps in a deque, and counts in a list how many it has seen."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.last: deque[Any] = deque(maxlen=30)
        self.counts: list[int] = []
        shape = env.observation_space.shape
        self.observation_space = Box(-np.inf, np.inf, shape, np.float32)

    def observation(self, observation: Any) -> Any:
        self.last.append(np.array(observation))
        self.counts.append(len(self.last))
        shown = observation - np.mean(self.last, 0)
        return (shown / (np.std(self.last, 0) + 1e-8)).astype(np.float32)


class Mapped(Plain):
    """Has a mapping, too."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.by_name: dict[str, float] = {}

    def observation(self, observation: Any) -> Any:
        self.by_name["last"] = float(observation[0])
        return super().observation(observation)


class Running:
    def __init__(self, shape: Any) -> None:
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, seen: Any) -> None:
        self.count += 1
        off = seen - self.mean
        self.mean = self.mean + off / self.count
        self.var = self.var + (off * (seen - self.mean) - self.var) / self.count


class WithObject(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Normalizes by an object with running statistics; with `within`, it is in a mapping."""

    def __init__(self, env: Any, within: bool = False) -> None:
        super().__init__(env)
        running = Running(env.observation_space.shape)
        self.running_mean: Any = {"all": running} if within else running
        self.observation_space = Box(-np.inf, np.inf, running.mean.shape, np.float32)

    @property
    def running(self) -> Running:
        found = self.running_mean
        return found["all"] if isinstance(found, dict) else found

    def observation(self, observation: Any) -> Any:
        self.running.update(observation)
        by = np.sqrt(self.running.var + 1e-8)
        return ((observation - self.running.mean) / by).astype(np.float32)


class Derived(NormalizeObservation[Any, Any, Any]):
    """A user's subclass."""


def made(wrapper: str, **kwargs: Any) -> GymnasiumVector:
    config = SimulatorEnvConfig(
        id="Pendulum-v1",
        max_episode_steps=25,
        wrappers=(WrapperConfig(name=f"{__name__}:{wrapper}", kwargs=kwargs),),
    )
    envs = make_simulator(config, ROWS, 1)
    assert isinstance(envs, GymnasiumVector)
    envs.reset([3, 4])
    return envs


def trained(wrapper: str, steps: int = 40, **kwargs: Any) -> GymnasiumVector:
    envs = made(wrapper, **kwargs)
    for action in taken(steps):
        envs.step(action)
    return envs


def taken(steps: int) -> list[Any]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal((ROWS, 1)).astype(np.float32) for _ in range(steps)]


def numbers(envs: GymnasiumVector, row: int = 0) -> list[np.ndarray]:
    layer: Any = envs._envs[row]
    if isinstance(layer, Plain):
        return [np.array(layer.n), layer.m, layer.v]
    running = layer.running if isinstance(layer, WithObject) else layer.obs_rms
    return [np.array(running.count), running.mean, running.var]


def near(first: GymnasiumVector, second: GymnasiumVector, least: float) -> bool:
    """Whether the statistics are of as many observations, up to some, and hardly differ."""
    (count, *rest), (other, *others) = numbers(first), numbers(second)
    pairs = zip(rest, others, strict=True)
    return abs(count - other) <= least and all(
        np.allclose(a, b, rtol=0.3, atol=0.3) for a, b in pairs
    )


KINDS = [
    ("Plain", {}),
    ("WithObject", {}),
    ("WithObject", {"within": True}),
    ("Derived", {}),
]


@pytest.mark.parametrize(("wrapper", "kwargs"), KINDS)
def test_statistics_of_a_users_wrapper_go_on(
    wrapper: str, kwargs: dict[str, Any]
) -> None:
    envs = trained(wrapper, **kwargs)
    again = made(wrapper, **kwargs)
    again.restore(envs.row_states())
    # An episode that begins anew shows one more observation
    assert near(again, envs, 1)
    assert list(again.remarks) == []
    # They are its own
    first = numbers(envs)[1].copy()
    for action in taken(5):
        again.step(action)
    assert np.array_equal(numbers(envs)[1], first)


@pytest.mark.parametrize(("wrapper", "kwargs"), KINDS)
def test_a_policy_is_played_with_them(wrapper: str, kwargs: dict[str, Any]) -> None:
    envs = trained(wrapper, **kwargs)
    played = made(wrapper, **kwargs)
    assert isinstance(played, Normalizing)
    played.take_statistics(envs.row_states()[:1])
    for action in taken(10):
        played.step(action)
    changing = wrapper == "Plain"
    assert near(played, envs, 10 if changing else 1)
    (told,) = list(played.remarks) or [""]
    assert ("continue to change: Plain" in told) == changing


def test_numbers_in_lists_go_on() -> None:
    envs = trained("Window")
    layer: Any = envs._envs[0]
    resumed = made("Window")
    resumed.restore(envs.row_states())
    played = made("Window")
    played.take_statistics(envs.row_states())
    for again in (resumed, played):
        other: Any = again._envs[0]
        last = np.array(layer.last)
        # A row that begins a new episode shows one more observation
        more = len(other.counts) - len(layer.counts)
        assert more in (0, 1)
        assert np.array_equal(np.array(other.last)[: 30 - more], last[more:])
        assert other.last.maxlen == 30
        assert other.counts[: len(layer.counts)] == layer.counts
    assert list(resumed.remarks) == []
    (remark,) = played.remarks
    assert "continue to change: Window" in remark


def test_numbers_beside_a_list_of_observations_go_on() -> None:
    envs = trained("Listed")
    again = made("Listed")
    again.restore(envs.row_states())
    assert near(again, envs, 1)
    assert list(again.remarks) == []


@pytest.mark.parametrize("wrapper", ["Mapped", "Listed"])
def test_numbers_beside_a_mapping_begin_anew_and_that_is_said(
    wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so beside a list that is too long."""
    monkeypatch.setattr(kept_numbers, "_MOST", 60)
    envs = trained(wrapper)
    resumed = made(wrapper)
    resumed.restore(envs.row_states())
    played = made(wrapper)
    played.take_statistics(envs.row_states())
    for again in (resumed, played):
        (remark,) = again.remarks
        assert f"start again: {wrapper}" in remark


@pytest.mark.parametrize("states", [[], [{}]])
def test_statistics_that_are_nowhere_are_said(states: list[Any]) -> None:
    played = made("WithObject")
    played.take_statistics(states)
    (remark,) = played.remarks
    assert "start again: WithObject" in remark


def test_a_number_that_did_not_change_is_that_of_the_config() -> None:
    """A run that goes on with another argument of its wrapper has that argument."""
    envs = trained("Plain")
    again = made("Plain", scale=0.5)
    again.restore(envs.row_states())
    layer: Any = again._envs[0]
    assert layer.scale == 0.5


def test_chunks_of_actions_have_them_too() -> None:
    envs = trained("WithObject")
    config = SimulatorEnvConfig(
        id="Pendulum-v1",
        wrappers=(WrapperConfig(name=f"{__name__}:WithObject"),),
    )
    chunks: Any = make_simulator(config, ROWS, 2)
    chunks.reset([0, 1])
    chunks.take_statistics(envs.row_states())
    assert near(chunks._inner, envs, 0)
    assert chunks.row_states()[0].keys() >= {"kept.0.running_mean.mean"}


@pytest.mark.parametrize("wrapper", ["Plain", "WithObject", "Listed", "Window"])
def test_an_evaluation_without_those_of_the_training_says_so(wrapper: str) -> None:
    """So are the evaluations within a training, and those of a policy without its checkpoint."""
    config = SimulatorEnvConfig(
        id="Pendulum-v1",
        max_episode_steps=9,
        wrappers=(WrapperConfig(name=f"{__name__}:{wrapper}"),),
    )
    remarks: list[str] = []
    play(
        config,
        describe(config),
        lambda shown, _: np.zeros((len(shown), 1), np.float32),
        episodes=3,
        seed=0,
        longest=20,
        remarks=remarks,
    )
    (remark,) = remarks
    assert f"start again: {wrapper}" in remark
