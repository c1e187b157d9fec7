"""Nodes that a run leaves, and nodes that it uses again: `rlplace drain RUN NODE`.

::

    request ─▶ which node? ─▶ places on the other nodes, the nearest first ─▶ the first that is planned and proven
                 │ unknown, the driver's                                        │ none
                 └ refused: nothing has moved ──────────────────────────────────┘
            ─▶ change of the placement ─▶ the cluster gives the node up: its loss is none of the run any more

Accelerators keep their numbers: the plans after it simply have nothing on the node.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlplace.codes import config_error
from rlplace.errors import ClusterError, ConfigError, ProblemsError
from rlplace.placement.language.drained import places_without
from rlplace.placement.plan import Plan
from rlplace.runtime.launched import JobSpec, slots_of

# Placements that are planned at most, until one can be
_TRIES = 64

Planned = TypeVar("Planned")


def node_named(text: str, nodes: Mapping[int, str], folder: Path) -> int:
    """Return the number of a node. `text`: its number, or its address. `nodes`: number -> address. `folder`: the run's.

    Raises ConfigError if no node has the number, or not exactly one the address.
    """
    found = [
        number for number, address in nodes.items() if text in (str(number), address)
    ]
    if len(found) == 1:
        return found[0]
    shown = [f"{number} ({address})" for number, address in nodes.items()]
    raise config_error(
        "bad-drain",
        "NODE",
        text,
        error="unknown",
        nodes=", ".join(shown),
        run=shlex.quote(str(folder)),
        last=max(nodes),
    )


def refused(error: str, node: int, folder: Path, **facts: Any) -> ConfigError:
    """Return the error about a node that cannot be emptied or used again. `error`: its name, with its `facts`."""
    return config_error(
        "bad-drain",
        "NODE",
        str(node),
        error=error,
        node=node,
        run=shlex.quote(str(folder)),
        **facts,
    )


def plan_without(
    plan: Plan,
    node: int,
    gone: Collection[int],
    folder: Path,
    planning: Callable[[Mapping[str, object]], Planned],
) -> Planned:
    """Return the nearest plan without a node.

    `plan`: the present one. `gone`: nodes that have left before. `folder`: the run's. `planning`: plans and proves a
    job with places of some components, or raises ProblemsError or ClusterError. Raises ConfigError if no plan is found.
    """
    first: ProblemsError | ClusterError | None = None
    tries = 0
    nearest = places_without(plan.placement, {node, *gone})
    for places in itertools.islice(nearest, _TRIES):
        tries += 1
        try:
            return planning(places)
        except (ProblemsError, ClusterError) as error:
            first = first or error
    if first is None:
        on_node = _components_on(plan, node)
        raise refused("no-place", node, folder, component=" or ".join(on_node))
    raise refused("nowhere", node, folder, tries=tries, refusal=str(first)) from first


def nodes_of(job: JobSpec) -> set[int]:
    """Return the nodes on which a job has ranks."""
    return {slot.node for slot in slots_of(job.plan)}


def _components_on(plan: Plan, node: int) -> list[str]:
    """Return the components that have ranks on a node."""
    placement = plan.placement
    return [
        name
        for name in placement.components
        if node in placement.spec(name).locations.node
    ]
