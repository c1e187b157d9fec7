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
from rlplace.comm.ends import Attachment, QueueEnd, Step
from rlplace.comm.queue import Get, Put, QueueMachine
from rlplace.comm.shared_memory import process
from rlplace.comm.shared_memory.arena import Arenas
from rlplace.comm.shared_memory.folder import FULL, allocate, too_small
from rlplace.comm.shared_memory.lock import SharedLock
from rlplace.comm.table import (
    BROKEN,
    CLOSED,
    E_DATA,
    E_LENGTH,
    E_SEGMENT,
    LOCK,
    MAGIC,
    MAGIC_NUMBER,
    SPEC_AT,
    SPEC_BYTES,
    W_WOKEN,
    Table,
)
from rlplace.comm.wakeup import LoopWaker, Wakers
from rlplace.errors import ChannelBroken, ChannelError


class ItemStore:
    """Implements Store for one channel in shared memory: small items in their entries, others in segments of an arena.

    A payload is the small item, or the address of the segment.
    """

    def __init__(self, table: Table, mapped: mmap.mmap, arenas: Arenas, channel: int) -> None:
        """`channel`: its number, as holder of segments."""
        self._words, self._mapped = table.words, mapped
        self._room = table.inline_bytes
        self._channel = channel
        self.arenas = arenas
        self.pack = codec.Packers(self._room).pack

    def goes_along(self, packed: codec.Packed) -> bool:
        return type(packed) is bytes and len(packed) <= self._room

    def write(self, packed: codec.Packed) -> int:
        return self.arenas.write((packed,) if isinstance(packed, bytes) else packed)

    def release(self, payload: bytes | int) -> None:
        if isinstance(payload, int):
            self.arenas.of_segment(payload).free(payload)

    def open(self, payload: bytes | int) -> Any:
        return codec.unpack(self.packed(payload))

    def packed(self, payload: bytes | int) -> codec.Packed:
        """What was taken, the caller's own from now on."""
        return payload if isinstance(payload, bytes) else self.arenas.copy(payload)

    # ── under the channel's lock ─────────────────────────────────────────────────────────────────────────────────────

    def place(self, entry: int, payload: bytes | int) -> None:
        words = self._words
        if isinstance(payload, bytes):
            at, length = (entry + E_DATA) * 8, len(payload)
            self._mapped[at : at + length] = payload
            words[entry + E_LENGTH] = length
            words[entry + E_SEGMENT] = 0
        else:
            words[entry + E_SEGMENT] = payload
            self.arenas.of_segment(payload).pass_to(payload, self._channel)

    def take(self, entry: int) -> bytes | int:
        address: int = self._words[entry + E_SEGMENT]
        if address:
            self.arenas.of_segment(address).pass_to(address, 0)
            return address
        at = (entry + E_DATA) * 8
        return self._mapped[at : at + self._words[entry + E_LENGTH]]

    def drop(self, entry: int) -> None:
        address = self._words[entry + E_SEGMENT]
        if address:
            self.arenas.of_segment(address).free(address, self._channel)


class FileAttachment(Attachment):
    """An attachment to a channel's file. A forked child gets its own wakers and names."""

    store: ItemStore
    lock: SharedLock

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "r+b") as file:
            number = os.fstat(file.fileno()).st_ino
            self._mapped = mmap.mmap(file.fileno(), 0)
        with memoryview(self._mapped) as data, data.cast("q") as words:
            assert words[MAGIC] == MAGIC_NUMBER, f"{path} is no channel of this version"
            spec: ChannelSpec = pickle.loads(data[words[SPEC_AT] : words[SPEC_AT] + words[SPEC_BYTES]])
        table = Table(spec, self._mapped)
        store = ItemStore(table, self._mapped, Arenas.of(path.parent), number)
        super().__init__(table, store, SharedLock(self._mapped, 8 * LOCK), process.this_process())
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = weakref.WeakKeyDictionary()
        process.tell_of_forks(self)

    def after_fork(self) -> None:
        self.process = process.this_process()
        self.wakers = Wakers()
        self.queue = QueueMachine(self.table, self.process, self.store)
        self._loops = weakref.WeakKeyDictionary()
        self._late = []

    def detach(self) -> None:
        """Give back the mapping and all descriptors; the attachment is not to be used again."""
        self.lock.close()
        self.wakers.close()
        for waker in self._loops.values():
            waker.close()
        self.table.release()
        self._mapped.close()

    def alive(self, process_: int) -> bool:
        return process.alive(process_)

    def unnamed(self, process_: int) -> str:
        return f"process {process.pid_of(process_)}"

    def pause(self) -> bool:
        os.sched_yield()
        return True

    async def attempt_async(self, step: Step, request: Put | Get, patience_s: float | None) -> None:
        """As `attempt`, for a task of a channel server. Cancelled, it takes nothing."""
        if patience_s is None:
            self.attempt(step, request, None)
            return
        if self.run(step, request, 0, time.monotonic()):
            return
        loop, woken, words, reals = asyncio.get_running_loop(), asyncio.Event(), self.table.words, self.table.reals
        waker = self._loops.get(loop)
        if waker is None:
            waker = self._loops[loop] = LoopWaker()

        def look() -> None:
            if reals[request.waiter + W_WOKEN] or words[CLOSED] or words[BROKEN]:
                woken.set()

        try:
            with waker.calling(request, look):
                for seconds in self.attempts(step, request, waker.number, time.monotonic() + patience_s):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(seconds):
                            await woken.wait()
                    woken.clear()
        finally:
            if request.waiter:  # cancelled
                self.undo(self.queue.withdraw, request, time.monotonic())


