"""Memory of this process for copies of large items, used again when what was copied there is dropped."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

LARGE = 32 << 20  # bytes; the C library gives larger blocks back to the kernel at once, and new pages cost twice a copy
_IDLE = 2  # blocks kept: one is in use while the next item arrives


class OwnedMemory:
    """Thread-safe, and without a lock: blocks come back from finalizers."""

    def __init__(self) -> None:
        self._idle: deque[Bytes] = deque(maxlen=_IDLE)

    def take(self, size_bytes: int) -> Bytes:
        """Unwritten memory, the caller's own for as long as anything made of the array lives."""
        if size_bytes < LARGE:
            return np.empty(size_bytes, np.uint8)
        block = self._pop(size_bytes)
        if block is None:
            block = np.empty(size_bytes, np.uint8)
        piece = np.frombuffer(
            block.data[:size_bytes], np.uint8
        )  # no view of `block`: all that is made of it refers to it
        weakref.finalize(piece, self._idle.append, block).atexit = False
        return piece

    def _pop(self, size_bytes: int) -> Bytes | None:
        """The latest idle block that serves; what is too small or much too large on the way to it is given up."""
        while self._idle:
            try:
                block = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if size_bytes <= block.nbytes <= 2 * size_bytes:
                return block
        return None
