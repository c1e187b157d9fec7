"""The channels of a run: what each is for, where each of its keys lives, and how many items it holds there.

A key lives where its one consumer is: in the shared memory of that node, or in that process where all who put there
share it. Each such home is bounded for itself, so each must hold all that can be under way to it.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rlplace.placement.deadlock import Flow
from rlplace.placement.flow import Routes
from rlplace.placement.language.spec import Homes, process_name

if TYPE_CHECKING:
    from rlplace.placement.language.hybrid import HybridComponentPlacement

# One bucket travels while the one before it is being taken.
WEIGHT_BUCKETS_PER_TARGET = 2
LEAST_PARTICIPANTS = 1024  # the places of a channel cost little; a driver and its tools have names as well


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelHome:
    """A part of a channel with the keys that live there."""

    node: int
    process: str  # `Slot.process` of all who use it; "": several processes, in the node's shared memory
    keys: tuple[str, ...]
    capacity_items: int
    under_way: int  # most items that can be in it before its sources wait


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelPlan:
    """One channel of the run. Its capacities never stop a stage for good."""

    name: str
    source: str
    target: str
    keys: tuple[str, ...]  # of target rank 0, then 1, ...; equally many for each
    why: str  # where the capacity comes from
    targets: Homes = dataclasses.field(repr=False)
    waiting: Sequence[int] = dataclasses.field(repr=False)  # most items under way to each target rank
    inside: Sequence[int] = dataclasses.field(repr=False)  # by target rank: 1 where all who put share its process
    depth: int = 1  # capacity for each item under way

    @property
    def capacity_items(self) -> int:
        """Over all homes."""
        return self.depth * self.under_way

    @property
    def under_way(self) -> int:
        """Most items that can be in it before its sources wait."""
        return sum(self.waiting)

    def homes(self) -> tuple[ChannelHome, ...]:
        """In the order of the first key of each. Linear in keys."""
        ranks: dict[int, list[int]] = {}
        for rank, place in enumerate(self._places()):
            ranks.setdefault(place, []).append(rank)
        return tuple(self._home(found, in_process=place < 0) for place, found in ranks.items())

    def most_under_way(self) -> set[int]:
        """The sizes of its homes: most items under way to one of them."""
        sizes: Counter[int] = Counter()
        for place, items in zip(self._places(), self.waiting, strict=True):
            sizes[place] += items
        return set(sizes.values())

    def _places(self) -> Iterator[int]:
        """By target rank where it lives: the number of a node, or a number below 0 for each process."""
        for rank, (node, inside) in enumerate(zip(self.targets.node, self.inside, strict=True)):
            yield ~rank if inside else node

    def _home(self, ranks: Sequence[int], *, in_process: bool) -> ChannelHome:
        under_way = sum(self.waiting[rank] for rank in ranks)
        each = len(self.keys) // len(self.waiting)
        return ChannelHome(
            node=self.targets.node[ranks[0]],
            process=process_name(self.targets.process, ranks[0]) if in_process else "",
            keys=tuple(key for rank in ranks for key in self.keys[rank * each : (rank + 1) * each]),
            capacity_items=self.depth * under_way,
            under_way=under_way,
        )


# Channel -> stage it is filled in, stage it is emptied in, channels that must have had an item before.
Ends = Mapping[str, tuple[str, str, tuple[str, ...]]]
PPO_ENDS: Ends = {
    "observations": ("rollout", "rollout", ()),
    "actions": ("rollout", "rollout", ("observations",)),
    "trajectories": ("rollout", "learn", ()),
    "weights": ("sync", "sync", ()),
}


def plan_channels(placement: HybridComponentPlacement, routes: Routes, stage_groups: int) -> tuple[ChannelPlan, ...]:
    """The channels of a PPO run, each large enough for all that can be under way at once.

    An env rank has at most one step of each stage group unanswered, so observations and actions hold stage groups x
    shares. Trajectories are put in rollout and taken in learn: the whole iteration must fit. Weights are taken while
    they are put.
    """
    homes = {c: placement.homes(c) for c in ("actor", "env", "rollout")}
    by_rank = {c: tuple(map(str, range(len(home.node)))) for c, home in homes.items()}
    asked, told = routes.observations.shares, routes.trajectories.shares
    return (
        ChannelPlan(
            name="observations",
            source="env",
            target="rollout",
            keys=by_rank["rollout"],
            why=f"{len(asked)} pieces of a step x {stage_groups} stage group{'s' * (stage_groups > 1)}",
            targets=homes["rollout"],
            waiting=_count(asked.targets, homes["rollout"], stage_groups),
            inside=_inside(asked.sources, asked.targets, homes["env"], homes["rollout"]),
        ),
        ChannelPlan(
            name="actions",
            source="rollout",
            target="env",
            keys=tuple(f"{rank}/{group}" for rank in by_rank["env"] for group in range(stage_groups)),
            why="one answer for each observation",
            targets=homes["env"],
            waiting=_count(asked.sources, homes["env"], stage_groups),
            inside=_inside(asked.targets, asked.sources, homes["rollout"], homes["env"]),
        ),
        ChannelPlan(
            name="trajectories",
            source="env",
            target="actor",
            keys=by_rank["actor"],
            why="all pieces of an iteration wait there for learn",
            targets=homes["actor"],
            waiting=_count(told.targets, homes["actor"]),
            inside=_inside(told.sources, told.targets, homes["env"], homes["actor"]),
        ),
        plan_weights(placement),
    )


def plan_weights(placement: HybridComponentPlacement, name: str = "weights", target: str = "rollout") -> ChannelPlan:
    """By which any job's actor sends what cannot be written where it is read."""
    homes = placement.homes(target)
    ranks = len(homes.node)
    return ChannelPlan(
        name=name,
        source="actor",
        target=target,
        keys=tuple(map(str, range(ranks))),
        why=f"{WEIGHT_BUCKETS_PER_TARGET} buckets for each {target} rank, taken while more are put",
        targets=homes,
        waiting=array("l", [1]) * ranks,
        inside=bytes(ranks),  # an actor has its processes to itself
        depth=WEIGHT_BUCKETS_PER_TARGET,
    )


