"""The channel between threads of one process: items pass by reference, nothing is copied."""

from __future__ import annotations

import threading
from typing import Any

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import Attachment, QueueEnd
from rlplace.comm.queue import Get, Put
from rlplace.comm.table import Table


class LocalChannel(QueueEnd):
    """An item belongs to the thread that takes it: a producer must not change it after `put`."""

    def __init__(self, spec: ChannelSpec) -> None:
        super().__init__(Attachment(local_table(spec), References(), threading.Lock(), spins=False))

    def _put(self, item: Any, key: str, weight: float, version: int | None, patience_s: float | None) -> None:
        put = Put(self.owner, key, weight, version, (item,))
        self._attachment.attempt(self._attachment.queue.put, put, patience_s)

    def _get(self, limit: float | None, key: str, patience_s: float | None) -> list[Any]:
        get = Get(self.owner, key, limit)
        self._attachment.attempt(self._attachment.queue.get, get, patience_s)
        return [item for (item,), _, _ in get.taken]


def local_table(spec: ChannelSpec) -> Table:
    """A table in memory of this process."""
    table = Table(spec, bytearray(Table(spec, inline=False).size_bytes), inline=False)
    table.clear()
    return table


class References(dict[int, tuple[Any]]):
    """Implements Store: the items by entry, each in a tuple of its own."""

    place = dict.__setitem__
    take = dict.pop

    def drop(self, entry: int) -> None:
        self.pop(entry, None)
