"""Tensors that FSDP may have sharded by rows: a rank's own part, the whole, sizes, a fingerprint, first values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def own(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter, or of what belongs to one; all of it where it is not sharded."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return all of it. A collective where it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def own_rows(parameter: Tensor) -> tuple[int, int]:
    """Return first and last + 1 of this rank's rows: FSDP gives each rank equally many, the last ones fewer."""
    if not isinstance(parameter, DTensor):
        return 0, len(parameter)
    mesh, rows = parameter.device_mesh, parameter.shape[0]
    each = -(-rows // mesh.size())
    start = min(mesh.get_local_rank() * each, rows)
    stop = min(start + each, rows)
    assert stop - start == parameter.to_local().shape[0], f"FSDP sharded {rows} rows otherwise"
    return start, stop


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over names, types, shapes and bytes, whatever the order and the device."""
    fingerprint = hashlib.sha256()
    for name in sorted(tensors):
        # A copy: a storage that numpy has referenced can not be resized, as offloading does.
        tensor = tensors[name].detach().to("cpu", copy=True).contiguous()
        fingerprint.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        fingerprint.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return fingerprint.hexdigest()


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the generator of the first values of `name`, the same on every rank."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little", signed=True)
    return torch.Generator().manual_seed(number)
