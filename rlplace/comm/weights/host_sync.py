"""Both ends of a weight sync through the host; what goes from device to device, they hand on to `device_sync`.

::

                      ┌─ on accelerators: DeviceSender ──────────▶ readers there, all together
    push ─▶ per copy ─┼─ near: straight into the double buffer ──▶ last writer: Complete to every reader
                      └─ else: header, buckets ──────────────────▶ the lead reader, which writes them for this rank

    pull ◀─ Complete ────────────── read the double buffer
         ◀─ PushHeader, Buckets ─── write the buckets into the copy, for their source rank; after the last writer:
                                    send Complete to the other readers, and read the copy, too

Between nodes the header names a stream, from which the lead reader asks for the buckets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlplace.codes import problem
from rlplace.comm.channel import Channel
from rlplace.comm.weights.buffer import DoubleBuffer, OwnCopy
from rlplace.comm.weights.device_sync import (
    DeviceReceiver,
    DeviceSender,
    LoadFrom,
    WindowReceiver,
)
from rlplace.comm.weights.shards import (
    Assembly,
    Bytes,
    Changes,
    Layout,
    Piece,
    Shard,
    assemble,
    checksum,
    parts_of,
    tensors_in,
    write_piece,
)
from rlplace.comm.weights.version import (
    Bucket,
    Complete,
    Push,
    PushHeader,
    ReceivedWeights,
    WeightReceiver,
    failed_sync,
    not_here,
    versions_only_go_up,
)
from rlplace.errors import ChannelEmpty, ChannelTimeout, WeightSyncError
from rlplace.placement.flow import BUCKET_BYTES, Delivery, DeviceDelivery, Transport
from rlplace.placement.language.slots import owner_of

if TYPE_CHECKING:
    from rlplace.comm.network import Connection, StreamTaker

_DRAIN_S = 0.02  # interval at which a receiver that waits for credit or buckets reads its messages
_ON_THE_WAY = 2  # buckets that a receiver has asked for, with the one that it writes


class WeightSender:
    """End of a weight sync at one source rank, which sends the rank's weights to all deliveries.

    A delivery is one whole copy of the weights. `channel`: the weights channel. `deliveries`: the planned copies, at
    least one. `folder`: the job folder of this node, with the double buffers; None if ranks share no memory. `device`:
    the sender for deliveries on accelerators. `verify_every`: every n-th push has checksums, which writers and readers
    compute; 0: none. Buckets between nodes always have checksums. `delta_share`: between nodes, send only changed bytes
    if they take at most this share of the bytes; 0: send all bytes. `bucket_bytes`: the most bytes of a bucket.
    `check`: called while a push waits for a reader on another node; its errors end the push.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        rank: int = 0,
        deliveries: Sequence[Delivery],
        folder: Path | None = None,
        device: DeviceSender | None = None,
        verify_every: int = 0,
        delta_share: float = 0.0,
        bucket_bytes: int = BUCKET_BYTES,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._deliveries = tuple(deliveries)
        self._source = self._deliveries[0].source
        self._folder = folder
        self._device = device
        self._verify_every = verify_every
        # An OwnCopy is handed over: none to change
        self._delta_share = delta_share if folder is not None else 0.0
        self._bucket_bytes = bucket_bytes
        self._check = check
        # What `_planned` was planned for
        self._held: object = None
        self._planned: tuple[Assembly, ...] = ()
        self._buffer: DoubleBuffer | None = None
        # By lead: version and buckets, for delta
        self._streamed: dict[int, tuple[int | None, list[Bytes | None]]] = {}
        self._pushes = 0
        # Version that was sent
        self._newest = -1

    def push(
        self, version: int, shards: Sequence[Shard], *, partial: bool = False
    ) -> dict[str, int]:
        """Send this rank's pieces of `version` to all deliveries; return transport -> sent bytes.

        `shards`: this rank's shards; all source ranks have the same tensors in their shards. `partial`: whether the
        shards are only some of the weights. Raise WeightSyncError if `version` is not newer than all versions before,
        and the errors of the channel.
        """
        if version <= self._newest:
            raise versions_only_go_up(self._source, self._rank, version, self._newest)
        checked = self._verify_every > 0 and self._pushes % self._verify_every == 0
        push = Push(version=version, partial=partial, checked=checked)
        self._pushes += 1
        moved: Counter[str] = Counter()
        for assembly in self._assemblies(shards):
            if isinstance(assembly.delivery, DeviceDelivery):
                assert self._device is not None, (
                    "a delivery on accelerators needs a DeviceSender"
                )
                moved += self._device.send(assembly, push, shards)
            elif self._rank not in assembly.writers:
                continue
            elif self._folder is None:
                moved[Transport.SAME_PROCESS] += self._stream(assembly, push, shards)
            elif self._rank in assembly.delivery.near:
                moved[Transport.SAME_NODE] += self._write(
                    self._folder, assembly, push, shards
                )
            else:
                moved[Transport.NETWORK] += self._stream(assembly, push, shards)
        self._newest = version
        return dict(moved)

    def begin_again(self) -> None:
        """Forget all earlier pushes, so that versions that were sent before can be sent again.

        Call `begin_again` at all other ends of the sync, too.
        """
        self._newest = -1
        self._buffer = None
        self._streamed.clear()

    def close(self) -> None:
        """Leave the process group of syncs between devices, if there is one."""
        if self._device is not None:
            self._device.close()

    def _assemblies(self, shards: Sequence[Shard]) -> tuple[Assembly, ...]:
        """Return the plan of each delivery's copy.

        The plans are made once, and returned again for shards with the same specs and blocks.
        """
        held = [(shard.spec, shard.blocks) for shard in shards]
        if self._held != held:
            layout = Layout.of(spec for spec, _ in held)
            blocks = [blocks for _, blocks in held]
            self._planned = tuple(
                assemble(layout, blocks, delivery) for delivery in self._deliveries
            )
            self._held = held
            self._buffer = None
        return self._planned

    def _write(
        self, folder: Path, assembly: Assembly, push: Push, shards: Sequence[Shard]
    ) -> int:
        """Write this rank's pieces into the double buffer of this node; return the number of written bytes.

        `folder`: the job folder. `assembly`: plan of the copy. `shards`: this rank's shards, by tensor. The last writer
        announces the complete version to all readers.
        """
        deadline_s = time.monotonic() + self._channel.spec.timeout_s
        if self._buffer is None:
            self._buffer = DoubleBuffer.open(folder, assembly, deadline_s=deadline_s)
        layout = assembly.layout
        pieces = assembly.pieces[self._rank]
        copy = self._buffer.begin(self._rank, push.version, deadline_s=deadline_s)
        for piece in pieces:
            write_piece(
                copy[layout.bytes_of(piece)], shards[piece.tensor], self._rank, piece
            )
        written = checksum(parts_of(copy, layout, pieces)) if push.checked else 0
        if self._buffer.finish(self._rank, push.version, written):
            for reader in assembly.delivery.readers:
                self._channel.put(
                    Complete(push=push, buffer=self._buffer.path), key=str(reader)
                )
        return layout.count_bytes(pieces)

    def _stream(self, assembly: Assembly, push: Push, shards: Sequence[Shard]) -> int:
        """Send a header and this rank's buckets to the lead reader, which writes them into the copy of its node.

        Return the number of sent bytes in the buckets. `assembly`: plan of the copy. `shards`: this rank's shards, by
        tensor.
        """
        lead = assembly.delivery.lead
        layout = assembly.layout
        source = self._rank
        buckets = layout.buckets(assembly.pieces[source], self._bucket_bytes)
        base, before = self._streamed.pop(lead, (None, []))
        if len(before) != len(buckets):
            base = None
            before = [None] * len(buckets)
        sent = [0] * len(buckets)
        kept = dict[int, Bytes]()

        def make(index: int) -> Bucket:
            whole = np.empty(layout.count_bytes(buckets[index]), np.uint8)
            for piece, run in layout.runs(buckets[index]):
                write_piece(whole[run], shards[piece.tensor], source, piece)
            old = before[index]
            # A bucket that is asked for again is sent whole
            before[index] = None
            found = (
                None
                if old is None
                else Changes.between(old, whole, largest_share=self._delta_share)
            )
            data = whole if found is None else found
            sent[index] = data.nbytes
            if self._delta_share:
                kept[index] = whole
            return Bucket(
                source=source,
                version=push.version,
                index=index,
                data=data,
                checksum=checksum([whole]),
            )

        header = PushHeader(
            push=push,
            source=source,
            assembly=assembly,
            bucket_bytes=self._bucket_bytes,
            base=base,
        )
        link = self._channel.link(str(lead)) if buckets else None
        if link is not None:
            self._serve(link, header, make, len(buckets))
        else:
            self._channel.put(header, key=str(lead))
            for index in range(len(buckets)):
                self._channel.put(make(index), key=str(lead))
        if self._delta_share and len(kept) == len(buckets):
            self._streamed[lead] = (
                push.version,
                [kept[index] for index in range(len(buckets))],
            )
        return sum(sent)

    def _serve(
        self,
        link: Connection,
        header: PushHeader,
        make: Callable[[int], Bucket],
        count: int,
    ) -> None:
        """Send the header to the lead reader on another node, then each bucket when the reader asks for it.

        `link`: connection to the reader's node. `make`: returns the bucket with the given index. `count`: number of
        buckets. Raise ChannelTimeout if the reader stops asking before it has all buckets.
        """
        from rlplace.comm.network import StreamSource

        delivery = header.assembly.delivery
        lead = delivery.lead
        timeout_s = self._channel.spec.timeout_s
        with StreamSource(near=link.endpoint, keys=link.keys.create()) as source:
            self._channel.put(
                dataclasses.replace(header, stream=source.address), key=str(lead)
            )
            why = source.serve(make, count, timeout_s=timeout_s, check=self._check)
        if why is not None:
            stopped = problem(
                "channel-timeout",
                f"weights version {header.push.version}",
                error="stream",
                writer=owner_of(delivery.source, self._rank),
                reader=owner_of(delivery.target, lead),
                reason=why,
            )
            raise ChannelTimeout(stopped)


