"""A stream between processes of two nodes, without a channel server: the source makes an item when the taker requests
the item.

::

    StreamSource   address ── on a channel ──▶ StreamTaker
                   ◀── number of an item ──── DEALER          requests the next item early
                   ROUTER ── item ──▶                         and reports when it needs no more items

The source has a socket for one stream, with its own keys. The source keeps no items: if a connection breaks, the source
makes the lost item again. As between a process and a channel server, an end without a connection for `wire.LOST_S`
counts as gone.
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

TICK_S = 0.25  # time between two checks of a source for a lost taker or a cancelled run
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_LAST_WORD_MS = 1000  # longest time that `close` takes to send
_NO_MORE = -1  # from the taker, instead of a number: it needs no more items
_HERE = -1  # from the source, instead of a number: a sign of life


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamAddress:
    """Endpoint and keys of a StreamSource, as they are sent to the taker."""

    endpoint: str
    keys: Keys = dataclasses.field(repr=False)  # secret

    def connect(self) -> StreamTaker:
        """Return a new taker that is connected to the source."""
        return StreamTaker(self)


class StreamSource:
    """Makes the items of one stream and sends them to one taker. Used by one thread, as a context manager.

    The source listens for the taker from its creation to the end of the context.
    """

    def __init__(self, *, near: str, keys: Keys) -> None:
        """Open a socket for the taker, on the address that this machine uses towards the endpoint `near`.

        `keys`: keys for this stream alone.
        """
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            self._authenticator = Authenticator(self._context, self._socket, keys)
            wire.endure(self._socket)
            # An absent taker is an error of `send`; one that comes back replaces its old connection
            self._socket.router_mandatory = True
            self._socket.router_handover = True
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
        """Make and send items as the taker asks for them, until the taker says that it needs no more items.

        Return None if the taker has said this, else a text that says why the stream has ended early. A taker that is
        lost after its request for the last item counts as done, because it has most likely received the item. `make`:
        takes the index of an item and returns the item. `count`: number of items. `timeout_s`: the most seconds until
        the next request. `check`: called often; an error that it raises ends the stream.
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
            # Each request is the number of an item
            while wire.has_message(self._socket):
                taker = self._socket.recv()
                number = pickle.loads(self._socket.recv())
                # The taker has all that it needs
                if number == _NO_MORE:
                    return None
                self._send(taker, number, make(number))
                last = max(last, number)
                until = time.monotonic() + timeout_s
            # A sign of life also tells whether the taker is connected
            if taker is None or self._send(taker, _HERE):
                lost_at = None
            elif now > (lost_at := lost_at or now) + LOST_S:
                if last == count - 1:
                    return None
                return f"it is gone: no connection for {LOST_S:.0f} s"
        return f"it asked for nothing for {timeout_s:.1f} s"

    def _send(
        self,
        taker: bytes,
        number: int,
        *items: Any,
    ) -> bool:
        """Send the index `number`, and `items` if there are any, in one message; return whether the taker is connected.

        `taker`: ZeroMQ's identity of the taker. `number`: index of the item. A taker that has lost the connection asks
        again over its next connection.
        """
        # Number and marks, then the data
        marks, frames = wire.enclose(
            map(self._pack, items), self.address.keys.frame_bytes
        )
        try:
            self._socket.send_multipart(
                (taker, pickle.dumps((number, marks)), *frames),
                zmq.NOBLOCK,
                copy=False,
            )
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True


class StreamTaker:
    """Asks a StreamSource for the items of its stream, in order. Used by one thread."""

    def __init__(self, address: StreamAddress) -> None:
        self.endpoint = address.endpoint
        # Items
        self.asked = 0
        self.taken = 0
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        wire.endure(self.socket)
        # The same name over all connections, by which the source knows this taker
        self.socket.routing_id = b"t" + os.urandom(15)
        self.socket.ipv6 = "[" in address.endpoint
        # Ms
        self.socket.reconnect_ivl = 50
        address.keys.show(self.socket)
        self._monitor = self.socket.get_monitor_socket(_EVENTS)
        # When the connection was lost; None while connected
        self._lost_at: float | None = time.monotonic() + CONNECT_S - LOST_S
        # Number of connections so far
        self._connections = 0
        self.socket.connect(address.endpoint)

    @property
    def due(self) -> int:
        """Number of items that were requested and have not arrived."""
        return self.asked - self.taken

    def ask(self) -> None:
        """Ask the source for the next item, without waiting for it."""
        self._say(self.asked)
        self.asked += 1

    def receive(self) -> Any:
        """Return the next item, or None if it has not arrived yet. Raise ConnectionError if the source is gone."""
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
            # Other numbers are signs of life, or an item that was sent twice
            if number == self.taken:
                self.taken += 1
                return codec.unpack(wire.disclose(marks, frames)[0])

    @property
    def _gone(self) -> bool:
        """Return whether there has been no connection to the source for `LOST_S` seconds."""
        return self._lost_at is not None and time.monotonic() > self._lost_at + LOST_S

    def _notice(self) -> None:
        """Handle events of the connection. After a reconnection, ask again for the items that have not arrived."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(
                    self._monitor.recv_multipart(zmq.NOBLOCK)
                )["event"]
                if event == zmq.EVENT_DISCONNECTED:
                    # Count from the first loss
                    self._lost_at = self._lost_at or time.monotonic()
                    continue
                self._lost_at = None
                self._connections += 1
                if self._connections > 1:
                    for number in range(self.taken, self.asked):
                        self._say(number)

    @staticmethod
    def wait(takers: Iterable[StreamTaker], timeout_s: float) -> None:
        """Wait until a message arrives for one of the takers, at most `timeout_s` seconds."""
        poller = zmq.Poller()
        for taker in takers:
            poller.register(taker.socket, zmq.POLLIN)
        poller.poll(int(1000 * timeout_s))

    def close(self) -> None:
        """Tell the source that no more items are needed, and close the socket. Idempotent."""
        if not self._context.closed:
            self._say(_NO_MORE)
            self.socket.disable_monitor()
            self._context.destroy(linger=0 if self._gone else _LAST_WORD_MS)

    def _say(self, number: int) -> None:
        # Refused: there is no source
        with contextlib.suppress(zmq.Again):
            self.socket.send(pickle.dumps(number), zmq.NOBLOCK)


def _address_towards(endpoint: str) -> str:
    """Return the address of this machine from which it would send to `endpoint`. Nothing is sent."""
    parts = urlsplit(endpoint)
    family, kind, _, _, address = socket.getaddrinfo(
        parts.hostname,
        parts.port,
        type=socket.SOCK_DGRAM,
    )[0]
    # Connecting a datagram socket chooses a route and sends nothing
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        host: str = probe.getsockname()[0]
        return host
