"""Sizes of components -> placement text: accelerators handed out side by side, copies of a model kept on one node."""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.imports.importer import Draft
from rlplace.imports.settings import PLACEMENT
from rlplace.placement import Topology
from rlplace.placement.machines.ranges import Ranges


class Allocation:
    """Hands out the next accelerators of a cluster of equal nodes. Owns how far it has come."""

    def __init__(self, per_node: int) -> None:
        self.per_node = per_node
        self.next = 0

    def take(self, count: int, copy: int = 1) -> Ranges:
        """The next `count`, of which each `copy` neighbours lie on one node, or begin one where a node is too small."""
        pieces: list[range] = []
        for _ in range(count // copy):
            on_node = self.next % self.per_node
            if on_node and on_node + copy > self.per_node:
                self.next += self.per_node - on_node
            pieces.append(range(self.next, self.next + copy))
            self.next += copy
        return Ranges.of(pieces)


def line(where: Ranges, copy: int = 1, per_node: int = 0, *, engine: bool = False) -> object:
    """The value of a `component_placement` line; `copy` accelerators hold one copy of the model.

    An engine is one rank with all accelerators of its copy, which runs; a copy of a trained model, or an engine larger
    than a node, can only be planned.
    """
    if copy == 1:
        return str(where)
    if per_node and copy > per_node:
        return {"placement": str(where), "tensor_parallel_size": copy, "tensor_parallel_across_nodes": True}
    return {"placement": str(where), "accelerators_per_rank" if engine else "tensor_parallel_size": copy}


def place(draft: Draft, where: Mapping[str, Ranges], copies: Mapping[str, int], width: int, nodes: int = 1) -> Topology:
    """Write the lines and the machines, at least `nodes`; `copies` are the accelerators of a copy where not 1."""
    used = max((numbers.pieces[-1].stop for numbers in where.values() if numbers), default=1)
    topology = Topology.uniform(max(nodes, -(-used // width)), width, "cuda")
    draft.set("cluster.num_nodes", topology.num_nodes)
    draft.set("cluster.accelerators_per_node", width)
    for component, numbers in where.items():
        copy = copies.get(component, 1)
        copy = copy if len(numbers) % copy == 0 else 1
        draft.set(f"{PLACEMENT}.{component}", line(numbers, copy, width, engine=component == "rollout"))
    return topology


def check_engine_size(draft: Draft, key: str, size: int, accelerators: int) -> None:
    """Engines must fill the accelerators they are placed on."""
    if accelerators % size:
        near = min((n for n in range(1, accelerators + 1) if accelerators % n == 0), key=lambda n: (abs(n - size), n))
        draft.find(
            "import-engines",
            key,
            f"{accelerators} accelerators do not divide into engines of {size}",
            got=str(draft.given.get(key, f"{key}: {size}")),
            why="each engine takes that many accelerators, and none may be left over",
            fix=f"{key}: {near}",
        )


def nearest_engines(accelerators: int, engines: int, tensor: int) -> tuple[int, int]:
    """Engines and tensor parallel size that use exactly `accelerators`; the tensor parallel size moves least."""
    if accelerators % tensor == 0:
        return accelerators // tensor, tensor
    if engines and accelerators % engines == 0:
        return engines, accelerators // engines
    best = min((t for t in range(1, accelerators + 1) if accelerators % t == 0), key=lambda t: (abs(t - tensor), t))
    return accelerators // best, best
