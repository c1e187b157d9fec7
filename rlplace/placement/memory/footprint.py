"""What one rank of a component holds on each of its accelerators and on its host, and when."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

from rlplace.placement.memory.formulas import CONTEXT_BYTES, communicator, pinned
from rlplace.placement.schedule import Residency


class Part(enum.Enum):
    """What bytes on an accelerator are for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    GATHERED = "gathered weights"
    KV_CACHE = "KV cache"
    SIMULATOR = "simulator"
    WORKSPACE = "workspace"
    SYNC = "sync buffers"
    LOADING = "loading"  # passes through when weights are first brought in
    CONTEXT = "CUDA context"
    COMMUNICATOR = "communicator buffers"
    ASLEEP = "kept while asleep"
    MEASURED = "measured"
    UNFORESEEN = "beyond what was foreseen"


class HostPart(enum.Enum):
    """What bytes on a host are for."""

    OFFLOADED = "offloaded copies"
    OPTIMIZER = "optimizer state"
    SLEEP = "sleep copies"
    WEIGHTS = "weights"  # that live there and come to the accelerator for a moment
    AVERAGE = "averaged weights"
    RECEIVED = "weights as received"  # whole, of which a rank takes its part
    SENT = "weights as sent"  # to other nodes, which are next sent what changed
    POOL = "pinned pool"  # what rounding adds, and blocks that wait for the next offload
    SIMULATOR = "simulator"
    SHARED = "in shared memory"


Bytes = Mapping[Part, int]
HostBytes = Mapping[HostPart, int]
Tensors = Sequence[tuple[int, int]]  # size of a tensor on the fullest rank, and how many such there are
_PROCESS = frozenset({Part.CONTEXT, Part.COMMUNICATOR, Part.ASLEEP})  # not in what a worker reports


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """How a component sits on one kind of accelerator: all that its footprint depends on beside its own demand."""

    ranks: int  # world size
    accelerators_per_rank: int  # 0 for a component on nodes or other hardware
    tensor_parallel: int = 1  # accelerators that cut one copy of the model between them
    memory_bytes: int  # of one accelerator; 0: not known
    kind: str  # "cuda", "emulated", ...

    @property
    def copies(self) -> int:
        """How many copies of a model its accelerators hold, if each is whole; they share state between them."""
        return max(1, self.ranks * self.accelerators_per_rank // self.tensor_parallel)

    @property
    def groups(self) -> int:
        """Communicators of a process: with the other copies, and with those that cut its own."""
        return 1 if self.tensor_parallel == 1 else 2

    def process(self, groups: int) -> dict[Part, int]:
        """What a process with `groups` communicators costs by being there; nothing where emulated."""
        if self.kind == "emulated":
            return {}
        several = self.ranks * self.accelerators_per_rank > 1
        return {Part.CONTEXT: CONTEXT_BYTES, Part.COMMUNICATOR: communicator(groups) if several else 0}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of one rank, on each of its accelerators; `host` on the host of its node.

    `held` is whole for every residency: what lives as long as the process stands in each of them.
    """

    held: Mapping[Residency, Bytes]
    working: Mapping[str, Bytes] = dataclasses.field(default_factory=dict)  # stage -> beside what is held there
    loading: Bytes = dataclasses.field(default_factory=dict)  # beside what is held, when it leaves OFF at the start
    host: Mapping[Residency, HostBytes] = dataclasses.field(default_factory=dict)
    lacking: str | None = None  # why it cannot work at all, such as a KV cache without room

    def reported_bytes(self, residency: Residency) -> int:
        """What the worker itself reports after a move: all but what belongs to its process."""
        return sum(size for part, size in self.held[residency].items() if part not in _PROCESS)

    def host_bytes(self, residency: Residency) -> int:
        """What the worker itself reports: the copies, not the pool they are taken from."""
        return sum(size for part, size in self.host.get(residency, {}).items() if part is not HostPart.POOL)

    def corrected(self, measured: Mapping[Residency, int], unforeseen: Mapping[Residency, int]) -> Footprint:
        """The same with measured bytes in place of formulas, residency by residency, and unforeseen ones beside them.

        With unforeseen bytes the formulas stay, so that a change of what they count still has an effect.
        """
        held = dict(self.held)
        for residency, parts in self.held.items():
            if residency in measured:
                process = {part: size for part, size in parts.items() if part in _PROCESS}
                held[residency] = {Part.MEASURED: measured[residency]} | process
            if unforeseen.get(residency):
                held[residency] = {**held[residency], Part.UNFORESEEN: unforeseen[residency]}
        return dataclasses.replace(self, held=held)


def total(tensors: Tensors) -> int:
    return sum(size * times for size, times in tensors)


def host_copies(placed: Placed, part: HostPart, *, off: Tensors, weights: Tensors = ()) -> dict[Residency, HostBytes]:
    """What a rank keeps on its host in each residency: copies of what is not on the accelerators.

    Copies of GPU tensors are pinned, and the pool they come from never shrinks. Setup ends with every component off, so
    the pool has its full size from the first stage on, also where nothing moves later.
    """
    pool = 0 if placed.kind == "emulated" else sum(pinned(size) * times for size, times in off)
    sizes = {Residency.OFF: total(off), Residency.WEIGHTS: total(weights), Residency.FULL: 0}
    return {residency: {part: size, HostPart.POOL: max(0, pool - size)} for residency, size in sizes.items()}


class Demand(Protocol):
    """What a component asks of memory, before it is placed."""

    def footprint(self, placed: Placed) -> Footprint: ...
