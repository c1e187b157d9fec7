"""The queue machine: who is served when, what a settled ticket holds, and a random walk that checks its invariants."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.queue import ChannelQueue
from rlplace.comm.tickets import Get, GetBatch, NeverExact, Put, Reserve, Ticket
from rlplace.errors import ChannelBroken, ChannelClosed, ChannelMisuse, ChannelTimeout, EndOfStream


def queue_of(**fields: object) -> ChannelQueue:
    return ChannelQueue(ChannelSpec(**{"name": "q", "capacity_items": 2, **fields}))  # type: ignore[arg-type]


def put(item: object, key: str = "", owner: str = "env rank 0", weight: float = 1.0, size_bytes: int = 1) -> Put:
    return Put(owner=owner, key=key, weight=weight, size_bytes=size_bytes, item=item)


def get(key: str = "", owner: str = "rollout rank 0") -> Get:
    return Get(owner=owner, key=key)


def items(ticket: Get) -> list[object]:
    return [entry.item for entry in ticket.taken]


def test_a_put_settles_the_getter_that_waited_and_itself() -> None:
    queue, first, second, item = queue_of(), get(), get(), put("a")
    assert queue.get(first, 0.0) == [] == queue.get(second, 0.0)
    assert queue.put(item, 1.0) == [item, first]
    assert (items(first), second.settled) == (["a"], False)


def test_a_get_admits_the_putters_that_waited_in_order() -> None:
    queue = queue_of(capacity_items=1)
    puts = [put(i, key=str(i % 2)) for i in range(3)]
    for ticket in puts:
        queue.put(ticket, 0.0)
    assert [p.settled for p in puts] == [True, False, False]
    taken = get("0")
    assert queue.get(taken, 1.0) == [taken, puts[1]]
    assert items(taken) == [0]


def test_one_event_can_settle_a_chain() -> None:
    queue = queue_of(capacity_items=1)
    block, other = put("x", key="a"), put("y", key="b")
    waiting = get("b")
    queue.get(waiting, 0.0)
    queue.put(block, 0.0)
    queue.put(other, 0.0)
    release = get("a")
    assert queue.get(release, 1.0) == [release, other, waiting]
    assert items(waiting) == ["y"]


def test_a_large_putter_is_not_starved_by_small_ones() -> None:
    queue = queue_of(capacity_items=10, capacity_bytes=10)
    queue.put(put("a", size_bytes=6), 0.0)
    large, small = put("b", size_bytes=8), put("c", size_bytes=1)
    queue.put(large, 0.0)
    queue.put(small, 0.0)
    assert (large.settled, small.settled) == (False, False)
    queue.expire(large, 1.0)
    assert isinstance(large.error, ChannelTimeout)
    assert (small.settled, small.error) == (True, None)


def test_a_batch_at_the_head_keeps_its_place() -> None:
    queue = queue_of(capacity_items=4)
    batch = GetBatch(owner="actor rank 0", key="", weight=3, policy="at_least")
    single = get()
    queue.get(batch, 0.0)
    queue.get(single, 0.0)
    for i in range(4):
        queue.put(put(i), 0.0)
    assert (items(batch), items(single)) == ([0, 1, 2], [3])


@pytest.mark.parametrize(
    ("policy", "weight", "weights", "ended", "expected"),
    [
        ("at_most", 3, [1, 1, 1, 1], False, 3),
        ("at_most", 3, [2, 2], False, 1),
        ("at_most", 1, [5, 1], False, 1),
        ("at_most", 0.3, [0.1, 0.1, 0.1, 0.1], False, 3),
        ("at_least", 3, [1, 1], False, 0),
        ("at_least", 3, [2, 2, 2], False, 2),
        ("at_least", 3, [1, 1], True, 2),
        ("exact", 3, [1, 2, 1], False, 2),
        ("exact", 3, [1, 1], False, 0),
        ("exact", 0.3, [0.1, 0.1, 0.1], False, 3),
    ],
)
def test_how_many_items_a_policy_takes(
    policy: str, weight: float, weights: list[float], ended: bool, expected: int
) -> None:
    batch = GetBatch(owner="", key="", weight=weight, policy=policy)  # type: ignore[arg-type]
    assert batch.count([put(i, weight=w) for i, w in enumerate(weights)], ended) == expected


@pytest.mark.parametrize(("weights", "ended"), [([2, 2], False), ([1, 1], True)])
def test_an_exact_batch_that_cannot_be(weights: list[float], ended: bool) -> None:
    batch = GetBatch(owner="", key="", weight=3, policy="exact")
    with pytest.raises(NeverExact):
        batch.count([put(i, weight=w) for i, w in enumerate(weights)], ended)


def test_an_exact_batch_that_cannot_be_leaves_the_line_to_the_next() -> None:
    queue = queue_of()
    batch = GetBatch(owner="actor rank 0", key="", weight=3, policy="exact")
    queue.get(batch, 0.0)
    queue.put(put("a", weight=2), 0.0)
    queue.put(put("b", weight=2), 0.0)
    assert isinstance(batch.error, ChannelMisuse)
    assert batch.error.code == "inexact-batch"
    assert "sum to 2, 4" in str(batch.error)
    both = GetBatch(owner="actor rank 0", key="", weight=4, policy="exact")
    queue.get(both, 0.0)
    assert items(both) == ["a", "b"]


def test_close_lets_out_what_has_credit_and_refuses_what_has_not() -> None:
    queue = queue_of(capacity_items=1)
    queue.put(put("a"), 0.0)
    waiting = put("b")
    queue.put(waiting, 0.0)
    queue.close(1.0)
    assert isinstance(waiting.error, ChannelClosed)
    first, second = get(), get()
    queue.get(first, 1.0)
    queue.get(second, 1.0)
    assert items(first) == ["a"]
    assert isinstance(second.error, EndOfStream)


def test_the_last_leaving_ends_the_stream_after_the_puts_that_still_wait() -> None:
    queue = queue_of(capacity_items=1, producers=2)
    queue.put(put("a", owner="p0"), 0.0)
    queue.put(put("b", owner="p1"), 0.0)
    queue.leave("p0", 1.0)
    queue.leave("p0", 1.0)  # leaving twice is one leaving
    queue.leave("p1", 1.0)
    gets = [get() for _ in range(3)]
    for ticket in gets:
        queue.get(ticket, 2.0)
    assert [items(t) for t in gets] == [["a"], ["b"], []]
    assert isinstance(gets[2].error, EndOfStream)
    assert "all 2 producers have left" in str(gets[2].error)


def test_who_has_left_cannot_put() -> None:
    queue, late = queue_of(producers=2), put("a", owner="p0")
    queue.leave("p0", 0.0)
    queue.put(late, 1.0)
    assert isinstance(late.error, ChannelClosed)
    assert "p0 has left" in str(late.error)


def test_a_reservation_holds_credit_and_delays_the_end_until_it_is_filled() -> None:
    queue = queue_of(capacity_items=1)
    reservation = Reserve(owner="p", key="", size_bytes=5)
    waiting = get()
    queue.put(reservation, 0.0)
    queue.get(waiting, 0.0)
    queue.close(0.0)
    assert (reservation.settled, waiting.settled, queue.stats(0.0).depth_bytes) == (True, False, 5)
    assert queue.fill(reservation, "late", 1.0) == [waiting]
    assert items(waiting) == ["late"]


def test_a_withdrawn_reservation_frees_its_credit_and_ends_the_stream() -> None:
    queue = queue_of(capacity_items=1)
    reservation, waiting = Reserve(owner="p", key="", size_bytes=5), get()
    queue.put(reservation, 0.0)
    queue.get(waiting, 0.0)
    queue.close(0.0)
    queue.withdraw(reservation, 1.0)
    assert isinstance(waiting.error, EndOfStream)
    assert queue.fill(reservation, "ignored", 2.0) == []
    assert queue.stats(2.0).depth_items == 0


def test_a_withdrawn_get_gives_back_what_it_took() -> None:
    queue, taken = queue_of(), get()
    queue.put(put("a"), 0.0)
    queue.put(put("b"), 0.0)
    queue.get(taken, 0.0)
    queue.withdraw(taken, 1.0)
    again = GetBatch(owner="", key="", weight=2, policy="at_least")
    queue.get(again, 1.0)
    assert items(again) == ["a", "b"]
    assert queue.stats(1.0).gets == 2


def test_break_fails_everyone_and_the_first_reason_stays() -> None:
    queue, getter, putter = queue_of(capacity_items=1), get("b"), put("y")
    queue.get(getter, 0.0)
    queue.put(put("x"), 0.0)
    queue.put(putter, 0.0)
    assert {id(t) for t in queue.break_("env rank 1 died", 1.0)} == {id(getter), id(putter)}
    queue.break_("something else", 2.0)
    late = get()
    queue.get(late, 3.0)
    for ticket in (getter, putter, late):
        assert isinstance(ticket.error, ChannelBroken)
        assert "env rank 1 died" in str(ticket.error)
    assert queue.stats(3.0).depth_items == 0


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_must_be_an_amount(weight: float) -> None:
    queue, bad = queue_of(), put("a", weight=weight)
    batch = GetBatch(owner="", key="", weight=weight)
    queue.put(bad, 0.0)
    queue.get(batch, 0.0)
    for ticket in (bad, batch):
        assert isinstance(ticket.error, ChannelMisuse)
        assert ticket.error.code == "bad-weight"


def test_waiting_time_is_counted_while_and_after_waiting() -> None:
    queue, waiting = queue_of(), get()
    queue.get(waiting, 10.0)
    assert queue.stats(12.0).consumer_wait_s == 2.0
    queue.put(put("a"), 13.0)
    assert queue.stats(20.0).consumer_wait_s == 3.0
    assert queue.stats(20.0).waiting_consumers == ()


def test_many_keys_leave_nothing_behind() -> None:
    queue = queue_of()
    for i in range(100):
        queue.put(put(i, key=str(i)), 0.0)
        queue.get(get(str(i)), 0.0)
        waiting = get(str(-i))
        queue.get(waiting, 0.0)
        queue.refuse(waiting, 0.0)
    assert (queue._lines, queue._getters) == ({}, {})
    assert queue.stats(0.0).depth_by_key == {}


KEYS = ("a", "b")


class RandomWalk(RuleBasedStateMachine):
    """Random events; a ledger of what was granted and taken, and the promises of the machine after each event."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = ChannelSpec(name="q", capacity_items=3, capacity_bytes=10, keys=KEYS)
        self.queue = ChannelQueue(self.spec)
        self.clock, self.names = 0.0, itertools.count()
        self.waiting: list[Ticket] = []
        self.reservations: list[Reserve] = []
        self.granted: dict[str, list[int]] = {k: [] for k in KEYS}
        self.taken: dict[str, list[int]] = {k: [] for k in KEYS}

    def record(self, settled: list[Ticket]) -> None:
        for ticket in settled:
            assert ticket.settled
            if ticket in self.waiting:
                self.waiting.remove(ticket)
            if ticket.error is not None:
                continue
            if isinstance(ticket, Get):
                self.taken[ticket.key] += [e.item for e in ticket.taken]
            elif isinstance(ticket, Reserve):
                self.reservations.append(ticket)
            elif isinstance(ticket, Put):
                self.granted[ticket.key].append(ticket.item)

    def ask(self, ticket: Ticket) -> None:
        self.clock += 1
        self.waiting.append(ticket)
        self.record(
            self.queue.put(ticket, self.clock) if isinstance(ticket, Put) else self.queue.get(ticket, self.clock)  # type: ignore[arg-type]
        )

    @rule(key=st.sampled_from(KEYS), size_bytes=st.integers(0, 10), weight=st.integers(0, 3))
    def put(self, key: str, size_bytes: int, weight: int) -> None:
        self.ask(Put(owner="p", key=key, size_bytes=size_bytes, weight=weight, item=next(self.names)))

    @rule(key=st.sampled_from(KEYS), size_bytes=st.integers(0, 10))
    def reserve(self, key: str, size_bytes: int) -> None:
        self.ask(Reserve(owner="p", key=key, size_bytes=size_bytes))

    @rule(key=st.sampled_from(KEYS))
    def get(self, key: str) -> None:
        self.ask(Get(owner="c", key=key))

    @rule(key=st.sampled_from(KEYS), weight=st.integers(1, 5), policy=st.sampled_from(["at_most", "at_least", "exact"]))
    def get_batch(self, key: str, weight: int, policy: str) -> None:
        self.ask(GetBatch(owner="c", key=key, weight=weight, policy=policy))  # type: ignore[arg-type]

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
        self.record(self.queue.withdraw(self.reservations.pop(), self.clock))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), how=st.sampled_from(["expire", "refuse", "withdraw"]))
    def give_up(self, data: st.DataObject, how: str) -> None:
        ticket = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(ticket)
        self.record(getattr(self.queue, how)(ticket, self.clock))
        assert ticket.settled

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
        inside = [e for line in self.queue._lines.values() for e in line] + list(self.reservations)
        stats = self.queue.stats(self.clock)
        assert stats.depth_items == len(inside) <= self.spec.capacity_items
        assert stats.depth_bytes == sum(e.size_bytes for e in inside) <= 10
        assert sum(stats.depth_by_key.values()) == len(inside)
        assert stats.puts - stats.gets == len(inside) - len(self.reservations)

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        putters = [t for t in self.waiting if isinstance(t, Put)]
        assert list(self.queue._putters) == putters
        assert not (putters and self.queue._fits(putters[0]))
        for key in KEYS:
            getters = [t for t in self.waiting if isinstance(t, Get) and t.key == key]
            assert list(self.queue._getters.get(key, ())) == getters
            line = self.queue._lines.get(key)
            if getters and line:
                assert getters[0].count(line, self.queue._ended(key)) == 0
            elif getters:
                assert not self.queue._ended(key)


TestRandomWalk = RandomWalk.TestCase
TestRandomWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
