"""The answer to "how do these two ranks reach each other, and why so?"."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.placement.flow import DeviceDelivery, Transport, transport_between
from rlplace.placement.language.slots import Slot
from rlplace.placement.machines.ranges import Ranges, show_range
from rlplace.placement.show.columns import indented, table
from rlplace.placement.transfers import AnyPlan, details_of, emulated, transfers

Rank = tuple[str, int]  # of a component


def explain_pair(plan: AnyPlan, one: Rank, other: Rank) -> str:
    """Where both are, the transport between them and its reason, what passes. Both must exist."""
    placement = plan.placement
    ends = [placement.slots(component)[rank] for component, rank in (one, other)]
    transport = transport_between(placement.homes(one[0]), one[1], placement.homes(other[0]), other[1])
    passing = [*_passing(plan, one, other), *_passing(plan, other, one)]
    chapters = {
        "where": table([(_name(slot.component, slot.rank), _place(slot), _process(slot)) for slot in ends]),
        "why": _because(transport, plan),
        "what passes": table(passing) if passing else ["nothing: no route joins these two"],
    }
    title = f"{_name(*one)} and {_name(*other)}: {transport.value}"
    return "\n\n".join([title, *("\n".join([head, *indented(lines)]) for head, lines in chapters.items())])


def _name(component: str, rank: int) -> str:
    return f"{component} rank {rank}"


def _place(slot: Slot) -> str:
    many = len(slot.accelerators) > 1
    held = f"accelerator{'s' * many} {Ranges.of(range(a, a + 1) for a in slot.accelerators)}"
    return f"node {slot.node}, {held if slot.accelerators else 'no accelerator'}"


def _process(slot: Slot) -> str:
    return f"process {slot.process}" if slot.process else "a process of its own"


def _because(transport: Transport, plan: AnyPlan) -> list[str]:
    found = details_of(transport, plan)
    lines = [f"they are {found.because}: items go by {found.items}"]
    if emulated(plan.topology):
        return [*lines, "tensors on emulated accelerators are in host memory and go as items do"]
    return [*lines, f"tensors on accelerators go by {found.tensors}"]


def _passing(plan: AnyPlan, source: Rank, target: Rank) -> Iterator[tuple[str, str, str]]:
    between = f"{_name(*source)} -> {_name(*target)}"
    for transfer in transfers(plan):
        if (transfer.source, transfer.target) != (source[0], target[0]):
            continue
        if transfer.route is None:
            weights = transfer.name == "weights"
            yield transfer.name, between, _delivered(plan, source[1], target[1]) if weights else transfer.amount
            continue
        for share in transfer.route.shares:
            if (share.source, share.target) == (source[1], target[1]):
                rows = f"rows {show_range(range(share.start, share.stop))} of {transfer.route.rows}"
                yield transfer.name, between, "its copy" if transfer.name == "weights" else rows


def _delivered(plan: AnyPlan, writer: int, reader: int) -> str:
    """How the part of the weights that one actor rank holds comes to one rollout rank."""
    delivery = next(d for d in plan.deliveries if reader in d.readers)
    if isinstance(delivery, DeviceDelivery):
        host = delivery.host(reader)
        if host is None:
            return "its part, broadcast to all"
        return "all parts, lent on the accelerator" if host == writer else f"its part, lent on by actor rank {host}"
    node = plan.placement.homes("rollout").node[reader]
    if writer in delivery.near:
        return f"its part, written into the copy of node {node}"
    if reader == delivery.lead:
        return f"its part, sent to be written into the copy of node {node}"
    return f"its part, sent to rollout rank {delivery.lead} for the copy of node {node}"
