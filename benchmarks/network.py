"""How fast items travel to another node: the network way beside a bare socket, Ray's object transfer and Ray's RDT.

    python benchmarks/network.py                 all of it over the loopback interface; medians
    python benchmarks/network.py --without-ray   the network way and the socket only
    python benchmarks/network.py --cable 1000 20 these over a cable of 1000 Mbit/s and 20 ms each way (needs root)

A time is from the moment the producer has the item to the moment the consumer has it, on one clock. The two Ray nodes
are two node processes of this machine; what they and the server exchange passes through TCP as between machines. Over a
cable, a round trip is what a put of a small dict takes, and stands beside twice the delay.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

MIB = 1 << 20
SIZES = (0, MIB, 16 * MIB, 64 * MIB)  # bytes; 0: a small dict
SMALL = {"env_rank": 3, "step": 1_234, "rewards": [0.5] * 8, "note": "x" * 150}
WARM_UP = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where the consumer is reached, and the network namespace of the producer if it is another one."""

    address: str = "127.0.0.1"
    far: str | None = None

    def go_far(self) -> None:
        """For the producer's process, before it connects."""
        if self.far is not None:
            from tests.e2e.delayed_cable import enter

            enter(self.far)


def item_of(size_bytes: int) -> Any:
    if size_bytes:
        return np.ones(size_bytes, np.uint8)
    return SMALL


def repetitions(size_bytes: int) -> int:
    if size_bytes:
        return 11
    return 200


# ── a bare socket ────────────────────────────────────────────────────────────────────────────────────────────────────


def send_bare(site: Site, port: int, size_bytes: int, count: int, pipe: Any) -> None:
    data = np.ones(size_bytes or 300, np.uint8).data
    site.go_far()
    with socket.create_connection((site.address, port)) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            pipe.recv()
            pipe.send(time.monotonic())
            one.sendall(data)


def bare(site: Site) -> Callable[[int], list[float]]:
    def measure(size_bytes: int) -> list[float]:
        with socket.create_server((site.address, 0)) as server:
            port = server.getsockname()[1]
            into = bytearray(size_bytes or 300)
            count = WARM_UP + repetitions(size_bytes)
            with (
                process(send_bare, site, port, size_bytes, count) as pipe,
                server.accept()[0] as one,
            ):
                return [
                    timed(pipe, lambda: receive_into(one, into)) for _ in range(count)
                ]

    return measure


def receive_into(one: socket.socket, into: bytearray) -> None:
    left = memoryview(into)
    while left.nbytes:
        left = left[one.recv_into(left) :]


def send_encrypted(
    site: Site, endpoint: str, keys: Any, size_bytes: int, count: int, pipe: Any
) -> None:
    import zmq

    data = np.ones(size_bytes or 300, np.uint8).data
    frames = [
        data[at : at + keys.frame_bytes]
        for at in range(0, data.nbytes, keys.frame_bytes)
    ]
    site.go_far()
    with zmq.Context() as context, context.socket(zmq.PUSH) as one:
        keys.show(one)
        one.connect(endpoint)
        for _ in range(count):
            pipe.recv()
            pipe.send(time.monotonic())
            one.send_multipart(frames, copy=False)


def encrypted(site: Site, keys: Any) -> Callable[[int], list[float]]:
    """ZeroMQ's CURVE alone, into the frames it receives."""
    import zmq

    def measure(size_bytes: int) -> list[float]:
        count = WARM_UP + repetitions(size_bytes)
        with zmq.Context() as context, context.socket(zmq.PULL) as server:
            keys.guard(server)
            server.bind(f"tcp://{site.address}:*")
            endpoint = server.getsockopt_string(zmq.LAST_ENDPOINT)
            with process(
                send_encrypted, site, endpoint, keys, size_bytes, count
            ) as pipe:
                return [
                    timed(pipe, lambda: server.recv_multipart(copy=False))
                    for _ in range(count)
                ]

    return measure


# ── the network way ──────────────────────────────────────────────────────────────────────────────────────────────────


def put_remote(
    site: Site,
    endpoint: str,
    keys: Any,
    spec: Any,
    size_bytes: int,
    count: int,
    pipe: Any,
) -> None:
    from rlplace.comm.network import Connection, RemoteChannel

    site.go_far()
    end = RemoteChannel(Connection(endpoint, keys), spec)
    item = item_of(size_bytes)
    for _ in range(count):
        pipe.recv()
        pipe.send(time.monotonic())
        end.put(item)
    end.connection.close()


def serve(site: Site, path: Any, keys: Any, pipe: Any) -> None:
    from rlplace.comm.network import ChannelServer
    from rlplace.comm.shared_memory.channel import SharedChannel

    server = ChannelServer(host=site.address, keys=keys)
    channel = SharedChannel.attach(path)
    server.add(channel.spec.name, channel)
    pipe.send(server.start())
    pipe.recv()
    server.close()


