"""Run training iterations stage by stage; owns the policy version and the clock of the stages.

::

    sync ──▶ rollout ──▶ infer ──▶ learn ──▶ sync ...          on entry to a stage: releases | barrier | acquires
     │          │          │         └ actor || critic: update; version + 1 after the last turn
     │          │          └ reference || rewards || critic || actor: scores of the samples, in turns where they
     │          │            share accelerators; after the last turn the actor computes advantages from the scores
     │          └ env || rollout: observations ⇄ actions, samples into their channels || scorers that keep up with them
     │            || actor: gradients of the groups that are whole, where it accumulates
     └ actor pushes weights, rollout pulls them

A rank runs its calls in the order in which they were made. So the driver sends the acquire, the work and the following
release of a rank as one message, and waits once::

    a rank of rollout   move full │ generate │ move weights           a rank of env    move full │ run │ move off
    the driver          asks ────────────────────────────── waits for all: now the actor's accelerators are free

With `max_staleness` n > 0, engines generate while the actor learns::

    engines  [ 0 ][ 1  ▒▒ ][ 2  ▒▒ ][ 3 ...         ▒ by the version that was pushed meanwhile
    actor         [ learn 0 ][ learn 1 ][ learn 2   n = 1: an iteration may begin one version early
                            ▲          ▲
                            push 1     push 2

An evaluation runs between two iterations. It begins the next one: it makes the calls of the stages before *rollout*,
then those of the evaluation, and stays in *rollout*. The iteration goes on from there, so the weights of a version are
sent once::

    evaluate(1)    sync ──▶ rollout: evaluate
    iteration(1)                     rollout ──▶ learn

Policy version i learns from the samples of iteration i. Generation of iteration i starts when version i - n has been
pushed. Every engine loads this version, or a later one, before the first request of the iteration, and versions only
rise. So no token is older than n versions when it is learned from. An iteration that would start too early waits; no
generated sample is dropped.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlplace.config.blocks.engine import RunnerConfig
from rlplace.contract.stages import ITERATION, VERSION, Call, Step, Work
from rlplace.errors import WorkerError, WorkerTimeout
from rlplace.execution.faults import Attempt, Fault, Recovery, StateLost, fault_metrics
from rlplace.execution.lease import Lease
from rlplace.execution.memory_monitor import MemoryMonitor
from rlplace.metrics import (
    NOT_METRICS,
    Metric,
    Metrics,
    notes_of,
    reduce_metrics,
)
from rlplace.placement.language.lend import whole_component
from rlplace.placement.schedule import Move, Residency, Schedule, base_stage
from rlplace.report.calls import CallLog
from rlplace.report.utilisation import Usage, overhead
from rlplace.workers.collected import metric_of
from rlplace.workers.launch.clock import CLOCK, Clock
from rlplace.workers.launch.cluster import Lost
from rlplace.workers.launch.group import Pending, Ranks, WorkerGroup

# First part of the names of an evaluation's metrics
_EVALUATED = "eval/"
# Metrics of an iteration that replace those of its first stages, which an evaluation has run
_OF_THE_LAST_PART = "util/"


class Loop:
    """Runs iterations on launched worker groups, and owns the policy version.

    `version`: the policy version that the next sync sends to the rollout ranks. `recovery`: replaces lost workers;
    None: the first failure is raised. `generated`: iteration -> metrics of samples that were generated ahead of
    learning and saved in a checkpoint. `omits`: takes a stage and the index of the iteration. If it returns True,
    the stage counts as run, without any call. A prediction omits stages whose seconds it knows. `lease`: the
    accelerators that other runs use in turns with this one; None: there is no other run.
    """

    recovery: Recovery | None = None
    lease: Lease | None = None
    generated: Mapping[int, Mapping[str, float]] = {}
    omits: Callable[[str, int], bool] | None = None

    def __init__(
        self,
        schedule: Schedule,
        groups: Mapping[str, WorkerGroup],
        memory: MemoryMonitor,
        runner: RunnerConfig,
        work: Work,
        first: int = 0,
        clock: Clock = CLOCK,
        held: Mapping[str, Residency] | None = None,
    ) -> None:
        """Prepare the loop; nothing is run yet.

        `groups`: component -> its workers. `memory`: the monitor that gets the measured bytes of each move. `work`: the
        calls of worker methods in each stage. `first`: index of the first iteration. `clock`: the clock for all times;
        a prediction passes a simulated clock. `held`: component -> its residency, for workers that were set up before;
        all others are off.
        """
        self.clock = clock
        # Each iteration increases the version by one.
        self.version = first
        # Metric -> notes of the last iteration.
        self.notes: Mapping[str, Sequence[str]] = {}
        self.memory = memory
        # Component, or part of one -> its present residency; during a move, the higher of the old and the new one.
        self._held = {
            part: Residency.OFF
            for component in groups
            for part in schedule.parts_of(component)
        }
        self._held |= held or {}
        # Acquires that were started and not yet awaited.
        self._arriving: Sequence[tuple[Move, Pending]] = ()
        # Releases to start behind the next work.
        self._leaving: Sequence[Move] = ()
        # Seconds of moves within the work of the stage, on its slowest rank.
        self._moving_s = 0.0
        occupancy = {
            name: [slot.accelerators for slot in group.slots]
            for name, group in groups.items()
        }
        self.usage = Usage(occupancy, merged=schedule.needs.ahead > 0)
        self.log = CallLog(clock)
        self._schedule = schedule
        self._groups = groups
        self._runner = runner
        self._timeout_s = runner.stage_timeout_s
        # Monotonic time when the current, or failed, work began.
        self.began_s: float | None = None
        # Name of the current step or move, and the monotonic time when it began.
        self.doing: tuple[str, float] | None = None
        # The current stage.
        self._at: str | None = None
        # Metrics of events between iterations.
        self._meanwhile: dict[str, float] = {}
        # Rank -> what it dropped since the last iteration, over all restarts of the iteration.
        self._dropped: dict[str, Metrics] = {}
        # Some training ranks have started an update that not all have finished.
        self._updating = False
        self._work = work
        # Metrics of the stages that an evaluation has run for the next iteration; None if no stage was run
        self._begun: dict[str, float] | None = None
        # Seconds in worker methods, summed over the steps; each step counts its slowest rank.
        self._in_calls_s = 0.0
        self._steps = work.of(schedule)
        # The last sub-stage that trains; after it there is a new policy version.
        turns = [s for s in schedule.stages if base_stage(s) in work.trains]
        self._learned = turns[-1]

    def iteration(self, index: int) -> dict[str, float]:
        """Run all stages once. Return the metrics of all components, reduced over ranks, and the seconds of stages.

        `index`: index of the iteration, from 0. Stages that `evaluate` has run already are not run again; their metrics
        are included. Raises WorkerError with stage and policy version, WorkerTimeout if a stage exceeds its deadline,
        and StateLost if the caller has to call `go_back`.
        """
        numbers = self._numbers(self._rest_of_iteration, index)
        if self._begun is not None:
            numbers = _joined(self._begun, numbers)
            self._begun = None
        numbers |= _added(numbers, self._meanwhile) | reduce_metrics(
            self._dropped.values()
        )
        self._meanwhile = {}
        self._dropped = {}
        if self._work.collects:
            return numbers | self._outside_calls(numbers["time/iteration_s"])
        on_cores = self.log.iterations[-1].on_cores()
        return numbers | overhead(numbers, self._schedule.active, on_cores)

    def _outside_calls(self, iteration_s: float) -> dict[str, float]:
        """Return the part of an iteration in which no worker ran a method of a stage, in seconds and as a share."""
        outside_s = max(0.0, iteration_s - self._in_calls_s)
        share = outside_s / iteration_s if iteration_s > 0 else 0.0
        return {"time/overhead_s": outside_s, "time/overhead_share": share}

    @property
    def held(self) -> dict[str, Residency]:
        """Component, or part of one -> its present residency. During a move, the higher of the old and the new one."""
        return dict(self._held)

    def evaluate(self, index: int) -> dict[str, float]:
        """Evaluate the newest weights on held-out data, before iteration `index`. Return the metrics of the evaluation.

        The metrics have its seconds as `time/evaluate_s`. Afterwards, each component has its residency of the stage in
        which the evaluation runs, and iteration `index` continues there. Nothing that the iteration computes changes.
        """
        numbers = self._numbers(self._evaluation, index)
        evaluated: dict[str, float] = {}
        begun: dict[str, float] = {}
        for name, value in numbers.items():
            if name.startswith(_EVALUATED) or name == "time/evaluate_s":
                evaluated[name] = value
            else:
                begun[name] = value
        # The evaluation is no part of the iteration.
        begun["time/iteration_s"] -= evaluated["time/evaluate_s"]
        self._begun = begun
        return evaluated

    @property
    def has_begun(self) -> bool:
        """Whether an evaluation has run the first stages of the next iteration."""
        return self._begun is not None

    def _rest_of_iteration(self) -> dict[str, Sequence[Step]]:
        """Return stage -> its steps, for the stages of an iteration that no evaluation has run."""
        stages = list(self._schedule.stages)
        if self._begun is not None:
            stages = stages[stages.index(self._work.evaluated_in) :]
        return {stage: self._steps[stage] for stage in stages}

    def _evaluation(self) -> dict[str, Sequence[Step]]:
        """Return stage -> its steps, for an evaluation: the stages of an iteration up to that of the evaluation."""
        step = self._work.evaluation
        assert step is not None, "only a job that has one is evaluated"
        steps: dict[str, Sequence[Step]] = {}
        if self._begun is None:
            stages = self._schedule.stages
            before = stages[: stages.index(self._work.evaluated_in)]
            steps |= {stage: self._steps[stage] for stage in before}
        steps[self._work.evaluated_in] = (step,)
        return steps

    def save(self, folders: Mapping[str, Path]) -> None:
        """Have workers write their models after the last iteration. Raises the same errors as `iteration`.

        `folders`: component -> folder to which its model is written.
        """
        for attempt in self._attempts_between():
            with attempt:
                for component, folder in folders.items():
                    self._save_model(component, folder)

    def measure_memory(self) -> None:
        """Have the components that never move report the bytes that they hold now. Call it between two iterations.

        Bytes are otherwise reported at moves. Gradients and the state of an optimizer exist only after the first
        updates, so a component that never moves would report its bytes without them. Raises the same errors as
        `iteration`.
        """
        stages = self._schedule.residency.values()
        still = {
            part
            for part, held in self._held.items()
            if held > Residency.OFF and all(row[part] == held for row in stages)
        }
        for attempt in self._attempts_between():
            with attempt:
                self._measure(still)

    def _measure(self, parts: Iterable[str]) -> None:
        """Have components, or parts of them, report the bytes that they hold; compare these with the memory proof."""
        # A move to the residency that a worker has changes nothing, and returns its bytes
        asked = {part: self._ranks_of(part).move(self._held[part]) for part in parts}
        with self._in(self._at or self._schedule.stages[0]):
            reports = self._wait(list(asked.values()))
            for component, ranks in zip(asked, reports, strict=True):
                self.memory.moved(component, ranks)

    def _save_model(self, component: str, folder: Path) -> None:
        """Have a component write its model to `folder`, in a stage in which its weights are on its accelerators."""
        held = [
            stage
            for stage in self._schedule.stages
            if self._schedule.residency[stage][component] >= Residency.WEIGHTS
        ]
        with self._in(held[-1]):
            if self._at not in held:
                self._enter(held[-1])
            self._wait([self._groups[component].save_model(str(folder))])

    def _numbers(
        self, works: Callable[[], Mapping[str, Sequence[Step]]], index: int
    ) -> dict[str, float]:
        """Run the steps of each stage. Return the metrics of the workers, the seconds, and the metrics of faults.

        After a fault, all stages run again from the first one. `works`: function that returns stage -> its steps; it is
        called for each attempt.
        """
        self._updating = False
        numbers: dict[str, float] = {}
        for attempt in self._attempts(index):
            with attempt:
                numbers = self._run_stages(works(), index)
        return numbers | attempt.metrics

    def _attempts(self, index: int, *, back: bool = False) -> Iterator[Attempt]:
        """Yield attempts at some work before or in iteration `index`, until an attempt ends without a fault.

        The caller runs the work in a `with` block of each attempt. After a fault that `recovery` handles, all ranks are
        reset before the next attempt. The `with` block raises StateLost after a fault if the state from which the work
        starts has changed or is lost. `back`: raise StateLost after every fault.
        """
        faults: list[Fault] = []
        while True:
            attempt = Attempt(functools.partial(self._recover, index, back), faults)
            if faults:
                with attempt:
                    self._begin_again(index)
            if attempt.fault is None:
                yield attempt
            if attempt.fault is None:
                return
            faults.append(attempt.fault)

    def _attempts_between(self) -> Iterator[Attempt]:
        """Yield attempts at some work between two iterations. Metrics of its faults are those of the next iteration."""
        for attempt in self._attempts(self.version):
            yield attempt
        self._add_meanwhile(attempt.metrics)

    def _recover(
        self,
        index: int,
        back: bool,
        faults: Sequence[Fault],
        error: WorkerError | WorkerTimeout,
        redone_s: float,
    ) -> Fault | None:
        """Replace the workers that were lost when `error` was raised. Return the fault; None without `recovery`.

        `back`: whether the run has to return to a checkpoint even if no state was lost. `faults`: the faults of earlier
        attempts. `redone_s`: seconds of work that has to be done again. Raises StateLost if the run has to return to a
        checkpoint.
        """
        if self.recovery is None:
            return None
        if self.lease is not None:
            # Lost workers start on any of them, and what the others hold is not known now
            self.lease.take_all("recovery", keeping=True)
        # With an asynchronous rollout, some iteration is always being learned.
        changed = self._updating or self._schedule.needs.ahead > 0
        fault = self.recovery.recover(
            error,
            iteration=index,
            stage=self._at or self._schedule.stages[0],
            redone_s=redone_s,
            make_room=functools.partial(self._make_room, index),
            back=back or changed,
        )
        if fault.went_back:
            for outlasted in faults:
                self.count(outlasted)
            raise StateLost(
                f"what trains has to load its state again: {fault.what}: {fault.why}"
            ) from error
        return fault

    def _begin_again(self, index: int) -> None:
        """Reset all ranks to the start of the first stage of iteration `index`. Restarted ranks are included."""
        self.usage.begin_again()
        self._begun = None
        self._arriving = ()
        self._leaving = ()
        first = self._schedule.stages[0]
        with self._in(first):
            self._drop([group.begin_again(index) for group in self._groups.values()])
            needed = self._schedule.residency[first]
            self._at = first
            moves = [
                Move(component=c, before=self._held[c], after=after)
                for c, after in needed.items()
            ]
            self._move([move for move in moves if move.after < move.before])
            # Restarted ranks hold nothing, although the other ranks of their component may be resident.
            self._move([move for move in moves if move.after >= move.before])

    def _drop(self, asked: Sequence[Pending]) -> None:
        """Wait until ranks are reset. Keep, for each rank, the metrics of the samples and answers that it dropped.

        `asked`: the pending calls of `begin_again`, which return these metrics.
        """
        for pending, ranks in zip(asked, self._wait(asked), strict=True):
            for call, lost in zip(pending.calls, ranks, strict=True):
                known = self._dropped.get(call.slot.owner, {})
                self._dropped[call.slot.owner] = max(
                    known, lost, key=lambda m: sum(x.value for x in m.values())
                )

    def _make_room(self, index: int, lost: Lost) -> None:
        """Offload other ranks from the accelerators of the ranks `lost`, which restart in iteration `index`.

        Only ranks of components that are off in some stage of the schedule are offloaded. They are reset first.
        """
        needed = set[int]().union(
            *(
                self._groups[name].execute_on(ranks).accelerators
                for name, ranks in lost.items()
            )
        )
        leaving = list[Ranks]()
        for part in self._held:
            group = self._groups[whole_component(part)]
            own = self._schedule.parts.get(part)
            ranks = range(group.world_size)
            if own is not None:
                ranks = own.ranks
            there = {*ranks} - {*lost.get(group.name, ())}
            turns = any(
                held[part] == Residency.OFF
                for held in self._schedule.residency.values()
            )
            if turns and there and needed & group.execute_on(there).accelerators:
                leaving.append(group.execute_on(there))
        self._arriving = ()
        self._leaving = ()
        with self._in(self._at or self._schedule.stages[0]):
            self._drop([ranks.begin_again(index) for ranks in leaving])
            self._wait([ranks.move(Residency.OFF) for ranks in leaving])

    def go_back(self, version: int, load: Callable[[], None]) -> None:
        """Set all ranks, including restarted ones, back to the start of iteration `version`, from 0.

        `load`: a function that makes all ranks load this state from a checkpoint. Raises StateLost if a rank is lost
        meanwhile; the caller then has to call `go_back` again.
        """
        self.version = version
        self._updating = False
        for attempt in self._attempts(version, back=True):
            with attempt:
                self._begin_again(version)
                load()
        # Dropped metrics belong to iterations that are repeated.
        self._dropped = {}

    def started(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of starting the run to the metrics of the next iteration.

        `seconds`: part of the start, such as "workers" -> seconds.
        """
        self._meanwhile |= {
            f"time/start_{part}_s": value for part, value in seconds.items()
        }

    def lower(self, most: Mapping[str, Residency]) -> dict[str, Residency]:
        """Offload components that hold more than they may, between two iterations. Return component -> its residency.

        Parts of components on lent accelerators are offloaded. `most`: component -> the highest residency that it may
        keep. Raises the same errors as `iteration`.
        """
        limits = dict(most)
        for component in most:
            _, *lent = self._schedule.parts_of(component)
            limits |= dict.fromkeys(lent, Residency.OFF)
        for attempt in self._attempts_between():
            with attempt, self._in(self._at or self._schedule.stages[0]):
                self._move(
                    [
                        self._change(c, self._held[c], highest)
                        for c, highest in limits.items()
                        if self._held[c] > highest
                    ]
                )
        return {component: self._held[component] for component in most}

    def changed(self, seconds: float) -> None:
        """Add the seconds of a change of the placement before the next iteration to the metrics of that iteration."""
        self._add_meanwhile({"time/change_s": seconds})

    def continue_metrics(self, before: Loop) -> None:
        """Take over the metrics of events since the last iteration of the loop before, for the next iteration."""
        self._add_meanwhile(before._meanwhile)
        # A rank of the same name in this loop is another one, and what it drops counts too
        for rank, lost in before._dropped.items():
            self._dropped[f"{rank}, before"] = lost

    def _add_meanwhile(self, numbers: Mapping[str, float]) -> None:
        self._meanwhile |= _added(self._meanwhile, numbers)

    def ask(self, components: Iterable[str]) -> None:
        """Have all ranks of `components` answer, so that a lost rank is noticed. Call it between two iterations.

        Raises the same errors as `iteration`.
        """
        parts = [part for c in components for part in self._schedule.parts_of(c)]
        for attempt in self._attempts_between():
            with attempt:
                self._measure(parts)

    def count(self, fault: Fault) -> None:
        """Add the metrics of a fault that is not part of an iteration to the metrics of the next iteration."""
        self._add_meanwhile(fault_metrics([fault]))

    def write_state(self, folder: Path, components: Iterable[str]) -> None:
        """Have workers save their state: each component writes to `folder`/<component>.

        Returns when all ranks have copied their state; they write the copies in the background. Raises StateLost if a
        rank is lost and the run has to return to a checkpoint.
        """
        # Component -> ranks that have not copied their state yet.
        left = {c: {slot.rank for slot in self._groups[c].slots} for c in components}

        for attempt in self._attempts_between():
            with attempt:
                self._copy_state(folder, left)

    def _copy_state(self, folder: Path, left: Mapping[str, set[int]]) -> None:
        """Have ranks copy their state, for files below `folder`.

        `left`: component -> ranks that have not copied their state yet. Ranks are removed from it when they are done.
        """
        asked = [
            self._groups[c].execute_on(ranks).write_state(str(folder / c))
            for c, ranks in left.items()
            if ranks
        ]
        try:
            with self._in(self._at or self._schedule.stages[0]):
                self._wait(asked)
        finally:
            for pending in asked:
                for call in pending.calls:
                    if call.done() and call.exception() is None:
                        left[call.slot.component].discard(call.slot.rank)

    def read_state(
        self, folder: Path, components: Iterable[str], anew: Iterable[str] = ()
    ) -> dict[str, float]:
        """Have workers load the state that `write_state` saved, before the first iteration. Return metrics of loading.

        `components`: the components that load, each from `folder`/<component>. `anew`: components without saved state;
        they are reset, with the random numbers of the next iteration. Raises StateLost if a rank is lost during
        loading.
        """

        loaded: dict[str, float] = {}
        for attempt in self._attempts(self.version, back=True):
            with attempt:
                if self._work.collects:
                    loaded = self._load_in_turns(folder, components, anew)
                else:
                    loaded = self._load_together(folder, components, anew)
        return loaded | attempt.metrics

    def _load_together(
        self, folder: Path, components: Iterable[str], anew: Iterable[str]
    ) -> dict[str, float]:
        """Have `components` load their state from `folder` at the same time. Return the metrics of loading.

        `anew`: components without saved state; they are reset.
        """
        with self._in(self._schedule.stages[0]):
            asked = [self._groups[c].read_state(str(folder / c)) for c in components]
            asked += [self._groups[c].begin_again(self.version) for c in anew]
            loaded = self._wait(asked)
        return reduce_metrics([rank for group in loaded for rank in group])

    def _load_in_turns(
        self, folder: Path, components: Iterable[str], anew: Iterable[str]
    ) -> dict[str, float]:
        """Have `components` load their state from `folder`, one after the other. Return the metrics of loading.

        Meanwhile, all components are off their accelerators, since a custom worker may need more memory to load than
        the first stage leaves free. `anew`: components without saved state; they are reset.
        """
        reports: list[Metrics] = []
        with self._in(self._schedule.stages[0]):
            before = dict(self._held)
            there = [c for c, held in before.items() if held > Residency.OFF]
            self._move([self._change(c, before[c], Residency.OFF) for c in there])
            for component in components:
                group = self._groups[component]
                for ranks in self._wait([group.read_state(str(folder / component))]):
                    reports += ranks
            self._wait([self._groups[c].begin_again(self.version) for c in anew])
            self._move([self._change(c, Residency.OFF, before[c]) for c in there])
        return reduce_metrics(reports)

    def _ranks_of(self, part: str) -> WorkerGroup | Ranks:
        """Return the ranks of a component, or of the part of a component that is called so in the schedule."""
        found = self._schedule.parts.get(part)
        if found is None:
            return self._groups[part]
        return self._groups[found.component].execute_on(found.ranks)

    @staticmethod
    def _change(component: str, before: Residency, after: Residency) -> Move:
        return Move(component=component, before=before, after=after)

    def can_save(self, components: Iterable[str]) -> bool:
        """Return whether the components can save their state now.

        They can if no update is unfinished, no state is lost, and no worker is at work or closed.
        """
        groups = [self._groups[c] for c in components]
        lost = self._updating or (
            self.recovery is not None and self.recovery.state_lost
        )
        return not lost and not any(group.at_work or group.closed for group in groups)

    def _run_stages(
        self, works: Mapping[str, Sequence[Step]], index: int
    ) -> dict[str, float]:
        """Run the steps of each stage in order. Return the reduced metrics of the workers, and the seconds.

        `works`: stage -> its steps. `index`: index of the iteration.
        """
        reports: list[Metrics] = []
        self._in_calls_s = 0.0
        numbers: dict[str, float] = {"time/moves_s": 0.0}
        waited_s = self._waited_s
        began = self.clock.now()
        self.began_s = time.monotonic()
        self.log.begin(index)
        last = [*works][-1]
        for stage, steps in works.items():
            if self.omits is not None and self.omits(stage, index):
                self._pass_over(stage, steps, last)
                continue
            with self._in(stage):
                # Entry: all releases finish before the first acquire.
                self.doing = (f"moves into {stage}", time.monotonic())
                entered = self.clock.now()
                waited_before_s = self._waited_s
                self._enter(stage)
                waiting_s = self._waited_s - waited_before_s
                moves_s = max(0.0, self.clock.now() - entered - waiting_s)
                # Of moves within the work of the stage; those before it are counted
                self._moving_s = 0.0
                at_work = 0.0
                sync_s = 0.0
                sends = any(step.sends_weights for step in steps)
                for step in steps:
                    # Releases of the next entry start behind the last step. A sender keeps its weights, since receivers
                    # may still read. After the last stage of these, another work may go on in the same stage.
                    if step is steps[-1] and not sends and stage != last:
                        self._leaving = self._releases_after(stage)
                    name = step.name or stage
                    self.doing = (name.replace("_", " "), time.monotonic())
                    began_s = self.clock.now()
                    self._hold()
                    reports += self._do(stage, step, index)
                    # Moves in the same message as the work do not count as work of the stage.
                    moving_s = self._moving_s
                    self._moving_s = 0.0
                    seconds = max(0.0, self.clock.now() - began_s - moving_s)
                    moves_s += moving_s
                    at_work += seconds
                    if step.is_sync:
                        sync_s += seconds
                    # A sub-stage counts for itself and for its stage.
                    for counted in {name, base_stage(name)}:
                        key = f"time/{counted.replace(' ', '_')}_s"
                        numbers[key] = numbers.get(key, 0.0) + seconds
                self._wait(())
                numbers["time/moves_s"] += moves_s
                self.usage.stage_ended(
                    stage, moves_s=moves_s, seconds=at_work, sync_s=sync_s
                )
                self.log.stage(stage, self.clock.now() - entered)
        numbers["time/iteration_s"] = self.clock.now() - began
        if self.lease is not None:
            numbers["time/turns_s"] = self._waited_s - waited_s
        numbers.update(self.usage.iteration_ended(numbers["time/iteration_s"]))
        self.log.end(numbers["time/iteration_s"], self.usage.last)
        numbers.update(reduce_metrics(reports))
        self.notes = notes_of(reports)
        numbers["policy/version"] = float(self.version)
        self.began_s = self.doing = None
        return numbers

    @property
    def _waited_s(self) -> float:
        """Seconds that this run has waited for its turns so far."""
        return 0.0 if self.lease is None else self.lease.waited_s

    def _pass_over(self, stage: str, steps: Sequence[Step], last: str) -> None:
        """Set the state of the loop as if a stage had been run.

        `steps`: the steps of the stage. `last`: the last stage of this work.
        """
        self._at = stage
        self._held = dict(self._schedule.residency[stage])
        if stage != last and not any(step.sends_weights for step in steps):
            leaving = self._releases_after(stage)
            self._held |= {move.component: move.after for move in leaving}
        if stage == self._learned:
            self.version += 1

    def _enter(self, stage: str) -> None:
        """Execute the moves on entry to a stage: wait for all releases, check that memory is free, start the acquires.

        An acquire is sent to a rank in one message with the rank's next work, and is done before this work.
        """
        transition = (
            self._schedule.first
            if self._at is None
            else self._schedule.between(self._at, stage)
        )
        before = self._at
        self._at = stage
        self._move(
            [
                move
                for move in transition.releases
                if self._held[move.component] > move.after
            ]
        )
        if self.lease is not None:
            self.lease.enter(before, stage)
        self.memory.admit(transition.acquires, stage)
        self._hold()
        self._arriving = self._ask(transition.acquires)

    def _hold(self) -> None:
        """Have each group collect its calls until the next `_wait`, so that a rank gets them in one message."""
        for group in self._groups.values():
            group.hold()

    def _releases_after(self, stage: str) -> tuple[Move, ...]:
        """Return the releases on entry to the stage that follows `stage`.

        The result is empty for the last stage of an iteration: components keep their residency until the next
        iteration, since state is saved in between.
        """
        following = self._schedule.stages[self._schedule.stages.index(stage) + 1 :]
        if following:
            return self._schedule.between(stage, following[0]).releases
        return ()

    def _move(self, moves: Sequence[Move]) -> None:
        """Start all moves together, wait for them, and record the bytes that remain on the accelerators."""
        self._arriving = [*self._arriving, *self._ask(moves)]
        self._wait(())

    def _ask(self, moves: Sequence[Move]) -> list[tuple[Move, Pending]]:
        asked = [
            (move, self._ranks_of(move.component).move(move.after)) for move in moves
        ]
        self._held |= {
            move.component: max(move.after, self._held[move.component])
            for move in moves
        }
        return asked

    def _do(self, stage: str, step: Step, index: int) -> list[Metrics]:
        """Make the calls of a step and wait for all of them. Return the metrics of each rank of each call.

        `index`: index of the iteration. After the last step that trains, the policy version is increased.
        """
        if base_stage(stage) in self._work.trains:
            self._updating = True
        pending = [self._asked(call, index) for call in step.calls]
        if self._work.collects:
            counted = self._collected(pending, step)
        else:
            # Sending weights counts as sync, and not as work of the stage.
            uncounted = step.on_host or step.is_sync
            results = self._wait(pending) if uncounted else self._worked(pending)
            counted = []
            for call, ranks in zip(step.calls, results, strict=True):
                if step.metrics_of is None or call.component in step.metrics_of:
                    counted += ranks
        if stage == self._learned and step is self._steps[stage][-1]:
            self.version += 1
            self._updating = False
        return counted

    def _collected(self, pending: Sequence[Pending], step: Step) -> list[Metrics]:
        """Wait for the calls of a step of a declared job. Return the metrics that each rank has collected.

        Worker methods of a declared job may return values of any type; the values are not used as metrics. `pending`:
        the pending results of the calls.
        """
        components = dict.fromkeys(call.component for call in step.calls)
        # Metrics are requested in the same message, behind the work.
        taken = {c: self._groups[c].take_metrics() for c in components}
        results = self._wait([*pending, *taken.values()])
        collected = dict(zip(components, results[len(pending) :], strict=True))
        slowest_s = max((max(call.seconds()) for call in pending), default=0.0)
        self._in_calls_s += slowest_s
        counted = _not_metrics(pending, results[: len(pending)])
        for call in pending:
            # A component's waiting time counts once, even if it ran several methods.
            ranks = collected.pop(call.group.name, [{}] * len(call.calls))
            if not step.is_sync:
                self._count_work(call, ranks)
            counted += ranks
        return counted

    def _asked(self, call: Call, index: int) -> Pending:
        """Start a call on all ranks of its component, and return its pending results. `index`: the iteration."""
        values = {ITERATION: index, VERSION: self.version}
        method = getattr(self._groups[call.component], call.method)
        arguments: list[object] = [values[name] for name in call.arguments]
        if call.source is not None:
            arguments.append(call.source)
        pending: Pending = method(*arguments)
        return pending

    def _gather(self, pending: Sequence[Pending]) -> list[Metrics]:
        return [rank for group in self._worked(pending) for rank in group]

    def _worked(self, pending: Sequence[Pending]) -> list[list[Metrics]]:
        """Wait for calls, record the busy time of their accelerators, and return the results by call and rank.

        `pending`: the pending results of the calls.
        """
        results = self._wait(pending)
        for call, ranks in zip(pending, results, strict=True):
            self._count_work(call, ranks)
        return results

    def _count_work(self, call: Pending, metrics: Sequence[Metrics]) -> None:
        """Record the busy time of the accelerators of a call. `metrics`: those of each rank that was called."""
        ranks = [each.slot.rank for each in call.calls]
        self.usage.worked(call.group.name, call.seconds(), metrics, ranks)

    def _wait(self, pending: Sequence[Pending]) -> list[list[Any]]:
        """Wait for calls and for all pending moves. Return the results of the calls, by call and rank.

        Pending moves are acquires that the ranks execute before the calls, and releases that they execute after the
        calls.
        """
        before = self._arriving
        behind = self._ask(self._leaving)
        self._arriving = ()
        self._leaving = ()
        asked = [
            *(moved for _, moved in before),
            *pending,
            *(moved for _, moved in behind),
        ]
        for group in self._groups.values():
            group.flush()
        results = self.clock.wait_all(asked, self._timeout_s) if asked else []
        stage = self._at or self._schedule.stages[0]
        self.log.took(stage, pending)
        first = len(before)
        last = len(before) + len(pending)
        for moves, reports in ((before, results[:first]), (behind, results[last:])):
            for (move, moved), ranks in zip(moves, reports, strict=True):
                self.log.took(stage, [moved], f"move {move.after.word}")
                self._held[move.component] = move.after
                self.memory.moved(move.component, ranks)
            self._moving_s += max(
                (max(moved.seconds()) for _, moved in moves), default=0.0
            )
        return results[first:last]

    @contextmanager
    def _in(self, stage: str) -> Iterator[None]:
        try:
            yield
        except WorkerError as error:
            explained = self.memory.explain(error.at(stage=stage, version=self.version))
            raise explained from explained.cause
        finally:
            for group in self._groups.values():
                # Drop calls whose results are no longer needed.
                group.drop()


