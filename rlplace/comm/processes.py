"""Liveness checks, wake-up sockets and a lock for the processes of one node.

A process is identified by a number made of pid and start time, so a reused pid does not identify the earlier process.

A waker is a Unix datagram socket in the abstract namespace. The kernel chooses its name, five hexadecimal digits, so
that the waker's number fits in a word. A thread that waits sleeps in the kernel until it is woken.

The lock is a robust mutex of the C library in shared memory: the kernel frees it when its holder dies. Acquiring and
releasing it is no system call unless another process waits. A thread owns it, so it also works between the threads of
a process, and a forked child does not share what its parent holds.
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

_PID_BITS = 22  # the largest pid of Linux (PID_MAX_LIMIT of the kernel)

# Idle wakers that a process keeps per channel for later waits; each is an open file
_IDLE = 16

LOCK_BYTES = 64
# A change under the lock takes microseconds. A process that waits longer than a few tries waits for a holder that was
# interrupted: it first yields the processor, then sleeps between tries.
_TRIES = 10
_OFFERS = 20
_NAPS_S = (50e-6, 2e-3)  # first and longest
_ROBUST: Final = 1  # PTHREAD_MUTEX_ROBUST
_SHARED: Final = 1  # PTHREAD_PROCESS_SHARED


def this_process() -> int:
    """Return the number ("word") that identifies this process on its node: positive, below 2**63.

    The number is made of pid and start time, so a forked child has a number of its own.
    """
    return _word_of(os.getpid())


def pid_of(word: int) -> int:
    """Return the pid of the process with the number `word`, as `this_process` returns it."""
    return word & ((1 << _PID_BITS) - 1)


def alive(word: int) -> bool:
    """Return whether the process with the number `word` still lives. A zombie process counts as dead."""
    return word > 0 and _read(pid_of(word)) == word


def in_forks(method: Callable[[], None]) -> None:
    """Make every child process that is forked from this process call `method` at its start.

    `method`: a bound method. Only a weak reference to it is kept: children no longer call it once its object is gone.
    """
    methods = _called_in_forks()
    methods.add(weakref.WeakMethod(method, methods.discard))


@cache
def _called_in_forks() -> set[weakref.WeakMethod[Callable[[], None]]]:
    """Return the set of methods that forked children call. Change this set to add a method.

    The first call makes the set and registers it with `os`.
    """
    methods: set[weakref.WeakMethod[Callable[[], None]]] = set()

    def after_fork() -> None:
        for method in tuple(methods):
            living = method()
            if living is not None:
                living()

    os.register_at_fork(after_in_child=after_fork)
    return methods


@cache
def _word_of(pid: int) -> int:
    """Return the number of the living process `pid`, as `this_process` defines it. The result is cached."""
    word = _read(pid)
    assert word is not None, f"/proc does not know process {pid}"
    return word


def _read(pid: int) -> int | None:
    """Return the number of the process that has `pid` now, or None if there is no such process or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name before the last bracket may contain anything
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    # Field 22 of proc(5): clock ticks since boot
    started = int(fields[19])
    return (started & ((1 << 40) - 1)) << _PID_BITS | pid


