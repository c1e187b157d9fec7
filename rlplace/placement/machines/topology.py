"""The machines as they are: nodes, their accelerators, both ways of numbering them, and sets of such numbers.

A topology is declared in the config (`nodes`) or counted on this machine; it is the same type each time. Declared
machines need not exist, so that any cluster is planned on a laptop; the nodes that Ray lists are put in the same order.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rlplace.codes import problem
from rlplace.errors import PlacementError, Problem, Source, source_of
from rlplace.placement.machines.products import memory_of
from rlplace.units import counted, plural

if TYPE_CHECKING:
    from rlplace.config.blocks.machines import NodeConfig

PATH = "cluster.nodes"
_MOST_COUNTS = 8  # nodes whose accelerators are counted one by one in a text
RANK_LABEL = "rlplace-node-rank"  # `ray start --labels rlplace-node-rank=3`
HEAD = "node:__internal_head__"
# When the job starts, a declared node is Ray's node of the same rank: see `in_rank_order`.
DECLARED = (
    "as declared; Ray's by label rlplace-node-rank, else head first, others by address"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Ranges:
    """A set of whole numbers, stored as ascending ranges (`pieces`) that do not touch.

    The time of operations grows with the number of ranges, not of numbers.
    """

    pieces: tuple[range, ...] = ()

    @classmethod
    def of(cls, numbers: Iterable[range]) -> Ranges:
        """Return the union of several ranges, which may be in any order and may overlap."""
        merged: list[range] = []
        for piece in sorted(filter(None, numbers), key=attrgetter("start")):
            if merged and piece.start <= merged[-1].stop:
                merged[-1] = range(merged[-1].start, max(merged[-1].stop, piece.stop))
            else:
                merged.append(piece)
        return cls(tuple(merged))

    def __iter__(self) -> Iterator[int]:
        for piece in self.pieces:
            yield from piece

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self.pieces, number, key=attrgetter("start"))
        return at > 0 and number in self.pieces[at - 1]

    def __and__(self, other: Ranges) -> Ranges:
        both: list[range] = []
        for piece in other.pieces:
            both += self.within(piece).pieces
        return Ranges(tuple(both))

    def __or__(self, other: Ranges) -> Ranges:
        return Ranges.of((*self.pieces, *other.pieces))

    def __sub__(self, other: Ranges) -> Ranges:
        if not self.pieces:
            return self
        # The gaps between the pieces of `other`, out to the ends of this set.
        edges = [self.pieces[0].start]
        for piece in other.pieces:
            edges += (piece.start, piece.stop)
        edges.append(self.pieces[-1].stop)
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return self & Ranges.of(range(a, b) for a, b in gaps)

    def within(self, window: range) -> Ranges:
        """Return the numbers of the set that are in `window`. They are found by bisection over the ranges."""
        at = bisect_right(self.pieces, window.start, key=attrgetter("stop"))
        end = bisect_left(self.pieces, window.stop, key=attrgetter("start"))
        return Ranges(tuple(overlap(piece, window) for piece in self.pieces[at:end]))

    def shifted(self, by: int) -> Ranges:
        return Ranges(tuple(range(p.start + by, p.stop + by) for p in self.pieces))

    def __str__(self) -> str:
        """Return the numbers as canonical text, such as `0-2,5`."""
        return ",".join(map(show_range, self.pieces))


def overlap(a: range, b: range) -> range:
    """Return the numbers that are in both ranges; the result may be empty."""
    return range(max(a.start, b.start), min(a.stop, b.stop))


def show_range(piece: range) -> str:
    """Return a range as text, such as `3` or `0-7`, both ends included."""
    if len(piece) == 1:
        return str(piece.start)
    return f"{piece.start}-{piece.stop - 1}"


def named(noun: str, piece: range, one: str = "", several: str = "are") -> str:
    """Return a range with its noun as text, such as `accelerator 3` or `accelerators 0-7`.

    `one`: a verb to add after a single number; "": never add a verb. `several`: the verb to add after several numbers.
    """
    text = f"{plural(len(piece), noun)} {show_range(piece)}"
    if not one:
        return text
    if len(piece) == 1:
        return f"{text} {one}"
    return f"{text} {several}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Neighbouring accelerators of one node that are all of one model.

    `count`: how many accelerators. `product`: the accelerator model. `memory_bytes`: memory of one accelerator; 0: not
    known.
    """

    count: int
    product: str
    memory_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine. Its n accelerators have local numbers 0..n-1 and global numbers `first`..`first + n - 1`.

    `accelerators`: count of accelerators. `kind`: "cuda" or "emulated". `memory_bytes`: memory of one accelerator, the
    least where they differ; 0: not known. `product`: model of the accelerators, such as "H100"; "": not known.
    `nvlink_gb_per_s`: rate between two accelerators. `pcie_gb_per_s`: rate to host memory. `network_gb_per_s`: rate of
    each accelerator to other nodes. Rates of 0 are not known. `runs`: only if the node has accelerators of several
    models.
    """

    rank: int
    accelerators: int
    first: int
    kind: str = "emulated"  # "cuda" or "emulated"
    # Of one accelerator, the least where they differ; 0: not known.
    memory_bytes: int = 0
    product: str = ""  # of the accelerators, such as "H100"; "" where not known
    host_memory_bytes: int = 0  # 0: not known
    # Declared rates, 0 where not known: between two accelerators, to the host's memory, and
    # of each accelerator to other nodes.
    nvlink_gb_per_s: float = 0.0
    pcie_gb_per_s: float = 0.0
    network_gb_per_s: float = 0.0
    runs: tuple[Run, ...] = ()  # only where the accelerators are not all alike

    @property
    def numbers(self) -> range:
        """The numbers in the cluster of this node's accelerators."""
        return range(self.first, self.first + self.accelerators)

    @property
    def alike(self) -> tuple[Run, ...]:
        """The accelerators of this node in order, as runs of the same model; () for a node without accelerators."""
        if self.runs:
            return self.runs
        if not self.accelerators:
            return ()
        one = Run(
            count=self.accelerators,
            product=self.product,
            memory_bytes=self.memory_bytes,
        )
        return (one,)


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """All nodes in rank order. Accelerators are numbered over all nodes: first all of node 0, then all of node 1.

    `order`: the reason for the ranks of the nodes, in words.
    """

    nodes: tuple[Node, ...]
    # The reason for the ranks of the nodes, in words.
    order: str = dataclasses.field(default=DECLARED, compare=False)

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("topology: a cluster has at least one node")
        first = 0
        for rank, node in enumerate(self.nodes):
            if (node.rank, node.first) != (rank, first):
                found = f"node {node.rank} starts at {node.first}"
                raise ValueError(f"topology: {found}, expected node {rank} at {first}")
            first += node.accelerators

    @classmethod
    def uniform(
        cls,
        num_nodes: int = 1,
        accelerators_per_node: int = 8,
        kind: str = "emulated",
        memory_bytes: int = 0,
    ) -> Topology:
        """Return a topology whose nodes all have the same number of accelerators.

        `kind`: "cuda" or "emulated". `memory_bytes`: memory of one accelerator; 0: not known.
        """
        return cls.uneven([accelerators_per_node] * num_nodes, kind, memory_bytes)

    @classmethod
    def uneven(
        cls, accelerators: Sequence[int], kind: str = "emulated", memory_bytes: int = 0
    ) -> Topology:
        """Return a topology with one node for each entry of `accelerators`, which is the node's number of accelerators.

        `kind`: "cuda" or "emulated". `memory_bytes`: memory of one accelerator; 0: not known.
        """
        nodes: list[Node] = []
        first = 0
        for rank, count in enumerate(accelerators):
            node = Node(
                rank=rank,
                accelerators=count,
                first=first,
                kind=kind,
                memory_bytes=memory_bytes,
            )
            nodes.append(node)
            first += count
        return cls(tuple(nodes))

    @property
    def topology(self) -> Topology:
        """This topology itself. With this attribute, a topology can be passed where a cluster is expected."""
        return self

    @property
    def memory_bytes(self) -> list[int]:
        """The memory in bytes of each accelerator, by its number in the cluster."""
        sizes: list[int] = []
        for node in self.nodes:
            sizes += [node.memory_bytes] * node.accelerators
        return sizes

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
        """Return the node that has an accelerator. Raise IndexError if there is no such accelerator.

        `accelerator`: its number in the cluster.
        """
        if not 0 <= accelerator < self.num_accelerators:
            raise IndexError(f"accelerator {accelerator} of {self.num_accelerators}")
        # A node without accelerators starts where the next one does; bisect_right passes over it.
        after = bisect_right(self.nodes, accelerator, key=attrgetter("first"))
        return self.nodes[after - 1]

    def parts(self, window: range) -> Iterator[tuple[Node, range]]:
        """Yield (node, its accelerators in `window`) for each node that has accelerators in `window`.

        All accelerators are numbered over the cluster.
        """
        for node in self.nodes[self.node_of(window.start).rank :]:
            if node.first >= window.stop:
                return
            part = overlap(node.numbers, window)
            if part:
                yield node, part

    def describe(self) -> str:
        """Return the size of the cluster in words: `8 accelerators, 0-7 (1 node x 8)`."""
        return describe_counts("accelerator", [n.accelerators for n in self.nodes])


