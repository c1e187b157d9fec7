"""Where whole copies of the weights are put together in a sync: on a node for its ranks, or on a rank's accelerator."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplace.placement.language.hybrid import HybridComponentPlacement


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
        for rank, node in enumerate(placement.homes(component).node):
            ranks_on[node].append(rank)
    return tuple(Delivery(readers=tuple(readers[node]), near=tuple(near[node])) for node in sorted(readers))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDelivery(Delivery):
    """A copy for each reader on its own accelerator, past the host: by CUDA IPC where an actor rank shares the
    accelerator, else by NCCL.

    All actor ranks, and the readers without a host, are one group; NCCL refuses two ranks on one accelerator.
    """

    hosts: tuple[int | None, ...]  # by reader, the actor rank on its accelerator
    actors: int  # how many actor ranks there are

    @property
    def group(self) -> tuple[tuple[str, int], ...]:
        """(component, rank) of those that broadcast to each other; alone, an actor rank broadcasts nothing."""
        free = (reader for reader, host in zip(self.readers, self.hosts, strict=True) if host is None)
        return (*(("actor", rank) for rank in range(self.actors)), *(("rollout", rank) for rank in free))

    def guests(self, actor: int) -> tuple[int, ...]:
        """Rollout ranks on the accelerator of an actor rank."""
        return tuple(reader for reader, host in zip(self.readers, self.hosts, strict=True) if host == actor)

    def host(self, reader: int) -> int | None:
        return self.hosts[self.readers.index(reader)]


def deliver(
    placement: HybridComponentPlacement, source: str = "actor", target: str = "rollout"
) -> tuple[Delivery, ...]:
    """What can stay on accelerators does; the other target ranks get one copy per node.

    A rank that stays on accelerators has one GPU of its own component. Other than GPUs, and ranks of several of them,
    go through the host: an engine that cuts its weights takes them whole from there, and never holds two copies.
    """
    actors, rollouts = placement.homes(source), placement.homes(target)
    kinds = [node.kind for node in placement.topology.nodes]
    alone: dict[int, int] = {}  # by accelerator, the first of its target ranks
    for rank, (node, first, count) in enumerate(zip(rollouts.node, rollouts.first, rollouts.count, strict=True)):
        if kinds[node] == "cuda" and count == 1:
            alone.setdefault(first, rank)
    able = alone.values()
    hosts = {first: rank for rank, first in enumerate(actors.first)}
    apart = len(hosts) == len(actors.first) and all(
        kinds[node] == "cuda" and count == 1 for node, count in zip(actors.node, actors.count, strict=True)
    )
    if not able or not apart:
        return deliver_by_node(placement, source, target)
    device = DeviceDelivery(
        readers=tuple(able),
        hosts=tuple(hosts.get(rollouts.first[rank]) for rank in able),
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
