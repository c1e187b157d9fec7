"""One record of everything that is shown of a plan; every renderer reads it, none computes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from rlplace.errors import Problem
from rlplace.placement.channels import ChannelPlan
from rlplace.placement.counts import Count
from rlplace.placement.dedicated import ActiveAccelerators, Savings, count_active, count_savings, dedicate
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import ComponentSpec, Segment
from rlplace.placement.machines.ranges import Ranges
from rlplace.placement.machines.topology import Topology
from rlplace.placement.memory.ledger import MemoryCase, MemoryLedger
from rlplace.placement.memory.remedies import find_shortages
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Move, Residency, apart
from rlplace.placement.transfers import (
    Traffic,
    Transfer,
    TransportDetails,
    count_traffic,
    transfers,
    transports_of,
)
from rlplace.units import show_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComponentView:
    """Where one component is."""

    name: str
    spec: ComponentSpec
    placement: str  # canonical text
    each: str  # what a rank has: "2 accelerators"
    shares: Mapping[str, tuple[str, Ranges]]  # every other component -> their relation and the accelerators of both


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one component keeps on its accelerators in one stage."""

    level: Residency
    waits: bool  # resident without being needed

    @property
    def word(self) -> str:
        return f"({self.level.word})" if self.waits else self.level.word


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """One stage and the moves on entering it; all releases come before any acquire."""

    name: str
    held: Mapping[str, Held]
    releases: tuple[Move, ...]
    acquires: tuple[Move, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Neighbouring accelerators of a node that the same components use."""

    accelerators: range  # numbered within the node
    components: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeFold:
    """Neighbouring nodes with the same components, in the same pattern, on the same local accelerators.

    Folding makes a plan for 1,000 nodes fit one page.
    """

    nodes: range
    accelerators: int  # of one node
    first: int  # global number of the first node's first accelerator
    first_rank: Mapping[str, int]  # component -> its lowest rank on the first node
    local: Mapping[str, tuple[Segment, ...]]  # component -> segments, numbered within the node and from its lowest rank

    @property
    def label(self) -> str:
        return f"node {self.nodes.start}" if len(self.nodes) == 1 else f"nodes {self.nodes.start}-{self.nodes.stop - 1}"

    def bands(self) -> list[Band]:
        used = {c: Ranges.of(s.accelerators for s in segments) for c, segments in self.local.items()}
        edges = {0, self.accelerators} | {e for r in used.values() for p in r.pieces for e in (p.start, p.stop)}
        return [
            Band(accelerators=range(a, b), components=tuple(c for c, r in used.items() if a in r))
            for a, b in itertools.pairwise(sorted(edges))
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """This placement beside the dedicated one of the same components."""

    savings: Savings
    here: ActiveAccelerators
    apart: ActiveAccelerators
    here_bytes: int  # of the fullest accelerator at its worst moment
    apart_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """What is computed from a plan together with its memory case."""

    case: MemoryCase
    ledger: MemoryLedger
    shortages: tuple[Problem, ...]
    traffic: Traffic
    comparison: Comparison | None  # None where no component has accelerators


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """Never changes once made."""

    name: str  # of the config
    plan: Plan
    machines: str  # `8 accelerators, 0-7 (1 node x 8), H100, 80 GiB each`
    ahead: str  # how far rollout may run ahead of learn; "" where they take turns
    components: tuple[ComponentView, ...]
    stages: tuple[StageView, ...]
    transfers: tuple[Transfer, ...]
    transports: Mapping[str, TransportDetails]
    channels: tuple[tuple[ChannelPlan, str], ...]  # each with where its items are
    folds: tuple[NodeFold, ...]
    counts: tuple[Count, ...]  # of a language-model job
    memory: MemoryView | None  # None where only the placement is shown

    @property
    def moves(self) -> int:
        """Moves of one iteration."""
        return sum(len(stage.releases) + len(stage.acquires) for stage in self.stages)

    @property
    def known(self) -> MemoryView:
        """The memory of a plan that was viewed with its memory case."""
        if self.memory is None:
            raise ValueError(f"{self.name}: no memory case was given")
        return self.memory

    @property
    def case(self) -> MemoryCase:
        return self.known.case

    @property
    def ledger(self) -> MemoryLedger:
        return self.known.ledger

    @property
    def shortages(self) -> tuple[Problem, ...]:
        return self.known.shortages

    @property
    def traffic(self) -> Traffic:
        return self.known.traffic

    @property
    def comparison(self) -> Comparison | None:
        return self.known.comparison

    @property
    def fits(self) -> bool:
        """Nothing is known that does not fit."""
        return self.known.ledger.fits

    @property
    def memory_known(self) -> bool:
        """Whether the bytes of any component are known."""
        return self.memory is not None and any(a.worst.total_bytes for a in self.memory.ledger.accelerators)


def view_plan(
    plan: Plan, case: MemoryCase | None = None, *, name: str = "", counts: tuple[Count, ...] = ()
) -> PlanView:
    """`case` is the plan's own: its placement, needs and offloads, and the memory each component asks for."""
    placement, schedule = plan.placement, plan.schedule
    stages = []
    for stage in schedule.stages:
        held = {
            c: Held(level=level, waits=level > Residency.OFF and schedule.needs.of(stage, c) is Residency.OFF)
            for c, level in schedule.residency[stage].items()
        }
        entry = schedule.entries[stage]
        stages.append(StageView(name=stage, held=held, releases=entry.releases, acquires=entry.acquires))
    return PlanView(
        name=name,
        plan=plan,
        machines=f"{plan.topology.describe()}, {_products(plan.topology)}",
        ahead=apart(plan.needs) if plan.needs.ahead else "",
        components=tuple(_component(placement, c) for c in placement.components),
        stages=tuple(stages),
        transfers=transfers(plan),
        transports={transport.value: details for transport, details in transports_of(plan).items()},
        channels=tuple((c, locate(c)) for c in plan.channels),
        folds=fold_nodes(placement),
        counts=counts,
        memory=None if case is None else _memory(plan, case),
    )


def _products(topology: Topology) -> str:
    """`H100, 80 GiB each`; every product where there are several."""
    kinds = dict.fromkeys((run.product or node.kind, run.memory_bytes) for node in topology.nodes for run in node.alike)
    each = [f"{name}, {show_bytes(memory)} each" if memory else name for name, memory in kinds]
    return " + ".join(each) or "no accelerators"


def _component(placement: HybridComponentPlacement, component: str) -> ComponentView:
    spec = placement.spec(component)
    shapes = {(s.ranks_per_accelerator, s.accelerators_per_rank) for s in spec.segments}
    words = {
        (f"1/{ranks} of an accelerator" if ranks > 1 else f"{each} accelerator{'s' * (each > 1)}")
        for ranks, each in shapes
    }
    return ComponentView(
        name=component,
        spec=spec,
        placement=spec.render(),
        each=" or ".join(sorted(words)) or "no accelerator",
        shares={
            other: (placement.relation(component, other), placement.shared(component, other))
            for other in placement.components
            if other != component
        },
    )


def locate(channel: ChannelPlan) -> str:
    """Where the items of a channel are: `node 0`, `nodes 0-1, 4 items each`, `8 processes, 2 items each`."""
    locations = channel.locations()
    nodes = Ranges.of(range(h.node, h.node + 1) for h in locations if not h.process)
    processes = [h.process for h in locations if h.process]
    places = [f"{len(processes)} processes" if len(processes) > 1 else f"process {p}" for p in processes[:1]]
    places += [f"node{'s' * (len(nodes) > 1)} {clipped(str(nodes), 20)}"] if nodes else []
    sizes = {h.capacity_items for h in locations}
    least, most = min(sizes), max(sizes)
    each = (
        "" if len(locations) == 1 else f", {least} items each" if least == most else f", {least} to {most} items each"
    )
    return " and ".join(places) + each


def clipped(text: str, longest: int, mark: str = " ...") -> str:
    """`text`, or its beginning and a mark."""
    return text if len(text) <= longest else text[: longest - len(mark)] + mark


def _memory(plan: Plan, case: MemoryCase) -> MemoryView:
    ledger = case.ledger()
    dedicated = dedicate(plan.placement)
    comparison = None
    if dedicated is not None:
        alone = dataclasses.replace(case, placement=dedicated)
        comparison = Comparison(
            savings=count_savings(plan.placement),
            here=count_active(plan.placement, plan.schedule.needs),
            apart=count_active(dedicated, alone.schedule().needs),
            here_bytes=_fullest(ledger),
            apart_bytes=_fullest(alone.ledger()),
        )
    return MemoryView(
        case=case,
        ledger=ledger,
        shortages=() if ledger.fits else find_shortages(case),
        traffic=count_traffic(plan, ledger),
        comparison=comparison,
    )


def _fullest(ledger: MemoryLedger) -> int:
    return max((account.worst.total_bytes for account in ledger.accelerators), default=0)


def fold_nodes(placement: HybridComponentPlacement) -> tuple[NodeFold, ...]:
    """All nodes in order. Linear in nodes x components and in segments."""
    waiting = {
        c: sorted(placement.spec(c).segments, key=lambda s: s.accelerators.start, reverse=True)
        for c in placement.components
    }
    folds: list[NodeFold] = []
    for node in placement.topology.nodes:
        here = {c: _take(segments, node.numbers.stop) for c, segments in waiting.items()}
        first_rank = {c: min((s.ranks.start for s in found), default=0) for c, found in here.items()}
        fold = NodeFold(
            nodes=range(node.rank, node.rank + 1),
            accelerators=node.accelerators,
            first=node.first,
            first_rank=first_rank,
            local={c: tuple(_shifted(s, node.first, first_rank[c]) for s in found) for c, found in here.items()},
        )
        last = folds[-1] if folds else None
        if last is not None and (last.accelerators, last.local) == (fold.accelerators, fold.local):
            folds[-1] = dataclasses.replace(last, nodes=range(last.nodes.start, node.rank + 1))
        else:
            folds.append(fold)
    return tuple(folds)


def _take(waiting: list[Segment], end: int) -> list[Segment]:
    """The parts of the next segments before accelerator `end`; what goes on after it stays in `waiting`."""
    taken: list[Segment] = []
    while waiting and waiting[-1].accelerators.start < end:
        segment = waiting.pop()
        cut = min(segment.accelerators.stop, end)
        taken.append(segment.cut_to(range(segment.accelerators.start, cut)))  # nodes never cut a rank
        if cut < segment.accelerators.stop:
            waiting.append(segment.cut_to(range(cut, segment.accelerators.stop)))
    return taken


def _shifted(segment: Segment, accelerator: int, rank: int) -> Segment:
    return Segment(
        accelerators=range(segment.accelerators.start - accelerator, segment.accelerators.stop - accelerator),
        ranks=range(segment.ranks.start - rank, segment.ranks.stop - rank),
    )
