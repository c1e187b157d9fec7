"""What the workers of a run were called for, iteration by iteration: the source of traces, profiles and reports."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from rlplace.placement.language.slots import Slot
from rlplace.stopwatch import CallRecord
from rlplace.workers.launch.clock import CLOCK, Clock
from rlplace.workers.launch.group import Pending

KEPT = 3  # iterations whose calls are kept; a profile takes them one by one


class RankCall(NamedTuple):
    """A call that has ended well, in the stage in which it was awaited."""

    stage: str
    slot: Slot
    name: str  # of the method; with the residency, of a move
    record: CallRecord


class StageTime(NamedTuple):
    """A stage with the moves on entry, by the driver's clock in seconds since the epoch."""

    stage: str
    began_s: float
    ended_s: float


@dataclasses.dataclass(slots=True)
class IterationCalls:
    """One iteration, complete once `seconds` is set."""

    index: int
    began_s: float  # since the epoch, by the driver's clock
    driver_cpu_s: float  # processor time of the driver's process at the begin; once complete, what the iteration took
    seconds: float = 0.0
    stages: list[StageTime] = dataclasses.field(default_factory=list)
    calls: list[RankCall] = dataclasses.field(default_factory=list)


class CallLog:
    """Collects the calls of the iteration under way; keeps the last few. Owned by the loop; used by one thread."""

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self.iterations: deque[IterationCalls] = deque(maxlen=KEPT)
        self._open = IterationCalls(-1, self._clock.epoch(), time.process_time())

    def begin(self, index: int) -> None:
        """Begin an iteration, or begin it again."""
        self._open = IterationCalls(index, self._clock.epoch(), time.process_time())

    def stage(self, stage: str, seconds: float) -> None:
        """Note a stage that ends now, after `seconds`."""
        now = self._clock.epoch()
        self._open.stages.append(StageTime(stage, now - seconds, now))

    def took(self, stage: str, pending: Iterable[Pending], name: str = "") -> None:
        """Note calls that were awaited in `stage`. `name`: what they are called, if not by their method."""
        for call in (call for p in pending for call in p.calls):
            if call.record is not None:
                self._open.calls.append(RankCall(stage, call.slot, name or call.method, call.record))

    def end(self, seconds: float) -> None:
        """Complete the iteration that is under way."""
        self._open.seconds = seconds
        self._open.driver_cpu_s = time.process_time() - self._open.driver_cpu_s
        self.iterations.append(self._open)
