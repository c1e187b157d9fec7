"""Wrappers of Gymnasium environments that Gymnasium itself lacks, for `env.wrappers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray


class Shown(gymnasium.ObservationWrapper[NDArray[Any], Any, NDArray[Any]]):
    """A wrapper that shows only the numbers at `indices`; a policy has to remember the hidden numbers.

    Raises ValueError if the observations are not a row of numbers with these indices.
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
        """Return the numbers of an observation that are shown."""
        return np.asarray(observation)[self._indices]
