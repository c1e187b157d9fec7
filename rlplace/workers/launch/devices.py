"""Memory of accelerators: one Device per worker, one MemoryAccount for the emulated accelerators of a machine."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rlplace.codes import problem
from rlplace.errors import AcceleratorOutOfMemory, ClusterError
from rlplace.placement.language.slots import Slot, component_of
from rlplace.placement.machines.topology import Topology
from rlplace.units import exact_bytes

# longest wait for the lock of an account; a lock is normally held for less than a millisecond
_ACCOUNT_S = 60.0
_LOOK_S = 0.0002
_OPENED = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_HEAD = struct.Struct("<QQ")
_HALF_BYTES = 1 << 16
Held = dict[int, dict[tuple[str, str], int]]  # accelerator -> (owner, label) -> bytes


class Device:
    """The accelerators of one worker, and an account of the memory that the worker uses on them.

    This base class is for a worker without accelerators: its methods account for nothing.
    """

    torch_name = "cpu"  # argument for `torch.device`

    @property
    def capacity_bytes(self) -> int:
        """Memory of each emulated accelerator, in bytes; 0 for GPUs, whose memory torch measures, and without
        accelerators.
        """
        return 0

    def verify(self) -> None:
        """Raise ClusterError if the accelerators that the worker sees are not those of the plan."""

    def acquire(self, size_bytes: int, what: str) -> None:
        """Record that the worker uses `size_bytes` bytes under the label `what` on each of its accelerators.

        The new number replaces an earlier number of the same label. Raise AcceleratorOutOfMemory, and record nothing,
        if the bytes do not fit.
        """

    def release(self, what: str) -> None:
        """Remove the bytes of the label `what` from the account, if there are any."""

    def held_bytes(self) -> int:
        """Return the bytes of this worker on each of its accelerators, as recorded in the account; on a GPU, as
        measured.
        """
        return 0

    def measured_bytes(self, counted: int) -> int:
        """Return the bytes of this worker on each of its accelerators, measured if the device can measure them, else
        `counted`.

        `counted`: bytes of the worker's tensors on each accelerator.
        """
        return counted

    def share_process(self, claims: ProcessClaims) -> None:
        """Tell the device that several workers live in this process. Call this before the first `acquire`.

        `claims`: the record of GPU memory that all workers of the process share.
        """

    @contextlib.contextmanager
    def alone(self, folder: Path | None) -> Iterator[None]:
        """Return a context manager that gives the worker exclusive access to its accelerators.

        Its block starts when no other worker on these accelerators is inside a block of `alone`.

        `folder`: the job folder, which has the lock files; None: no lock is taken.
        """
        yield

    def worker_ended(self) -> None:
        """Remove all bytes of this worker from the account, also bytes of an earlier worker with the same name."""


class MemoryAccount:
    """Account of the used bytes on each emulated accelerator, by worker and label. Thread-safe; the launcher owns
    it.
    """

    def __init__(self, capacity_bytes: Sequence[int]) -> None:
        """Create an empty account. `capacity_bytes`: bytes of each accelerator, by its global number."""
        self.capacity_bytes = tuple(capacity_bytes)
        self._held: Held = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def _opened(self, accelerators: Sequence[int] | None = None) -> Iterator[Held]:
        """Lock the account, and yield the recorded bytes: accelerator -> (worker, label) -> bytes.

        The caller may change the yielded mapping; this changes the account.

        `accelerators`: global numbers of the accelerators that are needed; None: all accelerators.
        """
        with self._lock:
            yield self._held

    def acquire(
        self, owner: str, accelerators: Sequence[int], size_bytes: int, what: str
    ) -> None:
        """Record that a worker uses `size_bytes` bytes under a label on each of `accelerators`.

        The new number replaces an earlier number of the same worker and label.

        `owner`: name of the worker. `accelerators`: global numbers. `what`: the label. Raise AcceleratorOutOfMemory,
        and record nothing, if the bytes do not fit.
        """
        assert size_bytes >= 0, f"{owner}: {what} cannot take {size_bytes} bytes"
        resident = (owner, what)
        with self._opened(accelerators) as held:
            for number in accelerators:
                others = {
                    r: b for r, b in held.get(number, {}).items() if r != resident
                }
                if sum(others.values()) + size_bytes > self.capacity_bytes[number]:
                    raise out_of_memory(
                        owner,
                        what,
                        size_bytes,
                        number,
                        self.capacity_bytes[number],
                        others,
                    )
            for number in accelerators:
                held.setdefault(number, {})[resident] = size_bytes

    def release(self, owner: str, accelerators: Sequence[int], what: str) -> None:
        with self._opened(accelerators) as held:
            for number in accelerators:
                held.get(number, {}).pop((owner, what), None)

    def release_all(self, owner: str) -> None:
        with self._opened() as held:
            for residents in held.values():
                for resident in [
                    resident for resident in residents if resident[0] == owner
                ]:
                    del residents[resident]

    def held_bytes(self, owner: str, accelerators: Sequence[int] | None = None) -> int:
        with self._opened(accelerators) as held:
            sums = [
                sum(b for (o, _), b in residents.items() if o == owner)
                for residents in held.values()
            ]
        # All accelerators of a worker hold the same sum.
        return max(sums, default=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccountOfRuns:
    """A memory account of emulated accelerators that several runs use. `folder`: of its files. `run`: name of this
    run.
    """

    folder: Path
    run: str

    def open(self, capacity_bytes: Sequence[int] = ()) -> SharedAccount:
        """Return the account. `capacity_bytes`: bytes of each accelerator, by its global number."""
        return SharedAccount(capacity_bytes, self.folder, self.run)


class SharedAccount(MemoryAccount):
    """A MemoryAccount that several processes of one machine share through files, one file for each accelerator.
    Picklable.

    ::

        number and length of the valid half │ half 0 │ half 1

    A process writes the half that is not valid, and then makes it the valid half. So a process that is killed while it
    writes leaves a valid account. Raise ClusterError if another process holds the lock of a file for more than a
    minute.
    """

    def __init__(
        self, capacity_bytes: Sequence[int], folder: Path, run: str = ""
    ) -> None:
        """Use the files in `folder`, a subfolder of the job folder. The subfolder is created when it is needed.

        `capacity_bytes`: bytes of each accelerator, by its global number. `run`: name of the run, if other runs use the
        same accelerators in turns and thus the same folder.
        """
        self.capacity_bytes = tuple(capacity_bytes)
        self._folder = folder
        self._run = run

    def acquire(
        self, owner: str, accelerators: Sequence[int], size_bytes: int, what: str
    ) -> None:
        super().acquire(self._name(owner), accelerators, size_bytes, what)

    def release(self, owner: str, accelerators: Sequence[int], what: str) -> None:
        super().release(self._name(owner), accelerators, what)

    def release_all(self, owner: str) -> None:
        super().release_all(self._name(owner))

    def held_bytes(self, owner: str, accelerators: Sequence[int] | None = None) -> int:
        return super().held_bytes(self._name(owner), accelerators)

    def release_run(self) -> None:
        """Remove the bytes of all workers of the run: none of its processes lives."""
        end = self._name("")
        with self._opened() as held:
            for residents in held.values():
                for resident in [each for each in residents if each[0].endswith(end)]:
                    del residents[resident]

    def _name(self, owner: str) -> str:
        """Return the name of a worker in the account."""
        if not self._run:
            return owner
        return f"{owner} of {self._run}"

    @contextlib.contextmanager
    def _opened(self, accelerators: Sequence[int] | None = None) -> Iterator[Held]:
        if accelerators is None:
            accelerators = (
                [int(name) for name in os.listdir(self._folder)]
                if self._folder.exists()
                else []
            )
        with contextlib.ExitStack() as locked:
            # Files are locked in ascending order, so that two processes cannot deadlock.
            files = {
                number: locked.enter_context(self._locked(number))
                for number in sorted(accelerators)
            }
            before = {number: _read(file) for number, file in files.items()}
            held: Held = {
                number: {(owner, what): size for owner, what, size in json.loads(text)}
                for number, text in before.items()
            }
            yield held
            for number, file in files.items():
                text = json.dumps(
                    [[*resident, size] for resident, size in held[number].items()]
                ).encode()
                if text != before[number]:
                    _write(file, text)

    @contextlib.contextmanager
    def _locked(self, number: int) -> Iterator[int]:
        """Open and lock the file of accelerator `number`, and yield the file's descriptor."""
        path = self._folder / str(number)
        try:
            file = os.open(path, _OPENED, 0o600)
        except FileNotFoundError:
            self._folder.mkdir(exist_ok=True)
            file = os.open(path, _OPENED, 0o600)
        try:
            _lock(file, path)
            yield file
            # Unlock explicitly: a process forked by another thread may keep the descriptor open.
            fcntl.flock(file, fcntl.LOCK_UN)
        finally:
            os.close(file)


