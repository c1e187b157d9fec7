"""Messages between a connection and its channel server: a small envelope, and large buffers behind it as frames.

Both sides decode pickles, which runs code: nothing here may see a message of a peer that was not authenticated.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import zmq

from rlplace.comm import codec

INLINE_BYTES = 32 << 10  # above this, credit is granted before data moves, and buffers are sent without a copy

# What a server sends without being asked, instead of a serial.
WELCOME, HERE, FORGOTTEN, CLOSED = -1, -2, -3, -4

Mark = bytes | tuple[int, ...]  # an item: in the envelope, or the lengths of its pieces, which follow in frames
Frame = bytes | memoryview


class Request(NamedTuple):
    """From a client. `serial` is its own count; a request that is sent again keeps it."""

    serial: int
    method: str
    channel: str
    owner: str
    done: tuple[int, ...]  # serials whose answers have arrived and are not needed again
    arguments: tuple[Any, ...]


class Reply(NamedTuple):
    """From the server: a value, an error, or the marks of items."""

    serial: int
    value: Any = None
    error: BaseException | None = None
    marks: tuple[Mark, ...] = ()


def pack(message: Request | Reply) -> bytes:
    return pickle.dumps(tuple(message), 5)


def request_of(envelope: bytes) -> Request:
    return Request(*pickle.loads(envelope))


def reply_of(envelope: bytes) -> Reply:
    return Reply(*pickle.loads(envelope))


def enclose(items: Iterable[codec.Packed], frame_bytes: int) -> tuple[tuple[Mark, ...], list[Frame]]:
    """Marks for the envelope and the frames behind it, of at most `frame_bytes`, which alias the arrays of items."""
    marks: list[Mark] = []
    frames: list[Frame] = []
    for packed in items:
        if isinstance(packed, bytes):
            marks.append(packed)
            continue
        pieces = [memoryview(piece) for piece in packed]
        marks.append(tuple(piece.nbytes for piece in pieces))
        frames += (piece[at : at + frame_bytes] for piece in pieces for at in range(0, piece.nbytes, frame_bytes))
    return tuple(marks), frames


def disclose(marks: Iterable[Mark], frames: Sequence[zmq.Frame]) -> list[codec.Packed]:
    """The items again, writable. Arrays of large ones live in the received frames; no other holds these."""
    rest = iter(frames)
    return [mark if isinstance(mark, bytes) else tuple([_piece(size, rest) for size in mark]) for mark in marks]


def _piece(size: int, frames: Iterator[zmq.Frame]) -> codec.Buffer:
    """What arrived in one frame is not copied if it is large: it has memory of its own, aligned to 8 bytes."""
    if not size:
        return bytearray()
    first = next(frames)
    if len(first) == size:
        return first.buffer if size > INLINE_BYTES else bytearray(first.bytes)
    whole = np.empty(size, np.uint8)
    at, frame = 0, first
    while True:
        whole[at : at + len(frame)] = frame.buffer
        at += len(frame)
        if at == size:
            return whole
        frame = next(frames)
