"""Transfers between components in one iteration: by which transport, and how many bytes where that is known."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from rlplace.placement.channels import ChannelPlan
from rlplace.placement.flow import Delivery, DeviceDelivery, Route, Routes, Transport
from rlplace.placement.language.lend import whole_component
from rlplace.placement.language.spec import role_of
from rlplace.placement.machines.topology import Ranges, Topology, show_range
from rlplace.placement.memory.demands import Part
from rlplace.placement.memory.ledger import MemoryLedger
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency
from rlplace.units import counted


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Data that one component sends to another: its name, its amount, and the transports that carry it.

    `amount`: in words, such as "32 rows x 2 stage groups". `transports`: transport -> number of pairs of ranks between
    which it carries the data. `route`: which rank sends to which; None: any source rank may send to any target rank.
    """

    name: str
    source: str
    target: str
    amount: str  # "32 rows x 2 stage groups"
    transports: Mapping[Transport, int]  # transport -> pairs of ranks, nearest first
    route: Route | None = None  # None: any source rank may send to any target rank

    @property
    def by_transport(self) -> str:
        """The number of pairs of ranks for each transport, as text, such as `same_node: 4, network: 2`."""
        return ", ".join(
            f"{transport.value}: {count}"
            for transport, count in self.transports.items()
        )


def transfers(plan: Plan) -> tuple[Transfer, ...]:
    """Return what components send to each other in an iteration, in order of time. Weights come last."""
    if plan.routes:
        found = [_along(plan, route) for route in plan.routes]
    else:
        found = [
            _channelled(plan, channel)
            for channel in plan.channels
            if _amount(channel) and not _sends_weights(plan, channel)
        ]
    pairs = dict.fromkeys((each.source, each.target) for each in plan.deliveries)
    found += [_delivered(plan, source, target) for source, target in pairs]
    return tuple(found)


def _along(plan: Plan, route: Route) -> Transfer:
    amounts = {"samples": f"{route.rows} samples", "weights": _copies(route.rows)}
    amount = amounts.get(route.name, f"{route.rows} rows")
    if route.name == "observations":
        amount += f" x {counted(plan.stage_groups, 'stage group')}"
    transports = route.transports()
    return Transfer(
        name=route.name,
        source=route.source,
        target=route.target,
        amount=amount,
        transports=transports,
        route=route,
    )


# Channel name of a text task -> the amount that it carries.
_TEXT = {
    "requests": "prompts so far, to any rank with room",
    "completions": "answers, as each is finished",
    "samples": "whole groups",
    "scores": "by sample",
    "returns": "by group",
    "weights.reference": "a copy for each rank, in iterations that refresh it",
}


def _sends_weights(plan: Plan, channel: ChannelPlan) -> bool:
    """Return whether a channel only announces weights, which a delivery sends.

    The delivery is shown as a transfer, so the channel is not shown.
    """
    return any(
        channel.name == f"weights.{delivery.source}.{delivery.target}"
        for delivery in plan.deliveries
    )


def _amount(channel: ChannelPlan) -> str:
    """Return, in words, how much data a channel carries; "" for a channel that is not shown as a transfer."""
    if channel.declared:
        return "items, as workers put them"
    return _TEXT.get(channel.name, _TEXT.get(role_of(channel.name), ""))


def _channelled(plan: Plan, channel: ChannelPlan) -> Transfer:
    nodes = [
        Counter(plan.placement.locations(c).node)
        for c in (channel.source, channel.target)
    ]
    rank_0 = channel.target in ("actor", "critic") and not channel.declared
    if rank_0:
        nodes[1] = Counter(channel.targets.node)
    near = sum(ranks * nodes[1][node] for node, ranks in nodes[0].items())
    far = nodes[0].total() * nodes[1].total() - near
    return Transfer(
        name=channel.name if channel.declared else role_of(channel.name),
        source=channel.source,
        target=channel.target,
        amount=_amount(channel) + (f", to {channel.target} rank 0" if rank_0 else ""),
        transports={
            t: pairs
            for t, pairs in ((Transport.SAME_NODE, near), (Transport.NETWORK, far))
            if pairs
        },
    )


