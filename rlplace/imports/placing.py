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


def place(draft: Draft, where: Mapping[str, Ranges], copies: Mapping[str, int], width: int, nodes: int = 1) -> Topology:
    """Write the lines and the machines, at least `nodes`; `copies` are the accelerators of a copy where not 1.

    An engine is one rank with all accelerators of its copy, which runs; a copy of a trained model, or an engine larger
    than a node, can only be planned.
    """
    used = max((numbers.pieces[-1].stop for numbers in where.values() if numbers), default=1)
    topology = Topology.uniform(max(nodes, -(-used // width)), width, "cuda")
    draft.set("cluster.num_nodes", topology.num_nodes)
    draft.set("cluster.accelerators_per_node", width)
    for component, numbers in where.items():
        copy = copies.get(component, 1)
        line: object = str(numbers)
        if copy > width and len(numbers) % copy == 0:
            line = {"placement": line, "tensor_parallel_size": copy, "tensor_parallel_across_nodes": True}
        elif copy > 1 and len(numbers) % copy == 0:
            line = {
                "placement": line,
                "accelerators_per_rank" if component == "rollout" else "tensor_parallel_size": copy,
            }
        draft.set(f"{PLACEMENT}.{component}", line)
    return topology


def check_engine_size(draft: Draft, key: str, size: int, accelerators: int) -> None:
    """Engines must fill the accelerators they are placed on."""
    if accelerators % size:
        what = f"{accelerators} accelerators do not divide into engines of {size}"
        why = "each engine takes that many accelerators, and none may be left over"
        draft.find("import-engines", what, key, why=why, fix=f"{key}: {_nearest_divisor(accelerators, size)}")


def check_engines(
    draft: Draft, keys: tuple[str, str], engines: int, tensor: int, size: int, leader: str, fix: str
) -> None:
    """Engines must use exactly the `size` accelerators of the leader; `fix` takes their number and size."""
    if engines * tensor == size:
        return
    near = tensor if size % tensor == 0 else size // engines if engines and size % engines == 0 else None
    near = near or _nearest_divisor(size, tensor)
    what = f"{engines} engines x {tensor} = {engines * tensor} accelerators, and the {leader} has {size}"
    why = f"under colocate_all the engines use exactly the {leader}'s accelerators there; here they may use some"
    draft.find("import-engines", what, *keys, why=why, fix=fix.format(size // near, near))


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = (n for n in range(1, number + 1) if number % n == 0)
    return min(divisors, key=lambda n: (abs(n - wanted), n))
