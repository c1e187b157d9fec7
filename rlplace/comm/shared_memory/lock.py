"""The lock on a file: the kernel releases it when its holder dies, and taking it has a deadline."""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Final

from rlplace.comm.shared_memory.process import tell_of_forks

_TAKE: Final = fcntl.LOCK_EX | fcntl.LOCK_NB
# A change takes ten microseconds. A process that has to wait longer than a few tries waits for a holder that was
# interrupted, and first offers it the processor, then sleeps in between.
_TRIES = 3
_OFFERS = 30
_NAPS_S = (50e-6, 2e-3)  # first and longest


class FileLock:
    """Between the threads of this process an ordinary lock, then flock() between processes.

    flock() belongs to the open file description, which a forked child shares with its parent: the child closes its
    copy at once, or the lock of a parent that died would stay taken, and opens the file anew when it needs it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = threading.Lock()
        # Unlike fcntl.flock this keeps the interpreter's lock: a busy thread of this process would else run for
        # milliseconds at the very moment at which the file is locked.
        self._flock = ctypes.PyDLL(None).flock
        self._descriptor = -1
        self._open()
        tell_of_forks(self)

    def acquire(self, patience_s: float) -> bool:
        """False when it was not free in time. FileNotFoundError in a forked child when the file is gone."""
        if not self._threads.acquire(False) and not self._threads.acquire(timeout=patience_s):
            return False
        taken = False
        try:
            if self._descriptor < 0:
                self._open()
            taken = self._flock(self._descriptor, _TAKE) == 0 or self._contend(patience_s)
        finally:
            if not taken:
                self._threads.release()
        return taken

    def release(self) -> None:
        self._flock(self._descriptor, fcntl.LOCK_UN)
        self._threads.release()

    def after_fork(self) -> None:
        self._threads = threading.Lock()
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            self._closed()
            self._descriptor = -1

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        self._closed = weakref.finalize(self, os.close, self._descriptor)

    def _contend(self, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        tries, nap_s = 1, _NAPS_S[0]
        while self._flock(self._descriptor, _TAKE) != 0:
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
            fcntl.flock(self._descriptor, _TAKE)
        except BlockingIOError:
            return False
        return True
