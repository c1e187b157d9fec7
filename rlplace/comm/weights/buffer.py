"""Double weight buffer: two buffers of shared memory in which the processes of a node assemble and read weights.

::

    words     lock in <buffer>.lock, held for microseconds     which ranks have written and read which version
    buffer 0  │ version 7, complete │ readers load or map it   ◀── rollout ranks, generation may go on
    buffer 1  │ version 8           │ each writer its pieces   ◀── actor ranks

A buffer takes the next version once every living reader is finished with the one in it. A version that can no longer be
completed, because one of its writers died or has gone on to a later one, is given up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import mmap
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlplace.comm.shared_memory.folder import allocate, spill_of, too_small
from rlplace.comm.shared_memory.process import alive, this_process
from rlplace.comm.weights.shards import Assembly
from rlplace.comm.weights.tensors import Bytes
from rlplace.comm.weights.version import failed_sync, late_sync, ranks
from rlplace.errors import ChannelTimeout, WeightSyncError

_BUFFERS = 2
_PAGE = 4096
_NONE = -1  # no version
_PATIENCE = 0.02  # share of the time waited so far until the next look: late by 2 %, busy for less than 1 %
_FIRST_LOOK_S, _LAST_LOOK_S = 100e-6, 0.02
_LOCK_S = 10.0  # longest wait for the lock; it is held for microseconds


class DoubleBuffer:
    """One process' end of a double buffer; used by one thread. The file belongs to the job's folder."""

    def __init__(self, path: Path, spec: Assembly, data_offset: int) -> None:
        self.path = path
        self.spec = spec
        self._writers, self._readers = spec.writers, spec.delivery.readers
        self._lock_file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(descriptor, 0)
            self._frozen = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)  # readers cannot damage what others read
        finally:
            os.close(descriptor)
        self._data_offset = data_offset
        words = np.frombuffer(self._memory, np.int64, _words_needed(spec))
        self._words = _Words(words, len(self._writers), len(self._readers))

    @classmethod
    def open(cls, folder: Path, spec: Assembly, *, deadline_s: float) -> DoubleBuffer:
        """Open the buffer of `spec` in `folder`; the first process makes it. ClusterError where there is no room."""
        path = folder / f"weights-{hashlib.sha256(repr(spec).encode()).hexdigest()[:12]}.buffer"
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with _locked(lock, path, deadline_s):
                if not path.exists():
                    _make(path, spec)
        finally:
            os.close(lock)
        return cls.attach(path)

    @classmethod
    def attach(cls, path: Path) -> DoubleBuffer:
        with open(path, "rb") as file:
            meta_offset, data_offset = (int(n) for n in np.frombuffer(file.read(16), np.int64))
            file.seek(meta_offset)
            spec: Assembly = pickle.load(file)
        return cls(path, spec, data_offset)

    def close(self) -> None:
        """Close the file; the mappings end with the last tensor in them."""
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, writer: int, version: int, *, deadline_s: float) -> Bytes:
        """Return the buffer in which `writer` writes its pieces of `version`; blocks until one is free.

        ChannelTimeout names the ranks that hold it. WeightSyncError for a version older than what is here, or one that
        `writer` has written before: readers may hold it.
        """
        w, words, began = self._writers.index(writer), self._words, time.monotonic()
        while True:
            with self._locked(deadline_s):
                newest, buffer = int(max(words.version)), self._holding(version)
                if (buffer is None and newest > version) or (buffer is not None and words.done[buffer, w] == version):
                    raise versions_only_go_up(writer, version, newest)
                words.writer_process[w], words.intent[w] = this_process(), version
                buffer = self._free() if buffer is None else buffer
                if buffer is not None:
                    words.version[buffer] = version
                    return self._buffer(buffer, self._memory)
                holders = [self._holders(b) for b in range(_BUFFERS)]
            _rest(began, deadline_s, functools.partial(_no_free_buffer, writer, version, began, holders))

    def finish(self, writer: int, version: int, checksum: int) -> bool:
        """Mark the pieces of `writer` as written. True for the last writer: now the version is complete."""
        w, words = self._writers.index(writer), self._words
        with self._locked(time.monotonic() + _LOCK_S):
            buffer = self._holding(version)
            assert buffer is not None, f"actor rank {writer} finishes version {version}, which it never began"
            words.sums[buffer, w], words.done[buffer, w] = checksum, version
            return self._complete(buffer)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, reader: int, version: int) -> Bytes:
        """Return the complete `version`, read-only and unchanged until `release`. Raises WeightSyncError."""
        with self._locked(time.monotonic() + _LOCK_S):
            self._words.reader_process[self._readers.index(reader)] = this_process()
            buffer = self._holding(version)
            if buffer is None or not self._complete(buffer):
                raise not_here(reader, version, self.late(version), self.lacking(version))
            return self._buffer(buffer, self._frozen)

    def release(self, reader: int, version: int, *, loaded: bool) -> None:
        """Mark `reader` as finished with `version` and all before."""
        r, words = self._readers.index(reader), self._words
        words.finished[r] = max(words.finished[r], version)
        if loaded:
            words.loaded[r] = version

    def contents(self, version: int) -> Bytes | None:
        """Return the bytes of a complete version, to build the next one on; None where it is not here."""
        with self._locked(time.monotonic() + _LOCK_S):
            buffer = self._holding(version)
            return None if buffer is None or not self._complete(buffer) else self._buffer(buffer, self._frozen)

    def sums(self, version: int) -> dict[int, int]:
        """Return the checksum that each writer gave to `finish`."""
        buffer = self._holding(version)
        assert buffer is not None, "a version that is being read stays"
        return {w: int(s) for w, s in zip(self._writers, self._words.sums[buffer], strict=True)}

    def late(self, version: int) -> list[int]:
        """List the actor ranks that have not written `version` whole; none where a later one has taken its place."""
        if self._holding(version) is None and max(self._words.version) > version:
            return []
        done = (self._words.done == version).any(axis=0)
        return [w for w, there in zip(self._writers, done, strict=True) if not there]

    def lacking(self, version: int) -> list[int]:
        """List the rollout ranks that have not loaded `version`."""
        return [r for r, has in zip(self._readers, self._words.loaded, strict=True) if has < version]

    # ── inside, under the lock ───────────────────────────────────────────────────────────────────────────────────────

    def _free(self) -> int | None:
        """Find a buffer for a new version: one that was given up first, so that the last complete version stays."""
        free = [b for b in range(_BUFFERS) if not any(self._holders(b))]
        return min(free, key=lambda b: (self._complete(b), self._words.version[b]), default=None)

    def _holding(self, version: int) -> int | None:
        return next((b for b in range(_BUFFERS) if self._words.version[b] == version), None)

    def _complete(self, buffer: int) -> bool:
        version = self._words.version[buffer]
        return bool(version != _NONE and (self._words.done[buffer] == version).all())

    def _holders(self, buffer: int) -> tuple[list[int], list[int]]:
        """List the actor ranks that still write into it, or may, and the rollout ranks not finished with it."""
        words, version = self._words, self._words.version[buffer]
        if version == _NONE:
            return [], []
        if self._complete(buffer):
            r = zip(self._readers, words.finished, words.reader_process, strict=True)
            return [], [reader for reader, finished, p in r if finished < version and _not_dead(int(p))]
        w = zip(self._writers, words.done[buffer], words.intent, words.writer_process, strict=True)
        return [writer for writer, d, i, p in w if d != version and i <= version and _not_dead(int(p))], []

    def _buffer(self, number: int, memory: mmap.mmap) -> Bytes:
        size = self.spec.layout.size_bytes
        if size == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(memory, np.uint8, size, self._data_offset + number * _page_up(size))

    @contextlib.contextmanager
    def _locked(self, deadline_s: float) -> Iterator[None]:
        with _locked(self._lock_file, self.path, deadline_s):
            yield


class _Words:
    """The header of the file, as arrays over it."""

    def __init__(self, words: NDArray[np.int64], writers: int, readers: int) -> None:
        rest = words[2:]  # offsets of metadata and data

        def take(*shape: int) -> NDArray[np.int64]:
            nonlocal rest
            count = int(np.prod(shape))
            taken, rest = rest[:count].reshape(shape), rest[count:]
            return taken

        self.version = take(_BUFFERS)
        self.done = take(_BUFFERS, writers)
        self.sums = take(_BUFFERS, writers)
        self.intent = take(writers)  # the version it pushed last
        self.writer_process = take(writers)
        self.finished = take(readers)  # the version it is done with
        self.loaded = take(readers)
        self.reader_process = take(readers)


def _words_needed(spec: Assembly) -> int:
    writers, readers = len(spec.writers), len(spec.delivery.readers)
    return 2 + _BUFFERS * (1 + 2 * writers) + 2 * writers + 3 * readers


def _make(path: Path, spec: Assembly) -> None:
    """Make the file, under the lock; a process that dies in it leaves a part that the next one removes."""
    words, meta = np.full(_words_needed(spec), _NONE, np.int64), pickle.dumps(spec)
    data_offset = _page_up(words.nbytes + len(meta))
    words[:2] = words.nbytes, data_offset
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    size = data_offset + _BUFFERS * _page_up(spec.layout.size_bytes)
    if not _allocated(part, size):
        spill = spill_of(path.parent)  # on disk
        spilled = None if spill is None else (spill / path.name).resolve()
        if spilled is not None:
            spilled.unlink(missing_ok=True)
        if spilled is None or not _allocated(spilled, size):
            raise too_small(path.parent, size)
        part.symlink_to(spilled)
    with open(part, "r+b") as file:
        file.write(words.tobytes() + meta)
    os.rename(part, path)


def _allocated(path: Path, size_bytes: int) -> bool:
    """Make a file of this size. False where there is no room."""
    try:
        allocate(path, size_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


@contextlib.contextmanager
def _locked(descriptor: int, path: Path, deadline_s: float) -> Iterator[None]:
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            _rest(began, deadline_s, functools.partial(_locked_for_long, path, began))
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _rest(began: float, deadline_s: float, late: Callable[[], Exception]) -> None:
    """Sleep until the next look at what is waited for since `began`; raise `late()` once the deadline has passed."""
    now = time.monotonic()
    if now >= deadline_s:
        raise late()
    pause = min(max(_FIRST_LOOK_S, (now - began) * _PATIENCE), _LAST_LOOK_S)
    time.sleep(min(pause, deadline_s - now))


def _not_dead(process: int) -> bool:
    """A process that has not come yet is not dead."""
    return process == _NONE or alive(process)


def _page_up(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE


class OwnCopy:
    """A copy in memory of this process alone, handed over with each version. Calls are those of DoubleBuffer."""

    def __init__(self, spec: Assembly) -> None:
        self.spec = spec
        self._version: int | None = None
        self._bytes: Bytes = np.empty(0, np.uint8)
        self._sums: dict[int, int] = {}

    def begin(self, writer: int, version: int, *, deadline_s: float) -> Bytes:
        if version != self._version:
            self._version, self._bytes = version, np.empty(self.spec.layout.size_bytes, np.uint8)
            self._sums = {}
        return self._bytes

    def finish(self, writer: int, version: int, checksum: int) -> bool:
        self._sums[writer] = checksum
        return not self.late(version)

    def read(self, reader: int, version: int) -> Bytes:
        whole, self._bytes, self._version = self._bytes, np.empty(0, np.uint8), None
        return whole

    def release(self, reader: int, version: int, *, loaded: bool) -> None:
        """Do nothing: the reader owns the copy."""

    def contents(self, version: int) -> Bytes | None:
        return None  # handed over: the reader may have changed it

    def sums(self, version: int) -> dict[int, int]:
        return self._sums

    def late(self, version: int) -> list[int]:
        return [w for w in self.spec.writers if w not in self._sums]

    def lacking(self, version: int) -> list[int]:
        return list(self.spec.delivery.readers)

    def close(self) -> None:
        """Do nothing: there is no file."""


def versions_only_go_up(writer: int, version: int, newest: int) -> WeightSyncError:
    why = "versions only go up: readers could not tell an old one from a late one, and may hold the newest"
    what = f"version {version} was pushed after version {newest}"
    return failed_sync("version-mismatch", f"actor rank {writer}", what, why=why)


def not_here(reader: int, version: int, late: Sequence[int], lacking: Sequence[int]) -> WeightSyncError:
    what = f"version {version} is no longer there: a later one has taken its place"
    if late:
        what = f"version {version} was not written by {ranks('actor', late)}"
    return failed_sync("incomplete-weights", f"rollout rank {reader}", what, version=version, lacking=lacking)


def _no_free_buffer(
    writer: int, version: int, began: float, holders: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> ChannelTimeout:
    """`holders`: of each buffer, the actor ranks and the rollout ranks that still use it."""
    users = [
        ranks(of, found) for pair in holders for of, found in zip(("actor", "rollout"), pair, strict=True) if found
    ]
    return late_sync(
        f"weights version {version}",
        f"actor rank {writer} waited {time.monotonic() - began:.1f} s for a free buffer",
        f"buffers are still in use by {'; '.join(users)}",
        "find out why they stopped, or raise the deadline if they are really this slow",
    )


def _locked_for_long(path: Path, began: float) -> ChannelTimeout:
    why = "another process of this node is making it, or was stopped while it held the lock"
    return late_sync(f"weights {path.name}", f"the buffer stayed locked for {time.monotonic() - began:.1f} s", why)
