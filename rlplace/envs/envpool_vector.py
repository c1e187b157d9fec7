"""Steps EnvPool's simulators as one batch in C++, without Python code for each row.

One thread steps all rows of a rank unless `env.kwargs.num_threads` sets more. EnvPool gives no access to the state of
an episode, so all episodes begin anew after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.contract import StepResult
from rlplace.envs.gymnasium_results import Bounds, Ends, Results
from rlplace.envs.observations import encoding_of

# Steps between two comparisons of observations with their bounds
_LOOK_EVERY = 64


class EnvPoolVector:
    """A simulator that steps an EnvPool pool. It owns the pool.

    A pool gets its seeds when it is made, so `reset` makes a new pool.
    """

    def __init__(self, make: Callable[[Sequence[int]], Any], name: str) -> None:
        """`make`: takes seeds, and returns a new pool with one environment for each seed.

        `name`: of the environments, for remarks.
        """
        self._make = make
        self._pool: Any = None
        self._results = Results(name)
        self._ends = Ends()
        self._bounds_seen: Bounds | None = None
        self._clock = 0

    @property
    def remarks(self) -> Sequence[str]:
        """Texts about results of the environments that were accepted and are unusual, each once."""
        return self._results.remarks

    def reset(self, seeds: Sequence[int]) -> NDArray[Any]:
        """Make a new pool with these seeds, begin its episodes, and return the first observations [B, *O]."""
        self.close()
        self._pool = self._make(seeds)
        space: Any = self._pool.action_space
        self._bounds: tuple[Any, Any] | None = None
        if hasattr(space, "low"):
            self._bounds = (space.low, space.high)
        self._kind = space.dtype
        # Latest first observation of each row, and return and length of its present
        # episode
        encoding = encoding_of(self._pool.observation_space)
        assert encoding is not None, "describe has refused it"
        self._bounds_seen = Bounds(encoding.low, encoding.high)
        shape = (len(seeds), *encoding.whole.shape)
        self._firsts = np.empty(shape, encoding.whole.dtype)
        self._returns = np.zeros(len(seeds))
        self._lengths = np.zeros(len(seeds), np.int64)
        shown = self._begun(np.arange(len(seeds)))
        self._look(shown)
        return shown

    def restart(self, rows: Sequence[int]) -> NDArray[Any]:
        """Begin a new episode in the environments `rows`, and return the first observations [len(rows), *O]."""
        return self._begun(np.array(rows))

    def step(self, actions: NDArray[Any]) -> StepResult:
        """Step all rows with the actions [B, *A], and return the result.

        A row in which the episode ends begins a new episode in the same step.
        """
        if self._bounds is not None:
            actions = np.clip(actions, *self._bounds)
        taken = actions.astype(self._kind)
        shown, rewards, terminated, truncated, info = self._pool.step(taken)
        observations = shown.astype(self._firsts.dtype)
        truncated = truncated & ~terminated
        # Rewards that `reward_clip` changes are there in the info as the game gives them
        own = np.asarray(info.get("reward", rewards))
        self._returns += own if own.shape == rewards.shape else rewards
        self._lengths += 1
        self._clock += 1
        if self._clock == 1 or self._clock % _LOOK_EVERY == 0:
            self._look(observations)
        ended = np.flatnonzero(terminated | truncated)
        result = StepResult(
            observations=observations,
            rewards=rewards.astype(np.float32),
            terminated=terminated.copy(),
            truncated=truncated,
            final_observations=observations[truncated],
            episode_returns=self._returns[ended].tolist(),
            episode_lengths=self._lengths[ended].tolist(),
        )
        for row in ended:
            length = int(self._lengths[row])
            self._results.ended(self._ends, length, terminated=bool(terminated[row]))
        # In the info, only the end of a game terminates it, whatever the argument `episodic_life` is
        over = np.asarray(info.get("terminated", terminated)).astype(np.bool_)
        if over.shape == terminated.shape and (terminated & ~over).any():
            self._results.remark_of_kind("lives", "episodic_life: true")
        # Autoreset, after the last observations were copied
        if len(ended):
            observations[ended] = self._begun(ended)
        return result

    def close(self) -> None:
        """Close the pool."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _look(self, observations: NDArray[Any]) -> None:
        """Add a remark if numbers of observations are outside of the bounds of their space. It is the last one."""
        if self._bounds_seen is None:
            return
        outside = self._bounds_seen.outside(observations)
        if outside is not None:
            number, low, high = outside
            self._bounds_seen = None
            self._results.remark_of_kind(
                "outside", f"{number:g}", low=f"{low:g}", high=f"{high:g}"
            )

    def _begun(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Begin an episode in each of `rows`, and return the first observations, in the order of `rows`."""
        self._returns[rows] = 0.0
        self._lengths[rows] = 0
        shown, info = self._pool.reset(rows)
        self._firsts[info["env_id"]] = shown
        return self._firsts[rows]
