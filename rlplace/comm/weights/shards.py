"""Shards of the weights, the plan of a copy (which source rank writes which bytes), and the bytes themselves.

::

    tensors, one after the other, each a flat run of elements           offsets are multiples of 64 bytes
    │ embed                    │ bias │ layer.weight              │
    │ rank 0    │ rank 1       │  0   │ rank 0       │ rank 1     │     a piece: neighbouring elements of one tensor

Planned once, used in every sync. Where several ranks hold the same elements, those near the copy share the work.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplace.placement.flow import Delivery

Bytes = NDArray[np.uint8]

_ALIGNMENT = 64  # bytes, a cache line
_WORTH_SPLITTING = 64 << 10  # bytes; one holder alone writes less than that


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Names, dtype and shape of a whole tensor in a weight sync.

    `names`: several names if weights are tied; the tensor is then sent once. `dtype`: dtype in which the tensor is
    sent, such as "bfloat16".
    """

    names: tuple[str, ...]  # several where weights are tied: the tensor travels once
    dtype: str  # "bfloat16"; the receivers' type, or a narrower one that loses nothing
    shape: tuple[int, ...]

    @property
    def kind(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def itemsize(self) -> int:
        return self.kind.itemsize

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * self.itemsize


class Block(NamedTuple):
    """Elements `start` to `stop` - 1 of a flattened tensor."""

    start: int
    stop: int


class Piece(NamedTuple):
    """Elements `start` to `stop` - 1 of a flattened tensor. `tensor`: index of the tensor in `Layout.tensors`."""

    tensor: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shard(TensorSpec):
    """One source rank's part of a tensor. The inherited fields describe the whole tensor.

    `blocks`: the block of the flattened tensor that each source rank has, in the order of ranks. `data`: the elements
    of this rank's block, in any dtype and shape, on any device.
    """

    blocks: tuple[Block, ...]  # by source rank
    data: Tensor  # this rank's block, in any type and shape, on any device

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(names=self.names, dtype=self.dtype, shape=self.shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The tensors of a whole copy of the weights, and their positions in it.

    `offsets`: index of the first byte of each tensor. `size_bytes`: bytes of the whole copy.
    """

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
        """Return where the bytes of a piece are in a whole copy, as a slice."""
        first = self.offsets[piece.tensor]
        itemsize = self.tensors[piece.tensor].itemsize
        return slice(first + piece.start * itemsize, first + piece.stop * itemsize)

    def count_bytes(self, pieces: Iterable[Piece]) -> int:
        return sum((p.stop - p.start) * self.tensors[p.tensor].itemsize for p in pieces)

    def runs(
        self, pieces: Iterable[Piece], alignment: int = 1
    ) -> Iterator[tuple[Piece, slice]]:
        """Yield each piece, and where its bytes are in a bucket that has the pieces one after the other, as a slice.

        `alignment`: each piece begins at a multiple of this number of bytes.
        """
        start = 0
        for piece in pieces:
            stop = start + self.count_bytes([piece])
            yield piece, slice(start, stop)
            start = -(-stop // alignment) * alignment

    def buckets(
        self, pieces: Iterable[Piece], bucket_bytes: int
    ) -> tuple[tuple[Piece, ...], ...]:
        """Return the pieces in order, cut and grouped into buckets of at most `bucket_bytes` bytes.

        A bucket has at least one element, even if one element is larger than `bucket_bytes`.
        """
        buckets: list[tuple[Piece, ...]] = []
        bucket: list[Piece] = []
        room = bucket_bytes
        for tensor, start, stop in pieces:
            itemsize = self.tensors[tensor].itemsize
            while start < stop:
                if bucket and room < itemsize:
                    buckets.append(tuple(bucket))
                    bucket = []
                    room = bucket_bytes
                end = min(stop, start + max(1, room // itemsize))
                bucket.append(Piece(tensor, start, end))
                room -= (end - start) * itemsize
                start = end
        if bucket:
            return (*buckets, tuple(bucket))
        return tuple(buckets)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """Plan of one copy of the weights: which source rank writes which pieces.

    `delivery`: the planned copy and its readers. `layout`: the tensors and their positions in the copy. `pieces`: the
    pieces that each source rank writes, in the order of ranks.
    """

    delivery: Delivery
    layout: Layout
    pieces: tuple[tuple[Piece, ...], ...]  # by source rank

    @property
    def writers(self) -> tuple[int, ...]:
        """Numbers of the source ranks that write pieces.

        If there are no pieces at all, rank 0 counts as a writer, so that each push has a last writer.
        """
        return tuple(rank for rank, pieces in enumerate(self.pieces) if pieces) or (0,)


def row_blocks(shape: Sequence[int], ranks: int) -> tuple[Block, ...]:
    """Return, for each rank, the block that it has of a tensor that FSDP2 has sharded by rows over `ranks` ranks.

    `shape`: shape of the whole tensor. The blocks are in the order of ranks; the last blocks may be short or empty.
    """
    rows = shape[0]
    row = math.prod(shape[1:])
    each = -(-rows // ranks)
    return tuple(
        Block(min(r * each, rows) * row, min((r + 1) * each, rows) * row)
        for r in range(ranks)
    )


def replicas(elements: int, ranks: int) -> tuple[Block, ...]:
    """Return the blocks of `ranks` ranks that all hold a whole tensor: each block has all `elements` elements."""
    return (Block(0, elements),) * ranks


def assemble(
    layout: Layout, held: Sequence[Sequence[Block]], delivery: Delivery
) -> Assembly:
    """Return the plan of a copy, which assigns each element to one of the source ranks that hold the element.

    `layout`: the tensors of the copy. `held`: the block that each rank holds, by tensor and then by rank. `delivery`:
    the copy; ranks near the copy are preferred. Raise ValueError if no rank holds an element.
    """
    ranks = max(map(len, held), default=1)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for tensor, (spec, blocks) in enumerate(zip(layout.tensors, held, strict=True)):
        for rank, part in _split(spec, blocks, delivery):
            pieces[rank].append(Piece(tensor, part.start, part.stop))
    return Assembly(delivery=delivery, layout=layout, pieces=tuple(map(tuple, pieces)))


def _split(
    spec: TensorSpec, blocks: Sequence[Block], delivery: Delivery
) -> list[tuple[int, Block]]:
    near = frozenset(delivery.near)
    edges = sorted({0, spec.elements, *(e for b in blocks for e in b)})
    parts: list[tuple[int, Block]] = []
    for start, stop in itertools.pairwise(edges):
        holders = [
            rank
            for rank, block in enumerate(blocks)
            if block.start <= start and stop <= block.stop
        ]
        holders = [rank for rank in holders if rank in near] or holders
        if not holders:
            raise ValueError(
                f"no {delivery.source} rank holds elements {start}-{stop - 1} of {spec.names[0]}"
            )
        if (stop - start) * spec.itemsize < _WORTH_SPLITTING:
            holders = holders[:1]
        cuts = [
            start + (stop - start) * i // len(holders) for i in range(len(holders) + 1)
        ]
        parts += [
            (rank, Block(*cut))
            for rank, cut in zip(holders, itertools.pairwise(cuts), strict=True)
        ]
    return parts


# ── bytes of a copy ───────────────────────────────────────────────────────────────────────────────────────────────────


def tensors_in(copy: Bytes | Tensor, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of a whole copy, by all their names. The tensors share the memory of `copy`.

    `copy`: the bytes of the copy, which may be read-only. `layout`: the tensors and their positions in the copy.
    """
    tensors: dict[str, Tensor] = {}
    with warnings.catch_warnings():
        # Of read-only memory: see ReceivedWeights
        warnings.simplefilter("ignore", UserWarning)
        for spec, offset in zip(layout.tensors, layout.offsets, strict=True):
            tensor = _view(copy[offset : offset + spec.size_bytes], spec.kind).reshape(
                spec.shape
            )
            tensors.update(dict.fromkeys(spec.names, tensor))
    return tensors


def write_piece(target: Bytes | Tensor, shard: Shard, rank: int, piece: Piece) -> None:
    """Write the elements of a piece into the bytes `target`, converted to the dtype of the shard's spec.

    `shard`: the shard of source rank `rank`, which contains the piece.
    """
    # Copies only what is not contiguous
    held = shard.data.detach().reshape(-1)
    first = shard.blocks[rank].start
    copy_tensor(
        _view(target, shard.kind), held[piece.start - first : piece.stop - first]
    )


def copy_tensor(target: Tensor, source: Tensor) -> None:
    """Copy `source` into `target`, which has the same shape. Dtypes and devices may differ.

    Equal contiguous host tensors are copied by memmove, which has twice the speed of torch's copy.
    """
    alike = (
        source.dtype == target.dtype
        and source.device == target.device
        and source.device.type == "cpu"
    )
    if (
        alike
        and source.is_contiguous()
        and target.is_contiguous()
        and not (source.is_conj() or source.is_neg())
    ):
        if target.data_ptr() and source.data_ptr():
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source)


def checksum(parts: Iterable[Bytes]) -> int:
    """Return a signed 64-bit checksum of `parts`, which depends on their order. crc32 takes seven times as long.

    The sum changes if a bit flips, or if a word is from an older version. It does not change if two words within a part
    change places.
    """
    total = 0
    for number, part in enumerate(parts):
        words = len(part) // 8 * 8
        tail = int.from_bytes(part[words:].tobytes(), "little")
        part_sum = (
            int(np.add.reduce(part[:words].view(np.uint64), dtype=np.uint64))
            if words
            else 0
        )
        # Odd factors lose no bit modulo 2**64
        total += (part_sum + tail + len(part)) * (2 * number + 1)
    # As a signed word
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def parts_of(copy: Bytes, layout: Layout, pieces: Iterable[Piece]) -> Iterator[Bytes]:
    for piece in pieces:
        yield copy[layout.bytes_of(piece)]


def _view(data: Bytes | Tensor, kind: torch.dtype) -> Tensor:
    if isinstance(data, Tensor):
        return data.view(kind)
    if not len(data):
        return torch.empty(0, dtype=kind)
    return torch.from_numpy(data).view(kind)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Differences between a run of bytes and the same run of bytes in an earlier version of the weights.

    `positions`: indices of the changed bytes. `values`: the new bytes. At the small learning rates of reinforcement
    learning, most bfloat16 weights do not change in one update, and most changes are only in the low byte. A changed
    byte takes five bytes: one for the value, four for the position.
    """

    positions: NDArray[np.uint32]  # ascending
    values: Bytes

    @classmethod
    def between(
        cls, before: Bytes, after: Bytes, *, largest_share: float
    ) -> Changes | None:
        """Return the differences from the bytes `before` to the bytes `after`, which have equal size.

        Return None if the differences would take more than the share `largest_share` of the run's bytes.
        """
        differs = before != after
        if np.count_nonzero(differs) * (
            1 + np.dtype(np.uint32).itemsize
        ) > largest_share * len(after):
            return None
        positions = np.flatnonzero(differs).astype(np.uint32)
        return cls(positions=positions, values=after[positions])

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + self.values.nbytes

    def apply(self, run: Bytes) -> None:
        """Change `run` in place from the earlier version to the later version."""
        run[self.positions] = self.values
