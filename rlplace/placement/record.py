"""The plan as plain values: dicts, lists, text and numbers, in a fixed order, ready for JSON."""

from __future__ import annotations

import itertools
from typing import Any

from rlplace.errors import Problem
from rlplace.placement.plan import Plan
from rlplace.placement.routes import Route
from rlplace.placement.schedule import Move, Transition


def render_json(plan: Plan) -> dict[str, Any]:
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
            "residency": {
                stage: {c: held.word for c, held in row.items()} for stage, row in plan.schedule.residency.items()
            },
            "first": _transition(plan.schedule.first),
            "entries": {stage: _transition(entry) for stage, entry in plan.schedule.entries.items()},
        },
        "routes": {
            "observations": _route(plan.routes.observations),
            "trajectories": _route(plan.routes.trajectories),
            "weights": _route(plan.routes.weights),
        },
        "channels": [
            {
                "name": c.name,
                "source": c.source,
                "target": c.target,
                "keys": list(c.keys),
                "capacity_items": c.capacity_items,
            }
            for c in plan.channels
        ],
        "warnings": [_warning(w) for w in plan.warnings],
    }


def _component(plan: Plan, component: str) -> dict[str, Any]:
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


def _route(route: Route) -> dict[str, Any]:
    shares = [
        {"source": s.source, "target": s.target, "start": s.start, "stop": s.stop, "way": s.way.value}
        for s in route.shares
    ]
    return {"source": route.source, "target": route.target, "rows": route.rows, "shares": shares}


def _warning(warning: Problem) -> dict[str, str | None]:
    return {"code": warning.code, "key": warning.key, "what": warning.what, "why": warning.why, "fix": warning.fix}
