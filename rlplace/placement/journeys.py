"""What travels between components in one iteration, for every kind of plan, and the bytes of it that are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from rlplace.placement.layout import Layout
from rlplace.placement.memory.ledger import MemoryLedger
from rlplace.placement.plan import Plan
from rlplace.placement.routes import Route, Way
from rlplace.placement.schedule import Residency

AnyPlan = Plan | Layout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """One route under the name people know it by."""

    name: str
    route: Route
    amount: str  # "32 rows x 2 stage groups"


def journeys(plan: AnyPlan) -> tuple[Journey, ...]:
    """In the order in which an iteration makes them; weights, which close the circle, come last."""
    if isinstance(plan, Plan):
        routes, groups = plan.routes, f"{plan.stage_groups} stage group{'s' * (plan.stage_groups > 1)}"
        return (
            Journey(
                name="observations", route=routes.observations, amount=f"{routes.observations.rows} rows x {groups}"
            ),
            Journey(name="trajectories", route=routes.trajectories, amount=f"{routes.trajectories.rows} rows"),
            _weights(routes.weights),
        )
    samples = [r for r in plan.routes if r.source == "rollout"]
    weights = [r for r in plan.routes if r.source != "rollout"]
    found = [Journey(name="samples", route=r, amount=f"{r.rows} samples") for r in samples]
    return (*found, *map(_weights, weights))


def _weights(route: Route) -> Journey:
    return Journey(name="weights", route=route, amount=f"{route.rows} cop{'ies' if route.rows > 1 else 'y'}")


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
        target = journey.route.target
        if journey.name == "weights":
            copy = ledger.bytes(target, Residency.WEIGHTS) * _accelerators_per_rank(plan, target)
            weights = {way: copies * copy for way, copies in journey.route.shares.ways().items()}
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
