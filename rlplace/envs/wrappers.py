"""Wrappers of Gymnasium environments that Gymnasium does not have, for `env.wrappers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray


class OwnRewards(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that remembers the rewards of the environment itself, below all wrappers that change them."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._rewards: list[Any] = []

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, and remember the reward."""
        result = self.env.step(action)
        self._rewards.append(result[1])
        return result

    def take(self) -> list[Any]:
        """Return the rewards since the last call. Wrappers outside may take several steps in one."""
        rewards = self._rewards
        self._rewards = []
        return rewards


class Shown(gymnasium.ObservationWrapper[NDArray[Any], Any, NDArray[Any]]):
    """A wrapper that hides all numbers of an observation except those at `indices`. It is for policies with memory.

    Raises ValueError if observations are not a row of numbers, or if an index is out of range.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], indices: Sequence[int]) -> None:
        super().__init__(env)
        space = env.observation_space
        self._indices = list(indices)
        if (
            not isinstance(space, Box)
            or len(space.shape) != 1
            or not set(self._indices) <= set(range(space.shape[0]))
        ):
            raise ValueError(
                f"no row of numbers with the indices {self._indices}: {space}"
            )
        self.observation_space = Box(
            space.low[self._indices], space.high[self._indices], dtype=space.dtype.type
        )

    def observation(self, observation: NDArray[Any]) -> NDArray[Any]:
        """Return the numbers of an observation at the indices that are not hidden."""
        return np.asarray(observation)[self._indices]
