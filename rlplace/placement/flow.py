"""Data flow of a job: which rows go from which rank to which rank, which weights to which copy, by which transport."""

from __future__ import annotations

import dataclasses
import enum
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from rlplace.placement.language.slots import owner_of
from rlplace.placement.language.spec import RankLocations

if TYPE_CHECKING:
    from rlplace.placement.language.hybrid import HybridComponentPlacement


class Transport(enum.StrEnum):
    """The way in which items and tensors travel between two ranks. It depends on where the two ranks are."""

    SAME_PROCESS = "same_process"
    SAME_ACCELERATOR = "same_accelerator"
    SAME_NODE = "same_node"
    NETWORK = "network"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The rows start..stop-1 of a batch, which rank `source` of one component sends to rank `target` of another.

    `transport`: how the rows travel.
    """

    source: int
    target: int
    start: int
    stop: int
    transport: Transport


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A division of the rows of a batch: each row goes from exactly one source rank to exactly one target rank.

    Source ranks and target ranks hold contiguous blocks of rows, in rank order. All source blocks have the same number
    of rows. The sizes of two target blocks differ by at most one row. Share i is the rows edges[i]..edges[i+1]-1, from
    rank sources[i] to rank targets[i]. `name`: name of the data. `source`, `target`: the components. `origin`,
    `destination`: node and accelerators of every rank of the source and of the target.
    """

    name: str = ""  # name of the data
    source: str
    target: str
    sources: Sequence[int]  # source rank of each share; `origin` locates it
    targets: Sequence[int]  # target rank of each share; `destination` locates it
    edges: Sequence[int]
    origin: RankLocations = dataclasses.field(repr=False)
    destination: RankLocations = dataclasses.field(repr=False)

    @property
    def rows(self) -> int:
        return self.edges[-1]

    @property
    def most_rows(self) -> int:
        """The number of rows in the largest share."""
        return max(stop - start for start, stop in pairwise(self.edges))

    @property
    def shares(self) -> tuple[Share, ...]:
        """All shares of the route, in the order of their rows. Each access builds a new tuple."""
        transports = self._transports()
        pieces = zip(
            self.sources, self.targets, pairwise(self.edges), transports, strict=True
        )
        return tuple(
            Share(
                source=source,
                target=target,
                start=start,
                stop=stop,
                transport=transport,
            )
            for source, target, (start, stop), transport in pieces
        )

    def sends(self, rank: int) -> tuple[Share, ...]:
        """Return the shares that source rank `rank` sends, in row order."""
        return tuple(share for share in self.shares if share.source == rank)

    def receives(self, rank: int) -> tuple[Share, ...]:
        """Return the shares that target rank `rank` receives, in row order."""
        return tuple(share for share in self.shares if share.target == rank)

    def blocks(self) -> dict[int, tuple[int, int]]:
        """Return target rank -> first row of its block, and row after its block. Ranks without rows are left out."""
        found: dict[int, tuple[int, int]] = {}
        for target, (start, stop) in zip(
            self.targets, pairwise(self.edges), strict=True
        ):
            first, _ = found.get(target, (start, stop))
            found[target] = (first, stop)
        return found

    def transports(self) -> dict[Transport, int]:
        """Return transport -> number of shares that travel by it, nearest transport first.

        Transports without shares are left out.
        """
        counts = Counter(self._transports())
        return {
            transport: counts[transport] for transport in Transport if counts[transport]
        }

    def _transports(self) -> Iterator[Transport]:
        for source, target in zip(self.sources, self.targets, strict=True):
            yield transport_between(self.origin, source, self.destination, target)


class Routes(NamedTuple):
    """The routes of rows in a job on simulators.

    `observations`: from env to rollout, for one stage group; actions return along the same route. `trajectories`: from
    env to actor, for all environments.
    """

    observations: Route  # env -> rollout; rows are those of one stage group; actions return along the same route
    trajectories: Route  # env -> actor; rows are all environments

    @property
    def direct(self) -> bool:
        """Whether every env rank is in one process with the rollout rank that computes its actions."""
        return {*self.observations.transports()} == {Transport.SAME_PROCESS}


