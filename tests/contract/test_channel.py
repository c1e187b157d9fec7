"""What every channel promises, on every way: threads, shared memory, the network, and several of them as one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import pytest

from rlplace.comm.address import Branch, SpreadChannel
from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.comm.ends import LocalChannel
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
from tests.channel_peer import PATIENCE_S, in_child, until, waiting

BRIEF_S = 0.05  # a deadline that is meant to pass


class Make(Protocol):
    def __call__(self, **fields: Any) -> Any: ...


@pytest.fixture(scope="module", params=["local", "spread", "shared", "network"])
def create(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[[ChannelSpec], Channel]]:
    if request.param in ("local", "spread"):
        yield {"local": LocalChannel, "spread": spread_channel}[request.param]
        return
    with shared_channels() as create:
        if request.param == "shared":
            yield create
            return
        with remote_channels(create) as remote:
            yield remote


def spread_channel(spec: ChannelSpec) -> SpreadChannel:
    """One branch for the keys of the test, another one for a key that it does not use."""
    keys = spec.keys or ("", "other", *"0134abcxy")
    used = LocalChannel(spec)
    other = LocalChannel(dataclasses.replace(spec, keys=("elsewhere",)))
    return SpreadChannel(
        spec, [Branch(("elsewhere",), lambda: other), Branch(keys, lambda: used)]
    )


@contextlib.contextmanager
def shared_channels() -> Iterator[Callable[[ChannelSpec], Channel]]:
    from rlplace.comm.shared_memory.channel import SharedChannel
    from rlplace.comm.shared_memory.folder import JobFolder

    with JobFolder.create() as folder:
        yield functools.partial(SharedChannel.create, folder.path)


@contextlib.contextmanager
def remote_channels(
    behind: Callable[[ChannelSpec], Any],
) -> Iterator[Callable[[ChannelSpec], Channel]]:
    """Ends that reach channels made by `behind` through one channel server and one connection."""
    from rlplace.comm.network import ChannelServer, Connection, JobKeys, RemoteChannel

    keys, names = JobKeys.create(), itertools.count()
    server = ChannelServer(host="127.0.0.1", keys=keys)
    connection = Connection(server.start(), keys)

    def create(spec: ChannelSpec) -> RemoteChannel:
        name, channel = f"channel {next(names)}", behind(spec)
        server.add(name, channel)
        end = RemoteChannel(connection, dataclasses.replace(spec, name=name))
        end.destroy = channel.destroy
        return end

    yield create
    connection.close()
    server.close()


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
        made.append(
            create(
                ChannelSpec(
                    **{
                        "name": "test",
                        "capacity_items": 4,
                        "timeout_s": PATIENCE_S,
                        **fields,
                    }
                )
            )
        )
        return made[-1]

    yield channel
    for end in made:
        if hasattr(end, "destroy"):
            end.destroy()
        else:
            end.break_("the test is over")


def drain(channel: Channel, key: str = "") -> list[Any]:
    """Everything until the end of the stream."""
    items = []
    while True:
        try:
            items.append(channel.get(key=key))
        except EndOfStream:
            return items


# ── order and waiting ────────────────────────────────────────────────────────────────────────────────────────────────


def test_many_producers_and_consumers_get_each_item_once_in_order(
    make: Make, start: Callable[..., Future]
) -> None:
    channel, each = make(keys=("a", "b")), 20

    def produce(rank: int) -> None:
        end = channel.named(f"env rank {rank}")
        for i in range(each):
            end.put((rank, i), key="ab"[i % 2])

    consumers = [start(drain, channel, key) for key in "aabb"]
    for producer in [start(produce, rank) for rank in range(3)]:
        producer.result()
    channel.close()
    taken = [consumer.result() for consumer in consumers]
    assert sorted(itertools.chain(*taken)) == [
        (rank, i) for rank in range(3) for i in range(each)
    ]
    for (
        items
    ) in taken:  # what one consumer saw of one producer is in the order it was put
        for rank in range(3):
            of_rank = [i for r, i in items if r == rank]
            assert of_rank == sorted(of_rank)
    assert channel.stats().high_water_items <= 4


def test_puts_and_gets_go_on_beside_the_caller(make: Make) -> None:
    channel = make(capacity_items=2)
    gets = [channel.get_async(key=key) for key in "bab"]  # before anything is there
    assert not any(get.done() for get in gets)
    puts = [channel.put_async(n, key=key) for n, key in enumerate("abbbb")]
    assert [get.wait() for get in gets] == [1, 0, 2], "in the order of each key"
    for put in puts:
        put.wait()
    assert channel.qsize() == channel.qsize("b") == 2
    assert channel.get_batch_async(5.0, key="b").wait() == [3, 4]
    assert channel.qsize("b") == 0


def test_puts_and_gets_can_be_awaited_while_others_go_on(make: Make) -> None:
    channel = make()

    async def consume() -> tuple[list[Any], int]:
        first = channel.get_async(key="x")
        both = asyncio.gather(first, channel.get_async(key="y"))
        turns = 0
        while not first.done():
            turns += 1
            if turns == 3:
                await channel.put_async("mine", key="x")
                await channel.put_async("yours", key="y", weight=2.0)
            await asyncio.sleep(0.001)
        return await both, turns

    items, turns = asyncio.run(consume())
    assert (items, turns >= 3) == (["mine", "yours"], True)


def test_what_goes_on_beside_the_caller_fails_where_it_is_waited_for(
    make: Make,
) -> None:
    channel = make()
    late = channel.named("env rank 0").get_async(timeout_s=BRIEF_S)
    with pytest.raises(ChannelTimeout, match="env rank 0 waited"):
        late.wait()
    for refused in (
        lambda: channel.put_async("item", weight=-1.0),
        lambda: channel.get_async(timeout_s="soon"),
        lambda: channel.get_batch_async(0),
    ):
        with pytest.raises(ChannelMisuse):
            refused()
    waits = channel.get_async(key="a")
    waiting(channel, gets=1)
    channel.break_("the test is over")
    with pytest.raises(ChannelBroken):
        waits.wait()


def test_keys_are_lines_of_their_own(make: Make) -> None:
    channel = make()
    for i in range(2):
        channel.put(f"a{i}", key="a")
        channel.put(f"b{i}", key="b")
    assert [channel.get(key=k) for k in "baab"] == ["b0", "a0", "a1", "b1"]


def test_a_get_waits_for_an_item_and_is_released_by_a_put(
    make: Make, start: Callable[..., Future]
) -> None:
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


def test_who_waits_first_is_served_first(
    make: Make, start: Callable[..., Future]
) -> None:
    channel = make(capacity_items=1)
    channel.put(0)
    blocked = []
    for i in (1, 2, 3):
        blocked.append(start(channel.put, i))
        waiting(channel, puts=i)
        assert not blocked[-1].done()
    assert [channel.get() for _ in range(4)] == [0, 1, 2, 3]
    for put in blocked:
        put.result(PATIENCE_S)


# ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_put_that_waited_in_vain_says_for_whom(
    make: Make, start: Callable[..., Future]
) -> None:
    channel = make(capacity_items=1)
    channel.named("env rank 0").put("a", key="3")
    assert channel.named("rollout rank 3").get(key="3") == "a"
    channel.put("b", key="3")
    start(channel.named("env rank 7").put, "d")
    waiting(channel, puts=1)
    with pytest.raises(ChannelTimeout) as caught:
        channel.named("env rank 1").put("c", key="4", timeout_s=BRIEF_S)
    assert caught.value.code == "channel-timeout"
    text = str(caught.value)
    assert "channel test, key '4': env rank 1 waited" in text
    assert "holds 1 of 1 items ('3': 1)" in text
    assert "waited for the consumers, so far rollout rank 3" in text
    assert "waiting to put: env rank 7" in text


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


def test_a_deadline_names_who_put_and_who_took_items(make: Make) -> None:
    channel = make(source="env", target="rollout", timeout_s=BRIEF_S)
    env = channel.named("env rank 0")
    for item in "abc":
        env.put(item)
    channel.named("rollout rank 2").get_batch(2)
    assert channel.named("rollout rank 0").get() == "c"
    stats = channel.stats()
    assert stats.put_by == {"env rank 0": 3}
    assert stats.taken_by == {"rollout rank 2": 2, "rollout rank 0": 1}
    with pytest.raises(ChannelTimeout) as caught:
        channel.named("rollout rank 0").get()
    text = str(caught.value)
    assert "put so far: 3 by env rank 0; taken so far: 2 by rollout rank 2, 1" in text
    assert "it waited for ranks of env, so far env rank 0" in text


# ── versions ───────────────────────────────────────────────────────────────────────────────────────────


def test_ages_of_items_are_counted(make: Make) -> None:
    channel = make()
    for version in (4, 3, None):
        channel.put("x", version=version)
    channel.put_nowait("y", version=6)
    for _ in range(2):
        channel.get()
    assert channel.stats().staleness_max == 3


# ── credit ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_large_items_take_credit_before_they_move(
    make: Make, start: Callable[..., Future]
) -> None:
    channel = make(capacity_items=1)
    large = np.arange(200_000, dtype=np.float32)
    channel.put(large)
    blocked = start(channel.put, large + 1)
    assert waiting(channel, puts=1).depth_items == 1
    np.testing.assert_array_equal(channel.get_batch(2.0), [large])
    blocked.result(PATIENCE_S)
    np.testing.assert_array_equal(channel.get(), large + 1)
    assert channel.stats().depth_items == 0


WRONG_CALLS: list[Callable[[Any], Any]] = [
    lambda channel: channel.put("x", key=3),
    lambda channel: channel.put("x", weight=None),
    lambda channel: channel.put("x", weight="2"),
    lambda channel: channel.put("x", weight=-1.0),
    lambda channel: channel.put("x", weight=float("nan")),
    lambda channel: channel.put("x", version="3"),
    lambda channel: channel.put("x", version=1.5),
    lambda channel: channel.put("x", version=-1),
    lambda channel: channel.put("x", version=1 << 70),
    lambda channel: channel.put("x", timeout_s="1"),
    lambda channel: channel.get(key=3),
    lambda channel: channel.get(timeout_s=[]),
    lambda channel: channel.get_batch("x"),
    lambda channel: channel.get_batch(None, key=7),
    lambda channel: channel.get_batch(0),
]


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_wrong_argument_is_refused_to_its_caller_alone(
    make: Make, call: Callable[[Any], Any]
) -> None:
    channel = make()
    with pytest.raises(ChannelMisuse) as caught:
        call(channel.named("env rank 3"))
    assert caught.value.code == "bad-argument"
    channel.put("of another")
    assert channel.get() == "of another"
    assert channel.stats().puts == 1


@pytest.mark.parametrize(
    "call", [lambda c: c.put(1, key="wieghts"), lambda c: c.get_batch(1, key="wieghts")]
)
def test_an_undeclared_key_is_refused(make: Make, call: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="did you mean 'weights'") as caught:
        call(make(keys=("weights", "grads")))
    assert isinstance(caught.value, ChannelMisuse)
    assert caught.value.code == "unknown-key"


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_is_what_is_there_up_to_a_weight(make: Make) -> None:
    channel = make(capacity_items=16)
    for i in range(8):
        channel.put(i, weight=2)
    assert channel.get_batch(5) == [0, 1]
    assert channel.get_batch(1) == [2]
    assert channel.get_batch(6) == [3, 4, 5]
    assert channel.get_batch(10) == [6, 7]
    with pytest.raises(ChannelTimeout):
        channel.get_batch(2, timeout_s=BRIEF_S)
    for _ in range(10):
        channel.put("tenth", weight=0.1)
    assert len(channel.get_batch(1.0)) == 10  # up to rounding


# ── endings ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_closing_ends_the_stream_for_every_consumer(
    make: Make, start: Callable[..., Future]
) -> None:
    channel = make()
    consumers = [start(drain, channel) for _ in range(3)]
    for i in range(3):
        channel.put(i)
    waiting(channel, gets=3)
    channel.close()
    channel.close()
    assert sorted(itertools.chain(*(c.result(PATIENCE_S) for c in consumers))) == [
        0,
        1,
        2,
    ]
    with pytest.raises(EndOfStream) as ended:
        channel.get_nowait()
    with pytest.raises(ChannelClosed) as closed:
        channel.named("env rank 0").put("late")
    assert (ended.value.code, closed.value.code) == ("end-of-stream", "channel-closed")


def test_closing_fails_the_puts_that_wait(
    make: Make, start: Callable[..., Future]
) -> None:
    channel = make(capacity_items=1)
    channel.put("in")
    blocked = start(channel.put, "out")
    waiting(channel, puts=1)
    channel.close()
    with pytest.raises(ChannelClosed):
        blocked.result(PATIENCE_S)
    assert drain(channel) == ["in"]


def test_breaking_wakes_everyone_with_the_first_reason(
    make: Make, start: Callable[..., Future]
) -> None:
    channel = make(capacity_items=1)
    channel.put("lost", key="a")
    blocked = [start(channel.put, "x"), start(channel.get), start(channel.get_batch, 2)]
    waiting(channel, puts=1, gets=2)
    channel.break_("env rank 3 died")
    channel.break_("a later reason")
    calls: list[Callable[[], Any]] = [
        lambda: channel.get_nowait(key="a"),
        lambda: channel.put("y"),
    ]
    calls += [functools.partial(b.result, PATIENCE_S) for b in blocked]
    for call in calls:
        with pytest.raises(ChannelBroken, match="env rank 3 died") as caught:
            call()
        assert caught.value.code == "channel-broken"
    assert channel.stats().depth_items == 0


def test_a_reset_channel_serves_again_and_nothing_of_before(
    make: Make, start: Callable[..., Future]
) -> None:
    channel = make(capacity_items=2)
    for end in (lambda: channel.break_("env rank 3 died"), channel.close, lambda: None):
        channel.put("lost", key="a")
        channel.put(np.zeros(1 << 16), key="a")  # in memory of its own
        blocked = [start(channel.put, "x"), start(channel.get)]
        waiting(channel, puts=1, gets=1)
        end()
        channel.reset()
        for waits in blocked:
            with pytest.raises((ChannelBroken, ChannelClosed, EndOfStream)):
                waits.result(PATIENCE_S)
        assert channel.stats().depth_items == 0
        with pytest.raises(ChannelEmpty):
            channel.get_nowait(key="a")
        channel.put("new", key="a")
        channel.put("newer", key="a")
        with pytest.raises(ChannelFull):
            channel.put_nowait("too many", key="a")
        assert [channel.get(key="a"), channel.get(key="a")] == ["new", "newer"]


# ── statistics ───────────────────────────────────────────────────────────────────────────────────────────


def test_statistics_tell_the_truth(make: Make, start: Callable[..., Future]) -> None:
    channel = make(capacity_items=3)
    for key in "aab":
        channel.put(key, key=key)
    start(channel.named("env rank 1").put, b"xy")
    start(channel.named("rollout rank 2").get, key="c")
    stats = waiting(channel, puts=1, gets=1)
    assert (stats.puts, stats.gets, stats.depth_items) == (3, 0, 3)
    assert (stats.waiting_producers, stats.waiting_consumers) == (
        ("env rank 1",),
        ("rollout rank 2",),
    )
    assert stats.depth_by_key == {"a": 2, "b": 1}
    assert stats.producer_wait_s > 0 < stats.consumer_wait_s
    assert channel.stats().producer_wait_s > stats.producer_wait_s
    channel.get(key="a")
    stats = waiting(channel, gets=1)
    assert (stats.puts, stats.gets, stats.depth_items, stats.high_water_items) == (
        4,
        1,
        3,
        3,
    )
    assert stats.producers == ("an unnamed worker", "env rank 1")
    assert sorted(stats.consumers) == ["an unnamed worker", "rollout rank 2"]
    assert stats.dead == ()


# ── items ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rows", [8, 100_000])
def test_observations_arrive_as_they_were(make: Make, rows: int) -> None:
    channel = make()
    strided = np.arange(rows * 8, dtype=np.float32).reshape(rows, 8)[:, ::2]
    channel.put(
        Observation(
            env_rank=2, stage_group=1, step=5, first_row=16, observations=strided
        ),
        weight=rows,
    )
    got = channel.get()
    assert (got.env_rank, got.stage_group, got.step, got.first_row, got.weight) == (
        2,
        1,
        5,
        16,
        rows,
    )
    np.testing.assert_array_equal(got.observations, strided)
    got.observations[:] = 0  # it is the consumer's now


@dataclasses.dataclass
class Poison:
    """Can be packed and not unpacked."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_an_item_that_cannot_be_unpickled_does_not_lose_its_batch(make: Make) -> None:
    channel = make()
    if isinstance(channel, (LocalChannel, SpreadChannel)):
        return  # items pass by reference
    for item in ("a", Poison(), "b"):
        channel.put(item)
    assert channel.get_batch(3) == ["a", "b"]
    with pytest.raises(ValueError, match="no number"):
        channel.get()
    channel.put("c")
    assert channel.get() == "c"
    channel.put(Poison())
    with pytest.raises(ValueError, match="no number"):
        channel.get_batch(3)


