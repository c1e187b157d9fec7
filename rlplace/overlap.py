"""Iterations whose engines go on generating while the actor learns; no sample is older than `max_staleness` versions.

::

    engines  [ 0 ][ 1  ▒▒ ][ 2  ▒▒ ][ 3 ...         ▒ by the version that was pushed meanwhile
    actor         [ learn 0 ][ learn 1 ][ learn 2   n = 1: an iteration may begin one version early
                            ▲          ▲
                            push 1     push 2

Iteration i is learned by policy version i. Its first request follows, in the queue of every engine, a pull of the
version that admitted it, which is i - n or later; versions only rise, so no token of it is older than n. Work that
would come too early waits: nothing that was generated is dropped.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlplace.errors import WorkerError
from rlplace.loop import Loop, judges_of, overhead
from rlplace.memory_monitor import MemoryMonitor
from rlplace.metrics import Metrics
from rlplace.placement.schedule import Schedule
from rlplace.report.utilisation import Seats, Usage
from rlplace.workers.launch import deadlines
from rlplace.workers.launch.group import Pending, WorkerGroup, wait_all

_GENERATING = ("env", "rollout")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """An iteration whose samples are all made."""

    calls: tuple[Pending, ...]
    seconds: float  # from the first request to the last answer
    busy_s: float  # of Generation, at its end


class Generation:
    """Owns which iteration env and engines are at. None of its methods waits."""

    def __init__(self, groups: Mapping[str, WorkerGroup], *, ahead: int, iterations: int) -> None:
        self.under_way: tuple[Pending, ...] = ()
        self.over: dict[int, Generated] = {}  # by iteration, until somebody takes it
        self.admitting = True
        self._groups, self._ahead, self._iterations = groups, ahead, iterations
        self._begun = 0  # iterations
        self._began_s: float | None = None  # when the one that is under way was
        self._over_s = 0.0  # of those that are over
        self._pushed = -1  # newest version that the actor has pushed, or is pushing
        self._asked_for = -1  # newest version that the engines were asked to pull

    @property
    def busy_s(self) -> float:
        """Seconds since the start in which something was generated."""
        return self._over_s + (0.0 if self._began_s is None else time.perf_counter() - self._began_s)

    def push(self, version: int) -> None:
        """Engines that generate take it between two steps; go_on asks the others to."""
        self._pushed = version

    def go_on(self) -> None:
        """Takes note of what is over and begins what is due; nothing more once a call has failed."""
        calls = [call for pending in self.under_way for call in pending.calls.values()]
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


class OverlapUsage(Usage):
    """What is generated during a stage is told when it is over: all stages but sync are one."""

    STAGE = "rollout || learn"

    def __init__(self, seats: Seats) -> None:
        super().__init__(seats)
        self._moves_s = self._stages_s = 0.0  # of this iteration, so far

    def stage_ended(self, stage: str, *, moves_s: float, seconds: float) -> None:
        if stage == "sync":
            super().stage_ended(stage, moves_s=moves_s, seconds=seconds)
        else:
            self._moves_s, self._stages_s = self._moves_s + moves_s, self._stages_s + seconds

    def iteration_ended(self, seconds: float) -> dict[str, float]:
        super().stage_ended(self.STAGE, moves_s=self._moves_s, seconds=self._stages_s)
        self._moves_s = self._stages_s = 0.0
        return super().iteration_ended(seconds)


def make_loop(
    schedule: Schedule,
    groups: Mapping[str, WorkerGroup],
    memory: MemoryMonitor,
    *,
    stage_timeout_s: float,
    iterations: int | None,
) -> Loop:
    """The loop of a schedule. Where rollout runs ahead, nothing is generated beyond `iterations`, those of a run."""
    if schedule.needs.ahead:
        assert iterations is not None, "only jobs that count iterations run ahead"
        return Overlap(schedule, groups, memory, stage_timeout_s=stage_timeout_s, iterations=iterations)
    return Loop(schedule, groups, memory, stage_timeout_s=stage_timeout_s)


class Overlap(Loop):
    """A Loop whose rollout runs ahead of learning, for a schedule in which env and rollout never leave."""

    def __init__(
        self,
        schedule: Schedule,
        groups: Mapping[str, WorkerGroup],
        memory: MemoryMonitor,
        *,
        stage_timeout_s: float,
        iterations: int,
    ) -> None:
        super().__init__(schedule, groups, memory, stage_timeout_s=stage_timeout_s)
        self.usage = OverlapUsage({name: [slot.accelerators for slot in group.slots] for name, group in groups.items()})
        self._generation = Generation(groups, ahead=schedule.needs.ahead, iterations=iterations)
        self._judging: list[Pending] = []  # who keeps up with what is generated, in this iteration

    def iteration(self, index: int, *, evaluate: bool = False) -> dict[str, float]:
        """As Loop's; `evaluate` waits until nothing is generated, so that one version answers.

        `time/rollout_s` is how long its samples were generated, by then or before; `time/overlap_s` how long those of
        later iterations were meanwhile.
        """
        generation, busy_s = self._generation, self._generation.busy_s
        generation.admitting = not evaluate
        numbers = super().iteration(index, evaluate=evaluate)
        generated = generation.over.pop(index)
        overlap_s = min(generation.busy_s - max(busy_s, generated.busy_s), numbers["time/iteration_s"])
        numbers["time/rollout_s"] = generated.seconds
        numbers["time/overlap_s"], numbers["time/overlap_share"] = overlap_s, overlap_s / numbers["time/iteration_s"]
        works = dict(self._schedule.works)
        lanes = ({"rollout": works.pop("rollout")}, works)  # which hide each other
        return numbers | min((overhead(numbers, lane) for lane in lanes), key=lambda o: o["time/overhead_s"])

    def evaluate(self, index: int) -> dict[str, float]:
        self._generation.admitting = False
        return super().evaluate(index)

    def _sync(self, index: int) -> list[Metrics]:
        push = self._groups["actor"].push_weights(self.version)
        self._generation.push(self.version)
        return self._gather([push])

    def _rollout(self, index: int) -> list[Metrics]:
        """Begins what is due. Nobody waits for all samples here: who takes them takes them one group after another."""
        self._generation.admitting = True
        self._judging = [self._groups[c].infer(index, self.version) for c in judges_of(self._schedule.works["rollout"])]
        self._generation.go_on()
        return []

    def _evaluate(self, index: int) -> list[Metrics]:
        self._wait_until(lambda: not self._generation.under_way, ())
        return super()._evaluate(index)

    def _learn(self, stage: str, index: int) -> list[Metrics]:
        learned, over = super()._learn(stage, index), self._generation.over
        if stage != self._learned:
            return learned
        self._wait_until(lambda: index in over, self._judging)
        return learned + self._gather([*over[index].calls, *self._judging])

    def _wait(self, pending: Sequence[Pending]) -> list[list[Any]]:
        self._wait_until(lambda: all(p.done() for p in pending), pending)
        return super()._wait(pending)

    def _wait_until(self, over: Callable[[], bool], pending: Sequence[Pending]) -> None:
        """Keeps env and engines going meanwhile; what fails there, or in `pending`, fails all of them together."""
        generation, deadline_s = self._generation, time.monotonic() + self._timeout_s
        while True:
            generation.go_on()
            everybody = list(dict.fromkeys([*pending, *self._judging, *generation.under_way]))
            calls = [call for p in everybody for call in p.calls.values()]
            left = [call for call in calls if not call.done()]
            if any(call.done() and call.exception() for call in calls):
                wait_all(everybody, self._timeout_s)
            if over():
                return
            if not left:
                assert generation.under_way, "what is waited for has begun"
                continue  # its last call has ended just now
            patience_s = max(0.0, deadline_s - time.monotonic())
            if not concurrent.futures.wait(left, patience_s, concurrent.futures.FIRST_COMPLETED).done:
                raise deadlines.passed(everybody, self._timeout_s)

    @contextmanager
    def _in(self, stage: str) -> Iterator[None]:
        try:
            with super()._in(stage):
                yield
        except WorkerError as error:
            if error.component in _GENERATING and error.method != "evaluate":
                raise error.at(stage="rollout", version=self.version) from error.cause
            raise
