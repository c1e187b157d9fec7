"""Point to point and collectives between workers: threads over each way of one node, and processes."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.comm.local import LocalChannel
from rlplace.comm.peers import Peer, Peers
from rlplace.comm.shared.channel import SharedChannel
from rlplace.comm.shared.folder import JobFolder
from rlplace.errors import ChannelBroken, ChannelMisuse, ChannelTimeout

PATIENCE_S = 60.0
BRIEF_S = 0.05
ENV, ROLLOUT = Peer.all("env", 3), Peer.all("rollout", 2)
Start = Callable[..., Future[Any]]


@pytest.fixture
def start() -> Iterator[Start]:
    with ThreadPoolExecutor(max_workers=16) as threads:
        yield threads.submit


SPEC = ChannelSpec(name="peers", capacity_items=4, timeout_s=PATIENCE_S)


@pytest.fixture(params=["local", "shared"])
def channel(request: pytest.FixtureRequest, start: Start) -> Iterator[Channel]:
    if request.param == "local":
        channel = LocalChannel(SPEC)
        yield channel
        channel.break_("the test is over")
        return
    with JobFolder.create() as folder:
        shared = SharedChannel.create(folder.path, SPEC)
        yield shared
        shared.destroy()


def until_waits(channel: Channel, *owners: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not set(owners) <= {wait.owner for wait in channel.stats().waits}:
        assert time.monotonic() < deadline, f"{owners} never waited"


@pytest.fixture
def at(channel: Channel) -> Callable[[Peer], Peers]:
    ends: dict[Peer, Peers] = {}

    def end(me: Peer) -> Peers:
        return ends.setdefault(me, Peers(channel, me))

    return end


def everywhere(start: Start, at: Callable[[Peer], Peers], group: tuple[Peer, ...], do: Callable[[Peers], Any]) -> list:
    calls = [start(do, at(me)) for me in group]
    return [call.result(PATIENCE_S) for call in calls]


# ── point to point ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_messages_of_one_source_and_tag_keep_their_order(at: Callable[[Peer], Peers]) -> None:
    sender, other, receiver = at(ENV[0]), at(ENV[1]), at(ROLLOUT[1])
    sender.send(1, to=ROLLOUT[1])
    sender.send("tagged", to=ROLLOUT[1], tag="t")
    other.send("from the other", to=ROLLOUT[1])
    sender.send(2, to=ROLLOUT[1])
    assert receiver.recv(source=ENV[1]) == "from the other"
    assert [receiver.recv(source=ENV[0]) for _ in range(2)] == [1, 2]
    assert receiver.recv(source=ENV[0], tag="t") == "tagged"


def test_arrays_arrive_whole_and_can_be_leased(at: Callable[[Peer], Peers]) -> None:
    large = np.arange(100_000)
    for _ in range(2):
        at(ENV[0]).send({"x": large}, to=ENV[1])
    np.testing.assert_array_equal(at(ENV[1]).recv(source=ENV[0])["x"], large)
    with at(ENV[1]).recv_lease(source=ENV[0]) as lease:
        assert lease.item["x"].sum() == large.sum()


def test_a_started_receive_is_done_when_the_message_is_there(at: Callable[[Peer], Peers]) -> None:
    first, second = (at(ENV[1]).irecv(source=ENV[0]) for _ in range(2))
    assert not first.done()
    with pytest.raises(ChannelTimeout):
        first.wait(BRIEF_S)
    at(ENV[0]).send("a", to=ENV[1])
    at(ENV[0]).send("b", to=ENV[1])
    assert second.wait(PATIENCE_S) == "b", "whoever asked first gets the first"
    assert first.done()
    assert first.wait() == "a"
    assert at(ENV[1]).irecv(source=ENV[0]).done() is False


def test_receives_of_many_tags_leave_nothing_behind(at: Callable[[Peer], Peers], channel: Channel) -> None:
    me = at(ENV[1])
    for step in range(50):
        begun = me.irecv(source=ENV[0], tag=str(step))
        at(ENV[0]).send("a", to=ENV[1], tag=str(step))
        at(ENV[0]).send("b", to=ENV[1], tag=str(step))
        assert me.recv(source=ENV[0], tag=str(step)) == "b", "whoever asked first gets the first"
        assert begun.wait() == "a"
    assert me._inboxes == {}
    assert channel.stats().depth_by_key == {}


def test_a_receive_in_vain_takes_nothing(at: Callable[[Peer], Peers]) -> None:
    with pytest.raises(ChannelTimeout):
        at(ENV[1]).recv(source=ENV[0], timeout_s=BRIEF_S)
    at(ENV[0]).send("a", to=ENV[1])
    assert at(ENV[1]).recv(source=ENV[0]) == "a"


def test_started_sends_go_on_without_credit_and_keep_their_order(channel: Channel, at: Callable[[Peer], Peers]) -> None:
    sends = [at(ENV[0]).isend(i, to=ENV[1]) for i in range(10)]
    assert [send.done() for send in sends] == [True] * 4 + [False] * 6
    with pytest.raises(ChannelTimeout, match="env rank 0 waited"):
        sends[-1].wait(BRIEF_S)
    assert [at(ENV[1]).recv(source=ENV[0]) for _ in range(10)] == list(range(10))
    sends[-1].wait(PATIENCE_S)
    at(ENV[0]).send("later", to=ENV[1])
    assert at(ENV[1]).recv(source=ENV[0]) == "later"
    assert channel.stats().depth_items == 0


def test_a_blocking_send_goes_behind_those_under_way(at: Callable[[Peer], Peers], start: Start) -> None:
    for i in range(5):
        at(ENV[0]).isend(i, to=ENV[1])
    last = start(at(ENV[0]).send, 5, to=ENV[1])
    assert [at(ENV[1]).recv(source=ENV[0]) for _ in range(6)] == list(range(6))
    last.result(PATIENCE_S)


def test_a_receive_that_waited_in_vain_says_for_whom_and_what_that_one_does(
    channel: Channel, at: Callable[[Peer], Peers], start: Start
) -> None:
    with pytest.raises(ChannelTimeout) as caught:
        at(ENV[1]).recv(source=ENV[0], tag="x", timeout_s=BRIEF_S)
    assert "env rank 1 waited" in str(caught.value)
    assert "of env rank 0: a message tagged 'x'" in str(caught.value)
    assert "env rank 0 does not wait for anybody here" in str(caught.value)
    start(at(ENV[0]).recv, source=ENV[2])
    until_waits(channel, "env rank 0")
    with pytest.raises(ChannelTimeout, match="env rank 0 itself waits for item at key 'env 2>env 0/'"):
        at(ENV[1]).recv(source=ENV[0], timeout_s=BRIEF_S)


def test_the_end_of_the_channel_reaches_what_is_under_way(channel: Channel, at: Callable[[Peer], Peers]) -> None:
    sends = [at(ENV[0]).isend(i, to=ENV[1]) for i in range(6)]
    receive = at(ENV[2]).irecv(source=ENV[0])
    channel.break_("env rank 1 died")
    for wait in (sends[4].wait, sends[5].wait, receive.wait):
        with pytest.raises(ChannelBroken, match="env rank 1 died"):
            wait()


# ── collectives ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_broadcast_between_groups_of_any_size(at: Callable[[Peer], Peers], start: Start) -> None:
    group = (*ENV, *ROLLOUT)

    def do(me: Peers) -> list[Any]:
        mine = f"by {me.me}"
        return [me.broadcast(mine, source=source, group=group) for source in group]

    expected = [f"by {peer}" for peer in group]
    assert everywhere(start, at, group, do) == [expected] * len(group)


def test_gathers_give_values_in_the_order_of_the_group(at: Callable[[Peer], Peers], start: Start) -> None:
    group = (ROLLOUT[1], *ENV)

    def do(me: Peers) -> tuple[Any, Any]:
        return me.all_gather(str(me.me), group=group), me.gather(me.me.rank, to=ENV[2], group=group)

    found = everywhere(start, at, group, do)
    assert [all_ for all_, _ in found] == [[str(peer) for peer in group]] * 4
    assert [gathered for _, gathered in found] == [None, None, None, [1, 0, 1, 2]]


def test_collectives_go_on_however_small_the_channel_is(start: Start) -> None:
    channel, group = LocalChannel(dataclasses.replace(SPEC, capacity_items=1)), (*ENV, *ROLLOUT)

    def do(me: Peers) -> list[Any]:
        found = [me.broadcast(number, source=group[number % 5], group=group) for number in range(20)]
        return found + me.all_gather(me.me.rank, group=group) + me.all_gather(me.me.component[0], group=group)

    expected = [*range(20), 0, 1, 2, 0, 1, *"eeerr"]
    assert everywhere(start, lambda me: Peers(channel, me), group, do) == [expected] * 5


def test_collectives_alone_need_nobody(at: Callable[[Peer], Peers]) -> None:
    me, group = at(ENV[0]), (ENV[0],)
    me.barrier(group=group)
    assert me.all_gather(7, group=group) == [7]
    assert me.broadcast(8, source=ENV[0], group=group) == 8


def test_nobody_passes_a_barrier_before_all_have_come(
    channel: Channel, at: Callable[[Peer], Peers], start: Start
) -> None:
    early = [start(at(me).barrier, group=ENV) for me in ENV[:2]]
    until_waits(channel, "env rank 0", "env rank 1")
    assert not any(call.done() for call in early)
    at(ENV[2]).barrier(group=ENV)
    for call in early:
        call.result(PATIENCE_S)


def test_several_collectives_may_be_under_way(at: Callable[[Peer], Peers]) -> None:
    def begin(me: Peers) -> list[Any]:
        return [
            me.iall_gather(me.me.rank, group=ENV[:2]),
            me.ibroadcast("x" if me.me == ENV[1] else None, source=ENV[1], group=ENV[:2]),
            me.igather(10 + me.me.rank, to=ENV[0], group=ENV[:2], tag="other"),
        ]

    under_way = begin(at(ENV[0]))
    assert not any(handle.done() for handle in under_way)
    with pytest.raises(ChannelTimeout, match="all_gather, number 0 of env rank 0, env rank 1"):
        under_way[0].wait(BRIEF_S)
    others = begin(at(ENV[1]))
    assert [handle.wait() for handle in reversed(others)] == [None, "x", [0, 1]]
    assert all(handle.done() for handle in under_way)
    assert [handle.wait() for handle in under_way] == [[0, 1], "x", [10, 11]]


def test_different_collectives_are_an_error_that_names_both(at: Callable[[Peer], Peers]) -> None:
    at(ENV[0]).broadcast("x", source=ENV[0], group=ENV[:2])
    with pytest.raises(ChannelMisuse) as caught:
        at(ENV[1]).all_gather("y", group=ENV[:2])
    assert caught.value.code == "collective-mismatch"
    text = str(caught.value)
    assert "env rank 1: all_gather, number 0 of env rank 0, env rank 1" in text
    assert "env rank 0: broadcast from env rank 0, number 0 of env rank 0, env rank 1" in text


def test_different_groups_are_an_error_that_names_both(at: Callable[[Peer], Peers]) -> None:
    at(ENV[0]).ibroadcast("x", source=ENV[0], group=ENV)
    with pytest.raises(ChannelMisuse, match="env rank 0, env rank 1, env rank 2"):
        at(ENV[1]).broadcast(source=ENV[0], group=ENV[:2])


def test_two_that_wait_for_each_other_learn_it(channel: Channel, at: Callable[[Peer], Peers], start: Start) -> None:
    start(at(ENV[1]).gather, 1, to=ENV[1], group=ENV[:2])
    until_waits(channel, "env rank 1")
    with pytest.raises(ChannelTimeout) as caught:
        at(ENV[0]).gather(0, to=ENV[0], group=ENV[:2], timeout_s=BRIEF_S)
    assert "of env rank 1: gather to env rank 0, number 0" in str(caught.value)
    assert "env rank 1 itself waits for item at key 'all>env 1/'" in str(caught.value)


@pytest.mark.parametrize("group", [ENV[:2], ENV[1:], (*ENV, ENV[0])])
def test_a_group_names_everyone_once(at: Callable[[Peer], Peers], group: tuple[Peer, ...]) -> None:
    with pytest.raises(ChannelMisuse, match="env rank 0 started broadcast from env rank 2") as caught:
        at(ENV[0]).broadcast("x", source=ENV[2], group=group)
    assert caught.value.code == "bad-group"


def test_groups_of_many_are_told_apart(at: Callable[[Peer], Peers]) -> None:
    many = Peer.all("env", 20)
    at(ENV[0]).ibroadcast("x", source=ENV[0], group=many[:19])
    other = at(ENV[1]).ibroadcast(source=ENV[0], group=(*many[:18], many[19]))
    with pytest.raises(ChannelMisuse, match="and 11 more"):
        other.wait()


# ── between processes ────────────────────────────────────────────────────────────────────────────────────────────────


def answer(path: Path, rank: int) -> None:
    """Env rank `rank` in a process of its own: takes what rank 0 sends, gathers, comes to the barrier."""
    me = Peers(SharedChannel.attach(path), ENV[rank])
    me.send(me.recv(source=ENV[0]).sum(), to=ENV[0])
    everyone = me.all_gather(np.full(50_000, rank), group=ENV)
    assert [int(values[0]) for values in everyone] == [0, 1, 2]
    me.barrier(group=ENV)


def test_processes_that_know_nothing_of_jobs_can_use_it() -> None:
    spawning = multiprocessing.get_context("spawn")
    with JobFolder.create() as folder:
        channel = SharedChannel.create(folder.path, SPEC)
        others = [spawning.Process(target=answer, args=(channel.path, rank)) for rank in (1, 2)]
        for other in others:
            other.start()
        me = Peers(channel, ENV[0])
        for size, peer in ((10, ENV[1]), (100_000, ENV[2])):
            me.send(np.ones(size), to=peer)
        assert [me.recv(source=peer) for peer in ENV[1:]] == [10, 100_000]
        assert [int(values.sum()) for values in me.all_gather(np.zeros(3), group=ENV)] == [0, 50_000, 100_000]
        me.barrier(group=ENV)
        for other in others:
            other.join(PATIENCE_S)
        assert [other.exitcode for other in others] == [0, 0]
        channel.destroy()
