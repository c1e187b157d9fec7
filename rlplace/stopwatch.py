"""The seconds of a worker's parts, for its metrics and for the record of each call.

::

    call    learn ───────────────────────────────────────────────────────▶     CallRecord, sent with the result
    parts         wait │ learn                                                 laps of one Stopwatch
    parts                estimate │ step │ exchange │ step │ exchange          laps of another, in the same thread

A lap has two times: elapsed time and the thread's processor time. In their difference, the thread waited, or other
threads had the processor. The least difference of many laps is waiting time, which a free processor would not shorten.
A lap is cold if the thread was off its processor in the lap before; a lap of waiting, if the thread was off in the lap
itself. Caches then hold the data of other threads.

If one call has more than MOST_LAPS laps, short neighbouring laps are joined. Each part keeps its seconds, and their
place within about a thousandth of the call.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import NamedTuple

from rlplace.cores import usable_cores
from rlplace.metrics import Metric, Metrics

OFF_S = 2e-5  # a thread that has no processor for longer than this in a lap was off it
MOST_LAPS = 8192  # most laps that a stopwatch keeps: 72 KiB

_CALL: ContextVar[list[Stopwatch] | None] = ContextVar(
    "_CALL", default=None
)  # stopwatches of the call that this thread works on


class Part(NamedTuple):
    """Sums over the laps of a call that belong to the same part, with the same size (two digits) and value of `cold`.

    A part is a named kind of work within the call; a lap is one execution of it. `size`: mean number of rows, tokens or
    sequences of a lap; 0: nothing is counted. `laps`: number of laps. `wall_s`: elapsed time of all laps. `cpu_s`:
    processor time of the thread in all laps. `least_cpu_s`: least processor time of a lap. `blocked_s`: least time of a
    lap in which the thread had no processor. `cold`: whether the thread had lost its processor in the lap before each
    of these laps (for the part "wait": in these laps themselves).
    """

    name: str
    size: float
    laps: int
    wall_s: float
    cpu_s: float
    least_cpu_s: float
    blocked_s: float
    cold: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Spans:
    """The laps of one stopwatch in order. Lap i belongs to the part `names[which[i]]` and ended at `ends[i]`.

    Lap 0 began at `began_s`; each further lap began when the lap before it ended. Times are seconds since the epoch, by
    the clock of the rank's node.
    """

    began_s: float
    names: tuple[str, ...]
    which: bytes
    ends: array[float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """The time that one call of a worker method took on one rank: elapsed, processor time, and the times of its parts.

    `began_s`: start in seconds since the epoch. `seconds`: elapsed time. `cpu_s`: processor time of the call's thread.
    `process`: id of the rank's process. `process_cpu_s`: processor time of the whole process since its start, at the
    end of the call. `beside_cpu_s`: processor time of the process's other threads during the call. `cores`: number of
    cores that the process may use. `parts`: sums over the laps of each part. `spans`: the laps of each stopwatch.
    `draws`: name of a distribution -> its values in order, such as the lengths of answers.
    """

    method: str
    began_s: float
    seconds: float
    cpu_s: float
    process: int
    process_cpu_s: float
    beside_cpu_s: float = 0.0
    cores: int = 1
    parts: tuple[Part, ...]
    spans: tuple[Spans, ...]
    draws: Mapping[str, array[float]] = dataclasses.field(
        default_factory=dict
    )  # values of each distribution, in order, by its name


def _read() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


class Stopwatch:
    """Measures the seconds that each part of a call takes.

    The call is divided into laps. The first lap begins when the stopwatch is created; each further lap begins when the
    lap before it ends.
    """

    def __init__(
        self, *parts: str, read: Callable[[], tuple[float, float]] = _read
    ) -> None:
        """Start the stopwatch.

        `parts`: names of parts that are reported even if they have no lap. `read`: a function that returns (clock time,
        processor time of the thread) in seconds.
        """
        self._read = read
        self.seconds = dict.fromkeys(parts, 0.0)
        self._sums: dict[tuple[str, float, bool], list[float]] = {}  # numbers of a Part
        self._names: dict[str, int] = {}
        self.draws: dict[str, array[float]] = {}
        self._which, self._ends = bytearray(), array("d")
        self._since, self._cpu = read()
        self._began = self._since
        self._off = True
        if (watches := _CALL.get()) is not None:
            watches.append(self)

    def lap(self, part: str, size: float = 0.0) -> None:
        """End the present lap: add the time since the end of the last lap to `part`.

        `size`: number of rows, tokens or sequences that were processed in the lap; 0 if nothing is counted.
        """
        now, cpu = self._read()
        wall_s = now - self._since
        cpu_s = max(0.0, cpu - self._cpu)  # below 0: the lap ended in another thread
        self._since = now
        self._cpu = cpu
        self.seconds[part] = self.seconds.get(part, 0.0) + wall_s
        self._which.append(self._names.setdefault(part, len(self._names)))
        self._ends.append(now)
        if len(self._ends) > MOST_LAPS:
            self._thin_out()
        off = wall_s - cpu_s > OFF_S
        key = (part, _rounded(size), off if part == "wait" else self._off)
        self._off = off
        sums = self._sums.get(key)
        if sums is None:
            self._sums[key] = [1.0, size, wall_s, cpu_s, cpu_s, wall_s - cpu_s]
            return
        sums[0] += 1.0
        sums[1] += size
        sums[2] += wall_s
        sums[3] += cpu_s
        sums[4] = min(sums[4], cpu_s)
        sums[5] = min(sums[5], wall_s - cpu_s)

    def _thin_out(self) -> None:
        """Merge short neighbouring laps, so that at most about half of MOST_LAPS laps are left.

        The total seconds of each part do not change.
        """
        least_s = (self._ends[-1] - self._began) * 2 * len(self._names) / MOST_LAPS
        which = bytearray()
        ends = array("d")
        began = before = self._began
        seconds: dict[int, float] = {}  # by part, since `began`
        for part, end in zip(self._which, self._ends, strict=True):
            seconds[part] = seconds.get(part, 0.0) + end - before
            before = end
            if end - began >= least_s or end == self._ends[-1]:
                for each, part_s in seconds.items():
                    began += part_s
                    which.append(each)
                    ends.append(began)
                ends[-1] = began = end
                seconds.clear()
        self._which = which
        self._ends = ends

    def draw(self, name: str, value: float) -> None:
        """Add a value to the distribution `name`, such as the length of an answer."""
        self.draws.setdefault(name, array("f")).append(value)

    def metrics(self, component: str) -> Metrics:
        """Return the metrics `<component>/<part>_s`: the seconds of each part, reduced by the maximum over ranks."""
        return {
            f"{component}/{part}_s": Metric(seconds, "max")
            for part, seconds in self.seconds.items()
        }

    def parts(self) -> Iterator[Part]:
        for (name, _, cold), (
            laps,
            size,
            wall_s,
            cpu_s,
            least_cpu_s,
            blocked_s,
        ) in self._sums.items():
            yield Part(
                name,
                size / laps,
                int(laps),
                wall_s,
                cpu_s,
                least_cpu_s,
                max(0.0, blocked_s),
                cold,
            )

    def spans(self, epoch_s: float) -> Spans:
        """Return the laps in order, with times in seconds since the epoch.

        `epoch_s`: seconds since the epoch when the performance counter was 0.
        """
        ends = array("d", (end + epoch_s for end in self._ends))
        return Spans(
            self._began + epoch_s, tuple(self._names), bytes(self._which), ends
        )


@functools.lru_cache(maxsize=4096)
def _rounded(size: float) -> float:
    return float(f"{size:.2g}")


class Recorder:
    """Context manager around one call of a worker method, in the thread of the call.

    It collects the stopwatches that are created during the call. After the call, `record` returns the times.
    """

    def __init__(self, method: str) -> None:
        self._method = method
        self._watches = list[Stopwatch]()
        self._began = self._ended = self._cpu = self._process_cpu = 0.0

    def __enter__(self) -> Recorder:
        _CALL.set(self._watches)
        self._process_cpu = time.process_time()
        self._began, self._cpu = time.perf_counter(), time.thread_time()
        return self

    def __exit__(self, *raised: object) -> None:
        _CALL.set(None)
        self._ended = time.perf_counter()

    def record(self) -> CallRecord:
        """Return the times of the call. Use this method after the `with` block, in the same thread."""
        epoch_s = time.time() - time.perf_counter()
        cpu_s = time.thread_time() - self._cpu
        process_cpu_s = time.process_time()
        return CallRecord(
            method=self._method,
            began_s=self._began + epoch_s,
            seconds=self._ended - self._began,
            cpu_s=cpu_s,
            process=os.getpid(),
            process_cpu_s=process_cpu_s,
            beside_cpu_s=max(0.0, process_cpu_s - self._process_cpu - cpu_s),
            cores=usable_cores(),
            parts=tuple(part for watch in self._watches for part in watch.parts()),
            spans=tuple(watch.spans(epoch_s) for watch in self._watches),
            draws={
                name: values
                for watch in self._watches
                for name, values in watch.draws.items()
            },
        )
