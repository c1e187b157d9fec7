"""What the weights channel carries, under the key of a rollout rank.

::

    Complete                              to every reader of a board: all of a version is on it
    PushHeader, Bucket, ... Bucket        to a lead reader: the pieces of one actor rank that cannot write there itself
    DevicePush                            to every reader on an accelerator: what it is about to take part in
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rlplace.comm.weights.changes import Changes
from rlplace.comm.weights.device_buckets import DeviceBucket, device_buckets
from rlplace.comm.weights.meeting import MeetingPoint
from rlplace.comm.weights.memory import Bytes
from rlplace.comm.weights.plan import Assembly, Piece
from rlplace.placement.flow import DeviceDelivery


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """A version on a board of this node."""

    board: Path
    version: int
    partial: bool
    checked: bool  # its sums were taken and are to be compared


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PushHeader:
    """Announces the pieces of one actor rank; `buckets` messages follow."""

    source: int  # actor rank
    version: int
    assembly: Assembly
    buckets: int
    bucket_bytes: int
    partial: bool
    checked: bool
    base: int | None  # the version that changes in the buckets apply to; None: there are none

    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """By bucket."""
        return self.assembly.layout.buckets(self.assembly.pieces[self.source], self.bucket_bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Pieces one after the other."""

    source: int
    version: int
    index: int
    data: Bytes | Changes
    checksum: int  # of the bytes it stands for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DevicePush:
    """A push from accelerator to accelerator, in which all actor ranks and all readers take part."""

    round: int
    version: int
    assembly: Assembly
    bucket_bytes: int
    partial: bool
    checked: bool
    meeting: MeetingPoint

    @property
    def delivery(self) -> DeviceDelivery:
        assert isinstance(self.assembly.delivery, DeviceDelivery), "others are not announced like this"
        return self.assembly.delivery

    def buckets(self) -> tuple[DeviceBucket, ...]:
        return device_buckets(self.assembly, self.bucket_bytes)
