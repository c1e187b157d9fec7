"""Channels of a plan: the location of each of their keys, and how many items they hold there.

The location of a key is that of its one consumer: the shared memory of that node, or the process if all its producers
share it. Each location has a capacity of its own and holds all items that can be under way to it. Which channels there
are is the answer of each job.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlplace.placement.language.spec import RankLocations, process_name

if TYPE_CHECKING:
    from rlplace.placement.language.hybrid import HybridComponentPlacement

# A sender puts the next message while the target takes the one before it.
WEIGHT_MESSAGES_PER_TARGET = 2
# Each participant takes few bytes of a channel. The driver and command-line tools take part besides the ranks.
LEAST_PARTICIPANTS = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLocation:
    """The keys of a channel that live in one place: in the shared memory of a node, or in a single process.

    `process`: name of the process; "": the place is the shared memory of `node`. `capacity_items`: the most items that
    it holds. `under_way`: the most items that senders can put there before they must wait for a receiver.
    """

    node: int
    process: str  # `Slot.process` of all its users; "": several processes, in the node's shared memory
    keys: tuple[str, ...]
    capacity_items: int
    under_way: int  # most items that senders can put there before they must wait for a receiver


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelPlan:
    """One channel of the run. Its capacity is so large that no stage waits forever for room.

    `source`, `target`: the sending and the receiving component. `keys`: keys of target rank 0, then of rank 1, and so
    on. `why`: the reason for the capacity. `targets`: node and accelerators of each target rank. `waiting`: by target
    rank, the most items under way to it. `inside`: by target rank, 1 if all its senders are in its own process, else 0.
    `depth`: places in the channel for each item under way. `declared`: whether a custom job declares the channel.
    """

    name: str
    source: str
    target: str
    # Keys of target rank 0, then of rank 1, ...; every rank has equally many.
    keys: tuple[str, ...]
    why: str  # where the capacity comes from
    targets: RankLocations = dataclasses.field(repr=False)
    # By target rank: most items under way to it.
    waiting: Sequence[int] = dataclasses.field(repr=False)
    # By target rank: 1 if all its producers are in its own process, else 0.
    inside: Sequence[int] = dataclasses.field(repr=False)
    depth: int = 1  # capacity per item under way
    declared: bool = False  # by a custom job, which alone knows what it carries

    @property
    def capacity_items(self) -> int:
        """The most items that the channel holds, over all its locations."""
        return self.depth * sum(self.waiting)

    def locations(self) -> tuple[ChannelLocation, ...]:
        """Return the locations of the channel, ordered by their first key. The time is linear in the number of keys."""
        # Key: the number of a node; ~rank, which is below 0, for a location inside one process.
        ranks: dict[int, list[int]] = {}
        for rank, (node, inside) in enumerate(
            zip(self.targets.node, self.inside, strict=True)
        ):
            ranks.setdefault(~rank if inside else node, []).append(rank)
        return tuple(
            self._location(found, in_process=place < 0)
            for place, found in ranks.items()
        )

    def _location(self, ranks: Sequence[int], *, in_process: bool) -> ChannelLocation:
        under_way = sum(self.waiting[rank] for rank in ranks)
        each = len(self.keys) // len(self.waiting)
        return ChannelLocation(
            node=self.targets.node[ranks[0]],
            process=process_name(self.targets.process, ranks[0]) if in_process else "",
            keys=tuple(
                key
                for rank in ranks
                for key in self.keys[rank * each : (rank + 1) * each]
            ),
            capacity_items=self.depth * under_way,
            under_way=under_way,
        )


def asked_at_once(prompts: int, short_rounds: int) -> int:
    """Return the most prompts that can be under way at once.

    `prompts`: prompts of an iteration. `short_rounds`: value of `algorithm.short_rounds`: short rounds before each
    round that waits for all answers. If it is above 0, the prompts of one short round are under way in addition.
    """
    return prompts + (-(-prompts // short_rounds) if short_rounds else 0)


def channel_plan(
    placement: HybridComponentPlacement,
    name: str,
    source: str,
    target: str,
    waiting: int | Sequence[int],
    why: str,
    *,
    inside: Sequence[int] | None = None,
    groups: int = 0,
    depth: int = 1,
) -> ChannelPlan:
    """Return the plan of one channel from component `source` to component `target`.

    `waiting`: for each target rank, the largest number of items that are under way to the rank at a time. A single
    number is for a channel with one key, which target rank 0 reads. `why`: the reason for these numbers, in words.
    `inside`: for each target rank, 1 if all workers that send to the rank are in the rank's own process, else 0; None:
    0 for all ranks. `groups`: number of keys of each target rank, one for each stage group; 0: one key. `depth`: the
    capacity of the channel is `depth` times the number of items under way.
    """
    at = placement.locations(target)
    if isinstance(waiting, int):
        at = RankLocations(node=at.node[:1], first=at.first[:1], count=at.count[:1])
        waiting = [waiting]
        keys = [""]
    else:
        ranks = range(len(waiting))
        keys = [f"{rank}/{group}" for rank in ranks for group in range(groups)] or [
            str(rank) for rank in ranks
        ]
    return ChannelPlan(
        name=name,
        source=source,
        target=target,
        keys=tuple(keys),
        why=why,
        targets=at,
        waiting=array("l", waiting),
        inside=bytes(len(waiting)) if inside is None else inside,
        depth=depth,
    )


def plan_weights(
    placement: HybridComponentPlacement, name: str, source: str, target: str
) -> ChannelPlan:
    """Return the plan of channel `name`, which carries weights from component `source` to component `target`.

    The channel serves target ranks that cannot read weights from shared memory or from a GPU.
    """
    each = [1] * placement.world_size(target)
    why = f"{WEIGHT_MESSAGES_PER_TARGET} messages for each {target} rank, taken while more are put"
    return channel_plan(
        placement, name, source, target, each, why, depth=WEIGHT_MESSAGES_PER_TARGET
    )


def participants_of(channel: ChannelPlan, placement: HybridComponentPlacement) -> int:
    """Return an upper bound on the number of processes that use one location of a channel.

    They are ranks, the driver and command-line tools. The number is also an upper bound on the number of requests that
    wait at that location.
    """
    users = (channel.source, channel.target)
    return participants_for(sum(map(placement.world_size, users)))


def participants_for(ranks: int) -> int:
    """Return an upper bound on the number of ranks and tools that use a channel which `ranks` ranks use."""
    return max(LEAST_PARTICIPANTS, 2 * ranks)


def producers_inside(
    givers: Sequence[int],
    takers: Sequence[int],
    sources: RankLocations,
    targets: RankLocations,
) -> bytearray:
    """Return, by target rank, 1 if all items for the rank come from its own process, else 0.

    `givers`, `takers`: source rank and target rank of each share of a route. `sources`, `targets`: node and
    accelerators of every rank of the source component and of the target component.
    """
    shared = sources.process != "" and sources.process == targets.process
    inside = bytearray([shared]) * len(targets.node)
    for giver, taker in zip(givers, takers, strict=True) if shared else ():
        inside[taker] &= giver == taker
    return inside
