"""The files of slabs: who has which slab, where its bytes lie, and when they go.

::

    <owner>-<series>.slabs   a table of 8-byte words, one table per pool; word 0: ORPHANED once the pool is closed
    <owner>-<number>.slab    the bytes of a slab and nothing else; in the folder, or in its `spill` on disk

A number begins with its series. The word of a slab is NONE, FREE, LENT (it lies in a channel) or the word of who holds
it. Only the owner turns FREE into LENT; the taker writes its own word while it takes; who is done with it writes FREE.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from rlplace.comm.shared import liveness, space
from rlplace.comm.shared.folder import SPILL

Table = memoryview  # format "q"

NONE, FREE, LENT = 0, -1, -2
ORPHANED = 1
WORDS = 1 << 13  # of a table, hence slabs of one pool at a time
_SERIES_SHIFT = 32
_WITHIN_SERIES = (1 << _SERIES_SHIFT) - 1
_MAPPINGS = 256  # kept per process and side: each costs a descriptor


def series_of(number: int) -> int:
    return number >> _SERIES_SHIFT


def word_of(number: int) -> int:
    """The place of a slab's word in its table; numbers are never used twice, words are."""
    return 1 + (number & _WITHIN_SERIES) % (WORDS - 1)


def make_table(folder: Path, owner: int) -> tuple[Table, int]:
    """A new table of this owner, all NONE, and the first number of its series."""
    for series in itertools.count():
        with contextlib.suppress(FileExistsError):  # of a pool that was closed, with slabs that are still lent
            space.allocate(_table_path(folder, owner, series), WORDS * 8)
            break
    return open_table(folder, owner, series), series << _SERIES_SHIFT


def open_table(folder: Path, owner: int, series: int) -> Table:
    return _map(_table_path(folder, owner, series)).cast("q")


def slab_path(folder: Path, owner: int, number: int) -> Path:
    return folder / f"{owner:x}-{number}.slab"


class Mappings:
    """Slabs mapped into this process, the latest used; thread-safe. What is still in use stays mapped when dropped."""

    def __init__(self, folder: Path, limit: int = _MAPPINGS) -> None:
        self._folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        self._mapped: OrderedDict[tuple[int, int], memoryview] = OrderedDict()

    def of(self, owner: int, number: int) -> memoryview:
        """All bytes of the slab, writable. FileNotFoundError when it is gone, and the job with it."""
        with self._lock:
            memory = self._mapped.get((owner, number))
            if memory is None:
                memory = self._mapped[owner, number] = self._open(owner, number)
                if len(self._mapped) > self._limit:
                    self._mapped.popitem(last=False)
            else:
                self._mapped.move_to_end((owner, number))
            return memory

    def drop(self, owner: int, number: int) -> None:
        with self._lock:
            self._mapped.pop((owner, number), None)

    def _open(self, owner: int, number: int) -> memoryview:
        try:
            return _map(slab_path(self._folder, owner, number))
        except FileNotFoundError:
            return _map(slab_path(self._folder / SPILL, owner, number))


def remove_slab(folder: Path, owner: int, number: int) -> None:
    """Frees the memory at once, even while idle mappings of the slab exist. Nobody may hold it."""
    for place in (folder, folder / SPILL):
        path = slab_path(place, owner, number)
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, 0)
            path.unlink()


def remove_unused(folder: Path, owner: int, series: int, table: Table) -> int:
    """Removes the slabs of a closed pool, but for those in a channel or held by the living; how many remain."""
    left = 0
    for number in _numbers(folder, owner, series):
        word = table[word_of(number)]
        if word == LENT or (word > 0 and liveness.alive(word)):
            left += 1
        else:
            remove_slab(folder, owner, number)
    if not left:
        _table_path(folder, owner, series).unlink(missing_ok=True)
    return left


def reclaim(folder: Path) -> None:
    """Removes what dead owners left in the folder and nobody will read."""
    for path in folder.glob("*.slabs"):
        owner, _, series = path.stem.partition("-")
        if not liveness.alive(int(owner, 16)):
            with contextlib.suppress(FileNotFoundError, ValueError):  # another removes it, or it was never filled
                table = open_table(folder, int(owner, 16), int(series))
                table[0] = ORPHANED  # before looking: who releases later than that removes the slab itself
                remove_unused(folder, int(owner, 16), int(series), table)


def _numbers(folder: Path, owner: int, series: int) -> Iterator[int]:
    for place in (folder, folder / SPILL):
        for path in place.glob(f"{owner:x}-*.slab"):
            number = int(path.stem.partition("-")[2])
            if series_of(number) == series:
                yield number


def _table_path(folder: Path, owner: int, series: int) -> Path:
    return folder / f"{owner:x}-{series}.slabs"


def _map(path: Path) -> memoryview:
    """The whole file, its pages mapped in one go: faults one by one cost more than copying."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    finally:
        os.close(descriptor)