def _make(path: Path, spec: ChannelSpec) -> None:
    """A channel that is open and empty. ClusterError when the memory is full: later no access can fail for that."""
    at, text = Table(spec).size_bytes, pickle.dumps(spec, 5)
    size = at + (len(text) + 7) // 8 * 8
    new = path.with_name(path.name + ".new")
    try:
        allocate(new, size)
        with open(new, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
            mapped[at : at + len(text)] = text
            table = Table(spec, mapped)
            table.words[SPEC_AT], table.words[SPEC_BYTES] = at, len(text)
            table.clear()
            table.release()
            SharedLock.make(mapped, 8 * LOCK)
        os.link(new, path)  # unlike rename, refuses to replace another channel of this name
    except OSError as error:
        if error.errno in FULL:
            raise too_small(path.parent, size, key="cluster.comm.shm_folder") from error
        raise
    finally:
        new.unlink(missing_ok=True)


class SharedChannel(QueueEnd):
    """Ends of one process share its attachment; a pickled end attaches by the file's path."""

    _attachment: FileAttachment

    @classmethod
    def create(cls, folder: Path, spec: ChannelSpec) -> SharedChannel:
        """A new channel in a job folder, as the file `<name>.channel`; its maker destroys it."""
        path = folder / f"{urllib.parse.quote(spec.name, safe=' ')}.channel"
        _make(path, spec)
        return cls.attach(path)

    @classmethod
    def attach(cls, path: Path) -> SharedChannel:
        return cls(FileAttachment(path))

    @property
    def path(self) -> Path:
        return self._attachment.path

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self.path, self.owner)

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
        self, packed: bytes, key: str, weight: float, version: int | None, patience_s: float | None
    ) -> None:
        """A small item."""
        attachment = self._attachment
        put = Put(self.owner, key, weight, version, packed if attachment.store.goes_along(packed) else None)
        await attachment.attempt_async(attachment.queue.put, put, patience_s)
        if put.entry:
            self._fill(put, packed)

    async def reserve(self, key: str, weight: float, version: int | None, patience_s: float | None) -> Put:
        """Credit for an item whose data is still on its way: `fill` or `withdraw` it."""
        put = Put(self.owner, key, weight, version, None)
        await self._attachment.attempt_async(self._attachment.queue.put, put, patience_s)
        return put

    def fill(self, put: Put, packed: codec.Packed) -> None:
        """The item is here. Ignored once the channel is broken."""
        with contextlib.suppress(ChannelBroken):
            self._fill(put, packed)

    def withdraw(self, put: Put) -> None:
        """The item will never come."""
        self._attachment.undo(self._attachment.queue.cancel, put, time.monotonic())

    async def take(self, limit: float | None, key: str, patience_s: float | None) -> tuple[Get, list[codec.Packed]]:
        """Items for a client that may never receive them: `confirm` or `restore` them."""
        get = Get(self.owner, key, limit, remote=True)
        await self._attachment.attempt_async(self._attachment.queue.get, get, patience_s)
        try:
            return get, [self._attachment.store.packed(payload) for payload, _, _ in get.taken]
        except BaseException:
            self.confirm(get)  # they are lost, the room that they had is not
            raise

    def confirm(self, get: Get) -> None:
        """The client has them."""
        self._attachment.undo(self._attachment.queue.confirm, get, time.monotonic())

    def restore(self, get: Get, items: list[codec.Packed]) -> None:
        """No client received them: they go back to the front of their line."""
        store = self._attachment.store
        again = [packed if store.goes_along(packed) else store.write(packed) for packed in items]
        with contextlib.suppress(ChannelBroken):
            self._attachment.undo(self._attachment.queue.restore, get, again, time.monotonic())

    def died(self) -> None:
        """The process of this end's owner has ended or cannot be reached any more."""
        self._attachment.undo(self._attachment.queue.end_of_owner, self.owner)


def _attached(path: Path, owner: str) -> SharedChannel:
    return SharedChannel.attach(path).named(owner)
