"""The items of a channel in shared memory: in their entries where they are small, else in segments of the arena."""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from rlplace.comm import codec
from rlplace.comm.shared_memory import process
from rlplace.comm.shared_memory.arena import Arena, NoRoomError, OwnedMemory, lost
from rlplace.comm.shared_memory.folder import free_bytes, spill_of
from rlplace.comm.table import E_DATA, E_LENGTH, E_SEGMENT, Table
from rlplace.errors import OutputError, Problem
from rlplace.units import show_bytes

_LOG = logging.getLogger(__name__)
_ON_DISK = 1  # added to the address of a segment that lies in the arena on disk


class Segment(NamedTuple):
    """A payload in an arena: its address there, which is even, or one more if that arena is on disk."""

    address: int


class Arenas:
    """The arenas of a job folder in this process: in shared memory, and on disk for what does not fit there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._memory: Arena | None = None
        self._disk: Arena | None = None
        self._owned = OwnedMemory()

    @classmethod
    def of(cls, folder: Path) -> Arenas:
        """The one of this process and folder, however many channels use it."""
        opened, lock = _opened(process.this_process())
        with lock:
            arenas = opened.get(folder)
            if arenas is None:
                arenas = opened[folder] = cls(folder)
            return arenas

    def write(self, packed: codec.Packed) -> Segment:
        """Copy an item into a segment. OutputError when neither shared memory nor the disk has room."""
        pieces = (packed,) if isinstance(packed, bytes) else packed
        with contextlib.suppress(NoRoomError):
            return Segment(self._in_memory().write(pieces))
        with contextlib.suppress(NoRoomError):
            disk = self._on_disk()
            if disk is not None:
                return Segment(disk.write(pieces) + _ON_DISK)
        raise _no_room(self._folder, sum(memoryview(piece).nbytes for piece in pieces))

    def copy(self, address: int) -> codec.Pieces:
        """The pieces in memory of the caller's own; the segment goes back."""
        return tuple(self.of_segment(address).copy(address, self._owned.take))

    def of_segment(self, address: int) -> Arena:
        """The arena in which a segment lies."""
        arena = self._on_disk() if address & _ON_DISK else self._in_memory()
        if arena is None:
            raise lost(self._folder)
        return arena

    def _in_memory(self) -> Arena:
        if self._memory is None:
            with self._lock:
                if self._memory is None:
                    self._memory = Arena(self._folder)
        return self._memory

    def _on_disk(self) -> Arena | None:
        if self._disk is None:
            with self._lock:
                place = spill_of(self._folder)
                if place is None:
                    return None
                _LOG.warning(
                    "%s is full: what does not fit goes through %s, which is slower",
                    self._folder.parent,
                    place.resolve(),
                )
                self._disk = Arena(place)
        return self._disk


class ItemStore:
    """Implements Store for one channel in shared memory."""

    def __init__(self, table: Table, mapped: mmap.mmap, arenas: Arenas, channel: int) -> None:
        """`channel`: its number, as holder of segments."""
        self._words, self._mapped = table.words, mapped
        self._room = table.inline_bytes
        self.pack = codec.Packers(self._room).pack
        self._channel = channel
        self.arenas = arenas

    def goes_along(self, packed: codec.Packed) -> bool:
        return type(packed) is bytes and len(packed) <= self._room

    def write(self, packed: codec.Packed) -> Segment:
        return self.arenas.write(packed)

    def release(self, payload: bytes | Segment) -> None:
        if isinstance(payload, Segment):
            self.arenas.of_segment(payload.address).free(payload.address)

    def open(self, payload: bytes | Segment) -> Any:
        return codec.unpack(self.packed(payload))

    def packed(self, payload: bytes | Segment) -> codec.Packed:
        """What was taken, the caller's own from now on."""
        return self.arenas.copy(payload.address) if isinstance(payload, Segment) else payload

    # ── under the channel's lock ─────────────────────────────────────────────────────────────────────────────────────

    def place(self, entry: int, payload: bytes | Segment) -> None:
        words = self._words
        if type(payload) is bytes:
            at, length = (entry + E_DATA) * 8, len(payload)
            self._mapped[at : at + length] = payload
            words[entry + E_LENGTH] = length
            words[entry + E_SEGMENT] = 0
        else:
            assert isinstance(payload, Segment)
            words[entry + E_SEGMENT] = payload.address
            self.arenas.of_segment(payload.address).pass_to(payload.address, self._channel)

    def take(self, entry: int) -> bytes | Segment:
        words = self._words
        address = words[entry + E_SEGMENT]
        if address:
            self.arenas.of_segment(address).pass_to(address, 0)
            return Segment(address)
        at = (entry + E_DATA) * 8
        return self._mapped[at : at + words[entry + E_LENGTH]]

    def drop(self, entry: int) -> None:
        address = self._words[entry + E_SEGMENT]
        if address:
            self.arenas.of_segment(address).free(address, self._channel)


def _no_room(folder: Path, size: int) -> OutputError:
    return OutputError(
        Problem(
            code="shm-full",
            key=f"shared memory of this node, {folder}",
            what=f"no room for {show_bytes(size)} more, nor on disk",
            why=f"{show_bytes(free_bytes(folder))} are free; items wait there until they are taken",
            fix="more shared memory (docker run --shm-size=...), or channels of less capacity",
        )
    )


@functools.cache
def _opened(of_process: int) -> tuple[weakref.WeakValueDictionary[Path, Arenas], threading.Lock]:
    return weakref.WeakValueDictionary(), threading.Lock()
