"""The arena of a job folder: one file of shared memory in which the processes of a node allocate and free segments.

::

    words of the file    header │ free lists by class │ segment │ segment │ segment │ ...  END        (sparse after END)
    a segment            SIZE HOLDER NEXT MEMORY SERIAL PIECES │ lengths of the pieces │ piece │ piece

Free lists are shared: a segment that one process made and another one freed is reused by any process. Before new
memory is taken, free segments of an unsuitable size give theirs back to the kernel, so the arena never holds more
than the most that was in use at a time, plus one segment. A segment has one holder at every moment: the process that
writes it, the channel in which it lies, or the process that takes it. Segments of a dead process are freed by the
next process that finds no room, which also repairs a change that the dead process left unfinished.
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

from rlplace.codes import problem
from rlplace.comm import processes
from rlplace.comm.processes import SharedLock
from rlplace.comm.shared_memory.folder import FULL, allocate, free_bytes, spill_of
from rlplace.errors import ChannelBroken, ChannelTimeout, OutputError
from rlplace.units import show_bytes

_LOG = logging.getLogger(__name__)

# ── header, in words ─────────────────────────────────────────────────────────────────────────────────────────────────
LOCK = 0  # eight words
# LOOKED: real, the time of the last check for dead holders
CHANGING, END, LOOKED, WARM = range(8, 12)
_CLASSES = 8 * 34
# WARM, EMPTY: heads of the free lists of segments with memory and without, by class
EMPTY = WARM + _CLASSES
_FIRST_SEGMENT = 8192  # byte

# ── a segment, in words after its first byte ─────────────────────────────────────────────────────────────────────────
# SIZE: bytes, with this header; MEMORY: whether the segment has memory; SERIAL: number of its memory
SIZE, HOLDER, NEXT, MEMORY, SERIAL, PIECES = range(6)
FREE = 0  # as HOLDER; a process is its word, a channel is minus its number
_HEADER_BYTES = 64
_ALIGNMENT = 64  # bytes: a cache line
_LARGE = 32 << 10  # bytes from which on numpy copies a piece
_PAGE = 4096

SMALLEST = 16 << 10  # bytes
_SMALLEST_BITS = 14
_MOST_BYTES = 1 << 43  # size of an arena's addresses
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: maps all pages at once; one by one costs more than a copy
_LOOK_S = 1.0  # time between two checks for dead holders
_PATIENCE_S = 10.0  # longest wait for the lock


class NoRoomError(Exception):
    """Raised when the file system of an arena is full."""


def segment_bytes(size_bytes: int) -> int:
    """Return the size in bytes of a segment for `size_bytes` bytes.

    Segments have only certain sizes: eight between each power of two and the next. So at most an eighth is wasted.
    """
    step = max(SMALLEST, 1 << max(0, (size_bytes - 1).bit_length() - 4))
    return max(1, -(-size_bytes // step)) * step


class Arena:
    """An arena of segments (pieces of memory) in one file, as this process sees it. Thread-safe.

    Each segment in use has a holder, the process or the channel that has to free it. The address of a segment is its
    first byte in the file. Methods ignore the last bit of an address, which the caller may use for its own purposes.
    """

    def __init__(self, folder: Path) -> None:
        """Open the arena in `folder`, or create it if the folder has none.

        Raise NoRoomError if there is no memory for the arena, OutputError if this process cannot map all addresses of
        the arena, ChannelBroken if the folder is gone.
        """
        self._folder = folder
        path = folder / "arena"
        try:
            # The first process makes the file
            if not path.exists():
                _make(path)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _lost(folder) from None
        except OSError as error:
            raise _no_room(error) from None
        weakref.finalize(self, os.close, self._descriptor)
        try:
            # All addresses of the arena are mapped; its memory is taken segment by segment
            self._map = mmap.mmap(self._descriptor, 0)
        except OSError as error:
            size = show_bytes(os.fstat(self._descriptor).st_size)
            raise OutputError(
                problem(
                    "shm-full",
                    _key(folder),
                    error="not-mapped",
                    size=size,
                    reason=error.strerror,
                )
            ) from None
        self._lock = SharedLock(self._map, LOCK)
        self._data = memoryview(self._map)
        self._words = self._data.cast("q")
        self._reals = self._data.cast("d")
        # Segments to free with the next change, with their holders
        self._late: deque[tuple[int, int]] = deque()
        # Whether the last wait for the lock was in vain
        self._stuck = False
        self._me = processes.this_process()
        # Segment -> serial of its memory that is mapped in this process
        self._populated: dict[int, int] = {}
        processes.in_forks(self.enter_process)

    def enter_process(self) -> None:
        """Call this in a forked child: use the number of the child process, and drop the list of delayed frees.

        The parent process performs the delayed frees.
        """
        self._me = processes.this_process()
        # The parent frees them
        self._late.clear()

    # ── a segment's way ──────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, pieces: Sequence[Any]) -> int:
        """Copy `pieces`, contiguous buffers, into a new segment; return the segment's address.

        This process becomes the holder of the segment, which has to free it. Raise NoRoomError if there is no memory.
        """
        # Header, table of lengths, aligned pieces
        sizes: list[int] = []
        for piece in pieces:
            is_bytes = type(piece) is bytes
            sizes.append(len(piece) if is_bytes else memoryview(piece).nbytes)
        table = array("q", sizes).tobytes()
        size = _HEADER_BYTES + _aligned(len(table)) + sum(map(_aligned, sizes))
        segment = self._allocate(segment_bytes(size))
        try:
            self._words[segment // 8 + PIECES] = len(sizes)
            self._populate(segment)
            # Table of lengths, then the pieces
            at = segment + _HEADER_BYTES
            self._map[at : at + len(table)] = table
            at += _aligned(len(table))
            for piece, length in zip(pieces, sizes, strict=True):
                if length < _LARGE:
                    self._map[at : at + length] = piece
                else:
                    # numpy lets other threads run meanwhile, unlike mmap
                    np.copyto(self._bytes(at, length), np.frombuffer(piece, np.uint8))
                at += _aligned(length)
        except BaseException:
            self.free(segment)
            raise
        return segment

    def size(self, address: int) -> int:
        """Return the bytes of the content of the segment at `address`: the sum over its pieces."""
        segment = address & -2
        at = (segment + _HEADER_BYTES) // 8
        return sum(self._words[at : at + self._words[segment // 8 + PIECES]])

    def pass_to(self, address: int, channel: int) -> None:
        """Change the holder of the segment at `address`: the process or channel that has to free it.

        `channel`: number of the channel that becomes the holder; 0: this process. Call this under the lock of the
        channel that the segment enters or leaves.
        """
        self._words[(address & -2) // 8 + HOLDER] = -channel or self._me

    def copy(self, address: int, own: Callable[[int], Bytes]) -> list[Any]:
        """Return copies of the pieces of the segment at `address`, in memory of this process, and free the segment.

        `own`: allocates memory of the given number of bytes; it is called for large pieces.
        """
        segment = address & -2
        try:
            self._populate(segment)
            at = segment + _HEADER_BYTES
            count = self._words[segment // 8 + PIECES]
            sizes = self._words[at // 8 : at // 8 + count].tolist()
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
        """Free the segment at `address`, unless it has passed to another process or channel, which then frees it.

        `channel`: number of the channel that was the holder; 0: this process. If the lock cannot be acquired, the
        segment is freed with the next change of the arena.
        """
        self._late.append((address & -2, -channel or self._me))
        try:
            with self._change(0.0 if self._stuck else _PATIENCE_S):
                self._free_late()
        except ChannelTimeout:
            self._stuck = True

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _bytes(self, at: int, length: int) -> Bytes:
        """Return a view of `length` bytes of the arena, from byte `at`."""
        return np.frombuffer(self._map, np.uint8, length, at)

    def _populate(self, segment: int) -> None:
        """Map all pages of a segment at once, if this process has not mapped the segment's memory yet."""
        first = segment // 8
        serial = self._words[first + SERIAL]
        # Pages that were given back to the kernel and taken anew are not mapped
        if self._populated.get(segment) != serial:
            # Without it, as in an older kernel, pages are mapped one by one
            with contextlib.suppress(OSError):
                self._map.madvise(_POPULATE_WRITE, segment, self._words[first + SIZE])
            self._populated[segment] = serial

    def _allocate(self, size: int) -> int:
        """Return a segment of at least `size` bytes whose memory is allocated. This process is its holder.

        Raise NoRoomError if there is no memory.
        """
        with self._change():
            self._free_late()
            # A free segment with memory, also after segments of dead processes were freed
            segment = self._pop_warm(size)
            if not segment and self._free_of_dead(_LOOK_S):
                segment = self._pop_warm(size)
            if segment:
                return segment
            # Else new memory, in place of as much idle memory
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
        """Allocate the memory of a segment of `size` bytes. Raise OSError if there is no room.

        Call this without holding the lock, because the kernel clears the pages, which takes as long as a copy.
        """
        try:
            os.posix_fallocate(self._descriptor, segment, size)
        except OSError as full:
            if full.errno not in FULL:
                raise
            # Free all that can be freed, and try once more
            with self._change():
                self._free_of_dead(0.0)
                self._drop_idle(_MOST_BYTES)
            os.posix_fallocate(self._descriptor, segment, size)

    # ── under the lock ───────────────────────────────────────────────────────────────────────────────────────────────

    def _pop(self, head: int) -> int:
        """Remove and return the first segment of a free list, or return 0 if the list is empty.

        This process becomes the holder of the segment. `head`: index of the word that has the list's first segment.
        """
        words = self._words
        segment: int = words[head]
        if segment:
            words[head] = words[segment // 8 + NEXT]
            words[segment // 8 + HOLDER] = self._me
        return segment

    def _push(self, segment: int) -> None:
        """Put a segment at the front of the free list for segments of its size."""
        words = self._words
        first = segment // 8
        lists = WARM if words[first + MEMORY] else EMPTY
        head = lists + _class_of(words[first + SIZE])
        words[first + HOLDER] = FREE
        words[first + NEXT] = words[head]
        words[head] = segment

    def _pop_warm(self, size: int) -> int:
        """Remove and return a free segment of `size` to twice `size` bytes whose memory is allocated.

        This process becomes the holder of the segment. Return 0 if there is no such segment.
        """
        for kind in range(_class_of(size), _class_of(2 * size) + 1):
            if self._words[WARM + kind]:
                return self._pop(WARM + kind)
        return 0

    def _new(self, size: int) -> int:
        """Return a new segment of `size` bytes at addresses that were never used. Only its header has memory yet.

        Raise NoRoomError if all addresses are in use, or if there is no memory for the header.
        """
        words = self._words
        segment: int = words[END]
        if segment + size > len(self._map):
            raise NoRoomError
        try:
            # Memory for the page with its header only
            os.posix_fallocate(self._descriptor, segment, _PAGE)
        except OSError as error:
            raise _no_room(error) from None
        # Fill the header, then count the segment as used
        words[segment // 8 + SIZE] = size
        words[segment // 8 + MEMORY] = 0
        words[segment // 8 + HOLDER] = self._me
        words[END] = segment + size
        return segment

    def _free_late(self) -> None:
        """Free the segments whose freeing was delayed, except segments that have passed to another process or channel
        since.
        """
        self._stuck = False
        while self._late:
            segment, holder = self._late.popleft()
            if self._words[segment // 8 + HOLDER] == holder:
                self._give_back(segment)

    def _give_back(self, segment: int) -> None:
        """Put a segment into a free list.

        If the segment's memory was not allocated completely, give the memory back to the kernel.
        """
        if not self._words[segment // 8 + MEMORY]:
            self._remove_memory(segment)
        self._push(segment)

    def _drop_idle(self, size: int) -> None:
        """Give memory of free segments back to the kernel, the smallest segments first.

        Stop when `size` bytes are given back, or when no free segment has memory.
        """
        for head in range(WARM, WARM + _CLASSES):
            while self._words[head] and size > 0:
                segment = self._pop(head)
                self._words[segment // 8 + MEMORY] = 0
                self._give_back(segment)
                size -= self._words[segment // 8 + SIZE]

    def _remove_memory(self, segment: int) -> None:
        """Give all memory of a segment back to the kernel, except the page with the header."""
        # On a file system that cannot do this, the memory stays until it is used again
        with contextlib.suppress(OSError):
            self._map.madvise(
                mmap.MADV_REMOVE,
                segment + _PAGE,
                self._words[segment // 8 + SIZE] - _PAGE,
            )

    def _free_of_dead(self, pause_s: float) -> bool:
        """Free the segments of dead processes; return whether there were any such segments.

        Do nothing and return False if any process has done this within the last `pause_s` seconds.
        """
        words = self._words
        now = time.monotonic()
        if 0 <= now - self._reals[LOOKED] < pause_s:
            return False
        self._reals[LOOKED] = now
        # Each process is looked up once
        holders = {words[segment // 8 + HOLDER] for segment in self._segments()}
        dead = {
            holder for holder in holders if holder > 0 and not processes.alive(holder)
        }
        for segment in self._segments():
            if words[segment // 8 + HOLDER] in dead:
                self._give_back(segment)
        return bool(dead)

    def _segments(self) -> Iterator[int]:
        """Yield the addresses of all segments, in ascending order."""
        segment = _FIRST_SEGMENT
        while segment < self._words[END]:
            yield segment
            segment += self._words[segment // 8 + SIZE]

    def _repair(self) -> None:
        """Rebuild the free lists from the segments, after a process has died in the middle of a change."""
        words = self._words
        words[CHANGING] = self._me
        for head in range(WARM, EMPTY + _CLASSES):
            words[head] = 0
        for segment in self._segments():
            if words[segment // 8 + HOLDER] == FREE:
                self._push(segment)

    @contextlib.contextmanager
    def _change(self, patience_s: float | None = None) -> Iterator[None]:
        """Return a context manager that holds the lock for one change, and repairs an unfinished change first.

        Raise ChannelTimeout if the lock is not free within `patience_s` seconds (None: `_PATIENCE_S`).
        """
        limit_s = _PATIENCE_S if patience_s is None else patience_s
        # Name the process that keeps the lock
        if not self._lock.acquire(timeout=limit_s):
            holder = self._words[CHANGING]
            name = "another process"
            if holder:
                name = f"process {processes.pid_of(holder)}"
            raise ChannelTimeout(
                problem(
                    "channel-timeout",
                    _key(self._folder),
                    error="arena",
                    patience_s=_PATIENCE_S,
                    holder=name,
                )
            )
        try:
            # The previous holder died in the middle of a change
            if self._words[CHANGING]:
                self._repair()
            # A mark for a repair, if this process dies before the end of the change
            self._words[CHANGING] = self._me
            try:
                yield
            except NoRoomError:  # is raised before anything has changed
                self._words[CHANGING] = 0
                raise
            self._words[CHANGING] = 0
        finally:
            self._lock.release()


def _key(folder: Path) -> str:
    """Return the first words of errors about the arena in `folder`."""
    return f"shared memory of this node, {folder}"


def _lost(folder: Path) -> ChannelBroken:
    """Return the error for a job folder that was removed."""
    return ChannelBroken(problem("channel-broken", _key(folder), error="memory"))


def _no_room(error: OSError) -> Exception:
    """Return NoRoomError if `error` means a full file system, else `error` itself."""
    if error.errno in FULL:
        return NoRoomError()
    return error


def _class_of(size: int) -> int:
    """Return the number of a segment size: larger sizes have larger numbers. `size`: a result of `segment_bytes`."""
    # Below eight times the smallest size, sizes are its multiples; above, eight per power of two
    # 2**bits <= size
    bits = size.bit_length() - 1
    if bits <= _SMALLEST_BITS + 3:
        return size // SMALLEST - 1
    return 8 * (bits - _SMALLEST_BITS - 2) + ((size >> (bits - 3)) - 8) - 1


def _aligned(length: int) -> int:
    """Return `length` bytes rounded up to the alignment of pieces."""
    return (length + _ALIGNMENT - 1) & -_ALIGNMENT


def _make(path: Path) -> None:
    """Create an empty arena in the file `path`, unless another process creates it first."""
    # A sparse file of many addresses, within the limit of this process
    new = path.with_name(f"{path.name}.{processes.this_process():x}")
    system = os.statvfs(path.parent)
    size = min(max(16 * system.f_blocks * system.f_frsize, 1 << 36), _MOST_BYTES)
    # A larger file would end the process with SIGXFSZ
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
        # A link never replaces the arena of a quicker process
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)


Bytes = NDArray[np.uint8]

# Bytes from which on a block is reused: the C library gives such blocks back to the kernel at once, and new pages cost
# twice a copy
LARGE = 32 << 20
_IDLE = 2  # blocks kept: one is in use while the next item arrives


class OwnedMemory:
    """Pool of memory blocks for large items; a block is reused once no object uses it any more.

    Thread-safe without a lock, because finalizers return the blocks.
    """

    def __init__(self) -> None:
        self._idle: deque[Bytes] = deque(maxlen=_IDLE)

    def take(self, size_bytes: int) -> Bytes:
        """Return an uninitialized array of `size_bytes` bytes. Its memory is reused once no object uses the array."""
        if size_bytes < LARGE:
            return np.empty(size_bytes, np.uint8)
        block = np.empty(0, np.uint8)
        # Kept blocks of an unsuitable size are dropped
        while not size_bytes <= block.nbytes <= 2 * size_bytes:
            try:
                block = self._idle.pop()
            except IndexError:
                block = np.empty(size_bytes, np.uint8)
        # Not a view of `block`: every object that is made of the piece must keep the piece alive
        memory = block.data[:size_bytes]
        piece = np.frombuffer(memory, np.uint8)
        weakref.finalize(piece, self._idle.append, block).atexit = False
        return piece


_ON_DISK = 1  # added to the address of a segment in the arena on disk


class Arenas:
    """The two arenas of a job folder, as this process sees them: one in shared memory, one on disk.

    Items go to the disk if shared memory has no room for them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._memory: Arena | None = None
        self._disk: Arena | None = None
        self._owned = OwnedMemory()

    @classmethod
    def of(cls, folder: Path) -> Arenas:
        """Return the arenas of a job folder. All channels in this process share this object."""
        opened, lock = _opened(processes.this_process())
        with lock:
            arenas = opened.get(folder)
            if arenas is None:
                arenas = opened[folder] = cls(folder)
            return arenas

    def write(self, pieces: Sequence[Any]) -> int:
        """Copy `pieces`, contiguous buffers, into a new segment; return the segment's address.

        Raise OutputError if neither shared memory nor the disk has room.
        """
        with contextlib.suppress(NoRoomError):
            return self._in_memory().write(pieces)
        with contextlib.suppress(NoRoomError):
            disk = self._on_disk()
            if disk is not None:
                return disk.write(pieces) + _ON_DISK
        raise OutputError(
            problem(
                "shm-full",
                _key(self._folder),
                error="no-room",
                wanted=show_bytes(sum(memoryview(p).nbytes for p in pieces)),
                free=show_bytes(free_bytes(self._folder)),
            )
        )

    def copy(self, address: int) -> tuple[Any, ...]:
        """Return copies of the pieces of the segment at `address`, and free the segment."""
        return tuple(self.of_segment(address).copy(address, self._owned.take))

    def of_segment(self, address: int) -> Arena:
        """Return the arena of the segment at `address`. Raise ChannelBroken if the arena is gone."""
        arena = self._on_disk() if address & _ON_DISK else self._in_memory()
        if arena is None:
            raise _lost(self._folder)
        return arena

    def _in_memory(self) -> Arena:
        """Return the arena in shared memory; the first call opens it."""
        with self._lock:
            if self._memory is None:
                self._memory = Arena(self._folder)
            return self._memory

    def _on_disk(self) -> Arena | None:
        """Return the arena on disk, or None if there is no folder on disk. The first call opens the arena."""
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
    """Return job folder -> arenas that a process has opened, and the lock of this dictionary.

    `of_process`: number of the process. The number differs in a forked child, so the child gets a dictionary of its
    own.
    """
    return weakref.WeakValueDictionary(), threading.Lock()
