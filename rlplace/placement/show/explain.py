"""Answers about a plan: why a component is where it is and when, what uses an accelerator, how two ranks connect."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.placement.flow import DeviceDelivery, transport_between
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import ComponentSpec
from rlplace.placement.machines.topology import Ranges, show_range
from rlplace.placement.memory.ledger import MemoryLedger
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency
from rlplace.placement.show.text import EMULATED
from rlplace.placement.show.view import PlanView
from rlplace.placement.transfers import (
    details_of,
    emulated,
    least_move_seconds,
    transfers,
)
from rlplace.tables import chapter, table
from rlplace.units import clipped, counted, plural, show_bytes, verb

Rank = tuple[str, int]  # of a component


def explain_component(view: PlanView, component: str) -> str:
    """Write where it is and why, what it holds when and why, its partners, and its memory."""
    spec = view.plan.placement.spec(component)
    ranks = spec.world_size
    written = (
        f", written {clipped(spec.text, 60)!r}"
        if spec.text and spec.text != spec.render()
        else ""
    )
    counts = [
        (count.count, count.why)
        for count in view.counts
        if component in count.subject.split(" : ")
    ]
    talks = [
        (f"{verb} {t.name}", f"{side} {partner}", t.amount, t.by_transport)
        for t in view.transfers
        for one, verb, side, partner in (
            (t.source, "sends", "to", t.target),
            (t.target, "gets", "from", t.source),
        )
        if one == component
    ]
    parts = [
        f"{component}: {counted(ranks, 'rank')}, {spec.render()}{written}",
        chapter("where", _where(view.plan.placement, spec)),
        *([chapter("how many", table(counts))] if counts else []),
        chapter(
            "when", table([("stage", "holds", "because"), *_when(view, component)])
        ),
        chapter("talks to", table(talks) if talks else ["no other component"]),
        chapter(
            "memory of a rank on each of its accelerators",
            _weighs(view.ledger, component),
        ),
    ]
    if seconds := list(_takes(view, component)):
        parts.append(
            chapter(
                "takes at least, at the rates that cluster.nodes declares",
                table(seconds),
            )
        )
    return "\n\n".join(parts)


def explain_accelerator(view: PlanView, number: int) -> str:
    """Write which ranks are on it, what each holds in each stage, and how full that makes it."""
    topology = view.plan.topology
    placement = view.plan.placement
    node = topology.node_of(number)
    size = f", {show_bytes(node.memory_bytes)}" if node.memory_bytes else ""
    kind = node.product or node.kind
    title = f"accelerator {number}: number {number - node.first} of node {node.rank} ({kind}{size})"
    residents: dict[str, str] = {}
    for component in placement.components:
        ranks = [
            slot.rank
            for slot in placement.slots(component)
            if number in slot.accelerators
        ]
        if ranks:
            more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
            residents[component] = (
                f"{plural(len(ranks), 'rank')} " + ", ".join(map(str, ranks[:8])) + more
            )
    if not residents:
        return f"{title}\n\nno component uses it"
    account = view.ledger.account(number)
    rows = [("", *residents, "sum", "free")]
    for load in (load for load in account.loads if not load.moment.entering):
        held = view.plan.schedule.residency[load.moment.stage]
        free = (
            show_bytes(account.room_bytes - load.total_bytes)
            if account.capacity_bytes
            else "?"
        )
        cells = (f"{held[c].word}, {show_bytes(load.of(c))}" for c in residents)
        rows.append((load.moment.stage, *cells, show_bytes(load.total_bytes), free))
    used_by = chapter("used by", table(list(residents.items())))
    return "\n\n".join([title, used_by, chapter("what each holds", table(rows))])


def _where(placement: HybridComponentPlacement, spec: ComponentSpec) -> list[str]:
    if not spec.accelerators:
        return [f"on {spec.pool.noun}s: it holds no accelerators"]
    lines: list[str] = []
    for ranks, each in sorted(
        {(s.ranks_per_accelerator, s.accelerators_per_rank) for s in spec.segments}
    ):
        one = f"each rank has {counted(each, 'accelerator')} of one node"
        lines.append(f"{ranks} ranks share an accelerator" if ranks > 1 else one)
    if spec.parallel.tensor_parallel_size > 1:
        lines.append(
            f"{spec.num_copies} copies of the model, each over {spec.parallel.tensor_parallel_size}"
        )
    if spec.parallel.context_parallel_size > 1:
        lines.append(
            f"{spec.parallel.context_parallel_size} copies have the tokens of the same samples between them"
        )
    sharers = placement.sharers(spec.name)
    lines += [
        f"shares {placement.shared(spec.name, c)} with {c} ({placement.relation(spec.name, c)})"
        for c in sharers
    ]
    if not sharers:
        lines.append("shares nothing: no other component uses its accelerators")
    if spec.process:
        partners = " and ".join(c for c in spec.process.split("+") if c != spec.name)
        lines.append(
            f"each rank is in one process with that of {partners} (process: shared)"
        )
    return lines


def _when(view: PlanView, component: str) -> Iterator[tuple[str, str, str]]:
    plan = view.plan
    sharers = plan.placement.sharers(component)
    for stage in plan.schedule.stages:
        held = plan.schedule.residency[stage][component]
        need = plan.schedule.needs.of(stage, component)
        busy = [c for c in sharers if plan.schedule.needs.of(stage, c) > Residency.OFF]
        asked = (
            "not needed" if need is Residency.OFF else f"{stage} needs only its weights"
        )
        if held == need > Residency.OFF:
            because = (
                f"{stage} needs its weights"
                if need is Residency.WEIGHTS
                else f"it works in {stage}"
            )
        elif held is Residency.OFF:
            because = "not needed"
            if busy:
                use = verb(len(busy), "use")
                because += f"; {', '.join(busy)} {use} its accelerators"
        elif not plan.placement.accelerators(component):
            because = f"{asked}; it stays, on no accelerator"
        elif not sharers:
            because = f"{asked}; it stays, its accelerators are its own"
        elif not view.case.offload.get(component, False):
            because = f"{asked}; it stays, enable_offload is not set"
        else:
            because = f"{asked}; it stays, no other component needs the room"
        yield stage, held.word, because


def _takes(view: PlanView, component: str) -> Iterator[tuple[str, str, str]]:
    """What moves of it and, of those between which weights are synced, one sync cost."""
    for stage, seconds in least_move_seconds(view.plan, view.ledger, component):
        yield (
            f"enter {stage}",
            f"{seconds:.2g} s",
            "copies between accelerators and hosts",
        )
    if component in ("actor", "rollout"):
        for transport, size in view.traffic.weights_bytes.items():
            if transport.value in view.traffic.least_s:
                least = f"{view.traffic.least_s[transport.value]:.2g} s"
                yield "sync", least, f"{show_bytes(size)} of weights, {transport.value}"


def _weighs(ledger: MemoryLedger, component: str) -> list[str]:
    sizes = {
        level: (ledger.bytes(component, level), ledger.host_bytes(component, level))
        for level in Residency
    }
    if not any(size for pair in sizes.values() for size in pair):
        return ["not known"]
    rows = [
        (level.word, show_bytes(size), f"host {show_bytes(host)}")
        for level, (size, host) in sizes.items()
    ]
    working = {
        stage: parts
        for f in ledger.footprints[component]
        for stage, parts in f.working.items()
    }
    rows += [
        (
            f"working in {stage}",
            f"+ {show_bytes(sum(parts.values()))}",
            ", ".join(p.value for p in parts),
        )
        for stage, parts in working.items()
    ]
    return table(rows)


def explain_pair(plan: Plan, one: Rank, other: Rank) -> str:
    """Write where two ranks are, the transport between them, its reason, and what passes. Both must exist."""
    placement = plan.placement
    places = []
    for slot in (placement.slots(component)[rank] for component, rank in (one, other)):
        numbers = Ranges.of(range(a, a + 1) for a in slot.accelerators)
        held = (
            f"{plural(len(numbers), 'accelerator')} {numbers}"
            if numbers
            else "no accelerator"
        )
        process = f"process {slot.process}" if slot.process else "a process of its own"
        places.append((slot.owner, f"node {slot.node}, {held}", process))
    transport = transport_between(
        placement.locations(one[0]), one[1], placement.locations(other[0]), other[1]
    )
    details = details_of(transport, plan)
    tensors = (
        EMULATED
        if emulated(plan.topology)
        else f"tensors on accelerators go by {details.tensors}"
    )
    passing = [*_passing(plan, one, other), *_passing(plan, other, one)]
    parts = [
        f"{places[0][0]} and {places[1][0]}: {transport.value}",
        chapter("where", table(places)),
        chapter(
            "why", [f"they are {details.because}: items go by {details.items}", tensors]
        ),
        chapter(
            "what passes",
            table(passing) if passing else ["nothing: no route joins these two"],
        ),
    ]
    return "\n\n".join(parts)


def _passing(plan: Plan, source: Rank, target: Rank) -> Iterator[tuple[str, str, str]]:
    between = f"{source[0]} rank {source[1]} -> {target[0]} rank {target[1]}"
    for transfer in transfers(plan):
        if (transfer.source, transfer.target) != (source[0], target[0]):
            continue
        weights = transfer.name == "weights"
        if transfer.route is None:
            yield (
                transfer.name,
                between,
                _delivered(plan, source[1], target[1]) if weights else transfer.amount,
            )
            continue
        for share in transfer.route.shares:
            if (share.source, share.target) == (source[1], target[1]):
                rows = f"rows {show_range(range(share.start, share.stop))} of {transfer.route.rows}"
                yield transfer.name, between, "its copy" if weights else rows


def _delivered(plan: Plan, writer: int, reader: int) -> str:
    """Write how the part of the weights that one actor rank holds comes to one rollout rank."""
    delivery = next(d for d in plan.deliveries if reader in d.readers)
    if isinstance(delivery, DeviceDelivery):
        owners = [delivery.owner(taker) for taker in delivery.takers_of(reader)]
        if writer in owners:
            return "all parts, shared on the accelerator"
        ways = [
            f"by way of actor rank {owner}" for owner in owners if owner is not None
        ]
        return ", ".join(["its part", *ways, *["broadcast to all"][: None in owners]])
    node = plan.placement.locations("rollout").node[reader]
    if writer in delivery.near:
        return f"its part, written into the copy of node {node}"
    if reader == delivery.lead:
        return f"its part, sent to be written into the copy of node {node}"
    return f"its part, sent to rollout rank {delivery.lead} for the copy of node {node}"
