"""Environments that change in place what they are given: actions and arguments. Nothing else changes by that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import MultiDiscrete

from rlplace.config.blocks.simulator import SimulatorEnvConfig, WrapperConfig
from rlplace.envs.gymnasium_vector import GymnasiumVector
from rlplace.envs.pettingzoo_vector import PettingZooVector
from rlplace.envs.registry import find_adapter, make_simulator
from tests.gyms import Changing
from tests.parallel_envs import Race

ACTIONS = {
    "many": np.array([[1, 2], [0, 1], [1, 0]]),
    "switches": np.array([[[1, 0], [1, 1]]] * 3),
}


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("space", ["many", "switches"])
def test_actions_stay_as_the_policy_decided_them(space: str, chunk: int) -> None:
    config = SimulatorEnvConfig(id="tests.gyms:Changing-v0", kwargs={"space": space})
    envs = make_simulator(config, 3, chunk)
    envs.reset([0, 1, 2])
    actions = ACTIONS[space].copy()
    if chunk > 1:
        actions = np.stack([actions] * chunk, axis=1)
    before = actions.copy()
    result = envs.step(actions)
    assert np.array_equal(actions, before)
    # It saw them before it changed them
    sums = ACTIONS[space].reshape(3, -1).sum(axis=1)
    assert np.array_equal(result.observations[:, 3], sums)


class Careless(Race):
    """Changes the actions of its agents."""

    def action_space(self, agent: str) -> Any:
        return MultiDiscrete([2, 3])

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        result = super().step({agent: a.sum() for agent, a in actions.items()})
        for action in actions.values():
            action[...] = 0
        return result


def test_actions_of_agents_stay_as_the_policy_decided_them() -> None:
    envs = PettingZooVector([Careless()], max_episode_steps=None, name="careless")
    envs.reset([0, 0, 0])
    actions = ACTIONS["many"].copy()
    envs.step(actions)
    assert np.array_equal(actions, ACTIONS["many"])


def test_each_environment_has_arguments_of_its_own() -> None:
    given: list[int] = []
    config = SimulatorEnvConfig(
        id="tests.gyms:Changing-v0",
        kwargs={"given": given},
        wrappers=(
            WrapperConfig(name=f"{__name__}:Noting", kwargs={"notes": {"steps": [0]}}),
        ),
    )
    envs = find_adapter("gymnasium").make(config, 3)
    assert isinstance(envs, GymnasiumVector)
    for env in envs._envs:
        made: Any = env.unwrapped
        assert isinstance(made, Changing)
        assert made.given == [1]
        assert made.noted == 2
    assert given == []
    assert config.wrappers[0].kwargs == {"notes": {"steps": [0]}}


def Noting(env: Any, notes: dict[str, list[int]]) -> Any:
    notes["steps"].append(0)
    env.unwrapped.noted = len(notes["steps"])
    return env
