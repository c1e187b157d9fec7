"""The actor's end of a weight sync: writes this rank's pieces where it can reach the copy, streams them where not.

::

                      ┌─ on accelerators: DeviceSender ──────────▶ readers there, all together
    push ─▶ per copy ─┼─ near: straight into the double buffer ──▶ last writer: Complete to every reader
                      └─ else: header, buckets ──────────────────▶ the lead reader, which writes them for this rank
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlplace.comm.channel import Channel
from rlplace.comm.weights.buffer import DoubleBuffer
from rlplace.comm.weights.device_sync import DeviceSender
from rlplace.comm.weights.shards import Assembly, Layout, Shard, assemble
from rlplace.comm.weights.tensors import Bytes, Changes, checksum, parts_of, spec_of, write_piece
from rlplace.comm.weights.version import Bucket, Complete, Push, PushHeader, WeightSyncReport, versions_only_go_up
from rlplace.placement.flow import Delivery, DeviceDelivery, Transport

BUCKET_BYTES = 16 << 20


class WeightSender:
    """Push what actor rank `rank` holds into every delivery; without pieces a push does nothing.

    `folder`: the job's on this node, where the double buffers are; None where ranks share no memory. `device`: for
    deliveries on accelerators. `verify_every`: every n-th push is summed by writers and readers; buckets between nodes
    always are. `delta_share`: between nodes send only what changed where that is at most this share; 0: send all.
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
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._deliveries = tuple(deliveries)
        self._folder = folder
        self._device = device
        self._verify_every = verify_every
        self._delta_share = delta_share if folder is not None else 0.0  # an OwnCopy is handed over: none to change
        self._bucket_bytes = bucket_bytes
        self._held: object = None  # what `_planned` was planned for
        self._planned: tuple[Assembly, ...] = ()
        self._buffer: DoubleBuffer | None = None
        self._streamed: dict[int, tuple[int | None, Sequence[Bytes]]] = {}  # by lead: version and buckets, for delta
        self._pushes = 0
        self._newest = -1  # version that was sent

    def push(self, version: int, shards: Sequence[Shard], *, partial: bool = False) -> WeightSyncReport:
        """Block until this rank's share of `version` is written.

        Raises WeightSyncError for a version that is not newer than all before, or as the channel.
        """
        if version <= self._newest:
            raise versions_only_go_up(self._rank, version, self._newest)
        began = time.perf_counter()
        checked = self._verify_every > 0 and self._pushes % self._verify_every == 0
        push = Push(version=version, partial=partial, checked=checked)
        self._pushes += 1
        moved: Counter[str] = Counter()
        for assembly in self._assemblies(shards):
            if isinstance(assembly.delivery, DeviceDelivery):
                assert self._device is not None, "a delivery on accelerators needs a DeviceSender"
                moved += self._device.send(assembly, push, shards)
            elif self._rank not in assembly.writers:
                continue
            elif self._folder is None:
                moved[Transport.SAME_PROCESS] += self._stream(assembly, push, shards)
            elif self._rank in assembly.delivery.near:
                moved[Transport.SAME_NODE] += self._write(self._folder, assembly, push, shards)
            else:
                moved[Transport.NETWORK] += self._stream(assembly, push, shards)
        self._newest = version
        return WeightSyncReport(transports=dict(moved), seconds=time.perf_counter() - began)

    def close(self) -> None:
        """Leave the other members of a sync between devices."""
        if self._device is not None:
            self._device.close()

    def _assemblies(self, shards: Sequence[Shard]) -> tuple[Assembly, ...]:
        """Plan the copies, once for the same shards."""
        held = tuple((shard.names, shard.dtype, shard.shape, shard.blocks) for shard in shards)
        if self._held != held:
            layout, blocks = Layout.of(map(spec_of, shards)), [shard.blocks for shard in shards]
            self._planned = tuple(assemble(layout, blocks, delivery) for delivery in self._deliveries)
            self._held, self._buffer = held, None
        return self._planned

    def _write(self, folder: Path, assembly: Assembly, push: Push, shards: Sequence[Shard]) -> int:
        """Write into the double buffer. Returns the bytes written."""
        deadline_s = time.monotonic() + self._channel.spec.timeout_s
        if self._buffer is None:
            self._buffer = DoubleBuffer.open(folder, assembly, deadline_s=deadline_s)
        layout, pieces = assembly.layout, assembly.pieces[self._rank]
        copy = self._buffer.begin(self._rank, push.version, deadline_s=deadline_s)
        for piece in pieces:
            write_piece(copy[layout.bytes_of(piece)], shards[piece.tensor], self._rank, piece)
        written = checksum(parts_of(copy, layout, pieces)) if push.checked else 0
        if self._buffer.finish(self._rank, push.version, written):
            for reader in assembly.delivery.readers:
                self._channel.put(Complete(push=push, buffer=self._buffer.path), key=str(reader))
        return layout.count_bytes(pieces)

    def _stream(self, assembly: Assembly, push: Push, shards: Sequence[Shard]) -> int:
        """Send header and buckets to the lead reader. Returns the bytes that travelled."""
        lead, layout, source = assembly.delivery.lead, assembly.layout, self._rank
        buckets = layout.buckets(assembly.pieces[source], self._bucket_bytes)
        base, before = self._streamed.pop(lead, (None, ()))
        if len(before) != len(buckets):
            base, before = None, ()
        header = PushHeader(
            push=push,
            source=source,
            assembly=assembly,
            bucket_bytes=self._bucket_bytes,
            base=base,
        )
        self._channel.put(header, key=str(lead))
        sent, kept = 0, []
        for index, pieces in enumerate(buckets):
            whole = np.empty(layout.count_bytes(pieces), np.uint8)
            for piece, run in layout.runs(pieces):
                write_piece(whole[run], shards[piece.tensor], source, piece)
            found = Changes.between(before[index], whole, largest_share=self._delta_share) if before else None
            data = whole if found is None else found
            bucket = Bucket(source=source, version=push.version, index=index, data=data, checksum=checksum([whole]))
            self._channel.put(bucket, key=str(lead))
            sent += data.nbytes
            kept.append(whole)
        if self._delta_share:
            self._streamed[lead] = push.version, kept
        return sent
