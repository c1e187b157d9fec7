"""The rollout's end of a weight sync: waits for a whole version, and assembles what other nodes stream.

::

    Complete ─────────────▶ read the double buffer
    PushHeader, Buckets ──▶ write them where the copy lies, for their source; after the last of all writers:
                            Complete to the other readers, read it too
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlplace.comm.channel import Channel
from rlplace.comm.weights.buffer import DoubleBuffer, OwnCopy, not_here
from rlplace.comm.weights.device_sync import DeviceReceiver
from rlplace.comm.weights.shards import Piece
from rlplace.comm.weights.tensors import Bytes, Changes, checksum, parts_of, tensors_in
from rlplace.comm.weights.version import (
    Bucket,
    Complete,
    PushHeader,
    ReceivedWeights,
    WeightReceiver,
    WeightSyncReport,
    failed_sync,
)
from rlplace.errors import ChannelEmpty, ChannelTimeout
from rlplace.placement.flow import Delivery, DeviceDelivery, Transport

_DRAIN_S = 0.02  # how often a receiver that waits for credit takes in what others have sent it


def receiver_of(
    channel: Channel, rank: int, *, deliveries: Sequence[Delivery], folder: Path | None, device: torch.device
) -> WeightReceiver:
    """Make the end of rollout rank `rank` in the planned deliveries."""
    if any(rank in delivery.readers for delivery in deliveries if isinstance(delivery, DeviceDelivery)):
        return DeviceReceiver(channel, rank, device=device)
    return CopyReceiver(channel, rank, folder=folder)


@dataclasses.dataclass(slots=True)
class _Incoming:
    """A stream under way."""

    header: PushHeader
    target: Bytes
    pieces: tuple[tuple[Piece, ...], ...]  # by bucket
    next: int = 0


class CopyReceiver(WeightReceiver):
    """Pulls through the host. Owns its end of the copy; `folder`: the job's on this node, None without one."""

    def __init__(self, channel: Channel, rank: int, *, folder: Path | None = None) -> None:
        super().__init__(channel, rank)
        self._folder = folder
        self._copy: DoubleBuffer | OwnCopy | None = None
        self._incoming: dict[int, _Incoming] = {}  # by actor rank

    def close(self) -> None:
        if self._copy is not None:
            self._copy.close()

    @property
    def _the_copy(self) -> DoubleBuffer | OwnCopy:
        assert self._copy is not None, "nothing arrives before there is a copy to put it"
        return self._copy

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _receive(self, version: int, deadline_s: float, began: float) -> ReceivedWeights:
        try:
            arrived = self._wait(version, deadline_s)
        except ChannelTimeout as error:
            if self._copy is None:
                raise
            late, lacking = self._copy.late(version), self._copy.lacking(version)
            raise not_here(self._rank, version, late, lacking) from error
        copy, layout = self._the_copy, self._the_copy.spec.layout
        whole = copy.read(self._rank, version)
        for writer, expected in copy.sums(version).items() if arrived.checked else ():
            if checksum(parts_of(whole, layout, copy.spec.pieces[writer])) != expected:
                copy.release(self._rank, version, loaded=False)
                raise self._damaged(version, writer, copy.lacking(version))
        shared, size = isinstance(copy, DoubleBuffer), sum(spec.size_bytes for spec in layout.tensors)
        return ReceivedWeights(
            version=version,
            tensors=tensors_in(whole, layout),
            partial=arrived.partial,
            report=WeightSyncReport(
                version=version,
                tensors=len(layout.tensors),
                ways={Transport.SAME_NODE if shared else Transport.SAME_PROCESS: size},
                seconds=time.perf_counter() - began,
            ),
            read_only=shared,
            give_back=lambda loaded: copy.release(self._rank, version, loaded=loaded),
        )

    def _wait(self, version: int, deadline_s: float) -> Complete | PushHeader:
        """Return the message that announced `version`, all of which is in the copy now."""
        while True:
            arrived = self._take(self._next(deadline_s), deadline_s)
            if arrived is None:
                continue
            if arrived.version == version:
                return arrived
            self._the_copy.release(self._rank, arrived.version, loaded=False)
            if arrived.version > self._given_up:
                raise self._other_version(arrived.version, version)

    def _take(self, message: Any, deadline_s: float) -> Complete | PushHeader | None:
        """Handle a message. With the one that completes a version, return the message that announced it."""
        match message:
            case Complete():
                if not isinstance(self._copy, DoubleBuffer) or self._copy.path != message.buffer:
                    self.close()
                    self._copy = DoubleBuffer.attach(message.buffer)
                return message
            case PushHeader():
                return self._start(message, deadline_s)
            case Bucket() if message.source in self._incoming:
                return self._fill(self._incoming[message.source], message)
            case Bucket() if message.version <= self._given_up:
                return None
        raise self._unexpected("a push", message)

    # ── assembling ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, header: PushHeader, deadline_s: float) -> PushHeader | None:
        if self._copy is None or self._copy.spec != header.assembly:
            self.close()
            if self._folder is None:
                self._copy = OwnCopy(header.assembly)
            else:
                self._copy = DoubleBuffer.open(self._folder, header.assembly, deadline_s=deadline_s)
        target = self._copy.begin(header.source, header.version, deadline_s=deadline_s)
        incoming = _Incoming(header=header, target=target, pieces=header.pieces())
        self._incoming[header.source] = incoming
        return None if header.buckets else self._finish(incoming)

    def _fill(self, incoming: _Incoming, bucket: Bucket) -> PushHeader | None:
        """Write a bucket into the copy. A stream in which something is wrong is given up."""
        header, layout = incoming.header, self._the_copy.spec.layout
        whole = False
        try:
            if (bucket.version, bucket.index) != (header.version, incoming.next):
                due = f"bucket {incoming.next} of version {header.version} from actor rank {header.source}"
                raise self._unexpected(due, bucket)
            pieces = incoming.pieces[bucket.index]
            data = bucket.data
            if isinstance(data, Changes):
                data = self._changed(incoming, bucket.index, data)
            if len(data) != layout.count_bytes(pieces) or checksum([data]) != bucket.checksum:
                raise self._damaged(header.version, header.source, self._the_copy.lacking(header.version))
            whole = True
        finally:
            if not whole:
                del self._incoming[header.source]
        end = 0
        for piece in pieces:
            start, end = end, end + layout.count_bytes([piece])
            np.copyto(incoming.target[layout.bytes_of(piece)], data[start:end])
        incoming.next += 1
        return None if incoming.next < header.buckets else self._finish(incoming)

    def _changed(self, incoming: _Incoming, bucket: int, changes: Changes) -> Bytes:
        """Apply changes to the bytes of this bucket in the version that they are based on."""
        base = incoming.header.base
        before = None if base is None else self._the_copy.contents(base)
        if before is None:
            what = f"version {incoming.header.version} came as changes to version {base}, which is not here"
            raise failed_sync("incomplete-weights", f"rollout rank {self._rank}", what)
        whole: Bytes = np.concatenate(list(parts_of(before, self._the_copy.spec.layout, incoming.pieces[bucket])))
        changes.apply(whole)
        return whole

    def _finish(self, incoming: _Incoming) -> PushHeader | None:
        header, copy = incoming.header, self._the_copy
        del self._incoming[header.source]
        layout, mine = copy.spec.layout, copy.spec.pieces[header.source]
        written = checksum(parts_of(incoming.target, layout, mine)) if header.checked else 0
        if not copy.finish(header.source, header.version, written):
            return None
        if isinstance(copy, DoubleBuffer):
            message = Complete(buffer=copy.path, version=header.version, partial=header.partial, checked=header.checked)
            for reader in copy.spec.delivery.readers:
                if reader != self._rank:
                    self._put(reader, message)
        return header

    def _put(self, reader: int, message: Complete) -> None:
        """Send to another reader. Take in messages meanwhile: streams of later versions may hold the credit."""
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
