"""The memory ledger: what every accelerator and every host holds in each stage and on each entry to one.

::

    stage before        entry: releases | all wait | acquires           stage
    held + working ──▶  held before ──▶ what stays ──▶ held after ──▶   held + working

Releases come first, so the most that an entry holds is what it ends with; only the very first entry, which loads the
weights, holds more on the way. Components are taken to be set up one after another.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.lend import lent_part
from rlplace.placement.machines.topology import Ranges
from rlplace.placement.memory.demands import (
    ONCE,
    Bytes,
    Demand,
    Footprint,
    HostBytes,
    HostPart,
    Part,
    Placed,
)
from rlplace.placement.schedule import (
    Needs,
    Residency,
    Schedule,
    base_stage,
    offload_of_parts,
    schedule_of,
)
from rlplace.units import counted

# Value of `memory.reserve`: bytes, a share of each accelerator, or "auto", which depends on the accelerator's kind.
Reserve = int | float | Literal["auto"]
# Component -> residency -> bytes of a rank on each accelerator
Measurements = Mapping[str, Mapping[Residency, int]]
# Purpose ("channels", "weights", "NCCL") -> node rank -> bytes; missing nodes have none.
SharedMemory = Mapping[str, Mapping[int, int]]
Holds = Counter[tuple[str, Part | HostPart]]  # (component, purpose) -> bytes
# Of a GPU. Contexts, and what torch reserves beside tensors, have lines of their own; an engine of vLLM with a share of
# 0.95 of 80 GB has room for its context beside it, as it has in runs.
USUAL_RESERVE = 0.04
_NO_DEMAND = Footprint(held={residency: {} for residency in Residency})


class RankedMeasurements(dict[str, Mapping[Residency, int]]):
    """Measurements together with the number of ranks that each component had when it was measured."""

    def __init__(self, sizes: Measurements, ranks: Mapping[str, int]) -> None:
        """`ranks`: component -> its number of ranks; a component may be missing, if that is not known."""
        super().__init__(sizes)
        self.ranks = dict(ranks)

    def without(self, components: Collection[str]) -> RankedMeasurements:
        """Return the measurements without those of some components."""
        left = {c: sizes for c, sizes in self.items() if c not in components}
        return RankedMeasurements(left, self.ranks)


def other_ranks(
    measured: Measurements, placement: HybridComponentPlacement
) -> dict[str, tuple[int, int]]:
    """Return component -> its numbers of ranks (measured, planned), for components whose two numbers differ.

    Components that are not placed, and those whose measured number of ranks is not known, are left out.
    """
    if not isinstance(measured, RankedMeasurements):
        return {}
    found = {}
    for component in placement.components:
        planned = placement.world_size(component)
        then = measured.ranks.get(component, planned)
        if measured.get(component) and then != planned:
            found[component] = (then, planned)
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A point in time of an iteration: a stage, or the entry to a stage.

    `entering`: whether it is the entry to `stage`. `start`: whether it is the very first entry, which loads the
    weights.
    """

    stage: str
    entering: bool = False
    start: bool = False

    def __str__(self) -> str:
        if self.start:
            return "start"
        if self.entering:
            return f"enter {self.stage}"
        return self.stage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """The bytes that one component uses for one purpose on an accelerator or host, over all its ranks there.

    `component`: the component; for shared memory, its use: channels, weights or NCCL. `part`: the purpose.
    """

    component: str  # for HostPart.SHARED, the purpose: channels, weights, NCCL
    part: Part | HostPart
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The bytes that one accelerator, or one host, holds at a moment. `holds` lists the largest first."""

    moment: Moment
    holds: tuple[Hold, ...]  # the largest first

    @property
    def total_bytes(self) -> int:
        return sum(hold.size_bytes for hold in self.holds)

    def of(self, component: str) -> int:
        return sum(
            hold.size_bytes for hold in self.holds if hold.component == component
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The memory of accelerators, or of hosts, that are all used in the same way. Sizes are per accelerator or host.

    `numbers`: indices of the accelerators in the cluster, or of the nodes. `kind`: kind of accelerator, or "host".
    `capacity_bytes`: memory of one accelerator or host; 0: not known. `reserve_bytes`: part of the capacity that stays
    free for memory that is not counted. `loads`: the load at each moment, in order of time.
    """

    numbers: Ranges  # of accelerators over the cluster, or of nodes
    kind: str
    capacity_bytes: int  # of one; 0: not known
    reserve_bytes: int = 0  # part of the capacity that stays free for uncounted memory
    loads: tuple[Load, ...]  # in the order of time

    @property
    def worst(self) -> Load:
        """The load with the most bytes.

        If several loads have the most bytes, it is the first one of a stage; if none of them is of a stage, the first
        one of an entry.
        """
        return max(
            self.loads, key=lambda load: (load.total_bytes, not load.moment.entering)
        )

    @property
    def room_bytes(self) -> int:
        """The bytes that components may use on each accelerator or host: the capacity without the reserve.

        It is 0 if the capacity is not known or if the reserve takes all of it.
        """
        return self.capacity_bytes - self.reserve_bytes

    @property
    def margin_bytes(self) -> int | None:
        """The bytes of room that stay free at the worst moment; None if the capacity is not known.

        Room is the capacity without the reserve. The number is negative if the load does not fit.
        """
        if self.capacity_bytes:
            return self.room_bytes - self.worst.total_bytes
        return None

    @property
    def shared_bytes(self) -> int:
        """The bytes that each host holds in shared memory. They are equal at all moments."""
        return sum(
            hold.size_bytes for hold in self.worst.holds if hold.part is HostPart.SHARED
        )

    @property
    def fits(self) -> bool:
        return (self.margin_bytes or 0) >= 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """The memory proof of a plan: bytes by accelerator and host, moment, component and purpose. Immutable.

    `footprints`: component -> footprints of one rank, one footprint for each different occupancy of its ranks.
    `accelerators`, `hosts`: one account for each group of accelerators or hosts that are used in the same way.
    `measured`: components whose bytes an earlier run measured. `uncounted`: components whose memory is not known; they
    count as 0 bytes. `notes`: remarks for the user.
    """

    # Component -> footprints of one rank, one for each occupancy of its ranks.
    footprints: Mapping[str, tuple[Footprint, ...]]
    accelerators: tuple[Account, ...]
    hosts: tuple[Account, ...]
    measured: tuple[str, ...] = ()  # components that an earlier run measured
    # Components with unknown memory, counted as 0 bytes.
    uncounted: tuple[str, ...] = ()
    # Component -> a text that says why its measured bytes may not be those of this plan
    caveats: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether the ledger has 0 bytes on every accelerator."""
        return not any(account.worst.total_bytes for account in self.accelerators)

    @property
    def known(self) -> bool:
        """Whether the bytes of every component on accelerators, and the capacity of every accelerator, are known.

        False if the ledger has 0 bytes on every accelerator.
        """
        return (
            not self.empty
            and not self.uncounted
            and all(a.capacity_bytes for a in self.accelerators)
        )

    @property
    def accounts(self) -> tuple[Account, ...]:
        return (*self.accelerators, *self.hosts)

    def bytes(self, component: str, residency: Residency) -> int:
        """Return the bytes of a component's fullest rank on each of its accelerators, as its worker reports them."""
        return max(
            (f.reported_bytes(residency) for f in self.footprints[component]), default=0
        )

    def part_bytes(self, component: str, part: Part) -> int:
        """Return the bytes of one purpose that a component's fullest rank has on each accelerator with its weights."""
        return max(
            (
                f.held[Residency.WEIGHTS].get(part, 0)
                for f in self.footprints[component]
            ),
            default=0,
        )

    def host_bytes(self, component: str, residency: Residency) -> int:
        """Return the bytes on the host of a component's fullest rank, as its worker reports them."""
        return max(
            (f.host_bytes(residency) for f in self.footprints[component]), default=0
        )

    def working(self, component: str) -> dict[str, int]:
        """Return stage -> bytes on each accelerator that a component's fullest rank uses only while the stage runs.

        The bytes of the component's residency are not included; they are used in addition.
        """
        stages = [
            working for f in self.footprints[component] for working in f.working.items()
        ]
        return {
            stage: max(sum(parts.values()) for s, parts in stages if s == stage)
            for stage, _ in stages
        }

    def account(self, accelerator: int) -> Account:
        """Return the account of an accelerator. Raise KeyError if no component uses the accelerator.

        `accelerator`: its number in the cluster.
        """
        for account in self.accelerators:
            if accelerator in account.numbers:
                return account
        raise KeyError(f"no component uses accelerator {accelerator}")

    def shared_bytes(self, node: int) -> int:
        """Return the most bytes that the run takes in the shared memory of a node; 0 for a node without ranks.

        Shared memory is /dev/shm, or `cluster.comm.shm_folder` if that is set.
        """
        return next(
            (account.shared_bytes for account in self.hosts if node in account.numbers),
            0,
        )

    @property
    def tightest(self) -> Account | None:
        """The account of accelerators with the smallest margin; None if no accelerators are used.

        If no capacity is known, it is the account of the accelerators with the most bytes.
        """
        return min(
            self.accelerators,
            key=lambda a: (
                a.margin_bytes is None,
                a.margin_bytes or 0,
                -a.worst.total_bytes,
            ),
            default=None,
        )

    @property
    def lacking(self) -> tuple[tuple[str, str], ...]:
        """Pairs (component, reason) for each component that has too little memory to work."""
        found = (
            (c, f.lacking)
            for c, footprints in self.footprints.items()
            for f in footprints
        )
        return tuple(
            dict.fromkeys(
                (component, why) for component, why in found if why is not None
            )
        )

    @property
    def within_capacity(self) -> bool:
        return all(account.fits for account in self.accounts)

    @property
    def fits(self) -> bool:
        """Whether every load fits and every component has enough memory to work. Unknown capacities count as enough."""
        return self.within_capacity and not self.lacking


