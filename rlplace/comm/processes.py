"""What processes of one node need of each other besides memory: who still lives, how to wake one, and a lock.

A process goes by one word, pid and start time, so that a recycled pid is not taken for the process that had it before.

A waker is a Unix datagram socket in the abstract namespace, bound to a name of the kernel's choice: five hexadecimal
digits, so that the waker's number fits in a word. A thread that waits sleeps in the kernel until it is woken.

The lock is a robust mutex of the C library in shared memory: the kernel frees it when its holder dies. Taking and
leaving it is no system call unless another process waits. It belongs to a thread, so it also works between the threads
of a process, and a forked child has no part in what its parent holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import mmap
import os
import socket
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Final

_PID_BITS = 22  # Linux gives no larger pid (kernel's PID_MAX_LIMIT)

# Wakers that a process keeps for later waits on a channel; each is an open file
_IDLE = 16

LOCK_BYTES = 64
# A change takes microseconds. A process that has to wait longer than a few tries waits for a holder that was
# interrupted, and first offers it the processor, then sleeps in between.
_TRIES = 10
_OFFERS = 20
_NAPS_S = (50e-6, 2e-3)  # first and longest
_ROBUST: Final = 1  # PTHREAD_MUTEX_ROBUST
_SHARED: Final = 1  # PTHREAD_PROCESS_SHARED


def this_process() -> int:
    """The word of this process; positive, below 2**63. A forked child has its own."""
    return _word_of(os.getpid())


def pid_of(word: int) -> int:
    return word & ((1 << _PID_BITS) - 1)


def alive(word: int) -> bool:
    """False once the process has ended; a zombie has ended."""
    return word > 0 and _read(pid_of(word)) == word


def in_forks(method: Callable[[], None]) -> None:
    """Call a method in every child that is forked while its object lives."""
    methods = _called_in_forks()
    methods.add(weakref.WeakMethod(method, methods.discard))


@cache
def _called_in_forks() -> set[weakref.WeakMethod[Callable[[], None]]]:
    methods: set[weakref.WeakMethod[Callable[[], None]]] = set()

    def after_fork() -> None:
        for method in tuple(methods):
            living = method()
            if living is not None:
                living()

    os.register_at_fork(after_in_child=after_fork)  # once: what is registered stays
    return methods


@cache
def _word_of(pid: int) -> int:
    word = _read(pid)
    assert word is not None, f"/proc does not know process {pid}"
    return word


def _read(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name before it may hold anything
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    started = int(fields[19])  # field 22 of proc(5): clock ticks after boot
    return (started & ((1 << 40) - 1)) << _PID_BITS | pid


class Waker:
    """Ends the sleep of one thread or task at a time. `number` names it to all processes of the node and is never 0."""

    def __init__(self) -> None:
        self.number = 0
        while not self.number:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind("")
            self.number = int(self._socket.getsockname()[1:], 16)
        self.close = weakref.finalize(self, self._socket.close)

    def wait(self, seconds: float) -> bool:
        """Whether it was woken. A wake meant for an earlier sleeper may end the wait early."""
        self._socket.settimeout(max(seconds, 1e-6))  # 0 would not wait
        try:
            self._socket.recv(1)
        except TimeoutError:
            return False
        return True

    async def sleep(self, seconds: float) -> None:
        """As `wait`, for a task."""
        self._socket.setblocking(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().sock_recv(self._socket, 1)


class Wakers:
    """The wakers of this process for one channel, and the socket that wakes those of others."""

    def __init__(self) -> None:
        self._idle: list[Waker] = []
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        )
        self._finalizer = weakref.finalize(self, self._socket.close)

    def take(self) -> Waker:
        """One for a request that is about to wait."""
        try:
            return self._idle.pop()
        except IndexError:
            return Waker()

    def give_back(self, waker: Waker) -> None:
        if len(self._idle) < _IDLE:
            self._idle.append(waker)
        else:
            waker.close()

    def wake(self, number: int) -> None:
        """Never blocks: a waker that holds wakes already ends its owner's sleep anyway, one that is gone is dead."""
        with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
            self._socket.sendto(b"", b"\0%05x" % number)

    def close(self) -> None:
        self._finalizer()
        for waker in self._idle:
            waker.close()
        self._idle.clear()


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
        c = ctypes.CDLL(None)
        kind = ctypes.create_string_buffer(LOCK_BYTES)
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
            # The C library would go on to refer to a mutex that this thread still holds
            self._unlock(self._mutex)
        self._try = self._unlock = _closed

    def _taken(self, code: int) -> bool:
        # The last holder died; what it left is for the caller to see
        if code == errno.EOWNERDEAD:
            self._repair(self._mutex)
            return True
        if code not in (0, errno.EBUSY):
            raise OSError(code, os.strerror(code))
        return code == 0

    def _contend(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        tries = 1
        nap_s = _NAPS_S[0]
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