def receiver_of(
    channel: Channel,
    rank: int,
    *,
    component: str = "rollout",
    deliveries: Sequence[Delivery],
    folder: Path | None,
    device: torch.device,
    load: LoadFrom | None = None,
) -> WeightReceiver:
    """Return the receiver of target rank `rank` of `component` for the planned copies `deliveries`.

    `channel`: the weights channel. `folder`: the job folder of this node; None if ranks share no memory. `device`: the
    rank's device. `load`: loads a device sync into the rank's engine, window by window; required where the delivery
    says so (`DeviceDelivery.takes_windows`).
    """
    found = next(
        (d for d in deliveries if isinstance(d, DeviceDelivery) and rank in d.readers),
        None,
    )
    if found is None:
        return CopyReceiver(channel, rank, component=component, folder=folder)
    if not found.takes_windows(rank):
        return DeviceReceiver(channel, rank, component=component, device=device)
    assert load is not None, "the plan knows the engine as one with load_from"
    return WindowReceiver(channel, rank, component=component, load=load)


@dataclasses.dataclass(slots=True)
class _Incoming:
    """The buckets of one source rank that are arriving at the lead reader.

    `header`: the announcement of the buckets. `target`: the bytes of the copy into which they are written. `pieces`:
    the pieces of each bucket. `next`: index of the next bucket in `pieces`.
    """

    header: PushHeader
    target: Bytes
    pieces: tuple[tuple[Piece, ...], ...]  # by bucket
    next: int = 0


