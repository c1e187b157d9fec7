"""Two network namespaces joined by a cable of known bandwidth and delay: the network way between real machines' stacks.

Skipped where the machine refuses what `cables` needs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.errors import ChannelBroken
from tests.e2e import cables
from tests.e2e.cables import ADDRESSES, Cable
from tests.e2e.delayed_cable import enter

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
SPEC = ChannelSpec(name="test", capacity_items=4, timeout_s=PATIENCE_S)
MBIT_PER_S = 400


@pytest.fixture(params=[0, 20], ids=["near", "20 ms away"])
def cable(request: pytest.FixtureRequest) -> Iterator[Cable]:
    try:
        with cables.laid(MBIT_PER_S, request.param) as one:
            yield one
    except cables.Refused as why:
        pytest.skip(str(why))


# ── processes inside the namespaces ──────────────────────────────────────────────────────────────────────────────────


def serve(namespace: str, keys: Any, pipe: Pipe) -> None:
    from rlplace.comm.network import ChannelServer
    from rlplace.comm.shared_memory.channel import SharedChannel
    from rlplace.comm.shared_memory.folder import JobFolder

    enter(namespace)
    with JobFolder.create() as folder:
        channel, server = (
            SharedChannel.create(folder.path, SPEC),
            ChannelServer(host=ADDRESSES[0], keys=keys),
        )
        server.add("test", channel)
        pipe.send(server.start())
        answer(channel, pipe)
        server.close()


def use(namespace: str, endpoint: str, keys: Any, owner: str, pipe: Pipe) -> None:
    from rlplace.comm.network import Connection, RemoteChannel

    enter(namespace)
    end = RemoteChannel(Connection(endpoint, keys), SPEC).named(owner)
    answer(end, pipe)
    end.connection.close()


def answer(channel: Any, pipe: Pipe) -> None:
    """Perform the calls that come, until None."""
    while (call := pipe.recv()) is not None:
        method, arguments, keywords = call
        try:
            outcome = getattr(channel, method)(*arguments, **keywords)
        except (ChannelBroken, TimeoutError) as error:
            outcome = error
        pipe.send(outcome)


class Peer:
    """The end of a pipe to a process in a namespace."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=target, args=(*arguments, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE_S), "the process sent nothing"
        return self.pipe.recv()

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """What it returned or raised."""
        self.pipe.send((method, arguments, keywords))
        return self.hear()

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(None)
        self.process.join(PATIENCE_S)
        self.process.kill()
        self.process.join()


@pytest.fixture
def peers(cable: Cable) -> Iterator[tuple[Peer, Peer, Peer, str]]:
    """The server's process, a producer and a consumer in the other namespace, and the server's endpoint."""
    from rlplace.comm.network import JobKeys

    keys = JobKeys.create()
    server = Peer(serve, cable.namespaces[0], keys)
    started = [server]
    try:
        endpoint = server.hear()
        for owner in ("env rank 0", "rollout rank 0"):
            started.append(Peer(use, cable.namespaces[1], endpoint, keys, owner))
            started[-1].call("stats")
        yield started[0], started[1], started[2], endpoint
    finally:
        for peer in reversed(started):
            peer.end()


# ── tests ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_short_interruption_loses_nothing_and_a_long_one_ends_both_sides(
    peers: tuple[Peer, Peer, Peer, str], cable: Cable
) -> None:
    server, producer, consumer, endpoint = peers
    large = np.arange(4 << 20)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(consumer.call, "get")
        putting = threads.submit(producer.call, "put", large)
        for _ in range(3):
            cable.cut()
            cable.join()
        assert putting.result(PATIENCE_S) is None
        np.testing.assert_array_equal(waiting.result(PATIENCE_S), large)
        stats = server.call("stats")
        assert (stats.puts, stats.gets, stats.depth_items, stats.dead) == (1, 1, 0, ())
        waiting = threads.submit(consumer.call, "get")
        while not server.call("stats").waiting_consumers:
            pass
        cable.cut()
        error = waiting.result(PATIENCE_S)
    assert isinstance(error, ChannelBroken), error
    assert f"the channel server {endpoint} is gone" in str(error)
    while server.call("stats").waits:
        pass
    assert "rollout rank 0" in server.call("stats").dead
    server.call("put", "for another")
    assert server.call("get") == "for another"
