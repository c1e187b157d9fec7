"""Sizes of components -> placement text: accelerators handed out side by side, copies of a model kept on one node."""

from __future__ import annotations

from rlplace.placement.machines.ranges import Ranges


class Seating:
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


def first_of(count: int, copy: int, per_node: int) -> Ranges:
    """`count` accelerators from number 0 on."""
    return Seating(per_node).take(count, copy)


def nodes_for(accelerators: int, per_node: int) -> int:
    return max(1, -(-accelerators // per_node))


def line(spots: Ranges, copy: int = 1, per_node: int = 0) -> object:
    """The value of a `component_placement` line; `copy` is the tensor parallel size."""
    if copy == 1:
        return str(spots)
    value: dict[str, object] = {"placement": str(spots), "tensor_parallel_size": copy}
    if per_node and copy > per_node:
        value["tensor_parallel_across_nodes"] = True
    return value


def nearest_engines(accelerators: int, engines: int, tensor: int) -> tuple[int, int]:
    """Engines and tensor parallel size that use exactly `accelerators`; the tensor parallel size moves least."""
    if accelerators % tensor == 0:
        return accelerators // tensor, tensor
    if engines and accelerators % engines == 0:
        return engines, accelerators // engines
    best = min((t for t in range(1, accelerators + 1) if accelerators % t == 0), key=lambda t: (abs(t - tensor), t))
    return accelerators // best, best
