"""Pools: the things that a placement numbers, accelerators, nodes or other hardware of some nodes, in a fixed order.

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
# Nouns: the things that a pool numbers.
ACCELERATOR = "accelerator"
NODE = "node"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HardwareItem:
    """A piece of hardware other than an accelerator, such as a robot.

    `config`: its block of the config, as written. `number`: its index within its node group.
    """

    node: int
    type: str
    # The block of keys as written. Not hashed: slots with hardware are keys of mappings
    config: Mapping[str, object] = dataclasses.field(hash=False)
    number: int = 0  # within its node group


class Interval(NamedTuple):
    """Neighbouring numbers of a pool that one rank may have together.

    They are on one node and, if they are accelerators, of one accelerator model. `numbers`: the numbers in the pool.
    `node`: the node. `base`: index in the cluster of the first accelerator. `node_group`: label of the group.
    """

    numbers: range  # in the pool
    node: int
    # Global number of the first accelerator; meaningless where the pool counts other things.
    base: int
    node_group: str

    @property
    def first(self) -> int:
        return self.numbers.start


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """The numbers 0..count-1 of accelerators, nodes or other hardware, and the place of each number.

    A pool has at least one number. A lookup takes time logarithmic in the number of nodes. `label`: the node group or
    groups. `noun`: what a number stands for, such as "accelerator". `intervals`: in ascending order, without gaps.
    `items`: by number, the hardware items of a pool of hardware.
    """

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
        """Return a pool whose numbers follow the given order of the intervals and items, from 0 on."""
        numbered: list[Interval] = []
        first = 0
        for interval in intervals:
            numbers = range(first, first + len(interval.numbers))
            numbered.append(interval._replace(numbers=numbers))
            first = numbers.stop
        counted_items = []
        for number, item in enumerate(items):
            counted_items.append(dataclasses.replace(item, number=number))
        return cls(label, noun, tuple(numbered), tuple(counted_items))

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
        """Return the interval of `number`, which must be a number of the pool."""
        return self.intervals_in(range(number, number + 1))[0]

    def intervals_in(self, window: range) -> tuple[Interval, ...]:
        """Return the intervals that contain numbers of `window`, in ascending order."""
        first = attrgetter("first")
        start = bisect_right(self.intervals, window.start, key=first)
        stop = bisect_right(self.intervals, window.stop - 1, key=first)
        return self.intervals[start - 1 : stop]

    def cut(self, numbers: range, each: int) -> Interval | None:
        """Return the first interval that begins within the numbers of one rank; None if each rank lies on one interval.

        `numbers`: numbers of the pool, given to ranks in order. `each`: how many numbers each rank has.
        """
        for interval in self.intervals_in(numbers)[1:]:
            if (interval.first - numbers.start) % each:
                return interval
        return None

    def outside(self, numbers: range) -> tuple[tuple[range, range], ...]:
        """Return pairs (numbers in this pool, numbers in the cluster) of the same accelerators.

        `numbers`: numbers in this pool. Both entries of a pair are ranges, and there are as few pairs as possible. The
        result is () if the pool has no accelerators.
        """
        if not self.holds_accelerators:
            return ()
        pieces: list[tuple[range, range]] = []
        for interval in self.intervals_in(numbers):
            piece = overlap(interval.numbers, numbers)
            start = piece.start - interval.first + interval.base
            # Join it to the piece before where both numberings go on.
            if pieces and pieces[-1][1].stop == start:
                before, accelerators = pieces.pop()
                piece = range(before.start, piece.stop)
                start = accelerators.start
            pieces.append((piece, range(start, start + len(piece))))
        return tuple(pieces)

    def inside(self, accelerators: Ranges) -> Ranges:
        """Return the numbers that `accelerators` have in this pool.

        `accelerators`: numbers in the cluster. Accelerators that are not in the pool are left out.
        """
        pieces: list[range] = []
        for interval in self.intervals:
            start = interval.base
            window = range(start, start + len(interval.numbers))
            here = accelerators.within(window)
            pieces += here.shifted(interval.first - start).pieces
        return Ranges.of(pieces)

    def describe(self) -> str:
        """Return the size of the pool in words: `this cluster has 8 accelerators, 0-7 (1 node x 8)`."""
        owner = f"node group {self.label}"
        if self.label in (WHOLE_CLUSTER, ANY_NODE):
            owner = "this cluster"
        if self.noun == NODE:
            return f"{owner} has {counted(self.count, 'node')}, numbered from 0"
        counts = []
        for _, of_node in itertools.groupby(self.intervals, key=lambda i: i.node):
            counts.append(sum(len(interval.numbers) for interval in of_node))
        return f"{owner} has {describe_counts(self.noun, counts)}"


def accelerator_pool(nodes: Iterable[Node], label: str = WHOLE_CLUSTER) -> Pool:
    """Return the pool of all accelerators of `nodes`, in the order of `nodes`."""
    intervals: list[Interval] = []
    for node in nodes:
        base = node.first
        for run in node.alike:
            intervals.append(Interval(range(run.count), node.rank, base, label))
            base += run.count
    return Pool.of(label, ACCELERATOR, intervals)


def node_pool(nodes: Iterable[Node], label: str = ANY_NODE) -> Pool:
    """Return a pool whose numbers stand for `nodes`, in their order."""
    intervals = (Interval(range(1), node.rank, node.first, label) for node in nodes)
    return Pool.of(label, NODE, intervals)


def hardware_pool(items: Sequence[HardwareItem], label: str) -> Pool:
    """Return the pool of hardware items, which must be of one type and sorted by node."""
    counts = Counter(item.node for item in items)
    intervals = (Interval(range(n), node, 0, label) for node, n in counts.items())
    return Pool.of(label, items[0].type, intervals, items)


def joined_pool(pools: Sequence[Pool], label: str) -> Pool:
    """Return one pool with the numbers of several pools, one after the other.

    All pools must count the same kind of thing, such as accelerators.
    """
    intervals: list[Interval] = []
    items: list[HardwareItem] = []
    for pool in pools:
        intervals += pool.intervals
        items += pool.items
    return Pool.of(label, pools[0].noun, intervals, items)
