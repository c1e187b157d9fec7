"""The arena of a job folder: one file of shared memory in which the processes of a node allocate and free segments.

::

    words of the file    header │ free lists by class │ segment │ segment │ segment │ ...  END        (sparse after END)
    a segment            SIZE HOLDER NEXT MEMORY SERIAL PIECES │ lengths of the pieces │ piece │ piece

Free lists are shared: a segment that one process made and another freed is used again by whichever comes next. A
segment that is too small or too large for what is needed gives its memory back to the kernel before new memory is
taken, so the arena never holds more than the most that was in use at a time, and one segment. A segment has at every
moment one holder: the process that writes it, the channel in which it lies, the process that takes it. What a dead
process held is freed by the next that finds no room, and a change that it left half made is repaired.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import resource
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.comm import processes
from rlplace.comm.processes import SharedLock
from rlplace.comm.shared_memory.folder import FULL, allocate, free_bytes, spill_of
from rlplace.errors import ChannelBroken, ChannelTimeout, OutputError
from rlplace.units import show_bytes

_LOG = logging.getLogger(__name__)

# ── header, in words ─────────────────────────────────────────────────────────────────────────────────────────────────
LOCK = 0  # eight words
CHANGING, END, LOOKED, WARM = range(8, 12)  # LOOKED: real
_CLASSES = 8 * 34
# WARM, EMPTY: heads of the free lists with memory and without, by class
EMPTY = WARM + _CLASSES
_FIRST_SEGMENT = 8192  # byte

# ── a segment, in words after its first byte ─────────────────────────────────────────────────────────────────────────
# SIZE: bytes with this header; MEMORY: whether it has any
SIZE, HOLDER, NEXT, MEMORY, SERIAL, PIECES = range(6)
FREE = 0  # instead of a process as HOLDER; a channel is minus its number
_HEADER_BYTES = 64
_ALIGNMENT = 64  # bytes: a cache line
_LARGE = 32 << 10  # bytes: pieces from here on are copied by numpy
_PAGE = 4096

SMALLEST = 16 << 10  # bytes
_SMALLEST_BITS = 14
_MOST_BYTES = 1 << 43  # addresses of an arena
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: maps pages in one go; one by one costs more than copying
_LOOK_S = 1.0  # how often the holders of all segments are looked at
_PATIENCE_S = 10.0


class NoRoomError(Exception):
    """The file system of the arena is full."""


def segment_bytes(size_bytes: int) -> int:
    """Eight sizes between a power of two and the next, so that at most an eighth is wasted."""
    step = max(SMALLEST, 1 << max(0, (size_bytes - 1).bit_length() - 4))
    return max(1, -(-size_bytes // step)) * step


class Arena:
    """This process' hold on the arena. Thread-safe. An address may be odd: the last bit is its caller's."""

    def __init__(self, folder: Path) -> None:
        """NoRoomError when there is no memory for it, OutputError when this process may not have so many addresses."""
        self._folder = folder
        path = folder / "arena"
        try:
            if not path.exists():
                _make(path)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _lost(folder) from None
        except OSError as error:
            raise _no_room(error) from None
        weakref.finalize(self, os.close, self._descriptor)
        try:
            self._map = mmap.mmap(self._descriptor, 0)
        except OSError as error:
            size = show_bytes(os.fstat(self._descriptor).st_size)
            what = f"this process cannot map the {size} of addresses in which large items lie"
            why = f"{error.strerror}; addresses are no memory, and this process has a limit of them"
            raise OutputError.about(
                "shm-full", _key(folder), what, why=why, fix="ulimit -v unlimited"
            ) from None
        self._lock = SharedLock(self._map, LOCK)
        self._data = memoryview(self._map)
        self._words, self._reals = self._data.cast("q"), self._data.cast("d")
        # Segments to free with the next change, and their holders
        self._late: deque[tuple[int, int]] = deque()
        self._stuck = False  # the last wait for the lock was in vain
        self._me = processes.this_process()
        # Segment: serial of its memory that is mapped here
        self._populated: dict[int, int] = {}
        processes.in_forks(self.enter_process)

    def enter_process(self) -> None:
        self._me = processes.this_process()
        self._late.clear()  # the parent frees them

    # ── a segment's way ──────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, pieces: Sequence[Any]) -> int:
        """Copy contiguous `pieces` into a segment that this process holds. NoRoomError when there is no memory."""
        sizes = [
            len(piece) if type(piece) is bytes else memoryview(piece).nbytes
            for piece in pieces
        ]
        table = array("q", sizes).tobytes()
        size = _HEADER_BYTES + _aligned(len(table)) + sum(map(_aligned, sizes))
        segment = self._allocate(segment_bytes(size))
        try:
            self._words[segment // 8 + PIECES] = len(sizes)
            self._populate(segment)
            at = segment + _HEADER_BYTES
            self._map[at : at + len(table)] = table
            at += _aligned(len(table))
            for piece, length in zip(pieces, sizes, strict=True):
                if length < _LARGE:
                    self._map[at : at + length] = piece
                else:  # numpy lets other threads run meanwhile, as mmap does not
                    np.copyto(self._bytes(at, length), np.frombuffer(piece, np.uint8))
                at += _aligned(length)
        except BaseException:
            self.free(segment)
            raise
        return segment

    def size(self, address: int) -> int:
        """Return the bytes of all pieces of a segment."""
        segment = address & -2
        at = (segment + _HEADER_BYTES) // 8
        return sum(self._words[at : at + self._words[segment // 8 + PIECES]])

    def pass_to(self, address: int, channel: int) -> None:
        """Make a channel the holder, or this process for 0. Under the lock of the channel that it enters or leaves."""
        self._words[(address & -2) // 8 + HOLDER] = -channel or self._me

    def copy(self, address: int, own: Callable[[int], Bytes]) -> list[Any]:
        """The pieces in memory of the caller's own, large ones in that of `own`; the segment goes back."""
        segment = address & -2
        try:
            self._populate(segment)
            at = segment + _HEADER_BYTES
            sizes = self._words[
                at // 8 : at // 8 + self._words[segment // 8 + PIECES]
            ].tolist()
            at += _aligned(8 * len(sizes))
            pieces: list[Any] = []
            for length in sizes:
                if length < _LARGE:
                    pieces.append(bytearray(self._data[at : at + length]))
                else:
                    pieces.append(own(length))
                    np.copyto(pieces[-1], self._bytes(at, length))
                at += _aligned(length)
            return pieces
        finally:
            self.free(segment)

    def free(self, address: int, channel: int = 0) -> None:
        """Free what `channel` (0: this process) still holds; with the next change if a stopped process has the lock."""
        self._late.append((address & -2, -channel or self._me))
        try:
            with self._change(0.0 if self._stuck else _PATIENCE_S):
                self._free_late()
        except ChannelTimeout:
            self._stuck = True

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _bytes(self, at: int, length: int) -> Bytes:
        return np.frombuffer(self._map, np.uint8, length, at)

    def _populate(self, segment: int) -> None:
        first = segment // 8
        serial = self._words[first + SERIAL]
        if self._populated.get(segment) != serial:
            # An older kernel maps the pages one by one
            with contextlib.suppress(OSError):
                self._map.madvise(_POPULATE_WRITE, segment, self._words[first + SIZE])
            self._populated[segment] = serial

    def _allocate(self, size: int) -> int:
        """A segment of at least `size` bytes with memory, held by this process."""
        with self._change():
            self._free_late()
            segment = self._pop_warm(size)
            if not segment and self._free_of_dead(_LOOK_S):
                segment = self._pop_warm(size)
            if segment:
                return segment
            self._drop_idle(size)
            segment = self._pop(EMPTY + _class_of(size)) or self._new(size)
        try:
            self._take_memory(segment, size)
            with self._change():
                self._words[segment // 8 + MEMORY] = 1
                self._words[segment // 8 + SERIAL] += 1
        except OSError as error:  # also a wait for the lock that was in vain
            self.free(segment)
            raise _no_room(error) from None
        return segment

    def _take_memory(self, segment: int, size: int) -> None:
        """Without the lock: the kernel clears the pages, which takes as long as a copy."""
        try:
            os.posix_fallocate(self._descriptor, segment, size)
        except OSError as full:
            if full.errno not in FULL:
                raise
            with self._change():
                self._free_of_dead(0.0)
                self._drop_idle(_MOST_BYTES)
            os.posix_fallocate(self._descriptor, segment, size)

    # ── under the lock ───────────────────────────────────────────────────────────────────────────────────────────────

    def _pop(self, head: int) -> int:
        """The first segment of a free list, the last freed, held by this process; 0 if there is none."""
        words = self._words
        segment: int = words[head]
        if segment:
            words[head] = words[segment // 8 + NEXT]
            words[segment // 8 + HOLDER] = self._me
        return segment

    def _push(self, segment: int) -> None:
        words = self._words
        first = segment // 8
        head = (WARM if words[first + MEMORY] else EMPTY) + _class_of(
            words[first + SIZE]
        )
        words[first + HOLDER] = FREE
        words[first + NEXT] = words[head]
        words[head] = segment

    def _pop_warm(self, size: int) -> int:
        """A free segment with memory that is not much too large; 0 if there is none."""
        for kind in range(_class_of(size), _class_of(2 * size) + 1):
            if self._words[WARM + kind]:
                return self._pop(WARM + kind)
        return 0

    def _new(self, size: int) -> int:
        """Addresses that were not used before, without memory."""
        words = self._words
        segment: int = words[END]
        if segment + size > len(self._map):
            raise NoRoomError
        try:
            os.posix_fallocate(self._descriptor, segment, _PAGE)  # for its header
        except OSError as error:
            raise _no_room(error) from None
        words[segment // 8 + SIZE] = size
        words[segment // 8 + MEMORY] = 0
        words[segment // 8 + HOLDER] = self._me
        words[END] = segment + size
        return segment

    def _free_late(self) -> None:
        self._stuck = False
        while self._late:
            segment, holder = self._late.popleft()
            if self._words[segment // 8 + HOLDER] == holder:
                self._give_back(segment)

    def _give_back(self, segment: int) -> None:
        """Free a segment, also one whose holder was still to get memory for it."""
        if not self._words[segment // 8 + MEMORY]:
            self._remove_memory(segment)
        self._push(segment)

    def _drop_idle(self, size: int) -> None:
        """Give memory of free segments back to the kernel, the smallest first, until it was `size` bytes or all."""
        for head in range(WARM, WARM + _CLASSES):
            while self._words[head] and size > 0:
                segment = self._pop(head)
                self._words[segment // 8 + MEMORY] = 0
                self._give_back(segment)
                size -= self._words[segment // 8 + SIZE]

    def _remove_memory(self, segment: int) -> None:
        """All but the page with the header."""
        # A file system that cannot: the memory stays until it is used again
        with contextlib.suppress(OSError):
            self._map.madvise(
                mmap.MADV_REMOVE,
                segment + _PAGE,
                self._words[segment // 8 + SIZE] - _PAGE,
            )

    def _free_of_dead(self, pause_s: float) -> bool:
        """Free what dead processes held, if none has looked for `pause_s`; whether there was any."""
        words = self._words
        now = time.monotonic()
        if 0 <= now - self._reals[LOOKED] < pause_s:
            return False
        self._reals[LOOKED] = now
        holders = {words[segment // 8 + HOLDER] for segment in self._segments()}
        dead = {
            holder for holder in holders if holder > 0 and not processes.alive(holder)
        }
        for segment in self._segments():
            if words[segment // 8 + HOLDER] in dead:
                self._give_back(segment)
        return bool(dead)

    def _segments(self) -> Iterator[int]:
        segment = _FIRST_SEGMENT
        while segment < self._words[END]:
            yield segment
            segment += self._words[segment // 8 + SIZE]

    def _repair(self) -> None:
        """A process died in the middle of a change: make the lists anew from what the segments say."""
        words = self._words
        words[CHANGING] = self._me
        for head in range(WARM, EMPTY + _CLASSES):
            words[head] = 0
        for segment in self._segments():
            if words[segment // 8 + HOLDER] == FREE:
                self._push(segment)

    @contextlib.contextmanager
    def _change(self, patience_s: float | None = None) -> Iterator[None]:
        """The lock, for one change; a change that was broken off is repaired first. ChannelTimeout when it is kept."""
        if not self._lock.acquire(
            timeout=_PATIENCE_S if patience_s is None else patience_s
        ):
            holder = self._words[CHANGING]
            name = (
                f"process {processes.pid_of(holder)}" if holder else "another process"
            )
            what = (
                f"this process waited {_PATIENCE_S:.0f} s for the lock of large items"
            )
            why = f"{name} is in the middle of a change and does not go on: it is stopped, or has no processor"
            fix = "let it go on or end it; a dead process holds up no other"
            raise ChannelTimeout.about(
                "channel-timeout", _key(self._folder), what, why=why, fix=fix
            )
        try:
            if self._words[CHANGING]:
                self._repair()
            self._words[CHANGING] = self._me
            try:
                yield
            except NoRoomError:  # raised before anything was changed
                self._words[CHANGING] = 0
                raise
            self._words[CHANGING] = 0
        finally:
            self._lock.release()


def _key(folder: Path) -> str:
    return f"shared memory of this node, {folder}"


def _lost(folder: Path) -> ChannelBroken:
    what = "the memory of the job is gone"
    why = "its folder was removed: the job has ended"
    return ChannelBroken.about("channel-broken", _key(folder), what, why=why)


def _no_room(error: OSError) -> Exception:
    if error.errno in FULL:
        return NoRoomError()
    return error


def _class_of(size: int) -> int:
    """The number of one of the sizes of `segment_bytes`, which grow with it."""
    bits = size.bit_length() - 1  # 2**bits <= size
    if bits <= _SMALLEST_BITS + 3:
        return size // SMALLEST - 1
    return 8 * (bits - _SMALLEST_BITS - 2) + ((size >> (bits - 3)) - 8) - 1


def _aligned(length: int) -> int:
    return (length + _ALIGNMENT - 1) & -_ALIGNMENT


def _make(path: Path) -> None:
    """An empty arena, if no other process was quicker."""
    new = path.with_name(f"{path.name}.{processes.this_process():x}")
    system = os.statvfs(path.parent)
    size = min(max(16 * system.f_blocks * system.f_frsize, 1 << 36), _MOST_BYTES)
    largest_file = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if largest_file != resource.RLIM_INFINITY:
        size = min(size, largest_file // _PAGE * _PAGE)
    allocate(new, _FIRST_SEGMENT)
    try:
        with (
            open(new, "r+b") as file,
            mmap.mmap(file.fileno(), _FIRST_SEGMENT) as mapped,
        ):
            SharedLock.make(mapped, LOCK)
            mapped[8 * END : 8 * END + 8] = _FIRST_SEGMENT.to_bytes(8, "little")
            os.ftruncate(file.fileno(), size)
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)


Bytes = NDArray[np.uint8]

# Bytes; the C library gives larger blocks back to the kernel at once, and new pages
# cost twice a copy
LARGE = 32 << 20
_IDLE = 2  # blocks kept: one is in use while the next item arrives


class OwnedMemory:
    """Thread-safe, and without a lock: blocks come back from finalizers."""

    def __init__(self) -> None:
        self._idle: deque[Bytes] = deque(maxlen=_IDLE)

    def take(self, size_bytes: int) -> Bytes:
        """Unwritten memory, the caller's own for as long as anything made of the array lives."""
        if size_bytes < LARGE:
            return np.empty(size_bytes, np.uint8)
        block = np.empty(0, np.uint8)
        # What does not serve on the way to it is given up
        while not size_bytes <= block.nbytes <= 2 * size_bytes:
            try:
                block = self._idle.pop()
            except IndexError:
                block = np.empty(size_bytes, np.uint8)
        # No view of `block`: all that is made of the piece refers to the piece
        memory = block.data[:size_bytes]
        piece = np.frombuffer(memory, np.uint8)
        weakref.finalize(piece, self._idle.append, block).atexit = False
        return piece


_ON_DISK = 1  # added to the address of a segment that lies in the arena on disk


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
        opened, lock = _opened(processes.this_process())
        with lock:
            arenas = opened.get(folder)
            if arenas is None:
                arenas = opened[folder] = cls(folder)
            return arenas

    def write(self, pieces: Sequence[Any]) -> int:
        """The address of a copy in a segment. OutputError when neither shared memory nor the disk has room."""
        with contextlib.suppress(NoRoomError):
            return self._in_memory().write(pieces)
        with contextlib.suppress(NoRoomError):
            disk = self._on_disk()
            if disk is not None:
                return disk.write(pieces) + _ON_DISK
        what = f"no room for {show_bytes(sum(memoryview(p).nbytes for p in pieces))} more, nor on disk"
        why = f"{show_bytes(free_bytes(self._folder))} are free; items wait there until they are taken"
        fix = "more shared memory (docker run --shm-size=...), or channels of less capacity"
        raise OutputError.about("shm-full", _key(self._folder), what, why=why, fix=fix)

    def copy(self, address: int) -> tuple[Any, ...]:
        """The pieces in memory of the caller's own; the segment goes back."""
        return tuple(self.of_segment(address).copy(address, self._owned.take))

    def of_segment(self, address: int) -> Arena:
        """The arena in which a segment lies."""
        arena = self._on_disk() if address & _ON_DISK else self._in_memory()
        if arena is None:
            raise _lost(self._folder)
        return arena

    def _in_memory(self) -> Arena:
        with self._lock:
            if self._memory is None:
                self._memory = Arena(self._folder)
            return self._memory

    def _on_disk(self) -> Arena | None:
        with self._lock:
            place = spill_of(self._folder) if self._disk is None else None
            if place is not None:
                slower = (
                    "%s is full: what does not fit goes through %s, which is slower"
                )
                _LOG.warning(slower, self._folder.parent, place.resolve())
                self._disk = Arena(place)
            return self._disk


@functools.cache
def _opened(
    of_process: int,
) -> tuple[weakref.WeakValueDictionary[Path, Arenas], threading.Lock]:
    return weakref.WeakValueDictionary(), threading.Lock()
