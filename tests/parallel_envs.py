"""Small parallel environments with PettingZoo's interface, which is not installed where tests run."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

Shown = dict[str, NDArray[np.float32]]


class Race:
    """Agent n ends after `ends`[n] steps; with a negative number it is truncated. Shows (agent, step, luck of a reset).

    An agent is rewarded by its action and a tenth of the step.
    """

    def __init__(self, ends: tuple[int, ...] = (2, 4, -3)) -> None:
        self._ends = ends
        self.possible_agents = [f"agent_{n}" for n in range(len(ends))]
        self.agents: list[str] = []
        self.resets = 0
        self.closed = False
        self.taken: list[dict[str, Any]] = []

    def observation_space(self, agent: str) -> Box:
        return Box(-100.0, 100.0, (3,))

    def action_space(self, agent: str) -> Discrete:
        return Discrete(3, start=1)

    def reset(
        self, seed: int | None = None, options: Any = None
    ) -> tuple[Shown, dict[str, Any]]:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._luck = float(self._random.integers(50))
        self._step = 0
        self.resets += 1
        self.agents = list(self.possible_agents)
        return self._show(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        assert set(actions) == set(self.agents), "only agents that live act"
        self.taken.append(actions)
        self._step += 1
        living = self.agents
        ends = dict(zip(self.possible_agents, self._ends, strict=True))
        rewards = {agent: actions[agent] + self._step / 10 for agent in living}
        terminations = {agent: ends[agent] == self._step for agent in living}
        truncations = {agent: -ends[agent] == self._step for agent in living}
        shown = self._show(living)
        self.agents = [
            agent
            for agent in living
            if not terminations[agent] and not truncations[agent]
        ]
        return shown, rewards, terminations, truncations, {a: {} for a in living}

    def close(self) -> None:
        self.closed = True

    def _show(self, agents: list[str]) -> Shown:
        places = {agent: n for n, agent in enumerate(self.possible_agents)}
        return {
            agent: np.array([places[agent], self._step, self._luck], np.float32)
            for agent in agents
        }


class Absent(Race):
    """The last agent never takes part; the others end after 2 and 4 steps."""

    def reset(
        self, seed: int | None = None, options: Any = None
    ) -> tuple[Shown, dict[str, Any]]:
        super().reset(seed)
        del self.agents[-1]
        return self._show(self.agents), {agent: {} for agent in self.agents}


class Masking(Race):
    """The info of each agent has a mask of its actions."""

    def reset(
        self, seed: int | None = None, options: Any = None
    ) -> tuple[Shown, dict[str, Any]]:
        shown, _ = super().reset(seed)
        return shown, {agent: {"action_mask": np.ones(3)} for agent in self.agents}


class Constant(Race):
    """Seeds its random numbers with the same number at each reset; all agents end after 3 steps, out of bounds."""

    def __init__(self) -> None:
        super().__init__((3, 3))

    def observation_space(self, agent: str) -> Box:
        return Box(-1.0, 1.0, (3,))

    def reset(
        self, seed: int | None = None, options: Any = None
    ) -> tuple[Shown, dict[str, Any]]:
        return super().reset(3)


class Unequal(Race):
    """The last agent sees more and can do less."""

    def observation_space(self, agent: str) -> Box:
        return Box(-1.0, 1.0, (4 if agent == self.possible_agents[-1] else 3,))

    def action_space(self, agent: str) -> Discrete:
        return Discrete(2 if agent == self.possible_agents[-1] else 3)


class Forgetful(Race):
    """Gives no reward to the first agent."""

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        shown, rewards, *others = super().step(actions)
        del rewards["agent_0"]
        return (shown, rewards, *others)


class Pushing(Race):
    """Two agents that live for 20 steps and see whether the action 1 or the action 2 is rewarded."""

    def __init__(self) -> None:
        super().__init__((20, 20))

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        places = {agent: n for n, agent in enumerate(self.possible_agents)}
        shown, _, *others = super().step(actions)
        rewards = {a: float(action == 1 + places[a]) for a, action in actions.items()}
        return (shown, rewards, *others)


class Turns(Race):
    """Its agents act one after the other."""

    def agent_iter(self) -> None: ...


class Nobody(Race):
    """Does not say which agents there are."""

    def __init__(self) -> None:
        super().__init__()
        del self.possible_agents


parallel_env = Race
