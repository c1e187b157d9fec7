"""Tensors that ranks may share: a rank's own part, the whole, a fingerprint, first values.

A mesh has up to two dimensions. `shard`: FSDP cuts rows over the copies of a model. `tensor`: tensor parallelism cuts
rows or columns within a copy, and FSDP the rows of what it left. Rank r is rank r % t of t in copy r // t.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn import functional

SHARD = "shard"
TENSOR = "tensor"  # dimensions of a mesh

Part = tuple[slice, ...]  # of a tensor, by dimension

# By their names in a config
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


_CUTS = (Shard, _StridedShard)


def own(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter, or of what belongs to one; all of it where it is not sharded."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def beside(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a rank's part of what belongs to a parameter, placed as it is; on the host too, whatever the mesh has."""
    if isinstance(parameter, DTensor):
        return DTensor(local, parameter._spec, requires_grad=False)
    return local


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return all of it. A collective where it is sharded."""
    if is_cut(tensor) and tensor.device_mesh.ndim == 2:
        return _put_together(tensor)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _put_together(parameter: DTensor) -> Tensor:
    """Gather the parts of all ranks at once, where DTensor would gather within copies, and then between them."""
    copies, each = parameter.device_mesh.shape
    parts = [
        part_at(parameter, {SHARD: copy, TENSOR: within})
        for copy in range(copies)
        for within in range(each)
    ]
    shapes = [[dim.stop - dim.start for dim in part] for part in parts]
    room = max(map(math.prod, shapes))
    mine = own(parameter)
    gathered = mine.new_empty(len(parts), room)
    if mine.numel() < room:
        mine = functional.pad(mine.reshape(-1), (0, room - mine.numel()))
    all_gather(gathered.view(-1), mine.reshape(-1))
    found = mine.new_empty(parameter.shape)
    for part, shape, row in zip(parts, shapes, gathered, strict=True):
        found[part] = row[: math.prod(shape)].view(shape)
    return found


def all_gather(
    whole: Tensor, part: Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Fill `whole` with the parts of all ranks."""
    # Its name before torch 2.13
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part, group=group)


def own_part(parameter: Tensor) -> Part:
    """Return where this rank's part of a parameter lies in the whole."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    mesh = parameter.device_mesh
    part = part_at(
        parameter, dict(zip(names_of(mesh), mesh.get_coordinate() or (), strict=True))
    )
    shape = tuple(dim.stop - dim.start for dim in part)
    assert shape == tuple(parameter.to_local().shape), (
        f"{tuple(parameter.shape)} was sharded otherwise"
    )
    return part


def part_at(
    parameter: DTensor,
    place: Mapping[str, int],
    placements: Sequence[Placement] | None = None,
) -> Part:
    """Return where the part of the rank at `place` lies, by dimension of the mesh: equal pieces, the last ones less.

    `placements`: others than the parameter has.

    FSDP cuts what tensor parallelism has left, though its dimension of the mesh is the first (`_StridedShard`).
    """
    mesh = parameter.device_mesh
    part = [(0, size) for size in parameter.shape]
    placed = zip(names_of(mesh), placements or parameter.placements, strict=True)
    cuts = [
        (name, placement) for name, placement in placed if isinstance(placement, _CUTS)
    ]
    for name, placement in sorted(
        cuts, key=lambda cut: isinstance(cut[1], _StridedShard)
    ):
        start, stop = part[placement.dim]
        each = -(-(stop - start) // mesh[name].size())
        first = min(start + place[name] * each, stop)
        part[placement.dim] = (first, min(first + each, stop))
    return tuple(slice(*bounds) for bounds in part)


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names
    assert names is not None, "all meshes here have names"
    return names


def is_cut(parameter: Tensor) -> TypeGuard[DTensor]:
    """Return whether the ranks of a copy have parts of it."""
    return isinstance(parameter, DTensor) and TENSOR in names_of(parameter.device_mesh)


@torch.no_grad()
def all_rows(parameter: Tensor) -> Tensor:
    """Return all rows, of the columns that tensor parallelism left this rank. It has cut no rows. A collective."""
    if not is_cut(parameter):
        return whole(parameter)
    names = names_of(parameter.device_mesh)
    kept = [
        Replicate() if n == SHARD else p
        for n, p in zip(names, parameter.placements, strict=True)
    ]
    return parameter.redistribute(placements=kept).to_local().detach()


@torch.no_grad()
def by_rows(parameter: Tensor, local: Tensor) -> tuple[Tensor, tuple[Placement, ...]]:
    """Return this rank's part of what belongs to a parameter in whole rows, and how those are placed.

    `local` is its part as the parameter is placed. What is cut by columns is exchanged within a copy, for some of the
    rows: then a collective, and new memory.
    """
    if not isinstance(parameter, DTensor):
        return local, ()
    if not any(isinstance(p, _CUTS) and p.dim for p in parameter.placements):
        return local, parameter.placements
    among, (rows, columns) = parameter.device_mesh[TENSOR], local.shape
    each = -(-rows // among.size())
    counts = [max(0, min(each, rows - rank * each)) for rank in range(among.size())]
    mine = counts[among.get_local_rank()]
    parts = local.new_empty(among.size(), mine, columns)
    taken = [mine * columns] * among.size()
    given = [count * columns for count in counts]
    dist.all_to_all_single(
        parts.view(-1), local.reshape(-1), taken, given, group=among.get_group()
    )
    return parts.transpose(0, 1).reshape(mine, among.size() * columns), (
        Shard(0),
    ) * parameter.device_mesh.ndim


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 over names, types, shapes and bytes, whatever the order and the device.

    They are taken one after the other: each is let go of before the next, and no more than one is copied to the host.
    """
    prints = sorted(itertools.starmap(_fingerprint, tensors))
    return hashlib.sha256("\n".join(prints).encode()).hexdigest()


def _fingerprint(name: str, tensor: Tensor) -> str:
    # A copy: a storage that numpy has referenced can not be resized, as offloading does.
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    found = hashlib.sha256(
        copy.reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()
    return f"{name} {copy.dtype} {list(copy.shape)} {found}"


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the generator of the first values of `name`, the same on every rank."""
    number = int.from_bytes(
        hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little", signed=True
    )
    return torch.Generator().manual_seed(number)
