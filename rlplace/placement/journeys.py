"""What travels between components in one iteration, for every kind of plan, and the bytes of it that are known."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping

from rlplace.placement.channels import ChannelPlan
from rlplace.placement.language.spec import role_of
from rlplace.placement.layout import Layout
from rlplace.placement.memory.ledger import MemoryLedger
from rlplace.placement.plan import Plan
from rlplace.placement.routes import Route, Way
from rlplace.placement.schedule import Residency
from rlplace.placement.weight_routes import Delivery, DeviceDelivery

AnyPlan = Plan | Layout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """What one component sends another, under the name people know it by."""

    name: str
    source: str
    target: str
    amount: str  # "32 rows x 2 stage groups"
    ways: Mapping[Way, int]  # pairs of ranks by way, nearest first
    route: Route | None = None  # None: any source rank may send to any target rank


def journeys(plan: AnyPlan) -> tuple[Journey, ...]:
    """In the order in which an iteration makes them; weights, which close the circle, come last."""
    if isinstance(plan, Plan):
        routes, groups = plan.routes, f"{plan.stage_groups} stage group{'s' * (plan.stage_groups > 1)}"
        return (
            _along("observations", routes.observations, f"{routes.observations.rows} rows x {groups}"),
            _along("trajectories", routes.trajectories, f"{routes.trajectories.rows} rows"),
            _delivered(plan),
        )
    if plan.channels:
        return (
            *(_channelled(plan, channel) for channel in plan.channels if _amount(channel)),
            _delivered(plan),
        )
    samples = [r for r in plan.routes if r.source == "rollout"]
    weights = [r for r in plan.routes if r.source != "rollout"]
    found = [_along("samples", r, f"{r.rows} samples") for r in samples]
    return (*found, *(_along("weights", r, _copies(r.rows)) for r in weights))


def _along(name: str, route: Route, amount: str) -> Journey:
    ways = route.shares.ways()
    return Journey(name=name, source=route.source, target=route.target, amount=amount, ways=ways, route=route)


_TEXT = {  # what a channel of a text task carries -> how much of it
    "requests": "prompts so far, to whoever has room",
    "completions": "answers, as each is finished",
    "samples": "whole groups",
    "scores": "by sample",
    "returns": "by group",
    "weights.reference": "a copy for each rank, in iterations that refresh it",
}


def _amount(channel: ChannelPlan) -> str:
    """Nothing for what is told elsewhere."""
    return _TEXT.get(channel.name, _TEXT.get(role_of(channel.name), ""))


def _channelled(plan: Layout, channel: ChannelPlan) -> Journey:
    nodes = [Counter(plan.placement.homes(c).node) for c in (channel.source, channel.target)]
    rank_0 = channel.target in ("actor", "critic")
    if rank_0:
        nodes[1] = Counter(channel.targets.node)
    near = sum(ranks * nodes[1][node] for node, ranks in nodes[0].items())
    far = nodes[0].total() * nodes[1].total() - near
    ways = {way: pairs for way, pairs in ((Way.SAME_NODE, near), (Way.NETWORK, far)) if pairs}
    return Journey(
        name=role_of(channel.name),
        source=channel.source,
        target=channel.target,
        amount=_amount(channel) + (f", to {channel.target} rank 0" if rank_0 else ""),
        ways=ways,
    )


def _delivered(plan: AnyPlan) -> Journey:
    """Each actor rank gives its part to each copy: in memory of a node, or on the accelerator of a rank."""
    on_device = sum(len(d.readers) for d in plan.deliveries if isinstance(d, DeviceDelivery))
    on_nodes = sum(not isinstance(d, DeviceDelivery) for d in plan.deliveries)
    amounts = [_copies(on_nodes) + (", one on each node" if on_nodes > 1 else "")] if on_nodes else []
    if on_device:
        amounts.insert(0, f"{_copies(on_device)} on accelerators")
    ways: Counter[Way] = Counter()
    for delivery in plan.deliveries:
        ways += _pairs(plan, delivery)
    nearest_first = {way: ways[way] for way in Way if ways[way]}
    return Journey(name="weights", source="actor", target="rollout", amount=", ".join(amounts), ways=nearest_first)


def _pairs(plan: AnyPlan, delivery: Delivery) -> Counter[Way]:
    """Who gives to whom: an actor rank to a copy on a node, its host to a guest, and to the others the whole group."""
    actors = plan.placement.world_size("actor")
    if not isinstance(delivery, DeviceDelivery):
        return Counter({Way.SAME_NODE: len(delivery.near), Way.NETWORK: actors - len(delivery.near)})
    guests = sum(host is not None for host in delivery.hosts)
    free = [r for r, host in zip(delivery.readers, delivery.hosts, strict=True) if host is None]
    sources, nodes = Counter(plan.placement.homes("actor").node), plan.placement.homes("rollout").node
    near = sum(sources[nodes[reader]] for reader in free)
    return Counter({Way.SAME_ACCELERATOR: guests, Way.SAME_NODE: near, Way.NETWORK: len(free) * actors - near})


def _copies(count: int) -> str:
    return f"{count} cop{'ies' if count > 1 else 'y'}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of one iteration, each rank counted like the fullest of its component.

    Rows of samples are left out: how long they get is known when they are there.
    """

    to_host_bytes: int  # copied away on releases
    from_host_bytes: int  # copied back on acquires
    weights_bytes: Mapping[Way, int]  # one sync

    @property
    def total_bytes(self) -> int:
        return self.to_host_bytes + self.from_host_bytes + sum(self.weights_bytes.values())


def count_traffic(plan: AnyPlan, ledger: MemoryLedger) -> Traffic:
    changes = list(_host_changes(plan, ledger))
    weights: dict[Way, int] = {}
    for journey in journeys(plan):
        if (journey.name, journey.target) == ("weights", "rollout"):
            copy = ledger.bytes(journey.target, Residency.WEIGHTS) * _accelerators_per_rank(plan, journey.target)
            parts = plan.placement.world_size(journey.source) if journey.route is None else 1  # of a copy
            lent = {} if journey.route else {Way.SAME_ACCELERATOR: parts}  # a guest gets all parts of its host
            weights = {way: pairs * lent.get(way, 1) * copy // parts for way, pairs in journey.ways.items()}
    return Traffic(
        to_host_bytes=sum(c for c in changes if c > 0),
        from_host_bytes=-sum(c for c in changes if c < 0),
        weights_bytes=weights,
    )


def _host_changes(plan: AnyPlan, ledger: MemoryLedger) -> Iterator[int]:
    """How much more the hosts hold after each move."""
    for entry in plan.schedule.entries.values():
        for move in (*entry.releases, *entry.acquires):
            before, after = (ledger.host_bytes(move.component, level) for level in (move.before, move.after))
            yield (after - before) * plan.placement.world_size(move.component)


def _accelerators_per_rank(plan: AnyPlan, component: str) -> int:
    return max((s.accelerators_per_rank for s in plan.placement.spec(component).segments), default=1)