def derive_routes(
    placement: HybridComponentPlacement, total_num_envs: int, stage_groups: int
) -> Routes:
    """Return the routes between env, rollout and actor, which may have different numbers of ranks.

    `total_num_envs`: number of environments over all env ranks; the rules in `checks` require a multiple of stage
    groups x env ranks. `stage_groups`: number of stage groups of each env rank, which are shares of its environments
    that step in turn.
    """
    return Routes(
        observations=scatter_rows(
            placement, "env", "rollout", total_num_envs // stage_groups, "observations"
        ),
        trajectories=scatter_rows(
            placement, "env", "actor", total_num_envs, "trajectories"
        ),
    )


def block_edges(rows: int, ranks: int) -> list[int]:
    """Return where contiguous blocks of `rows` rows begin and end: rank r has the rows edges[r]..edges[r+1]-1.

    The list has ranks + 1 entries. The first `rows % ranks` ranks have one row more than all other ranks.
    """
    least, more = divmod(rows, ranks)
    return [rank * least + min(rank, more) for rank in range(ranks + 1)]


def transport_between(
    sources: RankLocations, source: int, targets: RankLocations, target: int
) -> Transport:
    """Return the transport from rank `source` of one component to rank `target` of another component.

    `sources`, `targets`: node and accelerators of every rank of the first and of the second component.
    """
    if source == target and sources.process and sources.process == targets.process:
        return Transport.SAME_PROCESS
    if sources.node[source] != targets.node[target]:
        return Transport.NETWORK
    first, other = sources.first[source], targets.first[target]
    overlap = (
        first < other + targets.count[target] and other < first + sources.count[source]
    )
    if overlap:
        return Transport.SAME_ACCELERATOR
    return Transport.SAME_NODE


def scatter_rows(
    placement: HybridComponentPlacement,
    source: str,
    target: str,
    rows: int,
    name: str = "",
) -> Route:
    """Return the route of `rows` rows from component `source` to component `target`.

    The ranks of each component hold contiguous blocks of rows. The rows that a source block and a target block have in
    common are one share. `name`: name of the data.
    """
    blocks = [
        block_edges(rows, placement.world_size(component))
        for component in (source, target)
    ]
    edges = sorted({*blocks[0], *blocks[1]})
    holders = [
        array("l", (bisect_right(block, start) - 1 for start in edges[:-1]))
        for block in blocks
    ]
    return Route(
        name=name,
        source=source,
        target=target,
        sources=holders[0],
        targets=holders[1],
        edges=edges,
        origin=placement.locations(source),
        destination=placement.locations(target),
    )


def copy_nearest(
    placement: HybridComponentPlacement, source: str, target: str
) -> Route:
    """Return a route of weights on which each target rank gets a whole copy from the nearest source rank.

    Each row of the route stands for one copy. A source rank on the same accelerator is nearest, then one on the same
    node, then any other. Source ranks that are equally near take turns.
    """
    givers = placement.locations(source)
    takers = placement.locations(target)

    def places(node: int, first: int, count: int) -> tuple[tuple[str, int], ...]:
        """Return where a rank is, as pairs (kind, number): its accelerators, its node, and the cluster, in this order.

        `node`: node of the rank. `first`, `count`: its first accelerator, and how many accelerators it has.
        """
        return (
            *(("accelerator", a) for a in range(first, first + count)),
            ("node", node),
            ("cluster", 0),
        )

    # Place -> source ranks at that place.
    near: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, (node, first, count) in enumerate(
        zip(givers.node, givers.first, givers.count, strict=True)
    ):
        for place in places(node, first, count):
            near[place].append(rank)
    # Place -> how many copies its sources have given so far; the next source in turn follows from it.
    given: Counter[tuple[str, int]] = Counter()
    sources = array("l")
    for node, first, count in zip(takers.node, takers.first, takers.count, strict=True):
        nearest = next(place for place in places(node, first, count) if place in near)
        sources.append(near[nearest][given[nearest] % len(near[nearest])])
        given[nearest] += 1
    ranks = len(takers.node)
    return Route(
        name="weights",
        source=source,
        target=target,
        sources=sources,
        targets=range(ranks),
        edges=range(ranks + 1),
        origin=givers,
        destination=takers,
    )


