"""Wake a thread or a task, of this process or another: an empty datagram to a socket without a file.

A waker is a Unix datagram socket in the abstract namespace, bound to a name of the kernel's choice: five hexadecimal
digits, so that the waker's number fits in a word. A thread that waits sleeps in the kernel until it is woken.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import weakref

_IDLE = 16  # wakers that a process keeps for later waits on a channel; each is an open file


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
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
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
