"""The numbers of a plan: what a job counts, accelerators at work in each stage, and those saved by sharing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rlplace.placement.language.groups import NodeGroups
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import ComponentSpec, Segment
from rlplace.placement.machines.pools import WHOLE_CLUSTER
from rlplace.placement.machines.topology import Node, Ranges, Topology
from rlplace.placement.schedule import Needs, Residency


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """One number of a plan: what is counted (`subject`), the number as text (`count`), and its reason (`why`)."""

    subject: str
    count: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """The numbers of accelerators that a placement uses, and that it would use if no component shared accelerators.

    `by_component`: component -> number of accelerators that it uses. `used`: number of accelerators that any component
    uses.
    """

    by_component: Mapping[str, int]  # component -> accelerators that it uses
    used: int

    @property
    def dedicated(self) -> int:
        return sum(self.by_component.values())

    @property
    def saved(self) -> int:
        return self.dedicated - self.used

    @property
    def sizes(self) -> str:
        return " + ".join(
            f"{component} {size}"
            for component, size in self.by_component.items()
            if size
        )

    @property
    def text(self) -> str:
        one = self.used == 1
        return f"{self.used} accelerator{'' if one else 's'} {'does' if one else 'do'} the work of {self.dedicated}"

    def __str__(self) -> str:
        return f"{self.used} accelerators instead of {self.dedicated} ({self.sizes})"


def count_active(placement: HybridComponentPlacement, needs: Needs) -> dict[str, int]:
    """Return stage -> number of accelerators on which at least one component works in that stage.

    A component works in a stage if `needs` gives it a residency above off there.
    """
    at_work = {}
    for stage in needs.stages:
        needed = [c for c in placement.components if needs.of(stage, c) > Residency.OFF]
        at_work[stage] = len(
            Ranges.of(
                piece for c in needed for piece in placement.accelerators(c).pieces
            )
        )
    return at_work


def dedicate(placement: HybridComponentPlacement) -> HybridComponentPlacement | None:
    """Return a placement in which no accelerator is shared; each component has as many ranks and accelerators as now.

    Return None if no component has accelerators. Components without accelerators are left out. The segments (groups of
    ranks) of a component are placed next to each other, node after node, so that each rank stays on one node. The new
    placement has as many nodes as that takes.
    """
    here = placement.topology
    nodes: list[Node] = []
    # Accelerators in use on the last node. Earlier nodes are not filled further.
    taken = 0
    moved: dict[str, list[Segment]] = {}
    for component in placement.components:
        for segment in placement.spec(component).segments:
            for like, part in here.parts(segment.accelerators):
                size = len(part)
                # On a node with mixed accelerators, a segment keeps its local numbers, so that it stays on the same
                # hardware.
                local = part.start - like.first if like.runs else taken
                fits = local >= taken and local + size <= like.accelerators
                if not nodes or not fits or _kind(nodes[-1]) != _kind(like):
                    first = nodes[-1].numbers.stop if nodes else 0
                    nodes.append(
                        dataclasses.replace(like, rank=len(nodes), first=first)
                    )
                    local = part.start - like.first if like.runs else 0
                taken = local + size
                begin = nodes[-1].first + local
                ranks = segment.cut_to(part).ranks
                moved.setdefault(component, []).append(
                    Segment(accelerators=range(begin, begin + size), ranks=ranks)
                )
    if not moved:
        return None
    groups = NodeGroups(Topology(tuple(nodes), "as needed"))
    specs = {
        c: ComponentSpec(
            name=c,
            pool=groups[WHOLE_CLUSTER],
            written=tuple(found),
            parallel=placement.spec(c).parallel,
        )
        for c, found in moved.items()
    }
    return HybridComponentPlacement.of(specs, groups)


def _kind(node: Node) -> Node:
    return dataclasses.replace(node, rank=0, first=0)
