"""Compares the rewards of demonstrations with those of the environment, for steps that are alike.

::

    environment   ●──a──●──a──●        an action is that of the demonstration with the nearest observation
                  │     │     │
    file          ○     ○     ○        its reward, beside the reward of the environment

Both kinds of steps train one critic. Rewards of another scale or sign give it two tasks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.algo.replay import Steps
from rlplace.codes import problem
from rlplace.envs.contract import ContinuousActions, Simulator, Spaces
from rlplace.envs.recorded import KEY
from rlplace.envs.registry import own_global_numbers, row_seeds
from rlplace.errors import Problem, SimulatorError

# Steps of the environment, and most steps of the file that are compared with each
_STEPS = 200
_MOST = 20_000
# Steps are alike if their observations differ by at most this many standard deviations of an entry, on average
_ALIKE = 0.25
# Fewest steps that are alike; with fewer, nothing is said
_FEWEST = 20
# Rewards of one scale differ by less than this factor
_FACTOR = 3.0
# Cosine of rewards of opposite signs
_OPPOSITE = -0.5


@dataclasses.dataclass(frozen=True, slots=True)
class PairedRewards:
    """Rewards of steps that are alike, [N]: `shown` by the file, `given` by the environment."""

    shown: NDArray[np.float64]
    given: NDArray[np.float64]

    def difference(self) -> str | None:
        """Return how the rewards differ: "sign", "scale", or "nothing" if one side is always 0.

        Return None if they are alike, or if they are too few.
        """
        if len(self.shown) < _FEWEST:
            return None
        shown = float(np.linalg.norm(self.shown))
        given = float(np.linalg.norm(self.given))
        if not shown or not given:
            return "nothing" if shown != given else None
        if float(self.shown @ self.given) / (shown * given) < _OPPOSITE:
            return "sign"
        if not 1 / _FACTOR < shown / given < _FACTOR:
            return "scale"
        return None

    @property
    def factor(self) -> float:
        """The number by which rewards of the file are multiplied to be most like those of the environment."""
        return float(self.shown @ self.given) / float(self.shown @ self.shown)


def other_rewards(
    path: str,
    steps: Steps,
    make: Callable[[int], Simulator],
    spaces: Spaces,
    seed: int,
) -> Problem | None:
    """Play some steps like those of a file, and return a warning if the rewards of the two differ; else None.

    `path`: the file of `steps`. `make`: returns a new simulator of a number of rows. `seed`: of the episodes. An
    environment that fails gives no warning: the run names its error.
    """
    try:
        pairs = paired_rewards(steps, make, spaces, seed)
    except SimulatorError:
        return None
    error = pairs.difference()
    if error is None:
        return None
    factor = 1.0 if error == "nothing" else pairs.factor
    return problem(
        "demonstrated-rewards",
        KEY,
        path,
        error=error,
        count=len(pairs.shown),
        shown=f"{pairs.shown.mean():.3g}",
        given=f"{pairs.given.mean():.3g}",
        factor=f"{factor:.2g}",
        file=path,
    )


def paired_rewards(
    steps: Steps, make: Callable[[int], Simulator], spaces: Spaces, seed: int
) -> PairedRewards:
    """Return rewards of steps that are alike. Raises ConfigError and SimulatorError of the environment."""
    random = np.random.default_rng(seed)
    chosen = np.arange(len(steps.rewards))
    if len(chosen) > _MOST:
        chosen = random.choice(len(chosen), _MOST, replace=False)
    observations = steps.observations[chosen, 0].reshape(len(chosen), -1)
    # Entries that never change in the file have to be equal
    spread = np.maximum(observations.std(axis=0), 1e-6)
    rows = spaces.together
    shown: list[float] = []
    given: list[float] = []
    with own_global_numbers(seed, 0, 0):
        simulator = make(rows)
        try:
            seen = simulator.reset(row_seeds(seed, 0, rows, 0))
            for _ in range(_STEPS // rows):
                nearest = []
                alike = []
                for row in seen.reshape(rows, -1):
                    away = (np.abs(observations - row) / spread).mean(axis=1)
                    nearest.append(chosen[away.argmin()])
                    alike.append(away.min() < _ALIKE)
                result = simulator.step(_taken(steps.actions[nearest, 0], spaces))
                for number, near in enumerate(nearest):
                    if alike[number]:
                        shown.append(float(steps.rewards[near, 0]))
                        given.append(float(result.rewards[number]))
                seen = result.observations
        finally:
            simulator.close()
    return PairedRewards(np.array(shown), np.array(given))


def _taken(actions: NDArray[Any], spaces: Spaces) -> NDArray[Any]:
    """Return actions of the memory as the simulator takes them."""
    of = spaces.actions
    if not isinstance(of, ContinuousActions):
        return actions
    low = np.array(of.low, np.float32).reshape(of.shape)
    high = np.array(of.high, np.float32).reshape(of.shape)
    taken: NDArray[Any] = low + (high - low) * (actions + 1) / 2
    return taken
