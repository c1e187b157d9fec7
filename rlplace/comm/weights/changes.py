"""Delta mode: the bytes of a run that changed since the last version, where that is less than the run itself.

At reinforcement learning's small rates most bfloat16 weights do not move in one update, and most that do change their
low byte alone: one byte and four for its position.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from rlplace.comm.weights.memory import Bytes

_POSITION = np.uint32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Bytes that differ from the same run of an earlier version."""

    positions: NDArray[np.uint32]  # ascending
    values: Bytes

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + self.values.nbytes


def changes(before: Bytes, after: Bytes, *, largest_share: float) -> Changes | None:
    """Between runs of one size; None where they would take more than `largest_share` of it."""
    differs = before != after
    if np.count_nonzero(differs) * (1 + np.dtype(_POSITION).itemsize) > largest_share * len(after):
        return None
    positions = np.flatnonzero(differs).astype(_POSITION)
    return Changes(positions=positions, values=after[positions])


def apply(found: Changes, run: Bytes) -> None:
    """Makes `run`, which holds the earlier version, the later one."""
    run[found.positions] = found.values
