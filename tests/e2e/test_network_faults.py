"""Real processes on both sides of a server, killed at the worst moments."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.network import ChannelServer, Connection, JobKeys, RemoteChannel
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import JobFolder
from rlplace.errors import ChannelBroken
from tests.channel_peer import PATIENCE_S, until, waiting
from tests.network_cable import Cable

SPEC = ChannelSpec(name="test", capacity_items=4, timeout_s=PATIENCE_S)
LARGE = 32 << 20


# ── what other processes do ──────────────────────────────────────────────────────────────────────────────────────────


def serve(keys: JobKeys, pipe: Pipe) -> None:
    server = ChannelServer(host="127.0.0.1", keys=keys)
    folder = JobFolder.create()  # removed by the next job: this process is killed
    server.add("test", SharedChannel.create(folder.path, SPEC))
    pipe.send(server.start())
    threading.Event().wait()


def use(endpoint: str, keys: JobKeys, pipe: Pipe, owner: str, method: str, *arguments: Any) -> None:
    end = RemoteChannel(Connection(endpoint, keys), SPEC).named(owner)
    end.stats()
    pipe.send("connected")
    getattr(end, method)(*arguments)
    pipe.send("done")
    threading.Event().wait()


@pytest.fixture
def spawn() -> Iterator[Callable[..., tuple[BaseProcess, Pipe]]]:
    """Starts a function in a process of its own and waits for its first message."""
    started: list[BaseProcess] = []
    context = multiprocessing.get_context("spawn")

    def process(target: Callable[..., None], *before: Any, after: tuple[Any, ...] = ()) -> tuple[BaseProcess, Pipe]:
        ours, theirs = context.Pipe()
        one = context.Process(target=target, args=(*before, theirs, *after), daemon=True)
        one.start()
        started.append(one)
        theirs.close()
        return one, ours

    yield process
    for one in started:
        one.kill()
        one.join()


def heard(pipe: Pipe) -> Any:
    assert pipe.poll(PATIENCE_S), "the process sent nothing"
    return pipe.recv()


@pytest.fixture
def keys() -> JobKeys:
    return JobKeys.create()


@pytest.fixture
def server(keys: JobKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, SharedChannel]]:
    """In this process; soon gives up a lost client."""
    monkeypatch.setattr("rlplace.comm.network.server.LOST_S", 0.2)
    monkeypatch.setattr("rlplace.comm.network.server.PROBE_S", 0.05)
    channel = SharedChannel.create(tmp_path, SPEC)
    one = ChannelServer(host="127.0.0.1", keys=keys)
    one.add("test", channel)
    yield one.start(), channel
    one.close()


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_producer_killed_in_the_middle_of_an_item_gives_its_credit_back(
    server: tuple[str, SharedChannel], keys: JobKeys, spawn: Callable[..., Any]
) -> None:
    endpoint, channel = server
    cable = Cable(endpoint, stall_after=1 << 20)
    process, pipe = spawn(use, cable.endpoint, keys, after=("env rank 1", "put", np.ones(LARGE, np.uint8)))
    assert heard(pipe) == "connected"
    cable.wait_passed(1 << 20)
    assert channel.stats().depth_items == 1, "credit comes before data"
    process.kill()
    process.join()
    cable.close()
    stats = until(channel, lambda s: s.dead == ("env rank 1",))
    assert (stats.depth_items, stats.puts) == (0, 0)


def test_what_a_killed_consumer_had_not_received_goes_to_the_next(
    server: tuple[str, SharedChannel], keys: JobKeys, spawn: Callable[..., Any]
) -> None:
    endpoint, channel = server
    cable = Cable(endpoint)
    process, pipe = spawn(use, cable.endpoint, keys, after=("rollout rank 1", "get"))
    assert heard(pipe) == "connected"
    waiting(channel, gets=1)
    cable.stall()
    for item in range(3):
        channel.put(item)
    until(channel, lambda s: s.gets == 1)
    process.kill()
    process.join()
    cable.close()
    until(channel, lambda s: s.gets == 0)
    assert [channel.get() for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_dead_or_stopped_server_breaks_every_end(
    how: signal.Signals, keys: JobKeys, spawn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, pipe = spawn(serve, keys)
    endpoint = heard(pipe)
    connection = Connection(endpoint, keys)
    end = RemoteChannel(connection, SPEC).named("rollout rank 0")
    end.put("lost")
    with ThreadPoolExecutor() as threads:
        blocked = threads.submit(end.get, key="never", timeout_s=1.0)
        until(end, lambda s: s.waiting_consumers == ("rollout rank 0",))
        os.kill(process.pid, how)
        with pytest.raises((ChannelBroken, TimeoutError)) as caught:
            blocked.result(PATIENCE_S)
    if how is signal.SIGKILL:
        assert isinstance(caught.value, ChannelBroken)
        assert f"the channel server {endpoint} is gone" in str(caught.value)
    else:
        assert "for the channel itself to answer get" in str(caught.value)
    connection.close()
