"""The seat of a networked channel, driven as its clients drive it, in one event loop without a network."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.seat import ChannelSeat, Entry, pack, refused, unpack
from rlplace.errors import ChannelBroken, ChannelEmpty, ChannelTimeout

LONG_S = 60.0


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


def seat_of(**fields: Any) -> ChannelSeat:
    return ChannelSeat(ChannelSpec(**{"name": "test", "capacity_items": 1, **fields}))


def put(data: bytes, *, client: str = "c0", serial: int = 0, patience_s: float | None = LONG_S) -> bytes:
    return pack((client, serial, "env rank 0", "", patience_s), 1.0, len(data), data)


def reserve(size_bytes: int, *, client: str = "c0", serial: int = 0) -> bytes:
    return pack((client, serial, "env rank 0", "", LONG_S), 1.0, size_bytes)


def get(*, client: str = "c1", serial: int = 0, patience_s: float | None = LONG_S, batch: object = None) -> bytes:
    return pack((client, serial, "rollout rank 0", "", patience_s), batch)


async def begin(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """The call, run until it waits."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    assert not task.done()
    return task


@in_a_loop
async def test_small_items_pass_through_as_they_were_packed() -> None:
    seat = seat_of()
    assert await seat.put(put(b"item")) == b""
    assert unpack(await seat.get(get())) == (("", 1.0, 4, b"item"),)


@in_a_loop
async def test_a_put_answers_when_credit_is_granted() -> None:
    seat = seat_of()
    await seat.put(put(b"a"))
    blocked = await begin(seat.put(put(b"b", serial=1)))
    await seat.get(get())
    assert await blocked == b""


@in_a_loop
async def test_a_refusal_is_packed_with_its_kind() -> None:
    seat = seat_of()
    assert isinstance(refused(unpack(await seat.get(get(patience_s=None)))), ChannelEmpty)
    assert isinstance(refused(unpack(await seat.get(get(patience_s=0.001)))), ChannelTimeout)


@in_a_loop
async def test_a_reference_is_answered_as_it_is() -> None:
    seat, reference = seat_of(), object()
    assert await seat.reserve(reserve(100)) == b""
    waiting = await begin(seat.get(get()))
    await seat.fill("c0", 0, [reference])
    assert await waiting == [Entry("", 1.0, 100, reference)]


@in_a_loop
async def test_a_withdrawn_waiter_answers_nothing_and_takes_nothing() -> None:
    seat = seat_of()
    waiting = await begin(seat.get(get(serial=7)))
    await seat.withdraw("c1", 7)
    assert unpack(await waiting) == ()
    await seat.put(put(b"a"))
    assert (await seat.stats()).depth_items == 1


@in_a_loop
async def test_a_call_that_is_cancelled_leaves_no_waiter() -> None:
    seat = seat_of()
    waiting = await begin(seat.get(get()))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await seat.stats()).waiting_consumers == ()


@in_a_loop
async def test_restored_items_are_first_again() -> None:
    seat = seat_of(capacity_items=2)
    await seat.put(put(b"a"))
    await seat.put(put(b"b"))
    taken = [Entry(*e) for e in unpack(await seat.get(get()))]
    await seat.restore(taken)
    both = unpack(await seat.get(get(batch=(2.0, "exact"))))
    assert [Entry(*e).data for e in both] == [b"a", b"b"]


@in_a_loop
async def test_the_end_of_a_client_withdraws_what_it_left_open_and_nothing_else() -> None:
    seat, lifeline = seat_of(capacity_items=2), asyncio.get_running_loop().create_future()
    await seat.reserve(reserve(10, client="dying", serial=1))
    other = await begin(seat.get(get(client="living")))
    dying = await begin(seat.get(get(client="dying", serial=2)))
    attached = await begin(seat.attach("dying", [lifeline]))
    lifeline.set_exception(ConnectionError("its process ended"))
    with pytest.raises(ConnectionError):
        await attached
    assert unpack(await dying) == ()
    stats = await seat.stats()
    assert (stats.depth_items, stats.waiting_consumers) == (0, ("rollout rank 0",))
    await seat.put(put(b"a"))
    assert unpack(await other)[0][3] == b"a"


@in_a_loop
async def test_breaking_answers_everyone() -> None:
    seat = seat_of()
    await seat.put(put(b"a"))
    waiting = [
        await begin(seat.put(put(b"b", serial=1))),
        await begin(seat.get(pack(("c", 1, "r", "k", LONG_S), None))),
    ]
    await seat.break_("the run was cancelled")
    for answer in await asyncio.gather(*waiting):
        assert isinstance(refused(unpack(answer)), ChannelBroken)
