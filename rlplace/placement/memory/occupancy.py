"""Classes of accelerators and hosts that are used alike: what is computed for one holds for all of its class."""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping

from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import Segment
from rlplace.placement.machines.ranges import Ranges
from rlplace.placement.machines.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """How ranks of one component use accelerators: several share one, one has several, or it has a host alone."""

    component: str
    ranks_per_accelerator: int = 1
    accelerators_per_rank: int = 0

    @classmethod
    def of(cls, component: str, segment: Segment) -> Occupancy:
        return cls(
            component=component,
            ranks_per_accelerator=segment.ranks_per_accelerator,
            accelerators_per_rank=segment.accelerators_per_rank,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorClass:
    """Equal accelerators with equal occupancies."""

    accelerators: Ranges
    kind: str
    memory_bytes: int  # of one; 0: not known
    occupancies: tuple[Occupancy, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostClass:
    """Equal nodes: how many ranks of which occupancy each of them hosts."""

    nodes: Ranges
    kind: str
    memory_bytes: int  # of one accelerator
    host_memory_bytes: int  # 0: not known
    ranks: Mapping[Occupancy, int]


def accelerator_classes(placement: HybridComponentPlacement) -> tuple[AcceleratorClass, ...]:
    """Of the accelerators that a component uses, lowest number first. Linear in nodes and segments.

    Sweeps over the accelerators from one change to the next: of hardware, or of the components there.
    """
    changes: dict[int, list[tuple[bool, Occupancy]]] = {}  # accelerator -> (whether it starts there, occupancy)
    for component in placement.components:
        for segment in placement.spec(component).segments:
            occupancy, numbers = Occupancy.of(component, segment), segment.accelerators
            changes.setdefault(numbers.start, []).append((True, occupancy))
            changes.setdefault(numbers.stop, []).append((False, occupancy))
    found: dict[tuple[str, int, tuple[Occupancy, ...]], list[range]] = {}
    present: dict[str, list[Occupancy]] = {component: [] for component in placement.components}
    ordered = sorted(changes)
    for interval, kind, memory in _hardware(placement.topology):
        inside = ordered[bisect_right(ordered, interval.start) : bisect_left(ordered, interval.stop)]
        for start, stop in itertools.pairwise((interval.start, *inside, interval.stop)):
            for starts, occupancy in sorted(changes.get(start, ()), key=lambda change: change[0]):  # ends first
                there = present[occupancy.component]
                (there.append if starts else there.remove)(occupancy)
            if occupancies := tuple(itertools.chain(*present.values())):
                found.setdefault((kind, memory, occupancies), []).append(range(start, stop))
    return tuple(
        AcceleratorClass(accelerators=Ranges.of(places), kind=kind, memory_bytes=memory, occupancies=occupancies)
        for (kind, memory, occupancies), places in found.items()
    )


def _hardware(topology: Topology) -> Iterator[tuple[range, str, int]]:
    """Intervals of accelerators of one kind and memory, over neighbouring nodes; all accelerators in order."""
    kind, memory, start, stop = "", 0, 0, 0
    for node in topology.nodes:
        for run in node.alike:
            if (node.kind, run.memory_bytes) != (kind, memory) and stop > start:
                yield range(start, stop), kind, memory
                start = stop
            kind, memory, stop = node.kind, run.memory_bytes, stop + run.count
    if stop > start:
        yield range(start, stop), kind, memory


def host_classes(placement: HybridComponentPlacement) -> tuple[HostClass, ...]:
    """Of the nodes that host a rank, lowest number first.

    Linear in nodes x components, in segments, and in ranks that have no accelerator.
    """
    nodes = placement.topology.nodes
    hosted: list[dict[Occupancy, int]] = [{} for _ in nodes]
    for component in placement.components:
        for occupancy, at, ranks in _hosted(placement, component):
            hosted[at][occupancy] = hosted[at].get(occupancy, 0) + ranks
    found: dict[tuple[str, int, int, tuple[tuple[Occupancy, int], ...]], list[range]] = {}
    for node, ranks_there in zip(nodes, hosted, strict=True):
        if ranks_there:
            key = (node.kind, node.memory_bytes, node.host_memory_bytes, tuple(ranks_there.items()))
            found.setdefault(key, []).append(range(node.rank, node.rank + 1))
    return tuple(
        HostClass(nodes=Ranges.of(places), kind=kind, memory_bytes=memory, host_memory_bytes=host, ranks=dict(ranks))
        for (kind, memory, host, ranks), places in found.items()
    )


def _hosted(placement: HybridComponentPlacement, component: str) -> Iterator[tuple[Occupancy, int, int]]:
    """How many ranks of a component a node hosts: (occupancy, node, ranks)."""
    segments, nodes = placement.spec(component).segments, placement.topology.nodes
    if not segments:  # on nodes or other hardware
        yield from ((Occupancy(component=component), slot.node, 1) for slot in placement.slots(component))
    for segment in segments:
        occupancy, numbers = Occupancy.of(component, segment), segment.accelerators
        at = placement.topology.node_of(numbers.start).rank
        while at < len(nodes) and nodes[at].first < numbers.stop:
            here = min(numbers.stop, nodes[at].first + nodes[at].accelerators) - max(numbers.start, nodes[at].first)
            if here:  # nodes never cut a rank
                yield occupancy, at, here // occupancy.accelerators_per_rank * occupancy.ranks_per_accelerator
            at += 1