def _read(file: int) -> bytes:
    head = os.pread(file, _HEAD.size, 0)
    half, size = _HEAD.unpack(head) if head else (0, 0)
    return os.pread(file, size, _HEAD.size + half * _HALF_BYTES) or b"[]"


def _write(file: int, text: bytes) -> None:
    assert len(text) <= _HALF_BYTES, "an accelerator has fewer residents than that"
    head = os.pread(file, _HEAD.size, 0)
    half = 1 - _HEAD.unpack(head)[0] if head else 0
    os.pwrite(file, text, _HEAD.size + half * _HALF_BYTES)
    os.pwrite(file, _HEAD.pack(half, len(text)), 0)


def _lock(file: int, path: Path) -> None:
    until = time.monotonic() + _ACCOUNT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as held:
            if time.monotonic() > until:
                raise ClusterError(
                    problem("account-held", str(path), limit_s=_ACCOUNT_S)
                ) from held
            time.sleep(_LOOK_S)


def out_of_memory(
    owner: str,
    what: str,
    size_bytes: int,
    number: int,
    capacity_bytes: int,
    held: dict[tuple[str, str], int],
) -> AcceleratorOutOfMemory:
    """Return the error for bytes that do not fit on an accelerator. Its text lists what is on the accelerator, largest
    first.

    `owner`: name of the worker that needs `size_bytes` bytes. `what`: label of the bytes. `number`: global number of
    the accelerator. `capacity_bytes`: memory of the accelerator. `held`: used bytes by (worker, label), without earlier
    bytes of this worker and label.
    """
    largest = sorted(held.items(), key=lambda item: (-item[1], item[0]))
    lines = [
        f"{resident}: {label} {exact_bytes(size)}"
        for (resident, label), size in largest
        if size
    ]
    free = capacity_bytes - sum(held.values())
    others = [
        component_of(r)
        for (r, _), size in largest
        if r != owner and component_of(r) and size
    ]
    error = "alone"
    if others:
        error = "beside-others"
    elif lines:
        error = "beside-itself"
    full = problem(
        "accelerator-out-of-memory",
        owner,
        f"{what} needs {exact_bytes(size_bytes)}",
        error=error,
        number=number,
        capacity=exact_bytes(capacity_bytes),
        free=exact_bytes(free),
        residents="\n".join(lines),
        other=others[0] if others else None,
        needed=capacity_bytes - free + size_bytes,
    )
    return AcceleratorOutOfMemory(
        full,
        accelerator=number,
        lacking_bytes=size_bytes - free,
    )