def participants_of(channel: ChannelPlan, placement: HybridComponentPlacement) -> int:
    """How many names may use one of its homes, and how many requests may wait there."""
    ranks = placement.world_size(channel.source) + placement.world_size(channel.target)
    return max(LEAST_PARTICIPANTS, 2 * ranks)


def _count(ranks: Sequence[int], homes: Homes, times: int = 1) -> array[int]:
    """How often each rank of `homes` is among `ranks`, times `times`."""
    counts = Counter(ranks)
    return array("l", (counts[rank] * times for rank in range(len(homes.node))))


def _inside(givers: Sequence[int], takers: Sequence[int], sources: Homes, targets: Homes) -> bytearray:
    """By target rank: 1 where everything that it gets comes from its own process. Givers and takers in pairs."""
    shared = sources.process != "" and sources.process == targets.process
    inside = bytearray([shared]) * len(targets.node)
    for giver, taker in zip(givers, takers, strict=True) if shared else ():
        inside[taker] &= giver == taker
    return inside


def flows_of(channels: Iterable[ChannelPlan], ends: Ends) -> Iterator[Flow]:
    """The channels of a run as the deadlock check sees them: one flow for each size of home."""
    for channel in channels:
        put_in, taken_in, after = ends[channel.name]
        for items in sorted(channel.most_under_way()):
            yield Flow(
                channel=channel.name,
                source=channel.source,
                target=channel.target,
                put_in=put_in,
                taken_in=taken_in,
                items=items,
                capacity=channel.depth * items,
                after=after,
            )
