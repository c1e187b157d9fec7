"""Sums over the ranks of one host through memory that they share.

Messages of gloo cost two context switches each, and an exchange among 8 ranks is 56 of them: 4 ms on 2 cores. Here each
rank writes its values and then a count, waits until all counts have come as far, and sums what all have written::

    counts   [ranks]             calls that a rank has written its values for, each in a cache line of its own
    slots    [2, ranks, bytes]   of calls with an even and with an odd number

Two slots are enough: a rank that has come to the next call has read all of the last one.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_SLOT_BYTES = 256 << 10
_LINE_BYTES = 64
_YIELDS = 100
_PAUSE_S = 1e-4  # first it lets others run: on fewer cores than ranks these are who it waits for
MOST_BYTES = 16 * _SLOT_BYTES  # of larger ones every rank reads too much: ranks x bytes


class SharedSum:
    """One rank's view of the memory; all ranks make the same calls in the same order.

    After a TimeoutError it is of no use: ranks that start again map another file.
    """

    def __init__(self, file: Path, rank: int, ranks: int, timeout_s: float) -> None:
        """Map `file`, which `create` has made for as many ranks. Raises OSError.

        `timeout_s`: the longest that one rank may wait for another.
        """
        self._rank = rank
        self._timeout_s = timeout_s
        self._calls = 0
        with open(file, "r+b") as opened:
            size = _size(ranks)
            if os.fstat(opened.fileno()).st_size != size:
                raise OSError(f"{file} has another size than the sums of {ranks} ranks")
            self._memory = mmap.mmap(opened.fileno(), size)
        counts = np.frombuffer(self._memory, np.int64, ranks * _LINE_BYTES // 8)
        self._counts = counts.reshape(ranks, _LINE_BYTES // 8)[:, 0]
        slots = np.frombuffer(self._memory, np.uint8, offset=ranks * _LINE_BYTES)
        self._slots = torch.from_numpy(slots).view(2, ranks, _SLOT_BYTES)

    @staticmethod
    def create(file: Path, ranks: int) -> None:
        """Make the memory, all of it at once: there is no error for what a full file system lacks later."""
        with open(file, "xb") as opened:
            os.posix_fallocate(opened.fileno(), 0, _size(ranks))

    @staticmethod
    def possible() -> bool:
        """Tell whether other cores see what is written in the order it is, as this relies on; not so on Arm."""
        return platform.machine() in ("x86_64", "AMD64")

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks of `values` [n] on the host, equal to the bit on all of them.

        Raises TimeoutError, also where a rank has ended: nothing says so here, as the socket of an exchange would.
        """
        parts = values.split(_SLOT_BYTES // values.itemsize)
        if len(parts) == 1:
            return self._sum(values)
        return torch.cat([self._sum(part) for part in parts])

    def _sum(self, values: Tensor) -> Tensor:
        self._calls += 1
        slots = self._slots[self._calls % 2, :, : values.nbytes].view(values.dtype)
        slots[self._rank] = values
        self._counts[self._rank] = self._calls
        self._wait()
        return slots.sum(dim=0)

    def _wait(self) -> None:
        """Return once all ranks have made as many calls."""
        for _ in range(_YIELDS):
            if self._counts.min() >= self._calls:
                return
            os.sched_yield()
        deadline = time.monotonic() + self._timeout_s
        while self._counts.min() < self._calls:
            if time.monotonic() > deadline:
                late = [
                    rank
                    for rank, calls in enumerate(self._counts.tolist())
                    if calls < self._calls
                ]
                raise TimeoutError(
                    f"waited {self._timeout_s:g} s for ranks {late} to come to sum {self._calls}"
                )
            time.sleep(_PAUSE_S)


def _size(ranks: int) -> int:
    return ranks * (_LINE_BYTES + 2 * _SLOT_BYTES)
