"""Numbers of observations that float32 does not tell apart are told once, and ordinary float64 is not."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.spaces import Box, Dict, Discrete

from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.envs.gymnasium_vector import GymnasiumVector
from rlplace.envs.pettingzoo_vector import PettingZooVector
from rlplace.envs.registry import make_simulator
from tests.parallel_envs import Race


class Far(gymnasium.Env[Any, Any]):
    """Shows `offset` + `each` * step, or + a luck of 0 or 1 if `each` is 0, in `dtype`, alone or as an entry."""

    action_space = Discrete(2)

    def __init__(
        self, offset: float, each: float, dtype: Any = np.float64, entry: bool = False
    ) -> None:
        space = Box(-np.inf, np.inf, (2,), np.float64)
        if np.dtype(dtype).kind == "i":
            space = Box(0, np.iinfo(dtype).max, (2,), dtype)
        self.observation_space = Dict({"at": space, "n": Discrete(2)})
        if not entry:
            self.observation_space = space
        self._offset, self._each, self._dtype, self._entry = offset, each, dtype, entry

    def reset(self, **options: Any) -> Any:
        super().reset(seed=options.get("seed"))
        self._step = 0
        return self._show(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        return self._show(), 1.0, False, self._step == 10, {}

    def _show(self) -> Any:
        more = self._each * self._step or self.np_random.integers(2)
        shown = np.array([0.5, self._offset + more], self._dtype)
        return {"at": shown, "n": 0} if self._entry else shown


def remarks(*envs: gymnasium.Env[Any, Any], steps: int = 300) -> list[str]:
    vector = GymnasiumVector(envs, max_episode_steps=200)
    vector.reset(list(range(len(envs))))
    space: Any = envs[0].action_space
    space.seed(0)
    for _ in range(steps):
        vector.step(np.array([space.sample() for _ in envs]))
    return list(vector.remarks)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("entry", [False, True])
@pytest.mark.parametrize(
    ("offset", "each", "dtype"),
    [
        (1.7e9, 1.0, np.float64),  # seconds since 1970
        (1.7e9, 0.0, np.float64),  # and who has to see one of two
        (2.0**33, 1.0, np.int64),
        (2.0**24, 1.0, np.int32),
        (52.5, 1.5e-6, np.float64),  # degrees of a place
        (4.5e6, 0.1, np.float64),  # meters of a grid
    ],
)
def test_numbers_that_become_equal_are_told(
    offset: float, each: float, dtype: Any, entry: bool, rows: int
) -> None:
    made = [Far(offset, each, dtype, entry) for _ in range(rows)]
    (remark,) = remarks(*made)
    assert "equal as float32" in remark
    assert "TransformObservation" in remark
    assert f"shown{['at'] if entry else ''} - " in remark


@pytest.mark.parametrize(
    ("offset", "each", "dtype"),
    [
        (0.0, 0.0, np.float64),
        (1000.0, 0.01, np.float64),
        (52.5, 1e-3, np.float64),
        (1.0, 1e-9, np.float64),  # rounding of a simulator
        (0.0, 1.0, np.int64),
        (2.0**22, 1.0, np.int64),
        (1.7e9, 1000.0, np.float64),
        (1.7e9, 1.0, np.float32),  # is float32 in the environment
    ],
)
def test_numbers_that_stay_different_are_not(
    offset: float, each: float, dtype: Any
) -> None:
    assert remarks(Far(offset, each, dtype), Far(offset, each, dtype)) == []


def test_the_fix_that_is_told_mends_it() -> None:
    env = wrappers.TransformObservation(Far(1.7e9, 0.0), lambda s: s - 1.7e9, None)
    assert remarks(env) == []


@pytest.mark.parametrize(
    "name",
    [
        "Acrobot-v1",
        "Pendulum-v1",
        "MountainCarContinuous-v0",
        "Reacher-v5",
        "Pusher-v5",
        "InvertedDoublePendulum-v5",
        "HalfCheetah-v5",
        "Hopper-v5",
        "Swimmer-v5",
        "Walker2d-v5",
        "Ant-v5",
        "Humanoid-v5",
        "HumanoidStandup-v5",
    ],
)
def test_environments_of_gymnasium_give_no_alarm(name: str) -> None:
    envs: Any = make_simulator(SimulatorEnvConfig(id=name), 2, 1)
    envs.reset([0, 1])
    space = envs._envs[0].action_space
    space.seed(0)
    for step in range(300):
        action = space.sample() if step < 150 else 0 * space.sample()
        envs.step(np.stack([action, action]))
    assert [each for each in envs.remarks if "float32" in each] == []
    envs.close()


class Clocks(Race):
    """Shows seconds since 1970 to its agents."""

    def observation_space(self, agent: str) -> Box:
        return Box(-np.inf, np.inf, (3,), np.float64)

    def _show(self, agents: Any) -> Any:
        seconds = super()._show(agents)
        return {agent: seconds[agent].astype(np.float64) + 1.7e9 for agent in agents}


def test_numbers_of_agents_are_told() -> None:
    envs = PettingZooVector(
        [Clocks((9, 9, 9))], max_episode_steps=None, name="tests:Clocks"
    )
    envs.reset([0, 0, 0])
    for _ in range(12):
        envs.step(np.zeros(3, np.int64))
    (remark,) = envs.remarks
    assert "tests:Clocks returns different numbers" in remark
