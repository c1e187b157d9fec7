"""A stream: items in order, also over a cable that breaks, and what each end says when the other is gone."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rlplace.comm.network import (
    JobKeys,
    JobPassword,
    Keys,
    StreamAddress,
    StreamSource,
    StreamTaker,
    stream,
)
from rlplace.errors import ChannelBroken, Problem
from tests.channel_peer import PATIENCE_S
from tests.network_cable import Cable

ITEMS = 5
Connect = Callable[..., StreamTaker]


def made(number: int) -> Any:
    return {"number": number, "data": np.full(3 << 20, number, np.uint8)}


def nothing() -> None:
    pass


@pytest.fixture(params=[JobKeys, JobPassword], ids=["encrypted", "password"])
def keys(request: pytest.FixtureRequest) -> Keys:
    found: Keys = request.param.create()
    return found


@pytest.fixture
def source(keys: Keys) -> Iterator[StreamSource]:
    with StreamSource(near="tcp://127.0.0.1:1", keys=keys) as one:
        assert one.address.endpoint.startswith("tcp://127.0.0.1:")
        assert "secret" not in repr(one.address), "keys are not shown"
        yield one


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Takers that are closed with the test."""
    with contextlib.ExitStack() as closing:

        def to(address: StreamAddress, **other: Any) -> StreamTaker:
            taker = dataclasses.replace(address, **other).connect()
            closing.callback(taker.close)
            return taker

        yield to


@pytest.fixture
def serving() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


def serve(
    serving: ThreadPoolExecutor, source: StreamSource, **rules: Any
) -> Future[str | None]:
    return serving.submit(
        source.serve,
        made,
        2 * ITEMS,
        **{"timeout_s": PATIENCE_S, "check": nothing, **rules},
    )


def take(taker: StreamTaker) -> Any:
    """The next item; an array of it is the taker's own."""
    deadline = time.monotonic() + PATIENCE_S
    while (item := taker.receive()) is None:
        assert time.monotonic() < deadline
        StreamTaker.wait([taker], 0.02)
    item["data"] += 1
    return item["number"], int(item["data"][-1])


def test_items_come_in_order_until_the_taker_has_enough(
    source: StreamSource, serving: ThreadPoolExecutor, connect: Connect
) -> None:
    served, taker = serve(serving, source), connect(source.address)
    taker.ask()
    for number in range(ITEMS):
        taker.ask()
        assert taker.due == 2
        assert take(taker) == (number, number + 1)
    taker.close()
    taker.close()
    assert served.result(PATIENCE_S) is None


def test_what_was_lost_with_a_cut_cable_is_made_again(
    source: StreamSource, serving: ThreadPoolExecutor, connect: Connect
) -> None:
    cable = Cable(source.address.endpoint)
    served = serve(serving, source)
    taker = connect(source.address, endpoint=cable.endpoint)
    for number in range(ITEMS):
        taker.ask()
        taker.ask()
        cable.wait_passed(cable.passed_bytes)
        cable.cut()
        assert [take(taker), take(taker)] == [
            (2 * number + i, 2 * number + i + 1) for i in (0, 1)
        ]
    taker.close()
    assert served.result(PATIENCE_S) is None
    cable.close()


def test_a_source_says_that_its_taker_is_gone_and_a_taker_that_its_source_is(
    source: StreamSource,
    serving: ThreadPoolExecutor,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "LOST_S", 0.2)
    cable = Cable(source.address.endpoint)
    served = serve(serving, source)
    taker = connect(source.address, endpoint=cable.endpoint)
    taker.ask()
    take(taker)
    taker.ask()
    cable.close()
    assert served.result(PATIENCE_S) == "it is gone: no connection for 0 s"
    with pytest.raises(
        ConnectionError, match=f"no connection to {taker.endpoint} for 0 s"
    ):
        [take(taker) for _ in range(2)]  # one may have arrived before


def test_a_source_waits_no_longer_than_it_may(
    source: StreamSource, serving: ThreadPoolExecutor
) -> None:
    assert (
        serve(serving, source, timeout_s=0.01).result(PATIENCE_S)
        == "it asked for nothing for 0.0 s"
    )

    def cancelled() -> None:
        what = "push_weights was cancelled"
        raise ChannelBroken(Problem(code="cancelled", key="actor rank 0", what=what))

    began = time.monotonic()
    with pytest.raises(ChannelBroken):
        serve(serving, source, check=cancelled).result(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2


def test_only_its_own_keys_open_a_source(
    source: StreamSource, serving: ThreadPoolExecutor, connect: Connect, keys: Keys
) -> None:
    stranger = connect(source.address, keys=keys.create())
    stranger.ask()
    served, taker = serve(serving, source), connect(source.address)
    taker.ask()
    assert take(taker) == (0, 1)
    assert stranger.receive() is None
    stranger.close()
    taker.close()
    assert served.result(PATIENCE_S) is None
