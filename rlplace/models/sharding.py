"""Tensors that may be sharded over ranks: a rank's part, the whole tensor, fingerprints, seeds of initial values.

A mesh has one or two dimensions. `shard`: FSDP splits rows over the replicas of a model. `tensor`: tensor parallelism
splits rows or columns within a replica, and FSDP the rows of what remains. With t tensor-parallel ranks, rank r is rank
r % t of replica r // t.
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

# Names of the dimensions of a mesh
SHARD = "shard"
TENSOR = "tensor"

# A slice of a tensor, by dimension
Part = tuple[slice, ...]

# By their names in a config
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

# Placements of DTensor that split a dimension
_CUTS = (Shard, _StridedShard)


def own(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter, gradient or optimizer tensor, detached.

    An unsharded tensor is returned as a whole.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.detach()


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return `local`, this rank's part, as a DTensor that is sharded like `parameter`.

    If `parameter` is not sharded, return `local` itself. `local` may be on the host, whatever device the mesh has.
    """
    if isinstance(parameter, DTensor):
        return DTensor(local, parameter._spec, requires_grad=False)
    return local


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, detached. A collective if the tensor is sharded."""
    if is_cut(tensor) and tensor.device_mesh.ndim == 2:
        return _put_together(tensor)
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach()


def _put_together(parameter: DTensor) -> Tensor:
    """Return the whole parameter, gathered from all ranks of a mesh of two dimensions. A collective.

    The parts are gathered in one call, whereas DTensor would make two calls.
    """
    copies, each = parameter.device_mesh.shape
    # Where the part of each rank lies, in the order of ranks
    parts = []
    for replica in range(copies):
        for tp_rank in range(each):
            place = {SHARD: replica, TENSOR: tp_rank}
            parts.append(part_at(parameter, place))
    # Parts may differ in size: gather as many elements as the largest has
    shapes = [[dim.stop - dim.start for dim in part] for part in parts]
    room = max(map(math.prod, shapes))
    mine = own(parameter)
    gathered = mine.new_empty(len(parts), room)
    missing = room - mine.numel()
    if missing > 0:
        mine = functional.pad(mine.reshape(-1), (0, missing))
    all_gather(gathered.view(-1), mine.reshape(-1))
    # Copy each part to its place
    found = mine.new_empty(parameter.shape)
    for part, shape, row in zip(parts, shapes, gathered, strict=True):
        size = math.prod(shape)
        found[part] = row[:size].view(shape)
    return found


def all_gather(
    whole: Tensor,
    part: Tensor,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill `whole` with the parts of all ranks of `group`, in the order of ranks. A collective.

    `part`: this rank's part. `group`: None means all ranks.
    """
    # Torch before 2.13 has it under another name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part, group=group)


def own_part(parameter: Tensor) -> Part:
    """Return where this rank's part is in the whole parameter, as a slice for each dimension."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    mesh = parameter.device_mesh
    place = dict(zip(names_of(mesh), mesh.get_coordinate() or (), strict=True))
    part = part_at(parameter, place)
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
    """Return where the part of one rank is in the whole parameter, as a slice for each dimension.

    `place`: name of each dimension of the mesh -> the rank's index in it. `placements`: placements to use instead of
    the parameter's own; None: the parameter's own. Parts have equal sizes, except that the last parts may be smaller.
    Tensor parallelism splits the parameter first, then FSDP splits each part, although FSDP's dimension of the mesh is
    the first (`_StridedShard`).
    """
    mesh = parameter.device_mesh
    part = [(0, size) for size in parameter.shape]
    # Split by tensor parallelism first
    placed = zip(names_of(mesh), placements or parameter.placements, strict=True)
    cuts = [
        (name, placement) for name, placement in placed if isinstance(placement, _CUTS)
    ]
    cuts.sort(key=lambda cut: isinstance(cut[1], _StridedShard))
    for name, placement in cuts:
        start, stop = part[placement.dim]
        # Elements of each part, rounded up
        each = -(-(stop - start) // mesh[name].size())
        first = min(start + place[name] * each, stop)
        last = min(first + each, stop)
        part[placement.dim] = (first, last)
    return tuple(slice(*bounds) for bounds in part)


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the dimensions of a mesh."""
    names = mesh.mesh_dim_names
    assert names is not None, "all meshes here have names"
    return names


def is_cut(parameter: Tensor) -> TypeGuard[DTensor]:
    """Return whether tensor parallelism splits the parameter."""
    return isinstance(parameter, DTensor) and TENSOR in names_of(parameter.device_mesh)


@torch.no_grad()
def all_rows(parameter: Tensor) -> Tensor:
    """Return all rows of `parameter`; of a parameter split by columns, only this rank's columns. A collective.

    The parameter must not be split by rows within a replica.
    """
    if not is_cut(parameter):
        return whole(parameter)
    # Gather over replicas, and keep the split of columns
    kept: list[Placement] = []
    placed = zip(names_of(parameter.device_mesh), parameter.placements, strict=True)
    for name, placement in placed:
        kept.append(Replicate() if name == SHARD else placement)
    return parameter.redistribute(placements=kept).to_local().detach()


@torch.no_grad()
def by_rows(parameter: Tensor, local: Tensor) -> tuple[Tensor, tuple[Placement, ...]]:
    """Return this rank's part of `parameter` as whole rows, and the placements of such parts.

    `local`: this rank's part in the parameter's present sharding. If the parameter is split by columns, the ranks of a
    replica exchange parts so that each rank has whole rows; the call is then a collective, and the result is a new
    tensor.
    """
    if not isinstance(parameter, DTensor):
        return local, ()
    if not any(isinstance(p, _CUTS) and p.dim for p in parameter.placements):
        return local, parameter.placements
    # Rank i of the replica gets rows i * each up to (i + 1) * each
    among = parameter.device_mesh[TENSOR]
    rows, columns = local.shape
    each = -(-rows // among.size())
    counts = []
    for rank in range(among.size()):
        left = rows - rank * each
        counts.append(max(0, min(each, left)))
    mine = counts[among.get_local_rank()]
    # Exchange rows for columns
    parts = local.new_empty(among.size(), mine, columns)
    taken = [mine * columns] * among.size()
    given = [count * columns for count in counts]
    dist.all_to_all_single(
        parts.view(-1),
        local.reshape(-1),
        taken,
        given,
        group=among.get_group(),
    )
    width = among.size() * columns
    whole_rows = parts.transpose(0, 1).reshape(mine, width)
    placements = (Shard(0),) * parameter.device_mesh.ndim
    return whole_rows, placements


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of tensors; the order and the device do not matter.

    `tensors`: (name, tensor), read one by one; only one tensor at a time is copied to the host.
    """
    prints = sorted(itertools.starmap(_fingerprint, tensors))
    joined = "\n".join(prints).encode()
    return hashlib.sha256(joined).hexdigest()


def _fingerprint(name: str, tensor: Tensor) -> str:
    """Return one line of text with the name, dtype, shape and SHA-256 of a tensor."""
    # A copy: a storage that NumPy refers to cannot be resized, which offloading does
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    in_bytes = copy.reshape(-1).view(torch.uint8)
    content = in_bytes.numpy().tobytes()
    found = hashlib.sha256(content).hexdigest()
    return f"{name} {copy.dtype} {list(copy.shape)} {found}"


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the random generator for the initial values of the parameter `name`. Equal arguments give equal generators
    on all ranks.
    """
    text = f"{seed} {name}"
    hashed = hashlib.sha256(text.encode()).digest()
    number = int.from_bytes(hashed[:8], "little", signed=True)
    return torch.Generator().manual_seed(number)
