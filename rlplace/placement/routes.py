"""Who sends which rows to whom between two components, and by which way."""

from __future__ import annotations

import dataclasses
import enum
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, overload

from rlplace.placement.language.spec import Homes

if TYPE_CHECKING:
    from rlplace.placement.language.hybrid import HybridComponentPlacement


class Way(enum.StrEnum):
    """How far apart two slots are; the transport is chosen by it."""

    SAME_PROCESS = "same_process"
    SAME_ACCELERATOR = "same_accelerator"
    SAME_NODE = "same_node"
    NETWORK = "network"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Rows start..stop-1 of a batch, from one source rank to one target rank."""

    source: int
    target: int
    start: int
    stop: int
    way: Way


class Shares(Sequence[Share]):
    """Shares in row order, kept as numbers and made into Share when asked for."""

    __slots__ = ("_edges", "_from", "_sources", "_targets", "_to")

    def __init__(
        self, sources: Sequence[int], targets: Sequence[int], edges: Sequence[int], from_: Homes, to: Homes
    ) -> None:
        """Share i is rows edges[i]..edges[i+1]-1, from rank sources[i] living in `from_` to targets[i] in `to`."""
        self._sources, self._targets, self._edges = sources, targets, edges
        self._from, self._to = from_, to

    def __len__(self) -> int:
        return len(self._sources)

    @overload
    def __getitem__(self, at: int) -> Share: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Share, ...]: ...
    def __getitem__(self, at: int | slice) -> Share | tuple[Share, ...]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(len(self))))
        at = range(len(self))[at]
        source, target = self._sources[at], self._targets[at]
        return Share(
            source=source,
            target=target,
            start=self._edges[at],
            stop=self._edges[at + 1],
            way=way_between(self._from, source, self._to, target),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Share.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # equal to a tuple of the same shares, which hashes by its items

    @property
    def sources(self) -> Sequence[int]:
        """The source rank of each share."""
        return self._sources

    @property
    def targets(self) -> Sequence[int]:
        """The target rank of each share."""
        return self._targets

    @property
    def most_rows(self) -> int:
        """Of one share."""
        return max(stop - start for start, stop in pairwise(self._edges))

    def ways(self) -> dict[Way, int]:
        """How many shares go each way; only ways that occur, nearest first."""
        pairs = zip(self._sources, self._targets, strict=True)
        counts = Counter(way_between(self._from, source, self._to, target) for source, target in pairs)
        return {way: counts[way] for way in Way if counts[way]}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Every row of a batch, once, from the source ranks that hold it to the target ranks that get it.

    Source ranks hold equal neighbouring blocks of rows in rank order; target ranks get blocks that differ by at most
    one row.
    """

    source: str
    target: str
    rows: int
    shares: Shares  # ordered by row

    def sends(self, rank: int) -> tuple[Share, ...]:
        """What source rank `rank` sends, by row."""
        return tuple(share for share in self.shares if share.source == rank)

    def receives(self, rank: int) -> tuple[Share, ...]:
        """What target rank `rank` gets, by row."""
        return tuple(share for share in self.shares if share.target == rank)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The journeys of rows in a PPO job; for those of weights see `weight_routes`.

    observations: env -> rollout, rows of one stage group (the answers go back the same way);
    trajectories: env -> actor, rows are all environments.
    """

    observations: Route
    trajectories: Route


def derive_routes(placement: HybridComponentPlacement, total_num_envs: int, stage_groups: int) -> Routes:
    """Routes for any world sizes of env, rollout and actor.

    `total_num_envs` must be a multiple of stage groups x env ranks, with a row for every rank (see `checks`).
    """
    return Routes(
        observations=spread_rows(placement, "env", "rollout", total_num_envs // stage_groups),
        trajectories=spread_rows(placement, "env", "actor", total_num_envs),
    )


def block_edges(rows: int, ranks: int) -> list[int]:
    """Rank r holds rows edges[r]..edges[r+1]-1; the first `rows % ranks` ranks hold one row more."""
    least, more = divmod(rows, ranks)
    turn = more * (least + 1)  # the row from which on blocks are smaller
    return [*range(0, turn, least + 1), *(range(turn, rows + 1, least) if least else repeat(turn, ranks - more + 1))]


def _holders(starts: Sequence[int], rows: int, ranks: int) -> array[int]:
    """The rank that holds each of these rows, ascending, when `ranks` hold blocks as in `block_edges`."""
    least, more = divmod(rows, ranks)
    turn = more * (least + 1)
    at = bisect_left(starts, turn)
    larger, smaller = (s // (least + 1) for s in starts[:at]), (more + (s - turn) // least for s in starts[at:])
    return array("l", [*larger, *smaller])


def way_between(sources: Homes, source: int, targets: Homes, target: int) -> Way:
    """How far apart two ranks of different components are."""
    if source == target and sources.process and sources.process == targets.process:
        return Way.SAME_PROCESS
    if sources.node[source] != targets.node[target]:
        return Way.NETWORK
    first, other = sources.first[source], targets.first[target]
    overlap = first < other + targets.count[target] and other < first + sources.count[source]
    return Way.SAME_ACCELERATOR if overlap else Way.SAME_NODE


def spread_rows(placement: HybridComponentPlacement, source: str, target: str, rows: int) -> Route:
    """Both sides cut the rows into neighbouring blocks; each common piece of two blocks is one share."""
    givers, takers = placement.world_size(source), placement.world_size(target)
    edges = sorted({*block_edges(rows, givers), *block_edges(rows, takers)})
    sources, targets = _holders(edges[:-1], rows, givers), _holders(edges[:-1], rows, takers)
    shares = Shares(sources, targets, edges, placement.homes(source), placement.homes(target))
    return Route(source=source, target=target, rows=rows, shares=shares)


def copy_nearest(placement: HybridComponentPlacement, source: str, target: str) -> Route:
    """Each target rank is one row, from a source on its accelerator, else on its node, else from anywhere; in turns."""
    givers, takers = placement.homes(source), placement.homes(target)
    common = placement.shared(source, target)
    on_accelerator: defaultdict[int, list[int]] = defaultdict(list)
    on_node: defaultdict[int, list[int]] = defaultdict(list)
    for rank, (node, first, count) in enumerate(zip(givers.node, givers.first, givers.count, strict=True)):
        on_node[node].append(rank)
        for accelerator in range(first, first + count) if common else ():
            on_accelerator[accelerator].append(rank)
    everywhere = range(len(givers.node))
    turns: defaultdict[tuple[str, int], int] = defaultdict(int)
    sources = array("l")
    circle: tuple[str, int]
    near: Sequence[int]
    for node, first, count in zip(takers.node, takers.first, takers.count, strict=True):
        here = next((a for a in range(first, first + count) if a in on_accelerator), None)
        if here is not None:
            circle, near = ("accelerator", here), on_accelerator[here]
        elif node in on_node:
            circle, near = ("node", node), on_node[node]
        else:
            circle, near = ("cluster", 0), everywhere
        sources.append(near[turns[circle] % len(near)])
        turns[circle] += 1
    ranks = len(takers.node)
    shares = Shares(sources, range(ranks), range(ranks + 1), givers, takers)
    return Route(source=source, target=target, rows=ranks, shares=shares)
