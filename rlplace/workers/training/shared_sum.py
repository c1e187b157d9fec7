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
    """One rank's access to shared memory through which the ranks of a host sum tensors.

    All ranks must make the same calls in the same order. After a TimeoutError, the object cannot be used any more;
    restarted ranks use another file.
    """

    def __init__(
        self,
        file: Path,
        rank: int,
        ranks: int,
        timeout_s: float,
    ) -> None:
        """Map `file` into memory. It must have been made by `create` for the same number of ranks.

        `rank`: number of this rank. `ranks`: number of ranks. `timeout_s`: the most seconds to wait for another rank.
        Raises OSError if the file is missing or its size is wrong.
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
        """Create the file for `ranks` ranks and allocate its memory. Raises OSError if there is no room.

        Without the allocation, a full file system would kill the process at a later write.
        """
        with open(file, "xb") as opened:
            os.posix_fallocate(opened.fileno(), 0, _size(ranks))

    @staticmethod
    def possible() -> bool:
        """Return whether this machine's processor shows writes to other cores in the order in which they were made.

        The class relies on this order. It holds for x86 processors, but not for Arm processors.
        """
        return platform.machine() in ("x86_64", "AMD64")

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks of `values` [n], a tensor on the host. The bits are equal on all ranks.

        Raises TimeoutError if a rank does not make the call, for example because it has ended: unlike a socket, shared
        memory does not report the end of a process.
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
        """Wait until all ranks have made as many calls as this rank. Raises TimeoutError."""
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
    """Return the size of the file for `ranks` ranks, in bytes."""
    return ranks * (_LINE_BYTES + 2 * _SLOT_BYTES)
