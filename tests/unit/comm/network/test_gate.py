"""Who may come in, where a gate listens, and that strangers disturb nobody."""

from __future__ import annotations

import logging
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
import zmq

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.local import LocalChannel
from rlplace.comm.network import Connection, Gate, JobKeys, JobPassword, RemoteChannel
from rlplace.comm.shared.channel import SharedChannel
from rlplace.errors import ChannelBroken, ClusterError

PATIENCE_S = 60.0
SPEC = ChannelSpec(name="test", capacity_items=4, timeout_s=PATIENCE_S)
Open = Callable[..., RemoteChannel]


@pytest.fixture(params=[JobKeys, JobPassword], ids=["curve", "plain"])
def keys(request: pytest.FixtureRequest) -> JobKeys | JobPassword:
    return request.param.create()


@pytest.fixture
def gate(keys: JobKeys | JobPassword) -> Iterator[Gate]:
    one = Gate(host="127.0.0.1", keys=keys)
    one.add("test", LocalChannel(SPEC))
    one.start()
    yield one
    one.close()


@pytest.fixture
def reach() -> Iterator[Open]:
    """Ends with connections of their own, closed with the test."""
    made: list[Connection] = []

    def end(gate: Gate, keys: JobKeys | JobPassword, patience_s: float = PATIENCE_S) -> RemoteChannel:
        made.append(Connection(gate.endpoint, keys, patience_s=patience_s))
        return RemoteChannel.over(made[-1], keys, SPEC, "test").named("env rank 0")

    yield end
    for connection in made:
        connection.close()


