"""The state of one channel as a machine without threads or clocks: an event goes in, the tickets it settled come out.

::

    put ──▶ waiting putters (one line, first come first served, over all keys)
              │ credit: capacity_items, capacity_bytes
              ▼
            line of the key ──▶ waiting getters of the key (first come first served) ──▶ taken

Every channel implementation drives this class, so the contract is decided here once. After each event no getter at the
head of its key waits for what is there, and no putter at the head waits for credit that is there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from rlplace.comm import refusals
from rlplace.comm.channel import ChannelSpec, ChannelStats
from rlplace.comm.tickets import Get, GetBatch, NeverExact, Put, Reserve, Ticket
from rlplace.errors import ChannelError


class ChannelQueue:
    """Owns the items and the waiters of one channel. Not thread-safe: one driver calls it, under its own lock or loop.

    `now` is the driver's clock in seconds. A method that returns tickets returns all that it settled, its own included.
    """

    def __init__(self, spec: ChannelSpec) -> None:
        self.spec = spec
        self._lines: dict[str, deque[Put]] = {}  # a key without items has no line
        self._putters: deque[Put] = deque()
        self._getters: dict[str, deque[Get]] = {}
        self._reserved: set[Reserve] = set()
        self._items = self._bytes = 0  # credit in use: items in lines and reservations
        self._high_items = self._high_bytes = 0
        self._puts = self._gets = 0
        self._producer_wait_s = self._consumer_wait_s = 0.0
        self._producers: dict[str, None] = {}  # everyone who ever put or got, in order of appearance
        self._consumers: dict[str, None] = {}
        self._left: dict[str, None] = {}
        self._closed: str | None = None  # why
        self._broken: str | None = None
        self._now = 0.0

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, ticket: Put, now: float) -> list[Ticket]:
        """Grants credit now, or lets the ticket wait behind those that came before."""
        self._now = ticket.since = now
        self._producers[ticket.owner] = None
        refusal = self._refuse_put(ticket)
        if refusal is not None:
            return [self._fail(ticket, refusal)]
        self._putters.append(ticket)
        return self._advance()

    def fill(self, ticket: Reserve, item: object, now: float) -> list[Ticket]:
        """Puts the item of a granted reservation in its line. A reservation that was withdrawn or broken is ignored."""
        self._now = now
        if ticket not in self._reserved:
            return []
        self._reserved.remove(ticket)
        ticket.item = item
        self._enter(ticket)
        return self._advance(ticket.key)

    def get(self, ticket: Get, now: float) -> list[Ticket]:
        """Takes now, or lets the ticket wait behind those that came before for the same key."""
        self._now = ticket.since = now
        self._consumers[ticket.owner] = None
        refusal = self._refuse_get(ticket)
        if refusal is not None:
            return [self._fail(ticket, refusal)]
        self._getters.setdefault(ticket.key, deque()).append(ticket)
        return self._advance(ticket.key)

    # ── giving up ────────────────────────────────────────────────────────────────────────────────────────────────────

    def refuse(self, ticket: Ticket, now: float) -> list[Ticket]:
        """The ticket does not want to wait: ChannelFull or ChannelEmpty unless it is settled already."""
        return self._give_up(ticket, now, in_time=True)

    def expire(self, ticket: Ticket, now: float) -> list[Ticket]:
        """The ticket's deadline passed: ChannelTimeout unless it is settled already."""
        return self._give_up(ticket, now, in_time=False)

    def withdraw(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Nobody listens for the outcome any more.

        A waiter leaves, a reservation frees its credit, taken items return to the front; an item that was put stays.
        """
        self._now = now
        if not ticket.settled:
            self._remove(ticket)
            ticket.settled = True
        elif isinstance(ticket, Reserve) and ticket in self._reserved:
            self._reserved.remove(ticket)
            self._free(ticket)
        elif isinstance(ticket, Get):
            taken, ticket.taken = ticket.taken, []
            return self.restore(taken, now)
        return self._advance(ticket.key)

    def restore(self, entries: Iterable[Put], now: float) -> list[Ticket]:
        """Gives taken items back to the front of their line, in their order, even above the capacity."""
        self._now = now
        if self._broken is not None:
            return []
        returned = list(entries)
        for entry in reversed(returned):
            self._lines.setdefault(entry.key, deque()).appendleft(entry)
            self._hold(entry)
            self._gets -= 1
        return self._advance(*{entry.key for entry in returned})

    # ── endings ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def leave(self, producer: str, now: float) -> list[Ticket]:
        self._now = now
        self._left[producer] = None
        if self.spec.producers is None or len(self._left) < self.spec.producers or self._closed is not None:
            return []
        self._closed = f"all {self.spec.producers} producers have left"
        return self._advance(*self._getters)

    def close(self, now: float) -> list[Ticket]:
        """Waiting puts fail; what has credit can still be taken."""
        self._now = now
        if self._closed is not None or self._broken is not None:
            return []
        self._closed = "it was closed"
        settled: list[Ticket] = [
            self._fail(p, refusals.closed(self.spec, p.owner, p.key, self._closed)) for p in self._putters
        ]
        self._putters.clear()
        return settled + self._advance(*self._getters)

    def break_(self, why: str, now: float) -> list[Ticket]:
        self._now = now
        if self._broken is not None:
            return []
        self._broken = why
        waiting: list[Ticket] = [*self._putters, *(g for line in self._getters.values() for g in line)]
        for container in (self._putters, self._getters, self._lines, self._reserved):
            container.clear()
        self._items = self._bytes = 0
        return [self._fail(t, refusals.broken(self.spec, t.owner, why)) for t in waiting]

    def stats(self, now: float) -> ChannelStats:
        getters = [g for line in self._getters.values() for g in line]
        depths = {key: len(line) for key, line in self._lines.items()}
        for ticket in self._reserved:
            depths[ticket.key] = depths.get(ticket.key, 0) + 1
        return ChannelStats(
            depth_items=self._items,
            depth_bytes=self._bytes,
            high_water_items=self._high_items,
            high_water_bytes=self._high_bytes,
            puts=self._puts,
            gets=self._gets,
            producer_wait_s=self._producer_wait_s + sum(now - p.since for p in self._putters),
            consumer_wait_s=self._consumer_wait_s + sum(now - g.since for g in getters),
            waiting_producers=tuple(p.owner for p in self._putters),
            waiting_consumers=tuple(g.owner for g in getters),
            depth_by_key=depths,
        )

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _refuse_put(self, ticket: Put) -> ChannelError | None:
        if self._broken is not None:
            return refusals.broken(self.spec, ticket.owner, self._broken)
        if self.spec.keys is not None and ticket.key not in self.spec.keys:
            return refusals.unknown_key(self.spec, ticket.owner, ticket.key)
        if not (math.isfinite(ticket.weight) and ticket.weight >= 0):
            return refusals.bad_weight(self.spec, ticket.owner, ticket.key, ticket.weight)
        if self.spec.capacity_bytes is not None and ticket.size_bytes > self.spec.capacity_bytes:
            return refusals.item_too_large(self.spec, ticket.owner, ticket.key, ticket.size_bytes)
        if self._closed is not None:
            return refusals.closed(self.spec, ticket.owner, ticket.key, self._closed)
        if ticket.owner in self._left:
            return refusals.closed(self.spec, ticket.owner, ticket.key, f"{ticket.owner} has left")
        return None

    def _refuse_get(self, ticket: Get) -> ChannelError | None:
        if self._broken is not None:
            return refusals.broken(self.spec, ticket.owner, self._broken)
        if self.spec.keys is not None and ticket.key not in self.spec.keys:
            return refusals.unknown_key(self.spec, ticket.owner, ticket.key)
        if isinstance(ticket, GetBatch) and not (math.isfinite(ticket.weight) and ticket.weight > 0):
            return refusals.bad_weight(self.spec, ticket.owner, ticket.key, ticket.weight)
        return None

    def _advance(self, *keys: str) -> list[Ticket]:
        """Serves the getters of `keys`, admits putters on the credit this frees, and so on until nothing moves."""
        settled: list[Ticket] = []
        changed = set(keys) | self._admit(settled)
        while changed:
            for key in changed:
                self._serve(key, settled)
            changed = self._admit(settled)
        return settled

    def _admit(self, settled: list[Ticket]) -> set[str]:
        """Grants credit to the putters at the head; the keys whose getters may now be served."""
        keys: set[str] = set()
        while self._putters and self._fits(self._putters[0]):
            putter = self._putters.popleft()
            self._hold(putter)
            self._producer_wait_s += self._now - putter.since
            putter.settled = True
            settled.append(putter)
            if isinstance(putter, Reserve):
                self._reserved.add(putter)
            else:
                self._enter(putter)
                keys.add(putter.key)
        return keys

    def _enter(self, entry: Put) -> None:
        self._lines.setdefault(entry.key, deque()).append(entry)
        self._puts += 1

    def _serve(self, key: str, settled: list[Ticket]) -> None:
        getters = self._getters.get(key)
        while getters:
            getter, line = getters[0], self._lines.get(key)
            if line:
                try:
                    count = getter.count(line, self._ended(key))
                except NeverExact as never:
                    assert isinstance(getter, GetBatch)
                    error: ChannelError = refusals.inexact(self.spec, getter.owner, key, getter.weight, never.sums)
                else:
                    if count == 0:
                        return
                    self._take(getters.popleft(), line, count)
                    settled.append(getter)
                    continue
            elif self._ended(key):
                error = refusals.end_of_stream(self.spec, getter.owner, key, self._closed or "")
            else:
                return
            getters.popleft()
            self._consumer_wait_s += self._now - getter.since
            settled.append(self._fail(getter, error))
        self._getters.pop(key, None)

    def _take(self, getter: Get, line: deque[Put], count: int) -> None:
        getter.taken = [line.popleft() for _ in range(count)]
        if not line:
            del self._lines[getter.key]
        for entry in getter.taken:
            self._free(entry)
        self._gets += count
        self._consumer_wait_s += self._now - getter.since
        getter.settled = True

    def _ended(self, key: str) -> bool:
        """Nothing will follow in this key: closed, and nobody holds or waits for credit for it."""
        if self._closed is None:
            return False
        return not any(p.key == key for p in self._putters) and not any(r.key == key for r in self._reserved)

    def _fits(self, entry: Put) -> bool:
        if self._items >= self.spec.capacity_items:
            return False
        return self.spec.capacity_bytes is None or self._bytes + entry.size_bytes <= self.spec.capacity_bytes

    def _hold(self, entry: Put) -> None:
        self._items += 1
        self._bytes += entry.size_bytes
        self._high_items = max(self._high_items, self._items)
        self._high_bytes = max(self._high_bytes, self._bytes)

    def _free(self, entry: Put) -> None:
        self._items -= 1
        self._bytes -= entry.size_bytes

    def _give_up(self, ticket: Ticket, now: float, *, in_time: bool) -> list[Ticket]:
        self._now = now
        if ticket.settled:
            return []
        self._remove(ticket)
        waited_s, stats = now - ticket.since, self.stats(now)
        is_put = isinstance(ticket, Put)
        if in_time:
            refusal = refusals.full if is_put else refusals.empty
            self._fail(ticket, refusal(self.spec, ticket.owner, ticket.key, stats))
        elif is_put:
            self._producer_wait_s += waited_s
            self._fail(
                ticket, refusals.put_timeout(self.spec, ticket.owner, ticket.key, waited_s, stats, self._consumers)
            )
        else:
            self._consumer_wait_s += waited_s
            self._fail(
                ticket, refusals.get_timeout(self.spec, ticket.owner, ticket.key, waited_s, stats, self._producers)
            )
        return [ticket, *self._advance(ticket.key)]

    def _remove(self, ticket: Ticket) -> None:
        if isinstance(ticket, Put):
            self._putters.remove(ticket)
        elif isinstance(ticket, Get):
            line = self._getters[ticket.key]
            line.remove(ticket)
            if not line:
                del self._getters[ticket.key]

    @staticmethod
    def _fail(ticket: Ticket, error: ChannelError) -> Ticket:
        ticket.settled = True
        ticket.error = error
        return ticket