def _added(numbers: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Return, for each name in `more`, the sum of its values in `numbers` (0 if missing) and `more`."""
    return {name: numbers.get(name, 0.0) + value for name, value in more.items()}


def _joined(begun: Mapping[str, float], rest: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an iteration whose first stages were run before the others. Seconds are added up.

    `begun`: metrics of the first stages. `rest`: metrics of the others; they replace metrics of the same name.
    """
    seconds = {
        name: value
        for name, value in begun.items()
        if name.startswith("time/") and name.endswith("_s")
    }
    first = {
        name: value
        for name, value in begun.items()
        if not name.startswith(_OF_THE_LAST_PART)
    }
    return {**first, **rest, **_added(rest, seconds)}


def _not_metrics(
    pending: Sequence[Pending], results: Sequence[Sequence[Any]]
) -> list[Metrics]:
    """Return warnings about named results that cannot be metrics, as one metric for each call that has such results.

    The metric counts the names, and its notes list them. `results`: for each call in `pending`, the results of its
    ranks; only rank 0 is checked.
    """
    found: list[Metrics] = []
    for call, ranks in zip(pending, results, strict=True):
        result = ranks[0]
        if not isinstance(result, Mapping):
            continue
        component = call.group.name
        method = call.calls[0].method
        notes = []
        for name, value in result.items():
            if isinstance(name, str) and metric_of(value) is None:
                kind = type(value).__name__
                notes.append(
                    f"{component}.{method} returned {name!r}: a {kind} is no number, and no metric"
                )
        if notes:
            count = Metric(float(len(notes)), "max", notes=tuple(notes))
            found.append({f"{component}/{NOT_METRICS}": count})
    return found