class Waker:
    """A socket on which one thread or task at a time sleeps until a process of the node wakes it.

    `number`: identifies the waker on its node; never 0.
    """

    def __init__(self) -> None:
        self.number = 0
        # The kernel may choose the name 00000, and 0 means no waker
        while not self.number:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind("")
            self.number = int(self._socket.getsockname()[1:], 16)
        self.close = weakref.finalize(self, self._socket.close)

    def wait(self, seconds: float) -> bool:
        """Sleep until a wake arrives, at most `seconds`; return whether a wake has arrived.

        A wake that was meant for an earlier sleep may end this sleep early.
        """
        # 0 would mean not to wait at all
        self._socket.settimeout(max(seconds, 1e-6))
        try:
            self._socket.recv(1)
        except TimeoutError:
            return False
        return True

    async def sleep(self, seconds: float) -> None:
        """Sleep in an asyncio task until a wake arrives, at most `seconds`."""
        self._socket.setblocking(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().sock_recv(self._socket, 1)


class Wakers:
    """Pool of wakers of this process for one channel, with a socket that wakes sleepers of any process on the node."""

    def __init__(self) -> None:
        self._idle: list[Waker] = []
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        )
        self._finalizer = weakref.finalize(self, self._socket.close)

    def take(self) -> Waker:
        """Return a waker for a request that is about to wait."""
        try:
            return self._idle.pop()
        except IndexError:
            return Waker()

    def give_back(self, waker: Waker) -> None:
        """Keep a waker for a later wait, or close the waker if `_IDLE` wakers are kept already."""
        if len(self._idle) < _IDLE:
            self._idle.append(waker)
        else:
            waker.close()

    def wake(self, number: int) -> None:
        """Wake the thread or task that sleeps on the waker `number` of any process, without blocking.

        Errors are ignored: a full socket holds wakes already, and a missing socket belongs to a dead process.
        """
        with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
            self._socket.sendto(b"", b"\0%05x" % number)

    def close(self) -> None:
        self._finalizer()
        for waker in self._idle:
            waker.close()
        self._idle.clear()


class SharedLock:
    """A lock between processes, in shared memory.

    `mapped`: the memory. `at`: byte at which `make` has created the lock.
    """

    def __init__(self, mapped: mmap.mmap, at: int) -> None:
        # Kept alive as long as the lock is used
        self._mapped = mapped
        self._mutex = ctypes.c_void_p(_address(mapped, at))
        # PyDLL keeps the interpreter's lock. Otherwise a busy thread of this process could run for milliseconds when
        # the mutex has just been acquired.
        c = ctypes.PyDLL(None)
        self._try: Any = c.pthread_mutex_trylock
        self._unlock: Any = c.pthread_mutex_unlock
        self._repair: Any = c.pthread_mutex_consistent

    @staticmethod
    def make(mapped: mmap.mmap, at: int) -> None:
        """Create a free lock at byte `at` of `mapped`.

        Only the process that makes the file calls this, before other processes see the file.
        """
        c = ctypes.CDLL(None)
        kind = ctypes.create_string_buffer(LOCK_BYTES)
        c.pthread_mutexattr_init(kind)
        c.pthread_mutexattr_setpshared(kind, _SHARED)
        c.pthread_mutexattr_setrobust(kind, _ROBUST)
        c.pthread_mutex_init(ctypes.c_void_p(_address(mapped, at)), kind)
        c.pthread_mutexattr_destroy(kind)

    def acquire(self, *, timeout: float) -> bool:
        """Acquire the lock; return False if the lock was not free within `timeout` seconds, else True."""
        code = self._try(self._mutex)
        return code == 0 or self._taken(code) or self._contend(timeout)

    def release(self) -> None:
        self._unlock(self._mutex)

    def close(self) -> None:
        """Release the lock if this thread holds it.

        Later calls raise ValueError and do not touch the memory. Idempotent.
        """
        if self._unlock is not _closed:
            # The C library would keep a reference to a mutex that this thread still holds
            self._unlock(self._mutex)
        self._try = _closed
        self._unlock = _closed

    def _taken(self, code: int) -> bool:
        """Return whether an attempt to lock the mutex has succeeded. `code`: the result of the C function.

        Raise OSError for any failure other than a mutex that is busy.
        """
        # The last holder died; the caller checks what it left
        if code == errno.EOWNERDEAD:
            self._repair(self._mutex)
            return True
        if code not in (0, errno.EBUSY):
            raise OSError(code, os.strerror(code))
        return code == 0

    def _contend(self, timeout: float) -> bool:
        """Try to acquire the lock for at most `timeout` seconds; return whether this has succeeded.

        The first tries follow each other at once. Before each later try, this thread first yields the core, and finally
        sleeps.
        """
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
    """Return the memory address of byte `at` of a mapping."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped, at))


def _closed(mutex: object) -> int:
    """Raise ValueError. A closed lock calls this function in place of the C library's functions."""
    raise ValueError("the lock was closed")
