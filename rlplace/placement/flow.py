"""What goes where: rows of a batch from rank to rank, weights to the copies they are put together in, and how far apart
two ranks are."""

from __future__ import annotations

import dataclasses
import enum
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, overload

from rlplace.placement.language.spec import RankLocations

if TYPE_CHECKING:
    from rlplace.placement.language.hybrid import HybridComponentPlacement


class Transport(enum.StrEnum):
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
    transport: Transport


class Shares(Sequence[Share]):
    """Shares in row order, kept as numbers and made into Share when asked for."""

    __slots__ = ("_edges", "_from", "_sources", "_targets", "_to")

    def __init__(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        edges: Sequence[int],
        from_: RankLocations,
        to: RankLocations,
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
            transport=transport_between(self._from, source, self._to, target),
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

    def transports(self) -> dict[Transport, int]:
        """How many shares each transport carries; only those that occur, nearest first."""
        pairs = zip(self._sources, self._targets, strict=True)
        counts = Counter(transport_between(self._from, source, self._to, target) for source, target in pairs)
        return {transport: counts[transport] for transport in Transport if counts[transport]}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Every row of a batch, once, from the source ranks that hold it to the target ranks that get it.

    Source ranks hold equal neighbouring blocks of rows in rank order; target ranks get blocks that differ by at most
    one row.
    """

    name: str = ""  # of what is sent
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
    """The routes of rows in a job with simulators; for weights see `Delivery`.

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
        observations=scatter_rows(placement, "env", "rollout", total_num_envs // stage_groups, "observations"),
        trajectories=scatter_rows(placement, "env", "actor", total_num_envs, "trajectories"),
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


def transport_between(sources: RankLocations, source: int, targets: RankLocations, target: int) -> Transport:
    """How far apart two ranks of different components are."""
    if source == target and sources.process and sources.process == targets.process:
        return Transport.SAME_PROCESS
    if sources.node[source] != targets.node[target]:
        return Transport.NETWORK
    first, other = sources.first[source], targets.first[target]
    overlap = first < other + targets.count[target] and other < first + sources.count[source]
    return Transport.SAME_ACCELERATOR if overlap else Transport.SAME_NODE


def scatter_rows(placement: HybridComponentPlacement, source: str, target: str, rows: int, name: str = "") -> Route:
    """Both sides cut the rows into neighbouring blocks; each common piece of two blocks is one share."""
    givers, takers = placement.world_size(source), placement.world_size(target)
    edges = sorted({*block_edges(rows, givers), *block_edges(rows, takers)})
    sources, targets = _holders(edges[:-1], rows, givers), _holders(edges[:-1], rows, takers)
    shares = Shares(sources, targets, edges, placement.locations(source), placement.locations(target))
    return Route(name=name, source=source, target=target, rows=rows, shares=shares)


def copy_nearest(placement: HybridComponentPlacement, source: str, target: str) -> Route:
    """Each target rank is one row, from a source on its accelerator, else on its node, else from anywhere; in turns."""
    givers, takers = placement.locations(source), placement.locations(target)
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
    return Route(name="weights", source=source, target=target, rows=ranks, shares=shares)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One copy of the weights, put together once and read by all of `readers`.

    Actor ranks that are `near` write into it themselves; what only others hold goes to the first reader, which writes
    it for them.
    """

    readers: tuple[int, ...]  # rollout ranks, ascending, at least one
    near: tuple[int, ...] = ()  # actor ranks, ascending

    @property
    def lead(self) -> int:
        return self.readers[0]


def deliver_by_node(
    placement: HybridComponentPlacement, source: str = "actor", target: str = "rollout"
) -> tuple[Delivery, ...]:
    """One delivery per node of `target`, in node order."""
    near: defaultdict[int, list[int]] = defaultdict(list)
    readers: defaultdict[int, list[int]] = defaultdict(list)
    for ranks_on, component in ((near, source), (readers, target)):
        for rank, node in enumerate(placement.locations(component).node):
            ranks_on[node].append(rank)
    return tuple(Delivery(readers=tuple(readers[node]), near=tuple(near[node])) for node in sorted(readers))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDelivery(Delivery):
    """A copy for each reader on its own accelerator, past the host: by CUDA IPC where an actor rank shares the
    accelerator, else by NCCL.

    All actor ranks, and the readers without an owner, are one group; NCCL refuses two ranks on one accelerator.
    """

    owners: tuple[int | None, ...]  # by reader, the actor rank on its accelerator, which shares its memory with it
    actors: int  # how many actor ranks there are

    @property
    def group(self) -> tuple[tuple[str, int], ...]:
        """(component, rank) of those that broadcast to each other; alone, an actor rank broadcasts nothing."""
        free = (reader for reader, owner in zip(self.readers, self.owners, strict=True) if owner is None)
        return (*(("actor", rank) for rank in range(self.actors)), *(("rollout", rank) for rank in free))

    def consumers(self, actor: int) -> tuple[int, ...]:
        """Rollout ranks on the accelerator of an actor rank."""
        return tuple(reader for reader, owner in zip(self.readers, self.owners, strict=True) if owner == actor)

    def owner(self, reader: int) -> int | None:
        return self.owners[self.readers.index(reader)]


def deliver(
    placement: HybridComponentPlacement, source: str = "actor", target: str = "rollout"
) -> tuple[Delivery, ...]:
    """What can stay on accelerators does; the other target ranks get one copy per node.

    A rank that stays on accelerators has one GPU of its own component. Other than GPUs, and ranks of several of them,
    go through the host: an engine that cuts its weights takes them whole from there, and never holds two copies.
    """
    actors, rollouts = placement.locations(source), placement.locations(target)
    kinds = [node.kind for node in placement.topology.nodes]
    alone: dict[int, int] = {}  # by accelerator, the first of its target ranks
    for rank, (node, first, count) in enumerate(zip(rollouts.node, rollouts.first, rollouts.count, strict=True)):
        if kinds[node] == "cuda" and count == 1:
            alone.setdefault(first, rank)
    able = alone.values()
    owners = {first: rank for rank, first in enumerate(actors.first)}
    apart = len(owners) == len(actors.first) and all(
        kinds[node] == "cuda" and count == 1 for node, count in zip(actors.node, actors.count, strict=True)
    )
    if not able or not apart:
        return deliver_by_node(placement, source, target)
    device = DeviceDelivery(
        readers=tuple(able),
        owners=tuple(owners.get(rollouts.first[rank]) for rank in able),
        actors=len(actors.first),
    )
    rest = [_without(delivery, frozenset(able)) for delivery in deliver_by_node(placement, source, target)]
    return (device, *(delivery for delivery in rest if delivery.readers))


def _without(delivery: Delivery, ranks: frozenset[int]) -> Delivery:
    return dataclasses.replace(delivery, readers=tuple(r for r in delivery.readers if r not in ranks))


def deliver_through_host(deliveries: Iterable[Delivery]) -> list[Delivery]:
    """Those that do not stay on accelerators."""
    return [delivery for delivery in deliveries if not isinstance(delivery, DeviceDelivery)]


def deliver_by_rank(ranks: int) -> tuple[Delivery, ...]:
    """A delivery for each target rank alone, where ranks share no memory."""
    return tuple(Delivery(readers=(rank,)) for rank in range(ranks))
