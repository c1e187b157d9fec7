"""Shards of the weights, and which actor rank writes which bytes in a sync: planned once, used in every sync.

::

    tensors, one after the other, each a flat run of elements           offsets are multiples of 64 bytes
    │ embed                    │ bias │ layer.weight              │
    │ rank 0    │ rank 1       │  0   │ rank 0       │ rank 1     │     a piece: neighbouring elements of one tensor

Where several ranks hold the same elements, those near the copy share the work.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from rlplace.placement.flow import Delivery

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 64  # bytes, a cache line
_WORTH_SPLITTING = 64 << 10  # bytes; one holder alone writes less than that


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor as it travels, in the receivers' type."""

    names: tuple[str, ...]  # several where weights are tied: the tensor travels once
    dtype: str  # torch's name of it, "bfloat16"
    itemsize: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * self.itemsize


class Block(NamedTuple):
    """Elements start..stop-1 of a flat tensor."""

    start: int
    stop: int


class Piece(NamedTuple):
    """Elements start..stop-1 of the tensor with this number in the layout."""

    tensor: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One actor rank's part of one tensor, and the parts of all other ranks."""

    names: tuple[str, ...]  # several where weights are tied
    dtype: str  # in which it travels, "bfloat16"; the receivers' type, or a narrower one that loses nothing
    shape: tuple[int, ...]  # of the whole tensor
    blocks: tuple[Block, ...]  # by actor rank
    data: Tensor  # this rank's block, in any type and shape, on any device
    trained: bool = True  # training changes it; False for a frozen parameter


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each tensor lies in a whole copy."""

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]  # bytes
    size_bytes: int

    @classmethod
    def of(cls, tensors: Iterable[TensorSpec]) -> Layout:
        tensors = tuple(tensors)
        sizes = (-(-tensor.size_bytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
        *offsets, end = itertools.accumulate(sizes, initial=0)
        return cls(tensors=tensors, offsets=tuple(offsets), size_bytes=end)

    def bytes_of(self, piece: Piece) -> slice:
        """Return where a piece lies in the copy."""
        first, itemsize = self.offsets[piece.tensor], self.tensors[piece.tensor].itemsize
        return slice(first + piece.start * itemsize, first + piece.stop * itemsize)

    def count_bytes(self, pieces: Iterable[Piece]) -> int:
        return sum((p.stop - p.start) * self.tensors[p.tensor].itemsize for p in pieces)

    def runs(self, pieces: Iterable[Piece], alignment: int = 1) -> Iterator[tuple[Piece, slice]]:
        """Yield where each piece lies in a bucket, which has them one after the other."""
        start = 0
        for piece in pieces:
            stop = start + self.count_bytes([piece])
            yield piece, slice(start, stop)
            start = -(-stop // alignment) * alignment

    def buckets(self, pieces: Iterable[Piece], bucket_bytes: int) -> tuple[tuple[Piece, ...], ...]:
        """Cut the pieces, in order, so that no bucket is larger; each takes at least one element."""
        buckets: list[tuple[Piece, ...]] = []
        bucket: list[Piece] = []
        room = bucket_bytes
        for tensor, start, stop in pieces:
            itemsize = self.tensors[tensor].itemsize
            while start < stop:
                if bucket and room < itemsize:
                    buckets.append(tuple(bucket))
                    bucket, room = [], bucket_bytes
                end = min(stop, start + max(1, room // itemsize))
                bucket.append(Piece(tensor, start, end))
                room -= (end - start) * itemsize
                start = end
        return (*buckets, tuple(bucket)) if bucket else tuple(buckets)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """The plan of one copy: which rank writes which pieces."""

    delivery: Delivery
    layout: Layout
    pieces: tuple[tuple[Piece, ...], ...]  # by actor rank

    @property
    def writers(self) -> tuple[int, ...]:
        """The actor ranks that write; rank 0 alone where there is nothing to write, so that a push always ends."""
        return tuple(rank for rank, pieces in enumerate(self.pieces) if pieces) or (0,)


def row_blocks(shape: Sequence[int], ranks: int) -> tuple[Block, ...]:
    """Return each rank's block of a tensor that FSDP2 sharded: rows in rank order, the last blocks short or empty."""
    rows, row = shape[0], math.prod(shape[1:])
    each = -(-rows // ranks)
    return tuple(Block(min(r * each, rows) * row, min((r + 1) * each, rows) * row) for r in range(ranks))


def replicas(elements: int, ranks: int) -> tuple[Block, ...]:
    """Return each rank's block of a tensor that every rank has whole."""
    return (Block(0, elements),) * ranks


def assemble(layout: Layout, held: Sequence[Sequence[Block]], delivery: Delivery) -> Assembly:
    """Assign every element of every tensor to exactly one of the ranks that hold it. `held`: by tensor, then rank.

    Raises ValueError for an element that no rank holds.
    """
    ranks = max(map(len, held), default=1)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for tensor, (spec, blocks) in enumerate(zip(layout.tensors, held, strict=True)):
        for rank, part in _split(spec, blocks, frozenset(delivery.near)):
            pieces[rank].append(Piece(tensor, part.start, part.stop))
    return Assembly(delivery=delivery, layout=layout, pieces=tuple(map(tuple, pieces)))


def _split(spec: TensorSpec, blocks: Sequence[Block], near: frozenset[int]) -> list[tuple[int, Block]]:
    edges = sorted({0, spec.elements, *(e for b in blocks for e in b)})
    parts: list[tuple[int, Block]] = []
    for start, stop in itertools.pairwise(edges):
        holders = [rank for rank, block in enumerate(blocks) if block.start <= start and stop <= block.stop]
        holders = [rank for rank in holders if rank in near] or holders
        if not holders:
            raise ValueError(f"no actor rank holds elements {start}-{stop - 1} of {spec.names[0]}")
        if (stop - start) * spec.itemsize < _WORTH_SPLITTING:
            holders = holders[:1]
        cuts = [start + (stop - start) * i // len(holders) for i in range(len(holders) + 1)]
        parts += [(rank, Block(*cut)) for rank, cut in zip(holders, itertools.pairwise(cuts), strict=True)]
    return parts


def select(mode: str, shards: Iterable[Shard]) -> tuple[Shard, ...]:
    """Pick the shards that a sync of `actor.sync.mode` carries once every receiver has had all of them.

    `trainable` leaves out frozen parameters; `lora` carries adapters alone (Hu et al. 2021, arXiv:2106.09685).
    """
    if mode == "trainable":
        return tuple(shard for shard in shards if shard.trained)
    if mode == "lora":
        return tuple(shard for shard in shards if any(fnmatchcase(name, "*lora_*") for name in shard.names))
    return tuple(shards)
