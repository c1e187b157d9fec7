"""Bytes of a whole copy: seen as tensors, copied at the speed of memcpy, checksummed, and compared for delta mode."""

from __future__ import annotations

import ctypes
import dataclasses
import warnings
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplace.comm.weights.shards import Layout, Piece, Shard, TensorSpec

Bytes = NDArray[np.uint8]


def spec_of(shard: Shard) -> TensorSpec:
    dtype: torch.dtype = getattr(torch, shard.dtype)
    return TensorSpec(names=shard.names, dtype=shard.dtype, itemsize=dtype.itemsize, shape=shard.shape)


def tensors_in(copy: Bytes | Tensor, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of a whole copy by all their names; they alias it, also where it is read-only."""
    tensors: dict[str, Tensor] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of read-only memory: see ReceivedWeights
        for spec, offset in zip(layout.tensors, layout.offsets, strict=True):
            tensor = _view(copy[offset : offset + spec.size_bytes], spec.dtype).reshape(spec.shape)
            tensors.update(dict.fromkeys(spec.names, tensor))
    return tensors


def write_piece(target: Bytes, shard: Shard, rank: int, piece: Piece) -> None:
    """Write the elements of a piece, which `rank` holds in `shard`, in the type they travel in."""
    copy_tensor(_view(target, shard.dtype), held_in(shard, rank, piece))


def held_in(shard: Shard, rank: int, piece: Piece) -> Tensor:
    """Return the elements of a piece, which `rank` holds in `shard`."""
    held = shard.data.detach().reshape(-1)  # copies only what is not contiguous
    first = shard.blocks[rank].start
    return held[piece.start - first : piece.stop - first]


def copy_tensor(target: Tensor, source: Tensor) -> None:
    """Copy between tensors of equal shape, of any types and devices.

    torch's own copy goes through the caches, at half the speed of memcpy where tensors are large.
    """
    alike = source.dtype == target.dtype and source.device == target.device and source.device.type == "cpu"
    if alike and source.is_contiguous() and target.is_contiguous() and not (source.is_conj() or source.is_neg()):
        if target.data_ptr() and source.data_ptr():
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source)


def checksum(parts: Iterable[Bytes]) -> int:
    """Sum parts, in order, to 64 bits at the speed of memory; crc32 takes seven times as long.

    Any flipped bit and any word of an older version changes the sum. Words that change places within a part do not.
    """
    total = 0
    for number, part in enumerate(parts):
        words = len(part) // 8 * 8
        tail = int.from_bytes(part[words:].tobytes(), "little")
        part_sum = int(np.add.reduce(part[:words].view(np.uint64), dtype=np.uint64)) if words else 0
        total += (part_sum + tail + len(part)) * (2 * number + 1)  # odd factors lose no bit modulo 2**64
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)  # as a signed word


def parts_of(copy: Bytes, layout: Layout, pieces: Iterable[Piece]) -> Iterator[Bytes]:
    for piece in pieces:
        yield copy[layout.bytes_of(piece)]


def _view(data: Bytes | Tensor, dtype: str) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if isinstance(data, Tensor):
        return data.view(kind)
    if not len(data):
        return torch.empty(0, dtype=kind)
    return torch.from_numpy(data).view(kind)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The bytes of a run that differ from the same run of an earlier version.

    At the small learning rates of reinforcement learning most bfloat16 weights do not move in one update, and most that
    do change their low byte alone: one byte and four for its position.
    """

    positions: NDArray[np.uint32]  # ascending
    values: Bytes

    @classmethod
    def between(cls, before: Bytes, after: Bytes, *, largest_share: float) -> Changes | None:
        """Compare runs of one size. None where the changes would take more than `largest_share` of it."""
        differs = before != after
        if np.count_nonzero(differs) * (1 + np.dtype(np.uint32).itemsize) > largest_share * len(after):
            return None
        positions = np.flatnonzero(differs).astype(np.uint32)
        return cls(positions=positions, values=after[positions])

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + self.values.nbytes

    def apply(self, run: Bytes) -> None:
        """Make `run`, which holds the earlier version, the later one."""
        run[self.positions] = self.values
