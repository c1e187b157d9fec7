"""The channel between processes of one node: its table is a file in shared memory, worked on by all, served by none.

A put or get that need not wait is one change under the channel's lock, without a message to another process. One that
must wait sleeps on its waker until the process that makes it possible wakes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import pickle
import time
import urllib.parse
import weakref
from pathlib import Path
from typing import Any

from rlplace.comm import codec
from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import TICK_S, Attachment, QueueEnd
from rlplace.comm.queue import Get, Put, QueueMachine
from rlplace.comm.shared_memory import process
from rlplace.comm.shared_memory.folder import FULL, allocate, too_small
from rlplace.comm.shared_memory.lock import FileLock
from rlplace.comm.shared_memory.segments import Arenas, ItemStore
from rlplace.comm.shared_memory.wakeup import LoopWaker, SocketWakers
from rlplace.comm.table import (
    BROKEN,
    CLOSED,
    MAGIC,
    MAGIC_NUMBER,
    NEWEST_VERSION,
    NO_VERSION,
    SPEC_AT,
    SPEC_BYTES,
    W_WOKEN,
    Layout,
)
from rlplace.errors import ChannelBroken, ChannelError


class ChannelFile:
    """One mapping of a channel's file: a table in shared memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.mapped = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self.data = memoryview(self.mapped)
        self.words = self.data.cast("q")
        self.reals = self.data.cast("d")
        assert self.words[MAGIC] == MAGIC_NUMBER, f"{path} is no channel of this version"
        at, size = self.words[SPEC_AT], self.words[SPEC_BYTES]
        self.spec: ChannelSpec = pickle.loads(self.data[at : at + size])
        self.layout = Layout.of(self.spec)

    def detach(self) -> None:
        """Unmap. Any later access is a ValueError."""
        for view in (self.words, self.reals, self.data):
            view.release()
        self.mapped.close()


