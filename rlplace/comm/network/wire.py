"""What a connection and its channel server share: messages, the keys of a job, and socket options.

A message is a small envelope, with large buffers behind it as frames. Both sides decode pickles, which can run code,
so messages of an unauthenticated peer must never get here. Socket queues are unlimited, since credit bounds them. The
kernel gives up a dead connection within seconds. ZeroMQ's heartbeats are not used: they would wait behind a large
message in the same stream, and cut the connection in the middle of it.
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

from rlplace.codes import problem
from rlplace.comm import codec
from rlplace.errors import ClusterError

# Larger items get credit before their data moves, and are sent without a copy
INLINE_BYTES = 32 << 10

# Messages that a server sends without a request, by their number in place of a serial
WELCOME = -1
HERE = -2
FORGOTTEN = -3
CLOSED = -4

# An item: in the envelope, or the lengths of its pieces, which follow in frames
Mark = bytes | tuple[int, ...]
Frame = bytes | memoryview


class Request(NamedTuple):
    """A message of a client to the channel server.

    `serial`: number of the request at this client; a repeated request keeps its number. `method`, `arguments`: the
    operation, such as "put", and its arguments. `channel`: name of the channel. `owner`: name of the calling worker.
    `done`: numbers of the requests whose answers the client has received.
    """

    serial: int
    method: str
    channel: str = ""
    owner: str = ""
    # Serials whose answers have arrived and are not needed again
    done: tuple[int, ...] = ()
    arguments: tuple[Any, ...] = ()


class Reply(NamedTuple):
    """A message of the server: the answer to request `serial`.

    The answer is a value, an error, or marks of items. The mark of a small item is the item itself; the mark of a large
    item is the lengths of its pieces, which follow in frames.
    """

    serial: int
    value: Any = None
    error: BaseException | None = None
    marks: tuple[Mark, ...] = ()


def pack(message: Request | Reply) -> bytes:
    """Return a message as bytes, for the first frame. Large buffers of items are not in these bytes."""
    return pickle.dumps(tuple(message), 5)


def enclose(
    items: Iterable[codec.Packed],
    frame_bytes: int,
) -> tuple[tuple[Mark, ...], list[Frame]]:
    """Return the marks of packed items for the envelope (first frame) of a message, and the frames that follow it.

    The mark of a small item is the item itself. The mark of a large item is the lengths of its pieces, which are sent
    in the frames. `frame_bytes`: the most bytes of a frame. The frames share memory with the items' arrays.
    """
    marks: list[Mark] = []
    frames: list[Frame] = []
    for packed in items:
        if isinstance(packed, bytes):
            marks.append(packed)
            continue
        # Lengths go into the envelope, data into frames
        pieces = [memoryview(piece) for piece in packed]
        marks.append(tuple(piece.nbytes for piece in pieces))
        for piece in pieces:
            for at in range(0, piece.nbytes, frame_bytes):
                frames.append(piece[at : at + frame_bytes])
    return tuple(marks), frames


def disclose(marks: Iterable[Mark], frames: Sequence[zmq.Frame]) -> list[codec.Packed]:
    """Return the packed items of received marks and frames: the inverse of `enclose`.

    The pieces of large items are writable and may share memory with the frames.
    """
    rest = iter(frames)
    items: list[codec.Packed] = []
    for mark in marks:
        if isinstance(mark, bytes):
            items.append(mark)
        else:
            items.append(tuple([_piece(size, rest) for size in mark]))
    return items


def _piece(size: int, frames: Iterator[zmq.Frame]) -> codec.Buffer:
    """Return the next `size` bytes of the frames as a writable buffer.

    A large piece that fills one frame is not copied, since the frame has memory of its own, aligned to 8 bytes.
    """
    whole = np.empty(size, np.uint8)
    at = 0
    while at < size:
        frame = next(frames)
        if len(frame) == size > INLINE_BYTES:
            return frame.buffer
        # Small pieces, and pieces in several frames, are joined in new memory
        whole[at : at + len(frame)] = frame.buffer
        at += len(frame)
    return whole


@dataclasses.dataclass(frozen=True, slots=True)
class JobKeys:
    """Keys for ZeroMQ's CURVE mechanism: messages are encrypted, and each side proves that it belongs to this job.

    `frame_bytes`: the most bytes of a frame of a large item. Encryption costs most of the speed of a fast network.
    """

    mechanism: ClassVar[bytes] = b"CURVE"
    # A larger buffer is cut into frames of this size, so that the next frame is encrypted while one is sent. Encrypting
    # takes longer than sending; with both ends at work, throughput is half as much again.
    frame_bytes: ClassVar[int] = 1 << 20

    server_public: bytes
    server_secret: bytes = dataclasses.field(repr=False)
    client_public: bytes
    client_secret: bytes = dataclasses.field(repr=False)

    @classmethod
    def create(cls) -> JobKeys:
        """Return new random keys."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(server_public, server_secret, client_public, client_secret)

    def guard(self, server: zmq.Socket) -> None:
        """Set the job's keys on a listening socket, before the socket binds."""
        server.curve_server = True
        server.curve_publickey = self.server_public
        server.curve_secretkey = self.server_secret

    def show(self, client: zmq.Socket) -> None:
        """Set the job's keys on a connecting socket, before the socket connects."""
        client.curve_serverkey = self.server_public
        client.curve_publickey = self.client_public
        client.curve_secretkey = self.client_secret

    def admits(self, credentials: list[bytes]) -> bool:
        """Return whether `credentials`, which a client has sent by ZeroMQ, belong to a client of this job."""
        return len(credentials) == 1 and secrets.compare_digest(
            z85.encode(credentials[0]), self.client_public
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobPassword:
    """Password for ZeroMQ's PLAIN mechanism: clients of other jobs are refused, but messages are not encrypted.

    `frame_bytes`: the most bytes of a frame of a large item. Use it in a network that only the cluster uses.
    """

    mechanism: ClassVar[bytes] = b"PLAIN"
    # Large, since nothing is encrypted, and joining frames is a copy
    frame_bytes: ClassVar[int] = 32 << 20

    password: str = dataclasses.field(repr=False)

    @classmethod
    def create(cls) -> JobPassword:
        """Return a new random password."""
        return cls(password=secrets.token_urlsafe(32))

    def guard(self, server: zmq.Socket) -> None:
        """Make a listening socket require a password of its clients, before the socket binds."""
        server.plain_server = True

    def show(self, client: zmq.Socket) -> None:
        """Set the password on a connecting socket, before the socket connects."""
        client.plain_username = b"job"
        client.plain_password = self.password.encode()

    def admits(self, credentials: list[bytes]) -> bool:
        """Return whether `credentials`, which a client has sent by ZeroMQ, belong to a client of this job."""
        return len(credentials) == 2 and secrets.compare_digest(
            credentials[1], self.password.encode()
        )


Keys = JobKeys | JobPassword


PROBE_S = 1.0  # time between two checks of a channel server for lost clients
LOST_S = 3.0  # how long either side waits for a lost connection to come back
# Time without a sign of the other machine, until TCP gives up the connection
SILENT_S = 4.0


def endure(socket: zmq.Socket) -> None:
    """Make the queues of a socket unlimited, and make it detect lost connections early.

    Call this before the socket binds or connects.
    """
    # Credit bounds what is under way, not the socket
    socket.set_hwm(0)
    socket.linger = 0
    socket.tcp_keepalive = 1
    # S
    socket.tcp_keepalive_idle = 1
    socket.tcp_keepalive_intvl = 1
    socket.tcp_keepalive_cnt = int(SILENT_S) - 1
    # Ms
    socket.tcp_maxrt = int(SILENT_S * 1000)


def listen(socket: zmq.Socket, host: str) -> str:
    """Bind a socket to a free port of the address `host`; return the endpoint for clients.

    Raise ClusterError if the address is not of this machine, or is a wildcard address such as 0.0.0.0.
    """
    # An unspecified address, such as 0.0.0.0, means all addresses; a host name raises ValueError here
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            every = problem(
                "server-address", "channel server", repr(host), error="every-interface"
            )
            raise ClusterError(every)
    try:
        # Port * lets the kernel choose a free one
        socket.ipv6 = ":" in host
        socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
    except zmq.ZMQError as error:
        # These mean that the address is not of this machine
        if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
            raise
        foreign = problem(
            "server-address",
            "channel server",
            repr(host),
            error="no-interface",
            reason=error,
        )
        raise ClusterError(foreign) from error
    return socket.get_string(zmq.LAST_ENDPOINT)


def fd_of(socket: zmq.Socket) -> int:
    """Return a file descriptor that signals the messages of `socket` to an event loop.

    Edge-triggered: receive all messages before the next wait.
    """
    fd = socket.fd
    assert isinstance(fd, int)
    return fd


def has_message(socket: zmq.Socket) -> bool:
    """Return whether a message has arrived at `socket`, and reset the signal of the descriptor from `fd_of`."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def receive(socket: zmq.Socket) -> tuple[bytes, Sequence[zmq.Frame]]:
    """Return the envelope (first frame) and the further frames of the next message, without waiting.

    Raise zmq.Again if there is no message.
    """
    envelope = socket.recv(zmq.NOBLOCK)
    frames: Sequence[zmq.Frame] = ()
    if socket.getsockopt(zmq.RCVMORE):
        frames = socket.recv_multipart(copy=False)
    return envelope, frames