class CopyReceiver(WeightReceiver):
    """Receiver of weights that arrive on the host. Owns its end of the copy of the weights.

    `folder`: the job folder of this node, with the double buffers; None if ranks share no memory.
    """

    def __init__(
        self,
        channel: Channel,
        rank: int,
        *,
        component: str = "rollout",
        folder: Path | None = None,
    ) -> None:
        super().__init__(channel, rank, component=component)
        self._folder = folder
        self._copy: DoubleBuffer | OwnCopy | None = None
        # By source rank
        self._incoming: dict[int, _Incoming] = {}
        # Of those that come from another node
        self._takers: dict[int, StreamTaker] = {}

    def begin_again(self) -> None:
        super().begin_again()
        self.close()

    def close(self) -> None:
        for source in tuple(self._incoming):
            self._end(source)
        self._copy = None

    def _end(self, source: int) -> None:
        """Stop receiving the present push of source rank `source`."""
        self._incoming.pop(source, None)
        if source in self._takers:
            self._takers.pop(source).close()

    @property
    def _the_copy(self) -> DoubleBuffer | OwnCopy:
        assert self._copy is not None, (
            "nothing arrives before there is a copy to put it"
        )
        return self._copy

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _receive(self, version: int, deadline_s: float) -> ReceivedWeights:
        try:
            push = self._wait(version, deadline_s)
        except ChannelTimeout as error:
            if self._copy is None:
                raise
            raise not_here(
                self._copy.spec.delivery,
                self._rank,
                version,
                self._copy.late(version),
                self._copy.lacking(version),
            ) from error
        copy = self._the_copy
        layout = self._the_copy.spec.layout
        whole = copy.read(self._rank, version)
        for writer, expected in copy.sums(version).items() if push.checked else ():
            if checksum(parts_of(whole, layout, copy.spec.pieces[writer])) != expected:
                copy.release(self._rank, version, loaded=False)
                raise self._damaged(
                    copy.spec.delivery, version, writer, copy.lacking(version)
                )
        shared = isinstance(copy, DoubleBuffer)
        size = sum(spec.size_bytes for spec in layout.tensors)
        return ReceivedWeights(
            version=version,
            tensors=tensors_in(whole, layout),
            partial=push.partial,
            transports={
                Transport.SAME_NODE if shared else Transport.SAME_PROCESS: size
            },
            give_back=lambda loaded: copy.release(self._rank, version, loaded=loaded),
        )

    def _wait(self, version: int, deadline_s: float) -> Push:
        """Handle messages until the copy has all of `version`; return the push of this version.

        `deadline_s`: time of the deadline by `time.monotonic()`.
        """
        while True:
            push = self._take(self._next(deadline_s), deadline_s)
            if push is None:
                continue
            if push.version == version:
                return push
            self._the_copy.release(self._rank, push.version, loaded=False)
            if push.version > self._given_up:
                raise self._other_version(push.version, version)

    def _next(self, deadline_s: float) -> Any:
        """Wait for the next message of the channel or of a stream, and return it.

        `deadline_s`: time of the deadline by `time.monotonic()`.
        """
        while self._takers:
            self._ask()
            with contextlib.suppress(ChannelEmpty):
                if self._backlog:
                    return self._backlog.popleft()
                return self._channel.get_nowait(key=str(self._rank))
            for source in tuple(self._takers):
                if (bucket := self._came(source)) is not None:
                    return bucket
            left_s = deadline_s - time.monotonic()
            # The last taker may have been given up just now
            if left_s <= 0 or not self._takers:
                break
            next(iter(self._takers.values())).wait(
                self._takers.values(), min(_DRAIN_S, left_s)
            )
        return super()._next(deadline_s)

    def _ask(self) -> None:
        """Ask for buckets until `_ON_THE_WAY` buckets are on their way, from as many streams as possible."""
        while sum(taker.due for taker in self._takers.values()) < _ON_THE_WAY:
            unasked = [
                t
                for source, t in self._takers.items()
                if t.asked < len(self._incoming[source].pieces)
            ]
            if not unasked:
                return
            min(unasked, key=lambda taker: taker.due).ask()

    def _came(self, source: int) -> Bucket | None:
        """Return the next bucket of the stream of source rank `source`, or None if it has not arrived.

        If the sender is gone, end the stream. Then raise WeightSyncError, unless the version in the stream was given up
        before.
        """
        try:
            bucket: Bucket | None = self._takers[source].receive()
        except ConnectionError as gone:
            version = self._incoming[source].header.push.version
            self._end(source)
            if version <= self._given_up:
                return None
            raise not_here(
                self._the_copy.spec.delivery,
                self._rank,
                version,
                [source],
                self._the_copy.lacking(version),
                why=str(gone),
            ) from None
        if bucket is not None:
            # The others first, next time
            self._takers[source] = self._takers.pop(source)
        return bucket

    def _take(self, message: Any, deadline_s: float) -> Push | None:
        """Handle a message of the channel or of a stream; return the push that the message completes, or None."""
        match message:
            case Complete():
                if (
                    not isinstance(self._copy, DoubleBuffer)
                    or self._copy.path != message.buffer
                ):
                    self._copy = DoubleBuffer(message.buffer)
                return message.push
            case PushHeader():
                return self._start(message, deadline_s)
            case Bucket() if message.source in self._incoming:
                return self._fill(message)
            case Bucket() if message.version <= self._given_up:
                return None
        raise self._unexpected("a push", message)

    # ── assembling ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, header: PushHeader, deadline_s: float) -> Push | None:
        assembly = header.assembly
        source = header.source
        # A push that broke off
        self._end(source)
        if self._copy is None or self._copy.spec != assembly:
            folder = self._folder
            self._copy = (
                DoubleBuffer.open(folder, assembly, deadline_s=deadline_s)
                if folder
                else OwnCopy(assembly)
            )
        incoming = _Incoming(
            header=header,
            target=self._copy.begin(source, header.push.version, deadline_s=deadline_s),
            pieces=assembly.layout.buckets(
                assembly.pieces[source], header.bucket_bytes
            ),
        )
        if header.stream is not None:
            self._takers[source] = header.stream.connect()
        return self._go_on(incoming)

    def _fill(self, bucket: Bucket) -> Push | None:
        """Write the next bucket of a source rank into the copy; return the push that the bucket completes, or None.

        If the bucket is wrong, end the push of this source rank and raise WeightSyncError.
        """
        incoming = self._incoming[bucket.source]
        try:
            self._write(incoming, bucket)
        except WeightSyncError:
            self._end(bucket.source)
            raise
        incoming.next += 1
        return self._go_on(incoming)

    def _write(self, incoming: _Incoming, bucket: Bucket) -> None:
        """Write `bucket` into the copy.

        Raise WeightSyncError if the bucket is damaged, or is not the next bucket that `incoming` expects.
        """
        layout = self._the_copy.spec.layout
        delivery = self._the_copy.spec.delivery
        source = bucket.source
        version = incoming.header.push.version
        if (bucket.version, bucket.index) != (version, incoming.next):
            due = f"bucket {incoming.next} of version {version} from {owner_of(delivery.source, source)}"
            raise self._unexpected(due, bucket)
        pieces = incoming.pieces[bucket.index]
        data = bucket.data
        if isinstance(data, Changes):
            data = self._changed(incoming, bucket.index, data)
        if (
            len(data) != layout.count_bytes(pieces)
            or checksum([data]) != bucket.checksum
        ):
            raise self._damaged(
                delivery, version, source, self._the_copy.lacking(version)
            )
        for piece, run in layout.runs(pieces):
            np.copyto(incoming.target[layout.bytes_of(piece)], data[run])

    def _changed(self, incoming: _Incoming, bucket: int, changes: Changes) -> Bytes:
        """Return the new bytes of a bucket: its bytes in an earlier version, with `changes` applied.

        `bucket`: index of the bucket. `changes`: the differences between the bucket in the earlier version, which the
        header names, and the new version. Raise WeightSyncError if the copy no longer holds the earlier version.
        """
        base = incoming.header.base
        before = (
            self._copy.contents(base)
            if base is not None and isinstance(self._copy, DoubleBuffer)
            else None
        )
        if before is None:
            raise failed_sync(
                "incomplete-weights",
                "base",
                self._owner,
                pushed=incoming.header.push.version,
                base=base,
            )
        whole: Bytes = np.concatenate(
            list(parts_of(before, self._the_copy.spec.layout, incoming.pieces[bucket]))
        )
        changes.apply(whole)
        return whole

    def _go_on(self, incoming: _Incoming) -> Push | None:
        """Expect the next bucket of a source rank, or finish the source rank's part after its last bucket.

        If the last part of a version is finished, announce the version to the other readers and return its push.
        Otherwise return None.
        """
        source = incoming.header.source
        push = incoming.header.push
        copy = self._the_copy
        if incoming.next < len(incoming.pieces):
            self._incoming[source] = incoming
            return None
        self._end(source)
        parts = parts_of(incoming.target, copy.spec.layout, copy.spec.pieces[source])
        if not copy.finish(
            source, push.version, checksum(parts) if push.checked else 0
        ):
            return None
        if isinstance(copy, DoubleBuffer):
            for reader in copy.spec.delivery.readers:
                if reader != self._rank:
                    self._put(reader, Complete(push=push, buffer=copy.path))
        return push

    def _put(self, reader: int, message: Complete) -> None:
        """Send a message to another reader.

        While the channel is full, move this rank's unread messages to the backlog, because they may be what fills it.
        """
        deadline_s = time.monotonic() + self._channel.spec.timeout_s
        while True:
            patience_s = min(_DRAIN_S, max(0.0, deadline_s - time.monotonic()))
            try:
                self._channel.put(message, key=str(reader), timeout_s=patience_s)
                return
            except ChannelTimeout:
                if patience_s < _DRAIN_S:
                    raise
            with contextlib.suppress(ChannelEmpty):
                while True:
                    self._backlog.append(self._channel.get_nowait(key=str(self._rank)))
