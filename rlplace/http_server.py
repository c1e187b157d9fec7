"""An HTTP server for JSON. Clients without a key, slow clients and large requests cannot block it.

::

    connection ──▶ too many? 503 ──▶ headers, by a deadline ──▶ key? 401 ──▶ size? 411, 413
                                                                               │
                   answer ◀── JsonServer.post ◀── body, by a deadline? 408 ◀───┘

Each connection has a thread. The key of a request is checked before the body is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import io
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Seconds in which a client has to receive the reason why its connection is closed
_TOLD_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a server for its clients.

    `connections`: most connections at once. `silent_s`: seconds without data after which a connection is closed.
    `headers_s`, `body_s`: seconds in which the headers and the body of a request have to arrive. `body_bytes`: most
    bytes of a body. `stranger_bytes`: most bytes that are read of a body without a valid key. The server drops these
    bytes; it reads them because a client that is still sending would not receive the answer.
    """

    connections: int = 256
    silent_s: float = 60.0
    headers_s: float = 20.0
    body_s: float = 120.0
    body_bytes: int = 64 << 20
    stranger_bytes: int = 1 << 20


class Refused(Exception):  # an answer, not an error of the server
    """Raised to answer a request with an error. `status`: HTTP status. `why`: the reason that the client gets.

    `content`: content of the answer; None: the server makes it of the reason.
    """

    def __init__(
        self, status: HTTPStatus, why: str, content: object | None = None
    ) -> None:
        super().__init__(why)
        self.status = status
        self.why = why
        self.content = content


@dataclasses.dataclass(frozen=True, slots=True)
class Bytes:
    """An answer that is not JSON. `kind`: its content type."""

    content: bytes
    kind: str


@dataclasses.dataclass(frozen=True, slots=True)
class Events:
    """An answer that is a stream of server-sent events. `data`: the data of each event, without line breaks."""

    data: Iterable[str]


