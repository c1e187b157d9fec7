"""A plan as plain values in a fixed order, ready for JSON: the same plan gives the same dict."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from rlplace.errors import Problem
from rlplace.placement.flow import DeviceDelivery
from rlplace.placement.memory.records import ledger_record
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency
from rlplace.placement.show.view import PlanView

_ROUTE = ("source", "target", "rows", "shares")


def render_json(view: PlanView) -> dict[str, Any]:
    """Return the plan as plain values; linear in ranks and shares."""
    plan, placement, topology, schedule = view.plan, view.plan.placement, view.plan.topology, view.plan.schedule
    nodes = [_fields(n, "rank", "accelerators", "first", "kind", "memory_bytes") for n in topology.nodes]
    comparison, savings = view.comparison, None
    if comparison is not None:
        savings = _fields(comparison.savings, "used", "dedicated", "saved", "by_component") | {
            "at_work": _plain(comparison.here),
            "dedicated_at_work": _plain(comparison.apart),
            "fullest_bytes": comparison.here_bytes,
            "dedicated_fullest_bytes": comparison.apart_bytes,
        }
    return {
        "config": view.name,
        "fits": view.fits,
        "mode": placement.mode,
        "topology": {"accelerators": topology.num_accelerators, "nodes": nodes},
        "components": {
            c.name: {
                "placement": c.render(),
                "world_size": c.world_size,
                "accelerators": str(c.accelerators),
                "ranks": [_fields(s, "rank", "node", "local_rank", "accelerators") for s in placement.slots(c.name)],
            }
            for c in view.components
        },
        "pairs": [
            {"a": a, "b": b, "relation": placement.relation(a, b), "shared": str(placement.shared(a, b))}
            for a, b in itertools.combinations(placement.components, 2)
        ],
        "schedule": {
            "stages": list(schedule.stages),
            **({"ahead": plan.needs.ahead} if plan.needs.ahead else {}),  # versions, of rollout before learn
            **_fields(schedule, "active", "residency", "first", "entries"),
        },
        "routes": _routes(plan),
        "channels": [
            _fields(c, "name", "source", "target", "keys", "capacity_items")
            | {
                "locations": [
                    _fields(h, "node", "keys", "capacity_items") | {"process": h.process or None} for h in c.locations()
                ]
            }
            for c in plan.channels
        ],
        "warnings": _problems(plan.warnings),
        "savings": savings,
        "counts": _plain(view.counts),
        "traffic": _plain(view.traffic),
        "memory": ledger_record(view.ledger),
        "shortages": _problems(view.shortages),
    }


def _plain(value: object) -> Any:
    """Return records and mappings as dicts, sequences as lists, a residency as its word."""
    if isinstance(value, Residency):
        return value.word
    if dataclasses.is_dataclass(value):
        return _fields(value, *(field.name for field in dataclasses.fields(value)))
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: _plain(getattr(value, name)) for name in names}


def _routes(plan: Plan) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the routes, by name where each has one."""
    if not plan.deliveries:
        return [_fields(route, *_ROUTE) for route in plan.routes]
    copies = [_fields(d, "readers", "owners" if isinstance(d, DeviceDelivery) else "near") for d in plan.deliveries]
    weights = {"source": "actor", "target": "rollout", "copies": copies}
    return {route.name: _fields(route, *_ROUTE) for route in plan.routes} | {"weights": weights}


def _problems(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Return problems or warnings without their sources."""
    return [_fields(problem, "code", "key", "what", "why", "fix") for problem in problems]
