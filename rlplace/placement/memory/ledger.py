"""The memory ledger: what every accelerator and every host holds in each stage and on each entry to one.

::

    stage before        entry: releases | all wait | acquires           stage
    held + working ──▶  held before ──▶ what stays ──▶ held after ──▶   held + working

Releases come first, so the most that an entry holds is what it ends with; only the very first entry, which loads the
weights, holds more on the way. Components are taken to be set up one after another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.machines.ranges import Ranges
from rlplace.placement.memory.footprint import Assumptions, Demand, Footprint, HostPart, Part, Placed
from rlplace.placement.memory.occupancy import (
    AcceleratorClass,
    HostClass,
    Occupancy,
    accelerator_classes,
    host_classes,
)
from rlplace.placement.memory.shared import SharedMemory
from rlplace.placement.schedule import Needs, Residency, Schedule, base_stage, schedule_of, split_stages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A stage, or the entry to one; `start` is the first entry of all."""

    stage: str
    entering: bool = False
    start: bool = False

    def __str__(self) -> str:
        return "start" if self.start else f"enter {self.stage}" if self.entering else self.stage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Bytes of one component for one thing, all its ranks there together."""

    component: str  # for HostPart.SHARED: channels, weights
    part: Part | HostPart
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one accelerator, or one host, holds at a moment."""

    moment: Moment
    holds: tuple[Hold, ...]  # the largest first

    @property
    def total_bytes(self) -> int:
        return sum(hold.size_bytes for hold in self.holds)

    def of(self, component: str) -> int:
        return sum(hold.size_bytes for hold in self.holds if hold.component == component)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The loads of alike accelerators, or of alike hosts: each of them holds this."""

    numbers: Ranges  # of accelerators over the cluster, or of nodes
    kind: str
    capacity_bytes: int  # of one; 0: not known
    loads: tuple[Load, ...]  # in the order of time

    @property
    def worst(self) -> Load:
        """The first of the fullest moments; of a stage and its entry, the stage."""
        return max(self.loads, key=lambda load: (load.total_bytes, not load.moment.entering))

    @property
    def margin_bytes(self) -> int | None:
        """What is free at the worst moment, below 0 where it does not fit; None where the capacity is not known."""
        return self.capacity_bytes - self.worst.total_bytes if self.capacity_bytes else None

    @property
    def shared_bytes(self) -> int:
        """Of a host: what lies in its shared memory, the same at all moments."""
        return sum(hold.size_bytes for hold in self.worst.holds if hold.part is HostPart.SHARED)

    @property
    def fits(self) -> bool:
        return (self.margin_bytes or 0) >= 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """Bytes by accelerator, moment, component and purpose; never changes."""

    footprints: Mapping[str, tuple[Footprint, ...]]  # component -> of one rank, for each occupancy of its ranks
    accelerators: tuple[Account, ...]
    hosts: tuple[Account, ...]
    measured: tuple[str, ...] = ()  # components whose numbers an earlier run measured
    notes: tuple[str, ...] = ()

    def bytes(self, component: str, residency: Residency) -> int:
        """What the fullest rank holds on each of its accelerators, as the worker itself reports it after a move."""
        return max((f.reported_bytes(residency) for f in self.footprints[component]), default=0)

    def host_bytes(self, component: str, residency: Residency) -> int:
        """What the fullest rank keeps on its host."""
        return max((f.host_bytes(residency) for f in self.footprints[component]), default=0)

    def account(self, accelerator: int) -> Account:
        """The account of a global accelerator number. Raises KeyError where no component uses it."""
        for account in self.accelerators:
            if accelerator in account.numbers:
                return account
        raise KeyError(f"no component uses accelerator {accelerator}")

    def shared_bytes(self, node: int) -> int:
        """What the run takes of the shared memory of a node, at most: of its /dev/shm, or `cluster.comm.shm_folder`."""
        return next((account.shared_bytes for account in self.hosts if node in account.numbers), 0)

    def worst(self, accelerator: int) -> Load:
        return self.account(accelerator).worst

    def margin(self, accelerator: int) -> int | None:
        return self.account(accelerator).margin_bytes

    @property
    def tightest(self) -> Account | None:
        """The accelerators with the smallest margin, or the fullest where no capacity is known; None without any."""
        return min(
            self.accelerators,
            key=lambda a: (a.margin_bytes is None, a.margin_bytes or 0, -a.worst.total_bytes),
            default=None,
        )

    @property
    def lacking(self) -> tuple[tuple[str, str], ...]:
        """(component, why) of those that cannot work with what they are given."""
        return tuple(
            dict.fromkeys(
                (c, f.lacking) for c, found in self.footprints.items() for f in found if f.lacking is not None
            )
        )

    @property
    def fits(self) -> bool:
        """Nothing is known that does not fit."""
        return all(account.fits for account in (*self.accelerators, *self.hosts)) and not self.lacking


Measurements = Mapping[str, Mapping[Residency, int]]  # component -> residency -> bytes of a rank on each accelerator


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Derived:
    """What follows from a placement, needs and offloads."""

    placement: HybridComponentPlacement
    needs: Needs
    offload: Mapping[str, bool]
    schedule: Schedule
    accelerators: tuple[AcceleratorClass, ...]
    hosts: tuple[HostClass, ...]

    @classmethod
    def of(cls, placement: HybridComponentPlacement, needs: Needs, offload: Mapping[str, bool]) -> _Derived:
        leaving = {c: offload.get(c, False) for c in placement.components}
        return cls(
            placement=placement,
            needs=needs,
            offload=offload,
            schedule=schedule_of(placement, split_stages(needs, placement, leaving), leaving),
            accelerators=accelerator_classes(placement),
            hosts=host_classes(placement),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """What a ledger is computed from. Components without a demand count as 0 bytes; `notes` of the ledger list them."""

    placement: HybridComponentPlacement
    needs: Needs
    offload: Mapping[str, bool]  # component -> leaves the accelerators where others need them
    demands: Mapping[str, Demand]
    # component -> key of its block, where that is not its name: rewards may share one
    blocks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # component -> world size, where another one than the placement's is asked about
    ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    measured: Measurements = dataclasses.field(default_factory=dict)
    # what a run was found to hold beside what is computed here
    unforeseen: Measurements = dataclasses.field(default_factory=dict)
    assumptions: Assumptions = dataclasses.field(default_factory=Assumptions)
    notes: tuple[str, ...] = ()
    shared: SharedMemory = dataclasses.field(default_factory=SharedMemory)  # on the hosts, beside what components hold
    # Derived here once, and kept in cases that differ in demands alone.
    derived: _Derived | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        old = self.derived
        if old is None or old.placement is not self.placement or old.offload != self.offload or old.needs != self.needs:
            object.__setattr__(self, "derived", _Derived.of(self.placement, self.needs, self.offload))

    def schedule(self) -> Schedule:
        """As in the plan. Components that would clash may stay: here memory decides, not the rule."""
        assert self.derived is not None, "made with the case"
        return self.derived.schedule

    def ledger(self) -> MemoryLedger:
        return _Count(self).ledger()

    def block(self, component: str) -> str:
        return self.blocks.get(component, component)

    def with_demand(self, component: str, demand: Demand) -> MemoryCase:
        return dataclasses.replace(self, demands={**self.demands, component: demand})


class _Count:
    """One computation of a ledger. Owns the footprints, each worked out once."""

    def __init__(self, case: MemoryCase) -> None:
        self._case = case
        self._schedule = case.schedule()
        self._footprints: dict[tuple[str, Placed], Footprint] = {}

    def ledger(self) -> MemoryLedger:
        case = self._case
        assert case.derived is not None, "made with the case"
        accelerators = tuple(map(self._accelerators, case.derived.accelerators))
        hosts = tuple(map(self._hosts, case.derived.hosts))
        unknown = [c for c in case.placement.components if c not in case.demands and c not in case.measured]
        note = (f"nothing is known of {', '.join(unknown)}: counted as 0 bytes",) if unknown else ()
        return MemoryLedger(
            footprints={
                c: tuple(f for (name, _), f in self._footprints.items() if name == c) for c in case.placement.components
            },
            accelerators=accelerators,
            hosts=hosts,
            measured=tuple(c for c in case.placement.components if case.measured.get(c)),
            notes=(*case.notes, *note),
        )

    def _footprint(self, occupancy: Occupancy, kind: str, memory_bytes: int) -> Footprint:
        case = self._case
        declared = case.placement.spec(occupancy.component).parallel.tensor_parallel_size
        placed = Placed(
            ranks=case.ranks.get(occupancy.component, case.placement.world_size(occupancy.component)),
            accelerators_per_rank=occupancy.accelerators_per_rank,
            tensor_parallel=declared if declared > 1 else max(1, occupancy.accelerators_per_rank),
            memory_bytes=memory_bytes,
            kind=kind,
            assumptions=case.assumptions,
        )
        key = (occupancy.component, placed)
        if key not in self._footprints:
            demand = case.demands.get(occupancy.component)
            formula = demand.footprint(placed) if demand is not None else _NOTHING
            measured = formula.measured(case.measured.get(occupancy.component, {}))
            self._footprints[key] = measured.with_unforeseen(case.unforeseen.get(occupancy.component, {}))
        return self._footprints[key]

    def _moments(self) -> Iterable[tuple[Moment, Mapping[str, Residency]]]:
        """Every moment in the order of time, with the residency of each component."""
        schedule = self._schedule
        first = schedule.stages[0]
        yield Moment(stage=first, entering=True, start=True), schedule.residency[first]
        for stage in schedule.stages:
            yield Moment(stage=stage, entering=True), schedule.residency[stage]
            yield Moment(stage=stage), schedule.residency[stage]

    def _accelerators(self, used: AcceleratorClass) -> Account:
        found = [
            (occupancy, self._footprint(occupancy, used.kind, used.memory_bytes)) for occupancy in used.occupancies
        ]
        loads: list[Load] = []
        for moment, held in self._moments():
            holds: list[Hold] = []
            for occupancy, footprint in found:
                parts = self._parts(moment, occupancy.component, footprint, held[occupancy.component])
                holds += _holds(occupancy.component, parts, occupancy.ranks_per_accelerator)
            if moment.start:  # one after another, so the largest of them speaks for all
                loading = [
                    _holds(occupancy.component, footprint.loading.items(), 1)
                    for occupancy, footprint in found
                    if held[occupancy.component] > Residency.OFF
                ]
                holds += max(loading, key=lambda parts: sum(h.size_bytes for h in parts), default=[])
            loads.append(_load(moment, holds))
        return Account(numbers=used.accelerators, kind=used.kind, capacity_bytes=used.memory_bytes, loads=tuple(loads))

    def _parts(
        self, moment: Moment, component: str, footprint: Footprint, held: Residency
    ) -> list[tuple[Part | HostPart, int]]:
        parts: list[tuple[Part | HostPart, int]] = list(footprint.held[held].items())
        if not moment.entering:
            for stage in self._schedule.needs.active_stages(moment.stage, component):
                parts += footprint.working.get(base_stage(stage), {}).items()
        return parts

    def _hosts(self, hosts: HostClass) -> Account:
        found = [
            (occupancy, n, self._footprint(occupancy, hosts.kind, hosts.memory_bytes))
            for occupancy, n in hosts.ranks.items()
        ]
        shared = [
            Hold(component=purpose, part=HostPart.SHARED, size_bytes=size)
            for purpose in self._case.shared.by_purpose
            if (size := self._case.shared.largest(purpose, hosts.nodes))
        ]
        loads: list[Load] = []
        for moment, held in self._moments():
            if moment.entering:
                continue  # copies are made and dropped one by one
            holds: list[Hold] = []
            for occupancy, ranks, footprint in found:
                holds += _holds(occupancy.component, footprint.host.get(held[occupancy.component], {}).items(), ranks)
            holds += shared
            loads.append(_load(moment, holds))
        return Account(numbers=hosts.nodes, kind="host", capacity_bytes=hosts.host_memory_bytes, loads=tuple(loads))


_NOTHING = Footprint(held={residency: {} for residency in Residency})


def _holds(component: str, parts: Iterable[tuple[Part | HostPart, int]], times: int) -> list[Hold]:
    return [Hold(component=component, part=part, size_bytes=size * times) for part, size in parts if size]


def _load(moment: Moment, holds: list[Hold]) -> Load:
    merged: dict[tuple[str, Part | HostPart], int] = {}
    for hold in holds:  # ranks of one component may have several occupancies
        key = (hold.component, hold.part)
        merged[key] = merged.get(key, 0) + hold.size_bytes
    ordered = sorted(merged.items(), key=lambda item: (-item[1], item[0][0], item[0][1].value))
    return Load(moment=moment, holds=tuple(Hold(component=c, part=p, size_bytes=n) for (c, p), n in ordered))
