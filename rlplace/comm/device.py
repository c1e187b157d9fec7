"""Tensors from process to process without the host: lent on one accelerator or node by CUDA IPC, else by collectives.

::

    same accelerator   lend(tensor) ─ a few hundred bytes, by any channel ─▶ lent.open(): the same memory
    other accelerator  DeviceGroup.broadcast ──────── NCCL (gloo on hosts) ──▶ DeviceGroup.broadcast, in place

NCCL refuses two ranks of a group on one accelerator, so ranks that overlap in part need both.
"""

from __future__ import annotations

import dataclasses
import pickle
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing.reductions as reductions
from torch import Tensor

from rlplace.errors import Problem, WeightSyncError

_DEVICE = 6  # position of the device number among the arguments of `rebuild_cuda_tensor`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LentTensor:
    """Memory of a tensor's owner, who keeps it, unchanged, until everyone who opened it has dropped the tensor."""

    how: bytes  # function and arguments that make the tensor in another process
    accelerator: str  # UUID: processes that see different accelerators number them differently; "" on the host

    def open(self) -> Tensor:
        """The same memory. Work on the current stream waits for what the owner's stream had to do when it lent."""
        make, arguments = pickle.loads(self.how)
        if self.accelerator:
            arguments = (*arguments[:_DEVICE], _number_of(self.accelerator), *arguments[_DEVICE + 1 :])
        tensor: Tensor = make(*arguments)
        return tensor


def lend(tensor: Tensor) -> LentTensor:
    """For other processes of this node. A tensor of the host moves to shared memory first, in place."""
    data = tensor.detach()
    on_accelerator = data.is_cuda
    how = bytes(ForkingPickler.dumps(reductions.reduce_tensor(data)))
    return LentTensor(how=how, accelerator=_uuid(data.get_device()) if on_accelerator else "")


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _number_of(uuid: str) -> int:
    numbers = [n for n in range(torch.cuda.device_count()) if _uuid(n) == uuid]
    if not numbers:
        raise WeightSyncError(
            Problem(
                code="accelerator-not-visible",
                key=f"accelerator {uuid}",
                what="a tensor was lent on an accelerator that this process does not see",
                why="CUDA IPC reaches accelerators that both processes see; others are reached by NCCL",
                fix="let the placement put both ranks on one accelerator, or do not isolate accelerators",
            )
        )
    return numbers[0]


class DeviceGroup:
    """A process group beside any other, for tensors on the members' devices: NCCL on GPUs, gloo on hosts."""

    def __init__(self, store: Any, *, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        """Blocks until all have joined. `store`: a `torch.distributed.Store` of theirs alone."""
        timeout = timedelta(seconds=timeout_s)
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """A collective: `tensor` of rank `source` in the place of all others', on the current stream."""
        self._group.broadcast(tensor, root=source).wait()

    def close(self) -> None:
        self._group = None
