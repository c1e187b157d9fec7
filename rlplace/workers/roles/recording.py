"""Record one iteration of an env rank in arrays allocated once, and hand them out as a trajectory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.contract import DiscreteActions, Spaces, StepResult
from rlplace.trajectory import ActionChunk, Trajectory


class Recording:
    """T steps of B rows, filled block by block: in the order of steps, and within a step in the order of rows.

    A new one per iteration: the arrays of the last belong to the receiver of its trajectory.
    """

    def __init__(self, *, steps: int, rows: int, spaces: Spaces) -> None:
        discrete = isinstance(spaces.actions, DiscreteActions)
        action_shape = () if isinstance(spaces.actions, DiscreteActions) else spaces.actions.shape
        self._observations = np.empty((steps + 1, rows, *spaces.observation_shape), np.float32)
        self.actions = np.empty((steps, rows, *action_shape), np.int64 if discrete else np.float32)
        self.rewards = np.empty((steps, rows), np.float32)
        self._logprobs = np.empty((steps, rows), np.float32)
        self._values = np.empty((steps, rows), np.float32)
        self._terminated = np.empty((steps, rows), np.bool_)
        self._truncated = np.empty((steps, rows), np.bool_)
        self._finals = [np.empty((0, *spaces.observation_shape), np.float32)]
        self.versions: set[int] = set()  # of the policies that decided
        self.episode_returns: list[float] = []
        self.episode_lengths: list[int] = []

    def begin(self, columns: slice, observations: NDArray[np.float32]) -> None:
        """The observations that the first step's actions answer."""
        self._observations[0, columns] = observations

    def decision(self, step: int, columns: slice, chunk: ActionChunk) -> None:
        self.actions[step, columns] = chunk.actions
        self._logprobs[step, columns] = chunk.logprobs
        self._values[step, columns] = chunk.values
        self.versions.add(chunk.version)

    def result(self, step: int, columns: slice, result: StepResult) -> None:
        self._observations[step + 1, columns] = result.observations
        self.rewards[step, columns] = result.rewards
        self._terminated[step, columns] = result.terminated
        self._truncated[step, columns] = result.truncated
        # Blocks come in the order of numpy.argwhere(truncated), so these need no sorting.
        self._finals.append(result.final_observations)
        self.episode_returns += result.episode_returns
        self.episode_lengths += result.episode_lengths

    def trajectory(self, *, first_row: int, env_rank: int) -> Trajectory:
        return Trajectory(
            first_row=first_row,
            env_rank=env_rank,
            version_min=min(self.versions),
            version_max=max(self.versions),
            observations=self._observations[:-1],
            actions=self.actions,
            logprobs=self._logprobs,
            values=self._values,
            rewards=self.rewards,
            terminated=self._terminated,
            truncated=self._truncated,
            last_observations=self._observations[-1],
            final_observations=np.concatenate(self._finals),
        )


def no_rows(spaces: Spaces, steps: int, version: int) -> Trajectory:
    """Return the trajectory of a rank that got no environments: it only takes part in collectives."""
    recording = Recording(steps=steps, rows=0, spaces=spaces)
    recording.versions.add(version)
    return recording.trajectory(first_row=0, env_rank=0)