def cuda_out_of_memory(
    error: BaseException, slot: Slot
) -> AcceleratorOutOfMemory | None:
    """Return AcceleratorOutOfMemory if `error` is torch's error of a full GPU, else None.

    `slot`: slot of the worker that raised the error.
    """
    # torch is not imported here: most workers never need it.
    torch = sys.modules.get("torch")
    # Another thread may still be importing torch: then names are missing, and torch cannot have raised this error.
    if not isinstance(error, getattr(torch, "OutOfMemoryError", ())):
        return None
    text = str(error)
    sizes = []
    # torch writes sizes such as "20.00 MiB".
    for words in ("Tried to allocate", "of which"):
        found = re.search(words + r" ([\d.]+) (bytes|[KMGT]iB)", text)
        power = (
            ("bytes", "KiB", "MiB", "GiB", "TiB").index(found.group(2)) if found else 0
        )
        sizes.append(int(float(found.group(1)) * 1024**power) if found else 0)
    gpu = re.search(r"GPU (\d+)", text)
    at = int(gpu.group(1)) if gpu is not None else 0
    number = (
        slot.accelerators[at if at < len(slot.accelerators) else 0]
        if slot.accelerators
        else at
    )
    return AcceleratorOutOfMemory(
        problem(
            "accelerator-out-of-memory",
            slot.owner,
            text.partition(". See documentation")[0],
            error="torch",
            number=number,
        ),
        accelerator=number,
        lacking_bytes=max(0, sizes[0] - sizes[1]),
    )


