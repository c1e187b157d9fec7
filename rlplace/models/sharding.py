"""Tensors that FSDP may have sharded by rows: a rank's own part, the whole, sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable

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


def elements(parameters: Iterable[Tensor]) -> int:
    """Count the elements of whole parameters."""
    return sum(math.prod(p.shape) for p in parameters)