@contextlib.contextmanager
def served(site: Site, keys: Any) -> Iterator[tuple[Any, str]]:
    """A channel of this node, and the endpoint of the server that opens it to others."""
    from rlplace.comm.channel import ChannelSpec
    from rlplace.comm.shared_memory.channel import SharedChannel
    from rlplace.comm.shared_memory.folder import JobFolder

    with JobFolder.create() as folder:
        channel = SharedChannel.create(
            folder.path, ChannelSpec(name="bench", capacity_items=4)
        )
        with process(serve, site, channel.path, keys) as server:
            yield channel, server.recv()
            server.send("end")
        channel.destroy()


def ours(site: Site, keys: Any) -> Callable[[int], list[float]]:
    """From a process of another node, through the channel server, to a process of its node."""

    def measure(size_bytes: int) -> list[float]:
        count = WARM_UP + repetitions(size_bytes)
        with (
            served(site, keys) as (channel, endpoint),
            process(
                put_remote, site, endpoint, keys, channel.spec, size_bytes, count
            ) as pipe,
        ):
            return [timed(pipe, channel.get) for _ in range(count)]

    return measure


# ── Ray ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def ray_ways() -> Iterator[dict[str, Callable[[int], list[float]]]]:
    """Ray's object transfer between two nodes, and its direct transport over gloo."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray
    from ray.cluster_utils import Cluster
    from ray.experimental.collective import create_collective_group

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "resources": {"first": 1},
            "object_store_memory": 400 * MIB,
        },
    )
    cluster.add_node(num_cpus=1, resources={"second": 1}, object_store_memory=400 * MIB)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    class Peer:
        def make(self, size_bytes: int) -> Any:
            item = item_of(size_bytes)
            return time.monotonic(), item

        @ray.method(tensor_transport="gloo")
        def make_direct(self, size_bytes: int) -> Any:
            import torch

            item = torch.ones(size_bytes or 300, dtype=torch.uint8)
            return {"at": time.monotonic(), "item": item}

        def take(self, made: Any) -> float:
            now = time.monotonic()
            return now - (made["at"] if isinstance(made, dict) else made[0])

    remote: Any = ray.remote  # its stubs do not know the transport of tensors
    actor = remote(num_cpus=0, enable_tensor_transport=True)(Peer)
    producer = actor.options(resources={"first": 1}).remote()
    consumer = actor.options(resources={"second": 1}).remote()
    ray.get([peer.take.remote((0.0, None)) for peer in (producer, consumer)])
    create_collective_group([producer, consumer], backend="gloo")

    def through(make: Any) -> Callable[[int], list[float]]:
        def measure(size_bytes: int) -> list[float]:
            count = WARM_UP + min(50, repetitions(size_bytes))
            return [
                ray.get(consumer.take.remote(make.remote(size_bytes)))
                for _ in range(count)
            ]

        return measure

    try:
        yield {
            "Ray objects": through(producer.make),
            "Ray RDT, gloo": through(producer.make_direct),
        }
    finally:
        ray.shutdown()
        cluster.shutdown()


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    one = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    one.start()
    theirs.close()
    try:
        yield pipe
        one.join(30)
    finally:
        one.kill()
        one.join()


def timed(pipe: Any, receive: Callable[[], Any]) -> float:
    """Seconds from when the other process has the item to when `receive` returned it."""
    pipe.send("go")
    receive()
    until = time.monotonic()
    began: float = pipe.recv()
    return until - began


def figure(size_bytes: int, times: list[float]) -> str:
    median = statistics.median(times[WARM_UP:])
    if size_bytes:
        return f"{size_bytes / MIB / median:8,.0f} MiB/s"
    return f"{median * 1e6:11,.0f} µs"


def show(name: str, cells: Sequence[str]) -> None:
    print(f"{name:12}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--without-ray", action="store_true")
    parser.add_argument(
        "--cable", nargs=2, type=int, metavar=("MBIT_PER_S", "DELAY_MS")
    )
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if options.cable is not None:
        from benchmarks.network_cable import over_cable

        mbit_per_s, delay_ms = options.cable
        over_cable(mbit_per_s, delay_ms, options.rounds)
    else:
        over_loopback(options.rounds, with_ray=not options.without_ray)


def over_loopback(rounds: int, *, with_ray: bool) -> None:
    from rlplace.comm.network import JobKeys, JobPassword

    here = Site()
    keys = JobKeys.create()
    ways: dict[str, Callable[[int], list[float]]] = {
        "bare socket": bare(here),
        "bare, encrypted": encrypted(here, keys),
        "ours, password": ours(here, JobPassword.create()),
        "ours, encrypted": ours(here, keys),
    }
    with contextlib.ExitStack() as stack:
        if with_ray:
            ways |= stack.enter_context(ray_ways())
        show("", list(ways))
        for size_bytes in SIZES:
            name = f"{size_bytes // MIB} MiB" if size_bytes else "small dict"
            for _ in range(rounds):
                show(
                    name,
                    [
                        figure(size_bytes, measure(size_bytes))
                        for measure in ways.values()
                    ],
                )


if __name__ == "__main__":
    main()