class EmulatedDevice(Device):
    """Accelerators that exist only in an account of memory; the worker computes on the CPU. Picklable if the account
    is.
    """

    def __init__(self, account: MemoryAccount, slot: Slot) -> None:
        self._account = account
        self._slot = slot
        # Labels that are in the account; a local copy saves opening the file.
        self._acquired: set[str] = set()

    @property
    def capacity_bytes(self) -> int:
        return min(self._account.capacity_bytes[n] for n in self._slot.accelerators)

    def acquire(self, size_bytes: int, what: str) -> None:
        if size_bytes or what in self._acquired:
            self._account.acquire(
                self._slot.owner, self._slot.accelerators, size_bytes, what
            )
            self._acquired.add(what)

    def release(self, what: str) -> None:
        if what in self._acquired:
            self._account.release(self._slot.owner, self._slot.accelerators, what)
            self._acquired.discard(what)

    def held_bytes(self) -> int:
        return self._account.held_bytes(self._slot.owner, self._slot.accelerators)

    def worker_ended(self) -> None:
        self._account.release_all(self._slot.owner)
        self._acquired.clear()


class ProcessClaims:
    """Record of the bytes that each worker of one process has requested on each GPU. Thread-safe.

    All workers of the process share one record. CUDA and torch measure the memory of a process, not of a thread. If
    several workers are threads of one process, only this record says how many bytes each worker uses.
    """

    def __init__(self) -> None:
        # GPU -> (owner, label) -> bytes
        self._claimed: dict[int, dict[tuple[str, str], int]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[ProcessClaims], tuple[()]]:
        # Nothing is claimed yet in another process, so a copy starts empty.
        return ProcessClaims, ()

    def others(self, gpu: int, resident: tuple[str, str]) -> dict[tuple[str, str], int]:
        """Return the requested bytes on a GPU by (worker, label), without the entry of the (worker, label) `resident`.

        `gpu`: number of the GPU among the GPUs that the process sees.
        """
        with self._lock:
            return {
                each: size
                for each, size in self._claimed.get(gpu, {}).items()
                if each != resident
            }

    def claim(self, gpu: int, resident: tuple[str, str], size_bytes: int) -> None:
        with self._lock:
            self._claimed.setdefault(gpu, {})[resident] = size_bytes

    def drop(self, gpu: int, resident: tuple[str, str]) -> None:
        with self._lock:
            self._claimed.get(gpu, {}).pop(resident, None)

    def drop_owner(self, owner: str) -> None:
        """Remove all entries of the worker `owner`, on every GPU."""
        with self._lock:
            for claimed in self._claimed.values():
                for resident in [
                    resident for resident in claimed if resident[0] == owner
                ]:
                    del claimed[resident]

    def of_owner(self, gpu: int, owner: str) -> int:
        """Return the bytes that the worker `owner` has requested on a GPU.

        `gpu`: number of the GPU among the GPUs that the process sees.
        """
        with self._lock:
            return sum(
                size
                for (each, _), size in self._claimed.get(gpu, {}).items()
                if each == owner
            )


class Room(NamedTuple):
    """Measured memory of one GPU, in bytes. `free`: free for any process. `capacity`: all memory of the GPU. `own`:
    mapped by this process, in use or cached by torch.
    """

    free: int
    capacity: int
    own: int  # mapped by this process, in use or cached