# ── between processes ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("create", ["shared"], indirect=True)
@pytest.mark.parametrize("size", [3, 1_000_000])
def test_an_item_outlives_its_producer(make: Make, size: int) -> None:
    channel = make()
    assert in_child(channel.named("env rank 5").put, np.ones(size)) == 0
    until(channel, lambda s: s.dead == ("env rank 5",))
    with pytest.raises(ChannelTimeout, match=r"env rank 5 \(dead\)"):
        channel.get(key="other", timeout_s=BRIEF_S)
    assert channel.get().sum() == size


@pytest.mark.parametrize("create", ["shared"], indirect=True)
def test_a_name_is_not_dead_for_those_that_come_after_a_reset(make: Make) -> None:
    channel = make(source="env")
    assert in_child(channel.named("env rank 5").put, "a") == 0
    channel.reset()
    assert channel.stats().dead == ()
    # Another process may act as env rank 5 by now; it has not used the channel.
    with pytest.raises(ChannelTimeout) as caught:
        channel.get(timeout_s=BRIEF_S)
    assert "dead" not in str(caught.value)
    assert "it waited for env, and none of its ranks has used" in str(caught.value)
    assert "put so far: none" in str(caught.value)
    channel.named("env rank 5").put("b")
    assert channel.stats().producers == ("env rank 5",)
    assert channel.get() == "b"
