"""The promises of the queue machine after every event of a random walk: order, credit, and no wake that is missing.

After each event, every request that was woken tries again, in an arbitrary order, until none is woken: a wake that is
missing shows as a request that waits for what is there.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import References, local_table
from rlplace.comm.queue import STALLED_S, Get, Put, QueueMachine
from rlplace.comm.table import NO_VERSION, SPARE_ENTRIES
from rlplace.errors import (
    ChannelBroken,
    ChannelClosed,
    ChannelEmpty,
    ChannelError,
    ChannelFull,
    EndOfStream,
)

KEYS, OWNERS = ("a", "ü"), ("env rank 0", "env rank 1", "rollout rank 0")


class RandomWalk(RuleBasedStateMachine):
    @initialize(
        capacity=st.integers(1, 4),
        keys=st.sampled_from([None, KEYS]),
        seed=st.integers(0, 1000),
    )
    def begin(self, capacity: int, keys: tuple[str, ...] | None, seed: int) -> None:
        self.capacity, self.random, self.now = capacity, random.Random(seed), 1.0
        spec = ChannelSpec(
            name="q", capacity_items=capacity, keys=keys, participants=64
        )
        self.queue = QueueMachine(local_table(spec), 1, References())
        self.requests: list[
            Put | Get
        ] = []  # a request's waker is its place here, from 1
        self.stopped: set[int] = (
            set()
        )  # wakers of requests that do not try when they are woken
        self.waiting: list[Put | Get] = []
        self.reserved: list[Put] = []
        self.lines: dict[str, list[int]] = {
            key: [] for key in KEYS
        }  # what is inside, in order
        self.remote: list[Get] = []  # whose items may still come back
        self.items, self.closed = 0, False
        self.dropped = 0  # by resets

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(
        owner=st.sampled_from(OWNERS),
        key=st.sampled_from(KEYS),
        weight=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        later=st.booleans(),
        waits=st.booleans(),
    )
    def put(
        self, owner: str, key: str, weight: float, later: bool, waits: bool
    ) -> None:
        self.items += 1
        self.ask(
            Put(owner, key, weight, self.items, None if later else (self.items,)), waits
        )

    @rule(
        owner=st.sampled_from(OWNERS),
        key=st.sampled_from(KEYS),
        limit=st.sampled_from([None, 0.5, 1.0, 3.0]),
        waits=st.booleans(),
        remote=st.booleans(),
    )
    def get(
        self, owner: str, key: str, limit: float | None, waits: bool, remote: bool
    ) -> None:
        self.ask(Get(owner, key, limit, remote=remote), waits)

    @precondition(lambda self: self.remote)
    @rule(data=st.data(), arrives=st.booleans())
    def confirm_or_restore(self, data: st.DataObject, arrives: bool) -> None:
        get = self.remote.pop(data.draw(st.integers(0, len(self.remote) - 1)))
        if arrives:
            self.queue.confirm(get, self.now)
            return
        self.lines[get.key_name][:0] = [item for (item,), _, _ in get.taken]
        self.queue.restore(get, self.now)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), fills=st.booleans())
    def fill_or_cancel(self, data: st.DataObject, fills: bool) -> None:
        put = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        if not fills:
            self.queue.cancel(put, self.now)
            return
        self.items += 1
        self.queue.fill(put, (self.items,), self.now)
        self.lines[put.key_name].append(self.items)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), patient=st.booleans())
    def give_up(self, data: st.DataObject, patient: bool) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.queue.withdraw(request, self.now) if patient else self.queue.expired(
            request, self.now
        )

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        """Its process does not run any more, though it waits."""
        self.stopped.add(
            self.requests.index(data.draw(st.sampled_from(self.waiting))) + 1
        )

    @rule(rarely=st.integers(0, 19))
    def close(self, rarely: int) -> None:
        if rarely == 0:
            self.closed = True
            self.queue.close()

    @rule(rarely=st.integers(0, 9), settled=st.booleans())
    def reset(self, rarely: int, settled: bool) -> None:
        """What began before comes to nothing, and changes nothing that began later."""
        if rarely:
            return
        self.queue.reset()
        for request in self.waiting:
            step = self.queue.put if isinstance(request, Put) else self.queue.get
            with pytest.raises(ChannelBroken):
                step(request, 1, self.now)
        for put in self.reserved:
            with pytest.raises(ChannelBroken) if settled else contextlib.nullcontext():
                self.queue.fill(put, (0,), self.now) if settled else self.queue.cancel(
                    put, self.now
                )
        for get in self.remote:
            self.queue.confirm(get, self.now) if settled else self.queue.restore(
                get, self.now
            )
        self.dropped += sum(map(len, self.lines.values()))
        self.waiting, self.reserved, self.remote, self.closed = [], [], [], False
        self.lines = {key: [] for key in KEYS}

    # ── promises ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def promises_hold(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.settle()
        stats = self.queue.stats(self.now)
        inside = sum(map(len, self.lines.values()))
        unconfirmed = sum(len(get.taken) for get in self.remote)
        assert stats.depth_items == inside + len(self.reserved)
        assert stats.depth_items + unconfirmed <= self.capacity + SPARE_ENTRIES, (
            "what comes back has a place"
        )
        assert stats.puts - stats.gets == inside + self.dropped
        running = [
            r for r in self.waiting if self.requests.index(r) + 1 not in self.stopped
        ]
        for request in running:
            if isinstance(request, Put):
                most = min(self.capacity, self.capacity + SPARE_ENTRIES - unconfirmed)
                assert stats.depth_items >= most, "a put waits though there is credit"
            else:
                assert not self.lines[request.key_name], "a get waits in vain"
                assert not self.closed or any(
                    put.key_name == request.key_name for put in self.reserved
                ), "it has ended"

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, request: Put | Get, waits: bool) -> None:
        self.requests.append(request)
        self.attempt(request, len(self.requests) if waits else 0)
        if waits and request.waiter:
            self.waiting.append(request)

    def attempt(self, request: Put | Get, waker: int) -> None:
        try:
            done = (
                self.queue.put(request, waker, self.now)
                if isinstance(request, Put)
                else self.take(request, waker)
            )
            if not done and not waker:
                raise self.queue.refused(request, self.now)
        except ChannelError as error:
            allowed: Any = (ChannelFull, ChannelEmpty)
            if self.closed:
                allowed = (
                    *allowed,
                    ChannelClosed if isinstance(request, Put) else EndOfStream,
                )
            if not isinstance(error, allowed):
                raise
            done = True
        else:
            if done and isinstance(request, Put):
                if request.entry:
                    self.reserved.append(request)
                else:
                    self.lines[request.key_name].append(request.payload[0])
        if done and request in self.waiting:
            self.waiting.remove(request)

    def take(self, get: Get, waker: int) -> bool:
        done = self.queue.get(get, waker, self.now)
        if done:
            line, items = (
                self.lines[get.key_name],
                [payload[0] for payload, _, _ in get.taken],
            )
            assert line[: len(items)] == items, "once, and in order"
            del line[: len(items)]
            if get.remote:
                self.remote.append(get)
            weights = [weight for _, weight, _ in get.taken]
            assert len(weights) == 1 or sum(weights) <= (get.limit or 0.0)
            assert all(version != NO_VERSION for _, _, version in get.taken)
        return done

    def settle(self) -> None:
        """Woken requests try again until none is woken; then time passes, and what sleeps looks by itself.

        Each time that passes shows one stopped process; one more for those that were woken before.
        """
        for _ in range(len(self.stopped) + 2):
            while self.queue.wakes:
                wakers, self.queue.wakes = self.queue.wakes, []
                self.random.shuffle(wakers)
                for waker in wakers:
                    if (
                        waker not in self.stopped
                        and self.requests[waker - 1] in self.waiting
                    ):
                        self.attempt(self.requests[waker - 1], waker)
            if self.stopped:
                self.now += 2 * STALLED_S
                for request in [
                    r
                    for r in self.waiting
                    if self.requests.index(r) + 1 not in self.stopped
                ]:
                    self.attempt(request, self.requests.index(request) + 1)


TestRandomWalk = RandomWalk.TestCase
TestRandomWalk.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)


def test_several_stopped_getters_hold_up_no_other() -> None:
    queue = QueueMachine(
        local_table(ChannelSpec(name="q", capacity_items=4)), 1, References()
    )
    stopped, runs = [Get(name, "a", None) for name in "xyz"], Get("runs", "a", None)
    assert not any(
        queue.get(get, waker, 1.0) for waker, get in enumerate([*stopped, runs], 1)
    )
    assert queue.put(Put("env rank 0", "a", 1.0, None, (1,)), 0, 1.0)
    assert [queue.get(runs, 4, 1.0 + 2 * STALLED_S * look) for look in range(1, 4)] == [
        False,
        False,
        True,
    ]
    assert queue.wakes == [1, 2, 3]


def test_the_last_item_of_a_closed_channel_ends_the_other_waits() -> None:
    queue = QueueMachine(
        local_table(ChannelSpec(name="q", capacity_items=4)), 1, References()
    )
    put, first, second = (
        Put("env rank 0", "a", 1.0, None, None),
        Get("x", "a", None),
        Get("y", "a", None),
    )
    assert queue.put(put, 0, 1.0)
    assert not any((queue.get(first, 1, 1.0), queue.get(second, 2, 1.0)))
    queue.close()
    assert not any((queue.get(first, 1, 1.0), queue.get(second, 2, 1.0))), (
        "credit is held: an item may come"
    )
    queue.wakes.clear()
    queue.fill(put, ("last",), 1.0)
    assert queue.wakes == [1]
    assert queue.get(first, 1, 1.0)
    assert queue.wakes == [1, 2]
    with pytest.raises(EndOfStream):
        queue.get(second, 2, 1.0)