def _delivered(plan: Plan, source: str, target: str) -> Transfer:
    """Return, as one transfer, all weights that component `source` sends to component `target` in a sync.

    Each source rank sends its part of the weights to each copy. A copy is in the shared memory of a node, or on the
    accelerator of a rank.
    """
    deliveries = [
        delivery
        for delivery in plan.deliveries
        if (delivery.source, delivery.target) == (source, target)
    ]
    on_device = sum(len(d.readers) for d in deliveries if isinstance(d, DeviceDelivery))
    on_nodes = sum(not isinstance(d, DeviceDelivery) for d in deliveries)
    amounts = (
        [_copies(on_nodes) + (", one on each node" if on_nodes > 1 else "")]
        if on_nodes
        else []
    )
    if on_device:
        amounts.insert(0, f"{_copies(on_device)} on accelerators")
    pairs = sum(
        (_pairs(plan, delivery) for delivery in deliveries), Counter[Transport]()
    )
    found = {transport: pairs[transport] for transport in Transport if pairs[transport]}
    return Transfer(
        name="weights",
        source=source,
        target=target,
        amount=", ".join(amounts),
        transports=found,
    )


def _pairs(plan: Plan, delivery: Delivery) -> Counter[Transport]:
    """Return transport -> number of pairs that exchange weights in a delivery.

    In a delivery through the host, a pair is a source rank and the copy on a node. In a delivery between accelerators,
    each accelerator that receives makes a pair with the source rank on it; if there is none, with every source rank.
    """
    actors = plan.placement.world_size(delivery.source)
    if not isinstance(delivery, DeviceDelivery):
        return Counter(
            {
                Transport.SAME_NODE: len(delivery.near),
                Transport.NETWORK: actors - len(delivery.near),
            }
        )
    consumers = sum(owner is not None for owner in delivery.owners)
    free = [taker.rank for taker in delivery.apart]
    sources = Counter(plan.placement.locations(delivery.source).node)
    nodes = plan.placement.locations(delivery.target).node
    near = sum(sources[nodes[reader]] for reader in free)
    return Counter(
        {
            Transport.SAME_ACCELERATOR: consumers,
            Transport.SAME_NODE: near,
            Transport.NETWORK: len(free) * actors - near,
        }
    )


