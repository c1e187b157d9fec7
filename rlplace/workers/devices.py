"""The memory of accelerators: one Device per worker, one MemoryAccount for all emulated accelerators of a job."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from rlplace.errors import AcceleratorOutOfMemory, Problem
from rlplace.placement.slots import Slot


class Device(Protocol):
    """The accelerators of one slot, as its worker sees them."""

    @property
    def torch_name(self) -> str:
        """What `torch.device` takes: "cuda:0" on a GPU, "cpu" where emulated."""
        ...

    def acquire(self, size_bytes: int, what: str) -> None:
        """Accounts `size_bytes` on each accelerator of the slot under the label `what` (replacing an earlier amount of
        that label).

        Raises AcceleratorOutOfMemory, naming all residents, when it does not fit; then nothing has changed.
        """
        ...

    def release(self, what: str) -> None:
        """Gives back what was acquired under `what`; nothing if there was nothing."""
        ...

    def held_bytes(self) -> int:
        """What this worker holds on each of its accelerators."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Who asks for memory, and where: one worker's name and the global numbers of its accelerators."""

    owner: str
    accelerators: tuple[int, ...]


class Account(Protocol):
    """Where the holdings of a job are written down; in this process or behind a call to another."""

    def acquire(self, holding: Holding, size_bytes: int, what: str) -> None: ...

    def release(self, owner: str, what: str) -> None: ...

    def release_all(self, owner: str) -> None:
        """Everything of a worker that ended."""
        ...

    def held_bytes(self, owner: str) -> int: ...


class MemoryAccount:
    """Bytes per resident and label on each emulated accelerator. Thread-safe; owned by the launcher of the job."""

    def __init__(self, capacity_bytes: Sequence[int]) -> None:
        """`capacity_bytes[n]` is what global accelerator n has."""
        self.capacity_bytes = tuple(capacity_bytes)
        self._held: dict[int, dict[tuple[str, str], int]] = {}  # accelerator -> (owner, label) -> bytes
        self._lock = threading.Lock()

    def acquire(self, holding: Holding, size_bytes: int, what: str) -> None:
        if size_bytes < 0:
            raise AssertionError(f"{holding.owner}: {what} cannot take {size_bytes} bytes")
        resident = (holding.owner, what)
        with self._lock:
            for number in holding.accelerators:
                others = {r: b for r, b in self._held.get(number, {}).items() if r != resident}
                if sum(others.values()) + size_bytes > self.capacity_bytes[number]:
                    raise out_of_memory(holding.owner, what, size_bytes, number, self.capacity_bytes[number], others)
            for number in holding.accelerators:
                self._held.setdefault(number, {})[resident] = size_bytes

    def release(self, owner: str, what: str) -> None:
        self._drop(lambda resident: resident == (owner, what))

    def release_all(self, owner: str) -> None:
        self._drop(lambda resident: resident[0] == owner)

    def _drop(self, ends: Callable[[tuple[str, str]], bool]) -> None:
        with self._lock:
            for residents in self._held.values():
                for resident in [r for r in residents if ends(r)]:
                    del residents[resident]

    def held_bytes(self, owner: str) -> int:
        with self._lock:
            sums = [sum(b for (o, _), b in residents.items() if o == owner) for residents in self._held.values()]
        return max(sums, default=0)  # equal on all accelerators of a worker


def out_of_memory(
    owner: str, what: str, size_bytes: int, number: int, capacity_bytes: int, held: dict[tuple[str, str], int]
) -> AcceleratorOutOfMemory:
    """The refusal of `what`, with everybody who holds something on that accelerator, the largest first."""
    largest = sorted(held.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"{resident}: {label} {show_bytes(size)}" for (resident, label), size in largest if size]
    free = capacity_bytes - sum(held.values())
    has = f"accelerator {number} has {show_bytes(capacity_bytes)}, {show_bytes(free)} free"
    strangers = [resident.partition(" rank ")[0] for (resident, _), size in largest if resident != owner and size]
    needed = capacity_bytes - free + size_bytes
    fix = f"cluster.accelerator.memory: {needed}"
    if strangers:
        fix = f"{strangers[0]}.enable_offload: true     (or {fix})"
    return AcceleratorOutOfMemory(
        Problem(
            code="accelerator-out-of-memory",
            key=owner,
            what=f"accelerator {number} is out of memory",
            got=f"{what} needs {show_bytes(size_bytes)}",
            why="\n".join([has + ("; resident are" if lines else "; nobody is resident"), *lines]),
            fix=fix,
        )
    )


def show_bytes(size: int) -> str:
    """`1.5 GiB (1610612736)`: readable, and exact where two sizes differ by little."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(size) >= 1 << power:
            return f"{size / (1 << power):.1f} {unit} ({size})"
    return f"{size} bytes"


class EmulatedDevice:
    """Accelerators that are only an account: the worker computes on the CPU. Picklable when its account is."""

    torch_name = "cpu"

    def __init__(self, account: Account, slot: Slot) -> None:
        self._account = account
        self._holding = Holding(owner=f"{slot.component} rank {slot.rank}", accelerators=slot.accelerators)

    def acquire(self, size_bytes: int, what: str) -> None:
        self._account.acquire(self._holding, size_bytes, what)

    def release(self, what: str) -> None:
        self._account.release(self._holding.owner, what)

    def held_bytes(self) -> int:
        return self._account.held_bytes(self._holding.owner)


class CudaDevice:
    """Real GPUs: the driver enforces their memory, this only measures what torch holds in this process."""

    def __init__(self, index: int = 0) -> None:
        """`index` counts among the GPUs visible to the process."""
        self._index = index

    @property
    def torch_name(self) -> str:
        return f"cuda:{self._index}"

    def acquire(self, size_bytes: int, what: str) -> None:
        """Nothing: allocating is what acquires."""

    def release(self, what: str) -> None:
        """Hands cached blocks back to the driver, so that other processes of this GPU can have them."""
        import torch

        torch.cuda.empty_cache()

    def held_bytes(self) -> int:
        import torch

        return torch.cuda.memory_reserved(self._index)
