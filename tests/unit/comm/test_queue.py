"""The queue machine: who is served when, and what a settled ticket holds."""

from __future__ import annotations

import pytest

from rlplace.comm.channel import Admission, ChannelSpec
from rlplace.comm.queue import ChannelQueue
from rlplace.comm.tickets import Get, GetBatch, NeverExact, Put, Reserve
from rlplace.errors import (
    ChannelBroken,
    ChannelClosed,
    ChannelEmpty,
    ChannelFull,
    ChannelMisuse,
    ChannelTimeout,
    EndOfStream,
)


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
        queue.attempt(get(str(-i)), 0.0)
        late = get(str(-i))
        queue.get(late, 0.0)
        queue.expire(late, 1.0)
    assert (queue._lines, queue._getters) == ({}, {})
    assert queue.stats(0.0).depth_by_key == {}


# ── admission ────────────────────────────────────────────────────────────────────────────────────────────────────────

ONE_STALE = Admission(weight_per_version=2, max_staleness=1)


def test_what_would_come_too_early_waits_until_the_policy_advances() -> None:
    queue = queue_of(capacity_items=10, admission=ONE_STALE)
    puts = [put(i, weight=2) for i in range(4)]
    for ticket in puts:
        queue.put(ticket, 0.0)
    assert [p.settled for p in puts] == [True, True, False, False]
    assert [w.wants for w in queue.stats(1.0).waits] == ["admission", "admission"]
    taken = get()
    assert queue.get(taken, 1.0) == [taken], "taking gives credit, not admission"
    assert queue.advance(1, 2.0) == [puts[2]]
    assert queue.advance(0, 3.0) == [], "the version never goes back"
    assert queue.stats(3.0).version == 1
    assert queue.advance(5, 4.0) == [puts[3]]


def test_admission_is_first_come_first_served_over_all_keys() -> None:
    queue = queue_of(capacity_items=10, admission=Admission(weight_per_version=1, max_staleness=0))
    large, small = put("a", key="a", weight=2), put("b", key="b", weight=1)
    queue.put(large, 0.0)
    queue.put(small, 0.0)
    assert (large.settled, small.settled) == (False, False)
    assert [w.wants for w in queue.stats(0.0).waits] == ["admission", "credit"], "the second only waits for its turn"
    queue.expire(large, 1.0)
    assert isinstance(large.error, ChannelTimeout)
    text = str(large.error)
    assert "env rank 0 waited 1.0 s for admission" in text
    assert "policy version 0 admits a summed weight of 1 (max_staleness 0)" in text
    assert "nobody advanced the channel to version 1" in text
    assert (small.settled, small.error) == (True, None)


def test_a_put_that_does_not_wait_says_that_it_is_too_early() -> None:
    queue, early = queue_of(admission=ONE_STALE), put("a", weight=5)
    queue.attempt(early, 0.0)
    assert isinstance(early.error, ChannelFull)
    assert "no admission for env rank 0" in str(early.error)
    assert "max_staleness 1" in str(early.error)


def test_a_withdrawn_reservation_returns_its_admission() -> None:
    queue = queue_of(admission=ONE_STALE)
    reservation, waiting = Reserve(owner="p", key="", size_bytes=1, weight=4), put("a", weight=4)
    queue.put(reservation, 0.0)
    queue.put(waiting, 0.0)
    assert (reservation.settled, waiting.settled) == (True, False)
    assert queue.withdraw(reservation, 1.0) == [waiting]


def test_ages_are_recorded_when_items_are_taken() -> None:
    queue = queue_of(capacity_items=4)
    for version in (3, 5, None, 4):
        queue.put(Put(owner="p", key="", size_bytes=1, version=version), 0.0)
    assert queue.stats(0.0).oldest_version == 3
    queue.advance(7, 0.0)
    assert queue.stats(0.0).staleness_max == 0
    queue.get(get(), 0.0)
    assert (queue.stats(0.0).oldest_version, queue.stats(0.0).staleness_max) == (4, 4)
    for _ in range(3):
        queue.get(get(), 0.0)
    assert (queue.stats(0.0).oldest_version, queue.stats(0.0).staleness_max) == (None, 4)


