"""The lock on a channel's file: the kernel releases it when its holder dies, and taking it has a deadline."""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
import time
import weakref
from typing import Final

_TAKE: Final = fcntl.LOCK_EX | fcntl.LOCK_NB
# A change takes ten microseconds. Whoever has to wait longer than a few tries waits for a holder that was interrupted,
# and first offers it the processor, then sleeps in between.
_TRIES = 3
_OFFERS = 30
_NAPS_S = (50e-6, 2e-3)  # first and longest


class FileLock:
    """Between the threads of this process an ordinary lock, then flock() between processes.

    Owns the descriptor. flock() belongs to the open file description: a forked child must open the file anew.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)
        self._threads = threading.Lock()
        # Unlike fcntl.flock this keeps the interpreter's lock: a busy thread of this process would else run for
        # milliseconds at the very moment at which the channel is held.
        self._flock = ctypes.PyDLL(None).flock

    def acquire(self, patience_s: float) -> bool:
        """False when it was not to be had in time."""
        if not self._threads.acquire(False) and not self._threads.acquire(timeout=patience_s):
            return False
        taken = False
        try:
            taken = self._flock(self.descriptor, _TAKE) == 0 or self._contend(patience_s)
        finally:
            if not taken:
                self._threads.release()
        return taken

    def release(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        self._threads.release()

    def _contend(self, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        tries, nap_s = 1, _NAPS_S[0]
        while self._flock(self.descriptor, _TAKE) != 0:
            tries += 1
            if tries <= _TRIES:
                continue
            if tries <= _TRIES + _OFFERS:
                os.sched_yield()
                continue
            if time.monotonic() >= deadline:
                return self._last_try()
            time.sleep(nap_s)
            nap_s = min(nap_s * 1.5, _NAPS_S[1])
        return True

    def _last_try(self) -> bool:
        """Raises what is wrong with the descriptor, if it is not just held."""
        try:
            fcntl.flock(self.descriptor, _TAKE)
        except BlockingIOError:
            return False
        return True
