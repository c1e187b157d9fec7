"""The state of one channel as a machine without threads or clocks: an event goes in, the tickets it settled come out.

::

    put ──▶ waiting putters (one line, first come first served, over all keys)
              │ admission: the weight that the policy version admits; credit: capacity_items, capacity_bytes
              ▼
            line of the key ──▶ waiting getters of the key (by `serving`) ──▶ taken

The contract is decided here once: a channel drives this class or is compared with it. After each event the getter whose
turn it is at a key does not wait for what is there, nor the first putter for credit that is there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from rlplace.comm import refusals
from rlplace.comm.channel import ChannelSpec, ChannelStats
from rlplace.comm.tally import Tally
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
        self._tally = Tally(spec)
        self._closed: str | None = None  # why
        self._broken: str | None = None
        self._now = 0.0

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, ticket: Put, now: float) -> list[Ticket]:
        """Grants credit now, or lets the ticket wait behind those that came before."""
        self._now = ticket.since = now
        self._tally.producers[ticket.owner] = None
        self._tally.dead.pop(ticket.owner, None)
        refusal = self._refuse_put(ticket)
        if refusal is not None:
            return [self._fail(ticket, refusal)]
        self._putters.append(ticket)
        return self._settle()

    def fill(self, ticket: Reserve, item: object, now: float) -> list[Ticket]:
        """Puts the item of a granted reservation in its line. A reservation that was withdrawn or broken is ignored."""
        self._now = now
        if ticket not in self._reserved:
            return []
        self._reserved.remove(ticket)
        ticket.item = item
        self._enter(ticket)
        return self._settle(ticket.key)

    def get(self, ticket: Get, now: float) -> list[Ticket]:
        """Takes now, or lets the ticket wait among those that want the same key."""
        self._receive(ticket, now)
        if ticket.settled:
            return [ticket]
        self._getters.setdefault(ticket.key, deque()).append(ticket)
        return self._settle(ticket.key)

    def attempt(self, ticket: Put | Get, now: float) -> list[Ticket]:
        """As `put` or `get` for a ticket that does not wait, but fails, and that never overtakes a waiter."""
        settled: list[Ticket]
        if isinstance(ticket, Put):
            settled = self.put(ticket, now)
            if not ticket.settled:
                self._putters.pop()
                refusal = refusals.full if self._tally.wants(ticket) == "credit" else refusals.not_admitted
                settled.append(self._fail(ticket, refusal(self.spec, ticket.owner, ticket.key, self.stats(now))))
            return settled
        if ticket.key in self._getters:
            self._receive(ticket, now)
            settled = [ticket] if ticket.settled else []
        else:
            settled = self.get(ticket, now)
            if not ticket.settled:
                del self._getters[ticket.key]
        if not ticket.settled:
            settled.append(self._fail(ticket, refusals.empty(self.spec, ticket.owner, ticket.key, self.stats(now))))
        return settled

    def advance(self, version: int, now: float) -> list[Ticket]:
        """The policy is at `version`; a smaller one than before changes nothing."""
        self._now = now
        self._tally.version = max(version, self._tally.version)
        return self._settle()

    # ── giving up ────────────────────────────────────────────────────────────────────────────────────────────────────

    def expire(self, ticket: Ticket, now: float) -> list[Ticket]:
        """The ticket's deadline passed: ChannelTimeout unless it is settled already."""
        self._now = now
        if ticket.settled:
            return []
        self._remove(ticket)
        waited_s, stats = now - ticket.since, self.stats(now)
        if not isinstance(ticket, Put):
            self._tally.consumer_wait_s += waited_s
            error = refusals.get_timeout(self.spec, ticket.owner, ticket.key, waited_s, stats)
        else:
            self._tally.producer_wait_s += waited_s
            refusal = refusals.put_timeout if self._tally.wants(ticket) == "credit" else refusals.admission_timeout
            error = refusal(self.spec, ticket.owner, ticket.key, waited_s, stats)
        return [self._fail(ticket, error), *self._settle(ticket.key)]

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
            self._tally.free(ticket)
            self._tally.admitted -= ticket.weight
        elif isinstance(ticket, Get):
            taken, ticket.taken = ticket.taken, []
            return self.restore(taken, now)
        return self._settle(ticket.key)

    def restore(self, entries: Iterable[Put], now: float) -> list[Ticket]:
        """Gives taken items back to the front of their line, in their order, even above the capacity."""
        self._now = now
        if self._broken is not None:
            return []
        returned = list(entries)
        for entry in reversed(returned):
            self._lines.setdefault(entry.key, deque()).appendleft(entry)
            self._tally.restore(entry)
        return self._settle(*{entry.key for entry in returned})

    # ── endings ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def leave(self, producer: str, now: float) -> list[Ticket]:
        self._now, left = now, self._tally.left
        left[producer] = None
        if self.spec.producers is None or len(left) < self.spec.producers or self._closed is not None:
            return []
        self._closed = f"all {self.spec.producers} producers have left"
        return self._settle(*self._getters)

    def died(self, owner: str, now: float) -> list[Ticket]:
        """The process of `owner` has ended; its tickets have been withdrawn. Breaks the channel if it was counted."""
        self._tally.dead[owner] = None
        counted = self.spec.producers is not None and owner in self._tally.producers
        if not counted or owner in self._tally.left or self._closed is not None:
            return []
        return self.break_(f"{owner} died before it had left", now)

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
        return settled + self._settle(*self._getters)

    def break_(self, why: str, now: float) -> list[Ticket]:
        self._now = now
        if self._broken is not None:
            return []
        self._broken = why
        waiting: list[Ticket] = [*self._putters, *(g for line in self._getters.values() for g in line)]
        for container in (self._putters, self._getters, self._lines, self._reserved):
            container.clear()
        self._tally.items = self._tally.size_bytes = 0
        return [self._fail(t, refusals.broken(self.spec, t.owner, why)) for t in waiting]

    def stats(self, now: float) -> ChannelStats:
        getters = [getter for line in self._getters.values() for getter in line]
        return self._tally.stats(now, self._putters, getters, self._lines, self._reserved)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _receive(self, ticket: Get, now: float) -> None:
        self._now = ticket.since = now
        self._tally.loads.setdefault(ticket.owner, 0.0)
        self._tally.dead.pop(ticket.owner, None)
        refusal = self._refuse_get(ticket)
        if refusal is not None:
            self._fail(ticket, refusal)

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
        if ticket.owner in self._tally.left:
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

    def _settle(self, *keys: str) -> list[Ticket]:
        """Serves the getters of `keys`, admits putters on the credit this frees, and so on until nothing moves."""
        settled: list[Ticket] = []
        changed = [*keys, *self._admit(settled)]
        while changed:
            before = len(settled)
            for key in changed:
                self._serve(key, settled)
            changed = self._admit(settled)
            if self.spec.serving == "least_loaded" and len(settled) > before:
                changed = list(self._getters)  # who has taken at one key may have lost its turn at another
        return settled

    def _admit(self, settled: list[Ticket]) -> list[str]:
        """Grants credit to the putters at the head; the keys whose getters may now be served."""
        keys: dict[str, None] = {}
        while self._putters and self._tally.lacks(self._putters[0]) is None:
            putter = self._putters.popleft()
            self._tally.hold(putter)
            self._tally.admitted += putter.weight
            self._tally.producer_wait_s += self._now - putter.since
            putter.settled = True
            settled.append(putter)
            if isinstance(putter, Reserve):
                self._reserved.add(putter)
            else:
                self._enter(putter)
                keys[putter.key] = None
        return list(keys)

    def _enter(self, entry: Put) -> None:
        self._lines.setdefault(entry.key, deque()).append(entry)
        self._tally.puts += 1

    def _serve(self, key: str, settled: list[Ticket]) -> None:
        getters = self._getters.get(key)
        while getters:
            getter, line = self._next(getters), self._lines.get(key)
            if line:
                try:
                    count = getter.count(line, self._ended(key))
                except NeverExact as never:
                    assert isinstance(getter, GetBatch)
                    error: ChannelError = refusals.inexact(self.spec, getter.owner, key, getter.weight, never.sums)
                else:
                    if count == 0:
                        return
                    getters.remove(getter)
                    self._take(getter, line, count)
                    settled.append(getter)
                    continue
            elif self._ended(key):
                error = refusals.end_of_stream(self.spec, getter.owner, key, self._closed or "")
            else:
                return
            getters.remove(getter)
            self._tally.consumer_wait_s += self._now - getter.since
            settled.append(self._fail(getter, error))
        self._getters.pop(key, None)

    def _next(self, getters: deque[Get]) -> Get:
        """Whose turn it is of those that wait at a key."""
        if self.spec.serving == "first_come":
            return getters[0]
        return min(getters, key=lambda getter: self._tally.loads[getter.owner])  # of equals the first

    def _take(self, getter: Get, line: deque[Put], count: int) -> None:
        getter.taken = [line.popleft() for _ in range(count)]
        if not line:
            del self._lines[getter.key]
        self._tally.take(getter, self._now)
        getter.settled = True

    def _ended(self, key: str) -> bool:
        """Nothing will follow in this key: closed, and nobody holds or waits for credit for it."""
        if self._closed is None:
            return False
        return not any(p.key == key for p in self._putters) and not any(r.key == key for r in self._reserved)

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
