"""What the members of a device sync have between them: shared tensors, a group, and a store where they meet.

::

    same accelerator   share(tensor) ─ a note of a few hundred bytes in JSON ─▶ open_shared(note): the same memory
    other accelerator  broadcast in a device_group ── NCCL (gloo on hosts) ───▶ broadcast, in place

    each member    here ─▶ waits for the others ─▶ verdict: the first to write it decides, "go" or which are missing
    later          notes between members: what is shared, what has been taken, which version each has

NCCL refuses two ranks of a group on one accelerator, so ranks that overlap in part need both.
The store has no password: what is read from it is parsed as text, numbers and handles of CUDA, and never unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing.reductions as reductions
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # `torch.distributed` has them, its types do not

from rlplace.comm.codec import dtype_name
from rlplace.comm.weights.version import failed_sync
from rlplace.errors import ChannelTimeout, WeightSyncError

_GO = "go"
_LEAST_S = 0.001
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
        named = zip(_CUDA, arguments, strict=True)
        note = {name: value.hex() if isinstance(value, bytes) else value for name, value in named}
        note["accelerator"] = _uuid(data.get_device())
    else:
        file, size_bytes = data.untyped_storage()._share_fd_cpu_()
        note = {"pid": os.getpid(), "file": file, "storage_bytes": size_bytes}
    view = {"size": list(data.size()), "stride": list(data.stride()), "offset": data.storage_offset()}
    return json.dumps({"dtype": dtype_name(data), **view, **note}).encode()


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


def device_group(store: Store, *, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """Join a process group beside any other, for tensors on the members' devices: NCCL on GPUs, gloo on hosts.

    Blocks until all have joined. `store`: theirs alone.
    """
    timeout = timedelta(seconds=timeout_s)
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _unhex(value: object) -> object:
    if isinstance(value, str):
        return bytes.fromhex(value)
    if value is None or isinstance(value, int):
        return value
    raise ValueError(f"{value!r} is neither a number nor a handle")


def _uuid(device: int) -> str:
    """Name an accelerator alike in all processes: those that see different ones number them differently."""
    return str(torch.cuda.get_device_properties(device).uuid)


# ── the store ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Address of a TCPStore that a member, or a process that outlives them, serves."""

    host: str
    port: int

    def connect(self, timeout_s: float) -> Store:
        """Open a store of this member's own: a wait of one member blocks no other. RuntimeError if none listens."""
        return TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=timeout_s))


class SyncRendezvous:
    """One member's end; used by one thread."""

    def __init__(self, store: Store, me: str) -> None:
        self.me = me
        self.store: Any = PrefixStore("weights", store)  # its types know no bytes
        self._round = -1
        self._notes: list[list[str]] = [[], [], []]  # keys of this round, the one before, the one before that

    def join(self, round: int, word: str, members: Sequence[str], *, deadline_s: float) -> list[str]:
        """Return the words of all members, in their order, once all are here.

        Raises ChannelTimeout with the members that did not come, WeightSyncError with the reason of another member;
        then no member goes on.
        """
        began = time.monotonic()
        self._enter(round)
        self.note(f"here/{self.me}", word.encode())
        keys = [self._key(f"here/{member}") for member in members]
        absent = ""
        if not self._come(keys, deadline_s):
            absent = ", ".join(m for m in members if not self.store.check([self._key(f"here/{m}")]))
        verdict = self._decide(f"{absent} did not come" if absent else _GO)
        if absent and verdict != _GO:
            raise ChannelTimeout.about(
                "channel-timeout",
                "weights",
                f"{self.me} waited {time.monotonic() - began:.1f} s for {absent} to take part in the sync",
                why="device tensors go to all ranks at once, so no rank went on; the weights in use are unchanged",
                fix="find out why they stopped, or raise the deadline if they are really this slow",
            )
        if verdict != _GO:
            raise failed_sync("incomplete-weights", self.me, f"the sync did not take place: {verdict}")
        return [found.decode() for found in self.store.multi_get(keys)]

    def refuse(self, round: int, why: str) -> None:
        """Keep the round from going on, unless it does already."""
        self._enter(round)
        self._decide(f"{self.me} {why}")
        self.note(f"here/{self.me}", b"")  # after the verdict: no member needs to wait for this one

    def group_store(self, round: int) -> Store:
        """Return the store of a process group that forms in this round."""
        return PrefixStore(f"group/{round}", self.store)

    def note(self, about: str, what: bytes) -> None:
        key = self._key(about)
        self._notes[0].append(key)
        self.store.set(key, what)

    def read(self, about: str, source: str, *, deadline_s: float) -> bytes:
        """Wait for the note of `source`; ChannelTimeout names it."""
        began, key = time.monotonic(), self._key(about)
        if not self._come([key], deadline_s):
            what = f"{self.me} waited {time.monotonic() - began:.1f} s for {source}: {about}"
            why = f"{source} stopped or died in the middle of a sync; the weights in use are unchanged"
            raise ChannelTimeout.about("channel-timeout", "weights", what, why=why)
        found: bytes = self.store.get(key)
        return found

    def version_of(self, member: str) -> int:
        """Return the newest version that a member has; -1 before the first."""
        key = f"has/{member}"
        return int(self.store.get(key)) if self.store.check([key]) else -1

    def set_version(self, version: int) -> None:
        self.store.set(f"has/{self.me}", str(version))

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enter(self, round: int) -> None:
        if round != self._round:
            self._round = round
            for key in self._notes.pop():
                self.store.delete_key(key)
            self._notes.insert(0, [])

    def _key(self, about: str) -> str:
        return f"{self._round}/{about}"

    def _decide(self, verdict: str) -> str:
        key = self._key("verdict")
        self._notes[0].append(key)
        found: bytes = self.store.compare_set(key, "", verdict)
        return found.decode()

    def _come(self, keys: list[str], deadline_s: float) -> bool:
        """Wait for all of them; False at the deadline."""
        left = timedelta(seconds=max(_LEAST_S, deadline_s - time.monotonic()))
        try:
            self.store.wait(keys, left)
        except dist.DistStoreError:
            return False
        return True
