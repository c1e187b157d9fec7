"""A connection and its server: what survives a cut cable, what breaks, and the errors of each side."""

from __future__ import annotations

import dataclasses
import errno
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.network import (
    ChannelServer,
    Connection,
    JobKeys,
    RemoteChannel,
    connection,
    server,
)
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import JobFolder
from rlplace.errors import ChannelBroken, ChannelTimeout
from tests.channel_peer import PATIENCE_S, until, waiting
from tests.network_cable import Cable

SPEC = ChannelSpec(name="test", capacity_items=4, timeout_s=PATIENCE_S)


class Line:
    """A server with one channel, and ends that reach it over cables."""

    def __init__(self) -> None:
        self.keys = JobKeys.create()
        self.folder = JobFolder.create()
        self.channel = SharedChannel.create(self.folder.path, SPEC)
        self.server = ChannelServer(host="127.0.0.1", keys=self.keys)
        self.server.add("test", self.channel)
        self.endpoint = self.server.start()
        self.cables: list[Cable] = []
        self.connections: list[Connection] = []

    def end(self, owner: str) -> tuple[RemoteChannel, Cable]:
        self.cables.append(Cable(self.endpoint))
        self.connections.append(Connection(self.cables[-1].endpoint, self.keys))
        return RemoteChannel(self.connections[-1], SPEC).named(owner), self.cables[-1]

    def close(self) -> None:
        for cable in self.cables:
            cable.flow()
        for one in self.connections:
            one.close()
        self.server.close()
        for cable in self.cables:
            cable.close()
        self.channel.destroy()
        self.folder.close()


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(max_workers=16) as threads:
        yield threads.submit


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are final at once."""
    for module in (connection, server):
        monkeypatch.setattr(module, "LOST_S", 0.0)
    monkeypatch.setattr(server, "PROBE_S", 0.01)


# ── a cut that both sides outlast ────────────────────────────────────────────────────────────────────────────────────


def test_what_waits_when_the_cable_is_cut_is_asked_again_and_done_once(
    line: Line, start: Callable[..., Future]
) -> None:
    end, cable = line.end("env rank 0")
    end.stats()
    blocked = start(end.get, key="a")
    waiting(line.channel, gets=1)
    cable.cut()
    line.channel.put("x", key="a")
    line.channel.put("y", key="a")
    assert blocked.result(PATIENCE_S) == "x"
    assert end.get(key="a") == "y"
    assert line.channel.stats().depth_items == 0


def test_nothing_is_lost_or_doubled_however_often_the_cable_is_cut(
    line: Line, start: Callable[..., Future]
) -> None:
    (producer, first), (consumer, second) = (
        line.end("env rank 0"),
        line.end("rollout rank 0"),
    )
    count, large = 60, np.arange(20_000.0)

    def produce() -> None:
        for i in range(count):
            producer.put((i, large if i % 20 == 0 else None))

    producing, taken = start(produce), []
    for i in range(count):
        taken.append(consumer.get())
        if i % 15 == 0:
            first.cut()
        if i % 15 == 5:
            second.cut()
    producing.result(PATIENCE_S)
    assert [i for i, _ in taken] == list(range(count))
    for i, rows in taken:
        assert (rows is None) if i % 20 else np.array_equal(rows, large)
    assert line.channel.stats().depth_items == 0


def test_a_large_item_that_was_cut_in_the_middle_arrives_whole(
    line: Line, start: Callable[..., Future]
) -> None:
    end, cable = line.end("env rank 0")
    end.stats()
    large = np.random.default_rng(0).integers(0, 255, 8 << 20, np.uint8)
    before = cable.passed_bytes
    blocked = start(end.put, large)
    cable.wait_passed(before + (1 << 20))
    cable.cut()
    blocked.result(PATIENCE_S)
    np.testing.assert_array_equal(line.channel.get_nowait(), large)
    assert line.channel.stats().depth_items == 0


# ── a loss that is final ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("impatient")
def test_the_server_gives_back_what_a_lost_client_waited_for_or_had_not_received(
    line: Line, start: Callable[..., Future]
) -> None:
    (waiter, first), (reserver, second), (taker, third) = (
        line.end(f"env rank {i}") for i in range(3)
    )
    for end in (waiter, reserver, taker):
        end.stats()
    blocked = start(waiter.get, key="never")
    reserver.connection.ask(
        reserver, "put", None, "", 1.0, None, 9.0, patience_s=PATIENCE_S
    )
    on_its_way = start(taker.get, key="a")
    waiting(line.channel, gets=2)
    third.stall()
    line.channel.put("kept", key="a")
    waiting(line.channel, gets=1)
    assert line.channel.stats().depth_items == 1  # the reservation
    for cable in (first, second, third):
        cable.close()
    for lost in (blocked, on_its_way):
        with pytest.raises(ChannelBroken, match="is gone"):
            lost.result(PATIENCE_S)
    waiting(line.channel)
    until(line.channel, lambda s: len(s.dead) == 3)
    assert line.channel.get(key="a", timeout_s=PATIENCE_S) == "kept"
    assert line.channel.stats().depth_items == 0
    assert set(line.channel.stats().dead) == {"env rank 0", "env rank 1", "env rank 2"}


def test_what_cannot_go_back_ends_its_channel_and_not_the_server(
    line: Line, start: Callable[..., Future], monkeypatch: pytest.MonkeyPatch
) -> None:
    (taker, cable), (other, _) = line.end("rollout rank 0"), line.end("env rank 1")
    second = SharedChannel.create(
        line.folder.path, dataclasses.replace(SPEC, name="second")
    )
    line.server.add("second", second)
    taker.stats()
    taken = start(taker.get)
    waiting(line.channel, gets=1)
    cable.stall()
    line.channel.put(np.ones(100_000))
    waiting(line.channel)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(line.channel._attachment.store, "write", full)
    monkeypatch.setattr(connection, "LOST_S", 0.0)
    monkeypatch.setattr(server, "LOST_S", 0.0)
    monkeypatch.setattr(server, "PROBE_S", 0.01)
    cable.close()
    with pytest.raises(ChannelBroken):
        taken.result(PATIENCE_S)
    with pytest.raises(ChannelBroken, match="could not be undone"):
        line.channel.get(timeout_s=PATIENCE_S)
    end = RemoteChannel(other.connection, second.spec)
    end.put("x")
    assert end.get() == "x"


def test_a_client_that_was_given_up_gets_the_reason(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LOST_S", 0.0)
    monkeypatch.setattr(server, "PROBE_S", 0.01)
    end, cable = line.end("env rank 0")
    end.stats()
    end.put("kept")
    cable.stall()
    cable.cut()
    until(line.channel, lambda s: s.dead == ("env rank 0",))
    cable.flow()
    with pytest.raises(ChannelBroken, match="could not reach this process"):
        end.get()
    assert line.channel.get_nowait() == "kept"


def test_a_closed_server_tells_every_end_at_once(
    line: Line, start: Callable[..., Future]
) -> None:
    end, cable = line.end("rollout rank 0")
    blocked = start(end.get)
    waiting(line.channel, gets=1)
    line.server.close()
    calls: list[Callable[[], Any]] = [
        lambda: blocked.result(PATIENCE_S),
        lambda: end.put(1),
        end.stats,
    ]
    for call in calls:
        with pytest.raises(
            ChannelBroken, match=f"the channel server {cable.endpoint} was closed"
        ):
            call()
    waiting(line.channel)


@pytest.mark.usefixtures("impatient")
def test_an_end_without_an_answer_names_the_endpoint() -> None:
    lone = Connection("tcp://127.0.0.1:9", JobKeys.create(), patience_s=0.05)
    end = RemoteChannel(lone, SPEC).named("env rank 3")
    with pytest.raises(
        ChannelBroken,
        match=r"broken for env rank 3[^$]*no channel server of this job at tcp://127.0.0.1:9",
    ):
        end.get()
    lone.close()


def test_a_server_that_does_not_answer_is_named(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlplace.comm.network.connection.GRACE_S", 0.01)
    end, cable = line.end("env rank 0")
    monkeypatch.undo()
    end.stats()
    monkeypatch.setattr("rlplace.comm.network.connection.GRACE_S", 0.01)
    cable.stall()
    with pytest.raises(
        ChannelTimeout,
        match=r"env rank 0 waited 0\.0 s for the channel itself to answer get",
    ):
        end.get(timeout_s=0.01)
    with pytest.raises(ChannelTimeout, match="to answer put"):
        end.put("late", timeout_s=0.01)
    monkeypatch.undo()
    cable.flow()
    line.channel.put("x")
    assert end.get() == "x"


def test_an_unknown_channel_is_refused(line: Line) -> None:
    end, _ = line.end("env rank 0")
    other = RemoteChannel(
        line.connections[0], dataclasses.replace(SPEC, name="nothing")
    ).named("env rank 0")
    with pytest.raises(ChannelBroken, match="no channel 'nothing'"):
        other.get()
    end.put(1)


# ── shapes of use ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_end_is_sent_to_other_processes_as_its_address(line: Line) -> None:
    end, _ = line.end("env rank 0")
    copy = pickle.loads(pickle.dumps(end))
    copy.put("x", key="a")
    assert end.get(key="a") == "x"
    assert line.channel.stats().producers == ("env rank 0",)
    copy.connection.close()
    copy.connection.close()
    with pytest.raises(ChannelBroken, match="this process closed its connection"):
        copy.get()