def describe_counts(noun: str, counts: Sequence[int]) -> str:
    """Return a total in words, with its numbers and the count of each node: `8 accelerators, 0-7 (1 node x 8)`.

    `noun`: what is counted. `counts`: how many each node has.
    """
    total = sum(counts)
    numbers = "no number"
    if total:
        numbers = show_range(range(total))
    if len(set(counts)) == 1:
        each = f" x {counts[0]}"
    else:
        each = ": " + " + ".join(map(str, counts[:_MOST_COUNTS]))
        if len(counts) > _MOST_COUNTS:
            each += " + ..."
    nodes = counted(len(counts), "node")
    return f"{counted(total, noun)}, {numbers} ({nodes}{each})"


def declare_topology(
    nodes: Sequence[NodeConfig],
    kind: str = "cuda",
    num_nodes: int | None = None,
    sources: Mapping[str, Source] | None = None,
    accelerators_per_node: int | None = None,
    *,
    by: str = PATH,
) -> Topology:
    """Return the topology of declared machines, ordered by rank; if they have no ranks, in the order of the config.

    `kind`: how the accelerators will be driven, "cuda" or "emulated". `num_nodes`, `accelerators_per_node`: counts that
    are also in the config, and are checked here; None: not in the config. `sources`: key path -> the place in the
    config where it was written. `by`: where the machines are declared, in words. Raise PlacementError if a declaration
    or a count is wrong.
    """
    problems = _check_nodes(nodes, num_nodes, accelerators_per_node, sources or {}, by)
    if problems:
        raise PlacementError(problems)
    made: list[Node] = []
    first = 0
    for declared in sorted(nodes, key=lambda n: n.rank or 0):
        # One entry may stand for several alike machines.
        for _ in range(declared.count):
            node = _declared(declared, len(made), first, kind)
            made.append(node)
            first = node.numbers.stop
    order = f"as written in {by}"
    if nodes[0].rank is not None:
        order = f"by the ranks given in {by}"
    return Topology(tuple(made), order)


