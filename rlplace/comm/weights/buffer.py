"""Double weight buffer: two buffers of shared memory in which the processes of a node assemble and read weights.

::

    table     under a lock between processes                   which ranks have written and read which version
    buffer 0  │ version 7, complete │ readers load or map it   ◀── target ranks, which may go on with it
    buffer 1  │ version 8           │ each writer its pieces   ◀── source ranks

A buffer takes the next version once every living reader is finished with the one in it. A version that can no longer be
completed, because one of its writers died or has gone on to a later one, is given up.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rlplace.codes import problem
from rlplace.comm.processes import LOCK_BYTES, SharedLock, alive, this_process
from rlplace.comm.shared_memory.folder import FULL, allocate, spill_of, too_small
from rlplace.comm.weights.shards import Assembly, Bytes
from rlplace.comm.weights.version import not_here, ranks, versions_only_go_up
from rlplace.errors import ChannelTimeout
from rlplace.placement.language.slots import owner_of

_BUFFERS = 2
_PAGE = 4096
_NONE = -1  # no version
_PATIENCE = 0.02  # share of the time waited so far until the next look: late by 2 %, busy for less than 1 %
_FIRST_LOOK_S = 100e-6
_LAST_LOOK_S = 0.02
_LOCK_S = 10.0  # longest wait for the lock; it is held for microseconds

# The table at the start of the file, in words of 64 bits: header, a row for each writer, a row for each reader.
_HEADER = np.dtype(
    [
        ("lock", f"V{LOCK_BYTES}"),
        ("spec_offset", "i8"),
        ("data_offset", "i8"),
        ("version", "i8", _BUFFERS),
    ]
)
_WRITER = np.dtype(
    [
        ("process", "i8"),
        ("pushed", "i8"),
        ("done", "i8", _BUFFERS),
        ("sum", "i8", _BUFFERS),
    ]
)
_READER = np.dtype([("process", "i8"), ("finished", "i8"), ("loaded", "i8")])


class DoubleBuffer:
    """One process's end of a double weight buffer: two buffers in a file of the job folder. Used by one thread.

    Source ranks write one version of the weights into one buffer while target ranks read another version in the other
    buffer.
    """

    def __init__(self, path: Path) -> None:
        """Map the buffer in the file `path`, which must exist: `open` creates it.

        The mapping ends when no tensor uses it any more.
        """
        self.path = path
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
            # Readers cannot damage what others read
            self._frozen = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._lock = SharedLock(self._memory, 0)
        header = np.frombuffer(self._memory, _HEADER, 1)
        spec_offset = int(header["spec_offset"][0])
        self._data_offset = int(header["data_offset"][0])
        self.spec: Assembly = pickle.loads(
            self._memory[spec_offset : self._data_offset]
        )
        self._writers = self.spec.writers
        self._readers = self.spec.delivery.readers
        # By buffer
        self._version = header["version"][0]
        rows = _HEADER.itemsize
        self._writing = np.frombuffer(self._memory, _WRITER, len(self._writers), rows)
        self._reading = np.frombuffer(
            self._memory, _READER, len(self._readers), rows + self._writing.nbytes
        )

    @classmethod
    def open(cls, folder: Path, spec: Assembly, *, deadline_s: float) -> DoubleBuffer:
        """Return an end of a double buffer in the job folder `folder`. The first process to call this makes the file.

        `spec`: plan of the copy that the buffer holds. `deadline_s`: time of the deadline by `time.monotonic()`. Raise
        ClusterError if there is no room, ChannelTimeout at the deadline.
        """
        began = time.monotonic()
        name = hashlib.sha256(repr(spec).encode()).hexdigest()[:12]
        path = folder / f"weights-{name}.buffer"
        with open(
            os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        ) as making:
            while not _taken(making.fileno()):
                if not _rest(began, deadline_s):
                    raise _held_up(path, began)
            if not path.exists():
                _make(path, spec)
        return cls(path)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, writer: int, version: int, *, deadline_s: float) -> Bytes:
        """Wait for a free buffer, and return its bytes, into which `writer` writes its pieces of `version`.

        `writer`: source rank. `deadline_s`: time of the deadline by `time.monotonic()`. Raise ChannelTimeout at the
        deadline, with the ranks that hold the buffers. Raise WeightSyncError if a buffer has a newer version, or if
        `writer` has written `version` before, because readers may be using that version.
        """
        table = self._writing
        row = self._writers.index(writer)
        began = time.monotonic()
        while True:
            with self._locked(deadline_s):
                newest = int(max(self._version))
                buffer = self._holding(version)
                if (buffer is None and newest > version) or (
                    buffer is not None and table["done"][row, buffer] == version
                ):
                    raise versions_only_go_up(
                        self.spec.delivery.source, writer, version, newest
                    )
                table["process"][row] = this_process()
                table["pushed"][row] = version
                # One that was given up first, so that the last complete version stays
                if buffer is None:
                    free = [b for b in range(_BUFFERS) if not any(self._holders(b))]
                    buffer = min(
                        free,
                        key=lambda b: (self._complete(b), self._version[b]),
                        default=None,
                    )
                if buffer is not None:
                    self._version[buffer] = version
                    return self._buffer(buffer, self._memory)
                holders = [self._holders(b) for b in range(_BUFFERS)]
            if not _rest(began, deadline_s):
                delivery = self.spec.delivery
                found = [
                    ranks(delivery.source, late)
                    if late
                    else ranks(delivery.target, busy)
                    for late, busy in holders
                ]
                raise ChannelTimeout(
                    problem(
                        "channel-timeout",
                        f"weights version {version}",
                        error="no-buffer",
                        writer=owner_of(delivery.source, writer),
                        waited_s=time.monotonic() - began,
                        found="; ".join(found),
                    )
                )

    def finish(self, writer: int, version: int, checksum: int) -> bool:
        """Mark the pieces of source rank `writer` as written; return whether `version` is complete now.

        `checksum`: sum of the written pieces; 0 if sums are not compared.
        """
        row = self._writers.index(writer)
        with self._locked():
            buffer = self._holding(version)
            assert buffer is not None, (
                f"rank {writer} finishes version {version}, which it never began"
            )
            self._writing["sum"][row, buffer] = checksum
            self._writing["done"][row, buffer] = version
            return self._complete(buffer)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, reader: int, version: int) -> Bytes:
        """Return the bytes of the complete `version`, read-only, for target rank `reader`.

        The bytes do not change until the reader calls `release`. Raise WeightSyncError if the version is not complete,
        or if a later version has replaced it.
        """
        self._reading["process"][self._readers.index(reader)] = this_process()
        whole = self.contents(version)
        if whole is None:
            late = self.late(version)
            lacking = self.lacking(version)
            raise not_here(self.spec.delivery, reader, version, late, lacking)
        return whole

    def release(self, reader: int, version: int, *, loaded: bool) -> None:
        """Mark target rank `reader` as finished with `version` and all earlier versions.

        `loaded`: whether the rank has loaded `version`.
        """
        table = self._reading
        row = self._readers.index(reader)
        table["finished"][row] = max(table["finished"][row], version)
        if loaded:
            table["loaded"][row] = version

    def contents(self, version: int) -> Bytes | None:
        """Return the bytes of a complete version, read-only, or None if neither buffer has the complete version."""
        with self._locked():
            buffer = self._holding(version)
            if buffer is None or not self._complete(buffer):
                return None
            return self._buffer(buffer, self._frozen)

    def sums(self, version: int) -> dict[int, int]:
        """Return source rank -> the checksum that it has passed to `finish`, for the writers of `version`."""
        buffer = self._holding(version)
        assert buffer is not None, "a version that is being read stays"
        return {
            w: int(s)
            for w, s in zip(self._writers, self._writing["sum"][:, buffer], strict=True)
        }

    def late(self, version: int) -> list[int]:
        """Return the source ranks that have not completed `version`; empty if a later version has replaced it."""
        if self._holding(version) is None and max(self._version) > version:
            return []
        done = (self._writing["done"] == version).any(axis=1)
        return [w for w, there in zip(self._writers, done, strict=True) if not there]

    def lacking(self, version: int) -> list[int]:
        """Return the target ranks that have loaded neither `version` nor a later version."""
        return [
            r
            for r, row in zip(self._readers, self._reading, strict=True)
            if row["loaded"] < version
        ]

    # ── inside, under the lock ───────────────────────────────────────────────────────────────────────────────────────

    def _holding(self, version: int) -> int | None:
        return next((b for b in range(_BUFFERS) if self._version[b] == version), None)

    def _complete(self, buffer: int) -> bool:
        version = self._version[buffer]
        return bool(
            version != _NONE and (self._writing["done"][:, buffer] == version).all()
        )

    def _holders(self, buffer: int) -> tuple[list[int], list[int]]:
        """Return the source ranks that may still write into a buffer, and the target ranks that may still read it.

        Living ranks that have not begun to write or read are included; dead ranks are not. `buffer`: number of the
        buffer.
        """
        version = self._version[buffer]
        if version == _NONE:
            return [], []
        if self._complete(buffer):
            readers = zip(self._readers, self._reading, strict=True)
            return [], [
                r for r, row in readers if row["finished"] < version and _not_dead(row)
            ]
        writers = zip(self._writers, self._writing, strict=True)
        unfinished = (
            (w, row)
            for w, row in writers
            if row["done"][buffer] != version and row["pushed"] <= version
        )
        return [w for w, row in unfinished if _not_dead(row)], []

    def _buffer(self, number: int, memory: mmap.mmap) -> Bytes:
        size = self.spec.layout.size_bytes
        if size == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(
            memory, np.uint8, size, self._data_offset + number * _page_up(size)
        )

    @contextlib.contextmanager
    def _locked(self, deadline_s: float | None = None) -> Iterator[None]:
        began = time.monotonic()
        if not self._lock.acquire(
            timeout=_LOCK_S if deadline_s is None else deadline_s - began
        ):
            raise _held_up(self.path, began)
        try:
            yield
        finally:
            self._lock.release()


def _held_up(path: Path, began: float) -> ChannelTimeout:
    return ChannelTimeout(
        problem(
            "channel-timeout",
            f"weights {path.name}",
            error="buffer-lock",
            waited_s=time.monotonic() - began,
        )
    )


def _make(path: Path, spec: Assembly) -> None:
    """Make the file `path` of a double buffer for the plan `spec`. The caller holds the lock for making the file.

    A process that dies here leaves an incomplete file, which the next process removes.
    """
    meta = pickle.dumps(spec)
    rows = (
        len(spec.writers) * _WRITER.itemsize
        + len(spec.delivery.readers) * _READER.itemsize
    )
    table = np.full((_HEADER.itemsize + rows) // 8, _NONE, np.int64)
    data_offset = _page_up(table.nbytes + len(meta))
    header = table[: _HEADER.itemsize // 8].view(_HEADER)
    header["spec_offset"] = table.nbytes
    header["data_offset"] = data_offset
    part = path.with_suffix(".part")
    size = data_offset + _BUFFERS * _page_up(spec.layout.size_bytes)
    if not _allocated(part, size):
        disk = spill_of(path.parent)
        spilled = None if disk is None else (disk / path.name).resolve()
        if spilled is None or not _allocated(spilled, size):
            raise too_small(path.parent, size)
        part.symlink_to(spilled)
    with open(part, "r+b") as file:
        file.write(table.tobytes() + meta)
        file.flush()
        SharedLock.make(mmap.mmap(file.fileno(), LOCK_BYTES), 0)
    os.rename(part, path)


def _allocated(path: Path, size_bytes: int) -> bool:
    """Create the file `path` of `size_bytes` bytes, in place of an existing file; return whether there was room."""
    path.unlink(missing_ok=True)
    try:
        allocate(path, size_bytes)
    except OSError as error:
        if error.errno not in FULL:
            raise
        return False
    return True


def _taken(lock: int) -> bool:
    """Try to lock an open file; return False if another process holds the lock, else True.

    `lock`: descriptor of the file; the lock ends when it is closed.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _rest(began: float, deadline_s: float) -> bool:
    """Sleep before the next check of a wait, and return True; once the deadline has passed, return False at once.

    `began`: start of the wait. Both times are by `time.monotonic()`. The longer the wait has lasted, the longer the
    sleep.
    """
    now = time.monotonic()
    if now >= deadline_s:
        return False
    pause = min(max(_FIRST_LOOK_S, (now - began) * _PATIENCE), _LAST_LOOK_S)
    time.sleep(min(pause, deadline_s - now))
    return True