class JsonServer(ThreadingHTTPServer):
    """An HTTP server with limits. Subclasses answer POST and GET requests.

    `owners`: key -> owner of the key, an object that `post` gets. The mapping may change while the server runs. A
    request has its key as a bearer token. None: requests need no key. `gets_need_key`: whether GET requests need one.
    """

    daemon_threads = True
    gets_need_key = False
    # If the queue were full, a client would try to connect again only after a second
    request_queue_size = 1024

    def __init__(
        self,
        address: tuple[str, int],
        *,
        owners: Mapping[str, Any] | None,
        limits: Limits,
    ) -> None:
        self.limits = limits
        self._owners = owners
        self._free = threading.BoundedSemaphore(limits.connections)
        super().__init__(address, _Requests)

    # ── for subclasses ───────────────────────────────────────────────────────────────────────────────────────────────

    def post(self, path: str, owner: Any, body: bytes) -> object:
        """Return the answer to a POST request; it is sent as JSON, unless it is Events or Bytes. Raises Refused.

        `owner`: owner of the request's key; None if requests need no key.
        """
        raise NotImplementedError

    def get(self, path: str) -> object:
        """Return the answer to a GET request. Raises Refused."""
        raise Refused(HTTPStatus.NOT_FOUND, "there are POST requests only")

    def refusal(self, status: int, why: str) -> object:
        """Return the content of the answer to a refused request."""
        return {"error": why}

    def authorization(self, headers: Message) -> str:
        """Return what a request gives as its key, in the form of the header Authorization; "" without a key."""
        return str(headers.get("Authorization", ""))

    # ── connections and keys ─────────────────────────────────────────────────────────────────────────────────────────

    def owner(self, authorization: str) -> tuple[bool, Any]:
        """Return (whether a request has a valid key, owner of the key). `authorization`: value of this header.

        All keys are compared in constant time, so the time of the answer reveals nothing about a key.
        """
        if self._owners is None:
            return True, None
        # Headers are decoded as Latin-1
        given = authorization.encode("latin1", "replace")
        found: tuple[bool, Any] = (False, None)
        for key, owner in list(self._owners.items()):
            if hmac.compare_digest(given, f"Bearer {key}".encode()):
                found = (True, owner)
        return found

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer the requests of a connection in a new thread; refuse the connection if there are too many."""
        if not self._free.acquire(blocking=False):
            self._refuse_busy(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # the thread was not started
            self._free.release()
            raise

    def _refuse_busy(self, request: socket.socket) -> None:
        """Answer that there are too many connections, and close this connection."""
        status = HTTPStatus.SERVICE_UNAVAILABLE
        why = f"there are {self.limits.connections} connections, and no room for more"
        body = json.dumps(self.refusal(status, why)).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        # This thread accepts connections, so it must not wait for a client
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(head.encode() + body)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a request, unless the client has closed its connection or is silent."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _RequestTimeout(Exception):  # an answer is made of it
    """Raised if the rest of a request does not arrive in time."""


class _Incoming(io.RawIOBase):
    """The incoming data of a connection, with time limits.

    Between requests, reading raises TimeoutError if no data arrive. Within a request, reading raises _RequestTimeout if
    no data arrive or if the deadline has passed. `until_s`: the deadline, in seconds of the monotonic clock; None
    between requests.
    """

    def __init__(self, connection: socket.socket, silent_s: float) -> None:
        self._connection = connection
        self._silent_s = silent_s
        self.until_s: float | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._silent_s
        if self.until_s is not None:
            left_s = min(left_s, self.until_s - time.monotonic())
        if left_s <= 0:
            raise _RequestTimeout
        self._connection.settimeout(left_s)
        try:
            return self._connection.recv_into(buffer)
        except TimeoutError as error:
            if self.until_s is None:
                raise
            raise _RequestTimeout from error
        finally:
            # Sending an answer has the same time limit as receiving data
            self._connection.settimeout(self._silent_s)


class _Requests(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: JsonServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer is sent at once

    def setup(self) -> None:
        super().setup()
        self._incoming = _Incoming(self.connection, self.server.limits.silent_s)
        self._reader = io.BufferedReader(self._incoming)
        self.rfile.close()
        self.rfile = self._reader
        # Whether the client may still be sending data that the server does not read
        self._unread = False

    def finish(self) -> None:
        super().finish()
        if not self._unread:
            return
        # If the connection is closed while the client sends, TCP resets it, and the client does not receive the answer
        until_s = time.monotonic() + _TOLD_S
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_TOLD_S)
            while time.monotonic() < until_s and self.connection.recv(1 << 16):
                pass

    def handle_one_request(self) -> None:
        """Answer one request; answer with an error if its headers or its body do not arrive in time."""
        limits = self.server.limits
        # A connection that is silent between two requests is closed without an answer
        self._incoming.until_s = None
        self._waits = False
        # `http.server` reads these attributes, also if the first line of the request did not arrive
        self.command = ""
        self.requestline = ""
        self.request_version = ""
        try:
            self._reader.peek(1)
        except TimeoutError:
            self.close_connection = True
            return
        self._incoming.until_s = time.monotonic() + limits.headers_s
        try:
            super().handle_one_request()
        except _RequestTimeout:
            self._unread = True
            why = "the headers or the body of the request did not arrive in time"
            self.send_error(HTTPStatus.REQUEST_TIMEOUT, why)
            self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: requests are not logged."""

    def handle_expect_100(self) -> bool:
        """Do not ask for the body yet: the key and the size are checked first."""
        self._waits = True
        return True

    def do_GET(self) -> None:  # named by http.server
        try:
            known, _ = self.server.owner(self.server.authorization(self.headers))
            if self.server.gets_need_key and not known:
                raise _no_key()
            self._send(HTTPStatus.OK, self.server.get(self.path))
        except Refused as refused:
            self._refuse(refused)

    def do_POST(self) -> None:  # named by http.server
        try:
            owner, size = self._checked()
            answer = self.server.post(self.path, owner, self._body(size))
        except Refused as refused:
            return self._refuse(refused)
        return self._send(HTTPStatus.OK, answer)

    def _checked(self) -> tuple[Any, int]:
        """Check the key and the size of a request. Return (owner of the key, bytes of the body). Raises Refused."""
        limits = self.server.limits
        known, owner = self.server.owner(self.server.authorization(self.headers))
        most = limits.body_bytes if known else limits.stranger_bytes
        given = self.headers.get("Content-Length", "")
        size: int | None = None
        if re.fullmatch(r"[0-9]{1,18}", given) and not self._in_chunks():
            size = int(given)
        unread = size is None or size > most
        # The body is not read, so the beginning of the next request would not be found
        if unread or (not known and self._waits):
            self.close_connection = True
            self._unread = True
        elif not known and size is not None:
            self._body(size)
        if not known:
            raise _no_key()
        if size is None:
            why = "a request has a Content-Length: bodies in chunks are not read"
            raise Refused(HTTPStatus.LENGTH_REQUIRED, why)
        if unread:
            why = f"a request has at most {most} bytes, this one {size}"
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
        return owner, size

    def _in_chunks(self) -> bool:
        return "Transfer-Encoding" in self.headers

    def _body(self, size: int) -> bytes:
        """Read the body of a request, of `size` bytes, and return it.

        Raises TimeoutError if the body does not arrive in time, and ConnectionError if the client disconnects before.
        """
        if self._waits:
            self.send_response_only(HTTPStatus.CONTINUE)
            self.end_headers()
            self.wfile.flush()
        self._incoming.until_s = time.monotonic() + self.server.limits.body_s
        body = self.rfile.read(size)
        if len(body) < size:
            raise ConnectionAbortedError("the body ends before its length")
        return body

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """Answer with an error, and close the connection. `http.server` calls this for anything but HTTP."""
        self.close_connection = True
        # `http.server` sends no headers if it has read no HTTP version
        self.request_version = self.protocol_version
        status = HTTPStatus(code)
        self._refuse(Refused(status, explain or message or status.phrase))

    def _refuse(self, refused: Refused) -> None:
        content = refused.content
        if content is None:
            content = self.server.refusal(refused.status, refused.why)
        self._send(refused.status, content)

    def _send(self, status: HTTPStatus, content: object) -> None:
        match content:
            case Bytes():
                kind = content.kind
                body = content.content
            case Events():
                kind = "text/event-stream"
                body = "".join(f"data: {each}\n\n" for each in content.data).encode()
            case _:
                kind = "application/json"
                body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _no_key() -> Refused:
    return Refused(HTTPStatus.UNAUTHORIZED, "a request has a known bearer token")
