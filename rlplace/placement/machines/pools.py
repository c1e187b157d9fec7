"""What the numbers of a placement count: accelerators, nodes or other hardware of some nodes, in a fixed order.

::

    pool "cluster"      0 .. 15               accelerators of all nodes
    pool "4090"         0 .. 7                accelerators of the nodes in that group: 8 .. 15 of the cluster
    pool "4090,a800"    0 .. 7 | 8 .. 15      one group after the other, as written: 8 .. 15, then 0 .. 7
    pool "node"         0 .. 17               nodes; a component on them holds no accelerator
    pool "franka"       0 .. 1                robots
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from rlplace.placement.machines.topology import Node, Ranges, describe_counts, overlap
from rlplace.units import counted

WHOLE_CLUSTER = "cluster"  # the node group every node is in
ANY_NODE = "node"  # the node group whose numbers are the ranks of the nodes
ACCELERATOR = "accelerator"
NODE = "node"  # nouns


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HardwareItem:
    """One piece of hardware that is no accelerator, such as a robot."""

    node: int
    type: str
    config: Mapping[str, object]  # the block of keys as written
    number: int = 0  # within its node group


class Interval(NamedTuple):
    """Neighbouring numbers of a pool that one rank may hold together: on one node, of one product."""

    numbers: range  # in the pool
    node: int
    base: int  # global number of the first accelerator; meaningless where the pool counts something else
    node_group: str

    @property
    def first(self) -> int:
        return self.numbers.start


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """Numbers 0..count-1, at least one, and where each of them is. Lookups cost the logarithm of the nodes."""

    label: str  # the node group or groups as written
    noun: str  # what one number stands for
    intervals: tuple[Interval, ...]  # ascending, without gaps
    items: tuple[HardwareItem, ...] = ()  # by number, where the pool counts hardware

    @classmethod
    def of(
        cls,
        label: str,
        noun: str,
        intervals: Iterable[Interval],
        items: Iterable[HardwareItem] = (),
    ) -> Pool:
        """Number the intervals and items through."""
        numbered: list[Interval] = []
        for interval in intervals:
            first = numbered[-1].numbers.stop if numbered else 0
            numbered.append(
                interval._replace(numbers=range(first, first + len(interval.numbers)))
            )
        found = (
            dataclasses.replace(item, number=number)
            for number, item in enumerate(items)
        )
        return cls(label, noun, tuple(numbered), tuple(found))

    @property
    def count(self) -> int:
        return self.intervals[-1].numbers.stop

    @property
    def all(self) -> Ranges:
        return Ranges.of([range(self.count)])

    @property
    def nodes(self) -> set[int]:
        return {interval.node for interval in self.intervals}

    @property
    def holds_accelerators(self) -> bool:
        return self.noun == ACCELERATOR

    def interval_of(self, number: int) -> Interval:
        """Return the interval of `number`, which must exist."""
        return self.intervals_in(range(number, number + 1))[0]

    def intervals_in(self, window: range) -> tuple[Interval, ...]:
        """Return the intervals that hold any number of `window`, ascending."""
        start, stop = (
            bisect_right(self.intervals, n, key=attrgetter("first"))
            for n in (window.start, window.stop - 1)
        )
        return self.intervals[start - 1 : stop]

    def cut(self, numbers: range, each: int) -> Interval | None:
        """Return the first interval that begins inside a rank when every rank holds `each` of `numbers`."""
        for interval in self.intervals_in(numbers)[1:]:
            if (interval.first - numbers.start) % each:
                return interval
        return None

    def outside(self, numbers: range) -> tuple[tuple[range, range], ...]:
        """Return (numbers, the global accelerators they stand for) in the fewest pieces that are ranges on both."""
        pieces: list[tuple[range, range]] = []
        for interval in self.intervals_in(numbers) if self.holds_accelerators else ():
            piece = overlap(interval.numbers, numbers)
            start = piece.start - interval.first + interval.base
            if pieces and pieces[-1][1].stop == start:
                before, accelerators = pieces.pop()
                piece = range(before.start, piece.stop)
                start = accelerators.start
            pieces.append((piece, range(start, start + len(piece))))
        return tuple(pieces)

    def inside(self, accelerators: Ranges) -> Ranges:
        """Return the numbers of this pool that stand for any of these global accelerators."""
        return Ranges.of(
            piece
            for i in self.intervals
            for piece in accelerators.within(range(i.base, i.base + len(i.numbers)))
            .shifted(i.first - i.base)
            .pieces
        )

    def describe(self) -> str:
        """Write `this cluster has 8 accelerators, 0-7 (1 node x 8)`."""
        owner = (
            "this cluster"
            if self.label in (WHOLE_CLUSTER, ANY_NODE)
            else f"node group {self.label}"
        )
        if self.noun == NODE:
            return f"{owner} has {counted(self.count, 'node')}, numbered from 0"
        counts = [
            sum(len(s.numbers) for s in group)
            for _, group in itertools.groupby(self.intervals, key=lambda s: s.node)
        ]
        return f"{owner} has {describe_counts(self.noun, counts)}"


def accelerator_pool(nodes: Iterable[Node], label: str = WHOLE_CLUSTER) -> Pool:
    """Count the accelerators of `nodes`, in this order."""
    intervals: list[Interval] = []
    for node in nodes:
        base = node.first
        for run in node.alike:
            intervals.append(Interval(range(run.count), node.rank, base, label))
            base += run.count
    return Pool.of(label, ACCELERATOR, intervals)


def node_pool(nodes: Iterable[Node], label: str = ANY_NODE) -> Pool:
    return Pool.of(
        label,
        NODE,
        (Interval(range(1), node.rank, node.first, label) for node in nodes),
    )


def hardware_pool(items: Sequence[HardwareItem], label: str) -> Pool:
    """Count hardware items of one type, which must lie together by node."""
    counts = Counter(item.node for item in items)
    return Pool.of(
        label,
        items[0].type,
        (Interval(range(n), node, 0, label) for node, n in counts.items()),
        items,
    )


def joined_pool(pools: Sequence[Pool], label: str) -> Pool:
    """Join pools one after the other; they must count the same thing."""
    intervals = (i for pool in pools for i in pool.intervals)
    items = (i for pool in pools for i in pool.items)
    return Pool.of(label, pools[0].noun, intervals, items)