def _not_dead(row: np.void) -> bool:
    return row["process"] == _NONE or alive(int(row["process"]))


def _page_up(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE


class OwnCopy:
    """A copy of the weights in memory of this process alone. It has the same methods as DoubleBuffer.

    `read` hands the memory over to the reader, so each version gets new memory.
    """

    def __init__(self, spec: Assembly) -> None:
        self.spec = spec
        self._version: int | None = None
        self._bytes: Bytes = np.empty(0, np.uint8)
        self._sums: dict[int, int] = {}

    def begin(self, writer: int, version: int, *, deadline_s: float) -> Bytes:
        if version != self._version:
            self._version, self._bytes = (
                version,
                np.empty(self.spec.layout.size_bytes, np.uint8),
            )
            self._sums = {}
        return self._bytes

    def finish(self, writer: int, version: int, checksum: int) -> bool:
        self._sums[writer] = checksum
        return not self.late(version)

    def read(self, reader: int, version: int) -> Bytes:
        whole = self._bytes
        self._bytes = np.empty(0, np.uint8)
        self._version = None
        return whole

    def release(self, reader: int, version: int, *, loaded: bool) -> None:
        """Do nothing, because the reader owns the copy."""

    def sums(self, version: int) -> dict[int, int]:
        return self._sums

    def late(self, version: int) -> list[int]:
        return [w for w in self.spec.writers if w not in self._sums]

    def lacking(self, version: int) -> list[int]:
        return list(self.spec.delivery.readers)
