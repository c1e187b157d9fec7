"""Tensors that FSDP may have sharded by rows: a rank's own part, the whole, sizes, a fingerprint, first values."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by their names in a config


def own(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter, or of what belongs to one; all of it where it is not sharded."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def beside(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a rank's part of what belongs to a parameter, placed as it is; on the host too, whatever the mesh has."""
    return DTensor(local, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else local


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


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 over names, types, shapes and bytes, whatever the order and the device.

    They are taken one after the other: each is let go of before the next, and no more than one is copied to the host.
    """
    prints = sorted(itertools.starmap(_fingerprint, tensors))
    return hashlib.sha256("\n".join(prints).encode()).hexdigest()


def _fingerprint(name: str, tensor: Tensor) -> str:
    # A copy: a storage that numpy has referenced can not be resized, as offloading does.
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    found = hashlib.sha256(copy.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{name} {copy.dtype} {list(copy.shape)} {found}"


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the generator of the first values of `name`, the same on every rank."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little", signed=True)
    return torch.Generator().manual_seed(number)
