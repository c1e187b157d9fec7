"""The machines as they are: nodes, their accelerators, and both ways of numbering them.

A topology is declared in the config (`nodes`) or counted on this machine; it is the same type each time.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter

from rlplace.placement.machines.ranges import Ranges, overlap, show_range

# What a declared node meets when the job starts is Ray's node of the same rank: see `nodes.in_rank_order`.
DECLARED = "as declared; Ray's by label rlplace-node-rank, else head first, others by address"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Neighbouring accelerators of one node that are all alike."""

    count: int
    product: str
    memory_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine. Its accelerators are numbered 0..n-1 locally and `first`..`first + n - 1` over the cluster."""

    rank: int
    accelerators: int
    first: int
    kind: str = "emulated"  # "cuda" or "emulated"
    memory_bytes: int = 0  # of one accelerator, the least where they differ; 0: not known
    host: str = ""  # "" until a cluster was met
    product: str = ""  # what the accelerators are sold as: "H100"; "" where not known
    host_memory_bytes: int = 0  # 0: not known
    pcie_gb_per_s: float = 0.0  # between an accelerator and the host's memory; 0: not known
    runs: tuple[Run, ...] = ()  # only where the accelerators are not all alike

    @property
    def numbers(self) -> range:
        """The global numbers of this node's accelerators."""
        return range(self.first, self.first + self.accelerators)

    @property
    def alike(self) -> tuple[Run, ...]:
        """The accelerators in order, as runs of one product each; none on a node without accelerators."""
        if self.runs:
            return self.runs
        one = Run(count=self.accelerators, product=self.product, memory_bytes=self.memory_bytes)
        return (one,) if self.accelerators else ()


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """All nodes in rank order. Accelerators are numbered through: node 0's first, then node 1's."""

    nodes: tuple[Node, ...]
    order: str = dataclasses.field(default=DECLARED, compare=False)  # why the nodes have these ranks

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("topology: a cluster has at least one node")
        firsts = itertools.accumulate((n.accelerators for n in self.nodes), initial=0)
        for rank, (node, first) in enumerate(zip(self.nodes, firsts, strict=False)):
            if (node.rank, node.first) != (rank, first):
                raise ValueError(f"topology: node {node.rank} starts at {node.first}, expected node {rank} at {first}")

    @classmethod
    def uniform(
        cls, num_nodes: int = 1, accelerators_per_node: int = 8, kind: str = "emulated", memory_bytes: int = 0
    ) -> Topology:
        """Make nodes that are all alike."""
        return cls.uneven([accelerators_per_node] * num_nodes, kind, memory_bytes)

    @classmethod
    def uneven(cls, accelerators: Sequence[int], kind: str = "emulated", memory_bytes: int = 0) -> Topology:
        """Make one node per entry, with that many accelerators."""
        nodes: list[Node] = []
        for rank, count in enumerate(accelerators):
            first = nodes[-1].numbers.stop if nodes else 0
            nodes.append(Node(rank=rank, accelerators=count, first=first, kind=kind, memory_bytes=memory_bytes))
        return cls(tuple(nodes))

    @property
    def topology(self) -> Topology:
        """Itself, so that it stands for a cluster where only its machines matter."""
        return self

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def num_accelerators(self) -> int:
        return self.nodes[-1].numbers.stop

    @property
    def all(self) -> Ranges:
        return Ranges.of([range(self.num_accelerators)])

    def node_of(self, accelerator: int) -> Node:
        """Return the node that holds a global accelerator number. Raises IndexError when there is none."""
        if not 0 <= accelerator < self.num_accelerators:
            raise IndexError(f"accelerator {accelerator} of {self.num_accelerators}")
        # A node without accelerators starts where the next one does; bisect_right passes over it.
        return self.nodes[bisect_right(self.nodes, accelerator, key=attrgetter("first")) - 1]

    def parts(self, window: range) -> Iterator[tuple[Node, range]]:
        """Yield the nodes that hold accelerators of `window`, each with those it holds."""
        for node in self.nodes[self.node_of(window.start).rank :]:
            if node.first >= window.stop:
                return
            if part := overlap(node.numbers, window):
                yield node, part

    def describe(self) -> str:
        """Write `8 accelerators, 0-7 (1 node x 8)`."""
        return describe_counts("accelerator", [n.accelerators for n in self.nodes])


def describe_counts(noun: str, counts: Sequence[int]) -> str:
    """Write how many there are, their numbers, and how many each node has: `8 accelerators, 0-7 (1 node x 8)`."""
    total = sum(counts)
    shape = f" x {counts[0]}" if len(set(counts)) == 1 else ": " + " + ".join(map(str, counts[:8]))
    shape = f"{len(counts)} node{'s' * (len(counts) != 1)}{shape}" + " + ..." * (len({*counts}) > 1 and len(counts) > 8)
    numbers = show_range(range(total)) if total else "no number"
    return f"{total} {noun}{'s' * (total != 1)}, {numbers} ({shape})"
