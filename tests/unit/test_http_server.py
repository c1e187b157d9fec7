"""What strangers, slow clients and large requests may take of our two HTTP servers: each protection, on both."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlplace.envs.text import agents
from rlplace.envs.text.agents import _Line, _Server
from rlplace.envs.text.chat_api import Asked, Choice
from rlplace.envs.text.contract import Message
from rlplace.http_server import JsonServer, Limits
from rlplace.workers.roles import reward_server
from rlplace.workers.roles.reward_server import RewardServer
from tests.served import in_a_thread
from tests.tiny_lm import tiny_model, tiny_reward_model

PATIENCE_S = 30.0
KEY = "abc"
# Nothing ends by these while a test runs
PATIENT = Limits(silent_s=300.0, headers_s=300.0, body_s=300.0)
Make = Callable[[Limits], JsonServer]


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = tiny_model(tmp_path_factory.mktemp("policy"))
    return tiny_reward_model(tmp_path_factory.mktemp("scorer"), like=policy)


@dataclasses.dataclass(frozen=True)
class Kind:
    """One of the servers: how it is made, the path of its POST requests, and a body that it answers."""

    make: Make
    path: str
    body: bytes


class _Yes(_Line):
    """An episode whose policy says yes."""

    def ask(self, asked: Asked) -> Sequence[Choice]:
        yes = Message("assistant", "yes")
        return [Choice(message=yes, finish="stop", prompt_tokens=1, tokens=1)]


@pytest.fixture(params=["agents", "reward"])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "agents":
        line = _Yes(may_call=True)
        return Kind(
            lambda limits: _Server(
                ("127.0.0.1", 0),
                owners={"other": _Line(may_call=True), KEY: line},
                limits=limits,
            ),
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "x"}]}',
        )
    folder: Path = request.getfixturevalue("scorer")
    return Kind(
        lambda limits: RewardServer(
            folder,
            address=("127.0.0.1", 0),
            dtype="fp32",
            head="score",
            token_budget=64,
            api_key=KEY,
            limits=limits,
        ),
        "/",
        b'{"query": ["a"]}',
    )


def serving(kind: Kind, **limits: Any) -> contextlib.AbstractContextManager[JsonServer]:
    return in_a_thread(kind.make(dataclasses.replace(PATIENT, **limits)))


@contextlib.contextmanager
def connected(server: JsonServer) -> Iterator[socket.socket]:
    with socket.create_connection(
        ("127.0.0.1", server.server_port), timeout=PATIENCE_S
    ) as connection:
        yield connection


def head(kind: Kind, *lines: str, key: str = KEY) -> bytes:
    """Return the first line and the headers of a POST request."""
    each = [f"POST {kind.path} HTTP/1.1", f"Authorization: Bearer {key}", *lines, ""]
    return "\r\n".join(each).encode() + b"\r\n"


def answered(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON of an answer."""
    with connection.makefile("rb") as answer:
        status = int(answer.readline().split()[1])
        length = 0
        kind = b""
        while (line := answer.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
            if name.lower() == b"content-type":
                kind = value.strip()
        body = answer.read(length)
    if status == 100:
        return status, {}
    assert kind == b"application/json"
    return status, json.loads(body)


def sent(server: JsonServer, request: bytes) -> tuple[int, dict[str, Any]]:
    with connected(server) as connection:
        connection.sendall(request)
        return answered(connection)


def whole(kind: Kind) -> bytes:
    return head(kind, f"Content-Length: {len(kind.body)}") + kind.body


def test_a_whole_request_with_the_key_is_answered(kind: Kind) -> None:
    with serving(kind) as server, connected(server) as connection:
        for _ in range(2):
            connection.sendall(whole(kind))
            status, answer = answered(connection)
            assert (status, "error" in answer) == (200, False)


def test_connections_beyond_the_most_are_told_so(kind: Kind) -> None:
    with serving(kind, connections=2) as server:
        with connected(server) as first, connected(server) as second:
            for each in (first, second):
                each.sendall(whole(kind))
                assert answered(each)[0] == 200
            with connected(server) as third:
                status, answer = answered(third)
        assert (status, "no room for more" in str(answer)) == (503, True)
        # A place is free once its thread has ended
        assert server._free.acquire(timeout=PATIENCE_S)
        server._free.release()
        assert sent(server, whole(kind))[0] == 200


@pytest.mark.parametrize(
    "begun", [b"P", b"POST / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nAuthorization: Bea"]
)
def test_headers_have_a_deadline(kind: Kind, begun: bytes) -> None:
    with serving(kind, headers_s=0.1) as server:
        status, answer = sent(server, begun)
    assert (status, "in time" in str(answer)) == (408, True)


def test_dribbled_headers_do_not_move_the_deadline(kind: Kind) -> None:
    gone = threading.Event()

    def dribble(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(b"POST / HTTP/1.1\r\nX: ")
            while not gone.wait(0.02):
                connection.sendall(b"x")

    with (
        serving(kind, headers_s=0.3, silent_s=5.0) as server,
        connected(server) as slow,
    ):
        thread = threading.Thread(target=dribble, args=(slow,))
        thread.start()
        try:
            status, _ = answered(slow)
        finally:
            gone.set()
            thread.join()
    assert status == 408


def test_a_body_has_a_deadline(kind: Kind) -> None:
    with serving(kind, body_s=0.1) as server:
        status, answer = sent(server, head(kind, "Content-Length: 9") + b"{")
    assert (status, "in time" in str(answer)) == (408, True)


@pytest.mark.parametrize("limits", [agents._LIMITS, reward_server._LIMITS])
def test_both_servers_begin_with_deadlines(limits: Limits) -> None:
    """The other tests give limits of their own."""
    assert limits.headers_s <= 20
    assert limits.body_s <= 120
    assert limits.silent_s <= 120


def test_a_connection_without_a_request_is_closed_after_a_silence(kind: Kind) -> None:
    with serving(kind, silent_s=0.1) as server:
        with connected(server) as silent:
            assert silent.recv(1) == b""
        with connected(server) as after:
            after.sendall(whole(kind))
            assert answered(after)[0] == 200
            assert after.recv(1) == b""


@pytest.mark.parametrize(
    ("size", "status"),
    [(str((64 << 20) + 1), 413), ("9" * 30, 411), ("-1", 411), ("x", 411), ("", 411)],
)
def test_the_size_of_a_body_is_checked_before_it_is_read(
    kind: Kind, size: str, status: int
) -> None:
    with serving(kind) as server, connected(server) as connection:
        # No byte of the body is sent
        connection.sendall(head(kind, f"Content-Length: {size}"))
        found, answer = answered(connection)
        assert (found, "error" in answer) == (status, True)
        assert connection.recv(1) == b"", "what follows is no request"


@pytest.mark.parametrize("others", [(), ("Content-Length: 3",)])
def test_bodies_in_chunks_are_not_read(kind: Kind, others: tuple[str, ...]) -> None:
    with serving(kind) as server:
        request = head(kind, "Transfer-Encoding: chunked", *others)
        status, answer = sent(server, request + b"3\r\nabc\r\n0\r\n\r\n")
    assert (status, "Content-Length" in str(answer)) == (411, True)


@pytest.mark.parametrize("key", ["abd", "ab", "abcd", "", "\xe9", "other "])
@pytest.mark.parametrize("size", [str(1 << 40), "9" * 30, "-1", "x"])
def test_the_key_is_compared_before_the_body_is_read(
    kind: Kind, key: str, size: str
) -> None:
    with serving(kind) as server:
        status, answer = sent(server, head(kind, f"Content-Length: {size}", key=key))
    assert (status, "error" in answer) == (401, True)


def test_a_short_body_without_a_key_is_dropped_and_the_connection_stays(
    kind: Kind,
) -> None:
    with serving(kind) as server, connected(server) as connection:
        connection.sendall(head(kind, "Content-Length: 3", key="no") + b"abc")
        assert answered(connection)[0] == 401
        connection.sendall(whole(kind))
        assert answered(connection)[0] == 200


def test_a_client_that_asks_first_is_told_before_it_sends_the_body(kind: Kind) -> None:
    asks = (f"Content-Length: {len(kind.body)}", "Expect: 100-continue")
    with serving(kind) as server:
        assert sent(server, head(kind, *asks, key="no"))[0] == 401
        with connected(server) as connection:
            connection.sendall(head(kind, *asks))
            assert answered(connection)[0] == 100
            connection.sendall(kind.body)
            assert answered(connection)[0] == 200


def test_every_key_is_compared_in_constant_time(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[bytes] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return equal(a, b)

    equal = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    with serving(kind) as server:
        for given, known in ((f"Bearer {KEY}", True), ("Bearer abd", False)):
            compared.clear()
            assert server.owner(given)[0] is known
            keys = server._owners
            assert keys is not None
            assert compared == [f"Bearer {key}".encode() for key in keys]
        assert not server.owner("")[0]
        assert not server.owner(KEY)[0]
        assert not server.owner(f"bearer {KEY}")[0]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"PUT / HTTP/1.1\r\n\r\n", 501),
        (b"GET /nowhere HTTP/1.1\r\n\r\n", 404),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"\x16\x03\x01 is TLS\r\n\r\n", 400),
    ],
)
def test_what_is_no_request_has_an_error_in_json(
    kind: Kind, request_: bytes, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(kind) as server:
        found, answer = sent(server, request_)
        assert (found, "error" in answer) == (status, True)
        assert sent(server, whole(kind))[0] == 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("text", [b"[" * 200_000, b"{", b"3", b"\xff", b""])
def test_what_is_no_json_has_an_error_in_json(
    kind: Kind, text: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(kind) as server:
        found, answer = sent(server, head(kind, f"Content-Length: {len(text)}") + text)
    assert (found, "error" in answer) == (400, True)
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_goes_in_the_middle_is_told_of_nowhere(
    kind: Kind, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(kind, connections=1) as server:
        with connected(server) as connection:
            connection.sendall(head(kind, "Content-Length: 9") + b"{")
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
        assert server._free.acquire(timeout=PATIENCE_S)
        server._free.release()
        assert sent(server, whole(kind))[0] == 200
    assert capfd.readouterr().err == ""
