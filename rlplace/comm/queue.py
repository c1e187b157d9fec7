"""The queue machine: the semantics of a channel as steps on a table, for threads, processes and the network alike.

::

    put ──▶ credit? ──▶ entry in the line of its key ── wakes ──▶ getter in the key's line of waiters
              │ no                                                     │ woken, tries again under the lock
              ▼                                                        ▼
            putters wait in one line; woken, they try again ◀── wakes ── entry freed, credit is back

A step never blocks. A request that cannot be served now joins a line of waiters, with the number of its waker; when
it is woken, the same step is tried again. An item stays in its line until a getter takes it, so a process that dies
while it waits takes no item along. The first of a line is served first, unless it was woken and has not tried again
for `STALLED_S`: a stopped process does not hold up the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol

from rlplace.comm import channel_errors
from rlplace.comm import table as t
from rlplace.comm.channel import ChannelStats, Wait
from rlplace.comm.table import NO_VERSION, Names, Table

STALLED_S = 0.1  # a waiter that was woken this long ago and has not tried again loses its precedence

Taken = tuple[Any, float, int]  # an item that left its line: payload, weight, version


class Store(Protocol):
    """Memory that holds the payloads of entries. All methods are called under the channel's lock.

    `entry` in the methods: index of the entry's record in the channel's table. Its payload is the item in the form in
    which this store keeps items.
    """

    def place(self, entry: int, payload: Any, /) -> None: ...

    def take(self, entry: int, /) -> Any:
        """Remove and return the payload of an entry; the caller owns the payload from now on."""
        ...

    def drop(self, entry: int, /) -> None:
        """Free the payload of an entry, if there is one. Called if the channel breaks or is reset."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class Put:
    """A put request.

    `version`: version of the policy that made the item. `payload`: the item in the form in which the channel stores
    items; None: the item follows by `fill`, after credit (room) was granted. `entry`, `owner`, `key`, `waiter`: indices
    of records in the channel's table, 0 for none: of the entry that is reserved for an item that follows, of the
    worker, of the key, and of the request while it waits. `epoch`: number of resets of the channel when the request
    began.
    """

    owner_name: str
    key_name: str
    weight: float
    version: int | None
    payload: Any  # None: the item follows by `fill`, once credit was granted
    entry: int = 0  # while credit is held for an item that is still to come
    owner: int = 0
    key: int = 0
    waiter: int = 0
    epoch: int = 0  # of the channel when it began


@dataclasses.dataclass(slots=True, eq=False)
class Get:
    """A get request for one item, or for a batch.

    `limit`: the most summed weight of a batch; None: one item. `remote`: whether the items are for a client on another
    node, which has to confirm them. `owner`: index of the worker's record in the channel's table; 0: none. `key`: index
    of the key's record; 0: none. `waiter`: index of the record of this request while the request waits; 0: none.
    `epoch`: how many times the channel had been reset when the request began. `taken`: payload, weight and version of
    each item that the get has returned.
    """

    owner_name: str
    key_name: str
    limit: float | None  # None: one item
    # Whether the items may come back by `restore`, until `confirm`
    remote: bool = False
    owner: int = 0
    key: int = 0
    waiter: int = 0
    epoch: int = 0
    taken: list[Taken] = dataclasses.field(default_factory=list)


