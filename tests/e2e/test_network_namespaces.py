"""Two network namespaces joined by a cable of known bandwidth and delay: the network way between real machines' stacks.

Needs the right to make namespaces (root, or a container that allows it) and iproute2; skipped where these are refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.errors import ChannelBroken

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
SPEC = ChannelSpec(name="test", capacity_items=4, timeout_s=PATIENCE_S)
CLONE_NEWNET = 0x40000000
MBIT_PER_S = 400
DELAY_MS = 2  # where the kernel has netem
ADDRESSES = ("10.203.7.1", "10.203.7.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Cable:
    """Two namespaces and what joins them."""

    def __init__(self) -> None:
        name = f"rlp{secrets.token_hex(3)}"
        self.namespaces = (f"{name}a", f"{name}b")
        self.ends = (f"{name}x", f"{name}y")
        self.delays = False

    def make(self) -> None:
        for namespace in self.namespaces:
            ip("netns", "add", namespace)
        first, second = zip(self.ends, self.namespaces, strict=True)
        ip("link", "add", first[0], "netns", first[1], "type", "veth", "peer", "name", second[0], "netns", second[1])
        for end, namespace, address in zip(self.ends, self.namespaces, ADDRESSES, strict=True):
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", namespace, "link", "set", "lo", "up")
            self._shape(namespace, end)
        self.join()

    def _shape(self, namespace: str, end: str) -> None:
        """Bandwidth, and delay where the kernel knows how."""
        rate = f"{MBIT_PER_S}mbit"
        delayed = ["netem", "delay", f"{DELAY_MS}ms", "rate", rate]
        limited = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        for qdisc in (delayed, limited):
            command = ["tc", "-n", namespace, "qdisc", "add", "dev", end, "root", *qdisc]
            if subprocess.run(command, check=False, capture_output=True).returncode == 0:
                self.delays = qdisc is delayed
                return
        pytest.skip("the kernel has neither netem nor tbf")

    def join(self) -> None:
        for end, namespace in zip(self.ends, self.namespaces, strict=True):
            ip("-n", namespace, "link", "set", end, "up")

    def cut(self) -> None:
        ip("-n", self.namespaces[0], "link", "set", self.ends[0], "down")

    def remove(self) -> None:
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("iproute2 is not installed")
    one = Cable()
    try:
        try:
            one.make()
        except subprocess.CalledProcessError as refusal:
            pytest.skip(f"no network namespaces here: {refusal.stderr.strip()}")
        yield one
    finally:
        one.remove()


# ── processes inside the namespaces ──────────────────────────────────────────────────────────────────────────────────


def enter(namespace: str) -> None:
    descriptor = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(descriptor)


def serve(namespace: str, keys: Any, pipe: Pipe) -> None:
    from rlplace.comm.local import LocalChannel
    from rlplace.comm.network import Gate

    enter(namespace)
    channel, gate = LocalChannel(SPEC), Gate(host=ADDRESSES[0], keys=keys)
    gate.add("test", channel)
    pipe.send(gate.start())
    answer(channel, pipe)
    gate.close()


def use(namespace: str, endpoint: str, keys: Any, owner: str, pipe: Pipe) -> None:
    from rlplace.comm.network import RemoteChannel

    enter(namespace)
    end = RemoteChannel.connect(endpoint, keys, SPEC, "test").named(owner)
    answer(end, pipe)
    end.disconnect()


def answer(channel: Any, pipe: Pipe) -> None:
    """Calls what it is told, until None."""
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
        assert self.pipe.poll(PATIENCE_S), "the process said nothing"
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
    """The gate's process, a producer and a consumer in the other namespace, and the gate's endpoint."""
    from rlplace.comm.network import JobKeys, JobPassword

    keys = JobKeys.create() if request.param == "curve" else JobPassword.create()
    gate = Peer(serve, cable.namespaces[0], keys)
    started = [gate]
    try:
        endpoint = gate.hear()
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
        f"\ncable: {MBIT_PER_S} Mbit/s, {DELAY_MS if cable.delays else 0} ms each way; small put "
        f"{sorted(trips)[len(trips) // 2] * 1e3:.2f} ms, 32 MiB at {32 * 8.389 / seconds:.0f} Mbit/s"
    )


@pytest.mark.parametrize("peers", ["curve"], indirect=True)
def test_a_short_interruption_loses_and_doubles_nothing(peers: tuple[Peer, Peer, Peer, str], cable: Cable) -> None:
    gate, producer, consumer, _ = peers
    large = np.arange(4 << 20)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(consumer.call, "get")
        putting = threads.submit(producer.call, "put", large)
        for _ in range(3):
            cable.cut()
            cable.join()
        assert putting.result(PATIENCE_S) is None
        np.testing.assert_array_equal(waiting.result(PATIENCE_S), large)
    stats = gate.call("stats")
    assert (stats.puts, stats.gets, stats.depth_items, stats.dead) == (1, 1, 0, ())


@pytest.mark.parametrize("peers", ["curve"], indirect=True)
def test_both_sides_of_a_cut_cable_give_up_within_seconds(peers: tuple[Peer, Peer, Peer, str], cable: Cable) -> None:
    gate, _, consumer, endpoint = peers
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(consumer.timed, "get")
        while not gate.call("stats").waiting_consumers:
            pass
        cable.cut()
        error, seconds = waiting.result(PATIENCE_S)
    assert isinstance(error, ChannelBroken), error
    assert f"the gate {endpoint} is gone" in str(error)
    while gate.call("stats").waits:
        pass
    assert "rollout rank 0" in gate.call("stats").dead
    gate.call("put", "for another")
    assert gate.call("get") == "for another"
    print(f"\ncut off: the end gave up after {seconds:.1f} s")