def refused(gate: Gate, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while gate.refused < count:
        assert time.monotonic() < deadline, f"only {gate.refused} were sent away"


def test_only_this_jobs_keys_open_the_gate(gate: Gate, keys: JobKeys | JobPassword, reach: Open) -> None:
    inside = reach(gate, keys)
    inside.put("x")
    outside = reach(gate, type(keys).create(), 0.5)
    with pytest.raises(ChannelBroken) as caught:
        outside.get()
    assert gate.endpoint in str(caught.value)
    refused(gate, 1)
    assert inside.get() == "x"
    assert inside.stats().consumers == ("env rank 0",)


def test_a_wrong_client_key_is_told_so_at_once(reach: Open) -> None:
    keys, other = JobKeys.create(), JobKeys.create()
    gate = Gate(host="127.0.0.1", keys=keys)
    gate.start()
    stolen = JobKeys(
        server_public=keys.server_public,
        server_secret=other.server_secret,
        client_public=other.client_public,
        client_secret=other.client_secret,
    )
    with pytest.raises(ChannelBroken, match="it belongs to another job"):
        reach(gate, stolen).get()
    gate.close()


def test_strangers_are_logged_once_and_disturb_nobody(
    gate: Gate, keys: JobKeys | JobPassword, reach: Open, caplog: pytest.LogCaptureFixture
) -> None:
    end, address = reach(gate, keys), gate.endpoint.removeprefix("tcp://").split(":")
    end.put("x")
    with caplog.at_level(logging.WARNING), zmq.Context() as context:
        for count in (1, 2, 3):
            with socket.create_connection((address[0], int(address[1]))) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            refused(gate, count)
        for count in (4, 5):
            with context.socket(zmq.DEALER) as naked:  # a ZeroMQ peer without any security
                naked.linger = 0
                naked.connect(gate.endpoint)
                naked.send(pickle.dumps((1, "stats", "test", "nobody", (), ())))
                refused(gate, count)
                assert not naked.poll(0)
    assert end.get() == "x"
    assert [r.getMessage() for r in caplog.records if "sent away" in r.getMessage()] == [
        f"gate {gate.endpoint} sent away a connection that did not show this job's keys; later ones are only counted"
    ]


def test_secrets_are_not_shown_and_travel_by_pickle(keys: JobKeys | JobPassword) -> None:
    assert pickle.loads(pickle.dumps(keys)) == keys
    secrets = [keys.password] if isinstance(keys, JobPassword) else [keys.server_secret, keys.client_secret]
    assert not any(repr(secret) in repr(keys) for secret in secrets)


@pytest.mark.parametrize(
    ("host", "why"),
    [("0.0.0.0", "every interface"), ("::", "every interface"), ("192.0.2.1", "no interface of this machine has it")],
)
def test_a_gate_listens_on_one_address_of_this_machine(host: str, why: str) -> None:
    with pytest.raises(ClusterError, match=why) as caught:
        Gate(host=host, keys=JobKeys.create()).start()
    assert caught.value.code == "gate-address"


def test_a_gate_listens_on_an_interface_by_its_name(reach: Open) -> None:
    keys = JobKeys.create()
    gate = Gate(host="lo", keys=keys)
    gate.add("test", LocalChannel(SPEC))
    assert gate.start().startswith("tcp://127.0.0.1:")
    end = reach(gate, keys)
    end.put("x")
    assert end.get() == "x"
    gate.close()


def test_two_jobs_on_one_machine_do_not_meet(reach: Open) -> None:
    jobs = []
    for _ in range(2):
        keys = JobKeys.create()
        gate = Gate(host="127.0.0.1", keys=keys)
        gate.add("test", LocalChannel(SPEC))
        gate.start()
        jobs.append((gate, reach(gate, keys)))
    for number, (_, end) in enumerate(jobs):
        end.put(number)
    assert [end.get() for _, end in jobs] == [0, 1]
    for gate, _ in jobs:
        gate.close()
        gate.close()


GATE = """
import pickle, sys
from pathlib import Path
from rlplace.comm.network import Gate
from rlplace.comm.shared.channel import SharedChannel
keys, path = pickle.loads(bytes.fromhex(sys.argv[1]))
gate = Gate(host="127.0.0.1", keys=keys)
gate.add("test", SharedChannel.attach(path))
print(gate.start(), flush=True)
sys.stdin.read()
print("torch" in sys.modules)
gate.close()
"""


def test_tensors_pass_a_gate_that_has_no_torch(tmp_path: Path) -> None:
    import torch

    channel, keys = SharedChannel.create(tmp_path, SPEC), JobKeys.create()
    asked = pickle.dumps((keys, channel.path)).hex()
    with subprocess.Popen([sys.executable, "-c", GATE, asked], stdin=PIPE, stdout=PIPE, text=True) as gate:
        assert gate.stdout is not None
        end = RemoteChannel.connect(gate.stdout.readline().strip(), keys, SPEC, "test")
        for size in (3, 1 << 20):  # in the envelope, in frames
            sent = torch.arange(size, dtype=torch.bfloat16)
            end.put(sent)
            assert torch.equal(channel.get(), sent)
            channel.put(sent)
            assert torch.equal(end.get(), sent)
        end.disconnect()
        assert gate.communicate()[0] == "False\n"
    channel.detach()


class Unknown:
    """Of a module that only its sender can import."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise ModuleNotFoundError('simulator')",)


@pytest.mark.parametrize("rest", [b"", bytes(1 << 20)], ids=["small", "large"])
def test_an_item_that_cannot_be_opened_harms_its_taker_only(
    tmp_path: Path, keys: JobKeys | JobPassword, reach: Open, rest: bytes
) -> None:
    channel, gate = SharedChannel.create(tmp_path, SPEC), Gate(host="127.0.0.1", keys=keys)
    gate.add("test", channel)
    gate.start()
    end = reach(gate, keys)
    for _ in range(2):
        end.put([Unknown(), np.frombuffer(rest, np.uint8)])
    end.put("next")
    for taker in (channel, end):
        with pytest.raises(ModuleNotFoundError, match="simulator"):
            taker.get()
    assert end.get() == "next"
    assert end.stats().depth_items == 0
    gate.close()
    channel.detach()
