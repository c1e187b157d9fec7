"""The channel between threads of one process: items pass by reference, nothing is copied."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import Attachment, QueueEnd, Waker
from rlplace.comm.table import NEWEST_VERSION, NO_VERSION, Layout

_THIS_PROCESS = 1  # between threads there is no other


class LocalChannel(QueueEnd):
    """An item belongs to the thread that takes it: a producer must not change it after `put`."""

    def __init__(self, spec: ChannelSpec) -> None:
        references = References()
        super().__init__(
            Attachment(LocalMemory(spec), references, ThreadLock(), ThreadWakers(), _THIS_PROCESS), references
        )


class LocalMemory:
    """A table in memory of this process."""

    def __init__(self, spec: ChannelSpec) -> None:
        self.spec = spec
        self.layout = Layout.of(spec, inline=False)
        self.data = memoryview(bytearray(self.layout.words * 8))
        self.words, self.reals = self.data.cast("q"), self.data.cast("d")
        self.words[NEWEST_VERSION] = NO_VERSION


class References:
    """Implements Store: the items by entry, each in a tuple of its own."""

    def __init__(self) -> None:
        self._items: dict[int, tuple[Any]] = {}

    def place(self, entry: int, payload: tuple[Any]) -> None:
        self._items[entry] = payload

    def take(self, entry: int) -> tuple[Any]:
        return self._items.pop(entry)

    def drop(self, entry: int) -> None:
        self._items.pop(entry, None)

    def pack(self, item: Any) -> tuple[Any]:
        return (item,)

    def goes_along(self, packed: tuple[Any]) -> bool:
        return True

    def write(self, packed: tuple[Any]) -> tuple[Any]:
        return packed

    def release(self, payload: tuple[Any]) -> None:
        """Nothing to give back."""

    def open(self, payload: tuple[Any]) -> Any:
        return payload[0]


class ThreadLock:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.release = self._lock.release

    def acquire(self, patience_s: float) -> bool:
        return self._lock.acquire(timeout=patience_s)


class ThreadWaker:
    """A lock that is released to wake."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._closed = threading.Lock()
        self._closed.acquire()

    def wait(self, seconds: float) -> bool:
        return self._closed.acquire(timeout=max(seconds, 0.0))

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was woken and has not noticed yet
            self._closed.release()


class ThreadWakers:
    """By number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._idle: list[ThreadWaker] = []
        self._waiting: dict[int, ThreadWaker] = {}

    def take(self) -> ThreadWaker:
        try:
            waker = self._idle.pop()
        except IndexError:
            waker = ThreadWaker(next(self._numbers))
        self._waiting[waker.number] = waker
        return waker

    def give_back(self, waker: Waker) -> None:
        self._idle.append(self._waiting.pop(waker.number))

    def wake(self, number: int) -> None:
        waker = self._waiting.get(number)
        if waker is not None:
            waker.wake()

    def pause(self) -> bool:
        return False  # a thread that spins keeps the others of its process from running
