"""Gymnasium environments with one fault each, for tests of how the fault is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

PAIR = Box(-1.0, 1.0, (2,))
IMAGE = Box(0, 255, (36, 36, 3), np.uint8)
RIGHT = np.array([0.5, -0.5], np.float32)
BYTES = np.full((36, 36, 3), 7, np.uint8)
# Observations that are in their space, space by space
NESTED = Dict({"arm": Dict({"place": PAIR}), "camera": IMAGE})
TWO = Tuple((PAIR, Discrete(3)))
OBSERVED: dict[str, tuple[Any, Any]] = {
    "pair": (PAIR, RIGHT),
    "image": (IMAGE, BYTES),
    "choice": (Discrete(5), 2),
    "from_five": (Discrete(3, start=5), 6),
    "choices": (MultiDiscrete([2, 3]), np.array([1, 2])),
    "switches": (MultiBinary(3), np.array([0, 1, 1], np.int8)),
    "nested": (NESTED, {"arm": {"place": RIGHT}, "camera": BYTES}),
    "tuple": (TWO, (RIGHT, 1)),
    "one": (Box(-1.0, 1.0, (1,)), np.zeros(1, np.float32)),
    "scalar": (Box(-1.0, 1.0, ()), np.float32(0.5)),
}


class Odd(gymnasium.Env[Any, Any]):
    """Shows an observation of the space `space`, and something else from step `at` on; 0 is the first observation."""

    action_space = Discrete(2)

    def __init__(
        self,
        space: str = "pair",
        shown: Any = None,
        at: int = 0,
        reward: Any = 1.0,
        result: Callable[[tuple[Any, ...]], Any] | None = None,
        first: Callable[[tuple[Any, ...]], Any] | None = None,
        ended: Any = False,
        cut: Any = False,
    ) -> None:
        self.observation_space, self._right = OBSERVED[space]
        self._shown = shown
        self._at = at
        self._reward = reward
        self._result = result
        self._first = first
        self._ended = ended
        self._cut = cut
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        super().reset(seed=seed)
        self._step = 0
        pair = (self._seen(), {})
        return pair if self._first is None else self._first(pair)

    def step(self, action: Any) -> Any:
        self._step += 1
        late = self._step >= self._at
        reward = self._reward if late else 1.0
        five = (self._seen(), reward, self._ended, self._cut, {})
        return five if self._result is None or not late else self._result(five)

    def _seen(self) -> Any:
        wrong = self._shown is not None and self._step >= self._at
        return self._shown if wrong else self._right
