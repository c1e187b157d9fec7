"""A plan as plain values in a fixed order, ready for JSON: the same plan gives the same dict."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlplace.errors import Problem
from rlplace.placement.flow import Delivery, DeviceDelivery, Route
from rlplace.placement.memory.ledger_text import ledger_record
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Move, Transition
from rlplace.placement.show.view import ComponentView, MemoryView, PlanView


def render_json(view: PlanView) -> dict[str, Any]:
    """Linear in ranks and shares. Without a memory case, only what belongs to the placement."""
    if view.memory is None:
        return _plan(view)
    return {"config": view.name, "fits": view.fits, **_plan(view), **_memory(view, view.memory)}


def _plan(view: PlanView) -> dict[str, Any]:
    plan, topology = view.plan, view.plan.topology
    node_fields = ("rank", "accelerators", "first", "kind", "memory_bytes")
    names = [c.name for c in view.components]
    return {
        "mode": plan.placement.mode,
        "topology": {
            "accelerators": topology.num_accelerators,
            "nodes": [{field: getattr(node, field) for field in node_fields} for node in topology.nodes],
        },
        "components": {c.name: _component(plan, c) for c in view.components},
        "pairs": [
            {"a": c.name, "b": other, "relation": c.shares[other][0], "shared": str(c.shares[other][1])}
            for at, c in enumerate(view.components)
            for other in names[at + 1 :]
        ],
        "schedule": {
            "stages": [stage.name for stage in view.stages],
            **({"ahead": plan.needs.ahead} if plan.needs.ahead else {}),  # versions, of rollout before learn
            "active": {stage: list(active) for stage, active in plan.schedule.active.items()},
            "residency": {s.name: {c: held.level.word for c, held in s.held.items()} for s in view.stages},
            "first": _transition(plan.schedule.first),
            "entries": {stage: _transition(entry) for stage, entry in plan.schedule.entries.items()},
        },
        "routes": _routes(plan),
        "channels": [
            {
                "name": c.name,
                "source": c.source,
                "target": c.target,
                "keys": list(c.keys),
                "capacity_items": c.capacity_items,
                "locations": [
                    {
                        "node": h.node,
                        "process": h.process or None,
                        "keys": list(h.keys),
                        "capacity_items": h.capacity_items,
                    }
                    for h in c.locations()
                ],
            }
            for c in plan.channels
        ],
        "warnings": [problem_record(w) for w in plan.warnings],
    }


def _memory(view: PlanView, memory: MemoryView) -> dict[str, Any]:
    comparison, traffic = memory.comparison, memory.traffic
    savings = None
    if comparison is not None:
        savings = {
            "used": comparison.savings.used,
            "dedicated": comparison.savings.dedicated,
            "saved": comparison.savings.saved,
            "by_component": dict(comparison.savings.by_component),
            "at_work": dict(comparison.here.at_work),
            "dedicated_at_work": dict(comparison.apart.at_work),
            "fullest_bytes": comparison.here_bytes,
            "dedicated_fullest_bytes": comparison.apart_bytes,
        }
    return {
        "savings": savings,
        "counts": [dataclasses.asdict(count) for count in view.counts],
        "traffic": {
            "to_host_bytes": traffic.to_host_bytes,
            "from_host_bytes": traffic.from_host_bytes,
            "weights_bytes": {transport.value: size for transport, size in traffic.weights_bytes.items()},
        },
        "memory": ledger_record(memory.ledger),
        "shortages": [problem_record(p) for p in memory.shortages],
    }


def _component(plan: Plan, component: ComponentView) -> dict[str, Any]:
    return {
        "placement": component.placement,
        "world_size": component.spec.world_size,
        "accelerators": str(component.spec.accelerators),
        "ranks": [
            {"rank": s.rank, "node": s.node, "local_rank": s.local_rank, "accelerators": list(s.accelerators)}
            for s in plan.placement.slots(component.name)
        ],
    }


def _transition(transition: Transition) -> dict[str, Any]:
    def record(moves: tuple[Move, ...]) -> list[dict[str, str]]:
        return [{"component": m.component, "before": m.before.word, "after": m.after.word} for m in moves]

    return {
        "stage": transition.stage,
        "releases": record(transition.releases),
        "acquires": record(transition.acquires),
    }


def _routes(plan: Plan) -> dict[str, Any] | list[dict[str, Any]]:
    """By name where each has one."""
    weights = {"source": "actor", "target": "rollout", "copies": [_delivery(d) for d in plan.deliveries]}
    if plan.deliveries:
        return {route.name: _route(route) for route in plan.routes} | {"weights": weights}
    return [_route(route) for route in plan.routes]


def _delivery(delivery: Delivery) -> dict[str, Any]:
    if isinstance(delivery, DeviceDelivery):
        return {"readers": list(delivery.readers), "owners": list(delivery.owners)}
    return {"readers": list(delivery.readers), "near": list(delivery.near)}


def _route(route: Route) -> dict[str, Any]:
    shares = [
        {"source": s.source, "target": s.target, "start": s.start, "stop": s.stop, "transport": s.transport.value}
        for s in route.shares
    ]
    return {"source": route.source, "target": route.target, "rows": route.rows, "shares": shares}


def problem_record(problem: Problem) -> dict[str, str | None]:
    """A problem or warning, without its source."""
    return {"code": problem.code, "key": problem.key, "what": problem.what, "why": problem.why, "fix": problem.fix}
