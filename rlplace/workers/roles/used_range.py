"""The part of the action bounds of a simulator that the actions of a policy cover."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.action_bounds import WIDEST
from rlplace.envs.contract import Actions, ContinuousActions
from rlplace.metrics import Metric, Metrics


class UsedRange:
    """The lowest and the highest action so far, for each number of an action that has bounds."""

    def __init__(self, actions: Actions) -> None:
        """Create the object without any actions. `actions`: the action space."""
        low: NDArray[np.float64] = np.empty(0)
        high: NDArray[np.float64] = np.empty(0)
        if isinstance(actions, ContinuousActions):
            low = np.asarray(actions.low, np.float64).ravel()
            high = np.asarray(actions.high, np.float64).ravel()
        # Places of the numbers with bounds
        self._places = np.flatnonzero((low > -WIDEST) & (high < WIDEST) & (low < high))
        self._low = low[self._places]
        self._high = high[self._places]
        self._numbers = len(low)
        self._least = np.full(len(self._places), np.inf)
        self._most = np.full(len(self._places), -np.inf)

    def add(self, actions: NDArray[Any]) -> None:
        """Add actions, [..., *A]. They may be outside of the bounds, to which a simulator clips them."""
        if not len(self._places):
            return
        taken = actions.reshape(-1, self._numbers)[:, self._places]
        taken = np.clip(taken, self._low, self._high)
        self._least = np.minimum(self._least, taken.min(axis=0))
        self._most = np.maximum(self._most, taken.max(axis=0))

    def metrics(self) -> Metrics:
        """Return the smallest used share of the bounds of an action's numbers as a metric; {} without bounds."""
        if not len(self._places):
            return {}
        used = (self._most - self._least) / (self._high - self._low)
        return {"env/action_range": Metric(float(used.min()), "max")}
