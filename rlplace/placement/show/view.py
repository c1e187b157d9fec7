"""One record of everything that is shown of a plan; every renderer reads it, none computes. Also as values for JSON."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from rlplace.errors import Problem
from rlplace.placement.channels import ChannelPlan
from rlplace.placement.counts import Count, Savings, count_active, dedicate
from rlplace.placement.flow import DeviceDelivery
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import ComponentSpec, Segment
from rlplace.placement.machines.topology import Ranges, Topology
from rlplace.placement.memory.ledger import MemoryCase, MemoryLedger
from rlplace.placement.memory.records import ledger_record
from rlplace.placement.memory.solve import find_shortages
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
from rlplace.units import clipped, plural, show_bytes

ELLIPSIS = " \u2026"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """One stage and the moves on entering it; all releases come before any acquire."""

    name: str
    held: Mapping[str, Residency]  # what each component keeps on its accelerators
    waiting: frozenset[str]  # components that are resident without being needed
    releases: tuple[Move, ...]
    acquires: tuple[Move, ...]

    def word(self, component: str) -> str:
        """Write `full`, or `(full)` for a component that waits."""
        word = self.held[component].word
        if component in self.waiting:
            return f"({word})"
        return word

    def look(self, component: str) -> str:
        """Return how pictures show it: off, weights, full or waits."""
        if component in self.waiting:
            return "waits"
        return self.held[component].word


@dataclasses.dataclass(frozen=True, slots=True)
class NodeFold:
    """Neighbouring nodes with the same components on the same local accelerators: 1,000 nodes fit one page."""

    nodes: range
    accelerators: int  # of one node
    first: int  # global number of the first node's first accelerator
    first_rank: Mapping[str, int]  # component -> its lowest rank on the first node
    local: Mapping[
        str, tuple[Segment, ...]
    ]  # component -> segments, numbered within the node and from its lowest rank

    @property
    def label(self) -> str:
        if len(self.nodes) == 1:
            return f"node {self.nodes.start}"
        return f"nodes {self.nodes.start}-{self.nodes.stop - 1}"

    def bands(self) -> list[tuple[range, tuple[str, ...]]]:
        """Return neighbouring accelerators, numbered within the node, with the components that use them."""
        used = {
            c: Ranges.of(s.accelerators for s in segments)
            for c, segments in self.local.items()
        }
        edges = {0, self.accelerators} | {
            e for r in used.values() for p in r.pieces for e in (p.start, p.stop)
        }
        return [
            (range(a, b), tuple(c for c in used if a in used[c]))
            for a, b in itertools.pairwise(sorted(edges))
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """This placement beside the dedicated one of the same components."""

    savings: Savings
    here: Mapping[str, int]  # stage -> accelerators at work
    apart: Mapping[str, int]
    here_bytes: int  # of the fullest accelerator at its worst moment
    apart_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan with its memory. Never changes once made."""

    name: str  # of the config
    plan: Plan
    case: MemoryCase
    machines: str  # `8 accelerators, 0-7 (1 node x 8), H100, 80 GiB each`
    ahead: str  # how far rollout may run ahead of learn; "" where they take turns
    components: tuple[ComponentSpec, ...]
    stages: tuple[StageView, ...]
    transfers: tuple[Transfer, ...]
    transports: Mapping[str, TransportDetails]
    channels: tuple[tuple[ChannelPlan, str], ...]  # each with where its items are
    folds: tuple[NodeFold, ...]
    counts: tuple[Count, ...]  # of a language-model job
    ledger: MemoryLedger
    shortages: tuple[Problem, ...]
    traffic: Traffic
    comparison: Comparison | None  # None where no component has accelerators

    @property
    def moves(self) -> int:
        """Moves of one iteration."""
        return sum(len(stage.releases) + len(stage.acquires) for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Nothing is known that does not fit."""
        return self.ledger.fits

    def __repr__(self) -> str:
        return f"<plan of {self.name}: {', '.join(spec.name for spec in self.components)} on {self.machines}>"

    def _repr_html_(self) -> str:
        """Return the picture that a notebook shows inline."""
        from rlplace.placement.show.svg import render_svg

        return f'<div style="max-width: 72em">{render_svg(self)}</div>'


def view_plan(
    plan: Plan, case: MemoryCase, *, name: str = "", counts: tuple[Count, ...] = ()
) -> PlanView:
    """Collect what is shown of a plan. `case` has the same placement, needs and offloads."""
    placement = plan.placement
    schedule = plan.schedule
    ledger = case.ledger()
    stages = []
    for stage in schedule.stages:
        held = schedule.residency[stage]
        entry = schedule.entries[stage]
        needless = (c for c in held if schedule.needs.of(stage, c) is Residency.OFF)
        waiting = frozenset(c for c in needless if held[c] > Residency.OFF)
        stages.append(
            StageView(
                name=stage,
                held=held,
                waiting=waiting,
                releases=entry.releases,
                acquires=entry.acquires,
            )
        )
    return PlanView(
        name=name,
        plan=plan,
        case=case,
        machines=f"{plan.topology.describe()}, {_products(plan.topology)}",
        ahead=apart(plan.needs) if plan.needs.ahead else "",
        components=tuple(placement.spec(c) for c in placement.components),
        stages=tuple(stages),
        transfers=transfers(plan),
        transports={
            transport.value: details
            for transport, details in transports_of(plan).items()
        },
        channels=tuple((c, locate(c)) for c in plan.channels),
        folds=fold_nodes(placement),
        counts=counts,
        ledger=ledger,
        shortages=() if ledger.fits else find_shortages(case),
        traffic=count_traffic(plan, ledger),
        comparison=_compare(plan, case, ledger),
    )


def _compare(plan: Plan, case: MemoryCase, ledger: MemoryLedger) -> Comparison | None:
    dedicated = dedicate(plan.placement)
    if dedicated is None:
        return None
    alone = dataclasses.replace(case, placement=dedicated)
    here_bytes, apart_bytes = (
        max((account.worst.total_bytes for account in held.accelerators), default=0)
        for held in (ledger, alone.ledger())
    )
    return Comparison(
        savings=plan.savings,
        here=count_active(plan.placement, plan.schedule.needs),
        apart=count_active(dedicated, alone.schedule().needs),
        here_bytes=here_bytes,
        apart_bytes=apart_bytes,
    )


def _products(topology: Topology) -> str:
    """Write `H100, 80 GiB each`; every product where there are several."""
    kinds = dict.fromkeys(
        (run.product or node.kind, run.memory_bytes)
        for node in topology.nodes
        for run in node.alike
    )
    each = [
        f"{name}, {show_bytes(memory)} each" if memory else name
        for name, memory in kinds
    ]
    return " + ".join(each) or "no accelerators"


def locate(channel: ChannelPlan) -> str:
    """Write where the items of a channel are: `node 0`, `nodes 0-1, 4 items each`, `8 processes, 2 items each`."""
    locations = channel.locations()
    nodes = Ranges.of(range(h.node, h.node + 1) for h in locations if not h.process)
    processes = [h.process for h in locations if h.process]
    places = [
        f"{len(processes)} processes" if len(processes) > 1 else f"process {p}"
        for p in processes[:1]
    ]
    places += (
        [f"{plural(len(nodes), 'node')} {clipped(str(nodes), 20)}"] if nodes else []
    )
    sizes = {h.capacity_items for h in locations}
    least = min(sizes)
    most = max(sizes)
    each = (
        f", {least} items each" if least == most else f", {least} to {most} items each"
    )
    return " and ".join(places) + (each if len(locations) > 1 else "")


def show_move(move: Move) -> str:
    """Write `actor full -> off`, with an arrow."""
    return f"{move.component} {move.before.word} \u2192 {move.after.word}"


def fold_nodes(placement: HybridComponentPlacement) -> tuple[NodeFold, ...]:
    """Fold all nodes, in order. Linear in nodes x components and in segments."""
    topology = placement.topology
    held = defaultdict[tuple[str, int], list[Segment]](list)
    for component in placement.components:
        for segment in placement.spec(component).segments:
            for node, part in topology.parts(segment.accelerators):
                held[component, node.rank].append(
                    segment.cut_to(part)
                )  # nodes never cut a rank
    folds: list[NodeFold] = []
    for node in topology.nodes:
        here = {c: held[c, node.rank] for c in placement.components}
        first_rank = {
            c: min((s.ranks.start for s in found), default=0)
            for c, found in here.items()
        }
        local = {
            c: tuple(s.moved(-node.first, -first_rank[c]) for s in found)
            for c, found in here.items()
        }
        last = folds[-1] if folds else None
        if last is not None and (last.accelerators, last.local) == (
            node.accelerators,
            local,
        ):
            folds[-1] = dataclasses.replace(
                last, nodes=range(last.nodes.start, node.rank + 1)
            )
        else:
            nodes = range(node.rank, node.rank + 1)
            folds.append(
                NodeFold(nodes, node.accelerators, node.first, first_rank, local)
            )
    return tuple(folds)


# ── Plain values in a fixed order: the same plan gives the same dict ──────────────────────────────────────────────────

_ROUTE = ("source", "target", "rows", "shares")


def render_json(view: PlanView) -> dict[str, Any]:
    """Return the plan as plain values; linear in ranks and shares."""
    plan, placement, topology, schedule = (
        view.plan,
        view.plan.placement,
        view.plan.topology,
        view.plan.schedule,
    )
    nodes = [
        _fields(n, "rank", "accelerators", "first", "kind", "memory_bytes")
        for n in topology.nodes
    ]
    comparison = view.comparison
    savings = None
    if comparison is not None:
        savings = _fields(
            comparison.savings, "used", "dedicated", "saved", "by_component"
        ) | {
            "at_work": _plain(comparison.here),
            "dedicated_at_work": _plain(comparison.apart),
            "fullest_bytes": comparison.here_bytes,
            "dedicated_fullest_bytes": comparison.apart_bytes,
        }
    return {
        "config": view.name,
        "fits": view.fits,
        "mode": placement.mode,
        "topology": {"accelerators": topology.num_accelerators, "nodes": nodes},
        "components": {
            c.name: {
                "placement": c.render(),
                "world_size": c.world_size,
                "accelerators": str(c.accelerators),
                "ranks": [
                    _fields(s, "rank", "node", "local_rank", "accelerators")
                    for s in placement.slots(c.name)
                ],
            }
            for c in view.components
        },
        "pairs": [
            {
                "a": a,
                "b": b,
                "relation": placement.relation(a, b),
                "shared": str(placement.shared(a, b)),
            }
            for a, b in itertools.combinations(placement.components, 2)
        ],
        "schedule": {
            "stages": list(schedule.stages),
            **(
                {"ahead": plan.needs.ahead} if plan.needs.ahead else {}
            ),  # versions, of rollout before learn
            **_fields(schedule, "active", "residency", "first", "entries"),
        },
        "routes": _routes(plan),
        "channels": [
            _fields(c, "name", "source", "target", "keys", "capacity_items")
            | {
                "locations": [
                    _fields(h, "node", "keys", "capacity_items")
                    | {"process": h.process or None}
                    for h in c.locations()
                ]
            }
            for c in plan.channels
        ],
        "warnings": _problems(plan.warnings),
        "savings": savings,
        "counts": _plain(view.counts),
        "traffic": _plain(view.traffic),
        "memory": ledger_record(view.ledger),
        "shortages": _problems(view.shortages),
    }


def _plain(value: object) -> Any:
    """Return records and mappings as dicts, sequences as lists, a residency as its word."""
    if isinstance(value, Residency):
        return value.word
    if dataclasses.is_dataclass(value):
        return _fields(value, *(field.name for field in dataclasses.fields(value)))
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: _plain(getattr(value, name)) for name in names}


def _routes(plan: Plan) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the routes, by name where each has one."""
    if not plan.deliveries:
        return [_fields(route, *_ROUTE) for route in plan.routes]
    copies = [
        _fields(
            d,
            "readers",
            *(
                ("owners", "parts")[: 1 + d.cut]
                if isinstance(d, DeviceDelivery)
                else ("near",)
            ),
        )
        for d in plan.deliveries
    ]
    weights = {"source": "actor", "target": "rollout", "copies": copies}
    return {route.name: _fields(route, *_ROUTE) for route in plan.routes} | {
        "weights": weights
    }


def _problems(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Return problems or warnings without their sources."""
    return [
        _fields(problem, "code", "key", "what", "why", "fix") for problem in problems
    ]
