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
_TRIES, _OFFERS = 10, 20  # a change takes microseconds: try again, offer the processor, and only then sleep
_SLICE_S = 0.2  # of a wait, so that a signal is noticed
_ROBUST: Final = 1  # PTHREAD_MUTEX_ROBUST
_SHARED: Final = 1  # PTHREAD_PROCESS_SHARED


class SharedLock:
    """The lock at byte `at` of `mapped`, where `make` has put it."""

    def __init__(self, mapped: mmap.mmap, at: int) -> None:
        self._mapped = mapped  # as long as the lock is used
        self._mutex = ctypes.c_void_p(_address(mapped, at))
        quick, slow = ctypes.PyDLL(None), ctypes.CDLL(None)
        # PyDLL keeps the interpreter's lock: a busy thread of this process would else run for milliseconds at the very
        # moment at which the mutex is taken.
        self._try: Any = quick.pthread_mutex_trylock
        self._unlock: Any = quick.pthread_mutex_unlock
        self._repair: Any = quick.pthread_mutex_consistent
        self._wait: Any = slow.pthread_mutex_clocklock

    @staticmethod
    def make(mapped: mmap.mmap, at: int) -> None:
        """Put a free lock there. For the maker of the file, before another process sees it."""
        c, kind = ctypes.CDLL(None), ctypes.create_string_buffer(LOCK_BYTES)
        c.pthread_mutexattr_init(kind)
        c.pthread_mutexattr_setpshared(kind, _SHARED)
        c.pthread_mutexattr_setrobust(kind, _ROBUST)
        c.pthread_mutex_init(ctypes.c_void_p(_address(mapped, at)), kind)
        c.pthread_mutexattr_destroy(kind)

    def acquire(self, patience_s: float) -> bool:
        """False when it was not free in time."""
        code = self._try(self._mutex)
        return code == 0 or self._taken(code) or self._contend(patience_s)

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
        if code not in (0, errno.EBUSY, errno.ETIMEDOUT):
            raise OSError(code, os.strerror(code))
        return code == 0

    def _contend(self, patience_s: float) -> bool:
        for turn in range(_TRIES + _OFFERS):
            if turn >= _TRIES:
                os.sched_yield()
            if self._taken(self._try(self._mutex)):
                return True
        deadline = time.monotonic() + patience_s
        while True:
            until = min(time.monotonic() + _SLICE_S, deadline)
            moment = (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9))  # struct timespec
            if self._taken(self._wait(self._mutex, time.CLOCK_MONOTONIC, moment)):
                return True
            if until >= deadline:
                return False


def _address(mapped: mmap.mmap, at: int) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped, at))


def _closed(mutex: object) -> int:
    raise ValueError("the lock was closed")
