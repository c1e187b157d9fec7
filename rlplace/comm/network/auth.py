"""Let only this job's clients in: keys that encrypt or a password, and the authenticator that checks them.

ZeroMQ asks the authenticator within the process (ZAP, RFC 27) before a connection is let in.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from typing import ClassVar

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

_LOG = logging.getLogger("rlplace.comm.network")
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_BESIDE_BYTES = 1 << 20  # what a message may have beside one frame of data: envelopes, encryption
_HANDSHAKE_S = 5.0  # a connection that was not let in by then is cut


@dataclasses.dataclass(frozen=True, slots=True)
class JobKeys:
    """CURVE: all is encrypted, and each side proves that it is of this job. Costs most of a fast network's speed.

    Made once per job and given to its workers only. Both ends of a connection hold the same.
    """

    mechanism: ClassVar[bytes] = b"CURVE"
    # A larger buffer is cut into frames of so many bytes: while one is sent, the next is prepared. Encrypting takes
    # longer than sending: both ends at work make half as much again.
    frame_bytes: ClassVar[int] = 1 << 20

    server_public: bytes
    server_secret: bytes = dataclasses.field(repr=False)
    client_public: bytes
    client_secret: bytes = dataclasses.field(repr=False)

    @classmethod
    def create(cls) -> JobKeys:
        (server_public, server_secret), (client_public, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(server_public, server_secret, client_public, client_secret)

    def guard(self, server: zmq.Socket) -> None:
        """Prepare the listening socket, before it binds."""
        server.curve_server = True
        server.curve_publickey = self.server_public
        server.curve_secretkey = self.server_secret

    def show(self, client: zmq.Socket) -> None:
        """Prepare a connecting socket, before it connects."""
        client.curve_serverkey = self.server_public
        client.curve_publickey = self.client_public
        client.curve_secretkey = self.client_secret

    def admits(self, credentials: list[bytes]) -> bool:
        """Whether these are a client of this job."""
        return len(credentials) == 1 and secrets.compare_digest(z85.encode(credentials[0]), self.client_public)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobPassword:
    """PLAIN: keeps strangers and other jobs out, hides nothing. For an interface that only the cluster uses."""

    mechanism: ClassVar[bytes] = b"PLAIN"
    frame_bytes: ClassVar[int] = 32 << 20  # large: there is nothing to prepare, and joining frames is a copy

    password: str = dataclasses.field(repr=False)

    @classmethod
    def create(cls) -> JobPassword:
        return cls(password=secrets.token_urlsafe(32))

    def guard(self, server: zmq.Socket) -> None:
        server.plain_server = True

    def show(self, client: zmq.Socket) -> None:
        client.plain_username = b"job"
        client.plain_password = self.password.encode()

    def admits(self, credentials: list[bytes]) -> bool:
        return len(credentials) == 2 and secrets.compare_digest(credentials[1], self.password.encode())


Keys = JobKeys | JobPassword


class Authenticator:
    """Guards `server` from before it is bound. Its two sockets are read in the server's loop, by `answer` and `notice`.

    A connection without the job's keys, or without a handshake at all, gets no further. The first is logged.
    """

    def __init__(self, context: zmq.Context, server: zmq.Socket, keys: Keys) -> None:
        """One per context."""
        self._keys = keys
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        keys.guard(server)
        server.zap_domain = b"rlplace"
        server.maxmsgsize = keys.frame_bytes + _BESIDE_BYTES  # also of strangers, before any key is shown
        server.handshake_ivl = int(_HANDSHAKE_S * 1000)
        self.monitor = server.get_monitor_socket(_EVENTS)
        self.refused = 0
        self._came = self._let_in = 0
        self._undecided: dict[int, float] = {}  # connections that may still be at their handshake, and since when

    def answer(self) -> None:
        """Answer all connections that ask to be let in."""
        while True:
            try:
                asked = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request, _domain, _address, _identity, mechanism, *credentials = asked
            known = mechanism == self._keys.mechanism and self._keys.admits(credentials)
            verdict = (b"200", b"OK") if known else (b"400", b"not of this job")
            self.socket.send_multipart([version, request, *verdict, b"", b""])

    def notice(self, endpoint: str) -> None:
        """Count the connections that the server at `endpoint` refused, a few seconds late where many come at once.

        ZeroMQ reports which came and which left, but not which of those that came were let in.
        """
        now = time.monotonic()
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._came += 1
                self._undecided[event["value"]] = now
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._undecided.pop(event["value"], None)
            else:
                self._let_in += 1
                if len(self._undecided) == 1:  # then it is the one
                    self._undecided.clear()
        self._undecided = {fd: since for fd, since in self._undecided.items() if now - since < _HANDSHAKE_S + 1}
        refused = self._came - self._let_in - len(self._undecided)
        if refused > 0 and not self.refused:
            _LOG.warning(
                "channel server %s refused a connection that did not show this job's keys; later ones are only counted",
                endpoint,
            )
        self.refused = max(self.refused, refused)
