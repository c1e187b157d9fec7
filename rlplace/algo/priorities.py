"""Priorities of the steps in a replay memory, in a binary tree of sums: a draw or a change takes log2(steps) passes.

::

    tree[1] = sum of all          tree[size + i] = priority of step i
    tree[i] = tree[2i] + tree[2i + 1]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST = 1e-6  # added to an error, so that no step has priority 0


class Priorities:
    """Priorities of `steps` steps. Steps are drawn in proportion to their priorities (Schaul et al., arXiv:1511.05952).

    `exponent`: power of the error, alpha in the paper; 0 draws uniformly.
    """

    def __init__(self, steps: int, exponent: float) -> None:
        # The next power of 2: all leaves are on one level
        self._size = 1 << max(0, steps - 1).bit_length()
        self._steps = steps
        self._exponent = exponent
        self._tree = np.zeros(2 * self._size, np.float64)
        # New steps get the greatest priority so far, so that each is drawn soon
        self._greatest = 1.0

    @property
    def nbytes(self) -> int:
        return self._tree.nbytes

    def add(self, steps: NDArray[np.int64]) -> None:
        """Give the new steps with these numbers the greatest priority so far."""
        self._set(steps, np.full(len(steps), self._greatest))

    def change(self, steps: NDArray[np.int64], errors: NDArray[Any]) -> None:
        """Set the priorities of steps by their absolute errors."""
        priorities = (np.abs(errors).astype(np.float64) + _LEAST) ** self._exponent
        self._greatest = max(self._greatest, float(priorities.max(initial=0.0)))
        self._set(steps, priorities)

    def draw(
        self, count: int, random: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return (numbers of `count` steps, probability of each).

        The sum of all priorities is cut into `count` equal parts, and one step is drawn from each part.
        """
        total = self._tree[1]
        sought = (np.arange(count) + random.random(count)) * (total / count)
        at = np.ones(count, np.int64)
        while at[0] < self._size:
            left = 2 * at
            of_left = self._tree[left]
            goes_right = sought >= of_left
            # A rounded sum may lead to an empty part on the right
            goes_right &= self._tree[left + 1] > 0
            sought = np.where(goes_right, sought - of_left, sought)
            at = left + goes_right
        return at - self._size, self._tree[at] / total

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that `load` takes: views, not copies."""
        leaves = self._tree[self._size : self._size + self._steps]
        return {"priorities": leaves, "greatest": np.array(self._greatest)}

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        self._greatest = float(state["greatest"])
        self._tree[self._size : self._size + self._steps] = state["priorities"]
        # The sums, from the lowest level up
        level = self._size // 2
        while level:
            below = self._tree[2 * level : 4 * level]
            self._tree[level : 2 * level] = below[0::2] + below[1::2]
            level //= 2

    def _set(self, steps: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        at = steps + self._size
        self._tree[at] = priorities
        while at.size and at[0] > 1:
            at = np.unique(at // 2)
            self._tree[at] = self._tree[2 * at] + self._tree[2 * at + 1]