BUCKET_BYTES = 16 << 20  # bucket for weights on their way to a copy on another node
# Bucket for weights on their way to the processes of an engine with tensor parallelism.
CUT_BUCKET_BYTES = 64 << 20
# A sum over ranks on a host takes one exchange if a rank sends at most this many bytes, else two.
SUMMED_AT_ONCE_BYTES = 1 << 20
# Whole weights that an engine process loads at a time; at least the largest weight.
WINDOW_BYTES = 256 << 20
# Bucket between accelerators. It is large, so that the message about each bucket takes little of its time.
DEVICE_BUCKET_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One copy of the weights of component `source`. It is put together once, and all ranks in `readers` read it.

    `readers`: ranks of component `target`. `near`: source ranks on the node of the copy; they write their parts into
    the copy themselves. All other source ranks send their parts to the first reader, which writes them into the copy.
    """

    readers: tuple[int, ...]  # target ranks, ascending, at least one
    near: tuple[int, ...] = ()  # source ranks on the node of the copy, ascending
    source: str = "actor"
    target: str = "rollout"

    @property
    def lead(self) -> int:
        return self.readers[0]


def deliver_by_node(
    placement: HybridComponentPlacement, source: str = "actor", target: str = "rollout"
) -> tuple[Delivery, ...]:
    """Return one delivery of weights for each node that has target ranks, in node order."""
    return _by_node(placement, source, target, without=())


def _by_node(
    placement: HybridComponentPlacement,
    source: str,
    target: str,
    *,
    without: Container[int],
) -> tuple[Delivery, ...]:
    """Return one delivery of weights for each node, to its target ranks that are not in `without`."""
    readers: defaultdict[int, list[int]] = defaultdict(list)
    for rank, node in enumerate(placement.locations(target).node):
        if rank not in without:
            readers[node].append(rank)
    if not readers:
        return ()
    near: defaultdict[int, list[int]] = defaultdict(list)
    for rank, node in enumerate(placement.locations(source).node):
        near[node].append(rank)
    return tuple(
        Delivery(
            readers=tuple(readers[node]),
            near=tuple(near[node]),
            source=source,
            target=target,
        )
        for node in sorted(readers)
    )


class DeviceMember(NamedTuple):
    """A member of a weight sync between accelerators: a rank, or one process of an engine that has several GPUs.

    `part`: index of the process's GPU within the rank; None: the member is a whole rank.
    """

    component: str
    rank: int
    # Index of the accelerator within the engine's rank; each engine process has one.
    part: int | None = None

    @property
    def name(self) -> str:
        """The name of the member in messages, such as "rollout rank 0 part 1"."""
        return owner_of(self.component, self.rank) + (
            "" if self.part is None else f" part {self.part}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDelivery(Delivery):
    """Weights sent from source ranks to the accelerators of target ranks, by CUDA IPC or NCCL.

    A taker is a process that receives the weights on one accelerator. A reader with one accelerator is one taker. A
    reader with several accelerators is an engine with tensor parallelism: each of its processes is a taker, which sees
    all weights and keeps its own part. The owner of a taker is the source rank on the same
    accelerator, which gives the weights by CUDA IPC. All source ranks and all takers without an owner form one NCCL
    group, since NCCL refuses two ranks on one accelerator. `owners`: owner of each taker; None: it has none. `actors`:
    number of actor ranks. `parts`: number of accelerators of each reader; (): one each. `whole`: whether a reader with
    one accelerator holds a second copy of the weights until all have come; False: it loads them as they come.
    """

    # By taker: the actor rank on the same accelerator, which shares its memory with the taker; else None.
    owners: tuple[int | None, ...]
    actors: int  # number of actor ranks
    parts: tuple[int, ...] = ()  # by reader: number of its accelerators; (): one each
    # Whether a reader with one accelerator holds a second copy until all weights have come
    whole: bool = True

    @property
    def in_windows(self) -> bool:
        """Whether some reader gets windows, which are some whole tensors each, and loads a window before the next one
        comes.

        A reader with several accelerators always does so, because it keeps its part of each tensor.
        """
        return not self.whole or any(parts > 1 for parts in self.parts)

    def takes_windows(self, reader: int) -> bool:
        """Return whether rank `reader` loads the weights window by window, without a second copy of them."""
        return not self.whole or len(self.takers_of(reader)) > 1

    @property
    def takers(self) -> tuple[DeviceMember, ...]:
        """The takers: one for each accelerator of each reader, in the order of readers and accelerators."""
        return tuple(
            DeviceMember(self.target, reader, part) for reader, part in self._places()
        )

    def _places(self) -> Iterator[tuple[int, int | None]]:
        """Yield reader and part of each taker. The part is None for a reader with a single accelerator."""
        for reader, parts in zip(
            self.readers, self.parts or (1,) * len(self.readers), strict=True
        ):
            if parts == 1:
                yield reader, None
                continue
            for part in range(parts):
                yield reader, part

    def takers_of(self, reader: int) -> tuple[DeviceMember, ...]:
        return tuple(taker for taker in self.takers if taker.rank == reader)

    @property
    def group(self) -> tuple[DeviceMember, ...]:
        """The members of the NCCL broadcast: all actor ranks, and the takers on accelerators without an actor rank."""
        actors = (DeviceMember(self.source, rank) for rank in range(self.actors))
        return (*actors, *self.apart)

    @property
    def apart(self) -> tuple[DeviceMember, ...]:
        """The takers on accelerators without an actor rank, which get the weights by the NCCL broadcast."""
        return tuple(
            DeviceMember(self.target, reader, part)
            for (reader, part), owner in zip(self._places(), self.owners, strict=True)
            if owner is None
        )

    @property
    def grouped(self) -> bool:
        """Whether `group` has several members. Else a single actor rank has all takers on its accelerator."""
        return self.actors > 1 or None in self.owners

    def consumers(self, actor: int) -> tuple[DeviceMember, ...]:
        """Return the takers that are on the accelerator of actor rank `actor`; () if there is no rollout rank on it."""
        return tuple(
            taker
            for taker, owner in zip(self.takers, self.owners, strict=True)
            if owner == actor
        )

    def owner(self, taker: DeviceMember) -> int | None:
        return self.owners[self.takers.index(taker)]

    def owners_of(self, reader: int) -> tuple[int | None, ...]:
        """Return the owner of each taker of rank `reader`, in the order of its accelerators; None: no owner."""
        return tuple(
            owner
            for (rank, _), owner in zip(self._places(), self.owners, strict=True)
            if rank == reader
        )


def deliver(
    placement: HybridComponentPlacement,
    source: str = "actor",
    target: str = "rollout",
    *,
    cut: bool = False,
    whole: bool = True,
) -> tuple[Delivery, ...]:
    """Return the deliveries of weights to the target ranks: GPU to GPU where possible, else one copy on each node.

    Delivery from GPU to GPU needs source ranks with one GPU each, no two source ranks on the same GPU, and source ranks
    in processes of their own. A target rank takes part if its GPUs are not used by a target rank with a lower number.
    `cut`: whether target ranks with several GPUs are engines that split their weights and so can take part; False: they
    read the copy on their node. `whole`: whether target ranks with one GPU hold a second copy of the weights until all
    have come; False: they are engines that load weights as they come.
    """
    actors = placement.locations(source)
    rollouts = placement.locations(target)
    # A process cannot open memory of its own by CUDA IPC
    if actors.process:
        return deliver_by_node(placement, source, target)
    kinds = [node.kind for node in placement.topology.nodes]
    # Accelerators of the target ranks visited so far.
    taken: set[int] = set()
    # Target rank -> its accelerators, for ranks that can take weights on them.
    able: dict[int, tuple[int, ...]] = {}
    for rank, (node, first, count) in enumerate(
        zip(rollouts.node, rollouts.first, rollouts.count, strict=True)
    ):
        if kinds[node] == "cuda" and (count == 1 or (cut and count)):
            own = tuple(range(first, first + count))
            if taken.isdisjoint(own):
                able[rank] = own
                taken.update(own)
    owners = {first: rank for rank, first in enumerate(actors.first)}
    apart = len(owners) == len(actors.first) and all(
        kinds[node] == "cuda" and count == 1
        for node, count in zip(actors.node, actors.count, strict=True)
    )
    if not able or not apart:
        return deliver_by_node(placement, source, target)
    parts = tuple(len(own) for own in able.values())
    device = DeviceDelivery(
        readers=tuple(able),
        owners=tuple(
            owners.get(accelerator) for own in able.values() for accelerator in own
        ),
        actors=len(actors.first),
        parts=parts if max(parts) > 1 else (),
        whole=whole,
        source=source,
        target=target,
    )
    return (device, *_by_node(placement, source, target, without=able))


def deliver_through_host(deliveries: Iterable[Delivery]) -> list[Delivery]:
    """Return the deliveries, out of `deliveries`, whose weights pass through host memory."""
    return [
        delivery for delivery in deliveries if not isinstance(delivery, DeviceDelivery)
    ]


def deliver_by_rank(
    ranks: int, source: str = "actor", target: str = "rollout"
) -> tuple[Delivery, ...]:
    """Return one delivery of weights for each target rank 0..`ranks` - 1, for ranks that share no memory."""
    return tuple(
        Delivery(readers=(rank,), source=source, target=target) for rank in range(ranks)
    )
