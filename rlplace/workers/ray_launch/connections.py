"""Requests and answers over one socket for each worker on the driver's machine; Ray calls are many times slower.

::

    driver ── Connection.send ──▶ one thread ──▶ a socket in the job's private folder ──▶ Service.answer, in the
              settle(answer) ◀── of all      ◀──                                          worker's own thread

One thread of the driver does all reading and writing, so a signal that interrupts the main thread cannot break a
message. A message is its length and a pickle. Answers come in the order of the requests. If a worker dies, its requests
stay open until Ray reports the death and its cause.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import pickle
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ray import cloudpickle

from rlplace.comm.unsent import is_sent, not_sent
from rlplace.workers.launch.group import Settle
from rlplace.workers.launch.host import Failure, Outcome, Request

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 18
# longest wait for the thread to end; the thread only ever waits for sockets
_END_S = 5.0


class Service:
    """A worker's end of a connection: a socket at `path` that takes requests from the first process that connects."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"calls-{secrets.token_hex(4)}"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self.path))
        self._listening.listen(1)

    def answer(self, run: Callable[[Sequence[Request]], list[Outcome]]) -> None:
        """Answer the requests that arrive, until the worker is closed or the driver has ended.

        `run`: runs the requests of one message in order, and returns their outcomes.
        """
        connected, _ = self._listening.accept()
        self._listening.close()
        self.path.unlink(missing_ok=True)
        with (
            contextlib.suppress(ConnectionError),
            connected,
            connected.makefile("rb") as incoming,
        ):
            closed = False
            while not closed and (length := incoming.read(_LENGTH.size)):
                message = incoming.read(_LENGTH.unpack(length)[0])
                try:
                    requests = cloudpickle.loads(message)
                except Exception as error:  # noqa: BLE001 -- of any class that is made: it travels as a value
                    answer = cloudpickle.dumps(Failure.of(error))
                else:
                    closed = requests[-1][0] == "close"
                    answer = _pickled(run(requests))
                connected.sendall(_LENGTH.pack(len(answer)) + answer)


def _pickled(outcomes: list[Outcome]) -> bytes:
    """Return the pickled outcomes. If an outcome cannot be pickled, it becomes a Failure, and later outcomes are left
    out.

    Plain pickle takes half the time of cloudpickle, so it is tried first. It fails for classes of the driver's main
    script, which only cloudpickle can send.
    """
    with contextlib.suppress(Exception):
        return pickle.dumps(outcomes, pickle.HIGHEST_PROTOCOL)
    try:
        return cloudpickle.dumps(outcomes)
    except Exception:  # noqa: BLE001 -- of any class that is pickled: which one is looked for
        kept: list[Outcome] = []
    for outcome in outcomes:
        try:
            cloudpickle.dumps(outcome)
        except Exception as error:  # noqa: BLE001 -- it travels as a value
            result = getattr(outcome, "value", outcome)
            wrong = not_sent(result, "result", error, cloudpickle.dumps)
            return cloudpickle.dumps([*kept, Failure.of(wrong)])
        kept.append(outcome)
    return cloudpickle.dumps(kept)


