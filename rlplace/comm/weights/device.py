"""Tensors between processes without the host: shared on one accelerator by CUDA IPC, else sent by collectives.

::

    same accelerator   share(tensor) ─ a note of a few hundred bytes in JSON ─▶ open_shared(note): the same memory
    other accelerator  broadcast in a device_group ── NCCL (gloo on hosts) ───▶ broadcast, in place

NCCL refuses two ranks of a group on one accelerator, so ranks that overlap in part need both.
A note holds numbers, names and handles of CUDA alone: it may pass a transport that is not authenticated.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing.reductions as reductions
from torch import Tensor

from rlplace.errors import WeightSyncError

# The last arguments of torch's rebuild_cuda_tensor: numbers and handles.
_CUDA = (
    *("handle", "storage_bytes", "storage_offset", "requires_grad"),
    *("counter", "counter_offset", "event", "wait"),
)


def share(tensor: Tensor) -> bytes:
    """Describe the memory of `tensor` to one other process of this node, as JSON.

    The caller keeps the tensor, unchanged, until that process has dropped it. A tensor of the host moves to shared
    memory first, in place.
    """
    data = tensor.detach()
    if data.is_cuda:
        arguments = reductions.reduce_tensor(data)[1][-len(_CUDA) :]
        note = {name: _hex(value) for name, value in zip(_CUDA, arguments, strict=True)}
        note["accelerator"] = _uuid(data.get_device())
    else:
        file, size_bytes = data.untyped_storage()._share_fd_cpu_()
        note = {"pid": os.getpid(), "file": file, "storage_bytes": size_bytes}
    view = {"size": list(data.size()), "stride": list(data.stride()), "offset": data.storage_offset()}
    return json.dumps({"dtype": str(data.dtype).removeprefix("torch."), **view, **note}).encode()


def open_shared(note: bytes) -> Tensor:
    """Open the memory that `share` described. Work on the current stream waits for what the owner's stream had to do.

    Raises WeightSyncError for an accelerator that this process does not see, ValueError for a damaged note.
    """
    found = json.loads(note)
    dtype = getattr(torch, str(found["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{found['dtype']!r} is no dtype")
    size, stride, offset = ([*map(int, found["size"])], [*map(int, found["stride"])], int(found["offset"]))
    if "pid" in found:
        file = os.open(f"/proc/{int(found['pid'])}/fd/{int(found['file'])}", os.O_RDWR | os.O_CLOEXEC)
        try:
            storage = torch.UntypedStorage._new_shared_fd_cpu(file, int(found["storage_bytes"]))  # type: ignore[attr-defined]  # it is there, but not in the stubs
        finally:
            os.close(file)
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    uuid = str(found["accelerator"])
    device = next((n for n in range(torch.cuda.device_count()) if _uuid(n) == uuid), None)
    if device is None:
        raise WeightSyncError.about(
            "accelerator-not-visible",
            f"accelerator {uuid}",
            "a tensor was shared on an accelerator that this process does not see",
            why="CUDA IPC reaches accelerators that both processes see; others are reached by NCCL",
            fix="let the placement put both ranks on one accelerator, or do not isolate accelerators",
        )
    view = (torch.Size(size), tuple(stride), offset)
    storage_of = (torch.storage.TypedStorage, dtype, device, *(_unhex(found[name]) for name in _CUDA))
    tensor: Tensor = reductions.rebuild_cuda_tensor(Tensor, *view, *storage_of)
    return tensor


def device_group(store: Any, *, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """Join a process group beside any other, for tensors on the members' devices: NCCL on GPUs, gloo on hosts.

    Blocks until all have joined. `store`: a `torch.distributed.Store` of theirs alone.
    """
    timeout = timedelta(seconds=timeout_s)
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _hex(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


def _unhex(value: object) -> object:
    if isinstance(value, str):
        return bytes.fromhex(value)
    if value is None or isinstance(value, int):
        return value
    raise ValueError(f"{value!r} is neither a number nor a handle")


def _uuid(device: int) -> str:
    """Name an accelerator alike in all processes: those that see different ones number them differently."""
    return str(torch.cuda.get_device_properties(device).uuid)
