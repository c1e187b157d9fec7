"""The joint memory proof of several runs that use the same accelerators in turns.

::

    accelerator 3    run A works (all that it ever holds) + run B between its stages (what stays)   fits
                     run B works (all that it ever holds) + run A between its stages (what stays)   fits

A run works on an accelerator while the accelerator is leased to it. While it is not, the run holds what its components
keep in stages in which none of them works there, and, between two stages, the least that a component keeps in both. On
a host, all runs hold their worst at once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from rlplace.placement.memory.ledger import Account, Load, MemoryLedger
from rlplace.placement.schedule import Schedule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sharer:
    """A run that shares accelerators.

    `stages`: stage -> the accelerators that are leased to the run in it. `ledger`: the memory proof of the run alone.
    """

    name: str
    schedule: Schedule
    stages: Mapping[str, Collection[int]]
    ledger: MemoryLedger

    @property
    def accelerators(self) -> set[int]:
        """The accelerators on which the run has a component."""
        return {n for account in self.ledger.accelerators for n in account.numbers}

    def worst_bytes(self, accelerator: int) -> int:
        """Return the most bytes that the run holds on an accelerator while it is leased to the run."""
        return self._account(accelerator).worst.total_bytes

    def staying(self, accelerator: int) -> dict[str, int]:
        """Return component -> bytes that stay on an accelerator while it is not leased to the run, at the moment with
        the most bytes.
        """
        return max(
            self._staying(accelerator),
            key=lambda found: sum(found.values()),
            default={},
        )

    def _staying(self, accelerator: int) -> Iterator[dict[str, int]]:
        """Yield what stays at each moment at which the accelerator is not leased to the run."""
        entries = self._entries(accelerator)
        for stage, load in entries.items():
            if accelerator not in self.stages[stage]:
                yield _held(load)
        for before, after in self._borders():
            held = _held(entries[before])
            then = _held(entries[after])
            yield {c: min(size, then.get(c, 0)) for c, size in held.items()}

    def _borders(self) -> Iterator[tuple[str, str]]:
        """Yield (stage before, stage after) of each border at which the run may wait."""
        stages = self.schedule.stages
        yield from itertools.pairwise(stages)
        # The next iteration begins behind the last stage; models are saved behind it, too, in any of the stages
        for stage in stages:
            if stage != stages[-1]:
                yield stages[-1], stage

    def _entries(self, accelerator: int) -> dict[str, Load]:
        """Return stage -> what components hold on entry to it, without what work needs in addition."""
        return {
            load.moment.stage: load
            for load in self._account(accelerator).loads
            if load.moment.entering and not load.moment.start
        }

    def _account(self, accelerator: int) -> Account:
        return self.ledger.account(accelerator)


def _held(load: Load) -> dict[str, int]:
    """Return component -> its bytes."""
    held: dict[str, int] = {}
    for hold in load.holds:
        held[hold.component] = held.get(hold.component, 0) + hold.size_bytes
    return held


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """What runs hold on accelerators, or on hosts, that they all use in the same way, while one of them works.

    `numbers`: of the accelerators or hosts. `works`: the run that works; "": all of them, on hosts. `work_bytes`: the
    most that it holds. `staying`: other run -> component -> bytes that stay meanwhile. `room_bytes`: bytes that may be
    used; 0: not known.
    """

    numbers: tuple[int, ...]
    works: str
    work_bytes: int
    staying: Mapping[str, Mapping[str, int]]
    room_bytes: int

    @property
    def total_bytes(self) -> int:
        stay = sum(sum(sizes.values()) for sizes in self.staying.values())
        return self.work_bytes + stay

    @property
    def fits(self) -> bool:
        return not self.room_bytes or self.total_bytes <= self.room_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JointProof:
    """What several runs hold together. `accelerators`: those that at least two runs use. `hosts`: all hosts."""

    accelerators: tuple[Together, ...]
    hosts: tuple[Together, ...]

    @property
    def fits(self) -> bool:
        return all(each.fits for each in (*self.accelerators, *self.hosts))


def prove(runs: Sequence[Sharer]) -> JointProof:
    """Return what the runs hold together, on each accelerator that at least two of them use and on each host."""
    found: dict[tuple[object, ...], list[int]] = {}
    parts: dict[tuple[object, ...], Together] = {}
    for number in sorted(set[int]().union(*(run.accelerators for run in runs))):
        there = [run for run in runs if number in run.accelerators]
        if len(there) < 2:
            continue
        for run in there:
            one = _on_accelerator(number, run, there)
            key = (
                one.works,
                one.work_bytes,
                one.room_bytes,
                tuple((n, tuple(s.items())) for n, s in one.staying.items()),
            )
            found.setdefault(key, []).append(number)
            parts[key] = one
    accelerators = [
        dataclasses.replace(parts[key], numbers=tuple(numbers))
        for key, numbers in found.items()
    ]
    return JointProof(accelerators=tuple(accelerators), hosts=tuple(_hosts(runs)))


def _on_accelerator(number: int, works: Sharer, there: Sequence[Sharer]) -> Together:
    """Return what the runs `there` hold on an accelerator while the run `works` works on it."""
    rooms = [run.ledger.account(number).room_bytes for run in there]
    staying = {run.name: run.staying(number) for run in there if run.name != works.name}
    return Together(
        numbers=(number,),
        works=works.name,
        work_bytes=works.worst_bytes(number),
        staying=staying,
        # The runs may reserve different shares
        room_bytes=min(rooms),
    )


def _hosts(runs: Sequence[Sharer]) -> Iterator[Together]:
    """Yield what the runs hold on each host that at least two of them use, each at its worst moment."""
    nodes = {n for run in runs for account in run.ledger.hosts for n in account.numbers}
    for node in sorted(nodes):
        worst = {}
        rooms = []
        for run in runs:
            for account in run.ledger.hosts:
                if node in account.numbers:
                    worst[run.name] = _held(account.worst)
                    rooms.append(account.room_bytes)
        if len(worst) > 1:
            yield Together(
                numbers=(node,),
                works="",
                work_bytes=0,
                staying=worst,
                room_bytes=min(rooms),
            )
