"""The channel between processes of one node: its table is a file in shared memory that all of them change directly.

A put or get that need not wait is one change under the channel's lock, without a message to another process.
Otherwise it sleeps on its waker until another process makes it possible and wakes it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import time
import urllib.parse
from pathlib import Path
from typing import Any

from rlplace.comm import codec
from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import Attachment, QueueEnd
from rlplace.comm.processes import SharedLock
from rlplace.comm.queue import Get, Put
from rlplace.comm.shared_memory.arena import Arenas
from rlplace.comm.shared_memory.folder import FULL, allocate, too_small
from rlplace.comm.table import (
    BYTES,
    E_DATA,
    E_LENGTH,
    E_SEGMENT,
    LOCK,
    SPEC_BYTES,
    Table,
)
from rlplace.errors import ChannelError


class ItemStore:
    """Store of items in shared memory.

    The payload of an item is the packed item itself if it is small, else the address of the segment with the item.
    """

    def __init__(
        self,
        table: Table,
        mapped: mmap.mmap,
        arenas: Arenas,
        channel: int,
    ) -> None:
        """Use the memory of a channel's file.

        `table`: state of the channel. `mapped`: the mapped file. `arenas`: segments of large items. `channel`: number
        by which the arenas know this channel as a holder of segments.
        """
        self._words = table.words
        self._mapped = mapped
        self._room = table.inline_bytes
        self._channel = channel
        self.arenas = arenas
        self.pack = codec.Packers(self._room).pack

    def inline(self, packed: codec.Packed | None) -> bytes | None:
        """Return a packed item if it fits into its entry. Return None if it needs a segment; `fill` must add it later.

        `packed`: None if the item has not arrived yet; the result is then None.
        """
        if isinstance(packed, bytes) and len(packed) <= self._room:
            return packed
        return None

    def write(self, packed: codec.Packed) -> bytes | int:
        """Return the payload of a packed item; copy the item into a segment if it does not fit into its entry.

        Raise OutputError if there is no room for the segment.
        """
        if isinstance(packed, bytes):
            if len(packed) <= self._room:
                return packed
            return self.arenas.write((packed,))
        return self.arenas.write(packed)

    def release(self, payload: bytes | int) -> None:
        """Free the segment, if any, of a payload that never entered the channel."""
        if isinstance(payload, int):
            self.arenas.of_segment(payload).free(payload)

    def packed(self, payload: bytes | int) -> codec.Packed:
        """Return the packed item of a taken payload, in memory of the caller, and free the payload's segment."""
        if isinstance(payload, bytes):
            return payload
        return self.arenas.copy(payload)

    def open(self, payload: bytes | int) -> Any:
        """Return the unpacked item of a taken payload, and free the payload's segment."""
        return codec.unpack(self.packed(payload))

    # ── under the channel's lock ─────────────────────────────────────────────────────────────────────────────────────

    def place(self, entry: int, payload: bytes | int) -> None:
        words = self._words
        if isinstance(payload, bytes):
            at = (entry + E_DATA) * 8
            length = len(payload)
            self._mapped[at : at + length] = payload
            words[entry + E_LENGTH] = length
            words[entry + E_SEGMENT] = 0
            words[BYTES] += length
        else:
            # The channel becomes the holder of the segment
            words[entry + E_SEGMENT] = payload
            arena = self.arenas.of_segment(payload)
            words[BYTES] += arena.size(payload)
            arena.pass_to(payload, self._channel)

    def take(self, entry: int) -> bytes | int:
        # This process becomes the holder
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
    """Attachment of this process to a channel in a file of shared memory. It maps the file `path`.

    `store`: the memory of the items. `lock`: guards the channel's state and the store.
    """

    store: ItemStore
    lock: SharedLock

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "r+b") as file:
            # The inode is the channel's number as holder of segments
            number = os.fstat(file.fileno()).st_ino
            self._mapped = mmap.mmap(file.fileno(), 0)
        # The pickled spec is at the end of the file
        with memoryview(self._mapped) as data, data.cast("q") as words:
            spec: ChannelSpec = pickle.loads(data[len(data) - words[SPEC_BYTES] :])
        table = Table(spec, self._mapped)
        store = ItemStore(table, self._mapped, Arenas.of(path.parent), number)
        super().__init__(table, store, SharedLock(self._mapped, 8 * LOCK), spins=True)

    def detach(self) -> None:
        """Release the mapping and all file descriptors. The attachment cannot be used any more."""
        self.lock.close()
        self.wakers.close()
        self.table.release()
        self._mapped.close()


