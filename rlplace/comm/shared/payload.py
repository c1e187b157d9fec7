"""An item on its way through shared memory: in its entry where it is small, else in a slab whose address lies there."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlplace.comm import codec
from rlplace.comm.channel import Lease
from rlplace.comm.lease import SlabLease
from rlplace.comm.shared import liveness
from rlplace.comm.shared.slabs import SlabPool, SlabReader, SlabRef


class Slabs:
    """This process' side of the slabs of one job folder: it writes its own and takes everybody's. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._pool = SlabPool(folder)
        self._reader = SlabReader(folder)
        self.close = weakref.finalize(self, _close, self._pool, os.getpid())

    @classmethod
    def of(cls, folder: Path) -> Slabs:
        """The one of this process and folder, however many channels use it."""
        opened, lock = _opened(liveness.this_process())
        with lock:
            slabs = opened.get(folder)
            if slabs is None:
                slabs = opened[folder] = cls(folder)
            return slabs

    def write(self, packed: codec.Packed, room: int) -> bytes:
        """Copies an item into a slab. Its address, of at most `room` bytes."""
        pieces: Sequence[Any] = (packed,) if isinstance(packed, bytes) else packed.pieces
        if (2 + len(pieces)) * 8 <= room:
            return _address(self._pool.write(pieces))
        lengths = array("q", [memoryview(piece).nbytes for piece in pieces])
        ref = self._pool.write((lengths, *pieces))
        return _address(ref._replace(lengths=(-len(pieces),)))

    def lend(self, address: bytes) -> None:
        """It lies in a line; called under the channel's lock, after that."""
        self._reader.lend(_slab(address))

    def stamp(self, address: bytes) -> None:
        """This process holds the slab; called under the channel's lock."""
        self._reader.stamp(_slab(address))

    def release(self, address: bytes) -> None:
        """Nobody wants the item any more."""
        with contextlib.suppress(FileNotFoundError):  # the folder is gone, and the slab with it
            self._reader.release(_slab(address))

    def packed(self, address: bytes) -> codec.Encoded:
        """The caller's own copy; the slab goes back."""
        ref, first = self._find(address)
        return codec.Encoded.of(self._reader.copy(ref)[first:])

    def lease(self, address: bytes) -> Lease:
        """The item where it lies; the slab goes back with the lease."""
        ref, first = self._find(address)
        return SlabLease(self._reader.open(ref)[first:], codec.unpack, functools.partial(self._free, ref))

    def _find(self, address: bytes) -> tuple[SlabRef, int]:
        """Where the pieces lie, and the number of the first one: before them there may be their lengths."""
        ref = _slab(address)
        if ref.lengths[0] > 0:
            return ref, 0
        table = ref._replace(lengths=(-8 * ref.lengths[0],))
        lengths = self._reader.open(table)[0].view(np.int64).tolist()
        return ref._replace(lengths=(*table.lengths, *lengths)), 1

    def _free(self, ref: SlabRef) -> None:  # a method, so that who leases keeps the pool open
        self._reader.release(ref)


def _close(pool: SlabPool, process: int) -> None:
    if os.getpid() == process:  # a forked child lets go of its parent's slabs, which the parent still uses
        pool.close()


def _address(ref: SlabRef) -> bytes:
    """Without room for all lengths, their number below 0: then they lie in the slab, before the pieces."""
    return array("q", (ref.owner, ref.number, *ref.lengths)).tobytes()


def _slab(address: bytes) -> SlabRef:
    owner, number, *lengths = memoryview(address).cast("q")
    return SlabRef(owner, number, tuple(lengths))


@functools.cache
def _opened(process: int) -> tuple[weakref.WeakValueDictionary[Path, Slabs], threading.Lock]:
    return weakref.WeakValueDictionary(), threading.Lock()
