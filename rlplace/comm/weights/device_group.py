"""Tensors that processes share, and process groups beside any other, on GPUs and on hosts.

::

    same accelerator   share(tensor) ─ a note of a few hundred bytes in JSON ─▶ open_shared(note): the same memory
    other accelerator  broadcast in a device_group ── NCCL (gloo on hosts) ───▶ broadcast, in place
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing.reductions as reductions
from torch import Tensor

# Not in the public types of `torch.distributed`
from torch._C._distributed_c10d import (
    Store,
)

from rlplace.codes import problem
from rlplace.comm.codec import dtype_name
from rlplace.errors import WeightSyncError

_LEAST_S = 0.001
# By default torch ends the whole process once a collective of it has failed or is late, and some minutes after a thread
# of its own hangs. Here a sync that fails leaves the version before: `Member` has the deadline, and aborts the group.
_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
# The last arguments of torch's rebuild_cuda_tensor: numbers and handles.
_CUDA = (
    *("handle", "storage_bytes", "storage_offset", "requires_grad"),
    *("counter", "counter_offset", "event", "wait"),
)


def share(tensor: Tensor) -> bytes:
    """Return a note in JSON, by which one other process of this node can open the memory of `tensor`.

    The caller must keep the tensor until the other process no longer uses it. A tensor on the host is first moved to
    shared memory, in place.
    """
    data = tensor.detach()
    if data.is_cuda:
        arguments = reductions.reduce_tensor(data)[1][-len(_CUDA) :]
        named = zip(_CUDA, arguments, strict=True)
        note = {
            name: value.hex() if isinstance(value, bytes) else value
            for name, value in named
        }
        note["accelerator"] = _uuid(data.get_device())
    else:
        file, size_bytes = data.untyped_storage()._share_fd_cpu_()
        note = {"pid": os.getpid(), "file": file, "storage_bytes": size_bytes}
    view = {
        "size": list(data.size()),
        "stride": list(data.stride()),
        "offset": data.storage_offset(),
    }
    return json.dumps({"dtype": dtype_name(data), **view, **note}).encode()


def open_shared(note: bytes) -> Tensor:
    """Return a tensor in the memory of another process. `note`: the note that `share` has returned there.

    On a GPU, later work on the current stream waits for the work that the other process had on its stream when it
    called `share`. Raise WeightSyncError if this process does not see the accelerator, ValueError if the note is
    damaged.
    """
    found = json.loads(note)
    dtype = getattr(torch, str(found["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{found['dtype']!r} is no dtype")
    size = [*map(int, found["size"])]
    stride = [*map(int, found["stride"])]
    offset = int(found["offset"])
    if "pid" in found:
        file = os.open(
            f"/proc/{int(found['pid'])}/fd/{int(found['file'])}",
            os.O_RDWR | os.O_CLOEXEC,
        )
        try:
            held = int(found["storage_bytes"])
            # It is there, but not in the stubs.
            make = torch.UntypedStorage._new_shared_fd_cpu  # type: ignore[attr-defined]
            storage = make(file, held)
        finally:
            os.close(file)
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    uuid = str(found["accelerator"])
    device = next(
        (n for n in range(torch.cuda.device_count()) if _uuid(n) == uuid), None
    )
    if device is None:
        raise WeightSyncError(problem("accelerator-not-visible", f"accelerator {uuid}"))
    view = (torch.Size(size), tuple(stride), offset)
    storage_of = (
        torch.storage.TypedStorage,
        dtype,
        device,
        *(_unhex(found[name]) for name in _CUDA),
    )
    tensor: Tensor = reductions.rebuild_cuda_tensor(Tensor, *view, *storage_of)
    return tensor


def device_group(
    store: Store, *, rank: int, size: int, device: torch.device, timeout_s: float
) -> Any:
    """Join a process group that is independent of torch's default group, and return it: NCCL on GPUs, gloo on hosts.

    `store`: store through which the members meet. `device`: this member's device. `rank`, `size`: this member's number
    and the number of members. Wait until all members have joined, at most `timeout_s` seconds; on GPUs possibly longer
    if a member has ended, because NCCL has no deadline for joining.
    """
    timeout = timedelta(seconds=timeout_s)
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    # Of this thread
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Read by the constructor
    with _environment(_NCCL):
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    # Else the first broadcast does it
    group.eager_connect_single_device(device)
    return group


def mark(device: torch.device) -> Any:
    """Return an event whose `query()` says whether the present work of the current stream is done.

    Return None on a host, where work is always done.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def _environment(names: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def within(deadline_s: float, work: Callable[[], Any], late: str) -> Any:
    """Run `work` in a thread, and return its result or raise its error.

    `deadline_s`: time of the deadline by `time.monotonic()`. At the deadline, raise RuntimeError with the text `late`;
    the thread goes on.
    """
    outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  # raised by who waits for it
            outcome.set_exception(error)

    threading.Thread(target=run, name="joins a group", daemon=True).start()
    if not concurrent.futures.wait(
        [outcome], max(_LEAST_S, deadline_s - time.monotonic())
    ).done:
        raise RuntimeError(late)
    return outcome.result()


def _unhex(value: object) -> object:
    if isinstance(value, str):
        return bytes.fromhex(value)
    if value is None or isinstance(value, int):
        return value
    raise ValueError(f"{value!r} is neither a number nor a handle")


def _uuid(device: int) -> str:
    """Return the UUID of an accelerator. It is equal in all processes; the number `device` is not."""
    return str(torch.cuda.get_device_properties(device).uuid)
