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
from rlplace.placement.memory.occupancy import AcceleratorClass, ClusterOccupancy, HostClass, Occupancy, occupancy_of
from rlplace.placement.memory.shared import SharedMemory
from rlplace.placement.schedule import Needs, Residency, Schedule, base_stage, derive_schedule


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

    footprints: Mapping[str, tuple[Footprint, ...]]  # component -> of one rank, for each way its ranks sit
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
class MemoryCase:
    """What is asked about. Components without a demand are counted as nothing, which `notes` of the ledger says."""

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
    # Worked out here, once for a placement however many questions are derived from this one.
    seating: tuple[HybridComponentPlacement, ClusterOccupancy] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.seating is None or self.seating[0] is not self.placement:
            object.__setattr__(self, "seating", (self.placement, occupancy_of(self.placement)))

    def schedule(self) -> Schedule:
        """As in the plan. Residents that would clash are let stay: here memory decides, not the rule."""
        placed = self.placement.components
        offload = {c: self.offload.get(c, False) for c in placed}
        return derive_schedule(self.placement, self.needs, offload, allow_resident=placed)

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
        assert case.seating is not None, "a case has seats from the start"
        accelerators = tuple(self._accelerators(bench) for bench in case.seating[1].benches)
        hosts = tuple(self._hosts(house) for house in case.seating[1].houses)
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

    def _footprint(self, seat: Occupancy, kind: str, memory_bytes: int) -> Footprint:
        case = self._case
        declared = case.placement.spec(seat.component).parallel.tensor_parallel_size
        placed = Placed(
            ranks=case.ranks.get(seat.component, case.placement.world_size(seat.component)),
            accelerators_per_rank=seat.accelerators_per_rank,
            tensor_parallel=declared if declared > 1 else max(1, seat.accelerators_per_rank),
            memory_bytes=memory_bytes,
            kind=kind,
            assumptions=case.assumptions,
        )
        key = (seat.component, placed)
        if key not in self._footprints:
            demand = case.demands.get(seat.component)
            formula = demand.footprint(placed) if demand is not None else _NOTHING
            measured = formula.measured(case.measured.get(seat.component, {}))
            self._footprints[key] = measured.with_unforeseen(case.unforeseen.get(seat.component, {}))
        return self._footprints[key]

    def _moments(self) -> Iterable[tuple[Moment, Mapping[str, Residency]]]:
        """Every moment in the order of time, with the residency of each component."""
        schedule = self._schedule
        first = schedule.stages[0]
        yield Moment(stage=first, entering=True, start=True), schedule.residency[first]
        for stage in schedule.stages:
            yield Moment(stage=stage, entering=True), schedule.residency[stage]
            yield Moment(stage=stage), schedule.residency[stage]

    def _accelerators(self, bench: AcceleratorClass) -> Account:
        found = [(seat, self._footprint(seat, bench.kind, bench.memory_bytes)) for seat in bench.seats]
        loads: list[Load] = []
        for moment, held in self._moments():
            holds: list[Hold] = []
            for seat, footprint in found:
                parts = self._parts(moment, seat.component, footprint, held[seat.component])
                holds += _holds(seat.component, parts, seat.ranks_per_accelerator)
            if moment.start:  # one after another, so the largest of them speaks for all
                loading = [
                    _holds(seat.component, footprint.loading.items(), 1)
                    for seat, footprint in found
                    if held[seat.component] > Residency.OFF
                ]
                holds += max(loading, key=lambda parts: sum(h.size_bytes for h in parts), default=[])
            loads.append(_load(moment, holds))
        return Account(
            numbers=bench.accelerators, kind=bench.kind, capacity_bytes=bench.memory_bytes, loads=tuple(loads)
        )

    def _parts(
        self, moment: Moment, component: str, footprint: Footprint, held: Residency
    ) -> list[tuple[Part | HostPart, int]]:
        parts: list[tuple[Part | HostPart, int]] = list(footprint.held[held].items())
        if not moment.entering:
            for stage in self._schedule.needs.stages_at_work(moment.stage, component):
                parts += footprint.working.get(base_stage(stage), {}).items()
        return parts

    def _hosts(self, house: HostClass) -> Account:
        found = [(seat, n, self._footprint(seat, house.kind, house.memory_bytes)) for seat, n in house.ranks.items()]
        shared = [
            Hold(component=purpose, part=HostPart.SHARED, size_bytes=size)
            for purpose in self._case.shared.by_purpose
            if (size := self._case.shared.largest(purpose, house.nodes))
        ]
        loads: list[Load] = []
        for moment, held in self._moments():
            if moment.entering:
                continue  # copies are made and dropped one by one
            holds: list[Hold] = []
            for seat, ranks, footprint in found:
                holds += _holds(seat.component, footprint.host.get(held[seat.component], {}).items(), ranks)
            holds += shared
            loads.append(_load(moment, holds))
        return Account(
            numbers=house.nodes,
            kind="host",
            capacity_bytes=house.host_memory_bytes,
            loads=tuple(loads),
        )


_NOTHING = Footprint(held={residency: {} for residency in Residency})


def _holds(component: str, parts: Iterable[tuple[Part | HostPart, int]], times: int) -> list[Hold]:
    return [Hold(component=component, part=part, size_bytes=size * times) for part, size in parts if size]


def _load(moment: Moment, holds: list[Hold]) -> Load:
    merged: dict[tuple[str, Part | HostPart], int] = {}
    for hold in holds:  # ranks of one component may sit in several ways
        key = (hold.component, hold.part)
        merged[key] = merged.get(key, 0) + hold.size_bytes
    ordered = sorted(merged.items(), key=lambda item: (-item[1], item[0][0], item[0][1].value))
    return Load(moment=moment, holds=tuple(Hold(component=c, part=p, size_bytes=n) for (c, p), n in ordered))
