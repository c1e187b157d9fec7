"""Replace the plan of a run between two iterations, with all state.

::

    iteration 50 ─▶ save ─▶ end groups, channels ─▶ launch the groups of the next plan ─▶ load ─▶ iteration 51
                     │              │                    │ fails: launch the plan before ─▶ load ─▶ iteration 51
                     │              └ groups that do not move stay, with their state, and follow the next plan
                     └ shared memory, if it has room; else the run's folder. Removed as soon as it is loaded

Ray, its processes and the reserved accelerators stay. The numbers are those of a run that is stopped and resumed there:
those that start load what a resumed run loads, and those that stay have it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.checkpoints.checkpoint import Checkpoint
from rlplace.comm.shared_memory.folder import free_bytes
from rlplace.errors import RayDied, RlplaceError, WorkerError, WorkerTimeout
from rlplace.execution.faults import History
from rlplace.placement.schedule import Residency
from rlplace.placement.show.view import PlanView
from rlplace.runtime.launched import (
    JobSpec,
    Launched,
    launched,
    loaded,
    slots_of,
    watched,
    went_back,
    with_state,
)
from rlplace.runtime.staying import highest_residency, staying
from rlplace.units import show_bytes
from rlplace.workers.launch.cluster import Cluster

_FOLDER = "change"  # of the state, in shared memory or in the run's folder
# The state has to take at most this share of what is free in shared memory
_SHARE = 0.5
_MORE_BYTES = 16 << 20  # of files beside the tensors
# The state of groups that stay is saved too if it takes at most so much: then a rank that dies costs no iteration
_COPIED_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanFrom:
    """A plan of a run, and from when it holds.

    `after`: number of iterations after which it holds. `job`: the job with this plan. `view`: the plan as it is shown.
    """

    after: int
    job: JobSpec
    view: PlanView


@dataclasses.dataclass(slots=True, kw_only=True)
class Change:
    """The record of a change, for summary.json.

    `after`: number of iterations before it. `moved`: component -> its places before and after. `where`: "shared memory"
    or "disk", where the state was. `bytes`: size of the state. `stayed`: components whose workers were not replaced.
    Seconds: of saving, of ending the workers before, of launching and setting up the new ones, of loading. `kept`: why
    the plan before was kept; "" if it was replaced.
    """

    after: int
    moved: Mapping[str, tuple[str, str]]
    stayed: tuple[str, ...] = ()
    where: str = ""
    bytes: int = 0
    save_s: float = 0.0
    end_s: float = 0.0
    launch_s: float = 0.0
    load_s: float = 0.0
    kept: str = ""

    @property
    def moves(self) -> str:
        """The components that move, with their places before and after, as text."""
        return ", ".join(f"{c} {old} -> {new}" for c, (old, new) in self.moved.items())

    @property
    def seconds(self) -> float:
        return self.save_s + self.end_s + self.launch_s + self.load_s

    def record(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"seconds": self.seconds}

    def __str__(self) -> str:
        head = f"change after iteration {self.after}"
        if self.kept:
            return f"{head}: the placement stays as it was: {self.kept}"
        stayed = f", {' and '.join(self.stayed)} stayed" if self.stayed else ""
        return (
            f"{head}: {self.moves}{stayed}; {self.seconds:.1f} s (save {self.save_s:.1f}, end {self.end_s:.1f}, "
            f"launch {self.launch_s:.1f}, load {self.load_s:.1f}), {show_bytes(self.bytes)} in {self.where}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The state with which a run continues under another plan.

    `state`: in files. `stay`: component -> residency, of those whose workers stay. `whole`: whether the files also have
    the state of those that stay, so that all workers can load it. `lost`: why none stays any more, if one was to stay
    and has died.
    """

    state: Checkpoint
    stay: Mapping[str, Residency]
    whole: bool
    lost: WorkerError | WorkerTimeout | None = None


