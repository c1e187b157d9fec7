"""A stream between processes of two nodes: one makes items as the other asks for them, past the channel servers.

::

    StreamSource   address ── on a channel ──▶ StreamTaker
                   ◀── number of an item ──── DEALER          asks for the next while it uses the one before
                   ROUTER ── item ──▶                         and says when it needs no more

The source has a socket for one stream, with keys that are made for it, and makes an item again where the connection was
lost meanwhile: nothing is kept for that. As between a process and a channel server, an end without a connection for
`wire.LOST_S` is gone to the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import parse_monitor_message

from rlplace.comm import codec
from rlplace.comm.network import wire
from rlplace.comm.network.connection import CONNECT_S
from rlplace.comm.network.server import Authenticator
from rlplace.comm.network.wire import LOST_S, Keys

TICK_S = 0.25  # a source looks this often whether its taker is gone, or its own work is cancelled
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_LAST_WORD_MS = 1000
_NO_MORE = _HERE = -1  # instead of a number, from the taker and from the source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamAddress:
    endpoint: str
    keys: Keys = dataclasses.field(repr=False)  # secret

    def connect(self) -> StreamTaker:
        return StreamTaker(self)


class StreamSource:
    """Makes the items of one stream for one taker. Listens while it is open; used by one thread."""

    def __init__(self, *, near: str, keys: Keys) -> None:
        """Listen where this machine reaches the endpoint `near`."""
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            self._authenticator = Authenticator(self._context, self._socket, keys)
            wire.endure(self._socket)
            self._socket.router_mandatory = self._socket.router_handover = True
            self.address = StreamAddress(
                endpoint=wire.listen(self._socket, _address_towards(near)), keys=keys
            )
        except Exception:
            self._context.destroy(linger=0)
            raise
        self._pack = codec.Packers(wire.INLINE_BYTES).pack

    def __enter__(self) -> StreamSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def serve(
        self,
        make: Callable[[int], Any],
        count: int,
        *,
        timeout_s: float,
        check: Callable[[], None],
    ) -> str | None:
        """Make the `count` items as the taker asks for them, until it needs no more. Return why it never said so.

        One that is gone after the last item has most likely got it. `timeout_s`: longest wait for its next question.
        `check` raises where this wait should end.
        """
        poller = zmq.Poller()
        for watched in (self._socket, self._authenticator.socket):
            poller.register(watched, zmq.POLLIN)
        until = time.monotonic() + timeout_s
        taker = None
        lost_at = None
        last = -1
        while (now := time.monotonic()) < until:
            poller.poll(int(1000 * min(TICK_S, until - now)) + 1)
            check()
            self._authenticator.answer()
            self._authenticator.notice(self.address.endpoint)
            while wire.has_message(self._socket):
                taker = self._socket.recv()
                number = pickle.loads(self._socket.recv())
                if number == _NO_MORE:
                    return None
                self._send(taker, number, make(number))
                last = max(last, number)
                until = time.monotonic() + timeout_s
            if taker is None or self._send(taker, _HERE):
                lost_at = None
            elif now > (lost_at := lost_at or now) + LOST_S:
                if last == count - 1:
                    return None
                return f"it is gone: no connection for {LOST_S:.0f} s"
        return f"it asked for nothing for {timeout_s:.1f} s"

    def _send(self, taker: bytes, number: int, *items: Any) -> bool:
        """Return whether there is a connection. A taker without one asks again over the next."""
        marks, frames = wire.enclose(
            map(self._pack, items), self.address.keys.frame_bytes
        )
        try:
            self._socket.send_multipart(
                (taker, pickle.dumps((number, marks)), *frames), zmq.NOBLOCK, copy=False
            )
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True


class StreamTaker:
    """Asks for the items of a stream in order. Used by one thread."""

    def __init__(self, address: StreamAddress) -> None:
        self.endpoint = address.endpoint
        self.asked = self.taken = 0  # items
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        wire.endure(self.socket)
        self.socket.routing_id = b"t" + os.urandom(15)
        self.socket.ipv6 = "[" in address.endpoint
        self.socket.reconnect_ivl = 50  # ms
        address.keys.show(self.socket)
        self._monitor = self.socket.get_monitor_socket(_EVENTS)
        # None while connected
        self._lost_at: float | None = time.monotonic() + CONNECT_S - LOST_S
        self._connections = 0  # that were made
        self.socket.connect(address.endpoint)

    @property
    def due(self) -> int:
        """Number of items that were asked for and have not been received."""
        return self.asked - self.taken

    def ask(self) -> None:
        """Ask for one more."""
        self._say(self.asked)
        self.asked += 1

    def receive(self) -> Any:
        """Return the next item, None where it is not there yet. ConnectionError where the source is gone."""
        self._notice()
        while True:
            try:
                envelope, frames = wire.receive(self.socket)
            except zmq.Again:
                if self._gone:
                    raise ConnectionError(
                        f"no connection to {self.endpoint} for {LOST_S:.0f} s"
                    ) from None
                return None
            number, marks = pickle.loads(envelope)
            # Else it only says that it is here, or comes twice
            if number == self.taken:
                self.taken += 1
                return codec.unpack(wire.disclose(marks, frames)[0])

    @property
    def _gone(self) -> bool:
        return self._lost_at is not None and time.monotonic() > self._lost_at + LOST_S

    def _notice(self) -> None:
        """Follow the connection: made, lost, made again; then what is due may have been lost and is asked for again."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(
                    self._monitor.recv_multipart(zmq.NOBLOCK)
                )["event"]
                if event == zmq.EVENT_DISCONNECTED:
                    self._lost_at = self._lost_at or time.monotonic()
                    continue
                self._lost_at = None
                self._connections = self._connections + 1
                for number in (
                    range(self.taken, self.asked) if self._connections > 1 else ()
                ):
                    self._say(number)

    @staticmethod
    def wait(takers: Iterable[StreamTaker], timeout_s: float) -> None:
        """Wait until something comes for one of them."""
        poller = zmq.Poller()
        for taker in takers:
            poller.register(taker.socket, zmq.POLLIN)
        poller.poll(int(1000 * timeout_s))

    def close(self) -> None:
        """Say that no more is needed. Idempotent."""
        if not self._context.closed:
            self._say(_NO_MORE)
            self.socket.disable_monitor()
            self._context.destroy(linger=0 if self._gone else _LAST_WORD_MS)

    def _say(self, number: int) -> None:
        with contextlib.suppress(zmq.Again):  # refused: there is nobody to say it to
            self.socket.send(pickle.dumps(number), zmq.NOBLOCK)


def _address_towards(endpoint: str) -> str:
    """Return this machine's own address on its way to another; nothing is sent."""
    parts = urlsplit(endpoint)
    family, kind, _, _, address = socket.getaddrinfo(
        parts.hostname, parts.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        host: str = probe.getsockname()[0]
        return host
