"""The channel between threads of one process: items pass by reference, nothing is copied."""

from __future__ import annotations

import threading
from typing import Any

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import Attachment, QueueEnd
from rlplace.comm.table import Table

_THIS_PROCESS = 1  # between threads there is no other


class LocalChannel(QueueEnd):
    """An item belongs to the thread that takes it: a producer must not change it after `put`."""

    def __init__(self, spec: ChannelSpec) -> None:
        super().__init__(Attachment(local_table(spec), References(), ThreadLock(), _THIS_PROCESS))


def local_table(spec: ChannelSpec) -> Table:
    """A table in memory of this process."""
    table = Table(spec, bytearray(Table(spec, inline=False).size_bytes), inline=False)
    table.clear()
    return table


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
