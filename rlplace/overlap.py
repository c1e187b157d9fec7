"""Run iterations whose engines generate while the actor learns, with samples at most `max_staleness` versions old.

::

    engines  [ 0 ][ 1  ▒▒ ][ 2  ▒▒ ][ 3 ...         ▒ by the version that was pushed meanwhile
    actor         [ learn 0 ][ learn 1 ][ learn 2   n = 1: an iteration may begin one version early
                            ▲          ▲
                            push 1     push 2

Iteration i is learned by policy version i. Its first request follows, in the queue of every engine, a pull of the
version that admitted it, which is i - n or later; versions only rise, so no token of it is older than n. A request
that would come too early waits; no generated sample is dropped.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rlplace.config.schema import RunnerConfig
from rlplace.errors import WorkerError
from rlplace.loop import Loop, overhead
from rlplace.memory_monitor import MemoryMonitor
from rlplace.metrics import Metrics
from rlplace.placement.schedule import Schedule
from rlplace.workers.launch.group import Pending, WorkerGroup, deadline_passed, wait_all

_GENERATING = ("env", "rollout")


class Generated(NamedTuple):
    """An iteration whose samples are all generated."""

    calls: tuple[Pending, ...]
    seconds: float  # from the first request to the last answer
    busy_s: float  # of Generation, at its end


class Generation:
    """Tracks and advances the iteration that env and engines are at. No method waits."""

    def __init__(self, groups: Mapping[str, WorkerGroup], *, ahead: int, iterations: int) -> None:
        self.under_way: tuple[Pending, ...] = ()
        self.over: dict[int, Generated] = {}  # by iteration, until the loop takes it
        self.admitting = True
        self._groups, self._ahead, self._iterations = groups, ahead, iterations
        self._begun = 0  # iterations
        self._began_s: float | None = None  # when the one that is under way was
        self._over_s = 0.0  # of those that are over
        self._pushed = -1  # newest version that the actor has pushed, or is pushing
        self._asked_for = -1  # newest version that the engines were asked to pull

    @property
    def busy_s(self) -> float:
        """Return the seconds since the start in which env and engines generated."""
        return self._over_s + (0.0 if self._began_s is None else time.perf_counter() - self._began_s)

    def push(self, version: int) -> None:
        """Note a new version. Engines at work load it between two steps; `go_on` asks idle ones to load it."""
        self._pushed = version

    def go_on(self) -> None:
        """Record finished iterations and start due ones; start nothing after a failed call."""
        calls = [call for pending in self.under_way for call in pending.calls]
        if not all(call.done() and call.exception() is None for call in calls):
            return
        if self._began_s is not None:
            seconds = time.perf_counter() - self._began_s
            self._over_s, self._began_s = self._over_s + seconds, None
            self.over[self._begun - 1] = Generated(calls=self.under_way, seconds=seconds, busy_s=self._over_s)
        self.under_way = tuple(self._due())

    def _due(self) -> list[Pending]:
        calls: list[Pending] = []
        if self._pushed < 0:
            return calls
        if self._asked_for < self._pushed:
            self._asked_for = self._pushed
            calls.append(self._groups["rollout"].pull_weights(self._pushed))
        early = self._begun - self._pushed > self._ahead
        if self.admitting and not early and self._begun < self._iterations:
            calls += [self._groups["env"].run(self._begun), self._groups["rollout"].generate(self._begun)]
            self._begun, self._began_s = self._begun + 1, time.perf_counter()
        return calls


def make_loop(
    schedule: Schedule, groups: Mapping[str, WorkerGroup], memory: MemoryMonitor, runner: RunnerConfig
) -> Loop:
    """Make the loop of a schedule. A rollout that runs ahead stops after `runner.total_iterations`."""
    return (Overlap if schedule.needs.ahead else Loop)(schedule, groups, memory, runner)


class Overlap(Loop):
    """A Loop whose rollout runs ahead of learning, for schedules in which env and rollout stay resident."""

    def __init__(
        self, schedule: Schedule, groups: Mapping[str, WorkerGroup], memory: MemoryMonitor, runner: RunnerConfig
    ) -> None:
        super().__init__(schedule, groups, memory, runner)
        self._generation = Generation(groups, ahead=schedule.needs.ahead, iterations=runner.total_iterations)
        self._scoring: list[Pending] = []  # calls of the components that score samples while they are generated

    def iteration(self, index: int, *, evaluate: bool = False) -> dict[str, float]:
        """Run as Loop does; `evaluate` first waits until generation is idle, so that one version answers.

        `time/rollout_s` is the time in which its samples were generated; `time/overlap_s` the time in which samples of
        later iterations were generated during this one.
        """
        generation, busy_s = self._generation, self._generation.busy_s
        generation.admitting = not evaluate
        numbers = super().iteration(index, evaluate=evaluate)
        generated = generation.over.pop(index)
        overlap_s = min(generation.busy_s - max(busy_s, generated.busy_s), numbers["time/iteration_s"])
        numbers["time/rollout_s"] = generated.seconds
        numbers["time/overlap_s"], numbers["time/overlap_share"] = overlap_s, overlap_s / numbers["time/iteration_s"]
        works = dict(self._schedule.active)
        lanes = ({"rollout": works.pop("rollout")}, works)  # which hide each other
        return numbers | min((overhead(numbers, lane) for lane in lanes), key=lambda o: o["time/overhead_s"])

    def evaluate(self, index: int) -> dict[str, float]:
        self._generation.admitting = False
        return super().evaluate(index)

    def _sync(self, stage: str, index: int) -> list[Metrics]:
        push = self._groups["actor"].push_weights(self.version)
        self._generation.push(self.version)
        return self._gather([push])

    def _rollout(self, stage: str, index: int) -> list[Metrics]:
        """Start the iterations that are due and return at once: consumers take samples one group after another."""
        self._generation.admitting, self._scoring = True, self._score(index)
        self._generation.go_on()
        return []

    def _evaluate(self, stage: str, index: int) -> list[Metrics]:
        self._wait_until(lambda: not self._generation.under_way, ())
        return super()._evaluate(stage, index)

    def _learn(self, stage: str, index: int) -> list[Metrics]:
        learned, over = super()._learn(stage, index), self._generation.over
        if stage != self._learned:
            return learned
        self._wait_until(lambda: index in over, self._scoring)
        return learned + self._gather([*over[index].calls, *self._scoring])

    def _wait(self, pending: Sequence[Pending]) -> list[list[Any]]:
        self._wait_until(lambda: all(p.done() for p in pending), pending)
        return super()._wait(pending)

    def _wait_until(self, over: Callable[[], bool], pending: Sequence[Pending]) -> None:
        """Wait for `over` and keep env and engines going; a failure there or in `pending` fails all of them."""
        generation, deadline_s = self._generation, time.monotonic() + self._timeout_s
        while True:
            generation.go_on()
            waiting = list(dict.fromkeys([*pending, *self._scoring, *generation.under_way]))
            calls = [call for p in waiting for call in p.calls]
            left = [call for call in calls if not call.done()]
            if any(call.done() and call.exception() for call in calls):
                wait_all(waiting, self._timeout_s)
            if over():
                return
            if not left:
                assert generation.under_way, "what is waited for has begun"
                continue  # its last call has ended just now
            patience_s = max(0.0, deadline_s - time.monotonic())
            if not concurrent.futures.wait(left, patience_s, concurrent.futures.FIRST_COMPLETED).done:
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
