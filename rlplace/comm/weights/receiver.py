"""The rollout's end of a weight sync: waits for a whole version, and puts together what comes from far.

::

    Complete ─────────────▶ read the board
    PushHeader, Buckets ──▶ write them where the copy lies, for their source; after the last of all writers:
                            Complete to the other readers, read it too
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlplace.comm.channel import Channel
from rlplace.comm.weights import refusals
from rlplace.comm.weights.board import Board
from rlplace.comm.weights.changes import Changes, apply
from rlplace.comm.weights.copies import Copy, OwnMemory
from rlplace.comm.weights.device_receiver import DeviceReceiver
from rlplace.comm.weights.memory import Bytes, checksum, parts_of, tensors_in
from rlplace.comm.weights.messages import Bucket, Complete, PushHeader
from rlplace.comm.weights.plan import Piece
from rlplace.comm.weights.sync import ReceivedWeights, WeightReceiver, WeightSyncReport
from rlplace.errors import ChannelEmpty, ChannelTimeout, WeightSyncError
from rlplace.placement.flow import Delivery, DeviceDelivery, Transport

_DRAIN_S = 0.02  # how often an end that waits for credit takes in what others have sent it


def receiver_of(
    channel: Channel, rank: int, *, deliveries: Sequence[Delivery], folder: Path | None, device: torch.device
) -> WeightReceiver:
    """The end of rollout rank `rank` in what the plan delivers."""
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


class CopyReceiver:
    """Pulls for rollout rank `rank`. Owns its end of the copy; `folder`: the job's on this node, None without one."""

    def __init__(self, channel: Channel, rank: int, *, folder: Path | None = None) -> None:
        self._channel = channel
        self._rank = rank
        self._folder = folder
        self._copy: Copy | None = None
        self._incoming: dict[int, _Incoming] = {}  # by actor rank
        self._backlog: collections.deque[Any] = collections.deque()  # messages taken before their turn
        self._given_up = -1  # the last version whose pull failed: what is left of it may still arrive

    def announced(self) -> bool:
        if not self._backlog:
            with contextlib.suppress(ChannelEmpty):
                self._backlog.append(self._channel.get_nowait(key=str(self._rank)))
        return bool(self._backlog)

    def pull(self, version: int, *, timeout_s: float | None = None) -> ReceivedWeights:
        start = time.perf_counter()
        deadline_s = time.monotonic() + (self._channel.spec.timeout_s if timeout_s is None else timeout_s)
        try:
            arrived = self._wait(version, deadline_s)
            received = self._read(arrived, start)
        except (ChannelTimeout, WeightSyncError) as error:
            self._given_up = max(self._given_up, version)
            if self._copy is not None and isinstance(error, ChannelTimeout):
                late, lacking = self._copy.late(version), self._copy.lacking(version)
                raise refusals.not_here(self._rank, version, late, lacking) from error
            raise
        return received

    def close(self) -> None:
        if self._copy is not None:
            self._copy.close()

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _wait(self, version: int, deadline_s: float) -> Complete | PushHeader:
        """What announced the whole of `version`, all of which is in the copy now."""
        while True:
            arrived = self._take(self._next(deadline_s), deadline_s)
            if arrived is None:
                continue
            if arrived.version == version:
                return arrived
            self._the_copy.release(self._rank, arrived.version, loaded=False)
            if arrived.version > self._given_up:
                raise refusals.other_version(self._rank, arrived.version, version)

    def _next(self, deadline_s: float) -> Any:
        if self._backlog:
            return self._backlog.popleft()
        return self._channel.get(key=str(self._rank), timeout_s=max(0.0, deadline_s - time.monotonic()))

    @property
    def _the_copy(self) -> Copy:
        assert self._copy is not None, "nothing arrives before there is a copy to put it"
        return self._copy

    def _take(self, message: Any, deadline_s: float) -> Complete | PushHeader | None:
        """What announced a version, with the message that completes it."""
        match message:
            case Complete():
                self._attach(message.board)
                return message
            case PushHeader():
                return self._start(message, deadline_s)
            case Bucket() if message.source in self._incoming:
                return self._fill(self._incoming[message.source], message)
            case Bucket() if message.version <= self._given_up:
                return None
        raise refusals.refused("incomplete-weights", self._rank, f"expected a push, got {_describe(message)}")

    def _attach(self, board: Path) -> None:
        if not isinstance(self._copy, Board) or self._copy.path != board:
            self.close()
            self._copy = Board.attach(board)

    # ── putting together ─────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, header: PushHeader, deadline_s: float) -> PushHeader | None:
        if self._copy is None or self._copy.spec != header.assembly:
            self.close()
            if self._folder is None:
                self._copy = OwnMemory(header.assembly)
            else:
                self._copy = Board.open(self._folder, header.assembly, deadline_s=deadline_s)
        target = self._copy.begin(header.source, header.version, deadline_s=deadline_s)
        incoming = _Incoming(header=header, target=target, pieces=header.pieces())
        self._incoming[header.source] = incoming
        return None if header.buckets else self._finish(incoming)

    def _fill(self, incoming: _Incoming, bucket: Bucket) -> PushHeader | None:
        header = incoming.header
        if (bucket.version, bucket.index) != (header.version, incoming.next):
            del self._incoming[header.source]
            what = f"expected bucket {incoming.next} of version {header.version} from actor rank {header.source}"
            raise refusals.refused("incomplete-weights", self._rank, f"{what}, got {_describe(bucket)}")
        data = self._whole(incoming, bucket)
        pieces = incoming.pieces[bucket.index]
        size_bytes = self._the_copy.spec.layout.count_bytes(pieces)
        if len(data) != size_bytes or checksum([data]) != bucket.checksum:
            del self._incoming[header.source]
            raise refusals.damaged(self._rank, header.version, header.source, self._the_copy.lacking(header.version))
        end = 0
        for piece in pieces:
            where = self._the_copy.spec.layout.bytes_of(piece)
            size = where.stop - where.start
            np.copyto(incoming.target[where], data[end : end + size])
            end += size
        incoming.next += 1
        return None if incoming.next < header.buckets else self._finish(incoming)

    def _whole(self, incoming: _Incoming, bucket: Bucket) -> Bytes:
        if not isinstance(bucket.data, Changes):
            return bucket.data
        base = incoming.header.base
        before = None if base is None else self._the_copy.contents(base)
        if before is None:
            del self._incoming[bucket.source]
            what = f"version {bucket.version} came as changes to version {base}, which is not here"
            raise refusals.refused("incomplete-weights", self._rank, what)
        parts = list(parts_of(before, self._the_copy.spec.layout, incoming.pieces[bucket.index]))
        whole: Bytes = np.concatenate(parts)
        apply(bucket.data, whole)
        return whole

    def _finish(self, incoming: _Incoming) -> PushHeader | None:
        header, copy = incoming.header, self._the_copy
        del self._incoming[header.source]
        layout, mine = copy.spec.layout, copy.spec.pieces[header.source]
        written = checksum(parts_of(incoming.target, layout, mine)) if header.checked else 0
        if not copy.finish(header.source, header.version, written):
            return None
        if isinstance(copy, Board):
            message = Complete(board=copy.path, version=header.version, partial=header.partial, checked=header.checked)
            for reader in copy.spec.delivery.readers:
                if reader != self._rank:
                    self._tell(reader, message)
        return header

    def _tell(self, reader: int, message: Complete) -> None:
        """Credit may be held by what far ranks stream to us for later versions: it is taken in meanwhile."""
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

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, arrived: Complete | PushHeader, start: float) -> ReceivedWeights:
        copy, version = self._the_copy, arrived.version
        layout = copy.spec.layout
        whole = copy.read(self._rank, version)
        if arrived.checked:
            for writer, expected in copy.sums(version).items():
                if checksum(parts_of(whole, layout, copy.spec.pieces[writer])) != expected:
                    copy.release(self._rank, version, loaded=False)
                    raise refusals.damaged(self._rank, version, writer, copy.lacking(version))
        size = sum(spec.size_bytes for spec in layout.tensors)
        report = WeightSyncReport(
            version=version,
            tensors=len(layout.tensors),
            ways={Transport.SAME_NODE if isinstance(copy, Board) else Transport.SAME_PROCESS: size},
            seconds=time.perf_counter() - start,
        )
        return ReceivedWeights(
            version=version,
            tensors=tensors_in(whole, layout),
            partial=arrived.partial,
            report=report,
            give_back=lambda loaded: copy.release(self._rank, version, loaded=loaded),
        )


def _describe(message: object) -> str:
    if isinstance(message, Bucket):
        return f"bucket {message.index} of version {message.version} from actor rank {message.source}"
    return f"a {type(message).__name__}"