@pytest.mark.parametrize(("weight_per_version", "max_staleness"), [(0, 1), (float("nan"), 0), (1, -1)])
def test_an_admission_must_make_sense(weight_per_version: float, max_staleness: int) -> None:
    with pytest.raises(ValueError, match="weight_per_version"):
        Admission(weight_per_version=weight_per_version, max_staleness=max_staleness)


# ── serving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_least_loaded_of_those_that_wait_is_served_first() -> None:
    queue = queue_of(capacity_items=10, serving="least_loaded")
    queue.put(put("long", weight=10), 0.0)
    queue.get(get(owner="a"), 0.0)
    waiting = [get(owner=owner) for owner in "abca"]
    for ticket in waiting:
        queue.get(ticket, 0.0)
    for i in range(4):
        queue.put(put(i), 0.0)
    assert [items(t) for t in waiting] == [[2], [0], [1], [3]], "ties by arrival"


def test_serving_at_one_key_may_change_whose_turn_it_is_at_another() -> None:
    queue = queue_of(capacity_items=10, serving="least_loaded")
    batch, single = GetBatch(owner="a", key="x", weight=2, policy="at_least"), get("x", owner="b")
    queue.put(put("for b", key="y", weight=1), 0.0)
    queue.get(get("y", owner="b"), 0.0)
    queue.get(batch, 0.0)
    queue.get(single, 0.0)
    queue.put(put("early", key="x"), 0.0)
    assert (batch.settled, single.settled) == (False, False), "it is the turn of a, which wants two"
    queue.put(put("heavy", key="z", weight=5), 0.0)
    queue.get(get("z", owner="a"), 1.0)
    assert items(single) == ["early"]


def test_what_returns_no_longer_weighs_on_who_took_it() -> None:
    queue = queue_of(capacity_items=10, serving="least_loaded")
    taken = get(owner="a")
    queue.put(put("x", weight=10), 0.0)
    queue.get(taken, 0.0)
    queue.withdraw(taken, 0.0)
    queue.get(get(owner="b"), 0.0)
    waiting = [get(owner="b"), get(owner="a")]
    for ticket in waiting:
        queue.get(ticket, 0.0)
    queue.put(put("y"), 1.0)
    assert [items(t) for t in waiting] == [[], ["y"]]


@pytest.mark.parametrize("serving", ["first_come", "least_loaded"])
def test_who_does_not_wait_never_overtakes_who_does(serving: str) -> None:
    queue = queue_of(serving=serving)
    queue.get(GetBatch(owner="a", key="", weight=2, policy="at_least"), 0.0)
    queue.put(put("x"), 0.0)
    hasty = get(owner="b")
    queue.attempt(hasty, 0.0)
    assert isinstance(hasty.error, ChannelEmpty)
    assert queue.stats(0.0).waiting_consumers == ("a",)


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_timeout_names_the_dead() -> None:
    queue, waiting = queue_of(), get()
    for rank in range(2):
        queue.attempt(put(rank, key="other", owner=f"env rank {rank}"), 0.0)
    assert queue.died("env rank 1", 1.0) == []
    queue.get(waiting, 1.0)
    queue.expire(waiting, 2.0)
    assert "the producers, so far env rank 0, env rank 1 (dead)" in str(waiting.error)
    assert "find out why env rank 1 died" in str(waiting.error)
    assert queue.stats(2.0).dead == ("env rank 1",)
    queue.attempt(get(owner="env rank 1"), 3.0)
    assert queue.stats(3.0).dead == (), "it is back"


def test_a_counted_producer_that_dies_before_it_left_breaks_the_channel() -> None:
    queue, waiting = queue_of(producers=2), get("b")
    for owner in ("p0", "p1"):
        queue.put(put("x", owner=owner), 0.0)
    queue.get(waiting, 0.0)
    queue.leave("p0", 1.0)
    assert queue.died("p0", 2.0) == [] == queue.died("a consumer", 2.0)
    assert queue.died("p1", 3.0) == [waiting]
    assert isinstance(waiting.error, ChannelBroken)
    assert "p1 died before it had left" in str(waiting.error)