# Accelerators and hosts that are used alike: what is computed for one holds for all of them.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """All ranks of one component that have equally many accelerators each.

    `accelerators_per_rank`: 0 for ranks that use only a host. `part`: the part of the component to which they belong,
    if some of its ranks are on lent accelerators; else the component.
    """

    component: str
    accelerators_per_rank: int
    part: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OccupancyClass:
    """Accelerators, or nodes, that have equal hardware and equally many ranks of every `Occupancy`.

    `numbers`: indices of the accelerators in the cluster, or of the nodes. `kind`: kind of accelerator. `memory_bytes`:
    memory of one accelerator; 0: not known. `ranks`: occupancy -> number of its ranks on each accelerator or node.
    `host_bytes`: memory of one node; 0: not known.
    """

    numbers: Ranges  # of accelerators over the cluster, or of nodes
    kind: str  # of accelerator
    memory_bytes: int  # of one accelerator; 0: not known
    ranks: Mapping[Occupancy, int]  # number of ranks on each of them
    host_bytes: int = 0  # of one node; 0: not known


def reserved(reserve: Reserve, kind: str, memory_bytes: int) -> int:
    """Return the bytes of one accelerator that the plan leaves free.

    `reserve`: the config's `memory.reserve`: bytes, a share of the memory, or "auto". `kind`: kind of the accelerator.
    With "auto", nothing is reserved on an emulated accelerator, whose memory is only accounted. `memory_bytes`: memory
    of the accelerator.
    """
    if reserve == "auto":
        reserve = 0.0 if kind == "emulated" else USUAL_RESERVE
    return min(
        memory_bytes,
        round(reserve * memory_bytes) if isinstance(reserve, float) else reserve,
    )


@functools.lru_cache(maxsize=8)
def accelerator_classes(
    placement: HybridComponentPlacement,
) -> tuple[OccupancyClass, ...]:
    """Return the accelerators in use, grouped by equal hardware and ranks, in the order of their lowest numbers.

    The time is linear in nodes and segments, not in accelerators: neighbours with the same hardware and ranks are
    handled together.
    """
    # First accelerator of a run of equal ones -> (kind, memory in bytes).
    hardware: dict[int, tuple[str, int]] = {}
    for node in placement.topology.nodes:
        first = node.first
        for run in node.alike:
            hardware[first] = (node.kind, run.memory_bytes)
            first += run.count
    residents = placement.residents
    # Accelerator -> (occupancy, ranks added or, below 0, removed) from that accelerator on.
    changes: dict[int, list[tuple[Occupancy, int]]] = {}
    for component in placement.components:
        for segment in placement.spec(component).segments:
            occupancy = Occupancy(
                component=component,
                accelerators_per_rank=segment.accelerators_per_rank,
                part=residents.part_of(component, segment.ranks.start),
            )
            ranks = segment.ranks_per_accelerator
            numbers = segment.accelerators
            changes.setdefault(numbers.start, []).append((occupancy, ranks))
            changes.setdefault(numbers.stop, []).append((occupancy, -ranks))
    present: dict[str, Counter[Occupancy]] = {
        component: Counter() for component in placement.components
    }
    found: dict[
        tuple[tuple[str, int], tuple[tuple[Occupancy, int], ...]], list[range]
    ] = {}
    here = ("", 0)
    for start, stop in itertools.pairwise(sorted({*hardware, *changes})):
        here = hardware.get(start, here)
        for occupancy, ranks in changes.get(start, ()):
            present[occupancy.component][occupancy] += ranks
        if there := tuple(
            (o, ranks) for row in present.values() for o, ranks in row.items() if ranks
        ):
            found.setdefault((here, there), []).append(range(start, stop))
    return tuple(
        OccupancyClass(
            numbers=Ranges.of(places), kind=kind, memory_bytes=memory, ranks=dict(there)
        )
        for ((kind, memory), there), places in found.items()
    )


@functools.lru_cache(maxsize=8)
def host_classes(placement: HybridComponentPlacement) -> tuple[OccupancyClass, ...]:
    """Return the nodes that have a rank, grouped by equal hardware and ranks, in the order of their lowest numbers.

    The time is linear in nodes and ranks.
    """
    hosted: list[dict[Occupancy, int]] = [{} for _ in placement.topology.nodes]
    for component in placement.components:
        at = placement.locations(component)
        parts = [component] * len(at.node)
        lent = placement.spec(component).lent_ranks
        if lent:
            parts[-lent:] = [lent_part(component)] * lent
        found_here = Counter(zip(at.node, at.count, parts, strict=True))
        for (node, each, part), ranks in found_here.items():
            occupancy = Occupancy(
                component=component, accelerators_per_rank=each, part=part
            )
            hosted[node][occupancy] = ranks
    found: dict[
        tuple[str, int, int, tuple[tuple[Occupancy, int], ...]], list[range]
    ] = {}
    for here, there in zip(placement.topology.nodes, hosted, strict=True):
        if there:
            key = (
                here.kind,
                here.memory_bytes,
                here.host_memory_bytes,
                tuple(there.items()),
            )
            found.setdefault(key, []).append(range(here.rank, here.rank + 1))
    return tuple(
        OccupancyClass(
            numbers=Ranges.of(nodes),
            kind=kind,
            memory_bytes=memory,
            ranks=dict(ranks),
            host_bytes=host,
        )
        for (kind, memory, host, ranks), nodes in found.items()
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """All inputs from which a memory ledger is computed.

    `demands`: component -> its memory demand. Components without a demand count as 0 bytes, and the `notes` of the
    ledger name them. `needs`: the least residency of each component in each stage. `offload`: component -> whether it
    releases accelerators that other components need. `blocks`: component -> key of its config block, if that is not its
    name. `measured`: bytes of an earlier run, which replace computed bytes. `unforeseen`: bytes that are added to the
    computed ones. `unknown`: components of which only the host memory is known. `shared`: shared memory of the nodes.
    `reserve`: memory of each accelerator that stays free. `batches`: component -> sequences per optimizer step of each
    replica, which micro-batches must divide. `copies_checkpoints`: whether hosts hold copies of the state until a
    checkpoint is written. `job`: function that plans the job with changed config lines and returns the new case, or
    None if the plan is rejected. `lines`: key path -> value of the lines that this case has changed.
    """

    placement: HybridComponentPlacement
    needs: Needs
    # Component -> whether it releases accelerators that other components need.
    offload: Mapping[str, bool]
    demands: Mapping[str, Demand]
    # Component -> key of its config block, if that is not its name; several rewards may share one.
    blocks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    measured: Measurements = dataclasses.field(default_factory=dict)
    # Bytes that a run was found to hold in addition to the computed ones.
    unforeseen: Measurements = dataclasses.field(default_factory=dict)
    # Components with a demand of their hosts alone: what they take of accelerators is not known.
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    # Shared memory of the hosts, in addition to what components hold.
    shared: SharedMemory = dataclasses.field(default_factory=dict)
    reserve: Reserve = 0
    # Component -> sequences per optimizer step of each replica; micro-batches must divide them.
    batches: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # whether checkpoints are copied on the hosts until they are written
    copies_checkpoints: bool = True
    # Plans the same job with changed config lines; returns its case, or None if the plan is rejected. None without a
    # config.
    job: Callable[[Mapping[str, object]], MemoryCase | None] | None = None
    # Key path -> value of the lines that this case has changed in the config.
    lines: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def with_lines(self, lines: Mapping[str, object]) -> MemoryCase | None:
        """Return the case of the job with further config lines changed; None if the changed plan is rejected.

        `lines`: key path -> value. Lines that this case has changed already stay changed.
        """
        assert self.job is not None, "asked of a case without a config"
        lines = {**self.lines, **lines}
        found = self.job(lines)
        return found and dataclasses.replace(
            found, job=self.job, lines=lines, unforeseen=self.unforeseen
        )

    def schedule(self) -> Schedule:
        """Return the schedule of the plan.

        A component that cannot leave accelerators which another component needs stays on them here. `find_clashes`
        would report this as an error; the ledger decides by bytes whether it fits.
        """
        residents = self.placement.residents
        needs = self.needs.with_lent(residents.borrowers)
        leaving = offload_of_parts(residents, self.offload)
        return schedule_of(residents, needs, leaving, residents.parts)

    def ledger(self) -> MemoryLedger:
        components = self.placement.components
        schedule = self.schedule()
        footprints: dict[str, dict[Placed, Footprint]] = {c: {} for c in components}

        def rank_in(used: OccupancyClass) -> dict[Occupancy, Footprint]:
            """Return occupancy -> footprint of one rank, for each occupancy in `used`.

            Footprints of equal placements are computed once.
            """
            found = {}
            for occupancy in used.ranks:
                placed = self._placed(occupancy, used)
                known = footprints[occupancy.component]
                found[occupancy] = known.get(placed) or self._footprint(
                    occupancy.component, placed
                )
                known[placed] = found[occupancy]
            return found

        accelerators = [
            dataclasses.replace(
                _count_accelerators(a, rank_in(a), schedule),
                reserve_bytes=reserved(self.reserve, a.kind, a.memory_bytes),
            )
            for a in accelerator_classes(self.placement)
        ]
        hosts = [
            _count_hosts(h, rank_in(h), schedule, self.shared)
            for h in host_classes(self.placement)
        ]
        unknown = [c for c in components if not self.counts(c)]
        note = (
            (f"nothing is known of {', '.join(unknown)}: counted as 0 bytes",)
            if unknown
            else ()
        )
        return MemoryLedger(
            footprints={c: tuple(found.values()) for c, found in footprints.items()},
            accelerators=tuple(accelerators),
            hosts=tuple(hosts),
            measured=tuple(c for c in components if self.measured.get(c)),
            uncounted=tuple(unknown),
            caveats=self._caveats(),
            notes=(*self.notes, *note),
        )

    def _placed(self, occupancy: Occupancy, used: OccupancyClass) -> Placed:
        component = occupancy.component
        each = occupancy.accelerators_per_rank
        parallel = self.placement.spec(component).parallel
        declared = parallel.tensor_parallel_size
        return Placed(
            ranks=self.placement.world_size(component),
            accelerators_per_rank=each,
            tensor_parallel=declared if declared > 1 else max(1, each),
            context_parallel=parallel.context_parallel_size,
            memory_bytes=used.memory_bytes,
            kind=used.kind,
        )

    def _footprint(self, component: str, placed: Placed) -> Footprint:
        demand = self.demands.get(component)
        formula = demand.footprint(placed) if demand is not None else _NO_DEMAND
        return formula.corrected(
            self.measured.get(component, {}), self.unforeseen.get(component, {})
        )

    def _caveats(self) -> dict[str, str]:
        """Return component -> a caveat, for components that were measured with another number of ranks."""
        found = {}
        for component, (then, planned) in other_ranks(
            self.measured, self.placement
        ).items():
            found[component] = (
                f"measured with {counted(then, 'rank')}, planned with {planned}: what a rank holds may differ"
            )
        return found

    def counts(self, component: str) -> bool:
        """Return whether the bytes that a component holds on accelerators are known."""
        known = component in self.demands or component in self.measured
        return known and component not in self.unknown

    def block(self, component: str) -> str:
        return self.blocks.get(component, component)

    def sharers(self, component: str) -> list[str]:
        """Return all components that use the same config block as `component`, including `component` itself."""
        return [
            c
            for c in self.placement.components
            if self.block(c) == self.block(component)
        ]

    def changed(self, components: Iterable[str], **values: object) -> MemoryCase:
        """Return the case with changed values in the memory demands of `components`.

        `values`: field of the demand, or key of the component's config block -> new value. A change applies to all
        components that share the config block.
        """
        demands = dict(self.demands)
        for component in {
            c for name in components for c in self.sharers(name) if c in demands
        }:
            for key, value in values.items():
                path = key if hasattr(demands[component], key) else f"block.{key}"
                demands[component] = _with(demands[component], path, value)
        return dataclasses.replace(self, demands=demands)


def _with(of: Any, key: str, value: object) -> Any:
    """Return a copy of a dataclass in which one field, possibly of a nested dataclass, has a new value.

    `of`: the dataclass. `key`: the path of the field, such as `block.optimizer.kind`.
    """
    field, _, rest = key.partition(".")
    inside = _with(getattr(of, field), rest, value) if rest else value
    return dataclasses.replace(of, **{field: inside})


def _moments(schedule: Schedule) -> Iterator[tuple[Moment, Mapping[str, Residency]]]:
    """Yield (moment, residency of each component) in order of time."""
    first = schedule.stages[0]
    yield Moment(stage=first, entering=True, start=True), schedule.residency[first]
    for stage in schedule.stages:
        yield Moment(stage=stage, entering=True), schedule.residency[stage]
        yield Moment(stage=stage), schedule.residency[stage]


def _count_accelerators(
    used: OccupancyClass, footprints: Mapping[Occupancy, Footprint], schedule: Schedule
) -> Account:
    loads: list[Load] = []
    for moment, residency in _moments(schedule):
        holds = Holds()
        loading: list[tuple[str, Bytes]] = []
        for occupancy, ranks in used.ranks.items():
            component = occupancy.component
            footprint = footprints[occupancy]
            held = residency[occupancy.part]
            _add(holds, component, footprint.held[held], ranks)
            for stage in (
                ()
                if moment.entering
                else schedule.needs.active_stages(moment.stage, occupancy.part)
            ):
                _add(
                    holds,
                    component,
                    footprint.working.get(base_stage(stage), {}),
                    ranks,
                )
            if moment.start and held > Residency.OFF:
                loading.append((component, footprint.loading))
        # Components load one after another, so only the largest loading counts.
        _add(
            holds,
            *max(loading, key=lambda found: sum(found[1].values()), default=("", {})),
        )
        loads.append(_load(moment, holds))
    return Account(
        numbers=used.numbers,
        kind=used.kind,
        capacity_bytes=used.memory_bytes,
        loads=tuple(loads),
    )


def _count_hosts(
    used: OccupancyClass,
    footprints: Mapping[Occupancy, Footprint],
    schedule: Schedule,
    shared: SharedMemory,
) -> Account:
    loads: list[Load] = []
    for moment, residency in _moments(schedule):
        if moment.entering:
            # Host copies are made and dropped one tensor at a time, so entries hold no more than stages.
            continue
        holds = Holds()
        # Among equal nodes, the one with the most shared memory counts.
        for purpose, sizes in shared.items():
            holds[purpose, HostPart.SHARED] = max(
                sizes.get(node, 0) for node in used.numbers
            )
        for occupancy, ranks in used.ranks.items():
            component = occupancy.component
            _add(
                holds,
                component,
                footprints[occupancy].host.get(residency[occupancy.part], {}),
                ranks,
            )
        loads.append(_load(moment, holds))
    return Account(
        numbers=used.numbers,
        kind="host",
        capacity_bytes=used.host_bytes,
        loads=tuple(loads),
    )


def _add(
    holds: Holds, component: str, parts: Bytes | HostBytes, ranks: int = 1
) -> None:
    for part, size in parts.items():
        holds[component, part] += size if part in ONCE else size * ranks


def _load(moment: Moment, holds: Holds) -> Load:
    ordered = sorted(
        holds.items(), key=lambda item: (-item[1], item[0][0], item[0][1].value)
    )
    return Load(
        moment=moment,
        holds=tuple(
            Hold(component=c, part=p, size_bytes=n) for (c, p), n in ordered if n
        ),
    )
