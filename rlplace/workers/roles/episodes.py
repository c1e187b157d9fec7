"""Files with the state of simulators in the middle of episodes.

The files are named by global rows, so that any number of ranks can read what another number of ranks has written.

::

    rows_00000-00031.npz      observations          [rows, *O], the observations for the next step
                              lengths               [rows], steps of the episodes in progress
                              <n>.<name>, <n>.rows  of alike arrays, one for each of these rows
"""

from __future__ import annotations

import dataclasses
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.workers.saving import other_state, unreadable_state

RowState = Mapping[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """The saved state of the episodes of neighbouring global rows, from row `first_row` on.

    `observations`: for the next step, [rows, ...]. `lengths`: steps so far of each episode. `states`: the simulator's
    state of each row, as named arrays; empty for a simulator that cannot return its state.
    """

    first_row: int
    observations: NDArray[Any]
    lengths: NDArray[np.int64]
    states: Sequence[RowState]

    def write(self, folder: Path) -> str:
        """Write the state as one file in `folder`, flush the file to disk, and return its name. Raises OSError."""
        rows = range(self.first_row, self.first_row + len(self.states))
        name = f"rows_{rows.start:05}-{rows.stop - 1:05}.npz"
        with open(folder / name, "wb") as out:
            arrays = _stacked(self.states)
            np.savez(
                out,
                allow_pickle=False,
                observations=self.observations,
                lengths=self.lengths,
                **arrays,
            )
            out.flush()
            os.fsync(out.fileno())
        return name


def read(folder: Path, rows: range, like: NDArray[Any]) -> Episodes:
    """Return the saved state of the global `rows`, read from all files in `folder` that have some of these rows.

    `like`: an array of observations with the expected shape and dtype. Raises ConfigError for unreadable files, for
    missing rows, and for observations of another shape or dtype.
    """
    observations = np.empty_like(like)
    lengths = np.empty(len(rows), np.int64)
    states: list[RowState | None] = [None] * len(rows)
    for file in sorted(folder.glob("rows_*.npz")):
        first, last = map(int, re.findall("[0-9]+", file.stem))
        here = range(max(first, rows.start), min(last + 1, rows.stop))
        if not here:
            continue
        try:
            with np.load(file, allow_pickle=False) as arrays:
                found = arrays["observations"]
                steps = arrays["lengths"]
                stored = _unstacked(arrays, last + 1 - first)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise unreadable_state("env", file, error) from error
        if (found.shape[1:], found.dtype) != (like.shape[1:], like.dtype):
            got = f"{file}: observations of {found.dtype} {list(found.shape[1:])}"
            expected = f"observations of {like.dtype} {list(like.shape[1:])}"
            raise other_state("env", got, expected)
        there = slice(here.start - first, here.stop - first)
        mine = slice(here.start - rows.start, here.stop - rows.start)
        observations[mine] = found[there]
        lengths[mine] = steps[there]
        states[mine] = stored[there]
    if None in states:
        lacking = rows.start + states.index(None)
        raise other_state(
            "env", f"{folder}: no row {lacking}", f"rows {rows.start}-{rows.stop - 1}"
        )
    whole = [state for state in states if state is not None]
    return Episodes(
        first_row=rows.start, observations=observations, lengths=lengths, states=whole
    )


def read_states(folder: Path) -> list[RowState]:
    """Return the simulator's state of each saved row, from all files in `folder`; [] if there are none.

    Raises ConfigError for unreadable files.
    """
    states: list[RowState] = []
    for file in sorted(folder.glob("rows_*.npz")):
        try:
            with np.load(file, allow_pickle=False) as arrays:
                states += _unstacked(arrays, len(arrays["lengths"]))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise unreadable_state("env", file, error) from error
    return states


def _stacked(states: Sequence[RowState]) -> dict[str, NDArray[Any]]:
    """Return the arrays of all rows' states as few arrays: arrays with equal name, shape and dtype are stacked.

    Each stack has a second array with the rows that its entries belong to. `states`: named arrays of each row.
    """
    alike: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for row, state in enumerate(states):
        for name, value in state.items():
            kind = value.dtype.kind if value.dtype.kind == "U" else value.dtype.str
            alike.setdefault((name, value.shape, kind), []).append(row)
    arrays: dict[str, NDArray[Any]] = {}
    for number, ((name, _, _), rows) in enumerate(alike.items()):
        arrays[f"{number}.rows"] = np.array(rows)
        arrays[f"{number}.{name}"] = np.stack([states[row][name] for row in rows])
    return arrays


def _unstacked(arrays: Mapping[str, NDArray[Any]], rows: int) -> list[RowState]:
    states: list[dict[str, NDArray[Any]]] = [{} for _ in range(rows)]
    for key in arrays:
        number, dot, name = key.partition(".")
        if dot and name != "rows":
            for row, value in zip(arrays[f"{number}.rows"], arrays[key], strict=True):
                states[row][name] = np.asarray(value)
    return list(states)
