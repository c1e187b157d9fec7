"""Finds numbers of observations that are different in the environment and equal as float32, which policies take.

A float32 has 24 bits: of 1.7e9 and 1.7e9 + 1 it makes the same number, and so of each second since 1970.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.entries import Unfit
from rlplace.envs.observations import Encoding, entry_at

# Steps that are looked at when the vector begins, and from then on between two pairs of steps
_AT_FIRST = 32
_PAUSE = 255
# Numbers that are equal as float32 may differ by as much: simulators round
_NOISE = 1e-6
# Differences of a number that have to be lost, and the share of all its differences
_LEAST = 4
_SHARE = 0.5
# Bytes of numbers that float32 may not hold
_WIDE_FLOAT = 8
_WIDE_WHOLE = 4


class Lost(NamedTuple):
    """Two values of a number that are equal as float32. `place`: Python text of the entry of the observation."""

    place: str
    first: float
    second: float


class Precision:
    """Compares the observations of neighbouring steps, and those of neighbouring rows, for a few steps at a time.

    `looks_at`: the next step, counted from 1, whose observations `add` wants.
    """

    def __init__(self, encoding: Encoding) -> None:
        self.looks_at = 1
        self._places = encoding.numbers
        # Values of each place in the step before, [rows, numbers], and the number of that step
        self._before: list[NDArray[Any] | None] = [None] * len(self._places)
        self._added_at = 0
        # Of each place and number: differences, and those of them that are lost
        self._changed: list[Any] = [0] * len(self._places)
        self._lost: list[Any] = [0] * len(self._places)
        if not self._places:
            self.looks_at = sys.maxsize

    def values_of(self, shown: Any) -> list[NDArray[Any]] | None:
        """Return the numbers of an observation by their places, as copies. None: it is not in its space."""
        try:
            return [np.array(entry_at(shown, keys)) for keys in self._places]
        except (Unfit, TypeError, ValueError, RuntimeError):
            return None

    def add(self, step: int, rows: Sequence[list[NDArray[Any]] | None]) -> Lost | None:
        """Take the numbers of all rows in a step; return two values that are not to be told apart as float32, if any.

        Then there is no further look. `rows`: what `values_of` returned for each row.
        """
        found = None
        is_any_wide = False
        for at in range(len(self._places)):
            values = _joined([each[at] for each in rows if each is not None])
            before = self._before[at]
            self._before[at] = values
            if values is None:
                continue
            is_any_wide = True
            pairs = [(values[:-1], values[1:])]
            if (
                before is not None
                and step == self._added_at + 1
                and _alike(before, values)
            ):
                pairs.append((before, values))
            for these, those in pairs:
                found = self._compare(at, these, those) or found
        # Two neighbouring steps, then a pause
        pause = 1
        if step >= _AT_FIRST and self._added_at == step - 1:
            pause = _PAUSE
        self._added_at = step
        self.looks_at = step + pause
        if found is not None or not is_any_wide:
            self.looks_at = sys.maxsize
        return found

    def _compare(
        self, at: int, these: NDArray[Any], those: NDArray[Any]
    ) -> Lost | None:
        """Count the differences between two arrays [rows, numbers] of the place `at`; return two values that are lost.

        None: fewer than a certain number are lost.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            changed = these != those
            lost = changed & (these.astype(np.float32) == those.astype(np.float32))
            if these.dtype.kind == "f":
                lost &= np.abs(these - those) > _NOISE
        self._changed[at] = self._changed[at] + changed.sum(axis=0)
        self._lost[at] = self._lost[at] + lost.sum(axis=0)
        many = self._lost[at] >= np.maximum(_LEAST, _SHARE * self._changed[at])
        rows, numbers = np.nonzero(lost & many)
        if not len(rows):
            return None
        place = "".join(f"[{key!r}]" for key in self._places[at])
        row = rows[0]
        number = numbers[0]
        return Lost(place, these[row, number].item(), those[row, number].item())


def _joined(values: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """Return the numbers of all rows as [rows, numbers]; None if float32 holds all numbers of their types."""
    kinds = {(each.dtype, each.shape) for each in values}
    if len(kinds) != 1:
        return None
    dtype = values[0].dtype
    wide = dtype.kind == "f" and dtype.itemsize >= _WIDE_FLOAT
    if dtype.kind in "iu" and dtype.itemsize >= _WIDE_WHOLE:
        wide = True
    if not wide:
        return None
    return np.array(values).reshape(len(values), -1)


def _alike(before: NDArray[Any], values: NDArray[Any]) -> bool:
    """Return whether the values of the step before can be compared with those of a step."""
    return before.shape == values.shape and before.dtype == values.dtype
