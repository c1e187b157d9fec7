"""Pieces of the weights in buckets of device memory: what one actor rank holds, as one tensor that travels.

::

    │ piece │ piece │ ... │ sum │     pieces begin at multiples of 16 bytes, as device memory wants its types
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlplace.comm.weights.memory import copy_tensor, held_in
from rlplace.comm.weights.plan import Assembly, Layout, Piece
from rlplace.comm.weights.sync import Shard

_ALIGNMENT = 16
_SUM_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBucket:
    """Filled by its owner alone; all who take it know what is in it."""

    owner: int  # actor rank
    pieces: tuple[Piece, ...]
    layout: Layout = dataclasses.field(repr=False)

    @property
    def size_bytes(self) -> int:
        return sum(map(self._room, self.pieces)) + _SUM_BYTES

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.size_bytes, dtype=torch.uint8, device=device)

    def fill(self, bucket: Tensor, shards: Sequence[Shard], *, checked: bool) -> None:
        """By the owner, with the types they travel in."""
        for piece, start, stop in self._places():
            shard = shards[piece.tensor]
            target = bucket[start:stop].view(getattr(torch, shard.dtype))
            copy_tensor(target, held_in(shard, self.owner, piece))
        if checked:
            self._clear_gaps(bucket)
            _sum_of(bucket).copy_(_summed(bucket))

    def empty_into(self, bucket: Tensor, copy: Tensor) -> None:
        """Puts the pieces where they lie in a whole copy."""
        for piece, start, stop in self._places():
            copy[self.layout.bytes_of(piece)].copy_(bucket[start:stop])

    @staticmethod
    def is_whole(bucket: Tensor) -> bool:
        """Of a checked one. Waits for the device."""
        return bool((_sum_of(bucket) == _summed(bucket)).item())

    def _places(self) -> Iterator[tuple[Piece, int, int]]:
        start = 0
        for piece in self.pieces:
            yield piece, start, start + self.layout.count_bytes([piece])
            start += self._room(piece)

    def _clear_gaps(self, bucket: Tensor) -> None:
        for piece, start, stop in self._places():
            bucket[stop : start + self._room(piece)].zero_()

    def _room(self, piece: Piece) -> int:
        return -(-self.layout.count_bytes([piece]) // _ALIGNMENT) * _ALIGNMENT


def device_buckets(assembly: Assembly, bucket_bytes: int) -> tuple[DeviceBucket, ...]:
    """All buckets of a push, in the order in which everybody handles them."""
    layout = assembly.layout
    return tuple(
        DeviceBucket(owner=owner, pieces=pieces, layout=layout)
        for owner, own in enumerate(assembly.pieces)
        for pieces in layout.buckets(own, bucket_bytes)
    )


def _sum_of(bucket: Tensor) -> Tensor:
    return bucket[-_SUM_BYTES:].view(torch.int64)


def _summed(bucket: Tensor) -> Tensor:
    """64 bits that every flipped bit changes."""
    return bucket[:-_SUM_BYTES].view(torch.int64).sum(dtype=torch.int64)
