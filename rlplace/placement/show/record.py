"""The plan as plain values: dicts, lists, text and numbers, in a fixed order, ready for JSON."""

from __future__ import annotations

import itertools
from typing import Any

from rlplace.errors import Problem
from rlplace.placement.flow import Delivery, DeviceDelivery, Route
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Move, Transition
from rlplace.placement.transfers import AnyPlan


def render_json(plan: AnyPlan) -> dict[str, Any]:
    """The same plan gives the same dict, key order included. Linear in ranks and shares."""
    placement, topology = plan.placement, plan.topology
    return {
        "mode": placement.mode,
        "topology": {
            "accelerators": topology.num_accelerators,
            "nodes": [
                {
                    "rank": n.rank,
                    "accelerators": n.accelerators,
                    "first": n.first,
                    "kind": n.kind,
                    "memory_bytes": n.memory_bytes,
                }
                for n in topology.nodes
            ],
        },
        "components": {c: _component(plan, c) for c in placement.components},
        "pairs": [
            {"a": a, "b": b, "relation": placement.relation(a, b), "shared": str(placement.shared(a, b))}
            for a, b in itertools.combinations(placement.components, 2)
        ],
        "schedule": {
            "stages": list(plan.schedule.stages),
            **({"ahead": plan.needs.ahead} if plan.needs.ahead else {}),  # versions, of rollout before learn
            "active": {stage: list(active) for stage, active in plan.schedule.active.items()},
            "residency": {
                stage: {c: held.word for c, held in row.items()} for stage, row in plan.schedule.residency.items()
            },
            "first": _transition(plan.schedule.first),
            "entries": {stage: _transition(entry) for stage, entry in plan.schedule.entries.items()},
        },
        "routes": _routes(plan),
        "channels": _channels(plan),
        "warnings": [problem_record(w) for w in plan.warnings],
    }


def _component(plan: AnyPlan, component: str) -> dict[str, Any]:
    spec = plan.placement.spec(component)
    return {
        "placement": spec.render(),
        "world_size": spec.world_size,
        "accelerators": str(spec.accelerators),
        "ranks": [
            {"rank": s.rank, "node": s.node, "local_rank": s.local_rank, "accelerators": list(s.accelerators)}
            for s in plan.placement.slots(component)
        ],
    }


def _transition(transition: Transition) -> dict[str, Any]:
    return {
        "stage": transition.stage,
        "releases": [_move(m) for m in transition.releases],
        "acquires": [_move(m) for m in transition.acquires],
    }


def _move(move: Move) -> dict[str, str]:
    return {"component": move.component, "before": move.before.word, "after": move.after.word}


def _routes(plan: AnyPlan) -> dict[str, Any] | list[dict[str, Any]]:
    """By name where each has one."""
    weights = {
        "source": "actor",
        "target": "rollout",
        "copies": [_delivery(d) for d in plan.deliveries],
    }
    if isinstance(plan, Plan):
        routes = plan.routes
        return {
            "observations": _route(routes.observations),
            "trajectories": _route(routes.trajectories),
            "weights": weights,
        }
    return {"weights": weights} if plan.deliveries else [_route(route) for route in plan.routes]


def _delivery(delivery: Delivery) -> dict[str, Any]:
    if isinstance(delivery, DeviceDelivery):
        return {"readers": list(delivery.readers), "hosts": list(delivery.hosts)}
    return {"readers": list(delivery.readers), "near": list(delivery.near)}


def _channels(plan: AnyPlan) -> list[dict[str, Any]]:
    return [
        {
            "name": c.name,
            "source": c.source,
            "target": c.target,
            "keys": list(c.keys),
            "capacity_items": c.capacity_items,
            "homes": [
                {"node": h.node, "process": h.process or None, "keys": list(h.keys), "capacity_items": h.capacity_items}
                for h in c.homes()
            ],
        }
        for c in plan.channels
    ]


def _route(route: Route) -> dict[str, Any]:
    shares = [
        {"source": s.source, "target": s.target, "start": s.start, "stop": s.stop, "transport": s.transport.value}
        for s in route.shares
    ]
    return {"source": route.source, "target": route.target, "rows": route.rows, "shares": shares}


def problem_record(problem: Problem) -> dict[str, str | None]:
    """A problem or warning, less where it stands."""
    return {"code": problem.code, "key": problem.key, "what": problem.what, "why": problem.why, "fix": problem.fix}
