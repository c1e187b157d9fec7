"""Which ranks of a component sit on which numbers of its pool, and the canonical text for it."""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Iterable

from rlplace.config.yaml_text import quote
from rlplace.placement.machines.pools import ANY_NODE, WHOLE_CLUSTER, Interval, Pool
from rlplace.placement.machines.topology import Ranges, overlap, show_range

CPU = "cpu"  # the placement of one process of the first node, on no accelerator


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive ranks, spread evenly over neighbouring numbers of a pool (mostly accelerators).

    Either each rank has one or more numbers, or several ranks share a number. `accelerators`: the numbers. `span`:
    (first column, column after the last) of the segment in the placement text.
    """

    accelerators: range
    ranks: range
    # Columns in the written text.
    span: tuple[int, int] = dataclasses.field(default=(0, 0), compare=False)

    @property
    def accelerators_per_rank(self) -> int:
        """The number of accelerators of each rank, at least 1. It is also 1 if several ranks share an accelerator."""
        return max(1, len(self.accelerators) // len(self.ranks))

    @property
    def ranks_per_accelerator(self) -> int:
        """The number of ranks on each accelerator, at least 1. It is also 1 if a rank has several accelerators."""
        return max(1, len(self.ranks) // len(self.accelerators))

    def accelerators_of(self, rank: int) -> range:
        """Return the accelerators of rank `rank`, which must be a rank of this segment."""
        each = self.accelerators_per_rank
        at = (rank - self.ranks.start) // self.ranks_per_accelerator
        first = self.accelerators.start + at * each
        return range(first, first + each)

    def moved(self, accelerators: int, ranks: int) -> Segment:
        """Return the segment with `accelerators` added to its accelerator numbers and `ranks` added to its ranks.

        Both amounts may be negative.
        """
        here = self.accelerators
        ours = self.ranks
        return Segment(
            accelerators=range(here.start + accelerators, here.stop + accelerators),
            ranks=range(ours.start + ranks, ours.stop + ranks),
        )

    def cut_to(self, numbers: range) -> Segment:
        """Return the part of the segment on `numbers`.

        The numbers must lie inside the segment, and no rank may lie partly outside of them.
        """
        each = self.accelerators_per_rank
        sharing = self.ranks_per_accelerator
        before = numbers.start - self.accelerators.start
        start = before // each * sharing
        count = len(numbers) // each * sharing
        ranks = self.ranks[start : start + count]
        return Segment(accelerators=numbers, ranks=ranks, span=self.span)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The rule that spreads ranks over numbers: several numbers for each rank, or several ranks on each number.

    `each`: numbers per rank. `sharing`: ranks per number. At least one of the two is 1.
    """

    each: int = 1  # accelerators_per_rank
    sharing: int = 1  # ranks_per_accelerator; one of the two is 1

    @property
    def is_plain(self) -> bool:
        """Whether there is exactly one rank on each number."""
        return self.each == self.sharing == 1

    def over(self, pieces: Iterable[range]) -> tuple[Segment, ...]:
        """Return one segment for each piece of numbers, with consecutive ranks from 0 on.

        `pieces`: the length of each must be a multiple of `each`.
        """
        segments: list[Segment] = []
        rank = 0
        for piece in pieces:
            ranks = range(rank, rank + len(piece) // self.each * self.sharing)
            segments.append(Segment(accelerators=piece, ranks=ranks))
            rank = ranks.stop
        return tuple(segments)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The parallel sizes of a component. They are checked against the component's placement.

    `tensor_parallel_size`: accelerators that split one copy of the model. `context_parallel_size`: copies that divide
    the tokens of the same samples. `data_parallel_size`: number of copies; None: as many as there is room for.
    `across_nodes`: whether one copy may lie on two nodes.
    """

    # Accelerators that hold one copy of the model's layers in slices.
    tensor_parallel_size: int = 1
    # Copies that divide the tokens of the same samples.
    context_parallel_size: int = 1
    # Copies; None: as many as there is room for.
    data_parallel_size: int | None = None
    across_nodes: bool = False  # whether one copy may lie on two nodes

    @property
    def ranks(self) -> int:
        """The number of accelerators that process the same samples: tensor-parallel size x context-parallel size."""
        return self.tensor_parallel_size * self.context_parallel_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankLocations:
    """The place of every rank of a component, as arrays indexed by rank: 20 bytes for each rank.

    `node`: index of the node. `first`: index in the cluster of the rank's first accelerator; -1: it has none. `count`:
    how many accelerators the rank has; their indices are consecutive. `process`: the components whose ranks share
    processes, such as "env+rollout"; "": none.
    """

    node: array[int]
    first: array[int]  # global number of the rank's first accelerator; -1: it has none
    count: array[int]  # number of its accelerators, which are neighbours
    process: str = ""  # "env+rollout": they share processes, rank by rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComponentSpec:
    """The placement of one component. Its ranks are 0..world_size-1, each in one segment (piece `accelerators:ranks`).

    `pool`: what the numbers count. `written`: the segments in numbers of the pool, by rank. `key`: key path in the
    config. `text`: the placement text as written. `parallel`: its parallel sizes. `process`: the components whose ranks
    share processes, such as "env+rollout"; "": each rank has a process of its own. `lent_ranks`: how many of the last
    ranks are on accelerators that `lenders`, other components, lend.
    """

    name: str
    pool: Pool
    written: tuple[Segment, ...]  # in the pool's numbers, by rank
    key: str = ""  # key path in the config
    text: str = ""  # verbatim
    parallel: Parallel = Parallel()
    # "env+rollout": they share processes, rank by rank; "": each rank has its own.
    process: str = ""
    # The last ranks, which are on accelerators of other components
    lent_ranks: int = 0
    lenders: tuple[str, ...] = ()  # these other components

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments in accelerator numbers of the cluster.

        A segment is split where neighbouring numbers of the pool are not neighbours in the cluster. No rank is split.
        """
        found = []
        for segment in self.written:
            for numbers, accelerators in self.pool.outside(segment.accelerators):
                part = segment.cut_to(numbers)
                found.append(dataclasses.replace(part, accelerators=accelerators))
        return tuple(found)

    @functools.cached_property
    def accelerators(self) -> Ranges:
        """The component's accelerators, numbered over the cluster; empty for a component on nodes or other hardware."""
        return Ranges.of(s.accelerators for s in self.segments)

    @property
    def own_ranks(self) -> range:
        """The ranks on accelerators that the component's own placement names."""
        return range(self.world_size - self.lent_ranks)

    @functools.cached_property
    def own_accelerators(self) -> Ranges:
        """The accelerators that the component's own placement names, numbered over the cluster."""
        return self._accelerators_of(self.own_ranks)

    @functools.cached_property
    def lent_accelerators(self) -> Ranges:
        """The accelerators that other components lend, numbered over the cluster; empty if none are lent."""
        return self._accelerators_of(range(self.own_ranks.stop, self.world_size))

    def _accelerators_of(self, ranks: range) -> Ranges:
        """Return the accelerators of segments whose first rank is in `ranks`. No segment has own and lent ranks."""
        return Ranges.of(
            s.accelerators for s in self.segments if s.ranks.start in ranks
        )

    @functools.cached_property
    def locations(self) -> RankLocations:
        """Node, first accelerator and number of accelerators of each rank, as arrays."""
        node = array("l")
        first = array("l")
        count = array("i")
        for segment in self.written:
            each = segment.accelerators_per_rank
            sharing = segment.ranks_per_accelerator
            for interval, numbers in parts(segment, self.pool):
                node += array("l", [interval.node]) * (len(numbers) // each * sharing)
        for segment in self.segments:
            each = segment.accelerators_per_rank
            sharing = segment.ranks_per_accelerator
            for accelerator in segment.accelerators[::each]:
                first.extend([accelerator] * sharing)
            count += array("i", [each]) * len(segment.ranks)
        if not self.segments:
            first = array("l", [-1]) * len(node)
            count = array("i", [0]) * len(node)
        return RankLocations(node=node, first=first, count=count, process=self.process)

    @property
    def node_group(self) -> str:
        return self.pool.label

    @property
    def world_size(self) -> int:
        return sum(len(s.ranks) for s in self.written)

    @property
    def num_copies(self) -> int:
        """The number of whole copies of the model on the component's accelerators, at least 1.

        For a rollout, it is the number of engines.
        """
        return max(1, len(self.accelerators) // self.accelerators_per_copy)

    @property
    def data_parallel(self) -> int:
        """The number of parts into which a batch of samples is divided among the copies of the model, at least 1.

        Copies that divide the tokens of the same samples count as one.
        """
        return max(1, self.num_copies // self.parallel.context_parallel_size)

    @property
    def accelerators_per_copy(self) -> int:
        """The number of accelerators that hold one copy of the model.

        It is `tensor_parallel_size` if that is above 1, else the accelerators of a rank; 1 without accelerators.
        """
        declared = self.parallel.tensor_parallel_size
        if declared > 1:
            return declared
        return max((s.accelerators_per_rank for s in self.segments), default=1)

    def render(self) -> str:
        """Return the placement as placement text in plain numbers. The text gives the same ranks in the same places.

        Ranks on accelerators that others lend are left out, as in `canonical`.
        """
        return quote(self.canonical(), inside=False)

    def canonical(self) -> str | dict[str, object]:
        """Return the placement as a value for the config: a text if a text can say all of it, else a block.

        Ranks on accelerators that others lend are left out, since `cluster.lend` adds them.
        """
        parallel = self.parallel
        block = dict[str, object]()
        if self.node_group != WHOLE_CLUSTER:
            block["node_group"] = self.node_group
        own = [s for s in self.written if s.ranks.start in self.own_ranks]
        block["placement"] = text = render_segments(own)
        if parallel.tensor_parallel_size > 1:
            block["tensor_parallel_size"] = parallel.tensor_parallel_size
        if parallel.context_parallel_size > 1:
            block["context_parallel_size"] = parallel.context_parallel_size
        if parallel.data_parallel_size is not None:
            block["data_parallel_size"] = parallel.data_parallel_size
        if parallel.across_nodes:
            block["tensor_parallel_across_nodes"] = True
        if self.process:
            block["process"] = "shared"
        if len(block) == 1:
            return text
        if block == {"node_group": ANY_NODE, "placement": "0"}:
            return CPU
        return block


def role_of(component: str) -> str:
    """Return the role of a component, which is its name before the first dot: `reward` for `reward.math`."""
    return component.partition(".")[0]


def process_name(sharers: str, rank: int) -> str:
    """Return the name of the process of rank `rank`, such as "env+rollout 3"; "" if `sharers` is "".

    `sharers`: the components that share processes, such as "env+rollout".
    """
    if sharers:
        return f"{sharers} {rank}"
    return ""


def render_segments(segments: Iterable[Segment]) -> str:
    """Return segments (pieces `accelerators:ranks`) as placement text, such as "0-3,4:4-5".

    Neighbouring segments with one rank per accelerator are joined. Ranks are left out where reading the text gives the
    same ranks without them.
    """
    # (accelerators, ranks) of segments and of joined neighbours with one rank for each.
    joined: list[tuple[range, range]] = []
    for segment in sorted(segments, key=lambda s: s.ranks.start):
        accelerators = segment.accelerators
        ranks = segment.ranks
        if joined and len(accelerators) == len(ranks):
            before, counted = joined[-1]
            ends = (before.stop, counted.stop)
            follows = ends == (accelerators.start, ranks.start)
            if follows and len(before) == len(counted):
                wider = range(before.start, accelerators.stop)
                longer = range(counted.start, ranks.stop)
                joined[-1] = (wider, longer)
                continue
        joined.append((accelerators, ranks))

    pieces: list[str] = []
    # The rank after the highest so far
    following = 0
    for accelerators, ranks in joined:
        piece = show_range(accelerators)
        if len(ranks) != len(accelerators) or ranks.start != following:
            piece += f":{show_range(ranks)}"
        pieces.append(piece)
        following = max(following, ranks.stop)
    return ",".join(pieces)


def parts(segment: Segment, pool: Pool) -> list[tuple[Interval, range]]:
    """Return (interval, numbers of the segment in it) for each interval of the pool on which the segment lies.

    A segment is a piece `accelerators:ranks` of a placement text.
    """
    found = []
    for interval in pool.intervals_in(segment.accelerators):
        found.append((interval, overlap(interval.numbers, segment.accelerators)))
    return found
