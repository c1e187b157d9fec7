"""Steps a vector of Gymnasium environments in one short loop, with time limit and autoreset in the same step."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from rlplace.envs.contract import StepResult
from rlplace.envs.gymnasium_state import restore, state_of
from rlplace.envs.observations import encoding_of

if TYPE_CHECKING:
    import gymnasium

# Pictures in a second, for environments that do not say
_FRAMES_PER_S = 30.0


class GymnasiumVector:
    """A simulator that owns several environments and steps them one after the other.

    For cheap simulators this is faster than a process for each.
    """

    def __init__(
        self, envs: Sequence[gymnasium.Env[Any, Any]], *, max_episode_steps: int | None
    ) -> None:
        self._envs = list(envs)
        self._steps = [env.step for env in envs]
        encoding = encoding_of(envs[0].observation_space)
        assert encoding is not None, "describe has refused it"
        # Observations of a step: [B, *O]
        self._shape = (len(envs), *encoding.whole.shape)
        self._dtype = np.dtype(encoding.whole.dtype)
        self._encode = encoding.encode
        self._limit = sys.maxsize
        if max_episode_steps is not None:
            self._limit = max_episode_steps
        # Of the episodes in progress
        self._returns = [0.0] * len(envs)
        self._lengths = [0] * len(envs)
        # How an environment takes an action: choices from `start` on, numbers within bounds
        space: Any = envs[0].action_space
        self._first_action = np.asarray(getattr(space, "start", 0))
        self._alone = isinstance(space, Discrete)
        self._bounds = (space.low, space.high) if hasattr(space, "low") else None

    def reset(self, seeds: Sequence[int]) -> NDArray[Any]:
        """Begin an episode in every environment, and return the first observations [B, *O]. Row i gets seeds[i]."""
        observations = np.empty(self._shape, self._dtype)
        for row, (env, seed) in enumerate(zip(self._envs, seeds, strict=True)):
            observations[row] = self._shown(env.reset(seed=seed)[0])
        self._returns = [0.0] * len(self._envs)
        self._lengths = [0] * len(self._envs)
        return observations

    def restart(self, rows: Sequence[int]) -> NDArray[Any]:
        """Begin a new episode in the environments `rows`, and return the first observations [len(rows), *O]."""
        for row in rows:
            self._returns[row] = 0.0
            self._lengths[row] = 0
        firsts = [self._shown(self._envs[row].reset()[0]) for row in rows]
        return np.array(firsts, self._dtype)

    def step(self, actions: NDArray[Any]) -> StepResult:
        """Step all rows with the actions [B, *A], and return the result.

        A row in which the episode ends begins a new episode in the same step.
        """
        # The hot loop of a run: local names, Python numbers, one array write for each row
        observations = np.empty(self._shape, self._dtype)
        terminations = np.zeros(len(self._envs), np.bool_)
        truncations = np.zeros(len(self._envs), np.bool_)
        rewards = []
        finals = []
        episode_returns: list[float] = []
        episode_lengths: list[int] = []
        returns = self._returns
        lengths = self._lengths
        limit = self._limit
        encode = self._encode
        # Actions as the environments take them
        if self._bounds is None:
            taken = actions + self._first_action
            taken = taken.tolist() if self._alone else list(taken)
        else:
            low, high = self._bounds
            taken = list(np.clip(actions, low, high, dtype=low.dtype))
        for row, (step, action) in enumerate(zip(self._steps, taken, strict=True)):
            observation, reward, terminated, truncated, _ = step(action)
            if encode is not None:
                observation = encode(observation)
            rewards.append(reward)
            returns[row] += float(reward)
            lengths[row] += 1
            if terminated or truncated or lengths[row] >= limit:
                # Terminated counts even at the time limit: there is no later value to estimate
                if terminated:
                    terminations[row] = True
                else:
                    truncations[row] = True
                    # A copy: `reset` may reuse its array
                    finals.append(np.array(observation, self._dtype))
                episode_returns.append(returns[row])
                episode_lengths.append(lengths[row])
                returns[row] = 0.0
                lengths[row] = 0
                observation = self._shown(self._envs[row].reset()[0])
            observations[row] = observation
        final_shape = (len(finals), *self._shape[1:])
        final_observations = np.array(finals, self._dtype).reshape(final_shape)
        return StepResult(
            observations=observations,
            rewards=np.array(rewards, np.float32),
            terminated=terminations,
            truncated=truncations,
            final_observations=final_observations,
            episode_returns=episode_returns,
            episode_lengths=episode_lengths,
        )

    def row_states(self) -> list[Mapping[str, NDArray[Any]]]:
        """Return the state of each row, including the return and the length of its unfinished episode."""
        counted = zip(self._envs, self._returns, self._lengths, strict=True)
        return [
            {**state_of(env), "return": np.array(total), "length": np.array(steps)}
            for env, total, steps in counted
        ]

    def restore(
        self, states: Sequence[Mapping[str, NDArray[Any]]]
    ) -> Mapping[int, NDArray[Any]]:
        """Restore the state of each row. A row that cannot be restored begins a new episode.

        Return row -> first observation, for the rows that began a new episode.
        """
        begun: dict[int, NDArray[Any]] = {}
        for row, (env, state) in enumerate(zip(self._envs, states, strict=True)):
            self._returns[row] = 0.0
            self._lengths[row] = 0
            if restore(env, state):
                self._returns[row] = float(state["return"])
                self._lengths[row] = int(state["length"])
            else:
                begun[row] = self._shown(env.reset()[0])
        return begun

    @property
    def frames_per_s(self) -> float:
        """The number of pictures for one second of simulated time, as the first environment declares it."""
        return float(self._envs[0].metadata.get("render_fps") or _FRAMES_PER_S)

    def frame(self) -> NDArray[np.uint8]:
        """Return a picture of the first row, [height, width, 3].

        Raises ModuleNotFoundError if a library for drawing is missing.
        """
        from gymnasium.error import DependencyNotInstalled

        try:
            return np.asarray(self._envs[0].render())
        except DependencyNotInstalled as error:
            raise ModuleNotFoundError(str(error).splitlines()[0]) from error

    def _shown(self, observation: Any) -> Any:
        """Return an observation of an environment as one array."""
        if self._encode is None:
            return observation
        return self._encode(observation)

    def close(self) -> None:
        """Close all environments."""
        for env in self._envs:
            env.close()
