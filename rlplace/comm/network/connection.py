"""A process's connection to one channel server, and its ends: requests out, answers matched by serial number.

::

    caller ── send, under the lock ──▶ DEALER ══▶ server
    caller ◀── wakes ── reader thread ◀── DEALER

A caller sends by itself; one thread reads. ZeroMQ restores a lost connection, and requests without an answer are then
sent again; the server performs nothing twice. The connection is broken for good after `LOST_S` without contact, or
when the server has forgotten this process or was closed: then every wait ends with the reason.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import select
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from rlplace.comm import channel_errors, codec
from rlplace.comm.channel import Channel, ChannelSpec, ChannelStats
from rlplace.comm.network import wire
from rlplace.comm.network.wire import LOST_S, Frame, Keys, Reply, Request

CONNECT_S = 10.0  # longest time to the first connection
GRACE_S = 3.0  # time after a request's deadline, until the server counts as silent
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
NO_REPLY = Reply(0)


@dataclasses.dataclass(slots=True, eq=False)
class Waiter:
    """A request that was sent to the channel server, and its answer once the answer has arrived.

    `outgoing`: frames that were sent behind the request; kept until the answer, because they may have to be sent again.
    `reply`, `frames`: the answer and the frames behind it. `arrived`: a held lock that is released when the answer
    arrives. No caller waits for the answer to a request "withdraw".
    """

    request: Request
    # Kept until the answer, since it may have to be sent again
    outgoing: Sequence[Frame] = ()
    reply: Reply = NO_REPLY
    frames: Sequence[zmq.Frame] = ()  # of the answer
    # Released once, when the answer has arrived, by the thread that holds `_lock`
    arrived: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class Connection:
    """The connection of this process to one channel server. Owns the socket and its reader thread.

    `endpoint`: address of the server. `keys`: the job's keys. `patience_s`: the most seconds until the first
    connection. Thread-safe; a forked child must not use it.
    """

    def __init__(
        self,
        endpoint: str,
        keys: Keys,
        *,
        patience_s: float = CONNECT_S,
    ) -> None:
        self.endpoint = endpoint
        self.keys = keys
        self._serials = itertools.count(1)
        # Requests without an answer, and withdrawals that the server has not confirmed; by serial
        self._waiters: dict[int, Waiter] = {}
        # Serials of received answers, sent to the server with the next message
        self._done: list[int] = []
        # Whether these must be sent at once
        self._tell = False
        # Whether the server knows this process
        self._welcomed = False
        # Why, once broken
        self._broken: str | None = None
        # When the connection was lost; None while connected
        self._lost_at: float | None = time.monotonic() + patience_s - LOST_S
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        wire.endure(self._socket)
        # The same name over all connections, by which the server knows this client
        self._socket.routing_id = b"c" + os.urandom(15)
        self._socket.ipv6 = "[" in endpoint
        self._socket.reconnect_ivl = 50
        # Ms
        self._socket.reconnect_ivl_max = 500
        keys.show(self._socket)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._stop, self._stopped = os.pipe()
        self._socket.connect(endpoint)
        self._reader = threading.Thread(
            target=self._read,
            name=f"rlplace {endpoint}",
            daemon=True,
        )
        self._reader.start()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.endpoint, self.keys)

    def ask(
        self,
        end: Channel,
        method: str,
        *arguments: Any,
        outgoing: Sequence[Frame] = (),
        patience_s: float | None = None,
    ) -> Waiter:
        """Send a request, wait for the answer, and return the waiter that holds the answer.

        `end`: the end of the channel that asks. `method`, `arguments`: the operation that the server performs on the
        channel, such as "put", and its arguments. `outgoing`: frames that are sent behind the request. `patience_s`:
        the most seconds that the server may wait before it answers; None: the server must not wait. Raise the error
        that the server has answered, ChannelBroken if the connection breaks, ChannelTimeout if there is no answer
        `GRACE_S` seconds after the deadline.
        """
        spec = end.spec
        owner = end.owner
        limit_s = (patience_s or 0.0) + GRACE_S
        with self._lock:
            if self._broken is not None:
                raise channel_errors.broken(spec, owner, self._broken)
            request = Request(
                next(self._serials),
                method,
                spec.name,
                owner,
                self._take_done(),
                arguments,
            )
            waiter = self._waiters[request.serial] = Waiter(request, outgoing)
            # The reader releases it when the answer has arrived
            waiter.arrived.acquire()
            self._send(request, outgoing)
        try:
            # Block outside of the lock
            waiter.arrived.acquire(timeout=limit_s)
        except BaseException:  # interrupted
            self.withdraw(waiter)
            raise
        with self._lock:
            # No answer: the connection broke, or the server is silent
            if waiter.reply is NO_REPLY:
                if self._broken is not None:
                    raise channel_errors.broken(spec, owner, self._broken)
                self._withdraw(request.serial)
                raise channel_errors.silent(spec, owner, method, limit_s)
        if waiter.reply.error is not None:
            raise waiter.reply.error
        return waiter

    def withdraw(self, waiter: Waiter) -> None:
        """Give up the request of `waiter`. The server then puts its items back, or frees its credit (reserved room)."""
        with self._lock:
            self._withdraw(waiter.request.serial)

    def close(self) -> None:
        """Tell the server that this process leaves, and end the reader thread. Idempotent.

        Waits of other threads end with ChannelBroken.
        """
        with self._lock:
            self._send(Request(0, "bye"))
            self._break("this process closed its connection")
        self._reader.join()

    def _withdraw(self, serial: int) -> None:
        """Send the withdrawal of the request with number `serial`. Call this with the lock held."""
        gone = self._waiters[serial] = Waiter(Request(serial, "withdraw"))
        # Kept until the server has confirmed it
        self._send(gone.request)

    def _take_done(self) -> tuple[int, ...]:
        """Return the numbers of the received answers about which the server was not told yet, and forget the numbers.

        Needs the lock.
        """
        done = tuple(self._done)
        self._done = []
        return done

    def _send(self, request: Request, frames: Sequence[Frame] = ()) -> None:
        """Send a request and its frames. Call this with the lock held.

        Send nothing without a connection: `_greet` sends all unanswered requests once there is a connection again.
        """
        if self._broken is not None or self._lost_at is not None:
            return
        self._socket.send_multipart(
            (wire.pack(request), *frames),
            zmq.NOBLOCK,
            copy=False,
        )
        # Sending may have consumed the signal of an incoming message
        if wire.has_message(self._socket):
            self._pump()

    def _read(self) -> None:
        """Handle messages and changes of the connection until it is broken; then close the socket.

        This is the reader thread. It breaks a connection that stays lost for `LOST_S` seconds.
        """
        poller = select.poll()
        for fd in (wire.fd_of(self._socket), wire.fd_of(self._monitor), self._stop):
            poller.register(fd, select.POLLIN)
        while self._broken is None:
            lost_at = self._lost_at
            wait_ms = None
            if lost_at is not None:
                left_s = max(0.0, lost_at + LOST_S - time.monotonic())
                wait_ms = left_s * 1000 + 1
            poller.poll(wait_ms)
            with self._lock:
                self._pump()
                self._notice()
                lost_at = self._lost_at
                if lost_at is not None and time.monotonic() > lost_at + LOST_S:
                    gone = f"the channel server {self.endpoint} is gone: no connection for {LOST_S:.0f} s"
                    never = (
                        f"no channel server of this job at {self.endpoint}: nothing answers "
                        f"there, or it has other keys"
                    )
                    self._break(gone if self._welcomed else never)
        with self._lock:
            # Time for the goodbye to be sent
            linger_ms = 500 if self._welcomed and self._lost_at is None else 0
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(linger_ms)
        self._context.term()
        os.close(self._stop)
        os.close(self._stopped)

    def _pump(self) -> None:
        """Handle all messages that have arrived, and tell the server about received answers. Needs the lock."""
        while self._broken is None:
            try:
                envelope, frames = wire.receive(self._socket)
            except zmq.Again:
                if not self._tell:
                    return
                self._tell = False
                self._socket.send(
                    wire.pack(Request(0, "done", done=self._take_done())), zmq.NOBLOCK
                )
            else:
                self._take_in(Reply(*pickle.loads(envelope)), frames)

    def _take_in(self, reply: Reply, frames: Sequence[zmq.Frame]) -> None:
        """Handle `reply`, one message of the server, and the frames behind it. Needs the lock."""
        if reply.serial == wire.WELCOME:
            self._welcomed = True
        elif reply.serial == wire.HERE:
            self._tell = bool(self._done)
        elif reply.serial == wire.FORGOTTEN:
            self._break(
                f"the channel server {self.endpoint} could not reach this process for {LOST_S:.0f} s"
            )
        elif reply.serial == wire.CLOSED:
            self._break(f"the channel server {self.endpoint} was closed")
        # An answer; a late one to a request that was withdrawn has no caller
        elif (waiter := self._waiters.get(reply.serial)) is not None:
            if waiter.request.method == "withdraw":
                # Other answers were sent before the server knew of the withdrawal
                if reply.value == "withdrawn":
                    del self._waiters[reply.serial]
            else:
                del self._waiters[reply.serial]
                self._done.append(reply.serial)
                # The server keeps items until it knows that they have arrived
                self._tell |= bool(reply.marks)
                waiter.reply = reply
                waiter.frames = frames
                waiter.outgoing = ()
                waiter.arrived.release()

    def _notice(self) -> None:
        """Handle all events of the connection that have arrived: made, lost, made again, refused. Needs the lock."""
        while self._broken is None:
            try:
                event = parse_monitor_message(
                    self._monitor.recv_multipart(zmq.NOBLOCK)
                )["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._lost_at = None
                self._greet()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._break(
                    f"the channel server {self.endpoint} does not know this process' keys: it belongs to another job"
                )
            elif self._lost_at is None:
                self._lost_at = time.monotonic()

    def _greet(self) -> None:
        """Introduce this process over a new connection, and send all unanswered requests again. Needs the lock."""
        wanted = list(self._waiters.values())
        self._send(
            Request(0, "hello", arguments=(self._welcomed, tuple(self._waiters)))
        )
        for waiter in wanted:
            # An answer may have come meanwhile
            if waiter.reply is NO_REPLY:
                self._send(waiter.request, waiter.outgoing)

    def _break(self, why: str) -> None:
        """Break the connection for good and end all waits.

        `why`: the reason, for errors. Needs the lock. Idempotent.
        """
        if self._broken is not None:
            return
        self._broken = why
        # Wakes the reader, which ends
        os.write(self._stopped, b"x")
        for waiter in self._waiters.values():
            if waiter.request.method != "withdraw":
                waiter.arrived.release()
        self._waiters.clear()


class RemoteChannel(Channel):
    """An end of a channel on another node.

    A call takes one round trip to the node's channel server; a large put takes two round trips.

    The creator of the connection owns it. Items from `get` are writable and belong to the caller.

    Effects of failures:

    - The server ends: every end raises ChannelBroken within seconds.
    - This process ends: the server withdraws its waits within seconds. An item that is on its way to this process goes
      back to the front of its line; an item that this process has confirmed is lost. If the process has the item, and
      dies before its confirmation has arrived, the item is taken twice: no protocol can tell this from an item that
      was on its way.
    - The network fails: a short interruption (`wire.LOST_S` after TCP has given up) neither loses nor doubles an item.
      A longer interruption counts as the end of the server here, and as the end of this process at the server.
    """

    def __init__(self, connection: Connection, spec: ChannelSpec) -> None:
        """Make an end, without waiting for the connection.

        If there is still no connection at the first call of a method, this call raises an error.
        """
        super().__init__(spec)
        self.connection = connection
        self._pack = codec.Packers(wire.INLINE_BYTES).pack

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.connection, self.spec), {"owner": self.owner}

    def link(self, key: str) -> Connection:
        """Return the connection to the node of the channel; it is the same for all keys."""
        return self.connection

    def _put(
        self,
        item: Any,
        key: str,
        weight: float,
        version: int | None,
        patience_s: float | None,
    ) -> None:
        packed = self._pack(item)
        terms = (key, weight, version, patience_s)
        if isinstance(packed, bytes):
            self.connection.ask(self, "put", packed, *terms, patience_s=patience_s)
            return
        # A large item: credit first, then its data
        marks, frames = wire.enclose((packed,), self.connection.keys.frame_bytes)
        credit = self.connection.ask(self, "put", None, *terms, patience_s=patience_s)
        serial = credit.request.serial
        patience_s = self.spec.timeout_s
        try:
            self.connection.ask(
                self,
                "fill",
                serial,
                marks,
                outgoing=frames,
                patience_s=patience_s,
            )
        except BaseException:  # interrupted, or the channel broke
            self.connection.withdraw(credit)
            raise

    def _get(
        self,
        limit: float | None,
        key: str,
        patience_s: float | None,
    ) -> list[Any]:
        waiter = self.connection.ask(
            self,
            "get",
            limit,
            key,
            patience_s,
            patience_s=patience_s,
        )
        return self._open_all(
            wire.disclose(waiter.reply.marks, waiter.frames),
            codec.unpack,
            key,
        )

    def close(self) -> None:
        self.connection.ask(self, "close")

    def break_(self, why: str) -> None:
        self.connection.ask(self, "break_", why)

    def reset(self) -> None:
        self.connection.ask(self, "reset")

    def stats(self) -> ChannelStats:
        stats: ChannelStats = self.connection.ask(self, "stats").reply.value
        return stats
