"""The channel between threads and asyncio tasks of one process: items pass by reference, nothing is copied."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from rlplace.comm import codec
from rlplace.comm.channel import BatchPolicy, ChannelSpec, ChannelStats, Lease
from rlplace.comm.lease import OwnedLease
from rlplace.comm.queue import ChannelQueue
from rlplace.comm.tickets import Get, GetBatch, Put, Reserve, Ticket

_INLINE_BYTES = 32 << 10  # of an item that a gate takes out: above it, in pieces


class LocalChannel:
    """Implements Channel for threads. An item belongs to whoever takes it: a producer must not change it after `put`.

    The queue and its lock belong to the first end; `named` ends share them.
    """

    def __init__(self, spec: ChannelSpec) -> None:
        self._queue = ChannelQueue(spec)
        self._lock = threading.Lock()
        self._owner = "an unnamed worker"

    @property
    def spec(self) -> ChannelSpec:
        return self._queue.spec

    def named(self, owner: str) -> LocalChannel:
        end = LocalChannel.__new__(LocalChannel)
        end._queue, end._lock, end._owner = self._queue, self._lock, owner
        return end

    # ── putting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        item: Any,
        *,
        key: str = "",
        weight: float = 1.0,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._wait(self._queue.put, self._put_ticket(item, key, weight, version), timeout_s)

    def put_nowait(self, item: Any, *, key: str = "", weight: float = 1.0, version: int | None = None) -> None:
        self._at_once(self._put_ticket(item, key, weight, version))

    async def put_async(
        self,
        item: Any,
        *,
        key: str = "",
        weight: float = 1.0,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        await self._wait_async(self._queue.put, self._put_ticket(item, key, weight, version), timeout_s)

    # ── getting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, *, key: str = "", timeout_s: float | None = None) -> Any:
        ticket = Get(owner=self._owner, key=key)
        self._wait(self._queue.get, ticket, timeout_s)
        return ticket.taken[0].item

    def get_nowait(self, *, key: str = "") -> Any:
        ticket = Get(owner=self._owner, key=key)
        self._at_once(ticket)
        return ticket.taken[0].item

    async def get_async(self, *, key: str = "", timeout_s: float | None = None) -> Any:
        ticket = Get(owner=self._owner, key=key)
        await self._wait_async(self._queue.get, ticket, timeout_s)
        return ticket.taken[0].item

    def get_lease(self, *, key: str = "", timeout_s: float | None = None) -> Lease:
        return OwnedLease(self.get(key=key, timeout_s=timeout_s))

    def get_batch(
        self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most", timeout_s: float | None = None
    ) -> list[Any]:
        ticket = GetBatch(owner=self._owner, key=key, weight=weight, policy=policy)
        self._wait(self._queue.get, ticket, timeout_s)
        return [entry.item for entry in ticket.taken]

    def get_batch_nowait(self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most") -> list[Any]:
        ticket = GetBatch(owner=self._owner, key=key, weight=weight, policy=policy)
        self._at_once(ticket)
        return [entry.item for entry in ticket.taken]

    async def get_batch_async(
        self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most", timeout_s: float | None = None
    ) -> list[Any]:
        ticket = GetBatch(owner=self._owner, key=key, weight=weight, policy=policy)
        await self._wait_async(self._queue.get, ticket, timeout_s)
        return [entry.item for entry in ticket.taken]

    # ── versions, endings and statistics ─────────────────────────────────────────────────────────────────────────────

    def advance(self, version: int) -> None:
        with self._lock:
            _wake(self._queue.advance(version, time.monotonic()))

    def leave(self, producer: str) -> None:
        with self._lock:
            _wake(self._queue.leave(producer, time.monotonic()))

    def close(self) -> None:
        with self._lock:
            _wake(self._queue.close(time.monotonic()))

    def break_(self, why: str) -> None:
        with self._lock:
            _wake(self._queue.break_(why, time.monotonic()))

    def stats(self) -> ChannelStats:
        with self._lock:
            return self._queue.stats(time.monotonic())

    # ── for a gate: see network.backing ──────────────────────────────────────────────────────────────────────────────

    async def put_packed(
        self,
        packed: bytes,
        size_bytes: int,
        *,
        key: str,
        weight: float,
        version: int | None,
        patience_s: float | None,
    ) -> None:
        item = codec.open_packed(packed)
        ticket = Put(owner=self._owner, key=key, size_bytes=size_bytes, weight=weight, version=version, item=item)
        await self._settle_async(self._queue.put, ticket, patience_s)

    async def reserve(
        self, size_bytes: int, *, key: str, weight: float, version: int | None, patience_s: float | None
    ) -> LocalReservation:
        ticket = Reserve(owner=self._owner, key=key, size_bytes=size_bytes, weight=weight, version=version)
        await self._settle_async(self._queue.put, ticket, patience_s)
        return LocalReservation(self, ticket)

    async def take(self, batch: tuple[float, BatchPolicy] | None, *, key: str, patience_s: float | None) -> LocalTaking:
        if batch is None:
            ticket = Get(owner=self._owner, key=key)
        else:
            ticket = GetBatch(owner=self._owner, key=key, weight=batch[0], policy=batch[1])
        await self._settle_async(self._queue.get, ticket, patience_s)
        return LocalTaking(self, ticket)

    def died(self, owner: str) -> None:
        with self._lock:
            _wake(self._queue.died(owner, time.monotonic()))

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _settle_async(
        self, ask: Callable[[Any, float], list[Ticket]], ticket: Put | Get, patience_s: float | None
    ) -> None:
        if patience_s is None:
            self._at_once(ticket)
        else:
            await self._wait_async(ask, ticket, patience_s)

    def _put_ticket(self, item: Any, key: str, weight: float, version: int | None) -> Put:
        return Put(
            owner=self._owner, key=key, size_bytes=codec.size_bytes(item), weight=weight, version=version, item=item
        )

    def _submit(self, ask: Callable[[Any, float], list[Ticket]], ticket: Ticket, wake: Callable[[], None]) -> bool:
        """Whether the ticket is settled already; else `wake` will be called, once, in whichever thread settles it."""
        with self._lock:
            _wake(ask(ticket, time.monotonic()))
            if not ticket.settled:
                ticket.wake = wake
            return ticket.settled

    def _give_up(self, how: Callable[[Ticket, float], list[Ticket]], ticket: Ticket) -> None:
        with self._lock:
            _wake(how(ticket, time.monotonic()))

    def _at_once(self, ticket: Put | Get) -> None:
        with self._lock:
            _wake(self._queue.attempt(ticket, time.monotonic()))
        _check(ticket)

    def _wait(self, ask: Callable[[Any, float], list[Ticket]], ticket: Ticket, timeout_s: float | None) -> None:
        woken = threading.Event()
        if not self._submit(ask, ticket, woken.set):
            try:
                if not woken.wait(self._deadline(timeout_s)):
                    self._give_up(self._queue.expire, ticket)
            finally:
                if not ticket.settled:  # interrupted: nobody will look at the outcome
                    self._give_up(self._queue.withdraw, ticket)
        _check(ticket)

    async def _wait_async(
        self, ask: Callable[[Any, float], list[Ticket]], ticket: Ticket, timeout_s: float | None
    ) -> None:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        if not self._submit(ask, ticket, lambda: _wake_in(loop, woken)):
            try:
                async with asyncio.timeout(self._deadline(timeout_s)):
                    await woken.wait()
            except TimeoutError:
                self._give_up(self._queue.expire, ticket)
            except asyncio.CancelledError:
                self._give_up(self._queue.withdraw, ticket)
                raise
        _check(ticket)

    def _deadline(self, timeout_s: float | None) -> float:
        return self.spec.timeout_s if timeout_s is None else timeout_s


class LocalReservation:
    """Credit for an item that is still on its way to this process."""

    def __init__(self, channel: LocalChannel, ticket: Reserve) -> None:
        self._channel, self._ticket = channel, ticket

    def fill(self, packed: codec.Packed) -> None:
        item = codec.open_packed(packed)
        with self._channel._lock:
            _wake(self._channel._queue.fill(self._ticket, item, time.monotonic()))

    def withdraw(self) -> None:
        self._channel._give_up(self._channel._queue.withdraw, self._ticket)


class LocalTaking:
    """Items on their way out of this process."""

    def __init__(self, channel: LocalChannel, ticket: Get) -> None:
        self._channel, self._ticket = channel, ticket

    @property
    def packed(self) -> list[codec.Packed]:
        return [codec.pack(entry.item, _INLINE_BYTES) for entry in self._ticket.taken]

    def restore(self) -> None:
        self._channel._give_up(self._channel._queue.withdraw, self._ticket)


def _wake(settled: Iterable[Ticket]) -> None:
    for ticket in settled:
        if ticket.wake is not None:
            ticket.wake()


def _wake_in(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    if not loop.is_closed():  # the waiter's loop may have ended without a word
        loop.call_soon_threadsafe(woken.set)


def _check(ticket: Ticket) -> None:
    if ticket.error is not None:
        raise ticket.error
