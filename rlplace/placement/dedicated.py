"""The same job with accelerators of its own for every component: what sharing is measured against."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

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
    here = placement.topology
    nodes: list[Node] = []
    taken = 0  # accelerators of the last node; only that one is still filled
    moved: dict[str, list[Segment]] = {}
    for component in placement.components:
        for segment in placement.spec(component).segments:
            for like, part in here.parts(segment.accelerators):
                size = len(part)
                # Where the accelerators of a node differ, a piece stays on those it has.
                local = part.start - like.first if like.runs else taken
                fits = local >= taken and local + size <= like.accelerators
                if not nodes or not fits or _kind(nodes[-1]) != _kind(like):
                    first = nodes[-1].numbers.stop if nodes else 0
                    nodes.append(dataclasses.replace(like, rank=len(nodes), first=first, host=""))
                    local = part.start - like.first if like.runs else 0
                taken = local + size
                begin = nodes[-1].first + local
                ranks = segment.cut_to(part).ranks
                moved.setdefault(component, []).append(Segment(accelerators=range(begin, begin + size), ranks=ranks))
    if not moved:
        return None
    groups = NodeGroups(Topology(tuple(nodes), "as needed"))
    specs = {
        c: ComponentSpec(name=c, pool=groups[WHOLE_CLUSTER], written=tuple(found), parallel=placement.spec(c).parallel)
        for c, found in moved.items()
    }
    return HybridComponentPlacement.of(specs, groups)


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