def _declared(declared: NodeConfig, rank: int, first: int, kind: str) -> Node:
    """Return one machine of an entry of `cluster.nodes`.

    If the entry declares no memory, the memory of its accelerator model is used. `declared`: the entry. `rank`: rank of
    the machine. `first`: number in the cluster of its first accelerator. `kind`: "cuda" or "emulated".
    """
    runs = []
    for mixed in declared.mixed:
        memory = mixed.memory or memory_of(mixed.product)
        run = Run(count=mixed.count, product=mixed.product, memory_bytes=memory)
        runs.append(run)
    # Where the accelerators differ, the least memory counts for all, and every product is named.
    accelerators = declared.accelerators
    memory_bytes = declared.memory or memory_of(declared.product)
    product = declared.product
    if runs:
        accelerators = sum(run.count for run in runs) or accelerators
        memory_bytes = min(run.memory_bytes for run in runs)
        product = " + ".join(run.product for run in runs) or product
    return Node(
        rank=rank,
        accelerators=accelerators,
        first=first,
        kind=kind,
        memory_bytes=memory_bytes,
        product=product,
        host_memory_bytes=declared.host_memory,
        nvlink_gb_per_s=declared.nvlink_gb_per_s,
        pcie_gb_per_s=declared.pcie_gb_per_s,
        network_gb_per_s=declared.network_gb_per_s,
        runs=tuple(runs),
    )


