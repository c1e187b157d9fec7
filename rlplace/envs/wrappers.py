"""Wrappers of Gymnasium environments that Gymnasium does not have, for `env.wrappers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray


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
