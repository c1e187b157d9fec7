"""Sampling noise per environment row: the same row, step and iteration get the same noise whoever decides on it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Draw = Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float32]]

_KEPT_STEPS = 8  # env ranks drift apart by a few steps; an older step is drawn again


def uniform(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return generator.random(shape, dtype=np.float32)


def normal(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return generator.standard_normal(shape, dtype=np.float32)


class RowNoise:
    """Noise for all environments of a job, drawn a step at a time and cut by global row.

    Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") counts in 256 bits: iteration and step
    begin a run of 2^64 blocks of their own, so nothing is drawn twice and a step can be drawn without those before it.
    Drawing all rows costs microseconds and needs no agreement between ranks.
    """

    def __init__(self, *, seed: int, rows: int, shape: tuple[int, ...], draw: Draw) -> None:
        self._seed = seed
        self._shape = (rows, *shape)
        self._draw = draw
        self._kept: dict[tuple[int, int], NDArray[np.float32]] = {}

    def rows(self, iteration: int, step: int, first: int, stop: int) -> NDArray[np.float32]:
        """Noise of global rows first..stop-1, [stop - first, *shape]; a read-only view."""
        drawn = self._kept.get((iteration, step))
        if drawn is None:
            drawn = self._drawn(iteration, step)
            while len(self._kept) >= _KEPT_STEPS:
                del self._kept[next(iter(self._kept))]
            self._kept[iteration, step] = drawn
        return drawn[first:stop]

    def _drawn(self, iteration: int, step: int) -> NDArray[np.float32]:
        counter = (iteration << 128) | (step << 64)
        drawn = self._draw(np.random.Generator(np.random.Philox(key=self._seed, counter=counter)), self._shape)
        drawn.flags.writeable = False
        return drawn
