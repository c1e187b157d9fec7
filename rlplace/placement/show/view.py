"""One record of everything that is shown of a plan, also as values for JSON. Renderers read it and compute nothing."""

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
    """One stage and the moves on entry to it; all releases come before the first acquire.

    `held`: component -> its residency. `waiting`: components that stay on their accelerators although the stage does
    not need them.
    """

    name: str
    held: Mapping[str, Residency]  # what each component keeps on its accelerators
    waiting: frozenset[str]  # components that are resident without being needed
    releases: tuple[Move, ...]
    acquires: tuple[Move, ...]

    def word(self, component: str) -> str:
        """Return the residency of a component as text.

        If the component stays on its accelerators although the stage does not need it, the text is in brackets:
        `(full)`.
        """
        word = self.held[component].word
        if component in self.waiting:
            return f"({word})"
        return word

    def look(self, component: str) -> str:
        """Return the style of a component in pictures: "off", "weights", "full" or "waits".

        "waits" is for a component that stays on its accelerators although the stage does not need it. Any other style
        is the residency.
        """
        if component in self.waiting:
            return "waits"
        return self.held[component].word


@dataclasses.dataclass(frozen=True, slots=True)
class NodeFold:
    """Neighbouring nodes whose accelerators are used in the same way by the same components, shown as one node.

    With folded nodes, a plan of 1,000 nodes fits on one page. `accelerators`: count of accelerators on one node.
    `first`: index in the cluster of the first accelerator. `first_rank`: component -> its lowest rank on the first
    node. `local`: component -> its segments (ranks on neighbouring accelerators) on one node; accelerators are numbered
    within the node, and ranks from 0.
    """

    nodes: range
    accelerators: int  # of one node
    first: int  # global number of the first node's first accelerator
    # Component -> its lowest rank on the first node.
    first_rank: Mapping[str, int]
    # Component -> its segments; accelerators are numbered within the node, ranks from the
    # lowest one on it.
    local: Mapping[str, tuple[Segment, ...]]

    @property
    def label(self) -> str:
        if len(self.nodes) == 1:
            return f"node {self.nodes.start}"
        return f"nodes {self.nodes.start}-{self.nodes.stop - 1}"

    def bands(self) -> list[tuple[range, tuple[str, ...]]]:
        """Return (accelerators, components) for each run of neighbouring accelerators that the same components use.

        Accelerators are numbered within the node, from 0.
        """
        used: dict[str, Ranges] = {}
        for component, segments in self.local.items():
            used[component] = Ranges.of(segment.accelerators for segment in segments)
        # A band ends where any component begins or ends.
        edges = {0, self.accelerators}
        for numbers in used.values():
            for piece in numbers.pieces:
                edges |= {piece.start, piece.stop}
        bands = []
        for start, stop in itertools.pairwise(sorted(edges)):
            users = tuple(c for c, numbers in used.items() if start in numbers)
            bands.append((range(start, stop), users))
        return bands


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison of this placement with one in which every component has accelerators of its own.

    `savings`: accelerators in use in both. `here`, `apart`: stage -> accelerators at work, in this placement and in the
    other one. `here_bytes`, `apart_bytes`: bytes of the fullest accelerator at its worst moment, in this placement and
    in the other one.
    """

    savings: Savings
    here: Mapping[str, int]  # stage -> accelerators at work
    apart: Mapping[str, int]
    here_bytes: int  # of the fullest accelerator at its worst moment
    apart_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan, its memory ledger, and everything that is shown of them. Immutable.

    `name`: name of the config. `machines`: the machines in words. `ahead`: how far rollout may run ahead of learning,
    in words; "" if they take turns. `channels`: each channel with a text that says where its items are. `folds`: the
    nodes; equal neighbours are one entry. `counts`: numbers of a job on language models, with their reasons.
    `shortages`: problems of memory that does not suffice. `comparison`: numbers of a placement in which no accelerator
    is shared, beside those of this one; None if no component has accelerators.
    """

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
        """The number of moves in one iteration."""
        return sum(len(stage.releases) + len(stage.acquires) for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether the memory of everything fits. Memory that is not known counts as fitting."""
        return self.ledger.fits

    def __repr__(self) -> str:
        return f"<plan of {self.name}: {', '.join(spec.name for spec in self.components)} on {self.machines}>"

    def _repr_html_(self) -> str:
        """Return the picture of the plan as SVG, which a notebook displays."""
        from rlplace.placement.show.svg import render_svg

        return f'<div style="max-width: 72em">{render_svg(self)}</div>'


def view_plan(
    plan: Plan, case: MemoryCase, *, name: str = "", counts: tuple[Count, ...] = ()
) -> PlanView:
    """Return everything that is shown of a plan.

    `case`: the memory case of the same placement, needs and offload as the plan. `name`: name of the config. `counts`:
    the numbers of a job on language models, with their reasons.
    """
    placement = plan.placement
    ledger = case.ledger()
    ahead = ""
    if plan.needs.ahead:
        ahead = apart(plan.needs)
    transports = {}
    for transport, details in transports_of(plan).items():
        transports[transport.value] = details
    # Remedies are searched only where something does not fit: that takes a while.
    shortages: tuple[Problem, ...] = ()
    if not ledger.fits:
        shortages = find_shortages(case)
    return PlanView(
        name=name,
        plan=plan,
        case=case,
        machines=f"{plan.topology.describe()}, {_products(plan.topology)}",
        ahead=ahead,
        components=tuple(placement.spec(c) for c in placement.components),
        stages=tuple(_view_stage(plan, stage) for stage in plan.schedule.stages),
        transfers=transfers(plan),
        transports=transports,
        channels=tuple((channel, locate(channel)) for channel in plan.channels),
        folds=fold_nodes(placement),
        counts=counts,
        ledger=ledger,
        shortages=shortages,
        traffic=count_traffic(plan, ledger),
        comparison=_compare(plan, case, ledger),
    )


def _view_stage(plan: Plan, stage: str) -> StageView:
    """Return the residencies of one stage and the moves on entry to it."""
    schedule = plan.schedule
    held = schedule.residency[stage]
    waiting = set()
    for component, residency in held.items():
        needed = schedule.needs.of(stage, component)
        if plan.placement.residents.accelerators(component):
            needs_it = needed > Residency.OFF
        else:
            # Nothing to keep on accelerators: what the stage names works on its host.
            needs_it = bool(schedule.needs.active_stages(stage, component))
        if not needs_it and residency > Residency.OFF:
            waiting.add(component)
    entry = schedule.entries[stage]
    return StageView(
        name=stage,
        held=held,
        waiting=frozenset(waiting),
        releases=entry.releases,
        acquires=entry.acquires,
    )


def _compare(plan: Plan, case: MemoryCase, ledger: MemoryLedger) -> Comparison | None:
    """Return the comparison with a placement that shares no accelerators; None if no component has accelerators.

    `ledger`: the ledger of `case`.
    """
    dedicated = dedicate(plan.placement)
    if dedicated is None:
        return None
    alone = dataclasses.replace(case, placement=dedicated)
    return Comparison(
        savings=plan.savings,
        here=count_active(plan.placement, plan.schedule.needs),
        apart=count_active(dedicated, alone.schedule().needs),
        here_bytes=_fullest_bytes(ledger),
        apart_bytes=_fullest_bytes(alone.ledger()),
    )


def _fullest_bytes(ledger: MemoryLedger) -> int:
    """Return the bytes that the fullest accelerator holds at its worst moment."""
    worst = (account.worst.total_bytes for account in ledger.accelerators)
    return max(worst, default=0)


def _products(topology: Topology) -> str:
    """Return the models of the accelerators as text, such as `H100, 80 GiB each`; several are joined by " + "."""
    # A dict keeps the order of the nodes.
    words: dict[str, None] = {}
    for node in topology.nodes:
        for run in node.alike:
            product = run.product or node.kind
            if run.memory_bytes:
                product += f", {show_bytes(run.memory_bytes)} each"
            words[product] = None
    return " + ".join(words) or "no accelerators"


def locate(channel: ChannelPlan) -> str:
    """Return where the items of a channel are, as text.

    Examples are `node 0`, `nodes 0-1, 4 items each` and `8 processes, 2 items each`.
    """
    locations = channel.locations()
    processes = [h.process for h in locations if h.process]
    nodes = Ranges.of(range(h.node, h.node + 1) for h in locations if not h.process)
    places = []
    if len(processes) > 1:
        places.append(f"{len(processes)} processes")
    elif processes:
        places.append(f"process {processes[0]}")
    if nodes:
        places.append(f"{plural(len(nodes), 'node')} {clipped(str(nodes), 20)}")
    text = " and ".join(places)
    if len(locations) == 1:
        return text

    # Several locations: how many items each has room for.
    sizes = [h.capacity_items for h in locations]
    least = min(sizes)
    most = max(sizes)
    if least == most:
        return f"{text}, {least} items each"
    return f"{text}, {least} to {most} items each"


def show_move(move: Move) -> str:
    """Return a move as text, such as `actor full -> off`, with an arrow sign in place of `->`."""
    return f"{move.component} {move.before.word} \u2192 {move.after.word}"


def fold_nodes(placement: HybridComponentPlacement) -> tuple[NodeFold, ...]:
    """Return all nodes in order. Neighbouring nodes that are used in the same way are joined in one `NodeFold`.

    The time is linear in nodes x components, and in segments.
    """
    topology = placement.topology
    # What each component, or part of one, has on each node; a node never cuts a rank.
    held = defaultdict[tuple[str, int], list[Segment]](list)
    residents = placement.residents
    for component in placement.components:
        for segment in placement.spec(component).segments:
            name = residents.part_of(component, segment.ranks.start)
            for node, part in topology.parts(segment.accelerators):
                held[name, node.rank].append(segment.cut_to(part))

    folds: list[NodeFold] = []
    for node in topology.nodes:
        # Numbers within the node: nodes with the same components are then equal.
        first_rank = {}
        local = {}
        for component in residents.components:
            segments = held[component, node.rank]
            first = min((s.ranks.start for s in segments), default=0)
            first_rank[component] = first
            moved = tuple(s.moved(-node.first, -first) for s in segments)
            local[component] = moved
        last = folds[-1] if folds else None
        if last and (last.accelerators, last.local) == (node.accelerators, local):
            nodes = range(last.nodes.start, node.rank + 1)
            folds[-1] = dataclasses.replace(last, nodes=nodes)
        else:
            nodes = range(node.rank, node.rank + 1)
            fold = NodeFold(nodes, node.accelerators, node.first, first_rank, local)
            folds.append(fold)
    return tuple(folds)


# ── Plain values in a fixed order: the same plan gives the same dict ─────────────────

_ROUTE = ("source", "target", "rows", "shares")


def render_json(view: PlanView) -> dict[str, Any]:
    """Return the plan as plain values for JSON. Equal plans give equal dicts, with their keys in the same order.

    The time is linear in ranks and shares.
    """
    plan = view.plan
    placement = plan.placement
    topology = plan.topology
    nodes = []
    for node in topology.nodes:
        nodes.append(
            _fields(node, "rank", "accelerators", "first", "kind", "memory_bytes")
        )
    # The key `ahead` is there only where rollout runs ahead of learning.
    schedule: dict[str, Any] = {"stages": list(plan.schedule.stages)}
    if plan.needs.ahead:
        # Versions, of rollout before learn
        schedule["ahead"] = plan.needs.ahead
    schedule |= _fields(plan.schedule, "active", "residency", "first", "entries")
    components = {c.name: _component_record(view, c) for c in view.components}
    # The order of these keys is part of the format: equal plans give equal files.
    return {
        "config": view.name,
        "fits": view.fits,
        "mode": placement.mode,
        "topology": {"accelerators": topology.num_accelerators, "nodes": nodes},
        "components": components,
        "pairs": _pairs_record(placement),
        "schedule": schedule,
        "routes": _routes(plan),
        "channels": [_channel_record(channel) for channel in plan.channels],
        "warnings": _problems(plan.warnings),
        "savings": _savings_record(view.comparison),
        "counts": _plain(view.counts),
        "traffic": _plain(view.traffic),
        "memory": ledger_record(view.ledger),
        "shortages": _problems(view.shortages),
    }


def _component_record(view: PlanView, spec: ComponentSpec) -> dict[str, Any]:
    """Return the placement of a component, and the place of each of its ranks, as plain values for JSON."""
    ranks = []
    for slot in view.plan.placement.slots(spec.name):
        ranks.append(_fields(slot, "rank", "node", "local_rank", "accelerators"))
    record: dict[str, Any] = {"placement": spec.render()}
    if spec.lent_ranks:
        record["lent"] = {
            "accelerators": str(spec.lent_accelerators),
            "ranks": spec.lent_ranks,
            "lenders": list(spec.lenders),
        }
    return record | {
        "world_size": spec.world_size,
        "accelerators": str(spec.accelerators),
        "ranks": ranks,
    }


def _pairs_record(placement: HybridComponentPlacement) -> list[dict[str, str]]:
    """Return the relation and the common accelerators of each pair of components, as plain values for JSON."""
    pairs = []
    for a, b in itertools.combinations(placement.components, 2):
        relation = placement.relation(a, b)
        shared = str(placement.shared(a, b))
        pairs.append({"a": a, "b": b, "relation": relation, "shared": shared})
    return pairs


def _channel_record(channel: ChannelPlan) -> dict[str, Any]:
    """Return capacity, keys and locations of a channel as plain values for JSON."""
    locations = []
    for location in channel.locations():
        record = _fields(location, "node", "keys", "capacity_items")
        record["process"] = location.process or None
        locations.append(record)
    record = _fields(channel, "name", "source", "target", "keys", "capacity_items")
    record["locations"] = locations
    return record


def _savings_record(comparison: Comparison | None) -> dict[str, Any] | None:
    """Return `comparison` as plain values for JSON; None if `comparison` is None."""
    if comparison is None:
        return None
    record = _fields(comparison.savings, "used", "dedicated", "saved", "by_component")
    return record | {
        "at_work": _plain(comparison.here),
        "dedicated_at_work": _plain(comparison.apart),
        "fullest_bytes": comparison.here_bytes,
        "dedicated_fullest_bytes": comparison.apart_bytes,
    }


def _plain(value: object) -> Any:
    """Return a value in plain types for JSON.

    Dataclasses and mappings become dicts, tuples become lists, and a residency becomes its name.
    """
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
    """Return attribute name -> value in plain types for JSON, for the attributes `names` of `value`, in this order."""
    return {name: _plain(getattr(value, name)) for name in names}


def _routes(plan: Plan) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the routes of a plan, and deliveries of weights if it has some, as plain values for JSON.

    Without deliveries, the result is the list of routes. With deliveries, it is a dict: name -> route, and a name that
    begins with "weights" -> the deliveries between two components.
    """
    if not plan.deliveries:
        return [_fields(route, *_ROUTE) for route in plan.routes]
    routes = {route.name: _fields(route, *_ROUTE) for route in plan.routes}
    pairs = dict.fromkeys((each.source, each.target) for each in plan.deliveries)
    for source, target in pairs:
        name = "weights" if len(pairs) == 1 else f"weights.{source}.{target}"
        copies = _copies(plan, source, target)
        routes[name] = {"source": source, "target": target, "copies": copies}
    return routes


def _copies(plan: Plan, source: str, target: str) -> list[dict[str, Any]]:
    """Return the deliveries of weights from component `source` to component `target` as plain values for JSON."""
    copies = []
    for delivery in plan.deliveries:
        if (delivery.source, delivery.target) != (source, target):
            continue
        names = ["readers", "near"]
        if isinstance(delivery, DeviceDelivery):
            names = ["readers", "owners"]
            if delivery.parts:
                names.append("parts")
        copies.append(_fields(delivery, *names))
    return copies


def _problems(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Return problems or warnings as plain values for JSON, without the file and line of their config keys."""
    names = ("code", "key", "what", "why", "fix")
    return [_fields(problem, *names) for problem in problems]
