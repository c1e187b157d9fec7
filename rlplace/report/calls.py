"""The calls to the workers of a run, iteration by iteration: the source of traces, profiles and reports."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rlplace.placement.language.slots import Slot
from rlplace.report.utilisation import MEETING, WORKING, StageUse
from rlplace.stopwatch import CallRecord, Spans
from rlplace.workers.launch.clock import CLOCK, Clock
from rlplace.workers.launch.group import Pending

# Methods of the rollout stage; where generation runs ahead, a later stage awaits them.
_GENERATING = ("run", "generate")
# Methods that send weights, and that receive weights.
SENDING = ("push_weights", "pull_weights")
KEPT = 3  # iterations whose calls are kept; a profile takes them one by one


class RankCall(NamedTuple):
    """One successful call of a method on one rank.

    `stage`: the stage in which the driver waited for the call. `name`: name of the method; for a move, "move" and the
    new residency. `record`: times of the call, measured by the rank. `work`: True for the first or only call of a
    message to the rank; False for all further calls of the message.
    """

    stage: str
    slot: Slot
    name: str
    record: CallRecord
    work: bool = True


class StageTime(NamedTuple):
    """Begin and end of a stage, including the moves before its work: driver's clock, seconds since the epoch."""

    stage: str
    began_s: float
    ended_s: float


@dataclasses.dataclass(slots=True)
class IterationCalls:
    """The calls and stages of one iteration. It is complete once `seconds` is set.

    `index`: index of the iteration, from 0. `began_s`: seconds since the epoch, by the driver's clock. `driver_cpu_s`:
    once complete, processor seconds of the driver's process in this iteration; before that, its processor seconds until
    the iteration began. `seconds`: duration. `uses`: use of the accelerators in each stage.
    """

    index: int
    began_s: float
    driver_cpu_s: float
    seconds: float = 0.0
    stages: list[StageTime] = dataclasses.field(default_factory=list)
    calls: list[RankCall] = dataclasses.field(default_factory=list)
    uses: Sequence[StageUse] = ()

    @property
    def learned(self) -> bool:
        """Return whether the iteration trained the policy; an iteration may also consist of an evaluation only."""
        return any(call.name == "learn" for call in self.calls)

    def on_cores(self) -> dict[str, float]:
        """Return stage -> least seconds in which the busiest node can do the work of all its ranks with its cores.

        These are the processor seconds of the ranks' threads, divided by the number of cores. Not counted: waiting,
        threads of libraries, and the time in which ranks check the progress of other ranks.
        """
        # A later call of the same name is the one of training; before it are evaluations.
        last = {}
        for call in self.calls:
            slot = call.slot
            last[call.stage, slot.component, slot.rank, call.name] = call

        cpu_s = defaultdict[tuple[str, int], float](float)
        cores = dict[int, int]()
        for call in last.values():
            node = call.slot.node
            stage = call.stage
            if call.name in _GENERATING:
                stage = "rollout"
            cpu_s[stage, node] += max(0.0, _work_s(call.record))
            cores[node] = max(cores.get(node, 1), call.record.cores)
        found: dict[str, float] = {}
        for (stage, node), seconds in cpu_s.items():
            found[stage] = max(found.get(stage, 0.0), seconds / cores[node])
        return found

    @property
    def title(self) -> str:
        if self.learned:
            return f"iteration {self.index + 1}"
        return "evaluation"


def _work_s(record: CallRecord) -> float:
    """Return the processor seconds of the work in a call.

    The time in which the rank checks the progress of other ranks is subtracted.
    """
    seconds = 0.0
    for part in record.parts:
        if part.name in WORKING:
            seconds += part.cpu_s
        if part.name == MEETING:
            seconds -= part.cpu_s
    return seconds


class CallLog:
    """Collects the calls of the present iteration, and keeps those of the last `KEPT` iterations.

    It belongs to the loop and is used by one thread.
    """

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self.iterations: deque[IterationCalls] = deque(maxlen=KEPT)
        self._open = IterationCalls(-1, self._clock.epoch(), time.process_time())

    def begin(self, index: int) -> None:
        """Begin iteration `index`, counted from 0. If an iteration has begun and not ended, drop its calls."""
        self._open = IterationCalls(index, self._clock.epoch(), time.process_time())

    def stage(self, stage: str, seconds: float) -> None:
        """Record a stage that ends at this moment. `seconds`: its duration."""
        now = self._clock.epoch()
        self._open.stages.append(StageTime(stage, now - seconds, now))

    def took(self, stage: str, pending: Iterable[Pending], name: str = "") -> None:
        """Record calls for which the driver waited in `stage`.

        `pending`: calls to worker groups, each of which contains the calls to all ranks of the group. `name`: the name
        under which to record them; "": the name of the method.
        """
        for group_call in pending:
            for call in group_call.calls:
                if call.record is None:
                    continue
                named = name or call.method
                first = call.work is None
                made = RankCall(stage, call.slot, named, call.record, first)
                self._open.calls.append(made)

    def end(self, seconds: float, uses: Sequence[StageUse] = ()) -> None:
        """Complete the present iteration. Calls that are recorded before the next `begin` are dropped.

        `seconds`: duration of the iteration. `uses`: use of the accelerators in each stage.
        """
        self._open.seconds = seconds
        self._open.uses = uses
        self._open.driver_cpu_s = time.process_time() - self._open.driver_cpu_s
        self.iterations.append(self._open)
        self._open = IterationCalls(-1, self._clock.epoch(), time.process_time())


def clock_offsets(iterations: Iterable[IterationCalls]) -> dict[int, float]:
    """Return node -> seconds to add to the node's clock to get approximately the driver's clock.

    The seconds are those nearest to 0 with which each call lies within the stage in which the driver waited for it. If
    generation runs ahead, a call may begin before that stage; then only the ends of calls count.
    """
    # Node -> the least and the most seconds that its calls allow.
    bounds: dict[int, tuple[float, float]] = {}
    for iteration in iterations:
        stages = {stage.stage: stage for stage in iteration.stages}
        for call in iteration.calls:
            stage = stages[call.stage]
            began_s = call.record.began_s
            least, most = bounds.get(call.slot.node, (-math.inf, math.inf))
            least = max(least, stage.began_s - began_s)
            most = min(most, stage.ended_s - began_s - call.record.seconds)
            bounds[call.slot.node] = (least, most)

    offsets = {}
    for node, (least, most) in bounds.items():
        offset = 0.0
        if least <= most:
            offset = max(least, 0.0)
        offsets[node] = min(most, offset)
    return offsets


def laps(spans: Spans) -> Iterator[tuple[str, float, float]]:
    """Yield (name of the part, begin, end) of each lap, in order. A lap is one measured stretch of a call.

    Times are in seconds, by the clock of `spans`.
    """
    begin_s = spans.began_s
    for which, end_s in zip(spans.which, spans.ends, strict=True):
        yield spans.names[which], begin_s, end_s
        begin_s = end_s
