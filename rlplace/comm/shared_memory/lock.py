"""A lock between processes: a robust mutex of the C library in shared memory. The kernel frees it when its holder dies.

Taking and leaving it is no system call unless another process waits. It belongs to a thread, so it also works between
the threads of a process, and a forked child has no part in what its parent holds.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from typing import Any, Final

LOCK_BYTES = 64
# A change takes microseconds. A process that has to wait longer than a few tries waits for a holder that was
# interrupted, and first offers it the processor, then sleeps in between.
_TRIES, _OFFERS = 10, 20
_NAPS_S = (50e-6, 2e-3)  # first and longest
_ROBUST: Final = 1  # PTHREAD_MUTEX_ROBUST
_SHARED: Final = 1  # PTHREAD_PROCESS_SHARED


class SharedLock:
    """The lock at byte `at` of `mapped`, where `make` has put it."""

    def __init__(self, mapped: mmap.mmap, at: int) -> None:
        self._mapped = mapped  # as long as the lock is used
        self._mutex = ctypes.c_void_p(_address(mapped, at))
        # PyDLL keeps the interpreter's lock: a busy thread of this process would else run for milliseconds at the very
        # moment at which the mutex is taken.
        c = ctypes.PyDLL(None)
        self._try: Any = c.pthread_mutex_trylock
        self._unlock: Any = c.pthread_mutex_unlock
        self._repair: Any = c.pthread_mutex_consistent

    @staticmethod
    def make(mapped: mmap.mmap, at: int) -> None:
        """Put a free lock there. For the maker of the file, before another process sees it."""
        c, kind = ctypes.CDLL(None), ctypes.create_string_buffer(LOCK_BYTES)
        c.pthread_mutexattr_init(kind)
        c.pthread_mutexattr_setpshared(kind, _SHARED)
        c.pthread_mutexattr_setrobust(kind, _ROBUST)
        c.pthread_mutex_init(ctypes.c_void_p(_address(mapped, at)), kind)
        c.pthread_mutexattr_destroy(kind)

    def acquire(self, *, timeout: float) -> bool:
        """As of threading.Lock: False when it was not free in so many seconds."""
        code = self._try(self._mutex)
        return code == 0 or self._taken(code) or self._contend(timeout)

    def release(self) -> None:
        self._unlock(self._mutex)

    def close(self) -> None:
        """Never touch the memory again: any later call is a ValueError. Idempotent."""
        if self._unlock is not _closed:
            self._unlock(self._mutex)  # the C library would go on to refer to a mutex that this thread still holds
        self._try = self._unlock = _closed

    def _taken(self, code: int) -> bool:
        if code == errno.EOWNERDEAD:  # the last holder died; what it left is for the caller to see
            self._repair(self._mutex)
            return True
        if code not in (0, errno.EBUSY):
            raise OSError(code, os.strerror(code))
        return code == 0

    def _contend(self, timeout: float) -> bool:
        deadline, tries, nap_s = time.monotonic() + timeout, 1, _NAPS_S[0]
        while not self._taken(self._try(self._mutex)):
            tries += 1
            if tries > _TRIES + _OFFERS:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(nap_s)
                nap_s = min(nap_s * 1.5, _NAPS_S[1])
            elif tries > _TRIES:
                os.sched_yield()
        return True


def _address(mapped: mmap.mmap, at: int) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped, at))


def _closed(mutex: object) -> int:
    raise ValueError("the lock was closed")
