"""Messages between simulators, rollout and learner. Trajectories can be cut and joined along the rows (environments).

Letters: T steps of an iteration, B environments (rows), O observation shape, A action shape, K truncations. Rows are
numbered over the whole job: row i is the same simulator in every placement. Arrays are NumPy arrays, since env workers
do not import torch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_ALONG_ROWS = (
    "observations",
    "actions",
    "logprobs",
    "values",
    "rewards",
    "terminated",
    "truncated",
)  # [T, B, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A message from an env rank to a rollout rank: the observations of B rows, for which actions are wanted.

    `stage_group`: index of the share of the env rank's environments that step together. `step`: 0 to T-1 in the
    iteration. `first_row`: index of the first row, counted over the whole job. A row is one environment.
    """

    env_rank: int
    stage_group: int
    step: int
    first_row: int
    observations: Array  # [B, *O]

    @property
    def weight(self) -> int:
        return len(self.observations)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActionChunk:
    """A message from a rollout rank to an env rank: the actions for the B rows of one Observation, in the same order.

    `stage_group`, `step`, `first_row`: as in the Observation. `logprobs`: log-density of the actions under policy
    `version`. `values`: value estimates of the observations. `version`: the policy version that chose the actions.
    `memory`: [B, S], recurrent state of the policy after this step; None: the policy has no memory.
    """

    stage_group: int
    step: int
    first_row: int
    actions: Array  # [B, *A]
    logprobs: Array  # [B] float32, log-density of `actions` under policy `version`
    values: Array  # [B] float32, value estimate of the observations
    version: int
    memory: Array | None = None  # [B, S] float32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A message from an env rank to an actor rank: T steps of B neighbouring rows (environments).

    `actions[t]` are the actions for `observations[t]`. `version_min`, `version_max`: the least and the greatest policy
    version that acted. `last_observations`: the observations after the last step. When an episode ends at step t, the
    next episode begins, and `observations[t + 1]` is its first observation. If the episode was cut by a time limit
    (`truncated`), its last observation is in `final_observations`, so that the learner can bootstrap from it.
    `final_observations` has the order of `numpy.argwhere(truncated)`.

    A step is poisoned if its reward or next observation was not finite. In the trajectory, its reward is nan,
    `terminated` is true, and all further numbers of the step are finite. The learner leaves the poisoned step out. It
    bootstraps the return of the step before from the observation of the poisoned step.
    """

    first_row: int
    env_rank: int
    version_min: int
    version_max: int
    observations: Array  # [T, B, *O]
    actions: Array  # [T, B, *A]
    logprobs: Array  # [T, B] float32
    values: Array  # [T, B] float32
    rewards: Array  # [T, B] float32, nan where poisoned
    terminated: Array  # [T, B] bool, the episode reached an end
    truncated: Array  # [T, B] bool, the episode was cut off; false where terminated
    last_observations: Array  # [B, *O], after step T-1, autoreset applied
    final_observations: Array  # [K, *O]

    def __post_init__(self) -> None:
        steps_rows = self.rewards.shape
        for name in _ALONG_ROWS:
            shape = getattr(self, name).shape
            if shape[:2] != steps_rows:
                raise ValueError(
                    f"trajectory: {name} has shape {shape}, expected [T, B] = {steps_rows}"
                )
        if len(self.last_observations) != steps_rows[1]:
            raise ValueError(
                f"trajectory: {len(self.last_observations)} last observations for {steps_rows[1]} rows"
            )
        finals = len(self.final_observations)
        cuts = int(self.truncated.sum())
        if finals != cuts:
            raise ValueError(f"trajectory: {finals} final observations for {cuts} cuts")
        if bool((self.terminated & self.truncated).any()):
            raise ValueError("trajectory: a step is both terminated and truncated")

    @property
    def steps(self) -> int:
        return int(self.rewards.shape[0])

    @property
    def rows(self) -> int:
        return int(self.rewards.shape[1])

    @property
    def weight(self) -> int:
        """The number of samples, T * B: the weight of the trajectory in a channel's `get_batch`."""
        return int(self.rewards.size)

    def split(self, start: int, stop: int) -> Trajectory:
        """Return the rows start..stop-1 as a trajectory. Rows are counted from 0 at the first row of this trajectory.

        The arrays are views of the arrays of this trajectory where possible.
        """
        if not 0 <= start < stop <= self.rows:
            raise ValueError(f"trajectory: rows {start}:{stop} of {self.rows}")
        cut = np.argwhere(self.truncated)[:, 1]
        along_rows = {name: getattr(self, name)[:, start:stop] for name in _ALONG_ROWS}
        return dataclasses.replace(
            self,
            first_row=self.first_row + start,
            last_observations=self.last_observations[start:stop],
            final_observations=self.final_observations[(cut >= start) & (cut < stop)],
            **along_rows,
        )


def concat(pieces: Sequence[Trajectory]) -> Trajectory:
    """Join trajectories along their rows, and return the joint trajectory.

    `pieces`: trajectories in any order, with rows that follow each other. Raises ValueError if a row is missing or
    repeated.
    """
    pieces = sorted(pieces, key=lambda p: p.first_row)
    if not pieces:
        raise ValueError("trajectory: nothing to join")
    for left, right in itertools.pairwise(pieces):
        next_row = left.first_row + left.rows
        if next_row != right.first_row:
            raise ValueError(
                f"trajectory: rows end at {next_row - 1} and go on at {right.first_row}"
            )
    along_rows = {
        name: np.concatenate([getattr(p, name) for p in pieces], axis=1)
        for name in _ALONG_ROWS
    }
    # argwhere order is by step first, so the final observations of the pieces interleave.
    cuts = np.concatenate([np.argwhere(p.truncated) + [0, p.first_row] for p in pieces])
    order = np.lexsort((cuts[:, 1], cuts[:, 0]))
    return Trajectory(
        first_row=pieces[0].first_row,
        env_rank=pieces[0].env_rank,
        version_min=min(p.version_min for p in pieces),
        version_max=max(p.version_max for p in pieces),
        last_observations=np.concatenate([p.last_observations for p in pieces]),
        final_observations=np.concatenate([p.final_observations for p in pieces])[
            order
        ],
        **along_rows,
    )
