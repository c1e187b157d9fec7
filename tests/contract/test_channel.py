"""What every channel promises, on each implementation: the threaded one and the one between Ray processes."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import pytest

from rlplace.comm.channel import Channel, ChannelSpec, ChannelStats
from rlplace.comm.local import LocalChannel
from rlplace.errors import (
    ChannelBroken,
    ChannelClosed,
    ChannelEmpty,
    ChannelFull,
    ChannelMisuse,
    ChannelTimeout,
    EndOfStream,
)
from rlplace.trajectory import Observation

PATIENCE_S = 60.0  # longer than any step takes on a busy machine; reached only by a broken channel
BRIEF_S = 0.05  # a deadline that is meant to pass


class Make(Protocol):
    def __call__(self, **fields: Any) -> Any: ...


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def create(request: pytest.FixtureRequest) -> Iterator[Callable[[ChannelSpec], Channel]]:
    if request.param == "local":
        yield LocalChannel
        return
    import ray

    from rlplace.comm.ray_channel import RayChannel

    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False, logging_level="error")
    yield RayChannel.create
    ray.shutdown()


@pytest.fixture
def start() -> Iterator[Callable[..., Future[Any]]]:
    """Runs a call in a thread of its own."""
    with ThreadPoolExecutor(max_workers=16) as threads:
        yield threads.submit


@pytest.fixture
def make(create: Callable[[ChannelSpec], Any], start: object) -> Iterator[Make]:
    """Channels named "test" with room for four items. They break with the test, before its threads are joined."""
    made: list[Any] = []

    def channel(**fields: Any) -> Any:
        made.append(create(ChannelSpec(**{"name": "test", "capacity_items": 4, "timeout_s": PATIENCE_S, **fields})))
        return made[-1]

    yield channel
    for end in made:
        if isinstance(end, LocalChannel):
            end.break_("the test is over")
        else:
            end.destroy()


def until(channel: Channel, holds: Callable[[ChannelStats], bool]) -> ChannelStats:
    deadline = time.monotonic() + PATIENCE_S
    while not holds(stats := channel.stats()):
        assert time.monotonic() < deadline, f"never came true; last seen: {stats}"
    return stats


def waiting(channel: Channel, *, puts: int = 0, gets: int = 0) -> ChannelStats:
    return until(channel, lambda s: (len(s.waiting_producers), len(s.waiting_consumers)) == (puts, gets))


def drain(channel: Channel, key: str = "") -> list[Any]:
    """Everything until the end of the stream."""
    items = []
    while True:
        try:
            items.append(channel.get(key=key))
        except EndOfStream:
            return items


# ── order and waiting ────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_is_a_channel(make: Make) -> None:
    channel = make()
    assert isinstance(channel, Channel)
    assert channel.named("env rank 0").spec is channel.spec


def test_many_producers_and_consumers_get_each_item_once_in_order(make: Make, start: Callable[..., Future]) -> None:
    channel, each = make(producers=3, keys=("a", "b")), 20

    def produce(rank: int) -> None:
        end = channel.named(f"env rank {rank}")
        for i in range(each):
            end.put((rank, i), key="ab"[i % 2])
        end.leave(f"env rank {rank}")

    consumers = [start(drain, channel, key) for key in "aabb"]
    producers = [start(produce, rank) for rank in range(3)]
    for producer in producers:
        producer.result()
    taken = [consumer.result() for consumer in consumers]
    assert sorted(itertools.chain(*taken)) == [(rank, i) for rank in range(3) for i in range(each)]
    for items in taken:  # what one consumer saw of one producer is in the order it was put
        for rank in range(3):
            of_rank = [i for r, i in items if r == rank]
            assert of_rank == sorted(of_rank)
    assert channel.stats().high_water_items <= 4


def test_keys_are_lines_of_their_own(make: Make) -> None:
    channel = make()
    for i in range(2):
        channel.put(f"a{i}", key="a")
        channel.put(f"b{i}", key="b")
    assert [channel.get(key=k) for k in "baab"] == ["b0", "a0", "a1", "b1"]


def test_a_put_waits_for_credit_and_is_released_by_a_get(make: Make, start: Callable[..., Future]) -> None:
    channel = make(capacity_items=1)
    channel.put("first")
    blocked = start(channel.named("env rank 2").put, "second")
    assert waiting(channel, puts=1).waiting_producers == ("env rank 2",)
    assert not blocked.done()
    assert channel.get() == "first"
    blocked.result(PATIENCE_S)
    assert channel.get() == "second"


def test_a_get_waits_for_an_item_and_is_released_by_a_put(make: Make, start: Callable[..., Future]) -> None:
    channel = make()
    blocked = start(channel.named("rollout rank 1").get, key="1")
    assert waiting(channel, gets=1).waiting_consumers == ("rollout rank 1",)
    channel.put("other", key="0")
    assert not blocked.done()
    channel.put("mine", key="1")
    assert blocked.result(PATIENCE_S) == "mine"


def test_without_waiting(make: Make) -> None:
    channel = make(capacity_items=1)
    with pytest.raises(ChannelEmpty) as empty:
        channel.get_nowait()
    channel.put_nowait("a")
    with pytest.raises(ChannelFull) as full:
        channel.named("env rank 0").put_nowait("b")
    assert (empty.value.code, full.value.code) == ("channel-empty", "channel-full")
    assert "no credit for env rank 0" in str(full.value)
    assert channel.get_nowait() == "a"


def test_nowait_does_not_overtake_who_waits(make: Make, start: Callable[..., Future]) -> None:
    channel = make()
    batch = start(functools.partial(channel.get_batch, 2, policy="at_least"))
    waiting(channel, gets=1)
    channel.put("a")
    with pytest.raises(ChannelEmpty):
        channel.get_nowait()
    channel.put("b")
    assert batch.result(PATIENCE_S) == ["a", "b"]


# ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_put_that_waited_in_vain_says_for_whom(make: Make) -> None:
    channel = make(capacity_items=1)
    channel.named("env rank 0").put("a", key="3")
    assert channel.named("rollout rank 3").get(key="3") == "a"
    channel.put("b", key="3")
    with pytest.raises(ChannelTimeout) as caught:
        channel.named("env rank 1").put("c", key="4", timeout_s=BRIEF_S)
    assert caught.value.code == "channel-timeout"
    text = str(caught.value)
    assert "channel test, key '4': env rank 1 waited" in text
    assert "holds 1 of 1 items ('3': 1)" in text
    assert "waited for the consumers, so far rollout rank 3" in text


def test_a_get_that_waited_in_vain_says_for_whom_and_takes_nothing(make: Make) -> None:
    channel = make(timeout_s=BRIEF_S)
    channel.named("env rank 0").put("a", key="0")
    with pytest.raises(ChannelTimeout) as caught:
        channel.named("rollout rank 1").get(key="1")
    assert isinstance(caught.value, TimeoutError)
    text = str(caught.value)
    assert "channel test, key '1': rollout rank 1 waited" in text
    assert "waited for the producers, so far env rank 0" in text
    channel.put("b", key="1")
    assert channel.get_nowait(key="1") == "b"


def test_a_timeout_shows_who_else_waits(make: Make, start: Callable[..., Future]) -> None:
    channel = make(capacity_items=1)
    channel.put("a", key="0")
    start(channel.named("env rank 7").put, "b")
    waiting(channel, puts=1)
    with pytest.raises(ChannelTimeout, match="waiting to put: env rank 7; waiting to get: nobody"):
        channel.get(key="1", timeout_s=BRIEF_S)


# ── credit ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_are_credit_too(make: Make, start: Callable[..., Future]) -> None:
    channel = make(capacity_bytes=100)
    channel.put(np.zeros(60, np.uint8))
    with pytest.raises(ChannelFull, match="60 of 100 bytes"):
        channel.put_nowait(np.zeros(41, np.uint8))
    blocked = start(channel.put, np.ones(50, np.uint8))
    assert waiting(channel, puts=1).depth_bytes == 60
    assert len(channel.get()) == 60
    blocked.result(PATIENCE_S)
    stats = channel.stats()
    assert (stats.depth_items, stats.depth_bytes, stats.high_water_bytes) == (1, 50, 60)


def test_large_items_take_credit_before_they_move(make: Make, start: Callable[..., Future]) -> None:
    channel = make(capacity_bytes=1 << 20)
    large = np.arange(200_000, dtype=np.float32)
    channel.put(large)
    blocked = start(channel.put, large + 1)
    assert waiting(channel, puts=1).depth_bytes == large.nbytes
    np.testing.assert_array_equal(channel.get(), large)
    blocked.result(PATIENCE_S)
    np.testing.assert_array_equal(channel.get(), large + 1)
    assert channel.stats().depth_bytes == 0


def test_an_item_that_can_never_fit_is_refused(make: Make) -> None:
    channel = make(capacity_bytes=100)
    for size_bytes in (101, 1 << 20):
        with pytest.raises(ValueError, match=f"{size_bytes} bytes") as caught:
            channel.named("env rank 0").put(np.zeros(size_bytes, np.uint8))
        assert isinstance(caught.value, ChannelMisuse)
        assert caught.value.code == "item-too-large"


def test_an_undeclared_key_is_refused(make: Make) -> None:
    channel = make(keys=("weights", "grads"))
    calls: list[Callable[[], Any]] = [
        lambda: channel.put(1, key="wieghts"),
        lambda: channel.get(key="wieghts"),
        lambda: channel.get_batch(1, key="wieghts"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="did you mean 'weights'") as caught:
            call()
        assert isinstance(caught.value, ChannelMisuse)
        assert caught.value.code == "unknown-key"


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_batch_policies(make: Make) -> None:
    channel = make(capacity_items=16)
    for i in range(8):
        channel.put(i, weight=2)
    assert channel.get_batch(5) == [0, 1]
    assert channel.get_batch(1) == [2]
    assert channel.get_batch(3, policy="at_least") == [3, 4]
    assert channel.get_batch(4, policy="exact") == [5, 6]
    with pytest.raises(ValueError, match="sum to 2") as caught:
        channel.get_batch(1, policy="exact")
    assert isinstance(caught.value, ChannelMisuse)
    assert caught.value.code == "inexact-batch"
    assert channel.get_batch(10) == [7]


def test_batches_are_atomic_between_consumers(make: Make, start: Callable[..., Future]) -> None:
    channel = make(capacity_items=16)
    batches = [start(functools.partial(channel.get_batch, 4, policy="exact")) for _ in range(3)]
    waiting(channel, gets=3)
    for i in range(12):
        channel.put(i)
    taken = sorted(batch.result(PATIENCE_S) for batch in batches)
    assert taken == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_closed_channel_gives_what_is_left(make: Make, start: Callable[..., Future]) -> None:
    channel = make()
    batch = start(functools.partial(channel.get_batch, 3, policy="at_least"))
    waiting(channel, gets=1)
    channel.put("a")
    channel.close()
    assert batch.result(PATIENCE_S) == ["a"]
    with pytest.raises(EndOfStream):
        channel.get_batch(3, policy="at_least")


def test_a_batch_of_large_and_small_items(make: Make) -> None:
    channel = make()
    large = np.arange(100_000)
    channel.put(large, weight=1)
    channel.put("small", weight=1)
    first, second = channel.get_batch(2, policy="exact")
    np.testing.assert_array_equal(first, large)
    assert second == "small"


# ── endings ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_closing_ends_the_stream_for_every_consumer(make: Make, start: Callable[..., Future]) -> None:
    channel = make()
    consumers = [start(drain, channel) for _ in range(3)]
    for i in range(3):
        channel.put(i)
    waiting(channel, gets=3)
    channel.close()
    channel.close()
    assert sorted(itertools.chain(*(c.result(PATIENCE_S) for c in consumers))) == [0, 1, 2]
    with pytest.raises(EndOfStream) as ended:
        channel.get_nowait()
    with pytest.raises(ChannelClosed) as closed:
        channel.named("env rank 0").put("late")
    assert (ended.value.code, closed.value.code) == ("end-of-stream", "channel-closed")


def test_closing_fails_the_puts_that_wait(make: Make, start: Callable[..., Future]) -> None:
    channel = make(capacity_items=1)
    channel.put("in")
    blocked = start(channel.put, "out")
    waiting(channel, puts=1)
    channel.close()
    with pytest.raises(ChannelClosed):
        blocked.result(PATIENCE_S)
    assert drain(channel) == ["in"]


def test_the_last_leaving_producer_ends_the_stream(make: Make) -> None:
    channel = make(producers=2)
    channel.put("a")
    channel.leave("env rank 0")
    channel.leave("env rank 0")
    channel.named("env rank 1").put("b")
    channel.leave("env rank 1")
    assert drain(channel) == ["a", "b"]


def test_breaking_wakes_everyone_with_the_first_reason(make: Make, start: Callable[..., Future]) -> None:
    channel = make(capacity_items=1)
    channel.put("lost", key="a")
    blocked = [
        start(channel.put, "x"),
        start(channel.get),
        start(functools.partial(channel.get_batch, 2, policy="at_least")),
    ]
    waiting(channel, puts=1, gets=2)
    channel.break_("env rank 3 died")
    channel.break_("a later reason")
    calls: list[Callable[[], Any]] = [lambda: channel.get_nowait(key="a"), lambda: channel.put("y")]
    calls += [functools.partial(b.result, PATIENCE_S) for b in blocked]
    for call in calls:
        with pytest.raises(ChannelBroken, match="env rank 3 died") as caught:
            call()
        assert caught.value.code == "channel-broken"
    assert channel.stats().depth_items == 0


# ── statistics and asyncio ───────────────────────────────────────────────────────────────────────────────────────────


def test_statistics_tell_the_truth(make: Make, start: Callable[..., Future]) -> None:
    channel = make(capacity_items=3)
    for key, size_bytes in (("a", 10), ("a", 20), ("b", 30)):
        channel.put(np.zeros(size_bytes, np.uint8), key=key)
    start(channel.named("env rank 1").put, b"xy")
    start(channel.named("rollout rank 2").get, key="c")
    stats = waiting(channel, puts=1, gets=1)
    assert (stats.puts, stats.gets, stats.depth_items, stats.depth_bytes) == (3, 0, 3, 60)
    assert (stats.waiting_producers, stats.waiting_consumers) == (("env rank 1",), ("rollout rank 2",))
    assert stats.depth_by_key == {"a": 2, "b": 1}
    assert stats.producer_wait_s > 0 < stats.consumer_wait_s
    assert channel.stats().producer_wait_s > stats.producer_wait_s
    channel.get(key="a")
    stats = waiting(channel, gets=1)
    assert (stats.puts, stats.gets, stats.depth_items, stats.depth_bytes) == (4, 1, 3, 52)
    assert (stats.high_water_items, stats.high_water_bytes) == (3, 60)


def test_async_forms_work_together_in_one_loop(make: Make) -> None:
    channel = make(capacity_items=2)
    large = np.arange(50_000)

    async def produce() -> None:
        for i in range(10):
            await channel.put_async(i)
        await channel.put_async(large)

    async def consume() -> list[Any]:
        return [await channel.get_async() for _ in range(11)]

    async def run() -> list[Any]:
        _, items = await asyncio.gather(produce(), consume())
        return items

    items = asyncio.run(run())
    assert items[:10] == list(range(10))
    np.testing.assert_array_equal(items[10], large)


def test_async_deadlines_and_endings(make: Make) -> None:
    channel = make(capacity_items=1)

    async def run() -> None:
        with pytest.raises(ChannelTimeout, match="rollout rank 0 waited"):
            await channel.named("rollout rank 0").get_async(timeout_s=BRIEF_S)
        await channel.put_async("a")
        with pytest.raises(ChannelTimeout, match="env rank 0 waited"):
            await channel.named("env rank 0").put_async("b", timeout_s=BRIEF_S)
        channel.close()
        assert await channel.get_async() == "a"
        with pytest.raises(EndOfStream):
            await channel.get_async()

    asyncio.run(run())


def test_a_cancelled_wait_takes_nothing(make: Make) -> None:
    channel = make()

    async def cancelled(put_before_cancel: bool) -> None:
        task = asyncio.create_task(channel.get_async())
        while not (await asyncio.to_thread(channel.stats)).waiting_consumers:
            pass
        if put_before_cancel:
            channel.put("a")  # blocks this loop: the task cannot have seen its item when it is cancelled
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled(put_before_cancel=False))
    asyncio.run(cancelled(put_before_cancel=True))
    assert channel.get() == "a"
    assert waiting(channel).depth_items == 0


# ── items ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rows", [8, 100_000])
def test_observations_arrive_as_they_were(make: Make, rows: int) -> None:
    channel = make()
    strided = np.arange(rows * 8, dtype=np.float32).reshape(rows, 8)[:, ::2]
    channel.put(Observation(env_rank=2, stage_group=1, step=5, first_row=16, observations=strided), weight=rows)
    got = channel.get()
    assert (got.env_rank, got.stage_group, got.step, got.first_row, got.weight) == (2, 1, 5, 16, rows)
    np.testing.assert_array_equal(got.observations, strided)
    got.observations[:] = 0  # it is the consumer's now


# ── between processes ────────────────────────────────────────────────────────────────────────────────────────────────


between_processes = pytest.mark.parametrize("create", [pytest.param("ray", marks=pytest.mark.ray)], indirect=True)


@pytest.fixture
def spawn() -> Iterator[Callable[[], Any]]:
    """Processes that call a method of the end they are sent."""
    import ray

    class Peer:
        def call(self, end: Any, method: str, *args: Any, **kwargs: Any) -> Any:
            return getattr(end, method)(*args, **kwargs)

        def put_large(self, end: Any, key: str) -> None:
            end.put(np.ones(1_000_000), key=key)

    peers: list[Any] = []

    def peer() -> Any:
        peers.append(ray.remote(Peer).options(num_cpus=0).remote())
        return peers[-1]

    yield peer
    for one in peers:
        ray.kill(one)


@between_processes
def test_ends_work_in_other_processes(make: Make, spawn: Callable[[], Any]) -> None:
    import ray

    channel, env, rollout = make(), spawn(), spawn()
    taken = rollout.call.remote(channel.named("rollout rank 0"), "get", key="x")
    assert waiting(channel, gets=1).waiting_consumers == ("rollout rank 0",)
    ray.get(env.call.remote(channel.named("env rank 0"), "put", np.arange(4), key="x"))
    np.testing.assert_array_equal(ray.get(taken), np.arange(4))
    ray.get(env.put_large.remote(channel, "y"))
    assert channel.get(key="y").sum() == 1_000_000


@between_processes
def test_an_error_keeps_its_kind_across_processes(make: Make, spawn: Callable[[], Any]) -> None:
    import ray

    failed = spawn().call.remote(make().named("rollout rank 0"), "get", timeout_s=BRIEF_S)
    with pytest.raises(ChannelTimeout, match="rollout rank 0 waited"):
        ray.get(failed)


@between_processes
def test_a_killed_consumer_and_a_killed_producer_wait_no_longer(make: Make, spawn: Callable[[], Any]) -> None:
    import ray

    channel, consumer, producer = make(capacity_items=1), spawn(), spawn()
    channel.put("full", key="a")
    consumer.call.remote(channel, "get", key="b")
    producer.put_large.remote(channel, "b")
    waiting(channel, puts=1, gets=1)
    ray.kill(consumer)
    ray.kill(producer)
    waiting(channel)
    assert channel.get(key="a") == "full"
    channel.put("for another", key="b")
    assert channel.get(key="b") == "for another"


@between_processes
def test_what_a_killed_producer_had_put(make: Make, spawn: Callable[[], Any]) -> None:
    import ray

    channel, producer = make(), spawn()
    ray.get(producer.put_large.remote(channel, "large"))
    ray.get(producer.call.remote(channel, "put", "safe", key="small"))
    producer.call.remote(channel, "get", key="never")
    waiting(channel, gets=1)
    ray.kill(producer)
    waiting(channel)  # its death is known
    assert channel.get(key="small") == "safe"
    with pytest.raises(ChannelBroken, match="the producer of this item died"):
        channel.get(key="large")


@between_processes
def test_the_death_of_the_channel_reaches_every_end(make: Make, start: Callable[..., Future]) -> None:
    channel = make()
    blocked = start(channel.named("rollout rank 0").get)
    waiting(channel, gets=1)
    channel.destroy()
    calls: list[Callable[[], Any]] = [
        functools.partial(blocked.result, PATIENCE_S),
        lambda: channel.put(1),
        lambda: asyncio.run(channel.get_async()),
        channel.stats,
    ]
    for call in calls:
        with pytest.raises(ChannelBroken) as caught:
            call()
        assert caught.value.code == "channel-broken"
    channel.destroy()


@between_processes
def test_a_channel_that_does_not_answer_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from rlplace.comm import ray_channel

    class Deaf:
        async def get(self, *_: Any) -> None:
            await asyncio.Event().wait()

        put = reserve = lifeline = attach = withdraw = stats = break_ = get

    monkeypatch.setattr(ray_channel, "_GRACE_S", BRIEF_S)
    seat = ray.remote(Deaf).options(num_cpus=0, max_concurrency=100).remote()
    spec = ChannelSpec(name="test", capacity_items=1, timeout_s=BRIEF_S)
    channel = ray_channel.RayChannel(spec, ray_channel._Line(seat), "env rank 0")
    for call in (channel.get, lambda: channel.put(1), lambda: asyncio.run(channel.get_async())):
        with pytest.raises(ChannelTimeout, match=r"env rank 0 waited 0\.1 s for the channel itself to answer"):
            call()
    channel.destroy()
