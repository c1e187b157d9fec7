"""Answers about a plan: place and residency of a component, users of an accelerator, the way between two ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlplace.placement.flow import Delivery, DeviceDelivery, transport_between
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.lend import lent_part
from rlplace.placement.language.slots import Slot, owner_of
from rlplace.placement.language.spec import ComponentSpec
from rlplace.placement.machines.topology import Ranges, show_range
from rlplace.placement.memory.demands import Part
from rlplace.placement.memory.ledger import Load, MemoryLedger
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency
from rlplace.placement.show.text import EMULATED
from rlplace.placement.show.view import PlanView
from rlplace.placement.transfers import (
    details_of,
    emulated,
    least_move_seconds,
    transfers,
    weight_transfers,
)
from rlplace.tables import chapter, table
from rlplace.units import clipped, counted, plural, show_bytes, verb

_MOST_RANKS = 8  # that are written one by one
_LONGEST_TEXT = 60  # of the placement as it was written

Rank = tuple[str, int]  # component and number


def explain_component(view: PlanView, component: str) -> str:
    """Return a text about one component: place, residencies, memory, and the components with which it exchanges data.

    The residency in each stage is shown with its reason.
    """
    spec = view.plan.placement.spec(component)
    title = f"{component}: {counted(spec.world_size, 'rank')}, {spec.render()}"
    if spec.text and spec.text != spec.render():
        title += f", written {clipped(spec.text, _LONGEST_TEXT)!r}"
    parts = [title, chapter("where", _where(view.plan.placement, spec))]

    counts = []
    for count in view.counts:
        if component in count.subject.split(" : "):
            counts.append((count.count, count.why))
    if counts:
        parts.append(chapter("how many", table(counts)))

    for part in view.plan.schedule.parts_of(component):
        stages = [("stage", "holds", "because"), *_when(view, part)]
        when = "when"
        if part != component:
            when = f"when, of the {counted(spec.lent_ranks, 'rank')} on {spec.lent_accelerators}"
        parts.append(chapter(when, table(stages)))

    talks = ["no other component"]
    partners = list(_partners(view, component))
    if partners:
        talks = table(partners)
    parts.append(chapter("talks to", talks))

    weighs = _weighs(view.ledger, component)
    parts.append(chapter("memory of a rank on each of its accelerators", weighs))
    seconds = list(_takes(view, component))
    if seconds:
        title = "takes at least, at the rates that cluster.nodes declares"
        parts.append(chapter(title, table(seconds)))
    return "\n\n".join(parts)


def _partners(view: PlanView, component: str) -> Iterator[tuple[str, ...]]:
    """Yield a table row (texts) for each transfer that the component sends or receives."""
    for transfer in view.transfers:
        size = (transfer.amount, transfer.by_transport)
        if transfer.source == component:
            yield f"sends {transfer.name}", f"to {transfer.target}", *size
        if transfer.target == component:
            yield f"gets {transfer.name}", f"from {transfer.source}", *size


def explain_accelerator(view: PlanView, number: int) -> str:
    """Return a text about one accelerator: the ranks on it, and what each component holds on it in each stage.

    `number`: the number of the accelerator in the cluster; the accelerator must exist.
    """
    node = view.plan.topology.node_of(number)
    kind = node.product or node.kind
    if node.memory_bytes:
        kind += f", {show_bytes(node.memory_bytes)}"
    local = number - node.first
    title = f"accelerator {number}: number {local} of node {node.rank} ({kind})"
    residents = _residents(view.plan.placement, number)
    if not residents:
        return f"{title}\n\nno component uses it"

    # A row for each stage; the moments on entry are in the ledger only.
    account = view.ledger.account(number)
    rows = [("", *residents, "sum", "free")]
    for load in account.loads:
        if load.moment.entering:
            continue
        free = "?"
        if account.capacity_bytes:
            free = show_bytes(account.room_bytes - load.total_bytes)
        cells = [_held(view, load, component, number) for component in residents]
        rows.append((load.moment.stage, *cells, show_bytes(load.total_bytes), free))
    used_by = chapter("used by", table(list(residents.items())))
    return "\n\n".join([title, used_by, chapter("what each holds", table(rows))])


def _residents(placement: HybridComponentPlacement, number: int) -> dict[str, str]:
    """Return, for each component on an accelerator, component -> its ranks there as text, such as `ranks 0, 1`.

    `number`: the number of the accelerator in the cluster.
    """
    residents: dict[str, str] = {}
    for component in placement.components:
        slots = placement.slots(component)
        ranks = [slot.rank for slot in slots if number in slot.accelerators]
        if not ranks:
            continue
        shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
        if len(ranks) > _MOST_RANKS:
            shown += f" and {len(ranks) - _MOST_RANKS} more"
        residents[component] = f"{plural(len(ranks), 'rank')} {shown}"
    return residents


def _held(view: PlanView, load: Load, component: str, number: int) -> str:
    """Return residency and bytes of a component at the moment of `load`, as text such as `full, 2 GiB`.

    `number`: the number of the accelerator.
    """
    part = component
    if number in view.plan.placement.spec(component).lent_accelerators:
        part = lent_part(component)
    residency = view.plan.schedule.residency[load.moment.stage][part]
    return f"{residency.word}, {show_bytes(load.of(component))}"


def _where(placement: HybridComponentPlacement, spec: ComponentSpec) -> list[str]:
    """Return lines about where a component is: accelerators, components that share them, and copies of its model."""
    if not spec.accelerators:
        return [f"on {spec.pool.noun}s: it holds no accelerators"]
    lines: list[str] = []

    # How many accelerators a rank has; segments of the same size are one line.
    sizes = {(s.ranks_per_accelerator, s.accelerators_per_rank) for s in spec.segments}
    for ranks, each in sorted(sizes):
        if ranks > 1:
            lines.append(f"{ranks} ranks share an accelerator")
        else:
            accelerators = counted(each, "accelerator")
            lines.append(f"each rank has {accelerators} of one node")

    tensor = spec.parallel.tensor_parallel_size
    context = spec.parallel.context_parallel_size
    if tensor > 1:
        lines.append(f"{spec.num_copies} copies of the model, each over {tensor}")
    if context > 1:
        lines.append(
            f"{context} copies have the tokens of the same samples between them"
        )

    if spec.lent_ranks:
        borrowing = counted(spec.lent_ranks, "rank")
        lenders = " and ".join(spec.lenders)
        lines.append(f"{borrowing} on {spec.lent_accelerators}, lent by {lenders}")
    sharers = placement.sharers(spec.name)
    for other in sharers:
        shared = placement.shared(spec.name, other)
        relation = placement.relation(spec.name, other)
        lines.append(f"shares {shared} with {other} ({relation})")
    if not sharers:
        lines.append("shares nothing: no other component uses its accelerators")
    if spec.process:
        partners = " and ".join(c for c in spec.process.split("+") if c != spec.name)
        lines.append(
            f"each rank is in one process with that of {partners} (process: shared)"
        )
    return lines


def _when(view: PlanView, component: str) -> Iterator[tuple[str, str, str]]:
    """Yield (stage, residency, reason) of a component for each stage, as texts."""
    schedule = view.plan.schedule
    for stage in schedule.stages:
        held = schedule.residency[stage][component]
        yield stage, held.word, _because(view, component, stage)


def _because(view: PlanView, component: str, stage: str) -> str:
    """Return, in words, why a component has its residency in a stage."""
    plan = view.plan
    held = plan.schedule.residency[stage][component]
    need = plan.schedule.needs.of(stage, component)
    sharers = plan.placement.residents.sharers(component)

    # The component holds exactly what the stage needs.
    if held == need == Residency.WEIGHTS:
        return f"{stage} needs its weights"
    if held == need == Residency.FULL:
        return f"it works in {stage}"
    if held is Residency.OFF:
        needs = plan.schedule.needs
        busy = [c for c in sharers if needs.of(stage, c) > Residency.OFF]
        if not busy:
            return "not needed"
        use = verb(len(busy), "use")
        return f"not needed; {', '.join(busy)} {use} its accelerators"

    # It holds more than the stage needs.
    asked = f"{stage} needs only its weights"
    if need is Residency.OFF:
        asked = "not needed"
    if not plan.placement.accelerators(component):
        return f"{asked}; it stays, on no accelerator"
    if not sharers:
        return f"{asked}; it stays, its accelerators are its own"
    if not view.case.offload.get(component, False):
        return f"{asked}; it stays, enable_offload is not set"
    return f"{asked}; it stays, no other component needs the room"


def _takes(view: PlanView, component: str) -> Iterator[tuple[str, str, str]]:
    """Yield (what, least seconds, details), as texts, for each move and for the weight sync of a component.

    A component that gets no weights has no row for the sync.
    """
    for stage, seconds in least_move_seconds(view.plan, view.ledger, component):
        least = f"{seconds:.2g} s"
        yield f"enter {stage}", least, "copies between accelerators and hosts"
    syncs = weight_transfers(view.plan)
    if not any(component in (sync.source, sync.target) for sync in syncs):
        return
    for transport, size in view.traffic.weights_bytes.items():
        if transport.value in view.traffic.least_s:
            least = f"{view.traffic.least_s[transport.value]:.2g} s"
            yield "sync", least, f"{show_bytes(size)} of weights, {transport.value}"


def _weighs(ledger: MemoryLedger, component: str) -> list[str]:
    """Return the lines of a table of a component's memory.

    For each residency, the table has the bytes on an accelerator and on the host; for each stage, the bytes that its
    work takes.
    """
    rows = []
    known = 0
    for level in Residency:
        size = ledger.bytes(component, level)
        host = ledger.host_bytes(component, level)
        known += size + host
        rows.append((level.word, show_bytes(size), f"host {show_bytes(host)}"))
    if not known:
        return ["not known", *_memory_notes(ledger, component)]

    # Working memory comes on top of what a component holds in full.
    working: dict[str, Mapping[Part, int]] = {}
    for footprint in ledger.footprints[component]:
        working |= footprint.working
    for stage, parts in working.items():
        names = ", ".join(part.value for part in parts)
        extra = show_bytes(sum(parts.values()))
        rows.append((f"working in {stage}", f"+ {extra}", names))
    lines = table(rows)
    if component in ledger.caveats:
        lines.append(ledger.caveats[component])
    return lines


def _memory_notes(ledger: MemoryLedger, component: str) -> list[str]:
    """Return the notes of the ledger that begin with the name of a component."""
    return [note for note in ledger.notes if note.startswith(f"{component}: ")]


def explain_pair(plan: Plan, one: Rank, other: Rank) -> str:
    """Return a text about two ranks: their places, the transport between them, and what each rank sends to the other.

    Both ranks must exist.
    """
    placement = plan.placement
    slots = [placement.slots(component)[rank] for component, rank in (one, other)]
    transport = transport_between(
        placement.locations(one[0]),
        one[1],
        placement.locations(other[0]),
        other[1],
    )

    # Tensors on emulated accelerators are in host memory, whatever the transport.
    details = details_of(transport, plan)
    tensors = f"tensors on accelerators go by {details.tensors}"
    if emulated(plan.topology):
        tensors = EMULATED
    why = [f"they are {details.because}: items go by {details.items}", tensors]

    passing = [*_passing(plan, one, other), *_passing(plan, other, one)]
    passes = ["nothing: no route joins these two"]
    if passing:
        passes = table(passing)
    return "\n\n".join(
        [
            f"{slots[0].owner} and {slots[1].owner}: {transport.value}",
            chapter("where", table([_place(slot) for slot in slots])),
            chapter("why", why),
            chapter("what passes", passes),
        ]
    )


def _place(slot: Slot) -> tuple[str, str, str]:
    """Return (name of the rank, node with accelerators, process) of a slot, as texts."""
    held = "no accelerator"
    if slot.accelerators:
        numbers = Ranges.of(range(a, a + 1) for a in slot.accelerators)
        held = f"{plural(len(numbers), 'accelerator')} {numbers}"
    process = "a process of its own"
    if slot.process:
        process = f"process {slot.process}"
    return slot.owner, f"node {slot.node}, {held}", process


def _passing(plan: Plan, source: Rank, target: Rank) -> Iterator[tuple[str, str, str]]:
    """Yield (name, ends, content), as texts, for each transfer from rank `source` to rank `target`."""
    between = f"{source[0]} rank {source[1]} -> {target[0]} rank {target[1]}"
    for transfer in transfers(plan):
        if (transfer.source, transfer.target) != (source[0], target[0]):
            continue
        weights = transfer.name == "weights"
        if transfer.route is None:
            content = transfer.amount
            if weights:
                content = _delivered(plan, source, target)
            yield transfer.name, between, content
            continue
        for share in transfer.route.shares:
            if (share.source, share.target) != (source[1], target[1]):
                continue
            rows = show_range(range(share.start, share.stop))
            content = f"rows {rows} of {transfer.route.rows}"
            if weights:
                content = "its copy"
            yield transfer.name, between, content


def _delivered(plan: Plan, source: Rank, target: Rank) -> str:
    """Return, in words, the way of weights from rank `source` to rank `target`."""
    writer = source[1]
    reader = target[1]
    delivery = _delivery(plan, source[0], target)
    if isinstance(delivery, DeviceDelivery):
        # Between devices; None among the owners stands for a broadcast.
        owners = delivery.owners_of(reader)
        if writer in owners:
            return "all parts, shared on the accelerator"
        ways = ["its part"]
        for owner in owners:
            if owner is not None:
                ways.append(f"by way of {source[0]} rank {owner}")
        if None in owners:
            ways.append("broadcast to all")
        return ", ".join(ways)

    # Through the copy in the host memory of the reader's node.
    node = plan.placement.locations(target[0]).node[reader]
    if writer in delivery.near:
        return f"its part, written into the copy of node {node}"
    if reader == delivery.lead:
        return f"its part, sent to be written into the copy of node {node}"
    lead = owner_of(target[0], delivery.lead)
    return f"its part, sent to {lead} for the copy of node {node}"


def _delivery(plan: Plan, source: str, target: Rank) -> Delivery:
    for delivery in plan.deliveries:
        ends = (delivery.source, delivery.target)
        if ends == (source, target[0]) and target[1] in delivery.readers:
            return delivery
    raise AssertionError(f"{owner_of(*target)} gets no weights")
