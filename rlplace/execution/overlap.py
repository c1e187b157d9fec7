"""Asynchronous rollout: env and engines generate samples ahead of learning. `Overlap` is the loop for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rlplace.contract.stages import Step
from rlplace.errors import WorkerError
from rlplace.execution.loop import Loop
from rlplace.metrics import Metrics, reduce_metrics
from rlplace.placement.language.lend import lent_part
from rlplace.placement.schedule import Move, Schedule, base_stage
from rlplace.report.utilisation import overhead
from rlplace.workers.launch.clock import CLOCK, Clock
from rlplace.workers.launch.cluster import Lost
from rlplace.workers.launch.group import Pending, Ranks, WorkerGroup, deadline_passed

_GENERATING = ("env", "rollout")  # the components that run ahead
_ENGINES = "rollout"
_LENT = lent_part(_ENGINES)


class Generated(NamedTuple):
    """The calls and times of an iteration for which all samples are generated.

    `calls`: the finished calls of env and rollout. `seconds`: from the first request to the last answer. `busy_s`:
    value of `Generation.busy_s` when the samples were complete.
    """

    calls: tuple[Pending, ...]
    seconds: float
    busy_s: float


class Generation:
    """Has env and engines generate the samples of one iteration after the other. No method waits for a worker.

    `under_way`: the running calls. `admitting`: whether generation of a further iteration may start.

    Engines on accelerators that others lend join an iteration when these are free. They take part in every iteration,
    if only at its end, since the iteration has a message for each engine. So the next iteration begins after they have
    joined this one.
    """

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup],
        *,
        ahead: int,
        iterations: int,
        first: int = 0,
        clock: Clock = CLOCK,
        engines: Ranks | None = None,
        lent: Ranks | None = None,
    ) -> None:
        """Begin nothing yet.

        `groups`: env and rollout. `ahead`: versions that generation may be ahead. `first`, `iterations`: the first
        iteration, and the number of all. `engines`, `lent`: the ranks of rollout that generate all the time, and those
        on lent accelerators; None: all ranks generate all the time.
        """
        self.under_way: tuple[Pending, ...] = ()
        # Iteration -> its finished samples, until the loop takes them.
        self.over: dict[int, Generated] = {}
        self.admitting = True
        self._groups = groups
        self._ahead = ahead
        self._iterations = iterations
        self._clock = clock
        # Number of the newest iteration that was started.
        self._begun = first
        # Time when the iteration being generated began; None if idle.
        self._began_s: float | None = None
        # Seconds spent on finished iterations.
        self._over_s = 0.0
        # Newest version that the actor has pushed, or is pushing
        self._pushed = -1
        # Newest version that the engines were asked to pull
        self._asked_for = -1
        self._own = engines
        self._engines: WorkerGroup | Ranks = engines or groups["rollout"]
        self._lent = lent
        # Running or finished call of engines on lent accelerators
        self._joining: Pending | None = None
        # Number of the first iteration that engines on lent accelerators have not joined
        self._joined = first

    def anew(self, first: int) -> Generation:
        """Return a new Generation with the same groups and limits, which starts with iteration `first`."""
        return Generation(
            self._groups,
            ahead=self._ahead,
            iterations=self._iterations,
            first=first,
            clock=self._clock,
            engines=self._own,
            lent=self._lent,
        )

    @property
    def busy_s(self) -> float:
        """Seconds that env and engines have spent on generation since this object was created."""
        return self._over_s + (
            0.0 if self._began_s is None else self._clock.now() - self._began_s
        )

    def push(self, version: int) -> None:
        """Note that the actor pushes policy version `version`.

        Busy engines load the version between two engine steps. For idle engines, `go_on` starts the loading.
        """
        self._pushed = version

    def join(self, iteration: int) -> None:
        """Have engines on lent accelerators take part in an iteration that has begun. They have to be resident.

        Do nothing without such engines, if they have joined already, or if the iteration has not begun.
        """
        if self._lent is None or not self._joined <= iteration < self._begun:
            return
        self._joined = iteration + 1
        joined = self._lent.generate(iteration)
        self._joining = joined
        self.under_way = (*self.under_way, joined)
        if iteration in self.over:
            # All samples are there; these engines only hear of the end.
            found = self.over[iteration]
            self.over[iteration] = found._replace(calls=(*found.calls, joined))

    def has_left(self, iteration: int) -> bool:
        """Return whether engines on lent accelerators have taken part in an iteration and are done."""
        if self._joining is None or self._joined <= iteration:
            return False
        return self._joining.done()

    def go_on(self) -> None:
        """If all running calls have ended, record the finished iteration in `over`, and start the next iteration.

        The next iteration is started only if it is due: `admitting` is set, and the staleness limit allows it. After a
        failed call, nothing is started.
        """
        calls = [call for pending in self.under_way for call in pending.calls]
        if not all(call.done() and call.exception() is None for call in calls):
            return
        if self._began_s is not None:
            seconds = self._clock.now() - self._began_s
            self._over_s = self._over_s + seconds
            self._began_s = None
            self.over[self._begun - 1] = Generated(
                calls=self.under_way, seconds=seconds, busy_s=self._over_s
            )
        self.under_way = tuple(self._due())

    def _due(self) -> list[Pending]:
        calls: list[Pending] = []
        if self._pushed < 0:
            return calls
        if self._asked_for < self._pushed:
            self._asked_for = self._pushed
            calls.append(self._engines.pull_weights(self._pushed))
        early = self._begun - self._pushed > self._ahead
        # Its messages to engines that have not joined would be taken in the next iteration.
        apart = self._lent is not None and self._joined < self._begun
        if self.admitting and not (early or apart) and self._begun < self._iterations:
            calls += [
                self._groups["env"].run(self._begun),
                self._engines.generate(self._begun),
            ]
            self._begun, self._began_s = self._begun + 1, self._clock.now()
        return calls


def loop_of(schedule: Schedule) -> type[Loop]:
    """Return the class of the loop that runs a schedule: Overlap if rollout runs ahead of learning, else Loop."""
    if schedule.needs.ahead:
        return Overlap
    return Loop


class Overlap(Loop):
    """A Loop in which rollout runs ahead of learning. Env and rollout stay on their accelerators all the time.

    `_scoring`: the running calls of components that score samples during generation.
    """

    _scoring: Sequence[Pending] = ()

    @functools.cached_property
    def _generation(self) -> Generation:
        ahead = self._schedule.needs.ahead
        last = self._runner.total_iterations
        engines = lent = None
        if self._lends:
            engines = self._part(_ENGINES)
            lent = self._part(_LENT)
        return Generation(
            self._groups,
            ahead=ahead,
            iterations=last,
            first=self.version,
            clock=self.clock,
            engines=engines,
            lent=lent,
        )

    @property
    def _lends(self) -> bool:
        """Whether a part of the engines is on accelerators that other components lend."""
        return _LENT in self._schedule.parts

    def _part(self, part: str) -> Ranks:
        """Return the ranks of a part of a component."""
        found = self._schedule.parts[part]
        return self._groups[found.component].execute_on(found.ranks)

    def iteration(self, index: int) -> dict[str, float]:
        """Run iteration `index` and return its metrics, as Loop does.

        Metric `time/rollout_s`: seconds in which the samples of this
        iteration were generated. Metric `time/overlap_s`: seconds of this iteration in which samples of later
        iterations were generated.
        """
        generation = self._generation
        busy_s = self._generation.busy_s
        generation.admitting = True
        numbers = super().iteration(index)
        generated = generation.over.pop(index)
        overlap_s = min(
            generation.busy_s - max(busy_s, generated.busy_s),
            numbers["time/iteration_s"],
        )
        numbers["time/rollout_s"] = generated.seconds
        # Samples that were generated before a resume bring their metrics with them.
        numbers |= self.generated.get(index, {})
        numbers["time/overlap_s"], numbers["time/overlap_share"] = (
            overlap_s,
            overlap_s / numbers["time/iteration_s"],
        )
        works = dict(self._schedule.active)
        # Rollout and all other work run in parallel lanes, so the shorter one is hidden.
        lanes = ({"rollout": works.pop("rollout")}, works)
        on_cores = self.log.iterations[-1].on_cores()
        return numbers | min(
            (overhead(numbers, lane, on_cores) for lane in lanes),
            key=lambda o: o["time/overhead_s"],
        )

    def evaluate(self, index: int) -> dict[str, float]:
        """Evaluate the newest weights, as Loop does, as soon as generation is idle: all answers are of one version."""
        self._generation.admitting = False
        return super().evaluate(index)

    def _begin_again(self, index: int) -> None:
        self._forget_calls(index)
        self.generated = {}
        super()._begin_again(index)

    def _make_room(self, index: int, lost: Lost) -> None:
        # The failed calls of the last attempt would end every wait.
        self._forget_calls(index)
        super()._make_room(index, lost)

    def _forget_calls(self, index: int) -> None:
        """Stop tracking the running calls of generation and scoring. Waits no longer include these calls.

        Generation then starts with iteration `index`.
        """
        self._generation = self._generation.anew(index)
        self._scoring = ()

    def write_state(self, folder: Path, components: Iterable[str]) -> None:
        """Save the state of components, as Loop does.

        If `components` includes env, first wait until generation is idle, so that env saves all samples that were
        generated ahead.
        """
        kept = tuple(components)
        if "env" in kept:
            for attempt in self._attempts_between():
                with attempt:
                    self._finish_generating()
            self.generated = {
                index: self.generated.get(index)
                or reduce_metrics(rank for p in over.calls for rank in p.wait())
                | {"time/rollout_s": over.seconds}
                for index, over in self._generation.over.items()
            }
        super().write_state(folder, kept)

    def _hold(self) -> None:
        """Do nothing: with an asynchronous rollout, calls are sent immediately instead of being collected."""

    def _releases_after(self, stage: str) -> tuple[Move, ...]:
        # A stage does not wait for its own generation calls, so nothing is released behind them.
        return ()

    def _finish_generating(self) -> None:
        self._generation.admitting = False
        with self._in("rollout"):
            self._wait_until(lambda: not self._generation.under_way, ())
            # Env drops the samples that were learned.
            self._wait([self._groups["env"].forget(self.version)])

    def _do(self, stage: str, step: Step, index: int) -> list[Metrics]:
        """Make the calls of a step and return the metrics of each rank.

        A step does not wait for calls of generation. Only the last step that trains waits until the samples of this
        iteration are generated, and adds the metrics of their generation. `index`: index of the iteration.
        """
        if step is self._work.evaluation:
            self._generation.join(index)
            self._wait_until(lambda: not self._generation.under_way, ())
            return super()._do(stage, step, index)
        base = base_stage(stage)
        if step.sends_weights:
            return self._push(step, index)
        if base == "rollout":
            return self._begin_generating(step, index)
        metrics = super()._do(stage, step, index)
        if stage != self._learned or step is not self._steps[stage][-1]:
            return metrics
        # Wait until the samples of this iteration are generated and scored.
        over = self._generation.over
        self._wait_until(lambda: index in over, self._scoring)
        return metrics + self._gather([*over[index].calls, *self._scoring])

    def _push(self, step: Step, index: int) -> list[Metrics]:
        """Have the actor push the new policy version, and return the metrics of the push.

        Engines load the version between two engine steps. `step`: the step that sends weights. `index`: index of the
        iteration.
        """
        pushing = [call for call in step.calls if call.component not in _GENERATING]
        pending = [self._asked(call, index) for call in pushing]
        if self._lends:
            # They sleep outside of these stages, so they load each version here.
            pending.append(self._part(_LENT).pull_weights(self.version))
        self._generation.push(self.version)
        return [rank for group in self._wait(pending) for rank in group]

    def _begin_generating(self, step: Step, index: int) -> list[Metrics]:
        """Start the scoring calls of a rollout step, and generation if an iteration is due. Return an empty list.

        This method does not wait for the calls: learners take the samples group by group. Only engines on lent
        accelerators are waited for: they have to leave them before the lenders go on.
        """
        scoring = [call for call in step.calls if call.component not in _GENERATING]
        self._generation.admitting = True
        self._scoring = [self._asked(call, index) for call in scoring]
        generation = self._generation
        generation.go_on()
        if self._lends:

            def over() -> bool:
                generation.join(index)
                return generation.has_left(index)

            self._wait_until(over, ())
        return []

    def _wait(self, pending: Sequence[Pending]) -> list[list[Any]]:
        self._wait_until(lambda: all(p.done() for p in pending), pending)
        return super()._wait(pending)

    def _wait_until(self, over: Callable[[], bool], pending: Sequence[Pending]) -> None:
        """Wait until `over` returns True. Meanwhile, start generation of each iteration that is due.

        `pending`: calls that `over` depends on. Raises the failure of a call in `pending`, or of a running call of
        generation or scoring.
        """
        generation = self._generation
        deadline_s = self.clock.now() + self._timeout_s
        while True:
            generation.go_on()
            asked = [*pending, *self._scoring, *generation.under_way]
            waiting = list(dict.fromkeys(asked))
            if any(each.failed() for each in waiting):
                # Raises the failure
                self.clock.wait_all(waiting, self._timeout_s)
            if over():
                return
            left = [each for each in waiting if not each.done()]
            if not left:
                assert generation.under_way, "what is waited for has begun"
                # The last call has just ended, so check `over` again.
                continue
            patience_s = max(0.0, deadline_s - self.clock.now())
            if not self.clock.wait_any(left, patience_s):
                raise deadline_passed(waiting, self._timeout_s)

    @contextmanager
    def _in(self, stage: str) -> Iterator[None]:
        try:
            with super()._in(stage):
                yield
        except WorkerError as error:
            if error.component in _GENERATING and error.method != "evaluate":
                raise error.at(stage="rollout", version=self.version) from error.cause
            raise
