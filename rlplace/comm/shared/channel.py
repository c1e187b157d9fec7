"""The channel between processes of one node: its state is a file in shared memory, worked on by all, served by nobody.

A put or get that need not wait is one change under the channel's lock, without a word to another process. One that
must wait sleeps on its doorbell until whoever makes it possible rings.
"""

from __future__ import annotations

import contextlib
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlplace.comm import codec, refusals
from rlplace.comm.channel import BatchPolicy, ChannelSpec, ChannelStats, Lease
from rlplace.comm.lease import OwnedLease
from rlplace.comm.shared import endings, memory
from rlplace.comm.shared.attachment import Attachment
from rlplace.comm.shared.layout import NO_VERSION
from rlplace.comm.shared.promises import SharedReservation, SharedTaking
from rlplace.comm.shared.requests import GetBatchRequest, GetRequest, PutRequest, Request
from rlplace.errors import ChannelError


class SharedChannel:
    """Implements Channel. Ends of one process share its attachment; a pickled end attaches by the file's path."""

    def __init__(self, attachment: Attachment, owner: str = "an unnamed worker") -> None:
        self._attachment = attachment
        self._spec = attachment.spec
        self._owner = owner
        self._inline_bytes = attachment.memory.layout.inline_bytes

    @classmethod
    def create(cls, folder: Path, spec: ChannelSpec) -> SharedChannel:
        """A new channel in a job folder, as the file `<name>.channel`; whoever makes it destroys it."""
        path = folder / f"{urllib.parse.quote(spec.name, safe=' ')}.channel"
        memory.make(path, spec)
        return cls.attach(path)

    @classmethod
    def attach(cls, path: Path) -> SharedChannel:
        return cls(Attachment(path))

    @property
    def spec(self) -> ChannelSpec:
        return self._spec

    @property
    def path(self) -> Path:
        return self._attachment.memory.path

    def named(self, owner: str) -> SharedChannel:
        return SharedChannel(self._attachment, owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self.path, self._owner)

    # ── putting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        item: Any,
        *,
        key: str = "",
        weight: float = 1.0,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        packed = codec.pack(item, self._inline_bytes)
        request = self._put_request(packed, codec.size_bytes(item), key, weight, version)
        self._attachment.wait(request, self._patience(timeout_s))
        if request.entry:
            self._fill(request, packed)

    def put_nowait(self, item: Any, *, key: str = "", weight: float = 1.0, version: int | None = None) -> None:
        packed = codec.pack(item, self._inline_bytes)
        request = self._put_request(packed, codec.size_bytes(item), key, weight, version)
        self._attachment.at_once(request)
        if request.entry:
            self._fill(request, packed)

    async def put_async(
        self,
        item: Any,
        *,
        key: str = "",
        weight: float = 1.0,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        packed = codec.pack(item, self._inline_bytes)
        request = self._put_request(packed, codec.size_bytes(item), key, weight, version)
        await self._attachment.wait_async(request, self._patience(timeout_s))
        if request.entry:
            self._fill(request, packed)

    # ── getting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, *, key: str = "", timeout_s: float | None = None) -> Any:
        request = self._get_request(key)
        self._attachment.wait(request, self._patience(timeout_s))
        return self._items(request)[0]

    def get_nowait(self, *, key: str = "") -> Any:
        request = self._get_request(key)
        self._attachment.at_once(request)
        return self._items(request)[0]

    async def get_async(self, *, key: str = "", timeout_s: float | None = None) -> Any:
        request = self._get_request(key)
        await self._attachment.wait_async(request, self._patience(timeout_s))
        return self._items(request)[0]

    def get_lease(self, *, key: str = "", timeout_s: float | None = None) -> Lease:
        request = self._get_request(key)
        self._attachment.wait(request, self._patience(timeout_s))
        taken = request.taken[0]
        if not taken.slab:
            return OwnedLease(codec.loads(taken.data))
        try:
            return self._attachment.slabs.lease(taken.data)
        except FileNotFoundError:
            raise self._gone() from None

    def get_batch(
        self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most", timeout_s: float | None = None
    ) -> list[Any]:
        request = self._batch_request(key, weight, policy)
        self._attachment.wait(request, self._patience(timeout_s))
        return self._items(request)

    def get_batch_nowait(self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most") -> list[Any]:
        request = self._batch_request(key, weight, policy)
        self._attachment.at_once(request)
        return self._items(request)

    async def get_batch_async(
        self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most", timeout_s: float | None = None
    ) -> list[Any]:
        request = self._batch_request(key, weight, policy)
        await self._attachment.wait_async(request, self._patience(timeout_s))
        return self._items(request)

    # ── for a gate: see network.backing ──────────────────────────────────────────────────────────────────────────────

    async def put_packed(
        self,
        packed: bytes,
        size_bytes: int,
        *,
        key: str,
        weight: float,
        version: int | None,
        patience_s: float | None,
    ) -> None:
        request = self._put_request(packed, size_bytes, key, weight, version)
        await self._settle(request, patience_s)
        if request.entry:
            self._fill(request, packed)

    async def reserve(
        self, size_bytes: int, *, key: str, weight: float, version: int | None, patience_s: float | None
    ) -> SharedReservation:
        request = self._put_request(None, size_bytes, key, weight, version)
        await self._settle(request, patience_s)
        return SharedReservation(request, self._fill, self._cancel)

    async def take(
        self, batch: tuple[float, BatchPolicy] | None, *, key: str, patience_s: float | None
    ) -> SharedTaking:
        request = self._get_request(key) if batch is None else self._batch_request(key, *batch)
        await self._settle(request, patience_s)
        return SharedTaking(request, self._packed(request), self._restore)

    async def _settle(self, request: Request, patience_s: float | None) -> None:
        if patience_s is None:
            self._attachment.at_once(request)
        else:
            await self._attachment.wait_async(request, patience_s)

    def died(self, owner: str) -> None:
        """The process of `owner`, for whom this one has acted, has ended; what it waited for was withdrawn."""
        self._change(endings.end_of_owner, owner)

    # ── versions, endings and statistics ─────────────────────────────────────────────────────────────────────────────

    def advance(self, version: int) -> None:
        self._change(endings.advance, version)

    def leave(self, producer: str) -> None:
        self._change(endings.leave, producer)

    def close(self) -> None:
        self._change(endings.close)

    def break_(self, why: str) -> None:
        self._change(endings.break_, why)

    def stats(self) -> ChannelStats:
        self._attachment.fork_safe()
        return self._attachment.stats()

    def destroy(self) -> None:
        """Breaks the channel for every end and removes its file; for whoever made it. Idempotent."""
        with contextlib.suppress(ChannelError):  # somebody sits on the lock
            self.break_("the channel was destroyed")
        self.path.unlink(missing_ok=True)

    def detach(self) -> None:
        """Gives back this process' mapping and descriptors. The ends that share them cannot be used any more."""
        self._attachment.detach()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _patience(self, timeout_s: float | None) -> float:
        return self._spec.timeout_s if timeout_s is None else timeout_s

    def _change(self, step: Callable[..., None], *arguments: object) -> None:
        self._attachment.fork_safe()
        self._attachment.run(step, self._attachment.queue, *arguments)

    def _put_request(
        self, packed: codec.Packed | None, size_bytes: int, key: str, weight: float, version: int | None
    ) -> PutRequest:
        """`packed` None: it is not here yet. Only a small item goes with the request itself."""
        self._attachment.fork_safe()
        stamp = NO_VERSION if version is None else version
        data = packed if isinstance(packed, bytes) and self._fits(packed) else None
        return PutRequest(self._attachment.queue, self._owner, key, size_bytes, weight, stamp, data)

    def _fits(self, packed: bytes) -> bool:
        """Into an entry; what came through a gate was packed for another room."""
        return len(packed) <= self._inline_bytes

    def _get_request(self, key: str) -> GetRequest:
        self._attachment.fork_safe()
        return GetRequest(self._attachment.queue, self._owner, key)

    def _batch_request(self, key: str, weight: float, policy: BatchPolicy) -> GetBatchRequest:
        self._attachment.fork_safe()
        return GetBatchRequest(self._attachment.queue, self._owner, key, weight, policy)

    def _fill(self, request: PutRequest, packed: codec.Packed) -> None:
        """The data of a granted put moves: into a slab, and its address into the line."""
        attachment = self._attachment
        try:
            if isinstance(packed, bytes) and self._fits(packed):
                attachment.run(request.fill, packed, 0)
                return
            address = attachment.slabs.write(packed, self._inline_bytes)
            try:
                attachment.run(request.fill, address, 1)
            except ChannelError:
                attachment.slabs.release(address)
                raise
        finally:
            if request.entry:  # the data never came
                attachment.run(request.cancel)

    def _cancel(self, request: PutRequest) -> None:
        self._attachment.run(request.cancel)

    def _restore(self, request: GetRequest, items: list[codec.Packed]) -> None:
        slabs = self._attachment.slabs
        again = [
            (packed, 0) if isinstance(packed, bytes) else (slabs.write(packed, self._inline_bytes), 1)
            for packed in items
        ]
        self._attachment.run(request.restore, again)

    def _items(self, request: GetRequest) -> list[Any]:
        return [codec.open_packed(packed) for packed in self._packed(request)]

    def _packed(self, request: GetRequest) -> list[codec.Packed]:
        """What was taken, this end's own from now on."""
        slabs = self._attachment.slabs
        try:
            return [slabs.packed(taken.data) if taken.slab else taken.data for taken in request.taken]
        except FileNotFoundError:
            raise self._gone() from None

    def _gone(self) -> ChannelError:
        return refusals.broken(self._spec, self._owner, "the memory of the job is gone")


def _attached(path: Path, owner: str) -> SharedChannel:
    return SharedChannel.attach(path).named(owner)
