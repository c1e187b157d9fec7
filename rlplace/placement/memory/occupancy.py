"""Accelerators and nodes that are used alike, each kind once: what is computed for one holds for all of them."""

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
    """How ranks of one component sit: several on one accelerator, one on several, or on a node's host alone."""

    component: str
    ranks_per_accelerator: int = 1
    accelerators_per_rank: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorClass:
    """Alike accelerators with alike seats."""

    accelerators: Ranges
    kind: str
    memory_bytes: int  # of one; 0: not known
    seats: tuple[Occupancy, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostClass:
    """Alike nodes: how many ranks of which seat each of them hosts."""

    nodes: Ranges
    kind: str
    memory_bytes: int  # of one accelerator
    host_memory_bytes: int  # 0: not known
    ranks: Mapping[Occupancy, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOccupancy:
    """Everybody's place, both by accelerator and by node; lowest number first."""

    benches: tuple[AcceleratorClass, ...]  # of the accelerators that a component uses
    houses: tuple[HostClass, ...]  # of the nodes that host a rank


def occupancy_of(placement: HybridComponentPlacement) -> ClusterOccupancy:
    """Linear in nodes x components, in segments, and in ranks that have no accelerator."""
    return ClusterOccupancy(benches=_benches(placement), houses=_houses(placement))


def _benches(placement: HybridComponentPlacement) -> tuple[AcceleratorClass, ...]:
    """Sweeps over the accelerators from one change to the next: of hardware, or of who sits there."""
    changes: dict[int, list[tuple[Occupancy, bool]]] = {}
    for component in placement.components:
        for segment in placement.spec(component).segments:
            seat = _seat(component, segment)
            changes.setdefault(segment.accelerators.start, []).append((seat, True))
            changes.setdefault(segment.accelerators.stop, []).append((seat, False))
    found: dict[tuple[str, int, tuple[Occupancy, ...]], list[range]] = {}
    seated: dict[str, list[Occupancy]] = {component: [] for component in placement.components}
    ordered = sorted(changes)
    for stretch, kind, memory in _hardware(placement.topology):
        inside = ordered[bisect_right(ordered, stretch.start) : bisect_left(ordered, stretch.stop)]
        edges = (stretch.start, *inside, stretch.stop)
        for start, stop in itertools.pairwise(edges):
            for seat, comes in sorted(changes.get(start, ()), key=lambda change: change[1]):  # who goes, goes first
                (seated[seat.component].append if comes else seated[seat.component].remove)(seat)
            seats = tuple(itertools.chain(*seated.values()))
            if seats:
                found.setdefault((kind, memory, seats), []).append(range(start, stop))
    return tuple(
        AcceleratorClass(accelerators=Ranges.of(places), kind=kind, memory_bytes=memory, seats=seats)
        for (kind, memory, seats), places in found.items()
    )


def _hardware(topology: Topology) -> Iterator[tuple[range, str, int]]:
    """Stretches of accelerators of one kind and memory, over neighbouring nodes; all accelerators in order."""
    kind, memory, start, stop = "", 0, 0, 0
    for node in topology.nodes:
        for run in node.alike:
            if (node.kind, run.memory_bytes) != (kind, memory) and stop > start:
                yield range(start, stop), kind, memory
                start = stop
            kind, memory, stop = node.kind, run.memory_bytes, stop + run.count
    if stop > start:
        yield range(start, stop), kind, memory


def _houses(placement: HybridComponentPlacement) -> tuple[HostClass, ...]:
    nodes = placement.topology.nodes
    seated: list[dict[Occupancy, int]] = [{} for _ in nodes]
    for component in placement.components:
        for seat, at, ranks in _guests(placement, component):
            seated[at][seat] = seated[at].get(seat, 0) + ranks
    found: dict[tuple[str, int, int, tuple[tuple[Occupancy, int], ...]], list[range]] = {}
    for node, guests in zip(nodes, seated, strict=True):
        if guests:
            key = (node.kind, node.memory_bytes, node.host_memory_bytes, tuple(guests.items()))
            found.setdefault(key, []).append(range(node.rank, node.rank + 1))
    return tuple(
        HostClass(nodes=Ranges.of(places), kind=kind, memory_bytes=memory, host_memory_bytes=host, ranks=dict(guests))
        for (kind, memory, host, guests), places in found.items()
    )


def _guests(placement: HybridComponentPlacement, component: str) -> Iterator[tuple[Occupancy, int, int]]:
    """How many ranks of a component, sitting how, a node hosts: (seat, node, ranks)."""
    segments, nodes = placement.spec(component).segments, placement.topology.nodes
    if not segments:  # on nodes or other hardware
        yield from ((Occupancy(component=component), slot.node, 1) for slot in placement.slots(component))
    for segment in segments:
        seat, numbers = _seat(component, segment), segment.accelerators
        at = placement.topology.node_of(numbers.start).rank
        while at < len(nodes) and nodes[at].first < numbers.stop:
            here = min(numbers.stop, nodes[at].first + nodes[at].accelerators) - max(numbers.start, nodes[at].first)
            if here:  # nodes never cut a rank
                yield seat, at, here // seat.accelerators_per_rank * seat.ranks_per_accelerator
            at += 1


def _seat(component: str, segment: Segment) -> Occupancy:
    return Occupancy(
        component=component,
        ranks_per_accelerator=segment.ranks_per_accelerator,
        accelerators_per_rank=segment.accelerators_per_rank,
    )