class Connection:
    """The driver's end of the connection to one worker.

    Any thread may call `send` and `fail`, which return without waiting. All other methods are only for the thread of
    `Connections`.
    """

    def __init__(
        self, path: Path, post: Callable[[Callable[[], None]], None], poll: select.epoll
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._socket.setblocking(False)
        self.fd = self._socket.fileno()
        self._post = post
        self._poll = poll
        # Callbacks of the open requests, oldest first
        self._settles: collections.deque[Settle] = collections.deque()
        self._failure: Failure | None = None
        self._incoming, self._outgoing = bytearray(), bytearray()

    def send(self, settle: Settle, requests: Sequence[Request]) -> None:
        """Send requests to the worker as one message, and return without waiting. Raise the error if pickling fails.

        `settle`: called with the outcomes of the requests, or with a Failure if the connection has failed.
        """
        try:
            message = cloudpickle.dumps(list(requests))
        except Exception as error:
            for method, positional, named in requests:
                for values in (positional, named):
                    if not is_sent(values, cloudpickle.dumps):
                        noun = f"arguments of {method}"
                        raise not_sent(
                            values, noun, error, cloudpickle.dumps
                        ) from error
            raise
        self._post(functools.partial(self._begin, settle, message))

    def fail(self, failure: Failure) -> None:
        """End all requests that have no answer, and all later requests, with `failure`."""
        self._post(functools.partial(self._end, failure))

    def work(self, events: int) -> None:
        """Write pending bytes and read answers, as far as the socket allows without blocking.

        `events`: events that epoll has reported for the socket.
        """
        if events & select.EPOLLOUT:
            self._write()
        if events & ~select.EPOLLOUT:
            self._read()

    def close(self) -> None:
        """Close the socket. A second call does nothing."""
        if not self.closed:
            self._poll.unregister(self.fd)
            self._socket.close()

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def _begin(self, settle: Settle, message: bytes) -> None:
        if self._failure is not None:
            settle(self._failure)
            return
        self._settles.append(settle)
        self._outgoing += _LENGTH.pack(len(message)) + message
        self._write()

    def _end(self, failure: Failure) -> None:
        self._read()
        self.close()
        self._failure = failure
        while self._settles:
            self._settles.popleft()(failure)

    def _write(self) -> None:
        while self._outgoing and not self.closed:
            try:
                del self._outgoing[: self._socket.send(self._outgoing)]
            except BlockingIOError:
                self._poll.modify(self.fd, select.EPOLLIN | select.EPOLLOUT)
                return
            except ConnectionError:
                self._outgoing.clear()
        if not self.closed:
            self._poll.modify(self.fd, select.EPOLLIN)

    def _read(self) -> None:
        while not self.closed:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self.close()
            self._incoming += data
            while len(self._incoming) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(self._incoming)[0]
                if len(self._incoming) < end:
                    break
                message = bytes(memoryview(self._incoming)[_LENGTH.size : end])
                del self._incoming[:end]
                self._settles.popleft()(_outcomes(message))


class Connections:
    """All connections of the driver to workers on its machine, and the thread that reads and writes all of them."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._open: dict[int, Connection] = {}
        self._posted: collections.deque[tuple[Connection, Callable[[], None]]] = (
            collections.deque()
        )
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._poll.register(self._woken.fileno(), select.EPOLLIN)
        self._over = False
        self._thread = threading.Thread(
            target=self._work, name="connections", daemon=True
        )
        self._thread.start()

    def open(self, path: Path) -> Connection:
        """Connect to the Service of a worker on this machine, and return the connection. Raise OSError if this fails.

        `path`: path of the Service's socket.
        """

        def post(act: Callable[[], None]) -> None:
            self._posted.append((connection, act))
            # The thread is awake already, or the pipe is closed.
            with contextlib.suppress(BlockingIOError, OSError):
                self._wake.send(b"1")

        connection = Connection(path, post, self._poll)
        self._open[connection.fd] = connection
        self._poll.register(connection.fd, select.EPOLLIN)
        return connection

    def close(self) -> None:
        """Close all connections and end the thread. A second call does nothing."""
        if not self._over:
            self._over = True
            self._wake.close()
            self._thread.join(_END_S)
            for connection in self._open.values():
                connection.close()
            self._woken.close()
            self._poll.close()

    def _work(self) -> None:
        while not self._over:
            for fd, events in self._poll.poll():
                if fd == self._woken.fileno():
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(_READ_BYTES)
                elif (ready := self._open.get(fd)) is not None:
                    self._do(ready, functools.partial(ready.work, events))
            while self._posted:
                self._do(*self._posted.popleft())

    def _do(self, connection: Connection, act: Callable[[], None]) -> None:
        """Run `act`, an action of `connection`. If it raises an error, only this connection fails."""
        try:
            act()
        except Exception as error:
            logging.getLogger("rlplace").exception("the connection to a worker fails")
            connection.close()
            connection.fail(Failure.of(error))
        if connection.closed and self._open.get(connection.fd) is connection:
            del self._open[connection.fd]


def _outcomes(message: bytes) -> Sequence[Outcome] | Failure:
    try:
        outcomes: Sequence[Outcome] | Failure = cloudpickle.loads(message)
    except Exception as error:  # noqa: BLE001 -- a class may not exist here, or not like to be made: the call fails
        return Failure.of(error)
    return outcomes
