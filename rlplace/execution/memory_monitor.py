"""Track the measured bytes of every rank, check the room before acquires, and explain a lack of memory.

::

    releases ──▶ all acknowledged, with measured bytes ──▶ room for what comes? ── yes ──▶ acquires
                                                                └ no ──▶ error before anything moves
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from rlplace import codes
from rlplace.errors import AcceleratorOutOfMemory, Problem, WorkerError
from rlplace.placement.language.lend import whole_component
from rlplace.placement.language.slots import owner_of
from rlplace.placement.memory.demands import Part
from rlplace.placement.memory.ledger import (
    Measurements,
    MemoryCase,
    MemoryLedger,
    Moment,
)
from rlplace.placement.memory.solve import find_remedies, proposals
from rlplace.placement.schedule import Move, Residency
from rlplace.units import exact_bytes
from rlplace.workers.worker import MoveReport

_ROUNDING = 0.05  # share of the predicted bytes; the accuracy of the memory proof


class Resident(NamedTuple):
    """The memory of one rank on one of its accelerators, after the rank's last move.

    `size_bytes`: the measured bytes. `predicted_bytes`: the bytes that the memory proof predicts.
    """

    component: str
    rank: int
    residency: Residency
    size_bytes: int
    predicted_bytes: int

    @property
    def owner(self) -> str:
        return owner_of(self.component, self.rank)

    def __str__(self) -> str:
        more = self.size_bytes > self.predicted_bytes
        predicted = f", predicted {exact_bytes(self.predicted_bytes)}" if more else ""
        return f"{self.owner}: {self.residency.word} {exact_bytes(self.size_bytes)}{predicted}"


class _Beyond(NamedTuple):
    """An excess over the memory proof on one accelerator.

    `worst`: the rank with the largest excess. `size_bytes`: the excess. `together`: True: an excess of all ranks on the
    accelerator in sum; False: of one rank.
    """

    problem: Problem
    worst: Resident
    size_bytes: int
    together: bool


class MemoryMonitor:
    """Compares the measured memory of every rank with the memory proof. The loop calls `moved` after every move."""

    def __init__(
        self,
        case: MemoryCase,
        *,
        verify: Literal["warn", "stop"] = "warn",
        tell: Callable[[Problem], None] = lambda problem: None,
    ) -> None:
        """Prepare the monitor.

        `case`: the inputs of the plan's memory proof. `verify`: what an excess over the predicted bytes does. "warn":
        each excess is reported once. "stop": an excess of all ranks on an accelerator in sum raises
        AcceleratorOutOfMemory. `tell`: called with each reported excess.
        """
        self._case = case
        self._placement = case.placement
        self._verify = verify
        self._tell = tell
        self._told = set[tuple[str, Residency, bool]]()
        # Component -> last report of each rank; None for a rank that has not moved yet.
        self._now: dict[str, list[MoveReport | None]] = {}
        # (component, residency) -> highest bytes of each rank so far.
        self._seen: dict[tuple[str, Residency], list[int]] = {}

    @functools.cached_property
    def _ledger(self) -> MemoryLedger:
        return self._case.ledger()

    def moved(self, part: str, reports: Sequence[MoveReport]) -> None:
        """Record the memory of a component, or of a part of it, after a move, and compare it with the memory proof.

        `part`: name in the schedule. `reports`: the report of each of its ranks, in the order of ranks.
        """
        residents = self._placement.residents
        component = whole_component(part)
        size = self._placement.world_size(component)
        moved = range(size)
        if part in residents.parts:
            moved = residents.parts[part].ranks
        now = self._now.setdefault(component, [None] * size)
        for rank, report in zip(moved, reports, strict=True):
            now[rank] = report
            seen = self._seen.setdefault((component, report.residency), [0] * size)
            seen[rank] = max(seen[rank], report.accelerator_bytes)
        self._compare(component, dict(zip(moved, reports, strict=True)))

    def _compare(self, component: str, reports: Mapping[int, MoveReport]) -> None:
        """Compare the measured bytes on the accelerators of a component's ranks with the memory proof.

        `reports`: rank -> its report. The tolerance is the reserve or 5 % of the predicted bytes, whichever is
        more, plus the predicted bytes that engines keep while they sleep. If the sum of all ranks on an accelerator
        exceeds its prediction by more, AcceleratorOutOfMemory is raised or the excess is reported, as `verify` says. If
        only a single rank exceeds its prediction by more, the excess is reported: in sum, the ranks fit.
        """
        if not self._case.counts(component):
            # There is no prediction for this component.
            return
        slots = self._placement.slots(component)
        for rank, report in reports.items():
            slot = slots[rank]
            for accelerator in slot.accelerators if report.accelerator_bytes else ():
                residents = self.on(accelerator)
                mine = [
                    r
                    for r in residents
                    if (r.component, r.rank) == (component, slot.rank)
                ]
                problem = self._beyond(
                    accelerator, residents, residents
                ) or self._beyond(accelerator, residents, mine)
                if problem is not None:
                    self._report(problem, accelerator)

    def _report(self, found: _Beyond, accelerator: int) -> None:
        if self._verify == "stop" and found.together:
            raise AcceleratorOutOfMemory(found.problem, accelerator, found.size_bytes)
        told = found.worst.component, found.worst.residency, found.together
        if told not in self._told:
            self._told.add(told)
            self._tell(found.problem)

    def _beyond(
        self, accelerator: int, residents: Sequence[Resident], among: Sequence[Resident]
    ) -> _Beyond | None:
        """Return the excess of measured over predicted bytes, summed over `among`; None within the tolerance.

        `residents`: all ranks with memory on the accelerator. `among`: the same list, or the one rank to check.
        """
        measured = sum(r.size_bytes for r in among)
        predicted = sum(r.predicted_bytes for r in among)
        beyond = measured - predicted
        reserve = self._ledger.account(accelerator).reserve_bytes
        if beyond <= max(reserve, _ROUNDING * predicted) + sum(
            self._kept(r) for r in among
        ):
            return None
        worst = max(among, key=lambda r: r.size_bytes - r.predicted_bytes)
        together = among is residents
        error = "one"
        if together:
            error = "together"
        found = codes.problem(
            "memory-beyond-plan",
            worst.component,
            f"{exact_bytes(measured)}, predicted {exact_bytes(predicted)}",
            error=error,
            owner=worst.owner,
            accelerator=accelerator,
            beyond=exact_bytes(beyond),
            beyond_bytes=beyond,
            reserve=exact_bytes(reserve),
            residents="\n".join(map(str, residents)),
        )
        return _Beyond(found, worst, beyond, together)

    def _kept(self, resident: Resident) -> int:
        """Return the predicted bytes that the rank's engine keeps on the accelerator while it sleeps.

        The result is 0 if the rank has no sleeping engine. The measured bytes of the engine include these bytes.
        """
        footprints = self._ledger.footprints[resident.component]
        return max(
            (f.held[resident.residency].get(Part.ASLEEP, 0) for f in footprints),
            default=0,
        )

    @property
    def held(self) -> Measurements:
        """Component -> residency -> the largest bytes per accelerator that were measured on any rank so far."""
        held: dict[str, dict[Residency, int]] = {}
        for (component, residency), ranks in self._seen.items():
            held.setdefault(component, {})[residency] = max(ranks)
        return held

    @functools.cached_property
    def _occupants(self) -> Mapping[int, Sequence[tuple[str, int]]]:
        """Return accelerator -> the (component, rank) pairs that are placed on it."""
        occupants: dict[int, list[tuple[str, int]]] = {}
        for component in self._placement.components:
            for slot in self._placement.slots(component):
                for accelerator in slot.accelerators:
                    occupants.setdefault(accelerator, []).append((component, slot.rank))
        return occupants

    def on(self, accelerator: int) -> list[Resident]:
        """Return the memory of each rank on an accelerator, in descending order of measured bytes.

        Ranks without memory on the accelerator are left out.
        """
        found: list[Resident] = []
        for component, rank in self._occupants[accelerator]:
            report = self._now[component][rank] if component in self._now else None
            if report is not None and report.accelerator_bytes:
                predicted = self._ledger.bytes(component, report.residency)
                found.append(
                    Resident(
                        component,
                        rank,
                        report.residency,
                        report.accelerator_bytes,
                        predicted,
                    )
                )
        return sorted(found, key=lambda resident: -resident.size_bytes)

    # ── before it happens ────────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, moves: Sequence[Move], stage: str) -> None:
        """Raise AcceleratorOutOfMemory if the memory for the acquires `moves` on entry to `stage` is not free.

        Components that stay on an accelerator count with their measured bytes. Components that acquire memory count
        with the bytes measured at an earlier time, or else with the predicted bytes. An accelerator is checked only if
        a staying component holds more than predicted: otherwise the plan fits.
        """
        residents = self._placement.residents
        # Component, or part of one -> the residency that it acquires.
        parts = {move.component: move.after for move in moves}
        entered = {a for part in parts for a in residents.accelerators(part)}
        for accelerator in sorted(entered):
            # Component -> its part that acquires memory here; an accelerator has one part of each.
            coming = {
                whole_component(part): after
                for part, after in parts.items()
                if accelerator in residents.accelerators(part)
            }
            capacity = self._placement.topology.node_of(accelerator).memory_bytes
            staying = [r for r in self.on(accelerator) if r.component not in coming]
            if not capacity or all(r.size_bytes <= r.predicted_bytes for r in staying):
                continue
            wanted = Counter[str]()
            for component, rank in self._occupants[accelerator]:
                if component in coming:
                    after = coming[component]
                    seen = self._seen.get((component, after))
                    wanted[component] += (
                        self._ledger.bytes(component, after)
                        if seen is None
                        else seen[rank]
                    )
            free = capacity - sum(r.size_bytes for r in staying)
            if wanted.total() <= free:
                continue
            first = max(wanted, key=lambda c: wanted[c])
            lacking = wanted.total() - free
            asked = ", ".join(
                f"{c} {coming[c].word} {exact_bytes(size)}"
                for c, size in wanted.items()
                if size
            )
            remedy = self._fix(
                accelerator, stage, first, coming[first], lacking, entering=True
            )
            error = "entry"
            if not remedy:
                error = "entry-without-remedy"
            full = codes.problem(
                "accelerator-out-of-memory",
                first,
                f"needed: {asked}",
                error=error,
                accelerator=accelerator,
                stage=stage,
                capacity=exact_bytes(capacity),
                free=exact_bytes(free),
                residents="\n".join(map(str, staying)),
                remedy=remedy,
                staying=staying[0].component,
            )
            raise AcceleratorOutOfMemory(full, accelerator, lacking)

    # ── after it happened ────────────────────────────────────────────────────────────────────────────────────────────

    def explain(self, error: WorkerError) -> WorkerError:
        """Return an out-of-memory error with two additions: the ranks on the full accelerator, and a suggested remedy.

        An error of any other kind is returned unchanged.
        """
        cause = error.cause
        held = self._case.schedule().residency.get(error.stage or "", {})
        if (
            not isinstance(cause, AcceleratorOutOfMemory)
            or cause.accelerator is None
            or error.component not in held
        ):
            return error
        component = error.component
        part = self._placement.residents.part_of(component, error.rank)
        entering = error.method == "move"
        lacking = cause.lacking_bytes
        fix = self._fix(
            cause.accelerator,
            str(error.stage),
            component,
            held[part],
            lacking,
            entering=entering,
        )
        residents = [
            f"measured after its last move: {resident}"
            for resident in self.on(cause.accelerator)
        ]
        why = "\n".join(filter(None, [cause.problem.why, *residents]))
        problem = dataclasses.replace(
            cause.problem, why=why, fix=fix or cause.problem.fix
        )
        return error.explained_by(
            AcceleratorOutOfMemory(problem, cause.accelerator, cause.lacking_bytes)
        )

    def _fix(
        self,
        accelerator: int,
        stage: str,
        component: str,
        after: Residency,
        lacking: int,
        *,
        entering: bool,
    ) -> str | None:
        """Return a text with changed settings with which the plan would fit the measured bytes; None if there are none.

        `component`: the component that lacks memory. `after`: its residency in `stage`. `lacking`: the missing bytes.
        `entering`: True: memory is missing on entry to the stage; False: in the stage.
        """
        account = self._ledger.account(accelerator)
        load = next(
            m
            for m in account.loads
            if m.moment == Moment(stage=stage, entering=entering)
        )
        # Component -> its present residency -> bytes beyond the prediction.
        beyond_plan = {
            r.component: {r.residency: beyond}
            for r in self.on(accelerator)
            if (beyond := r.size_bytes - r.predicted_bytes) > 0
        }
        margin = account.capacity_bytes - load.total_bytes
        left = (
            lacking
            + margin
            - sum(size for found in beyond_plan.values() for size in found.values())
        )
        # The other residents explain only part of the lack, so the rest belongs to this component.
        if left > 0:
            ranks = sum(name == component for name, _ in self._occupants[accelerator])
            row = beyond_plan.setdefault(component, {})
            row[after] = row.get(after, 0) + -(-left // max(1, ranks))
        return proposals(
            find_remedies(dataclasses.replace(self._case, unforeseen=beyond_plan))
        )
