"""Finds numbers in observations that differ in the environment but are equal as float32, the type that policies get.

A float32 has 24 bits of precision: 1.7e9 and 1.7e9 + 1 become the same number. Times in seconds since 1970 are an
example.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.entries import Unfit
from rlplace.envs.observations import Encoding, entry_at

# Steps that are compared at the beginning
_AT_FIRST = 32
# Steps between two later comparisons
_PAUSE = 255
# Differences up to this size are rounding errors of simulators, and do not count
_NOISE = 1e-6
# A number is reported from this count of lost differences on
_LEAST = 4
# ... and from this share of all its differences on
_SHARE = 0.5
# Bytes from which on a type may have values that float32 cannot hold: floats, and whole numbers
_WIDE_FLOAT = 8
_WIDE_WHOLE = 4


class EqualPair(NamedTuple):
    """Two different values of one number of an observation that are equal as float32.

    `place`: the index of the entry in the observation as Python text, such as "['time']".
    """

    place: str
    first: float
    second: float


class Precision:
    """Compares observations of consecutive steps, and of neighbouring rows, in a few steps of a run.

    `looks_at`: the next step whose observations `add` needs, counted from 1.
    """

    def __init__(self, encoding: Encoding) -> None:
        self.looks_at = 1
        self._places = encoding.numbers
        # Values at each place in the previous step, [rows, numbers], and the index of that step
        self._before: list[NDArray[Any] | None] = [None] * len(self._places)
        self._added_at = 0
        # For each number at each place: count of differences, and count of differences that float32 loses
        self._changed: list[Any] = [0] * len(self._places)
        self._lost: list[Any] = [0] * len(self._places)
        if not self._places:
            self.looks_at = sys.maxsize

    def values_of(self, shown: Any) -> list[NDArray[Any]] | None:
        """Return copies of the numbers of an observation, one array for each place; None if it is not in its space."""
        try:
            return [np.array(entry_at(shown, keys)) for keys in self._places]
        except (Unfit, TypeError, ValueError, RuntimeError):
            return None

    def add(
        self, step: int, rows: Sequence[list[NDArray[Any]] | None]
    ) -> EqualPair | None:
        """Add the numbers of all rows in a step. Return two different values that are equal as float32, or None.

        After values were found, no further step is compared. `rows`: the result of `values_of` for each row.
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
        # Compare two consecutive steps, then pause
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
    ) -> EqualPair | None:
        """Count the differences between two arrays [rows, numbers] of the place `at`.

        Return two different values that are equal as float32; None if there are too few of them.
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
        return EqualPair(place, these[row, number].item(), those[row, number].item())


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
    """Return whether two arrays can be compared: their shapes and types are equal."""
    return before.shape == values.shape and before.dtype == values.dtype