def _copies(count: int) -> str:
    return f"{count} cop{'ies' if count > 1 else 'y'}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The bytes that one iteration copies, without rows of samples, whose length is known only after generation.

    Each rank is counted like the fullest rank of its component. `to_host_bytes`, `from_host_bytes`: copied by moves
    between accelerators and hosts. `weights_bytes`: transport -> bytes of one weight sync. `least_s`: "to_host",
    "from_host" or a transport -> lower bound of the seconds that the copy takes; missing where no rate is declared.
    """

    to_host_bytes: int  # copied from accelerators to hosts on releases
    from_host_bytes: int  # copied back on acquires
    weights_bytes: Mapping[Transport, int]  # of one weight sync
    # Lower bound of the seconds that each transfer takes at the rates that cluster.nodes declares. Keys: "to_host",
    # "from_host", or the value of a transport. Missing where the rate is unknown or NCCL does not carry it.
    least_s: Mapping[str, float]

    @property
    def total_bytes(self) -> int:
        return (
            self.to_host_bytes + self.from_host_bytes + sum(self.weights_bytes.values())
        )


def count_traffic(plan: Plan, ledger: MemoryLedger) -> Traffic:
    # Bytes that the hosts gain (above 0) or lose (below 0) on each move.
    changes: list[int] = []
    for entry in plan.schedule.entries.values():
        for move in (*entry.releases, *entry.acquires):
            before, after = (
                ledger.host_bytes(whole_component(move.component), level)
                for level in (move.before, move.after)
            )
            changes.append((after - before) * _ranks_of(plan, move.component))
    syncs = weight_transfers(plan)
    weights: Counter[Transport] = Counter()
    for transfer in syncs:
        weights.update(_weight_bytes(plan, ledger, transfer))
    to_host = sum(c for c in changes if c > 0)
    from_host = -sum(c for c in changes if c < 0)
    least_s = dict(
        _least_seconds(
            plan,
            {"to_host": to_host, "from_host": from_host},
            weights,
            [transfer.target for transfer in syncs],
        )
    )
    return Traffic(
        to_host_bytes=to_host,
        from_host_bytes=from_host,
        weights_bytes=dict(weights),
        least_s=least_s,
    )


def _ranks_of(plan: Plan, part: str) -> int:
    """Return the number of ranks of a component, or of the part of a component that the schedule calls so."""
    found = plan.schedule.parts.get(part)
    if found is None:
        return plan.placement.world_size(part)
    return len(found.ranks)


def weight_transfers(plan: Plan) -> list[Transfer]:
    """Return the transfers of weights that each iteration makes in its sync.

    If the job can run, its plan has deliveries of weights. If the job is only planned, its route of weights is used
    instead.
    """
    synced = {(each.source, each.target) for each in plan.deliveries}
    found = []
    for transfer in transfers(plan):
        along_route = transfer.route is not None
        delivered = (transfer.source, transfer.target) in synced
        if transfer.name == "weights" and (along_route or delivered):
            found.append(transfer)
    return found


def _weight_bytes(
    plan: Plan, ledger: MemoryLedger, transfer: Transfer
) -> Counter[Transport]:
    """Return transport -> bytes that one weight sync sends for a transfer of weights."""
    segments = plan.placement.spec(transfer.target).segments
    each = max((s.accelerators_per_rank for s in segments), default=1)
    # An engine that applies LoRA factors beside its weights gets only the factors
    size = ledger.part_bytes(transfer.target, Part.ADAPTER)
    if not size:
        size = ledger.bytes(transfer.target, Residency.WEIGHTS)
    copy = size * each
    # Parts that one copy of the weights comes in: one from each source rank.
    parts = 1
    # By CUDA IPC, one pair of ranks carries all parts at once.
    at_once: dict[Transport, int] = {}
    if transfer.route is None:
        parts = plan.placement.world_size(transfer.source)
        at_once[Transport.SAME_ACCELERATOR] = parts
    return Counter(
        {
            transport: pairs * at_once.get(transport, 1) * copy // parts
            for transport, pairs in transfer.transports.items()
        }
    )


def least_move_seconds(
    plan: Plan, ledger: MemoryLedger, component: str
) -> Iterator[tuple[str, float]]:
    """Yield (stage, seconds) for each stage on whose entry `component` copies state to or from its hosts.

    The seconds are a lower bound, at the declared PCIe rate of the slowest node. Nothing is yielded if the accelerators
    are emulated or if no rate is declared.
    """
    pcie = min(
        (node.pcie_gb_per_s for node in plan.topology.nodes if node.accelerators),
        default=0.0,
    )
    accelerators = len(plan.placement.accelerators(component))
    parts = plan.schedule.parts_of(component)
    if emulated(plan.topology) or not pcie or not accelerators:
        return
    for stage, entry in plan.schedule.entries.items():
        moves = [
            move
            for move in (*entry.releases, *entry.acquires)
            if move.component in parts
        ]
        copied = [
            abs(
                ledger.host_bytes(component, m.after)
                - ledger.host_bytes(component, m.before)
            )
            * _ranks_of(plan, m.component)
            for m in moves
        ]
        if size := sum(copied):
            yield stage, size / accelerators / (1e9 * pcie)


def _least_seconds(
    plan: Plan,
    copied: Mapping[str, int],
    weights: Mapping[Transport, int],
    receivers: Iterable[str],
) -> Iterator[tuple[str, float]]:
    """Yield (kind of copy, least seconds) for copies that all accelerators in use make at the same time.

    The kind is "to_host", "from_host" or the value of a transport. The rates are those of the slowest node. `copied`:
    "to_host" and "from_host" -> bytes of moves. `weights`: transport -> bytes of one weight sync. `receivers`: the
    components that get weights.
    """
    nodes = [node for node in plan.topology.nodes if node.accelerators]
    if emulated(plan.topology) or not nodes:
        return
    pcie = min(node.pcie_gb_per_s for node in nodes)
    rates = {
        Transport.SAME_NODE: min(
            node.nvlink_gb_per_s or node.pcie_gb_per_s for node in nodes
        ),
        Transport.NETWORK: min(node.network_gb_per_s for node in nodes),
    }
    for way, size in copied.items():
        if size and pcie:
            yield way, size / len(plan.placement.used) / (1e9 * pcie)
    through_host = plan.deliveries and not any(
        isinstance(d, DeviceDelivery) for d in plan.deliveries
    )
    # A path through the host takes much longer than these hardware rates, so it has no bound here.
    if not through_host:
        taking = Ranges(())
        for target in receivers:
            taking |= plan.placement.accelerators(target)
        receiving = len(taking)
        for transport, size in weights.items():
            if size and receiving and (rate := rates.get(transport)):
                yield transport.value, size / receiving / (1e9 * rate)


@dataclasses.dataclass(frozen=True, slots=True)
class TransportDetails:
    """Texts about one transport.

    `because`: when it is used. `items`: what carries the items of channels. `tensors`: what carries tensors that are on
    accelerators.
    """

    because: str
    items: str  # what carries the items of channels
    tensors: str  # what carries tensors that lie on accelerators


_DETAILS = {
    Transport.SAME_PROCESS: TransportDetails(
        "in one process", "reference", "reference"
    ),
    Transport.SAME_ACCELERATOR: TransportDetails(
        "on one accelerator, in two processes", "shared memory", "CUDA IPC"
    ),
    Transport.SAME_NODE: TransportDetails("on one node", "shared memory", "NCCL"),
    Transport.NETWORK: TransportDetails("on different nodes", "tcp", "NCCL"),
}
_SECURITY = {
    "encrypted": "tcp, encrypted",
    "password": "tcp, with a password, not encrypted",
}


def details_of(transport: Transport, plan: Plan) -> TransportDetails:
    """Return the texts about a transport in this plan.

    Tensors travel like items if accelerators are emulated, or if every delivery of weights passes through the host.
    """
    found = _DETAILS[transport]
    if transport is Transport.NETWORK:
        found = dataclasses.replace(found, items=_SECURITY[plan.security])
    if (
        transport is Transport.SAME_PROCESS
        and isinstance(plan.routes, Routes)
        and plan.routes.direct
    ):
        found = dataclasses.replace(found, items="direct call")
    through_host = plan.deliveries and not any(
        isinstance(d, DeviceDelivery) for d in plan.deliveries
    )
    if through_host or emulated(plan.topology):
        return dataclasses.replace(found, tensors=found.items)
    return found


def emulated(topology: Topology) -> bool:
    return all(node.kind == "emulated" for node in topology.nodes)


def transports_of(plan: Plan) -> dict[Transport, TransportDetails]:
    """Return transport -> texts about it, for the transports that the plan uses, nearest first."""
    taken = {
        transport for transfer in transfers(plan) for transport in transfer.transports
    }
    found = {
        transport: details_of(transport, plan)
        for transport in Transport
        if transport in taken
    }
    # For one shared process, list its ranks: "env 0-3 and rollout 0-3 have process: shared".
    if Transport.SAME_PROCESS in found:
        sharers: dict[str, list[str]] = {}
        for component in plan.placement.components:
            if process := plan.placement.spec(component).process:
                ranks = show_range(range(plan.placement.world_size(component)))
                sharers.setdefault(process, []).append(f"{component} {ranks}")
        because = "; ".join(
            " and ".join(names) + " have process: shared" for names in sharers.values()
        )
        found[Transport.SAME_PROCESS] = dataclasses.replace(
            found[Transport.SAME_PROCESS], because=because
        )
    return found
