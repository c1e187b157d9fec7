"""Two network namespaces joined by a cable of known bandwidth and delay: the network way between real machines' stacks.

Skipped where the machine refuses what `cables` needs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
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
        channel, server = SharedChannel.create(folder.path, SPEC), ChannelServer(host=ADDRESSES[0], keys=keys)
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
        began = time.perf_counter()
        try:
            outcome = getattr(channel, method)(*arguments, **keywords)
        except (ChannelBroken, TimeoutError) as error:
            outcome = error
        pipe.send((outcome, time.perf_counter() - began))


class Peer:
    """The end of a pipe to a process in a namespace."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE_S), "the process sent nothing"
        return self.pipe.recv()

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        return self.timed(method, *arguments, **keywords)[0]

    def timed(self, method: str, *arguments: Any, **keywords: Any) -> tuple[Any, float]:
        """What it returned or raised, and the seconds it took there."""
        self.pipe.send((method, arguments, keywords))
        return self.hear()

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(None)
        self.process.join(PATIENCE_S)
        self.process.kill()
        self.process.join()


@pytest.fixture(params=["curve", "plain"])
def peers(request: pytest.FixtureRequest, cable: Cable) -> Iterator[tuple[Peer, Peer, Peer, str]]:
    """The server's process, a producer and a consumer in the other namespace, and the server's endpoint."""
    from rlplace.comm.network import JobKeys, JobPassword

    keys = JobKeys.create() if request.param == "curve" else JobPassword.create()
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


def test_items_cross_the_cable_whole(peers: tuple[Peer, Peer, Peer, str], cable: Cable) -> None:
    _, producer, consumer, _ = peers
    small, trips = {"step": 1, "note": "x" * 200}, []
    for _ in range(50):
        trips.append(producer.timed("put", small)[1])
        assert consumer.call("get") == small
    large = np.random.default_rng(0).integers(0, 255, 32 << 20, np.uint8)
    _, seconds = producer.timed("put", large)
    np.testing.assert_array_equal(consumer.call("get"), large)
    print(
        f"\ncable: {MBIT_PER_S} Mbit/s, {cable.delay_ms} ms each way by {cable.made_by}; small put "
        f"{sorted(trips)[len(trips) // 2] * 1e3:.2f} ms, 32 MiB at {32 * 8.389 / seconds:.0f} Mbit/s"
    )


@pytest.mark.parametrize("peers", ["curve"], indirect=True)
def test_a_short_interruption_loses_and_doubles_nothing(peers: tuple[Peer, Peer, Peer, str], cable: Cable) -> None:
    server, producer, consumer, _ = peers
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


@pytest.mark.parametrize("peers", ["curve"], indirect=True)
def test_both_sides_of_a_cut_cable_give_up_within_seconds(peers: tuple[Peer, Peer, Peer, str], cable: Cable) -> None:
    server, _, consumer, endpoint = peers
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(consumer.timed, "get")
        while not server.call("stats").waiting_consumers:
            pass
        cable.cut()
        error, seconds = waiting.result(PATIENCE_S)
    assert isinstance(error, ChannelBroken), error
    assert f"the channel server {endpoint} is gone" in str(error)
    while server.call("stats").waits:
        pass
    assert "rollout rank 0" in server.call("stats").dead
    server.call("put", "for another")
    assert server.call("get") == "for another"
    print(f"\ncut off: the end gave up after {seconds:.1f} s")
