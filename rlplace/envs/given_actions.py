"""Turns the actions of a policy into those that environments of Gymnasium and PettingZoo take."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Discrete
from numpy.typing import NDArray


class GivenActions:
    """Actions as an action space has them: choices counted from its `start`, numbers within its bounds."""

    def __init__(self, space: Any) -> None:
        start = np.asarray(getattr(space, "start", 0))
        self._start = start if start.any() else None
        self._is_one_choice = isinstance(space, Discrete)
        self._bounds: tuple[Any, Any] | None = None
        if hasattr(space, "low"):
            self._bounds = (space.low, space.high)

    def of(self, actions: NDArray[Any]) -> list[Any]:
        """Return the actions [B, *A] as the environments take them, in new arrays: an environment may change its own.

        `actions` stay as they are: the policy learns from them.
        """
        if self._bounds is None:
            chosen = actions
            if self._start is not None:
                chosen = actions + self._start
            return chosen.tolist() if self._is_one_choice else list(chosen.copy())
        low, high = self._bounds
        return list(np.clip(actions, low, high, dtype=low.dtype))
