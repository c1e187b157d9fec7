"""The same job with accelerators of its own for every component: what sharing is measured against."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from rlplace.placement.language.groups import NodeGroups
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import ComponentSpec, Segment
from rlplace.placement.machines.pools import WHOLE_CLUSTER
from rlplace.placement.machines.ranges import Ranges
from rlplace.placement.machines.topology import Node, Topology
from rlplace.placement.schedule import Needs, Residency


def dedicate(placement: HybridComponentPlacement) -> HybridComponentPlacement | None:
    """Every component with as many ranks and accelerators as here, on nodes like these, none of them shared.

    Components without accelerators are left out; None where all are without. Pieces of a component are put next to
    each other, node after node, so that a rank stays on one node.
    """
    nodes = _Nodes()
    moved: dict[str, list[Segment]] = {}
    for component in placement.components:
        for segment, node in _pieces(placement, component):
            start = nodes.take(node, segment.accelerators)
            accelerators = range(start, start + len(segment.accelerators))
            moved.setdefault(component, []).append(Segment(accelerators=accelerators, ranks=segment.ranks))
    if not moved:
        return None
    topology = Topology(tuple(nodes.made), "as needed")
    groups = NodeGroups(topology)
    specs = {
        c: ComponentSpec(
            name=c, pool=groups[WHOLE_CLUSTER], written=tuple(segments), parallel=placement.spec(c).parallel
        )
        for c, segments in moved.items()
    }
    return HybridComponentPlacement.of(specs, groups)


def _pieces(placement: HybridComponentPlacement, component: str) -> Iterator[tuple[Segment, Node]]:
    """The segments of a component cut where nodes end."""
    topology = placement.topology
    for segment in placement.spec(component).segments:
        edges = [topology.nodes[rank].first for rank in topology.boundaries(segment.accelerators)]
        numbers = segment.accelerators
        for start, stop in zip((numbers.start, *edges), (*edges, numbers.stop), strict=True):
            yield segment.cut_to(range(start, stop)), topology.node_of(start)


class _Nodes:
    """Nodes taken from an endless supply of each kind. Owns those taken so far; only the last is still filled."""

    def __init__(self) -> None:
        self.made: list[Node] = []
        self._taken = 0  # accelerators of the last one

    def take(self, like: Node, accelerators: range) -> int:
        """The first of as many free accelerators of a node like this one, as global number."""
        local = accelerators.start - like.first
        last = self.made[-1] if self.made else None
        # Where the accelerators of a node differ, a piece stays on those it has.
        start = local if like.runs else self._taken
        fits = start >= self._taken and start + len(accelerators) <= like.accelerators
        if last is None or not fits or _kind(last) != _kind(like):
            first = last.numbers.stop if last is not None else 0
            last = dataclasses.replace(like, rank=len(self.made), first=first, host="")
            self.made.append(last)
            start = local if like.runs else 0
        self._taken = start + len(accelerators)
        return last.first + start


def _kind(node: Node) -> Node:
    return dataclasses.replace(node, rank=0, first=0, host="")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActiveAccelerators:
    """How many accelerators are used, and how many of them by a component that is active in a stage."""

    used: int
    at_work: Mapping[str, int]  # stage -> accelerators that hold a component which the stage needs


def count_active(placement: HybridComponentPlacement, needs: Needs) -> ActiveAccelerators:
    at_work = {}
    for stage in needs.stages:
        needed = [c for c in placement.components if needs.of(stage, c) > Residency.OFF]
        at_work[stage] = len(Ranges.of(piece for c in needed for piece in placement.accelerators(c).pieces))
    return ActiveAccelerators(used=len(placement.used), at_work=at_work)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What sharing saves against giving every component accelerators of its own, at the same sizes."""

    by_component: Mapping[str, int]  # accelerators each one uses
    used: int

    @property
    def dedicated(self) -> int:
        return sum(self.by_component.values())

    @property
    def saved(self) -> int:
        return self.dedicated - self.used

    def __str__(self) -> str:
        sizes = " + ".join(f"{component} {size}" for component, size in self.by_component.items() if size)
        return f"{self.used} accelerators instead of {self.dedicated} ({sizes})"


def count_savings(placement: HybridComponentPlacement) -> Savings:
    sizes = {c: len(placement.accelerators(c)) for c in placement.components}
    return Savings(by_component=sizes, used=len(placement.used))
