"""Sums over the ranks of one host through shared memory.

Each message of gloo costs two context switches, and an exchange among 8 ranks has 56 messages: 4 ms on 2 cores. Here
a rank writes its values, then raises its count of calls, waits until the counts of all ranks are as high, and sums
all written values::

    counts   [ranks]             number of calls that a rank has written values for, each in its own cache line
    slots    [2, ranks, bytes]   values of calls with an even and with an odd number

Two slots are enough: a rank that has reached the next call has read everything of the last one.
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

_SLOT_BYTES = 256 << 10  # values of one rank and call
_LINE_BYTES = 64  # a cache line
_YIELDS = 100  # tries that only give up the core, before the first pause
_PAUSE_S = 1e-4
# Larger sums are slower here: every rank reads ranks x bytes
MOST_BYTES = 16 * _SLOT_BYTES


class SharedSum:
    """One rank's view of memory that the ranks of a host share for sums. All ranks make the same calls in the same
    order.

    After a TimeoutError the object cannot be used any more; restarted ranks map another file.
    """

    def __init__(
        self,
        file: Path,
        rank: int,
        ranks: int,
        timeout_s: float,
    ) -> None:
        """Map `file`, which `create` has made for the same number of ranks.

        `rank`: number of this rank. `ranks`: number of all ranks. `timeout_s`: longest wait for another rank. Raises
        OSError if the file is missing or has another size.
        """
        self._rank = rank
        self._timeout_s = timeout_s
        self._calls = 0
        with open(file, "r+b") as opened:
            size = _size(ranks)
            if os.fstat(opened.fileno()).st_size != size:
                raise OSError(f"{file} has another size than the sums of {ranks} ranks")
            self._memory = mmap.mmap(opened.fileno(), size)
        # Views of both tables
        counts = np.frombuffer(self._memory, np.int64, ranks * _LINE_BYTES // 8)
        self._counts = counts.reshape(ranks, _LINE_BYTES // 8)[:, 0]
        slots = np.frombuffer(self._memory, np.uint8, offset=ranks * _LINE_BYTES)
        self._slots = torch.from_numpy(slots).view(2, ranks, _SLOT_BYTES)

    @staticmethod
    def create(file: Path, ranks: int) -> None:
        """Create the file for `ranks` ranks, and allocate all of its memory. Raises OSError.

        Without the allocation, a full file system would end the process at a later write.
        """
        with open(file, "xb") as opened:
            os.posix_fallocate(opened.fileno(), 0, _size(ranks))

    @staticmethod
    def possible() -> bool:
        """Return whether other cores of this processor see writes in the order in which they were made.

        The class relies on this order, which Arm processors do not keep.
        """
        return platform.machine() in ("x86_64", "AMD64")

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks of `values` [n], which are on the host; bit-equal on all ranks.

        Raises TimeoutError if a rank does not come. This includes a rank that has ended, because shared memory does not
        report it, unlike a socket.
        """
        # A slot has room for a part of a large tensor only
        parts = values.split(_SLOT_BYTES // values.itemsize)
        if len(parts) == 1:
            return self._sum(values)
        return torch.cat([self._sum(part) for part in parts])

    def _sum(self, values: Tensor) -> Tensor:
        # Write, announce, wait, read
        self._calls += 1
        slots = self._slots[self._calls % 2, :, : values.nbytes].view(values.dtype)
        slots[self._rank] = values
        self._counts[self._rank] = self._calls
        self._wait()
        return slots.sum(dim=0)

    def _wait(self) -> None:
        """Return once all ranks have made as many calls as this rank. Raises TimeoutError."""
        # With fewer cores than ranks, giving up the core lets the awaited ranks run
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
    """Return the bytes of the file for `ranks` ranks."""
    return ranks * (_LINE_BYTES + 2 * _SLOT_BYTES)
