"""Libraries that put all models on one pool of machines -> placement: everything on all of it, engines included."""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.imports.draft import PLACEMENT, Draft
from rlplace.imports.seating import line, nodes_for
from rlplace.placement import Topology
from rlplace.placement.machines.ranges import Ranges


def place(draft: Draft, spots: Mapping[str, Ranges], copies: Mapping[str, int], width: int, nodes: int = 1) -> Topology:
    """Writes the lines and the machines, at least `nodes`; `copies` are the tensor parallel sizes that are not 1."""
    used = max((where.pieces[-1].stop for where in spots.values() if where), default=1)
    topology = Topology.uniform(max(nodes, nodes_for(used, width)), width, "cuda")
    draft.set("cluster.num_nodes", topology.num_nodes)
    draft.set("cluster.accelerators_per_node", width)
    for component, where in spots.items():
        copy = copies.get(component, 1)
        draft.set(f"{PLACEMENT}.{component}", line(where, copy if len(where) % copy == 0 else 1, width))
    return topology


def check_engine_size(draft: Draft, key: str, size: int, accelerators: int) -> None:
    """Engines must fill the accelerators they are placed on."""
    if accelerators % size:
        near = min((n for n in range(1, accelerators + 1) if accelerators % n == 0), key=lambda n: (abs(n - size), n))
        draft.find(
            "import-engines",
            key,
            f"{accelerators} accelerators do not divide into engines of {size}",
            got=str(draft.given[key]) if key in draft.given else f"{key}: {size}",
            why="each engine takes that many accelerators, and none may be left over",
            fix=f"{key}: {near}",
        )