def _make(path: Path, spec: ChannelSpec) -> None:
    """A channel that is open and empty. ClusterError when the memory is full: later no access can fail for that."""
    layout, text = Layout.of(spec), pickle.dumps(spec, 5)
    size = layout.words * 8 + (len(text) + 7) // 8 * 8
    new = path.with_name(path.name + ".new")
    try:
        allocate(new, size)
        with open(new, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
            mapped[layout.words * 8 : layout.words * 8 + len(text)] = text
            with memoryview(mapped) as data, data.cast("q") as words:
                words[SPEC_AT], words[SPEC_BYTES] = layout.words * 8, len(text)
                words[NEWEST_VERSION] = NO_VERSION
                words[MAGIC] = MAGIC_NUMBER
        os.link(new, path)  # unlike rename, refuses to replace another channel of this name
    except OSError as error:
        if error.errno in FULL:
            raise too_small(path.parent, size, key="cluster.comm.shm_folder") from error
        raise
    finally:
        new.unlink(missing_ok=True)


class FileAttachment(Attachment):
    """An attachment to a channel's file. A forked child gets its own wakers and names."""

    def __init__(self, path: Path) -> None:
        self.memory: ChannelFile = ChannelFile(path)
        memory = self.memory
        self.store = ItemStore(memory.words, memory.mapped, memory.layout.inline_bytes, Arenas.of(path.parent))
        self.lock: FileLock = FileLock(path)
        self.wakers: SocketWakers = SocketWakers()
        super().__init__(self.memory, self.store, self.lock, self.wakers, process.this_process())
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = weakref.WeakKeyDictionary()
        process.tell_of_forks(self)

    def after_fork(self) -> None:
        self.process = process.this_process()
        self.wakers = SocketWakers()
        self.queue = QueueMachine(self.memory, self.process, self.store)
        self._loops = weakref.WeakKeyDictionary()
        self._abandoned = []

    def detach(self) -> None:
        """Give back the mapping and all descriptors; the attachment is not to be used again."""
        self.lock.close()
        self.wakers.close()
        for waker in self._loops.values():
            waker.close()
        self.memory.detach()

    def alive(self, word: int) -> bool:
        return process.alive(word)

    def unnamed(self, word: int) -> str:
        return f"process {process.pid_of(word)}"

    # ── for a channel server ─────────────────────────────────────────────────────────────────────────────────────────

    async def attempt_async(self, request: Put | Get, patience_s: float | None) -> None:
        """As `attempt`, for a task. Cancelled, it takes nothing."""
        if patience_s is None:
            self.attempt(request, None)
            return
        loop = asyncio.get_running_loop()
        waker = self._loops.get(loop)
        if waker is None:
            waker = self._loops[loop] = LoopWaker()
        try:
            await self._sleep_async(request, waker, time.monotonic() + patience_s)
        finally:
            if request.waiter:  # cancelled
                self.withdraw(request)

    async def _sleep_async(self, request: Put | Get, waker: LoopWaker, deadline: float) -> None:
        loop, woken, words, reals = asyncio.get_running_loop(), asyncio.Event(), self.memory.words, self.memory.reals
        step = self.queue.put if isinstance(request, Put) else self.queue.get

        def look() -> None:
            if reals[request.waiter + W_WOKEN] or words[CLOSED] or words[BROKEN]:
                woken.set()

        now = time.monotonic()
        if self.run(step, request, waker.number, now):
            return
        waker.add(loop, request, look)
        try:
            while True:
                left = deadline - now
                if left <= 0:
                    raise self.run(self.queue.expired, request, time.monotonic())
                try:
                    async with asyncio.timeout(min(left, TICK_S)):
                        await woken.wait()
                except TimeoutError:
                    self.look_for_dead(time.monotonic())
                woken.clear()
                now = time.monotonic()
                if self.run(step, request, waker.number, now):
                    return
        finally:
            waker.remove(loop, request)


class SharedChannel(QueueEnd):
    """Ends of one process share its attachment; a pickled end attaches by the file's path."""

    _attachment: FileAttachment
    _store: ItemStore

    @classmethod
    def create(cls, folder: Path, spec: ChannelSpec) -> SharedChannel:
        """A new channel in a job folder, as the file `<name>.channel`; its maker destroys it."""
        path = folder / f"{urllib.parse.quote(spec.name, safe=' ')}.channel"
        _make(path, spec)
        return cls.attach(path)

    @classmethod
    def attach(cls, path: Path) -> SharedChannel:
        attachment = FileAttachment(path)
        return cls(attachment, attachment.store)

    @property
    def path(self) -> Path:
        return self._attachment.memory.path

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self.path, self._owner)

    def destroy(self) -> None:
        """Break the channel for every end and remove its file; for its maker. Idempotent."""
        with contextlib.suppress(ChannelError):  # a process holds the lock
            self.break_("the channel was destroyed")
        self.path.unlink(missing_ok=True)

    def detach(self) -> None:
        """Give back this process' mapping and descriptors. The ends that share them cannot be used any more."""
        self._attachment.detach()

    # ── for a channel server: packed items, and promises to clients that may vanish ──────────────────────────────────

    async def put_packed(
        self, packed: bytes, *, key: str, weight: float, version: int | None, patience_s: float | None
    ) -> None:
        """A small item."""
        put = self._put_request(packed, key, weight, version)
        await self._attachment.attempt_async(put, patience_s)
        if put.entry:
            self._fill(put, packed)

    async def reserve(self, *, key: str, weight: float, version: int | None, patience_s: float | None) -> Reservation:
        """Credit for an item whose data is still on its way."""
        put = self._put_request(None, key, weight, version)
        await self._attachment.attempt_async(put, patience_s)
        return Reservation(self, put)

    async def take(self, limit: float | None, *, key: str, patience_s: float | None) -> Taking:
        """Items for a client that may never receive them."""
        get = self._get_request(limit, key)
        await self._attachment.attempt_async(get, patience_s)
        return Taking(self, get, [self._store.packed(taken.payload) for taken in get.taken])

    def died(self, owner: str) -> None:
        """The process of `owner` has ended or cannot be reached any more."""
        self._attachment.run(self._attachment.queue.end_of_owner, owner)


class Reservation:
    """Credit that was granted. Ends with one of the two calls."""

    def __init__(self, channel: SharedChannel, put: Put) -> None:
        self._channel, self._put = channel, put

    def fill(self, packed: codec.Packed) -> None:
        """The item is here. Ignored once the channel is broken."""
        with contextlib.suppress(ChannelBroken):
            self._channel._fill(self._put, packed)

    def withdraw(self) -> None:
        """The item will never come."""
        attachment = self._channel._attachment
        attachment.run(attachment.queue.cancel, self._put, time.monotonic())


class Taking:
    """Items that were taken, packed; the taker's own by now."""

    def __init__(self, channel: SharedChannel, get: Get, packed: list[codec.Packed]) -> None:
        self.packed = packed
        self._channel, self._get = channel, get

    def restore(self) -> None:
        """No client received them: they go back to the front of their line."""
        attachment, store = self._channel._attachment, self._channel._store
        again = [packed if store.goes_along(packed) else store.write(packed) for packed in self.packed]
        with contextlib.suppress(ChannelBroken):
            attachment.run(attachment.queue.restore, self._get, again, time.monotonic())


def _attached(path: Path, owner: str) -> SharedChannel:
    return SharedChannel.attach(path).named(owner)
