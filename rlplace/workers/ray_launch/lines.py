"""Requests to the workers of the driver's machine and their answers, by sockets: a call by Ray costs milliseconds.

::

    driver ── Line.send ──▶ a socket in the job's private folder ──▶ Service.answer, in the worker's own thread
    driver ◀── one thread takes in the answers of all lines ◀────────┘

A message is its length and a pickle. Answers come in the order of the requests. That a worker died is told by Ray,
which knows why: until then its requests are open.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ray import cloudpickle

from rlplace.workers.launch.group import Settle
from rlplace.workers.launch.host import Failure, Outcome, Request

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 18
_END_S = 5.0  # for the thread to end; it never waits for anything else


class Service:
    """A worker's end. Its requests come from the process that connects to `path` first."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"calls-{secrets.token_hex(4)}"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self.path))
        self._listening.listen(1)

    def answer(self, run: Callable[[Sequence[Request]], list[Outcome]]) -> None:
        """Answer requests until the worker was closed, or its driver is gone."""
        line, _ = self._listening.accept()
        self._listening.close()
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(ConnectionError), line, line.makefile("rb") as incoming:
            closed = False
            while not closed and (length := incoming.read(_LENGTH.size)):
                message = incoming.read(_LENGTH.unpack(length)[0])
                try:
                    requests = cloudpickle.loads(message)
                    closed = requests[-1][0] == "close"
                    answer = cloudpickle.dumps(run(requests))
                except Exception as error:  # noqa: BLE001 -- of any class that is made or pickled: it travels as a value
                    answer = cloudpickle.dumps(Failure.of(error))
                line.sendall(_LENGTH.pack(len(answer)) + answer)


class Line:
    """The driver's end of one worker. Thread-safe; `send` does not wait."""

    def __init__(self, path: Path, poll: select.epoll) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._socket.setblocking(False)
        self._poll = poll
        self._lock = threading.RLock()
        self._open: collections.deque[Settle] = collections.deque()
        self._failure: Failure | None = None
        self._incoming, self._outgoing = bytearray(), bytearray()
        self.number = self._socket.fileno()
        poll.register(self.number, select.EPOLLIN)

    def send(self, settle: Settle, requests: Sequence[Request]) -> None:
        """Send requests. `settle` gets their outcomes, or why there are none. Raises what pickling raises."""
        try:
            message = cloudpickle.dumps(list(requests))
        except Exception as error:
            error.add_note("in pickling the arguments of " + ", ".join(method for method, _, _ in requests))
            raise
        with self._lock:
            if self._failure is not None:
                settle(self._failure)
                return
            self._open.append(settle)
            if self.closed:  # Ray will say why
                return
            begun = bool(self._outgoing)
            self._outgoing += _LENGTH.pack(len(message)) + message
            if not begun:
                self._write()
                if self._outgoing:
                    self._poll.modify(self.number, select.EPOLLIN | select.EPOLLOUT)

    def fail(self, failure: Failure) -> None:
        """End all that is open, but for what is answered already."""
        with self._lock:
            self.take_in()
            self.close()
            self._failure = failure
            while self._open:
                self._open.popleft()(failure)

    def work(self, events: int) -> None:
        """Do what can be done now: write what is left, take in answers."""
        with self._lock:
            if events & select.EPOLLOUT:
                self._write()
                if not self._outgoing:
                    self._poll.modify(self.number, select.EPOLLIN)
            if events & ~select.EPOLLOUT:
                self.take_in()

    def take_in(self) -> None:
        """Settle what is answered."""
        while not self.closed:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self.close()
                return
            self._incoming += data
            while len(self._incoming) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(self._incoming)[0]
                if len(self._incoming) < end:
                    break
                message = bytes(memoryview(self._incoming)[_LENGTH.size : end])
                del self._incoming[:end]
                self._open.popleft()(_outcomes(message))

    def _write(self) -> None:
        while self._outgoing and not self.closed:
            try:
                del self._outgoing[: self._socket.send(self._outgoing)]
            except BlockingIOError:
                return
            except ConnectionError:
                self._outgoing.clear()

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Take in no more answers. Idempotent."""
        with self._lock:
            if not self.closed:
                self._poll.unregister(self.number)
                self._socket.close()


class Lines:
    """All lines of a driver, and the thread that takes in what is answered."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._lines: dict[int, Line] = {}
        self._wake, self._woken = socket.socketpair()
        self._poll.register(self._woken.fileno(), select.EPOLLIN)
        self._over = False
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    def open(self, path: Path) -> Line:
        """Connect to a Service of this machine. Raises OSError."""
        line = Line(path, self._poll)
        self._lines[line.number] = line
        return line

    def _work(self) -> None:
        while not self._over:
            for number, events in self._poll.poll():
                if (line := self._lines.get(number)) is not None:
                    line.work(events)

    def close(self) -> None:
        """Close all lines and end the thread. Idempotent."""
        if not self._over:
            self._over = True
            self._wake.close()
            self._thread.join(_END_S)
            for line in self._lines.values():
                line.close()
            self._woken.close()
            self._poll.close()


def _outcomes(message: bytes) -> Sequence[Outcome] | Failure:
    try:
        outcomes: Sequence[Outcome] | Failure = cloudpickle.loads(message)
    except Exception as error:  # noqa: BLE001 -- a class may not exist here, or not like to be made: the call fails
        return Failure.of(error)
    return outcomes
