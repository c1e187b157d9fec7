"""Which clients are let in, where a server listens, and that strangers disturb no other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
import zmq

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.network import (
    ChannelServer,
    Connection,
    JobKeys,
    JobPassword,
    RemoteChannel,
    wire,
)
from rlplace.comm.network.server import Session
from rlplace.comm.network.wire import Request
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.errors import ChannelBroken, ClusterError

PATIENCE_S = 60.0
SPEC = ChannelSpec(name="test", capacity_items=4, timeout_s=PATIENCE_S)
Open = Callable[..., RemoteChannel]


@pytest.fixture(params=[JobKeys, JobPassword], ids=["curve", "plain"])
def keys(request: pytest.FixtureRequest) -> JobKeys | JobPassword:
    return request.param.create()


@pytest.fixture
def server(keys: JobKeys | JobPassword, tmp_path: Path) -> Iterator[ChannelServer]:
    one = ChannelServer(host="lo", keys=keys)  # an interface by its name
    one.add("test", SharedChannel.create(tmp_path, SPEC))
    assert one.start().startswith("tcp://127.0.0.1:")
    yield one
    one.close()


@pytest.fixture
def reach() -> Iterator[Open]:
    """Ends with connections of their own, closed with the test."""
    made: list[Connection] = []

    def end(
        server: ChannelServer,
        keys: JobKeys | JobPassword,
        patience_s: float = PATIENCE_S,
    ) -> RemoteChannel:
        made.append(Connection(server.endpoint, keys, patience_s=patience_s))
        return RemoteChannel(made[-1], SPEC).named("env rank 0")

    yield end
    for connection in made:
        connection.close()


def refused(server: ChannelServer, log: pytest.LogCaptureFixture) -> None:
    """Wait until the log tells of a refused connection; once, however many there were."""
    deadline = time.monotonic() + PATIENCE_S
    while not (
        told := [
            r.args for r in log.records if "refused a connection" in r.getMessage()
        ]
    ):
        assert time.monotonic() < deadline, "none was sent away"
    assert told == [(server.endpoint,)]


def test_only_this_jobs_keys_open_the_server(
    server: ChannelServer,
    keys: JobKeys | JobPassword,
    reach: Open,
    caplog: pytest.LogCaptureFixture,
) -> None:
    inside = reach(server, keys)
    inside.put("x")
    outside = reach(server, type(keys).create(), 0.5)
    with pytest.raises(ChannelBroken) as caught:
        outside.get()
    assert server.endpoint in str(caught.value)
    refused(server, caplog)
    assert inside.get() == "x"
    assert inside.stats().consumers == ("env rank 0",)


def test_a_wrong_client_key_is_refused_at_once(reach: Open) -> None:
    keys, other = JobKeys.create(), JobKeys.create()
    server = ChannelServer(host="127.0.0.1", keys=keys)
    server.start()
    stolen = JobKeys(
        server_public=keys.server_public,
        server_secret=other.server_secret,
        client_public=other.client_public,
        client_secret=other.client_secret,
    )
    with pytest.raises(ChannelBroken, match="it belongs to another job"):
        reach(server, stolen).get()
    server.close()


def test_strangers_are_logged_once_and_disturb_no_client(
    server: ChannelServer,
    keys: JobKeys | JobPassword,
    reach: Open,
    caplog: pytest.LogCaptureFixture,
) -> None:
    end, address = (
        reach(server, keys),
        server.endpoint.removeprefix("tcp://").split(":"),
    )
    end.put("x")
    with caplog.at_level(logging.WARNING), zmq.Context() as context:
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b""):
            with socket.create_connection((address[0], int(address[1]))) as stranger:
                stranger.sendall(said)
        refused(server, caplog)
        for _ in range(2):
            with context.socket(
                zmq.DEALER
            ) as naked:  # a ZeroMQ peer without any security
                naked.linger = 0
                naked.connect(server.endpoint)
                # A peer that was refused before it sends has no connection to send on, and would wait for ever.
                with contextlib.suppress(zmq.Again):
                    asked = pickle.dumps((1, "stats", "test", "stranger", (), ()))
                    naked.send(asked, zmq.NOBLOCK)
                assert not naked.poll(200)
    assert end.get() == "x"
    refused(server, caplog)


def test_a_peer_without_security_is_logged(
    server: ChannelServer, caplog: pytest.LogCaptureFixture
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as naked:
        naked.linger = 0
        naked.connect(server.endpoint)
        refused(server, caplog)


def test_items_that_cannot_be_sent_are_not_lost(
    server: ChannelServer,
    keys: JobKeys | JobPassword,
    reach: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = reach(server, keys)
    end.put("x")
    with monkeypatch.context() as failing:
        failing.setattr(wire, "enclose", lambda *_: [][0])
        with pytest.raises(ChannelBroken, match="IndexError"):
            end.get()
    assert end.get() == "x"


def test_a_second_fill_is_told_as_what_it_is(
    server: ChannelServer, keys: JobKeys | JobPassword, tmp_path: Path
) -> None:
    fill = Request(1, "fill", "test", "env rank 0", (), (7, (b"",)))
    with pytest.raises(AssertionError, match="fills what it reserved, once"):
        asyncio.run(server._do(Session(b"client"), fill, ()))


def test_a_stranger_cannot_fill_the_servers_memory(
    server: ChannelServer, keys: JobKeys | JobPassword
) -> None:
    address = server.endpoint.removeprefix("tcp://").split(":")
    greeting = (
        b"\xff"
        + bytes(8)
        + b"\x7f\x03\x00"
        + keys.mechanism.ljust(20, b"\0")
        + bytes(32)
    )
    command_of_2_gib = b"\x06" + (2 << 30).to_bytes(8, "big")
    with socket.create_connection((address[0], int(address[1]))) as stranger:
        stranger.sendall(greeting + command_of_2_gib)
        with pytest.raises(ConnectionError):
            stranger.sendall(bytes(256 << 20))


def test_secrets_are_not_shown_and_travel_by_pickle(
    keys: JobKeys | JobPassword,
) -> None:
    assert pickle.loads(pickle.dumps(keys)) == keys
    secrets = (
        [keys.password]
        if isinstance(keys, JobPassword)
        else [keys.server_secret, keys.client_secret]
    )
    assert not any(repr(secret) in repr(keys) for secret in secrets)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("0.0.0.0", "every interface"),
        ("::", "every interface"),
        ("192.0.2.1", "no interface of this machine has it"),
    ],
)
def test_a_server_listens_on_one_address_of_this_machine(host: str, why: str) -> None:
    with pytest.raises(ClusterError, match=why) as caught:
        ChannelServer(host=host, keys=JobKeys.create()).start()
    assert caught.value.code == "server-address"


SERVER = """
import pickle, sys
from pathlib import Path
from rlplace.comm.network import ChannelServer
from rlplace.comm.shared_memory.channel import SharedChannel
keys, path = pickle.loads(bytes.fromhex(sys.argv[1]))
server = ChannelServer(host="127.0.0.1", keys=keys)
server.add("test", SharedChannel.attach(path))
print(server.start(), flush=True)
sys.stdin.read()
print("torch" in sys.modules)
server.close()
"""


def test_tensors_pass_a_server_that_has_no_torch(tmp_path: Path) -> None:
    import torch

    channel, keys = SharedChannel.create(tmp_path, SPEC), JobKeys.create()
    asked = pickle.dumps((keys, channel.path)).hex()
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, asked], stdin=PIPE, stdout=PIPE, text=True
    ) as server:
        assert server.stdout is not None
        end = RemoteChannel(Connection(server.stdout.readline().strip(), keys), SPEC)
        for size in (3, 1 << 20):  # in the envelope, in frames
            sent = torch.arange(size, dtype=torch.bfloat16)
            end.put(sent)
            assert torch.equal(channel.get(), sent)
            channel.put(sent)
            assert torch.equal(end.get(), sent)
        end.connection.close()
        assert server.communicate()[0] == "False\n"
    channel.detach()
