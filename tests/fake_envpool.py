"""A stand-in for the library EnvPool, with its interface (1.2) and small environments; the library has 0.7 GB.

The random numbers of an environment follow from its seed alone. An environment that has ended has to be reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

IDS = ("Walk-v5", "Game-v5")


def list_all_envs() -> list[str]:
    return list(IDS)


def make_gymnasium(task_id: str, **kwargs: Any) -> Pool:
    return (Game if task_id == "Game-v5" else Pool)(**kwargs)


class Pool:
    """Observations are (luck of the episode, step). An episode is terminated after `ends` steps."""

    observation_space = Box(0.0, 1000.0, (2,))
    action_space = Discrete(2)

    def __init__(
        self,
        *,
        num_envs: int,
        batch_size: int,
        seed: Sequence[int],
        num_threads: int,
        max_episode_steps: int = 1000,
        ends: int = 1000,
        scale: float = 1.0,
    ) -> None:
        # As EnvPool's registry requires it
        assert batch_size == num_envs == len(seed)
        self._randoms = [np.random.default_rng(each) for each in seed]
        self._luck = np.zeros(num_envs)
        self._step = np.zeros(num_envs, np.int64)
        self._done = np.ones(num_envs, np.bool_)
        self._limit, self._ends, self._scale = max_episode_steps, ends, scale
        self.closed = False

    def reset(self, rows: NDArray[Any]) -> tuple[NDArray[Any], dict[str, Any]]:
        for row in rows:
            self._luck[row] = self._randoms[row].integers(1000)
            self._step[row] = 0
            self._done[row] = False
        return self._shown()[rows], {"env_id": np.array(rows)}

    def step(self, actions: NDArray[Any]) -> tuple[Any, ...]:
        assert not self._done.any(), "an environment that has ended has to be reset"
        self._step += 1
        truncated = self._step >= self._limit
        terminated = (self._step >= self._ends) & ~truncated
        self._done = terminated | truncated
        rewards = np.where(actions, 1.0, -1.0).astype(np.float32)
        return self._shown(), rewards, terminated, truncated, self._info(rewards)

    def close(self) -> None:
        self.closed = True

    def _info(self, rewards: NDArray[Any]) -> dict[str, Any]:
        return {"env_id": np.arange(len(rewards)), "elapsed_step": self._step}

    def _shown(self) -> NDArray[np.float32]:
        shown = np.stack([self._luck, self._step], axis=1)
        return (self._scale * shown).astype(np.float32)


class Game(Pool):
    """An Atari game: rewards of 7 are clipped to 1, and each life is an episode with `episodic_life`."""

    def __init__(self, *, episodic_life: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._of_lives = episodic_life

    def _info(self, rewards: NDArray[Any]) -> dict[str, Any]:
        over = np.full(len(rewards), not self._of_lives)
        more = {"reward": 7 * rewards, "terminated": (over & self._done).astype(int)}
        return super()._info(rewards) | more
