"""The promises of a channel's queue after every event of a random walk: order, credit, admission, whose turn it is."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlplace.comm.channel import Admission, ChannelSpec
from rlplace.comm.queue import ChannelQueue
from rlplace.comm.tickets import Get, GetBatch, Put, Reserve, Ticket

KEYS, OWNERS = ("a", "b"), ("c0", "c1", "c2")


class RandomWalk(RuleBasedStateMachine):
    """Random events; a ledger of what was granted and taken, and the promises of the machine after each event."""

    @initialize(
        serving=st.sampled_from(["first_come", "least_loaded"]),
        admission=st.none() | st.builds(Admission, weight_per_version=st.just(3.0), max_staleness=st.integers(0, 1)),
    )
    def begin(self, serving: str, admission: Admission | None) -> None:
        self.spec = ChannelSpec(
            name="q",
            capacity_items=3,
            capacity_bytes=10,
            keys=KEYS,
            serving=serving,  # type: ignore[arg-type]
            admission=admission,
        )
        self.queue = ChannelQueue(self.spec)
        self.clock, self.version, self.names = 0.0, 0, itertools.count()
        self.waiting: list[Ticket] = []
        self.reservations: list[Reserve] = []
        self.granted: dict[str, list[int]] = {k: [] for k in KEYS}
        self.taken: dict[str, list[int]] = {k: [] for k in KEYS}
        self.admitted = 0.0
        self.loads = dict.fromkeys(OWNERS, 0.0)

    def record(self, settled: list[Ticket]) -> None:
        for ticket in settled:
            assert ticket.settled
            if ticket in self.waiting:
                self.waiting.remove(ticket)
            if ticket.error is not None:
                continue
            if isinstance(ticket, Get):
                self.taken[ticket.key] += [e.item for e in ticket.taken]
                self.loads[ticket.owner] += sum(e.weight for e in ticket.taken)
            elif isinstance(ticket, Put):
                self.admitted += ticket.weight
                if isinstance(ticket, Reserve):
                    self.reservations.append(ticket)
                else:
                    self.granted[ticket.key].append(ticket.item)

    def ask(self, ticket: Put | Get, waits: bool) -> None:
        self.clock += 1
        self.waiting.append(ticket)
        ask = self.queue.attempt if not waits else self.queue.put if isinstance(ticket, Put) else self.queue.get
        self.record(ask(ticket, self.clock))  # type: ignore[operator]
        assert ticket.settled or waits

    @rule(key=st.sampled_from(KEYS), size_bytes=st.integers(0, 10), weight=st.integers(0, 3), waits=st.booleans())
    def put(self, key: str, size_bytes: int, weight: int, waits: bool) -> None:
        item = next(self.names)
        self.ask(Put(owner="p", key=key, size_bytes=size_bytes, weight=weight, version=item, item=item), waits)

    @rule(key=st.sampled_from(KEYS), size_bytes=st.integers(0, 10), weight=st.integers(0, 3))
    def reserve(self, key: str, size_bytes: int, weight: int) -> None:
        self.ask(Reserve(owner="p", key=key, size_bytes=size_bytes, weight=weight), waits=True)

    @rule(key=st.sampled_from(KEYS), owner=st.sampled_from(OWNERS), waits=st.booleans())
    def get(self, key: str, owner: str, waits: bool) -> None:
        self.ask(Get(owner=owner, key=key), waits)

    @rule(
        key=st.sampled_from(KEYS),
        owner=st.sampled_from(OWNERS),
        weight=st.integers(1, 5),
        policy=st.sampled_from(["at_most", "at_least", "exact"]),
        waits=st.booleans(),
    )
    def get_batch(self, key: str, owner: str, weight: int, policy: str, waits: bool) -> None:
        self.ask(GetBatch(owner=owner, key=key, weight=weight, policy=policy), waits)  # type: ignore[arg-type]

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        reservation = self.reservations.pop(data.draw(st.integers(0, len(self.reservations) - 1)))
        item = next(self.names)
        self.granted[reservation.key].append(item)
        self.record(self.queue.fill(reservation, item, self.clock))

    @precondition(lambda self: self.reservations)
    @rule()
    def producer_dies(self) -> None:
        reservation = self.reservations.pop()
        self.admitted -= reservation.weight
        self.record(self.queue.withdraw(reservation, self.clock))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), how=st.sampled_from(["expire", "withdraw"]))
    def give_up(self, data: st.DataObject, how: str) -> None:
        ticket = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(ticket)
        self.record(getattr(self.queue, how)(ticket, self.clock))
        assert ticket.settled

    @rule(version=st.integers(0, 5))
    def advance(self, version: int) -> None:
        self.version = max(version, self.version)
        self.record(self.queue.advance(version, self.clock))

    @rule()
    def close(self) -> None:
        if self.clock > 30:  # late, so that most of a walk is open
            self.record(self.queue.close(self.clock))

    @invariant()
    def items_are_taken_once_in_the_order_they_came(self) -> None:
        for key in KEYS:
            inside = [e.item for e in self.queue._lines.get(key, ())]
            assert self.taken[key] + inside == self.granted[key]

    @invariant()
    def credit_is_what_is_inside_and_within_capacity(self) -> None:
        lines = [e for line in self.queue._lines.values() for e in line]
        inside = lines + list(self.reservations)
        stats = self.queue.stats(self.clock)
        assert stats.depth_items == len(inside) <= self.spec.capacity_items
        assert stats.depth_bytes == sum(e.size_bytes for e in inside) <= 10
        assert sum(stats.depth_by_key.values()) == len(inside)
        assert stats.puts - stats.gets == len(lines)
        assert stats.oldest_version == min((e.version for e in lines if e.version is not None), default=None)

    @invariant()
    def no_more_is_admitted_than_the_version_allows(self) -> None:
        assert self.queue.stats(self.clock).version == self.version
        if self.spec.admission is not None:
            assert self.admitted <= self.spec.admission.limit(self.version)

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        putters = [t for t in self.waiting if isinstance(t, Put)]
        assert list(self.queue._putters) == putters
        if putters:
            head, admission = putters[0], self.spec.admission
            stats = self.queue.stats(self.clock)
            too_early = admission is not None and self.admitted + head.weight > admission.limit(self.version)
            assert too_early or stats.depth_items == 3 or stats.depth_bytes + head.size_bytes > 10
            assert (stats.waits[0].wants == "admission") == too_early
        for key in KEYS:
            getters = [t for t in self.waiting if isinstance(t, Get) and t.key == key]
            assert list(self.queue._getters.get(key, ())) == getters
            line = self.queue._lines.get(key)
            if getters and line:
                of_least = self.spec.serving == "least_loaded"
                turn = min(getters, key=lambda g: self.loads[g.owner]) if of_least else getters[0]
                assert turn.count(line, self.queue._ended(key)) == 0
            elif getters:
                assert not self.queue._ended(key)


TestRandomWalk = RandomWalk.TestCase
TestRandomWalk.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