def _make(path: Path, spec: ChannelSpec) -> None:
    """Create the file of an open, empty channel.

    All of its memory is allocated now, so that later accesses cannot fail. Raise ClusterError if there is too little
    memory.
    """
    # Table first, pickled spec at the end
    text = pickle.dumps(spec, 5)
    text += bytes(-len(text) % 8)
    size = Table(spec).size_bytes + len(text)
    new = path.with_name(path.name + ".new")
    try:
        # Under another name until it is complete
        allocate(new, size)
        with open(new, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
            # Readers find the spec's length in the header
            mapped[-len(text) :] = text
            mapped[8 * SPEC_BYTES : 8 * SPEC_BYTES + 8] = len(text).to_bytes(
                8, "little"
            )
            SharedLock.make(mapped, 8 * LOCK)
        # Unlike a rename, a link never replaces another channel of this name
        os.link(new, path)
    except OSError as error:
        if error.errno in FULL:
            raise too_small(path.parent, size) from error
        raise
    finally:
        new.unlink(missing_ok=True)


class SharedChannel(QueueEnd):
    """An end of a channel in a file of shared memory. An unpickled end finds the channel by the path of this file."""

    _attachment: FileAttachment

    @classmethod
    def create(cls, folder: Path, spec: ChannelSpec) -> SharedChannel:
        """Create a channel in a job folder, as the file `<name>.channel`, and return an end.

        The caller must destroy the channel.
        """
        path = folder / f"{urllib.parse.quote(spec.name, safe=' ')}.channel"
        _make(path, spec)
        return cls.attach(path)

    @classmethod
    def attach(cls, path: Path) -> SharedChannel:
        """Map the file `path` of a channel, and return an end of the channel."""
        return cls(FileAttachment(path))

    @property
    def path(self) -> Path:
        """Path of the channel's file."""
        return self._attachment.path

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).attach, (self.path,), {"owner": self.owner}

    def destroy(self) -> None:
        """Break the channel for all ends and remove its file. Only its creator may call this. Idempotent."""
        # Another process holds the lock
        with contextlib.suppress(ChannelError):
            self.break_("the channel was destroyed")
        self.path.unlink(missing_ok=True)

    def detach(self) -> None:
        """Release this process's mapping and file descriptors. The ends that share these cannot be used any more."""
        self._attachment.detach()

    def _put(
        self,
        item: Any,
        key: str,
        weight: float,
        version: int | None,
        patience_s: float | None,
    ) -> None:
        attachment = self._attachment
        # Packing happens before the lock is needed
        packed = attachment.store.pack(item)
        put = Put(self.owner, key, weight, version, attachment.store.inline(packed))
        attachment.attempt(attachment.queue.put, put, patience_s)
        if put.entry:
            self.fill(put, packed)

    def fill(self, put: Put, packed: codec.Packed) -> None:
        """Append `packed`, the item of a put that holds credit (reserved room). On an error, give the credit back."""
        attachment = self._attachment
        store = self._attachment.store
        try:
            payload = store.write(packed)
            try:
                attachment.run(attachment.queue.fill, put, payload, time.monotonic())
            except ChannelError:
                store.release(payload)
                raise
        finally:
            # The item could not be written
            if put.entry:
                self.give_back(put)

    def _get(
        self,
        limit: float | None,
        key: str,
        patience_s: float | None,
    ) -> list[Any]:
        attachment = self._attachment
        get = Get(self.owner, key, limit)
        attachment.attempt(attachment.queue.get, get, patience_s)
        if limit is None:
            return [attachment.store.open(get.taken[0][0])]
        return self._open_all(
            [payload for payload, _, _ in get.taken],
            attachment.store.open,
            key,
        )

    # ── for a channel server: packed items, and promises to clients that may vanish ──────────────────────────────────

    async def put_packed(
        self,
        packed: codec.Packed | None,
        key: str,
        weight: float,
        version: int | None,
        patience_s: float | None,
    ) -> Put:
        """Put a packed item and return the put.

        `packed`: None means to take only credit (reserve room), for an item that has not arrived yet; the caller then
        calls `fill` with the item, or `give_back`. `weight`: weight of the item. `version`: version of the policy that
        made the item; None: no version. `patience_s`: the most seconds to wait for credit; None: raise ChannelFull
        instead of waiting.
        """
        attachment = self._attachment
        put = Put(self.owner, key, weight, version, attachment.store.inline(packed))
        await attachment.attempt_async(attachment.queue.put, put, patience_s)
        if packed is not None and put.entry:
            self.fill(put, packed)
        return put

    async def take(
        self,
        limit: float | None,
        key: str,
        patience_s: float | None,
    ) -> Get:
        """Take packed items for a client on another node, and return the get, whose `taken` has the items.

        The caller must call `confirm` when the client has received the items, or `give_back`. `limit`: summed weight of
        a batch; None: one item. `patience_s`: the most seconds to wait; None: raise ChannelEmpty instead of waiting.
        """
        get = Get(self.owner, key, limit, remote=True)
        await self._attachment.attempt_async(
            self._attachment.queue.get,
            get,
            patience_s,
        )
        try:
            # Copied now, so that the segment is free while the network is slow
            get.taken = [
                (self._attachment.store.packed(p), weight, version)
                for p, weight, version in get.taken
            ]
        except BaseException:
            # The items are lost, but not their room
            self.confirm(get)
            raise
        return get

    def confirm(self, get: Get) -> None:
        """Record that the client has received the items of a get."""
        self._attachment.undo(self._attachment.queue.confirm, get, time.monotonic())

    def give_back(self, request: Put | Get) -> None:
        """Undo a request: free the room that a put has reserved, or put the items of a get back at the front of their
        line.
        """
        attachment = self._attachment
        if isinstance(request, Put):
            attachment.undo(attachment.queue.cancel, request, time.monotonic())
            return
        request.taken = [
            (attachment.store.write(p), weight, version)
            for p, weight, version in request.taken
        ]
        attachment.undo(attachment.queue.restore, request, time.monotonic())

    def died(self) -> None:
        """Mark the owner of this end as dead, because its process has ended or cannot be reached any more."""
        self._attachment.undo(self._attachment.queue.end_of_owner, self.owner)
