"""The actor's end of a weight sync: writes this rank's pieces where it can reach the copy, streams them where not.

::

                      ┌─ on accelerators: DeviceSender ──────────▶ readers there, all together
    push ─▶ per copy ─┼─ near: straight into the double buffer ──▶ last writer: Complete to every reader
                      └─ else: header, buckets ──────────────────▶ the lead reader, which writes them for this rank
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlplace.comm.channel import Channel
from rlplace.comm.weights.buffer import DoubleBuffer, versions_only_go_up
from rlplace.comm.weights.device_sync import DeviceSender
from rlplace.comm.weights.shards import Assembly, Layout, Shard, assemble
from rlplace.comm.weights.tensors import Bytes, Changes, checksum, parts_of, spec_of, write_piece
from rlplace.comm.weights.version import Bucket, Complete, PushHeader, WeightSyncReport, late_sync
from rlplace.placement.flow import Delivery, DeviceDelivery, Transport


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PushRules:
    """How pushes travel."""

    bucket_bytes: int = 16 << 20
    verify_every: int = 0  # every n-th push is summed by writers and readers; buckets between nodes always are
    delta_share: float = 0.0  # between nodes: send what changed where that is at most this share of all; 0: send all

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1 or self.verify_every < 0 or not 0 <= self.delta_share <= 1:
            raise ValueError(
                f"bucket_bytes must be at least 1, verify_every at least 0 and delta_share from 0 to 1, got {self}"
            )


class WeightSender:
    """Push what actor rank `rank` holds into every delivery; without pieces a push does nothing.

    Works in a thread of its own; a push waits there for the one before. Versions only go up. `folder`: the job's on
    this node, where the double buffers are; None where ranks share no memory. `device`: for deliveries on accelerators.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        rank: int = 0,
        deliveries: Sequence[Delivery],
        folder: Path | None = None,
        rules: PushRules | None = None,
        device: DeviceSender | None = None,
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._device = device
        self._deliveries = tuple(deliveries)
        self._folder = folder
        self._rules = rules or PushRules()
        # An OwnCopy is handed over with each version: there is none to change.
        self._delta_share = self._rules.delta_share if folder is not None else 0.0
        self._held: object = None  # what `_planned` was planned for
        self._planned: tuple[Assembly, ...] = ()
        self._buffer: DoubleBuffer | None = None
        self._streamed: dict[int, tuple[int | None, Sequence[Bytes]]] = {}  # by lead: version and buckets, for delta
        self._pushes = 0
        self._newest = -1  # version that was sent
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"actor-{rank}-push")

    def push(self, version: int, shards: Sequence[Shard], *, partial: bool = False) -> PendingPush:
        """Start writing. The data must not change until the push has been waited for."""
        return PendingPush(version, self._thread.submit(self.send, version, tuple(shards), partial))

    def send(self, version: int, shards: Sequence[Shard], partial: bool = False) -> WeightSyncReport:
        """Send in the calling thread. Raises WeightSyncError for a version that is not newer than all before."""
        if version <= self._newest:
            raise versions_only_go_up(self._rank, version, self._newest)
        start = time.perf_counter()
        every = self._rules.verify_every
        push = _Pushed(version, tuple(shards), partial, checked=bool(every) and self._pushes % every == 0)
        self._pushes += 1
        ways: Counter[str] = Counter()
        for assembly in self._assemblies(shards):
            if isinstance(assembly.delivery, DeviceDelivery):
                assert self._device is not None, "a delivery on accelerators needs a DeviceSender"
                ways += self._device.send(assembly, version, shards, partial=partial, checked=push.checked)
                continue
            if self._rank not in assembly.writers:
                continue
            if self._folder is None:
                ways[Transport.SAME_PROCESS] += self._stream(assembly, push)
            elif self._rank in assembly.delivery.near:
                ways[Transport.SAME_NODE] += self._write(self._folder, assembly, push)
            else:
                ways[Transport.NETWORK] += self._stream(assembly, push)
        self._newest = version
        seconds = time.perf_counter() - start
        return WeightSyncReport(version=version, tensors=len(shards), ways=dict(ways), seconds=seconds)

    def close(self) -> None:
        """Let go of buffer and device after the push under way, without waiting for it."""
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    def _end(self) -> None:
        self._let_go()
        if self._device is not None:
            self._device.close()

    def _let_go(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _assemblies(self, shards: Sequence[Shard]) -> tuple[Assembly, ...]:
        """Plan the copies, once for the same shards."""
        held = tuple((shard.names, shard.dtype, shard.shape, shard.blocks) for shard in shards)
        if self._held != held:
            layout, blocks = Layout.of(map(spec_of, shards)), [shard.blocks for shard in shards]
            self._planned = tuple(assemble(layout, blocks, delivery) for delivery in self._deliveries)
            self._held = held
            self._let_go()
        return self._planned

    # ── into a buffer ────────────────────────────────────────────────────────────────────────────────────────────────

    def _write(self, folder: Path, assembly: Assembly, push: _Pushed) -> int:
        deadline_s = time.monotonic() + self._channel.spec.timeout_s
        if self._buffer is None:
            self._buffer = DoubleBuffer.open(folder, assembly, deadline_s=deadline_s)
        buffer, layout, pieces = self._buffer, assembly.layout, assembly.pieces[self._rank]
        copy = buffer.begin(self._rank, push.version, deadline_s=deadline_s)
        for piece in pieces:
            write_piece(copy[layout.bytes_of(piece)], push.shards[piece.tensor], self._rank, piece)
        written = checksum(parts_of(copy, layout, pieces)) if push.checked else 0
        if buffer.finish(self._rank, push.version, written):
            message = Complete(buffer=buffer.path, version=push.version, partial=push.partial, checked=push.checked)
            for reader in assembly.delivery.readers:
                self._channel.put(message, key=str(reader))
        return layout.count_bytes(pieces)

    # ── as a stream ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _stream(self, assembly: Assembly, push: _Pushed) -> int:
        """Send header and buckets to the lead reader. Returns the bytes that travelled."""
        lead, layout, source = assembly.delivery.lead, assembly.layout, self._rank
        buckets = layout.buckets(assembly.pieces[source], self._rules.bucket_bytes)
        base, before = self._streamed.pop(lead, (None, ()))
        if len(before) != len(buckets):
            base, before = None, ()
        header = PushHeader(
            source=source,
            version=push.version,
            assembly=assembly,
            buckets=len(buckets),
            bucket_bytes=self._rules.bucket_bytes,
            partial=push.partial,
            checked=push.checked,
            base=base,
        )
        self._channel.put(header, key=str(lead))
        sent, kept = 0, []
        for index, pieces in enumerate(buckets):
            whole = np.empty(layout.count_bytes(pieces), np.uint8)
            end = 0
            for piece in pieces:
                start, end = end, end + layout.count_bytes([piece])
                write_piece(whole[start:end], push.shards[piece.tensor], self._rank, piece)
            found = Changes.between(before[index], whole, largest_share=self._delta_share) if before else None
            data = whole if found is None else found
            bucket = Bucket(source=source, version=push.version, index=index, data=data, checksum=checksum([whole]))
            self._channel.put(bucket, key=str(lead))
            sent += data.nbytes
            kept.append(whole)
        if self._delta_share:
            self._streamed[lead] = push.version, kept
        return sent


class _Pushed(NamedTuple):
    version: int
    shards: tuple[Shard, ...]
    partial: bool
    checked: bool


class PendingPush:
    """A push under way in the sender's thread."""

    def __init__(self, version: int, sending: Future[WeightSyncReport]) -> None:
        self._version = version
        self._sending = sending

    def wait(self, timeout_s: float | None = None) -> WeightSyncReport:
        """Block until this rank's share is written. Raises what the writing raised, ChannelTimeout at the deadline."""
        done, _ = concurrent.futures.wait([self._sending], timeout_s)
        if not done:
            why = "the rollout ranks have not taken what was pushed before"
            what = f"the push was not finished after {timeout_s} s"
            raise late_sync(f"weights version {self._version}", what, why)
        return self._sending.result()
