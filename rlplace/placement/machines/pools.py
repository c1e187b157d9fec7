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
from collections.abc import Mapping, Sequence
from operator import itemgetter

from rlplace.placement.machines.ranges import Ranges
from rlplace.placement.machines.topology import Node, Topology, describe_counts

WHOLE_CLUSTER = "cluster"  # the node group every node is in
ANY_NODE = "node"  # the node group whose numbers are the ranks of the nodes
ACCELERATOR, NODE = "accelerator", "node"  # nouns


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HardwareItem:
    """One piece of hardware that is no accelerator, such as a robot."""

    number: int  # within its node group
    node: int
    type: str
    config: Mapping[str, object]  # the block of keys as written


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Neighbouring numbers of a pool that one rank may hold together: on one node, of one product."""

    first: int  # in the pool
    count: int
    node: int
    base: int  # global number of the first accelerator; meaningless where the pool counts something else
    node_group: str = WHOLE_CLUSTER

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """Numbers 0..count-1, at least one, and where each of them is. Lookups cost the logarithm of the nodes."""

    label: str  # the node group or groups as written
    noun: str  # what one number stands for
    intervals: tuple[Interval, ...]  # ascending, without gaps
    items: tuple[HardwareItem, ...] = ()  # by number, where the pool counts hardware
    _firsts: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)
    _runs: tuple[tuple[int, int, int], ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        runs: list[tuple[int, int, int]] = []  # (first, base, count) of intervals, joined where both numberings go on
        for interval in self.intervals if self.holds_accelerators else ():
            first, base, count = runs[-1] if runs else (0, -1, 0)
            if base + count == interval.base:
                runs[-1] = (first, base, count + interval.count)
            else:
                runs.append((interval.first, interval.base, interval.count))
        object.__setattr__(self, "_firsts", tuple(s.first for s in self.intervals))
        object.__setattr__(self, "_runs", tuple(runs))

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
        return self.intervals[bisect_right(self._firsts, number) - 1]

    def intervals_in(self, window: range) -> tuple[Interval, ...]:
        """Return the intervals that hold any number of `window`, ascending."""
        start = bisect_right(self._firsts, window.start) - 1
        return self.intervals[start : bisect_right(self._firsts, window.stop - 1)]

    def cut(self, numbers: range, each: int) -> Interval | None:
        """Return the first interval that begins inside a rank when every rank holds `each` of `numbers`."""
        for interval in self.intervals_in(numbers)[1:]:
            if (interval.first - numbers.start) % each:
                return interval
        return None

    def outside(self, numbers: range) -> tuple[tuple[range, range], ...]:
        """Return (numbers, the global accelerators they stand for) in pieces that are ranges on both sides."""
        pieces = []
        at = max(0, bisect_right(self._runs, numbers.start, key=itemgetter(0)) - 1)
        for first, base, count in itertools.islice(self._runs, at, None):
            start, stop = max(numbers.start, first), min(numbers.stop, first + count)
            if start >= stop:
                break
            pieces.append((range(start, stop), range(start - first + base, stop - first + base)))
        return tuple(pieces)

    def inside(self, accelerators: Ranges) -> Ranges:
        """Return the numbers of this pool that stand for any of these global accelerators."""
        return Ranges.of(
            piece
            for first, base, count in self._runs
            for piece in accelerators.within(range(base, base + count)).shifted(first - base).pieces
        )

    def describe(self) -> str:
        """Write `this cluster has 8 accelerators, 0-7 (1 node x 8)`."""
        owner = "this cluster" if self.label in (WHOLE_CLUSTER, ANY_NODE) else f"node group {self.label}"
        if self.noun == NODE:
            return f"{owner} has {self.count} node{'s' * (self.count != 1)}, numbered from 0"
        counts = [sum(s.count for s in group) for _, group in itertools.groupby(self.intervals, key=lambda s: s.node)]
        return f"{owner} has {describe_counts(self.noun, counts)}"


def accelerator_pool(nodes: Sequence[Node], label: str = WHOLE_CLUSTER) -> Pool:
    """Count the accelerators of `nodes`, in this order."""
    intervals: list[Interval] = []
    first = 0
    for node in nodes:
        base = node.first
        for run in node.alike:
            intervals.append(Interval(first=first, count=run.count, node=node.rank, base=base, node_group=label))
            first += run.count
            base += run.count
    return Pool(label, ACCELERATOR, tuple(intervals))


def node_pool(nodes: Sequence[Node], label: str = ANY_NODE) -> Pool:
    """Count the nodes themselves."""
    intervals = (Interval(first=i, count=1, node=n.rank, base=n.first, node_group=label) for i, n in enumerate(nodes))
    return Pool(label, NODE, tuple(intervals))


def hardware_pool(items: Sequence[HardwareItem], label: str) -> Pool:
    """Count hardware items of one type, which must be numbered through and lie together by node."""
    groups = [(node, list(group)) for node, group in itertools.groupby(items, key=lambda item: item.node)]
    intervals = (
        Interval(first=group[0].number, count=len(group), node=node, base=0, node_group=label) for node, group in groups
    )
    return Pool(label, items[0].type, tuple(intervals), tuple(items))


def joined_pool(pools: Sequence[Pool], label: str) -> Pool:
    """Join pools one after the other; they must count the same thing."""
    intervals: list[Interval] = []
    items: list[HardwareItem] = []
    first = 0
    for pool in pools:
        intervals += [dataclasses.replace(s, first=s.first + first) for s in pool.intervals]
        items += [dataclasses.replace(item, number=item.number + first) for item in pool.items]
        first += pool.count
    return Pool(label, pools[0].noun, tuple(intervals), tuple(items))


def whole_cluster(topology: Topology) -> Pool:
    """Count what a placement without a node group counts: all accelerators, or the nodes where no node has one."""
    if not topology.num_accelerators:
        return node_pool(topology.nodes, WHOLE_CLUSTER)
    return accelerator_pool(topology.nodes)