class QueueMachine:
    """The operations of a channel on its table. Each method is one step, called under the channel's lock.

    `table`: state of the channel. `process`: number of this process. `store`: memory of the payloads. `now` in the
    methods: present time in seconds by `time.monotonic()`. After a step, the caller must wake the wakers whose numbers
    are in `wakes`; on each waker sleeps one waiting call.
    """

    def __init__(
        self,
        table: Table,
        process: int,
        store: Store,
    ) -> None:
        self.table = table
        self.spec = table.spec
        self.process = process
        self.store = store
        self.words = table.words
        self.reals = table.reals
        self.wakes: list[int] = []
        self.participants = Names(table, keys=False)
        self.keys = Names(table, keys=True)
        self._declared = None if self.spec.keys is None else frozenset(self.spec.keys)
        self._capacity = self.spec.capacity_items
        # Participant and key by names and side
        self._entered: dict[tuple[str, str, int], tuple[int, int]] = {}

    # ── putting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        put: Put,
        waker: int,
        now: float,
    ) -> bool:
        """Try to serve a put; return whether the put got credit, which is room for one item.

        If the put got no credit, it waits from now on, unless `waker` is 0. `waker`: number of the waker to wake when a
        new try is due. `now`: present time by `time.monotonic()`. Raise ChannelClosed or ChannelBroken if the channel
        has ended.
        """
        words = self.words
        waiter = put.waiter
        # The channel must be whole and open, and the participant known
        if self._lost(put):
            raise self._broken(put)
        if not put.key:
            self._enter(put, t.P_PRODUCED)
        if words[t.CLOSED]:
            self.withdraw(put, now)
            raise channel_errors.closed(self.spec, put.owner_name, put.key_name)
        if waiter:
            self.reals[waiter + t.W_WOKEN] = 0.0
        # Serve the put if there is credit that no waiter ahead needs
        credit = self._credit()
        if credit > 0 and (
            not words[t.PUTTERS + t.COUNT]
            or credit > self._ahead(t.PUTTERS, waiter, credit, now)
        ):
            # The put takes its credit
            version = NO_VERSION if put.version is None else put.version
            entry = self._hold(put.owner, put.key, put.weight, version)
            if waiter:
                self._depart(put, now)
                self._wake(t.PUTTERS, credit - 1, now)
            # Credit for an item that follows, or the item itself
            if put.payload is None:
                put.entry = entry
                words[entry + t.E_STATE] = t.AWAITED
                words[put.key + t.K_RESERVED] += 1
            else:
                self._append(entry, put.key, put.payload, now)
            return True
        # Wake the waiters ahead again: other waiters may have been woken in their place
        self._wake(t.PUTTERS, credit, now)
        if waker and not waiter:
            self._join(put, t.PUTTERS, waker, now)
        return False

    def fill(
        self,
        put: Put,
        payload: Any,
        now: float,
    ) -> None:
        """Append `payload`, the item of a put that holds credit (reserved room), to the line of the put's key.

        `now`: present time by `time.monotonic()`.
        """
        entry, put.entry = put.entry, 0
        if self._lost(put):
            raise self._broken(put)
        self.words[put.key + t.K_RESERVED] -= 1
        self._append(entry, put.key, payload, now)

    def cancel(self, put: Put, now: float) -> None:
        """Give back the credit (reserved room) of a put whose item will not be put into the channel. Idempotent.

        `now`: present time by `time.monotonic()`.
        """
        entry, put.entry = put.entry, 0
        if entry and not self._lost(put):
            self._cancel(entry, now)

    def _cancel(self, entry: int, now: float) -> None:
        # After a close, the last reservation at a key ends the stream for its getters
        key = self.words[entry + t.E_KEY]
        self.words[key + t.K_RESERVED] -= 1
        self._free(entry)
        self._wake(t.PUTTERS, self._credit(), now)
        if self._ended(key):
            self._wake_all(key + t.K_GETTERS)

    def _credit(self) -> int:
        """Return how many items may still be put.

        The table has some spare entries, for items that `restore` puts back above the capacity. Unconfirmed items were
        taken for clients on other nodes, which have not confirmed their arrival. If there are more unconfirmed items
        than spare entries, the credit is reduced by the difference.
        """
        unconfirmed = self.words[t.UNCONFIRMED]
        credit = self._capacity - self.words[t.ITEMS]
        if unconfirmed <= t.SPARE_ENTRIES:
            return credit
        return credit + t.SPARE_ENTRIES - unconfirmed

    def _hold(
        self,
        owner: int,
        key: int,
        weight: float,
        version: int,
    ) -> int:
        """Take credit (room) for one item, and return the record of a new entry for the item. The entry is not in the
        line of the key yet.

        `owner`, `key`: indices of the records of the worker and of the key.
        """
        words = self.words
        # A freed entry, or one that was never in use
        entry: int = words[t.FREE_ENTRY]
        if entry:
            words[t.FREE_ENTRY] = words[entry + t.E_NEXT]
        else:
            entry = self.table.entries + words[t.ENTRIES_USED] * self.table.entry_words
            words[t.ENTRIES_USED] += 1
        # Count the credit, and the highest use so far
        items = words[t.ITEMS] = words[t.ITEMS] + 1
        if items > words[t.HIGH_ITEMS]:
            words[t.HIGH_ITEMS] = items
        words[entry + t.E_KEY] = key
        words[entry + t.E_OWNER] = owner
        words[entry + t.E_VERSION] = version
        self.reals[entry + t.E_WEIGHT] = weight
        return entry

    def _append(
        self,
        entry: int,
        key: int,
        payload: Any,
        now: float,
    ) -> None:
        words = self.words
        line = key + t.K_ITEMS
        self.store.place(entry, payload)
        words[entry + t.E_STATE] = t.IN_LINE
        words[entry + t.E_NEXT] = 0
        # Link the entry to the end of its line
        depth = words[line + t.COUNT] + 1
        words[words[line + t.LAST] + t.E_NEXT if depth > 1 else line + t.FIRST] = entry
        words[line + t.LAST] = entry
        words[line + t.COUNT] = depth
        words[t.PUTS] += 1
        words[words[entry + t.E_OWNER] + t.P_PUTS] += 1
        version = words[entry + t.E_VERSION]
        if version > words[t.NEWEST_VERSION]:
            words[t.NEWEST_VERSION] = version
        if words[key + t.K_GETTERS + t.COUNT]:
            self._wake(key + t.K_GETTERS, depth, now)

    def _free(self, entry: int) -> None:
        words = self.words
        words[t.ITEMS] -= 1
        words[entry + t.E_STATE] = t.FREE
        words[entry + t.E_NEXT] = words[t.FREE_ENTRY]
        words[t.FREE_ENTRY] = entry

    # ── getting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(
        self,
        get: Get,
        waker: int,
        now: float,
    ) -> bool:
        """Try to serve a get; return whether the get took items.

        If the get took no items, it waits from now on, unless `waker` is 0. `waker`: number of the waker to wake when a
        new try is due. `now`: present time by `time.monotonic()`. Raise EndOfStream or ChannelBroken if the channel has
        ended.
        """
        words = self.words
        waiter = get.waiter
        if self._lost(get):
            raise self._broken(get)
        if not get.key:
            self._enter(get, t.P_CONSUMED)
        if waiter:
            self.reals[waiter + t.W_WOKEN] = 0.0
        key = get.key
        depth = words[key + t.K_ITEMS + t.COUNT]
        getters = key + t.K_GETTERS
        # Items that waiters ahead will take are not for this get
        if depth:
            ahead = (
                self._ahead(getters, waiter, depth, now)
                if words[getters + t.COUNT]
                else 0
            )
            if depth > ahead:
                count = (
                    1
                    if get.limit is None
                    else self._count(key, get.limit, depth - ahead)
                )
                if waiter:
                    self._depart(get, now)
                self._take(get, key, count)
                if words[getters + t.COUNT]:
                    self._wake(getters, depth - count, now)
                    if depth == count and self._ended(key):
                        self._wake_all(getters)
                if words[t.PUTTERS + t.COUNT]:
                    self._wake(t.PUTTERS, self._credit(), now)
                return True
            # As in `put`
            self._wake(getters, depth, now)
        # Closed and empty
        elif self._ended(key):
            self.withdraw(get, now)
            raise channel_errors.end_of_stream(self.spec, get.owner_name, get.key_name)
        if waker and not waiter:
            self._join(get, getters, waker, now)
        return False

    def confirm(self, get: Get, now: float) -> None:
        """Record that a client on another node has received the items of a get.

        `now`: present time by `time.monotonic()`.
        """
        if not self._lost(get):
            self._confirm(get)
            self._wake(t.PUTTERS, self._credit(), now)

    def restore(self, get: Get, now: float) -> None:
        """Put undelivered items of a get back at the front of their line, even above the capacity.

        `now`: present time by `time.monotonic()`.
        """
        words = self.words
        line = get.key + t.K_ITEMS
        if self._lost(get):
            return
        # In reverse, so that the first item is the first in line again
        for payload, weight, version in reversed(get.taken):
            entry = self._hold(get.owner, get.key, weight, version)
            self.store.place(entry, payload)
            words[entry + t.E_STATE] = t.IN_LINE
            words[entry + t.E_NEXT] = words[line + t.FIRST]
            if not words[line + t.COUNT]:
                words[line + t.LAST] = entry
            words[line + t.FIRST] = entry
            words[line + t.COUNT] += 1
            words[t.GETS] -= 1
            words[get.owner + t.P_GETS] -= 1
        self._confirm(get)
        self._wake(get.key + t.K_GETTERS, words[line + t.COUNT], now)

    def _confirm(self, get: Get) -> None:
        self.words[t.UNCONFIRMED] -= len(get.taken)
        self.words[get.owner + t.P_UNCONFIRMED] -= len(get.taken)
        get.taken = []

    def _ended(self, key: int) -> bool:
        """Return whether no more item can come at a key: the channel is closed, and no put at the key holds credit
        (reserved room).
        """
        return bool(self.words[t.CLOSED] and not self.words[key + t.K_RESERVED])

    def _count(
        self,
        key: int,
        limit: float,
        most: int,
    ) -> int:
        """Return how many of the first items of a key have together a weight of at most `limit`.

        The result is at least 1, even if the first item weighs more than `limit`, and at most `most`.
        """
        total = 0.0
        count = 0
        entry = self.words[key + t.K_ITEMS + t.FIRST]
        while count < most:
            total += self.reals[entry + t.E_WEIGHT]
            if count and total > limit and not math.isclose(total, limit, rel_tol=1e-9):
                break
            count += 1
            entry = self.words[entry + t.E_NEXT]
        return count

    def _take(
        self,
        get: Get,
        key: int,
        count: int,
    ) -> None:
        """Move the first `count` items of a key's line to `get.taken`."""
        words = self.words
        reals = self.reals
        line = key + t.K_ITEMS
        newest = words[t.NEWEST_VERSION]
        for _ in range(count):
            # The first entry leaves the line
            entry = words[line + t.FIRST]
            version = words[entry + t.E_VERSION]
            weight = reals[entry + t.E_WEIGHT]
            get.taken.append((self.store.take(entry), weight, version))
            words[line + t.FIRST] = words[entry + t.E_NEXT]
            words[line + t.COUNT] -= 1
            self._free(entry)
            if version != NO_VERSION and newest - version > words[t.STALENESS_MAX]:
                words[t.STALENESS_MAX] = newest - version
        # Remote items count as unconfirmed until the client has received them
        words[t.GETS] += count
        words[get.owner + t.P_GETS] += count
        if get.remote:
            words[t.UNCONFIRMED] += count
            words[get.owner + t.P_UNCONFIRMED] += count

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enter(self, request: Put | Get, side: int) -> None:
        """Set the records of worker and key, and the epoch (number of resets of the channel), in a new request.

        `side`: P_PRODUCED for a put, P_CONSUMED for a get.
        """
        words = self.words
        name = (request.owner_name, request.key_name, side)
        entered = self._entered.get(name)
        # A participant that died and acts again is looked up anew
        if entered is None or words[entered[0] + t.P_DEAD]:
            owner_name, key_name, _ = name
            owner = self.participants.find(owner_name, owner_name, self.process)
            words[owner + side] = 1
            words[owner + t.P_DEAD] = 0
            # After the participant was noted, so that statistics show it
            if self._declared is not None and key_name not in self._declared:
                raise channel_errors.unknown_key(self.spec, owner_name, key_name)
            entered = self._entered[name] = owner, self.keys.find(key_name, owner_name)
        request.owner, request.key = entered
        request.epoch = words[t.EPOCH]

    def withdraw(self, request: Put | Get, now: float) -> None:
        """Remove a request from its line of waiters, because it does not wait any more.

        Idempotent. `now`: present time by `time.monotonic()`.
        """
        if request.waiter and not self._lost(request):
            self._leave(request.waiter, now)
        request.waiter = 0

    def _leave(self, waiter: int, now: float) -> None:
        """Remove a waiter that was not served from its line of waiters.

        Wake the next waiters, for which the free room or the items may now be enough.
        """
        line = self.words[waiter + t.W_LINE]
        self._remove(waiter, now)
        if line == t.PUTTERS:
            supply = self._credit()
        else:
            items = line - t.K_GETTERS + t.K_ITEMS
            supply = self.words[items + t.COUNT]
        self._wake(line, supply, now)

    def _depart(self, request: Put | Get, now: float) -> None:
        """Remove a request from its line of waiters, because it was served."""
        waiter = request.waiter
        request.waiter = 0
        self._remove(waiter, now)

    def _join(
        self,
        request: Put | Get,
        line: int,
        waker: int,
        now: float,
    ) -> None:
        """Append a request to a line of waiters. `waker`: number of the request's waker.

        Raise ChannelError if all records of waiters are in use.
        """
        words = self.words
        reals = self.reals
        waiter = words[t.FREE_WAITER]
        if waiter:
            words[t.FREE_WAITER] = words[waiter + t.W_NEXT]
        else:
            # A record that was never in use
            used = words[t.WAITERS_USED]
            if used == self.spec.participants:
                raise channel_errors.crowded(self.spec, request.owner_name, "waiters")
            words[t.WAITERS_USED] = used + 1
            waiter = self.table.waiters + used * t.WAITER_WORDS
        # Fill the record, then link it to the end of the line
        before = words[line + t.LAST]
        words[waiter + t.W_LINE] = line
        words[waiter + t.W_OWNER] = request.owner
        words[waiter + t.W_KEY] = request.key
        words[waiter + t.W_WAKER] = waker
        reals[waiter + t.W_SINCE] = now
        reals[waiter + t.W_WOKEN] = 0.0
        words[waiter + t.W_NEXT] = 0
        words[waiter + t.W_PREVIOUS] = before
        words[before + t.W_NEXT if before else line + t.FIRST] = waiter
        words[line + t.LAST] = waiter
        words[line + t.COUNT] += 1
        request.waiter = int(waiter)

    def _remove(self, waiter: int, now: float) -> None:
        """Remove a waiter from its line, add its waiting time to the statistics, and free its record."""
        words = self.words
        line = words[waiter + t.W_LINE]
        # Neighbours in the line; 0 at its ends
        before = words[waiter + t.W_PREVIOUS]
        after = words[waiter + t.W_NEXT]
        waited = t.PRODUCER_WAIT if line == t.PUTTERS else t.CONSUMER_WAIT
        self.reals[waited] += now - self.reals[waiter + t.W_SINCE]
        words[before + t.W_NEXT if before else line + t.FIRST] = after
        words[after + t.W_PREVIOUS if after else line + t.LAST] = before
        words[line + t.COUNT] -= 1
        words[waiter + t.W_LINE] = 0
        words[waiter + t.W_NEXT] = words[t.FREE_WAITER]
        words[t.FREE_WAITER] = waiter

    def _ahead(
        self,
        line: int,
        waiter: int,
        most: int,
        now: float,
    ) -> int:
        """Return how many waiters of a line are served before `waiter`, at most `most`. `waiter`: 0 means count all."""
        words = self.words
        reals = self.reals
        count = 0
        other = words[line + t.FIRST]
        # A stalled waiter has lost its precedence
        while other and other != waiter and count < most:
            woken = reals[other + t.W_WOKEN]
            if not woken or now - woken < STALLED_S:
                count += 1
            other = words[other + t.W_NEXT]
        return count

    def _wake(
        self,
        line: int,
        supply: int,
        now: float,
    ) -> None:
        """Wake the first waiters of a line, one for each unit of `supply`: the free room for puts, or the number of
        items for gets.

        A waiter that was woken earlier uses up a unit of `supply` too, unless it has not tried again for `STALLED_S`
        seconds.
        """
        words = self.words
        reals = self.reals
        waiter = words[line + t.FIRST]
        # Each waiter that is not stalled uses up one unit of supply
        while waiter and supply > 0:
            woken = reals[waiter + t.W_WOKEN]
            if not woken:
                reals[waiter + t.W_WOKEN] = now
                self.wakes.append(words[waiter + t.W_WAKER])
            if not woken or now - woken < STALLED_S:
                supply -= 1
            waiter = words[waiter + t.W_NEXT]

    def _wake_all(self, line: int) -> None:
        """Wake all waiters of a line."""
        self.wakes += [self.words[waiter + t.W_WAKER] for waiter in self._waiters(line)]

    def _waiters(self, line: int) -> Iterator[int]:
        """Yield the waiters (records of waiting requests) of a line, the earliest first."""
        waiter = self.words[line + t.FIRST]
        while waiter:
            yield waiter
            waiter = self.words[waiter + t.W_NEXT]

    def _waiting(self) -> list[int]:
        """Return the records of all waiters in use.

        The records are found one by one in the table and not by the links of the lines, because the links may be
        damaged.
        """
        # By records, not by lines
        first = self.table.waiters
        words = self.words
        records = range(
            first,
            first + words[t.WAITERS_USED] * t.WAITER_WORDS,
            t.WAITER_WORDS,
        )
        return [waiter for waiter in records if words[waiter + t.W_LINE]]

    # ── why a request is not served ──────────────────────────────────────────────────────────────────────────────────

    def expired(self, request: Put | Get, now: float) -> Exception:
        """Remove a request from its line of waiters, because its deadline has passed; return the error for the request.

        `now`: present time by `time.monotonic()`.
        """
        waited_s = 0.0
        if request.waiter:
            waited_s = now - self.reals[request.waiter + t.W_SINCE]
        self.withdraw(request, now)
        owner = request.owner_name
        key = request.key_name
        puts = isinstance(request, Put)
        return channel_errors.late(
            self.spec,
            owner,
            key,
            waited_s,
            self.stats(now),
            puts=puts,
        )

    def refused(self, request: Put | Get, now: float) -> Exception:
        """Return the error for a request that must not wait and cannot be served: ChannelFull or ChannelEmpty.

        `now`: present time by `time.monotonic()`.
        """
        owner = request.owner_name
        key = request.key_name
        puts = isinstance(request, Put)
        return channel_errors.refused(self.spec, owner, key, self.stats(now), puts=puts)

    def _broken(self, request: Put | Get) -> Exception:
        """Return the error for a request to a broken channel. The request does not wait any more."""
        # The lines of a broken channel may be damaged
        request.waiter = 0
        return channel_errors.broken(self.spec, request.owner_name, self.broken_why())

    # ── endings ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Close the channel: no more puts; gets take the items that are left. Wake all waiters. Idempotent."""
        words = self.words
        if not words[t.CLOSED] and not words[t.BROKEN]:
            words[t.CLOSED] = 1
            self.wakes += [words[waiter + t.W_WAKER] for waiter in self._waiting()]

    def break_(self, why: str) -> None:
        """Break the channel: all requests fail from now on, and all items are dropped. Idempotent. `why`: the reason.

        The lines and the states of entries are not read, because a process may have died while it changed them.
        """
        words = self.words
        if words[t.BROKEN]:
            return
        # The reason, as text in the table
        text = why.encode("utf-8", "replace")[: t.MAX_REASON_BYTES]
        at = 8 * (t.REASON + 1)
        words[t.REASON] = len(text)
        self.table.data[at : at + len(text)] = text
        words[t.ITEMS] = 0
        words[t.BROKEN] = 1
        self.wakes += [words[waiter + t.W_WAKER] for waiter in self._waiting()]
        # At the end, since it fails if the job folder is gone
        for entry in self._all_entries():
            self.store.drop(entry)

    def reset(self) -> None:
        """Make the channel open and empty, whether it was broken, closed or neither.

        Earlier requests fail with ChannelBroken. Names, counts and the newest version stay. As in `break_`, the lines
        and the states of entries are not read, because they may be damaged.
        """
        words = self.words
        self.wakes += [words[waiter + t.W_WAKER] for waiter in self._waiting()]
        for entry in self._all_entries():
            self.store.drop(entry)
        # All words about items and waits
        lines = range(t.PUTTERS, t.UNCONFIRMED)
        for word in (
            *lines,
            t.BROKEN,
            t.CLOSED,
            t.ITEMS,
            t.FREE_ENTRY,
            t.ENTRIES_USED,
            t.FREE_WAITER,
            t.UNCONFIRMED,
        ):
            words[word] = 0
        for waiter in self._waiting():
            words[waiter + t.W_LINE] = 0
        words[t.WAITERS_USED] = 0
        # Lines and reservations of each key
        for key in self.keys.all():
            for word in range(key + t.K_RESERVED, key + t.K_GETTERS + t.LINE_WORDS):
                words[word] = 0
        for participant in self.participants.all():
            words[participant + t.P_UNCONFIRMED] = 0
        # Requests that still refer to the old state are lost
        words[t.EPOCH] += 1

    def _lost(self, request: Put | Get) -> bool:
        """Return whether a request fails because the channel is broken, or was reset after the request began."""
        return bool(self.words[t.BROKEN]) or (
            request.key != 0 and request.epoch != self.words[t.EPOCH]
        )

    def broken_why(self) -> str:
        """Return the reason that `break_` was given."""
        at = 8 * (t.REASON + 1)
        return str(self.table.data[at : at + self.words[t.REASON]], "utf-8", "replace")

    def end_of_processes(self, dead: Iterable[int], now: float) -> None:
        """Remove the waits and the reservations of dead processes. Items that dead processes have taken are lost.

        `dead`: numbers of the processes. `now`: present time by `time.monotonic()`.
        """
        words = self.words
        # The participants of these processes
        gone = set(dead)
        participants = {
            p for p in self.participants.all() if words[p + t.PROCESS] in gone
        }
        for participant in participants:
            words[participant + t.P_DEAD] = 1
            words[t.UNCONFIRMED] -= words[participant + t.P_UNCONFIRMED]
            words[participant + t.P_UNCONFIRMED] = 0
        if words[t.BROKEN]:
            return
        # Their waits, then the credit of items that will never come
        for waiter in self._waiting():
            if words[waiter + t.W_OWNER] in participants:
                self._leave(waiter, now)
        for entry in self._all_entries():
            if (
                words[entry + t.E_STATE] == t.AWAITED
                and words[entry + t.E_OWNER] in participants
            ):
                self._cancel(entry, now)

    def forget_dead_users(self) -> None:
        """Forget that dead participants have used the channel, because others of the same names may act in their place.

        For use after a reset. The counts of items by participant start anew, too.
        """
        words = self.words
        for participant in self.participants.all():
            words[participant + t.P_PUTS] = 0
            words[participant + t.P_GETS] = 0
            if words[participant + t.P_DEAD]:
                words[participant + t.P_PRODUCED] = 0
                words[participant + t.P_CONSUMED] = 0

    def end_of_owner(self, owner: str) -> None:
        """Mark the worker `owner` of this process as dead in the channel. Its waits must have been withdrawn before."""
        self.words[self.participants.find(owner, owner, self.process) + t.P_DEAD] = 1

    def _all_entries(self) -> range:
        """Return the records of all entries that were ever in use."""
        table = self.table
        return range(
            table.entries,
            table.entries + self.words[t.ENTRIES_USED] * table.entry_words,
            table.entry_words,
        )

    # ── statistics ───────────────────────────────────────────────────────────────────────────────────────────────────

    def stats(self, now: float) -> ChannelStats:
        """Return a snapshot of the channel: contents, counts, waits and users.

        `now`: present time by `time.monotonic()`.
        """
        words = self.words
        reals = self.reals
        names = self.participants.all()
        keys = self.keys.all()
        broken = bool(words[t.BROKEN])
        # A broken channel's lines may be damaged
        lines = []
        if not broken:
            lines = [t.PUTTERS, *(key + t.K_GETTERS for key in keys)]
        waits = []
        producer_wait_s = reals[t.PRODUCER_WAIT]
        consumer_wait_s = reals[t.CONSUMER_WAIT]
        for line in lines:
            wants: Literal["credit", "item"]
            wants = "credit" if line == t.PUTTERS else "item"
            for waiter in self._waiters(line):
                # The clock was read before the lock was acquired
                seconds = max(0.0, now - reals[waiter + t.W_SINCE])
                owner = names[words[waiter + t.W_OWNER]]
                key = keys[words[waiter + t.W_KEY]]
                waits.append(Wait(owner=owner, key=key, wants=wants, seconds=seconds))
                if line == t.PUTTERS:
                    producer_wait_s += seconds
                else:
                    consumer_wait_s += seconds
        # Items and reservations by key
        depths: dict[int, int] = {}
        if not broken:
            for record in keys:
                items = words[record + t.K_ITEMS + t.COUNT]
                depths[record] = items + words[record + t.K_RESERVED]
        # A name is dead if it has used the channel and no living process has it
        living = {name for p, name in names.items() if not words[p + t.P_DEAD]}
        producers: dict[str, None] = {}
        consumers: dict[str, None] = {}
        put_by: dict[str, int] = {}
        taken_by: dict[str, int] = {}
        for participant, name in names.items():
            if words[participant + t.P_PRODUCED]:
                producers[name] = None
            if words[participant + t.P_CONSUMED]:
                consumers[name] = None
            for counts, word in ((put_by, t.P_PUTS), (taken_by, t.P_GETS)):
                if words[participant + word]:
                    counts[name] = counts.get(name, 0) + words[participant + word]
        users = {**producers, **consumers}
        return ChannelStats(
            capacity_items=self._capacity,
            depth_items=words[t.ITEMS],
            high_water_items=words[t.HIGH_ITEMS],
            puts=words[t.PUTS],
            gets=words[t.GETS],
            bytes=words[t.BYTES],
            producer_wait_s=producer_wait_s,
            consumer_wait_s=consumer_wait_s,
            waits=tuple(waits),
            depth_by_key={keys[key]: depth for key, depth in depths.items() if depth},
            producers=tuple(producers),
            consumers=tuple(consumers),
            dead=tuple(name for name in users if name not in living),
            put_by=put_by,
            taken_by=taken_by,
            staleness_max=words[t.STALENESS_MAX],
        )
