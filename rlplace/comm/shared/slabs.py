"""Large payloads in shared memory: written by their owner into slabs, lent to one taker at a time, used again.

::

    owner    SlabPool.write(buffers) ──▶ SlabRef ── lend: in a channel ──▶ SlabReader.stamp, then open or copy    taker
      ▲                                                                                                            │
      └───────────────────── the slab's word in the owner's table ◀──────── release ───────────────────────────────┘

Whoever holds a slab answers for it: first its owner, then the channel that it lies in, then its taker. A slab whose
holder died is taken back by its owner; one whose owner left is removed by who releases it or by `reclaim`.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlplace.comm.shared import liveness, space
from rlplace.comm.shared.folder import spill_of
from rlplace.comm.shared.owned import Bytes, OwnedMemory
from rlplace.comm.shared.slab_files import (
    FREE,
    LENT,
    NONE,
    ORPHANED,
    WORDS,
    Mappings,
    Table,
    make_table,
    open_table,
    reclaim,
    remove_slab,
    remove_unused,
    series_of,
    slab_path,
    word_of,
)
from rlplace.errors import OutputError, Problem
from rlplace.units import show_bytes

__all__ = ["SMALLEST", "SlabPool", "SlabReader", "SlabRef", "reclaim", "slab_size"]

SMALLEST = 64 << 10  # bytes
_ALIGNMENT = 64  # bytes: a cache line
_RECENT = 4  # slabs that are looked at first
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOG = logging.getLogger(__name__)


class SlabRef(NamedTuple):
    """Where a payload lies."""

    owner: int  # process word
    number: int
    lengths: tuple[int, ...]  # bytes; the buffers follow one another, each aligned


def slab_size(size_bytes: int) -> int:
    """Eight sizes between a power of two and the next, so that at most an eighth is wasted."""
    step = max(SMALLEST, 1 << max(0, (size_bytes - 1).bit_length() - 4))
    return max(1, -(-size_bytes // step)) * step


class SlabPool:
    """Owns slabs of this process in one job folder. Thread-safe. A forked child makes its own.

    What came back is used again, the last returned first: its pages are there, and warm.
    """

    def __init__(self, folder: Path, *, allocate: space.Allocate = space.allocate) -> None:
        self._folder = folder
        self._allocate = allocate
        self._me = liveness.this_process()
        self._lock = threading.Lock()
        self._table: Table | None = None  # made with the first slab
        self._next = 0  # number
        self._sizes: dict[int, int] = {}  # of every slab, by number
        self._free: dict[int, list[int]] = {}  # numbers by size, the warmest last
        self._lent: dict[int, None] = {}  # numbers, the longest away first
        self._mapped = Mappings(folder)
        self._spilled = False

    def write(self, buffers: Sequence[Any]) -> SlabRef:
        """Copies contiguous `buffers` into a slab that this process holds until SlabReader.lend or `release`.

        OutputError when neither shared memory nor the disk has room.
        """
        pieces = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        lengths = tuple(piece.nbytes for piece in pieces)
        with self._lock:
            number = self._take(slab_size(sum(map(_aligned, lengths))))
            memory = self._mapped.of(self._me, number)
        ref = SlabRef(self._me, number, lengths)
        for place, piece in zip(_places(memory, lengths), pieces, strict=True):
            np.copyto(place, piece)  # lets other threads run meanwhile, as mmap and memoryview do not
        return ref

    def close(self) -> None:
        """Removes all slabs but those that are lent; these go when they are released. Idempotent."""
        if os.getpid() != liveness.pid_of(self._me):  # a forked child's copy: the slabs are its parent's
            return
        with self._lock:
            if self._table is None:
                return
            self._table[0] = ORPHANED
            remove_unused(self._folder, self._me, series_of(self._next), self._table)
            self._table = None
            self._mapped = Mappings(self._folder)
            for known in (self._sizes, self._free, self._lent):
                known.clear()

    # ── inside, under the lock ───────────────────────────────────────────────────────────────────────────────────────

    def _take(self, size: int) -> int:
        """The number of a slab of at least `size` bytes, lent."""
        if self._table is None:
            self._begin()
        number = self._just_back(size)
        if number is None:
            number = self._pop(size)
        if number is None:
            self._regain(self._returned(size))
            number = self._pop(size)
        if number is None:
            self._regain(self._held_by_the_dead())
            number = self._pop(size)
        if number is None:
            number = self._make(size)
        self._mark(number, self._me)
        self._lent[number] = None
        return number

    def _begin(self) -> None:
        reclaim(self._folder)
        self._table, self._next = make_table(self._folder, self._me)

    def _just_back(self, size: int) -> int | None:
        """One of the last that left, if it is back already: the processor's caches have more of it than of others."""
        assert self._table is not None
        for number in itertools.islice(reversed(self._lent), _RECENT):
            if self._sizes[number] == size and self._table[word_of(number)] == FREE:
                del self._lent[number]
                return number
        return None

    def _pop(self, size: int) -> int | None:
        """A free slab that is not much too large."""
        exact = self._free.get(size)
        if exact:
            return exact.pop()
        near = [there for there, numbers in self._free.items() if numbers and size < there <= 2 * size]
        return self._free[min(near)].pop() if near else None

    def _returned(self, size: int | None = None) -> list[int]:
        """Lent slabs that came back: all, or up to the first that serves for `size`, in a queue the longest away."""
        assert self._table is not None
        table, back = self._table, []
        for number in self._lent:
            if table[word_of(number)] == FREE:
                back.append(number)
                if size is not None and size <= self._sizes[number] <= 2 * size:
                    break
        return back

    def _held_by_the_dead(self) -> list[int]:
        assert self._table is not None
        holders = {number: self._table[word_of(number)] for number in self._lent}
        dead = {word for word in set(holders.values()) if word > 0 and not liveness.alive(word)}
        return [number for number, word in holders.items() if word in dead]

    def _regain(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._mark(number, FREE)
            del self._lent[number]
            self._free.setdefault(self._sizes[number], []).append(number)

    def _make(self, size: int) -> int:
        number = self._unused_number(size)
        try:
            self._allocate(slab_path(self._folder, self._me, number), size)
        except OSError as full:
            if full.errno not in _FULL:
                raise
            self._regain(self._returned())
            self._drop_free()
            reclaim(self._folder)
            self._allocate_anywhere(number, size)
        self._sizes[number] = size
        return number

    def _allocate_anywhere(self, number: int, size: int) -> None:
        for place in (self._folder, spill_of(self._folder)):
            if place is None:
                continue
            try:
                self._allocate(slab_path(place, self._me, number), size)
            except OSError as full:
                if full.errno not in _FULL:
                    raise
            else:
                if place != self._folder and not self._spilled:
                    self._spilled = True
                    _LOG.warning(
                        "%s has no room for %s more: what does not fit goes through %s, which is slower",
                        self._folder.parent, show_bytes(size), place.resolve(),
                    )  # fmt: skip
                return
        raise _no_room(self._folder, size)

    def _drop_free(self) -> None:
        for number in [number for numbers in self._free.values() for number in numbers]:
            self._mark(number, NONE)
            self._mapped.drop(self._me, number)
            del self._sizes[number]
            remove_slab(self._folder, self._me, number)
        self._free.clear()

    def _unused_number(self, size: int) -> int:
        assert self._table is not None
        for number in range(self._next, self._next + WORDS - 1):
            if self._table[word_of(number)] == NONE:
                self._next = number + 1
                return number
        raise _no_room(self._folder, size)

    def _mark(self, number: int, state: int) -> None:
        assert self._table is not None
        self._table[word_of(number)] = state


class SlabReader:
    """Takes what other processes (and this one) wrote into slabs of one job folder. Thread-safe. One per process.

    FileNotFoundError from any method: the folder is gone, hence the job.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._me = liveness.this_process()
        self._tables: dict[tuple[int, int], Table] = {}  # by owner and series
        self._mapped = Mappings(folder)
        self._owned = OwnedMemory()

    def lend(self, ref: SlabRef) -> None:
        """The channel that it lies in holds the slab, which was written here: it may outlive this process."""
        self._table(ref)[word_of(ref.number)] = LENT

    def stamp(self, ref: SlabRef) -> None:
        """This process holds the slab. Before the ref leaves the channel, so that somebody always answers for it."""
        self._table(ref)[word_of(ref.number)] = self._me

    def open(self, ref: SlabRef) -> list[Bytes]:
        """The buffers, writable, without a copy: this process' alone until `release`, and the pool's after it."""
        return _places(self._mapped.of(ref.owner, ref.number), ref.lengths)

    def copy(self, ref: SlabRef) -> list[Bytes]:
        """The buffers in memory of the caller's own; releases the slab."""
        try:
            return [self._copied(buffer) for buffer in self.open(ref)]
        finally:
            self.release(ref)

    def _copied(self, buffer: Bytes) -> Bytes:
        own = self._owned.take(buffer.nbytes)
        np.copyto(own, buffer)
        return own

    def release(self, ref: SlabRef) -> None:
        """The pool may use the slab again. Takes no lock: safe from a finalizer."""
        if os.getpid() != liveness.pid_of(self._me):  # a forked child dropped its copy of a lease
            return
        table, series = self._table(ref), series_of(ref.number)
        table[word_of(ref.number)] = FREE
        if table[0] == ORPHANED and remove_unused(self._folder, ref.owner, series, table) == 0:
            self._tables.pop((ref.owner, series), None)

    def _table(self, ref: SlabRef) -> Table:
        key = ref.owner, series_of(ref.number)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = open_table(self._folder, *key)
        return table


def _places(memory: memoryview, lengths: Sequence[int]) -> list[Bytes]:
    """Each an array of its own: of a view of an array, what is made refers to that array instead."""
    places, begin = [], 0
    for length in lengths:
        places.append(np.frombuffer(memory[begin : begin + length], np.uint8))
        begin += _aligned(length)
    return places


def _aligned(length: int) -> int:
    return (length + _ALIGNMENT - 1) & -_ALIGNMENT


def _no_room(folder: Path, size: int) -> OutputError:
    return OutputError(
        Problem(
            code="shm-full",
            key=f"shared memory of this node, {folder}",
            what=f"no room for {show_bytes(size)} more, nor on disk",
            why=f"{show_bytes(space.free_bytes(folder))} are free; items wait there until they are taken",
            fix="more shared memory (docker run --shm-size=...), or channels of less capacity",
        )
    )
