"""Accelerators and hosts that are used alike: what is computed for one holds for all of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Mapping

from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.machines.ranges import Ranges


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Ranks of one component with so many accelerators each; 0: they have a host alone."""

    component: str
    accelerators_per_rank: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OccupancyClass:
    """Equal accelerators, or equal nodes, each with as many ranks of the same occupancies."""

    numbers: Ranges  # of accelerators over the cluster, or of nodes
    kind: str  # of accelerator
    memory_bytes: int  # of one accelerator; 0: not known
    ranks: Mapping[Occupancy, int]  # on each of them
    host_bytes: int = 0  # of one node; 0: not known


@functools.lru_cache(maxsize=8)
def accelerator_classes(placement: HybridComponentPlacement) -> tuple[OccupancyClass, ...]:
    """Those that a component uses, lowest number first. Linear in nodes and segments.

    Sweeps over the accelerators from one change to the next: of hardware, or of the ranks there.
    """
    hardware: dict[int, tuple[str, int]] = {}  # kind and memory, from this accelerator on
    for node in placement.topology.nodes:
        first = node.first
        for run in node.alike:
            hardware[first] = (node.kind, run.memory_bytes)
            first += run.count
    changes: dict[int, list[tuple[Occupancy, int]]] = {}  # accelerator -> how many ranks more share each from there on
    for component in placement.components:
        for segment in placement.spec(component).segments:
            occupancy = Occupancy(component=component, accelerators_per_rank=segment.accelerators_per_rank)
            ranks, numbers = segment.ranks_per_accelerator, segment.accelerators
            changes.setdefault(numbers.start, []).append((occupancy, ranks))
            changes.setdefault(numbers.stop, []).append((occupancy, -ranks))
    present: dict[str, Counter[Occupancy]] = {component: Counter() for component in placement.components}
    found: dict[tuple[tuple[str, int], tuple[tuple[Occupancy, int], ...]], list[range]] = {}
    here = ("", 0)
    for start, stop in itertools.pairwise(sorted({*hardware, *changes})):
        here = hardware.get(start, here)
        for occupancy, ranks in changes.get(start, ()):
            present[occupancy.component][occupancy] += ranks
        if there := tuple((o, ranks) for row in present.values() for o, ranks in row.items() if ranks):
            found.setdefault((here, there), []).append(range(start, stop))
    return tuple(
        OccupancyClass(numbers=Ranges.of(places), kind=kind, memory_bytes=memory, ranks=dict(there))
        for ((kind, memory), there), places in found.items()
    )


@functools.lru_cache(maxsize=8)
def host_classes(placement: HybridComponentPlacement) -> tuple[OccupancyClass, ...]:
    """Those nodes that host a rank, lowest number first. Linear in nodes and ranks."""
    hosted: list[dict[Occupancy, int]] = [{} for _ in placement.topology.nodes]
    for component in placement.components:
        at = placement.locations(component)
        for (node, each), ranks in Counter(zip(at.node, at.count, strict=True)).items():
            hosted[node][Occupancy(component=component, accelerators_per_rank=each)] = ranks
    found: dict[tuple[str, int, int, tuple[tuple[Occupancy, int], ...]], list[range]] = {}
    for here, there in zip(placement.topology.nodes, hosted, strict=True):
        if there:
            key = (here.kind, here.memory_bytes, here.host_memory_bytes, tuple(there.items()))
            found.setdefault(key, []).append(range(here.rank, here.rank + 1))
    return tuple(
        OccupancyClass(numbers=Ranges.of(nodes), kind=kind, memory_bytes=memory, ranks=dict(ranks), host_bytes=host)
        for (kind, memory, host, ranks), nodes in found.items()
    )
