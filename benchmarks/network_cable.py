"""The table of `benchmarks/network.py --cable`: round trips beside twice the delay, bulk beside the bandwidth.

The consumer and its channel server are in one network namespace, the producer in another, with the cable between them.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.network import (
    MIB,
    SIZES,
    SMALL,
    WARM_UP,
    Site,
    bare,
    figure,
    ours,
    process,
    served,
    show,
)
from rlplace.comm.network import Connection, JobKeys, JobPassword, RemoteChannel
from tests.e2e.cables import ADDRESSES, laid
from tests.e2e.delayed_cable import enter

TRIPS = 50


def over_cable(mbit_per_s: int, delay_ms: float, rounds: int) -> None:
    """Blocks for the whole table. This thread stays in the consumer's namespace afterwards."""
    with laid(mbit_per_s, delay_ms) as cable:
        enter(cable.namespaces[0])
        site = Site(address=ADDRESSES[0], far=cable.namespaces[1])
        password = JobPassword.create()
        keys = JobKeys.create()
        limit = f"{mbit_per_s * 1e6 / 8 / MIB:8,.0f} MiB/s"
        print(f"{mbit_per_s} Mbit/s and {delay_ms:g} ms each way, by {cable.made_by}")
        show("", ["the cable", "bare socket", "ours, password", "ours, encrypted"])
        for _ in range(rounds):
            trips = (bare_trips(site), our_trips(site, password), our_trips(site, keys))
            medians = [statistics.median(times[WARM_UP:]) * 1e3 for times in trips]
            show("round trip", [f"{ms:8,.2f} ms" for ms in (2 * delay_ms, *medians)])
        for size_bytes in SIZES[1:]:
            for _ in range(rounds):
                bulk = (
                    measure(size_bytes)
                    for measure in (bare(site), ours(site, password), ours(site, keys))
                )
                show(
                    f"{size_bytes // MIB} MiB",
                    [limit, *(figure(size_bytes, times) for times in bulk)],
                )


def ping(site: Site, port: int, count: int, pipe: Any) -> None:
    site.go_far()
    with socket.create_connection((site.address, port)) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pipe.send(
            [seconds(lambda: (one.send(b"x"), one.recv(1))) for _ in range(count)]
        )


def bare_trips(site: Site) -> list[float]:
    count = WARM_UP + TRIPS
    with (
        socket.create_server((site.address, 0)) as server,
        process(ping, site, server.getsockname()[1], count) as pipe,
        server.accept()[0] as one,
    ):
        for _ in range(count):
            one.send(one.recv(1))
        times: list[float] = pipe.recv()
    return times


def put_trips(
    site: Site, endpoint: str, keys: Any, spec: Any, count: int, pipe: Any
) -> None:
    site.go_far()
    end = RemoteChannel(Connection(endpoint, keys), spec)
    pipe.send([seconds(lambda: end.put(SMALL)) for _ in range(count)])
    end.connection.close()


def our_trips(site: Site, keys: Any) -> list[float]:
    count = WARM_UP + TRIPS
    with (
        served(site, keys) as (channel, endpoint),
        process(put_trips, site, endpoint, keys, channel.spec, count) as pipe,
    ):
        for _ in range(count):
            channel.get()
        times: list[float] = pipe.recv()
    return times


def seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began
