"""Tensors between processes without the host: shared on one accelerator by CUDA IPC, else sent by collectives.

::

    same accelerator   share(tensor) ─ a note of a few hundred bytes in JSON ─▶ open_shared(note): the same memory
    other accelerator  DeviceGroup.broadcast ──────── NCCL (gloo on hosts) ───▶ DeviceGroup.broadcast, in place

NCCL refuses two ranks of a group on one accelerator, so ranks that overlap in part need both.
A note holds numbers, names and handles of CUDA alone: it may pass a way that is not authenticated.
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

from rlplace.errors import Problem, WeightSyncError


def share(tensor: Tensor) -> bytes:
    """Describe the memory of `tensor` to one other process of this node, as JSON.

    The caller keeps the tensor, unchanged, until that process has dropped it. A tensor of the host moves to shared
    memory first, in place.
    """
    data = tensor.detach()
    if not data.is_cuda:
        file, size_bytes = data.untyped_storage()._share_fd_cpu_()
        note: dict[str, Any] = {"pid": os.getpid(), "file": file, "storage_bytes": size_bytes}
    else:
        # (class, size, stride, offset, class, dtype, device, handle, bytes, offset, requires_grad, reference counter,
        # offset, event, whether to wait for the event)
        arguments = reductions.reduce_tensor(data)[1]
        handle, size_bytes, start, _, counter, counter_at, event, wait = arguments[7:]
        note = {
            "accelerator": _uuid(data.get_device()),
            "handle": _hex(handle),
            "storage_bytes": size_bytes,
            "storage_offset": start,
            "counter": _hex(counter),
            "counter_offset": counter_at,
            "event": _hex(event),
            "wait": bool(wait),
        }
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
    tensor: Tensor = reductions.rebuild_cuda_tensor(
        Tensor,
        torch.Size(size),
        tuple(stride),
        offset,
        torch.storage.TypedStorage,
        dtype,
        _number_of(str(found["accelerator"])),
        _unhex(found["handle"]),
        int(found["storage_bytes"]),
        int(found["storage_offset"]),
        False,  # requires_grad
        _unhex(found["counter"]),
        int(found["counter_offset"]),
        _unhex(found["event"]),
        bool(found["wait"]),
    )
    return tensor


def _hex(handle: bytes | None) -> str | None:
    return None if handle is None else handle.hex()


def _unhex(handle: str | None) -> bytes | None:
    return None if handle is None else bytes.fromhex(handle)


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _number_of(uuid: str) -> int:
    """Find an accelerator by its UUID: processes that see different accelerators number them differently."""
    numbers = [n for n in range(torch.cuda.device_count()) if _uuid(n) == uuid]
    if not numbers:
        raise WeightSyncError(
            Problem(
                code="accelerator-not-visible",
                key=f"accelerator {uuid}",
                what="a tensor was shared on an accelerator that this process does not see",
                why="CUDA IPC reaches accelerators that both processes see; others are reached by NCCL",
                fix="let the placement put both ranks on one accelerator, or do not isolate accelerators",
            )
        )
    return numbers[0]


class DeviceGroup:
    """A process group beside any other, for tensors on the members' devices: NCCL on GPUs, gloo on hosts."""

    def __init__(self, store: Any, *, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        """Block until all have joined. `store`: a `torch.distributed.Store` of theirs alone."""
        timeout = timedelta(seconds=timeout_s)
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Send `tensor` of rank `source` into all others', in place. A collective, on the current stream."""
        self._group.broadcast(tensor, root=source).wait()

    def close(self) -> None:
        self._group = None
