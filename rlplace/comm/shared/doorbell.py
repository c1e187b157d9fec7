"""Wakes a thread or an asyncio loop of another process: an empty datagram to a socket without a file.

A bell is a Unix datagram socket in the abstract namespace, bound to a name of the kernel's choice: five hexadecimal
digits, so that the bell's number fits in a word. Whoever waits sleeps in the kernel until it rings or its time is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import weakref
from collections.abc import Callable


class Bell:
    """Belongs to one waiting thread at a time. `number` names it to all processes of the node and is never 0."""

    def __init__(self) -> None:
        self.number, self._socket = _listening()
        self.close = weakref.finalize(self, self._socket.close)

    def wait(self, seconds: float) -> bool:
        """Whether it rang. A ring meant for an earlier waiter may end the wait early."""
        self._socket.settimeout(max(seconds, 1e-6))  # 0 would not wait
        try:
            self._socket.recv(1)
        except TimeoutError:
            return False
        return True


class LoopBell:
    """Belongs to one asyncio loop, for all its waiting tasks, and is watched by the loop only while there are any."""

    def __init__(self) -> None:
        self.number, self._socket = _listening()
        self._socket.setblocking(False)
        self.close = weakref.finalize(self, self._socket.close)
        self._rung: dict[object, Callable[[], None]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, task: object, rung: Callable[[], None]) -> None:
        """Calls `rung` in the loop at every ring, until `remove`."""
        if not self._rung:
            loop.add_reader(self._socket.fileno(), self._read)
        self._rung[task] = rung

    def remove(self, loop: asyncio.AbstractEventLoop, task: object) -> None:
        del self._rung[task]
        if not self._rung:
            loop.remove_reader(self._socket.fileno())

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._socket.recv(1)
        for rung in self._rung.values():
            rung()


class Ringer:
    """Rings bells. Never blocks: a bell that holds rings already wakes its owner anyway, one that is gone is dead."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.close = weakref.finalize(self, self._socket.close)

    def ring(self, number: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
            self._socket.sendto(b"", b"\0%05x" % number)


def _listening() -> tuple[int, socket.socket]:
    """A socket bound to a new number."""
    while True:
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bell.bind("")
        number = int(bell.getsockname()[1:], 16)
        if number:
            return number, bell
        bell.close()
