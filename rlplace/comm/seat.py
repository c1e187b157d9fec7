"""Where a networked channel's state lives: one ChannelQueue driven from an asyncio loop.

Requests and replies are bytes packed here, so that the process around it copies them without looking inside: an item
stays pickled from its producer to its consumer. Knows nothing of Ray, of numpy or of what the items are.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, NamedTuple

from rlplace.comm.channel import BatchPolicy, ChannelSpec, ChannelStats
from rlplace.comm.queue import ChannelQueue
from rlplace.comm.tickets import Get, GetBatch, Put, Reserve, Ticket
from rlplace.errors import ChannelError


class Request(NamedTuple):
    """What every request says. A tuple: it is packed for every message."""

    client: str  # one per process and channel
    serial: int  # unique within the client
    owner: str
    key: str
    patience_s: float | None  # None: does not wait


class Entry(NamedTuple):
    """An item on its way: packed, or a reference to where it lies."""

    key: str
    weight: float
    size_bytes: int
    data: Any


def pack(*values: object) -> bytes:
    return pickle.dumps(values, 5)


def unpack(data: bytes) -> Any:
    return pickle.loads(data)


class ChannelSeat:
    """Owns the state of one channel. All methods run in one event loop.

    A client that dies is noticed by its lifeline; its waiters leave and its unfilled reservations free their credit.
    """

    def __init__(self, spec: ChannelSpec) -> None:
        self._queue = ChannelQueue(spec)
        self._open: dict[str, dict[int, Ticket]] = {}  # client -> its waiters and unfilled reservations

    async def put(self, packed: bytes) -> bytes:
        """b"" when the item is in, else a packed ChannelError."""
        request, weight, size_bytes, data = unpack(packed)
        request = Request(*request)
        ticket = Put(owner=request.owner, key=request.key, weight=weight, size_bytes=size_bytes, item=data)
        _wake(self._queue.put(ticket, time.monotonic()))
        if not ticket.settled:
            await self._settle(ticket, request)
        return b"" if ticket.error is None else pack(ticket.error)

    async def reserve(self, packed: bytes) -> bytes:
        """As `put`, for an item whose data follows with `fill` under the same serial."""
        request, weight, size_bytes = unpack(packed)
        request = Request(*request)
        ticket = Reserve(owner=request.owner, key=request.key, weight=weight, size_bytes=size_bytes)
        _wake(self._queue.put(ticket, time.monotonic()))
        if not ticket.settled:
            await self._settle(ticket, request)
        if ticket.error is not None:
            return pack(ticket.error)
        self._open.setdefault(request.client, {})[request.serial] = ticket
        return b""

    async def fill(self, client: str, serial: int, data: Sequence[Any]) -> None:
        """Delivers the one element of `data`; a sequence, so that a reference arrives as a reference."""
        ticket = self._open.get(client, {}).pop(serial, None)
        if isinstance(ticket, Reserve):
            _wake(self._queue.fill(ticket, data[0], time.monotonic()))

    async def get(self, packed: bytes) -> bytes | list[Entry]:
        """Packed entries (none if withdrawn) or a packed ChannelError; a plain list where one holds a reference."""
        request, batch = unpack(packed)
        request = Request(*request)
        ticket = _get_ticket(request, batch)
        _wake(self._queue.get(ticket, time.monotonic()))
        if not ticket.settled:
            await self._settle(ticket, request)
        if ticket.error is not None:
            return pack(ticket.error)
        entries = [Entry(e.key, e.weight, e.size_bytes, e.item) for e in ticket.taken]
        if all(isinstance(e.data, bytes) for e in entries):
            return pack(*(tuple(e) for e in entries))
        return entries

    async def withdraw(self, client: str, serial: int) -> None:
        ticket = self._open.get(client, {}).pop(serial, None)
        if ticket is not None:
            self._withdraw(ticket)

    async def restore(self, entries: Sequence[Entry]) -> None:
        """Takes back what a client was given but could not use."""
        puts = [Put(owner="", key=e.key, weight=e.weight, size_bytes=e.size_bytes, item=e.data) for e in entries]
        _wake(self._queue.restore(puts, time.monotonic()))

    async def leave(self, producer: str) -> None:
        _wake(self._queue.leave(producer, time.monotonic()))

    async def close(self) -> None:
        _wake(self._queue.close(time.monotonic()))

    async def break_(self, why: str) -> None:
        _wake(self._queue.break_(why, time.monotonic()))

    async def stats(self) -> ChannelStats:
        return self._queue.stats(time.monotonic())

    async def lifeline(self) -> None:
        """Never returns. The caller owns this call's result, so who waits for the result learns of the caller's end."""
        await asyncio.Event().wait()

    async def attach(self, client: str, lifeline: Sequence[Awaitable[None]]) -> None:
        """Waits for the end of the client, then forgets it."""
        try:
            await lifeline[0]
        finally:
            for ticket in self._open.pop(client, {}).values():
                self._withdraw(ticket)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _settle(self, ticket: Ticket, request: Request) -> None:
        if request.patience_s is None:
            _wake(self._queue.refuse(ticket, time.monotonic()))
            return
        loop = asyncio.get_running_loop()
        settled = loop.create_future()

        def wake() -> None:
            if not settled.done():
                settled.set_result(None)

        ticket.wake = wake
        deadline = loop.call_later(request.patience_s, self._expire, ticket)
        waiters = self._open.setdefault(request.client, {})
        waiters[request.serial] = ticket
        try:
            await settled
        finally:
            deadline.cancel()
            waiters.pop(request.serial, None)
            if not ticket.settled:
                self._withdraw(ticket)

    def _expire(self, ticket: Ticket) -> None:
        _wake(self._queue.expire(ticket, time.monotonic()))

    def _withdraw(self, ticket: Ticket) -> None:
        _wake([ticket, *self._queue.withdraw(ticket, time.monotonic())])


def _get_ticket(request: Request, batch: tuple[float, BatchPolicy] | None) -> Get:
    if batch is None:
        return Get(owner=request.owner, key=request.key)
    weight, policy = batch
    return GetBatch(owner=request.owner, key=request.key, weight=weight, policy=policy)


def _wake(settled: Iterable[Ticket]) -> None:
    for ticket in settled:
        if ticket.wake is not None:
            ticket.wake()


def refused(reply: object) -> ChannelError | None:
    """The error in an unpacked reply."""
    return reply[0] if isinstance(reply, tuple) and reply and isinstance(reply[0], ChannelError) else None