def _check_nodes(
    nodes: Sequence[NodeConfig],
    num_nodes: int | None,
    each: int | None,
    sources: Mapping[str, Source],
    by: str,
) -> list[Problem]:
    """Return the problems of declared machines: wrong ranks, or counts that contradict each other.

    `num_nodes`, `each`: number of nodes, and of accelerators per node, if the config has these keys; else None. `by`:
    where the machines are declared, in words.
    """
    problems: list[Problem] = []

    # Ranks: of all entries or of none, and without gaps.
    without = [i for i, node in enumerate(nodes) if node.rank is None]
    if not without:
        wrong = _first_wrong_rank(nodes)
        if wrong is not None:
            i, expected = wrong
            problems.append(
                problem(
                    "node-ranks",
                    f"{PATH}[{i}].rank",
                    error="gap",
                    rank=nodes[i].rank,
                    expected=expected,
                )
            )
    elif len(without) < len(nodes):
        key = f"{PATH}[{without[0]}]"
        problems.append(problem("node-ranks", key, error="without"))

    # Mixed accelerators of an entry add up to its accelerators.
    for i, node in enumerate(nodes):
        count = node.accelerators
        mixed = sum(run.count for run in node.mixed)
        if node.mixed and count not in (0, mixed):
            problems.append(
                problem(
                    "mixed-count",
                    f"{PATH}[{i}].accelerators",
                    f"accelerators: {count}",
                    count=count,
                    mixed=mixed,
                )
            )

    # The two counts of the cluster block, where they are given.
    total = sum(node.count for node in nodes)
    if num_nodes not in (None, total):
        error = "nodes"
        if by == PATH and len(nodes) == 1:
            error = "nodes-of-one-entry"
        problems.append(
            problem(
                "node-count",
                "cluster.num_nodes",
                f"num_nodes: {num_nodes}",
                error=error,
                count=num_nodes,
                by=by,
                total=total,
            )
        )
    counts = set()
    for node in nodes:
        counts.add(sum(run.count for run in node.mixed) or node.accelerators)
    if each is not None and counts != {each}:
        error = "accelerators"
        if by == PATH and len(nodes) == 1 and not nodes[0].mixed:
            error = "accelerators-of-one-entry"
        problems.append(
            problem(
                "node-count",
                "cluster.accelerators_per_node",
                f"accelerators_per_node: {each}",
                error=error,
                count=each,
                by=by,
                declared=", ".join(map(str, sorted(counts))),
            )
        )
    return [
        dataclasses.replace(found, source=source_of(found.key, sources))
        for found in problems
    ]


def _first_wrong_rank(nodes: Sequence[NodeConfig]) -> tuple[int, int] | None:
    """Return (index of the entry with the first wrong rank, the expected rank); None if all ranks are right."""
    expected = 0
    for i in sorted(range(len(nodes)), key=lambda i: nodes[i].rank or 0):
        if nodes[i].rank != expected:
            return i, expected
        expected += nodes[i].count
    return None


def in_rank_order(nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the living nodes that Ray reports, in the order of their ranks.

    The label `rlplace-node-rank` of a node is its rank. If no node has this label, the head node comes first, then all
    other nodes by address. Raise PlacementError if only some nodes have the label, if a label is wrong, or if no node
    is alive.
    """
    key = "ray.address"
    alive = [node for node in nodes if node.get("Alive", True)]
    if not alive:
        raise PlacementError([problem("no-node", key, "[]")])
    labels = [_label_of(node) for node in alive]
    if not any(label is not None for label in labels):
        return sorted(alive, key=_head_first)

    # The rank of a node that was lost is free until another has it: the nodes after it keep theirs.
    gone = {str(_label_of(node)) for node in nodes if not node.get("Alive", True)}
    free = gone - set(map(str, labels))
    count = len(alive) + sum(label.isdecimal() for label in free)
    ranks: dict[int, Mapping[str, Any]] = {}
    problems = list[Problem]()
    for node, label in zip(alive, map(str, labels), strict=True):
        if label.isdecimal() and int(label) < count and int(label) not in ranks:
            ranks[int(label)] = node
            continue
        problems.append(
            problem(
                "node-ranks",
                key,
                label,
                error="label",
                node=node.get("NodeManagerAddress", "?"),
                rank=label,
                last=count - 1,
                label=RANK_LABEL,
                free=len(ranks),
            )
        )
    if problems:
        raise PlacementError(problems)
    return [ranks[rank] for rank in sorted(ranks)]


def _label_of(node: Mapping[str, Any]) -> str | None:
    """Return the rank in the label of a node that Ray reports, as text; None if the node has no such label."""
    label: str | None = (node.get("Labels") or {}).get(RANK_LABEL)
    return label


def _head_first(
    node: Mapping[str, Any],
) -> tuple[bool, bool, tuple[int, ...], str, int]:
    """Return the sort key of a node that Ray reports: the head comes first, then numeric addresses, then host names."""
    address = str(node.get("NodeManagerAddress", ""))
    numbers = tuple(int(part) for part in address.split(".") if part.isdecimal())
    is_name = len(numbers) < address.count(".") + 1
    if is_name:
        numbers = ()
    head = HEAD in (node.get("Resources") or {})
    return not head, is_name, numbers, address, int(node.get("NodeManagerPort", 0))
