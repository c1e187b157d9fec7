"""A plan as plain values in a fixed order, ready for JSON: the same plan gives the same dict."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from rlplace.errors import Problem
from rlplace.placement.flow import DeviceDelivery, Route
from rlplace.placement.memory.ledger_text import ledger_record
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Move, Transition
from rlplace.placement.show.view import PlanView


def render_json(view: PlanView) -> dict[str, Any]:
    """Return the plan as plain values; linear in ranks and shares."""
    comparison, traffic = view.comparison, view.traffic
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
        "config": view.name,
        "fits": view.fits,
        **_plan(view),
        "savings": savings,
        "counts": [dataclasses.asdict(count) for count in view.counts],
        "traffic": {
            "to_host_bytes": traffic.to_host_bytes,
            "from_host_bytes": traffic.from_host_bytes,
            "weights_bytes": {transport.value: size for transport, size in traffic.weights_bytes.items()},
        },
        "memory": ledger_record(view.ledger),
        "shortages": _problems(view.shortages),
    }


def _plan(view: PlanView) -> dict[str, Any]:
    plan, placement, topology, schedule = view.plan, view.plan.placement, view.plan.topology, view.plan.schedule
    return {
        "mode": placement.mode,
        "topology": {
            "accelerators": topology.num_accelerators,
            "nodes": [
                _fields(node, "rank", "accelerators", "first", "kind", "memory_bytes") for node in topology.nodes
            ],
        },
        "components": {
            c.name: {
                "placement": c.render(),
                "world_size": c.world_size,
                "accelerators": str(c.accelerators),
                "ranks": [
                    _fields(s, "rank", "node", "local_rank") | {"accelerators": list(s.accelerators)}
                    for s in placement.slots(c.name)
                ],
            }
            for c in view.components
        },
        "pairs": [
            {"a": a, "b": b, "relation": placement.relation(a, b), "shared": str(placement.shared(a, b))}
            for a, b in itertools.combinations(placement.components, 2)
        ],
        "schedule": {
            "stages": [stage.name for stage in view.stages],
            **({"ahead": plan.needs.ahead} if plan.needs.ahead else {}),  # versions, of rollout before learn
            "active": {stage: list(active) for stage, active in schedule.active.items()},
            "residency": {s.name: {c: held.level.word for c, held in s.held.items()} for s in view.stages},
            "first": _transition(schedule.first),
            "entries": {stage: _transition(entry) for stage, entry in schedule.entries.items()},
        },
        "routes": _routes(plan),
        "channels": [
            {
                **_fields(c, "name", "source", "target"),
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
        "warnings": _problems(plan.warnings),
    }


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _transition(transition: Transition) -> dict[str, Any]:
    def record(moves: tuple[Move, ...]) -> list[dict[str, str]]:
        return [{"component": m.component, "before": m.before.word, "after": m.after.word} for m in moves]

    releases, acquires = record(transition.releases), record(transition.acquires)
    return {"stage": transition.stage, "releases": releases, "acquires": acquires}


def _routes(plan: Plan) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the routes, by name where each has one."""
    if not plan.deliveries:
        return [_route(route) for route in plan.routes]
    copies = [
        {"readers": list(d.readers), "owners": list(d.owners)}
        if isinstance(d, DeviceDelivery)
        else {"readers": list(d.readers), "near": list(d.near)}
        for d in plan.deliveries
    ]
    weights = {"source": "actor", "target": "rollout", "copies": copies}
    return {route.name: _route(route) for route in plan.routes} | {"weights": weights}


def _route(route: Route) -> dict[str, Any]:
    shares = [_fields(s, "source", "target", "start", "stop") | {"transport": s.transport.value} for s in route.shares]
    return _fields(route, "source", "target", "rows") | {"shares": shares}


def _problems(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Return problems or warnings without their sources."""
    return [_fields(problem, "code", "key", "what", "why", "fix") for problem in problems]
