"""What a connection and its channel server share: messages, the keys of a job, and how sockets are set up.

A message is a small envelope, and large buffers behind it as frames. Both sides decode pickles, which runs code:
nothing here may see a message of a peer that was not authenticated. Queues of sockets are unlimited, since credit
bounds them. The kernel gives up a dead connection in seconds: heartbeats of ZeroMQ would wait behind a large message in
the same stream and cut the connection in the middle of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import pickle
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import zmq
from zmq.utils import z85

from rlplace.comm import codec
from rlplace.errors import ClusterError

# Above this, credit is granted before data moves, and buffers are sent without a copy
INLINE_BYTES = 32 << 10

# What a server sends without being asked, instead of a serial.
WELCOME = -1
HERE = -2
FORGOTTEN = -3
CLOSED = -4

# An item: in the envelope, or the lengths of its pieces, which follow in frames
Mark = bytes | tuple[int, ...]
Frame = bytes | memoryview


class Request(NamedTuple):
    """From a client. `serial` is its own count; a request that is sent again keeps it."""

    serial: int
    method: str
    channel: str = ""
    owner: str = ""
    # Serials whose answers have arrived and are not needed again
    done: tuple[int, ...] = ()
    arguments: tuple[Any, ...] = ()


class Reply(NamedTuple):
    """From the server: a value, an error, or the marks of items."""

    serial: int
    value: Any = None
    error: BaseException | None = None
    marks: tuple[Mark, ...] = ()


def pack(message: Request | Reply) -> bytes:
    return pickle.dumps(tuple(message), 5)


def enclose(
    items: Iterable[codec.Packed], frame_bytes: int
) -> tuple[tuple[Mark, ...], list[Frame]]:
    """Marks for the envelope and the frames behind it, of at most `frame_bytes`, which alias the arrays of items."""
    marks: list[Mark] = []
    frames: list[Frame] = []
    for packed in items:
        if isinstance(packed, bytes):
            marks.append(packed)
            continue
        pieces = [memoryview(piece) for piece in packed]
        marks.append(tuple(piece.nbytes for piece in pieces))
        frames += (
            piece[at : at + frame_bytes]
            for piece in pieces
            for at in range(0, piece.nbytes, frame_bytes)
        )
    return tuple(marks), frames


def disclose(marks: Iterable[Mark], frames: Sequence[zmq.Frame]) -> list[codec.Packed]:
    """The items again, writable. Arrays of large ones live in the received frames; no other holds these."""
    rest = iter(frames)
    return [
        mark
        if isinstance(mark, bytes)
        else tuple([_piece(size, rest) for size in mark])
        for mark in marks
    ]


def _piece(size: int, frames: Iterator[zmq.Frame]) -> codec.Buffer:
    """What arrived in one frame is not copied if it is large: it has memory of its own, aligned to 8 bytes."""
    whole = np.empty(size, np.uint8)
    at = 0
    while at < size:
        frame = next(frames)
        if len(frame) == size > INLINE_BYTES:
            return frame.buffer
        whole[at : at + len(frame)] = frame.buffer
        at += len(frame)
    return whole


@dataclasses.dataclass(frozen=True, slots=True)
class JobKeys:
    """CURVE: all is encrypted, and each side proves that it is of this job; costs most of a fast network's speed."""

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
        (server_public, server_secret), (client_public, client_secret) = (
            zmq.curve_keypair(),
            zmq.curve_keypair(),
        )
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
        return len(credentials) == 1 and secrets.compare_digest(
            z85.encode(credentials[0]), self.client_public
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobPassword:
    """PLAIN: keeps strangers and other jobs out, hides nothing. For an interface that only the cluster uses."""

    mechanism: ClassVar[bytes] = b"PLAIN"
    # Large: there is nothing to prepare, and joining frames is a copy
    frame_bytes: ClassVar[int] = 32 << 20

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
        return len(credentials) == 2 and secrets.compare_digest(
            credentials[1], self.password.encode()
        )


Keys = JobKeys | JobPassword


PROBE_S = 1.0  # a channel server looks this often for clients that are gone
LOST_S = 3.0  # how long either side waits for a lost connection to come back
SILENT_S = 4.0  # after this long without a sign of the other machine, TCP gives up the connection


def endure(socket: zmq.Socket) -> None:
    """For both ends, before they bind or connect."""
    socket.set_hwm(0)  # credit bounds what is under way, not the socket
    socket.linger = 0
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 1  # s
    socket.tcp_keepalive_intvl = 1
    socket.tcp_keepalive_cnt = int(SILENT_S) - 1
    socket.tcp_maxrt = int(SILENT_S * 1000)  # ms


def listen(socket: zmq.Socket, host: str) -> str:
    """Binds to a free port of this one address; the endpoint for clients. Never all addresses of a machine."""
    with contextlib.suppress(ValueError):  # a name is no address
        if ipaddress.ip_address(host).is_unspecified:
            raise _refused(
                host,
                "this means every interface of the machine, and is no address to connect to",
            )
    try:
        socket.ipv6 = ":" in host
        socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
    except zmq.ZMQError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
            raise
        raise _refused(host, f"no interface of this machine has it: {error}") from error
    return socket.get_string(zmq.LAST_ENDPOINT)


def fd_of(socket: zmq.Socket) -> int:
    """File descriptor for an event loop. Edge-triggered: drain the socket before waiting again."""
    fd = socket.fd
    assert isinstance(fd, int)
    return fd


def has_message(socket: zmq.Socket) -> bool:
    """Whether a message is there. Also resets the signal of `fd_of`."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def receive(socket: zmq.Socket) -> tuple[bytes, Sequence[zmq.Frame]]:
    """The envelope and the frames behind it, without waiting: zmq.Again when nothing is there."""
    envelope = socket.recv(zmq.NOBLOCK)
    return envelope, socket.recv_multipart(copy=False) if socket.getsockopt(
        zmq.RCVMORE
    ) else ()


def _refused(host: str, why: str) -> ClusterError:
    what = "cannot listen on this address"
    fix = "the address by which the other nodes reach this one, such as 10.0.0.1"
    return ClusterError.about(
        "server-address", "channel server", what, got=repr(host), why=why, fix=fix
    )
