"""The memory ledger: what every accelerator and every host holds in each stage and on each entry to one.

::

    stage before        entry: releases | all wait | acquires           stage
    held + working ──▶  held before ──▶ what stays ──▶ held after ──▶   held + working

Releases come first, so the most that an entry holds is what it ends with; only the very first entry, which loads the
weights, holds more on the way. Components are taken to be set up one after another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rlplace.placement.machines.ranges import Ranges
from rlplace.placement.memory.footprint import Footprint, HostPart, Part
from rlplace.placement.schedule import Residency


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