class Replacing:
    """Replaces the launched plan of a run by another one. It belongs to the run's driver."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        config: Mapping[str, Any],
        history: History,
    ) -> None:
        """Prepare changes; nothing is done yet.

        `folder`: the run's folder. `config`: the config as it is saved. `history`: faults of the run.
        """
        self._cluster = cluster
        self._folder = folder
        self._config = config
        self._history = history

    def save(self, before: Launched, after: PlanFrom, change: Change) -> Saved | None:
        """Save the state of the launched workers for those of another plan. Return None if this is not possible.

        The state is in shared memory if all workers of both plans are on this node and it has room, else in the run's
        folder. A checkpoint that the run has made at this moment is used as it is. Components that stay leave the
        accelerators of those that start. Raises StateLost. Fills in `change`.
        """
        began = time.perf_counter()
        stay: tuple[str, ...] = ()
        if self._cluster.restarts_workers:
            stay = staying(before.job, after.job)
        left_out: tuple[str, ...] = ()
        if _most_bytes(before.job, stay) > _COPIED_BYTES:
            left_out = stay
        state = None
        shared = self._shared_folder(before, after.job, left_out)
        if shared is not None:
            change.where = "shared memory"
            state = before.saving.hand_over(shared / _FOLDER, left_out)
        if state is None:
            change.where = "disk"
            state = before.saving.hand_over(self._folder / _FOLDER, left_out)
        if state is None:
            change.save_s = time.perf_counter() - began
            change.kept = "its state could not be saved"
            return None
        # Last, since the loop of the plan before expects the residencies that its iteration has left
        most = highest_residency(before.job.plan, after.job.plan, stay)
        try:
            held = before.loop.lower(most)
        except BaseException:
            self.remove_copies(state)
            raise
        change.save_s = time.perf_counter() - began
        if not self._is_copy(state):
            change.where = "a checkpoint"
        change.bytes = sum(file.bytes for file in state.files.values())
        change.stayed = stay
        stateful = before.job.job.stateful(before.job.config, before.job.plan)
        return Saved(state=state, stay=held, whole=state.ranks.keys() >= set(stateful))

    def replace(
        self,
        before: Launched,
        back: PlanFrom,
        after: PlanFrom,
        saved: Saved,
        texts: Mapping[PlanFrom, Mapping[str, str]],
        change: Change,
    ) -> tuple[Launched, Mapping[str, int] | None]:
        """End the workers of a plan that do not stay, and launch those of another plan with the same state.

        If the other plan cannot be launched, or fails while it loads, `back` is launched again. Return what is
        launched, and the sizes of metric files if the run went back to a checkpoint meanwhile. `saved`: result of
        `save`; a copy is removed. `texts`: file name -> text that is written into each checkpoint. Fills in `change`.

        Raises the error of the last attempt; the state is then a checkpoint of the run, if it is whole.
        """
        state = saved.state
        try:
            try:
                saved = self._ended(saved, change)
                found = self._begun(before, after, saved, texts[after], change)
            except RlplaceError as error:
                if isinstance(error, RayDied):
                    raise
                change.kept = str(error).partition("\n")[0]
                saved = self._ended(saved, change)
                found = self._begun(before, back, saved, texts[back], change)
        except BaseException:
            if self._is_copy(state) and saved.whole:
                before.saving.keep(state)
            raise
        finally:
            self.remove_copies(state)
        now, sizes = found
        if saved.whole:
            now.saving.follow(before.saving, from_copy=self._is_copy(state))
        return now, sizes

    def _ended(self, saved: Saved, change: Change) -> Saved:
        """End the workers that do not stay; all of them if one that stays has died. Return `saved` with those that
        stay.
        """
        with self._timed(change, "end_s"):
            try:
                self._cluster.retire(saved.stay)
            except (WorkerError, WorkerTimeout) as error:
                self._cluster.retire()
                change.stayed = ()
                return dataclasses.replace(saved, stay={}, lost=error)
        return saved

    def remove_copies(self, state: Checkpoint) -> None:
        """Remove the folder of a copy of the state. A checkpoint of the run stays."""
        if self._is_copy(state):
            shutil.rmtree(state.run, ignore_errors=True)

    def _is_copy(self, state: Checkpoint) -> bool:
        return state.run.name == _FOLDER

    def _begun(
        self,
        before: Launched,
        plan: PlanFrom,
        saved: Saved,
        texts: Mapping[str, str],
        change: Change,
    ) -> tuple[Launched, Mapping[str, int] | None]:
        """Launch a plan and load the state. Return what is launched, and the sizes of metric files as `loaded` does.

        `before`: the workers of the run until now, of which those that stay go on.
        """
        job = with_state(plan.job, saved.state, self._config)
        with self._timed(change, "launch_s"):
            now = launched(
                self._cluster, job, self._folder, texts, self._history, saved.stay
            )
        if not saved.whole:
            # What is lost from here on is lost as in an iteration
            now.saving.follow(before.saving, from_copy=True)
        with self._timed(change, "load_s"), watched(self._cluster, now):
            if saved.lost is not None and not saved.whole:
                # Its state is in no file
                if now.loop.recovery is None:
                    raise saved.lost
                now.loop.recovery.lose_state(saved.lost, change.after)
                return now, went_back(now)
            return now, loaded(now, saved.state, saved.stay)

    @contextlib.contextmanager
    def _timed(self, change: Change, part: str) -> Iterator[None]:
        """Return a context manager that adds its seconds to a field of `change`. `part`: the field."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = getattr(change, part) + time.perf_counter() - began
            setattr(change, part, seconds)

    def _shared_folder(
        self, before: Launched, after: JobSpec, left_out: Collection[str]
    ) -> Path | None:
        """Return the job's folder in shared memory; None if there is none, or if the state may not fit.

        `left_out`: components whose state is not saved.
        """
        slots = [*slots_of(before.job.plan), *slots_of(after.plan)]
        folder = self._cluster.shared_folder(slots)
        if folder is None:
            return None
        saved = set(before.job.plan.placement.components) - set(left_out)
        if _most_bytes(before.job, saved) + _MORE_BYTES > _SHARE * free_bytes(folder):
            return None
        return folder


def _most_bytes(job: JobSpec, components: Collection[str]) -> int:
    """Return an upper bound of the bytes that workers of a job save: all that those with state hold.

    `components`: those that count.
    """
    ledger = job.case.ledger()
    most = 0
    for component in job.job.stateful(job.config, job.plan):
        if component not in components:
            continue
        ranks = job.plan.placement.world_size(component)
        most += ranks * ledger.bytes(component, Residency.FULL)
        most += ranks * ledger.host_bytes(component, Residency.FULL)
    return most


def holding(plans: Sequence[PlanFrom], iterations: int) -> PlanFrom:
    """Return the plan that holds after so many iterations. `plans`: in the order of iterations."""
    return [plan for plan in plans if plan.after <= iterations][-1]
