"""Tensors by name: split into shards for a sync, compared with the received tensors, and filled in place.

::

    source   {"layer.weight": tensor, ...} ──▶ shards_of ──▶ WeightSender
    target   ReceivedWeights ──▶ misfits: names, shapes ──▶ fill: its own tensors, which stay the objects they are
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlplace.comm.codec import dtype_name
from rlplace.comm.weights.shards import (
    Block,
    Shard,
    copy_tensor,
    replicas,
    row_blocks,
)
from rlplace.errors import did_you_mean

_NAMED_AT_MOST = 5  # weights of each kind of misfit in an error


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a module by name: the tensors themselves, not copies."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def absent(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that have no memory now, because they are offloaded or on the meta device."""
    return [name for name, tensor in tensors.items() if _has_no_memory(_local(tensor))]


def shards_of(
    tensors: Mapping[str, Tensor], *, rank: int, ranks: int
) -> tuple[Shard, ...]:
    """Return the shards of `tensors` that source rank `rank` holds, in the order of the tensors' names.

    `ranks`: number of source ranks. A plain tensor must be whole and equal on all ranks. Of a DTensor that is sharded
    by rows, each rank holds its own rows. A DTensor with another sharding is gathered into new memory, which is a
    collective. All other shards share the memory of `tensors`. Tied tensors make one shard.
    """
    tied: dict[Hashable, list[str]] = {}
    # All ranks send in the same order
    for name in sorted(tensors):
        tied.setdefault(_identity(tensors[name]), []).append(name)
    return tuple(
        _shard(tuple(names), tensors[names[0]], rank, ranks) for names in tied.values()
    )


class Misfits(NamedTuple):
    """Differences in names and in shapes between received tensors and a target's own tensors, as texts."""

    names: tuple[str, ...]
    shapes: tuple[str, ...]


def misfits(received: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Misfits:
    """Return texts about the differences in names and in shapes between received tensors and a target's own tensors.

    For tied weights, one common name is enough. Of each kind of difference, at most `_NAMED_AT_MOST` weights are named.
    """
    known = {_identity(own[name]) for name in own.keys() & received.keys()}
    missing = [
        name
        for name in sorted(own.keys() - received.keys())
        if _identity(own[name]) not in known
    ]
    filled = {id(received[name]) for name in own.keys() & received.keys()}
    unexpected = [
        name
        for name in sorted(received.keys() - own.keys())
        if id(received[name]) not in filled
    ]
    names = [f"{name} did not come" for name in missing]
    for number, name in enumerate(missing[:_NAMED_AT_MOST]):
        near = did_you_mean(name, unexpected)
        if near is not None:
            names[number] += f" ({near} did)"
    unasked = [f"{name} came, and is not expected" for name in unexpected]
    shapes = [
        f"{name} came as {list(received[name].shape)}, expected {list(own[name].shape)}"
        for name in sorted(own.keys() & received.keys())
        if received[name].shape != own[name].shape
    ]
    return Misfits(
        names=(*_shortened(names), *_shortened(unasked)), shapes=_shortened(shapes)
    )


@torch.no_grad()
def fill(own: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
    """Copy each tensor of `received` in place into the tensor of the same name in `own`, and convert it to that dtype.

    If the target is a DTensor, only this rank's shard of the received whole tensor is copied.
    """
    for name in own.keys() & received.keys():
        target = own[name]
        source = received[name]
        if isinstance(target, DTensor):
            shape, offset = compute_local_shape_and_global_offset(
                target.shape, target.device_mesh, target.placements
            )
            part = zip(offset, shape, strict=True)
            source = source[tuple(slice(at, at + size) for at, size in part)]
        local = _local(target)
        copy_tensor(local, source)
        if not local.is_inference():
            # Which the fastest way to copy does not do
            increment_version(local)


def _shard(names: tuple[str, ...], tensor: Tensor, rank: int, ranks: int) -> Shard:
    data = tensor.detach()
    blocks = replicas(tensor.numel(), ranks)
    if isinstance(tensor, DTensor):
        rows = _rows(tensor, rank, ranks)
        if rows is None:
            data = tensor.full_tensor().detach()
        else:
            data = tensor.to_local().detach()
            blocks = rows
    return Shard(
        names=names,
        dtype=dtype_name(tensor),
        shape=tuple(tensor.shape),
        blocks=blocks,
        data=data,
    )


def _rows(tensor: DTensor, rank: int, ranks: int) -> tuple[Block, ...] | None:
    """Return, for each source rank, the block of rows that it has of a DTensor.

    Return None if the DTensor is not sharded by rows alone, or if its ranks are not the ranks 0 to `ranks` - 1.
    """
    if (dist.get_rank(), dist.get_world_size()) != (rank, ranks):
        return None
    placements = tensor.placements
    cut = [dim for dim, placement in enumerate(placements) if placement == Cut(0)]
    whole = sum(isinstance(placement, Replicate) for placement in placements)
    if len(cut) > 1 or len(cut) + whole < len(placements):
        return None
    # A rank outside of the mesh has nothing
    blocks = [Block(0, 0)] * ranks
    mesh = tensor.device_mesh.mesh
    for place in itertools.product(*map(range, mesh.shape)):
        block = Block(0, tensor.numel())
        if cut:
            (dim,) = cut
            block = row_blocks(tensor.shape, mesh.shape[dim])[place[dim]]
        blocks[int(mesh[place])] = block
    return tuple(blocks)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself, detached and in the same memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _has_no_memory(tensor: Tensor) -> bool:
    return bool(
        tensor.is_meta or (tensor.numel() and not tensor.untyped_storage().nbytes())
    )


def _identity(tensor: Tensor) -> Hashable:
    """Return a value that is equal for tied tensors, which are the same elements of the same memory."""
    if isinstance(tensor, DTensor):
        # A part may be empty: memory would not tell
        return id(tensor)
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


def _shortened(texts: list[str]) -> tuple[str, ...]:
    more = len(texts) - _NAMED_AT_MOST
    if more <= 0:
        return tuple(texts)
    return (*texts[:_NAMED_AT_MOST], f"{more} more")