class CudaDevice(Device):
    """The GPUs of one worker. `acquire` checks that the bytes are free and records them; it allocates no memory."""

    def __init__(
        self, index: int = 0, slot: Slot | None = None, uuids: Sequence[str] = ()
    ) -> None:
        """Describe the GPUs of a worker: the GPUs with the numbers `index`, `index` + 1, ... among those that the
        process sees.

        `slot`: slot of the worker, which says how many GPUs there are; None: one GPU. `uuids`: planned UUIDs of the
        worker's GPUs, followed by the UUIDs of the node's other GPUs; empty if unknown.
        """
        self.torch_name = f"cuda:{index}"
        self._index = index
        self._owner = "this process" if slot is None else slot.owner
        self._numbers = (
            slot.accelerators if slot is not None and slot.accelerators else (index,)
        )
        self._uuids = tuple(uuid.removeprefix("GPU-") for uuid in uuids)
        # Starts with the bytes that were in use before the first request.
        self._claims = ProcessClaims()
        self._shares_process = False
        # An engine that manages GPU memory outside of torch replaces this function.
        self.measure: Callable[[], Room] = self.measure_here

    def share_process(self, claims: ProcessClaims) -> None:
        """Count this worker's bytes in `claims`, the record that all workers of the same process share."""
        self._claims = claims
        self._shares_process = True

    def verify(self) -> None:
        """Raise ClusterError if CUDA shows a different GPU of the node than the planned one.

        A MIG slice is not checked: it has a UUID of its own, which is not among the UUIDs of the node's GPUs.
        """
        import torch

        planned = self._uuids[: len(self._numbers)]
        others = self._uuids[len(self._numbers) :]
        for at, uuid in enumerate(planned):
            seen = str(torch.cuda.get_device_properties(self._index + at).uuid)
            if seen != uuid and seen in (*planned, *others):
                raise ClusterError(
                    problem(
                        "worker-misplaced",
                        self._owner,
                        f"GPU-{seen}",
                        error="gpu",
                        uuid=uuid,
                    )
                )

    def acquire(self, size_bytes: int, what: str) -> None:
        """Record `size_bytes` bytes under the label `what`. Raise AcceleratorOutOfMemory if the GPU does not have them
        free.

        Besides the free bytes of the GPU, this process may use the bytes that it already has and no other label has
        recorded.
        """
        if not size_bytes and self._untouched():
            # Measuring would create a CUDA context, which takes half a GiB of the GPU.
            return
        resident = (self._owner, what)
        room = self.measure()
        held = self._claims.others(self._index, resident)
        if sum(held.values()) + size_bytes > room.free + room.own:
            held["other processes", "all they hold"] = (
                room.capacity - room.free - room.own
            )
            raise out_of_memory(
                self._owner, what, size_bytes, self._numbers[0], room.capacity, held
            )
        self._claims.claim(self._index, resident, size_bytes)

    def release(self, what: str) -> None:
        """Remove the label `what`, and return torch's cached blocks to CUDA, so that other processes can use them."""
        self._claims.drop(self._index, (self._owner, what))
        if not self._untouched():
            import torch

            torch.cuda.empty_cache()

    def worker_ended(self) -> None:
        self._claims.drop_owner(self._owner)

    def held_bytes(self) -> int:
        if self._untouched():
            return 0
        if self._shares_process:
            return self._claims.of_owner(self._index, self._owner)
        return self.measure().own

    def _untouched(self) -> bool:
        """Return True as long as this process has neither memory nor a CUDA context on the GPU."""
        torch = sys.modules.get("torch")
        return self.measure == self.measure_here and (
            torch is None or not torch.cuda.is_initialized()
        )

    def measured_bytes(self, counted: int) -> int:
        """Return the bytes of this process on the GPU, including the cache of torch's allocator, but at least
        `counted`.

        If several workers share the process, return `counted`, because the bytes of one worker cannot be measured.
        """
        if self._shares_process:
            return counted
        return max(counted, self.held_bytes())

    @contextlib.contextmanager
    def alone(self, folder: Path | None) -> Iterator[None]:
        """Return a context manager that gives the worker exclusive access to its GPUs.

        Its block starts when no other worker on these GPUs is inside a block of `alone`. The wait has no deadline: the
        driver ends a start that takes too long.

        `folder`: the job folder, which has the lock files; None: no lock is taken.
        """
        with contextlib.ExitStack() as locked:
            places = (
                []
                if folder is None
                else [folder / f"alone-{number}" for number in sorted(self._numbers)]
            )
            for place in places:
                file = locked.enter_context(place.open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
                locked.callback(fcntl.flock, file, fcntl.LOCK_UN)
            yield

    def measure_here(self) -> Room:
        """Return the memory of the worker's first GPU, as CUDA and torch measure it in this process."""
        import torch

        free, capacity = torch.cuda.mem_get_info(self._index)
        return Room(free, capacity, torch.cuda.memory_reserved(self._index))


def make_device(
    slot: Slot,
    topology: Topology,
    account: MemoryAccount | None,
    *,
    index: int,
    uuids: Sequence[str] = (),
) -> Device:
    """Return the device of a worker: without accelerators, with emulated accelerators, or with GPUs.

    `topology`: says which kind the accelerators are. `account`: account of the emulated accelerators; None if there are
    none. `index`: number of the worker's first GPU among those that the process sees. `uuids`: planned UUIDs of the
    worker's GPUs, then those of the node's other GPUs.
    """
    if not slot.accelerators:
        return Device()
    if topology.nodes[slot.node].kind == "cuda":
        return CudaDevice(index, slot, uuids)
    assert account is not None, "emulated accelerators have an account"
    return EmulatedDevice(account, slot)
