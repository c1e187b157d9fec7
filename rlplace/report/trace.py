"""The calls of iterations as a trace for Chrome and Perfetto: https://ui.perfetto.dev opens `trace.json`.

::

    process "driver"   thread "stages"         iteration 3 ▸ sync, rollout, learn
    process "node 0"   thread "actor rank 0"   push_weights, move off, move full, learn ▸ wait, learn ▸ minibatch, ...
                       thread "env rank 0"     move full, run ▸ sim, put, wait, sim, ...

Times are whole microseconds since the first iteration began, by the driver's clock. The times of another node are
corrected so that its calls lie within the stages in which the driver waited for them (`clock_offsets`). This correction
is not exact.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rlplace.placement.language.slots import Slot
from rlplace.report.calls import IterationCalls, RankCall, clock_offsets, laps

MOST_LAPS = 100_000  # about 8 MB; of more laps, the longest are shown
_DRIVER = 0  # number of its process; that of node n is n + 1


class _Event(NamedTuple):
    """A named span of time, in seconds.

    `inside`: the spans within it. `args`: further values to show about it.
    """

    name: str
    began_s: float
    ended_s: float
    inside: Sequence[_Event] = ()
    args: dict[str, Any] | None = None


def render_trace(iterations: Sequence[IterationCalls]) -> str:
    """Return the trace as JSON text, one event on each line. `iterations`: the iterations to show, in order of time."""
    lines = (json.dumps(event, separators=(",", ":")) for event in _events(iterations))
    return '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(lines) + "\n]}\n"


def _events(iterations: Sequence[IterationCalls]) -> Iterator[dict[str, Any]]:
    """Yield the trace's events as JSON objects: names of processes and threads, then stages, then calls of ranks."""
    slots: dict[str, Slot] = {}
    for iteration in iterations:
        for call in iteration.calls:
            slots[call.slot.owner] = call.slot

    # Processes are nodes; threads are ranks, numbered from 1.
    yield _name("process_name", _DRIVER, 0, "driver")
    yield _name("thread_name", _DRIVER, 0, "stages")
    for node in sorted({slot.node for slot in slots.values()}):
        yield _name("process_name", node + 1, 0, f"node {node}")
    threads = {}
    for number, (owner, slot) in enumerate(sorted(slots.items()), 1):
        threads[owner] = (slot.node + 1, number)
        yield _name("thread_name", slot.node + 1, number, owner)

    zero_s = 0.0
    if iterations:
        zero_s = iterations[0].began_s
    yield from _nested(_DRIVER, 0, map(_iteration, iterations), zero_s)

    hidden_s = _longest_hidden_s(iterations)
    calls = defaultdict[str, list[_Event]](list)
    for iteration in iterations:
        for call in iteration.calls:
            calls[call.slot.owner].append(_call(call, hidden_s))
    offsets = clock_offsets(iterations)
    for owner, found in calls.items():
        offset_s = offsets[slots[owner].node]
        yield from _nested(*threads[owner], found, zero_s - offset_s)


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    """Return the JSON object that gives a process or a thread its name. `kind`: `process_name` or `thread_name`.

    `process`, `thread`: their numbers in the trace.
    """
    return {
        "ph": "M",
        "name": kind,
        "pid": process,
        "tid": thread,
        "args": {"name": name},
    }


def _call(call: RankCall, hidden_s: float) -> _Event:
    """Return the event of a call; inside it are its laps (measured stretches) longer than `hidden_s` seconds."""
    record = call.record
    inside = []
    for spans in record.spans:
        for part, began_s, ended_s in laps(spans):
            if ended_s - began_s > hidden_s:
                inside.append(_Event(part, began_s, ended_s))
    return _Event(
        name=call.name,
        began_s=record.began_s,
        ended_s=record.began_s + record.seconds,
        inside=inside,
        args={"stage": call.stage, "cpu_ms": round(1e3 * record.cpu_s, 3)},
    )


def _iteration(iteration: IterationCalls) -> _Event:
    """Return the event of an iteration, with the iteration's stages inside. The stages do not overlap."""
    at_s = iteration.began_s
    inside = []
    for stage in iteration.stages:
        began_s = max(at_s, stage.began_s)
        at_s = max(at_s, stage.ended_s)
        inside.append(_Event(stage.stage, began_s, at_s))
    ended_s = max(at_s, iteration.began_s + iteration.seconds)
    return _Event(iteration.title, iteration.began_s, ended_s, inside)


def _nested(
    process: int, thread: int, events: Iterable[_Event], zero_s: float
) -> Iterator[dict[str, Any]]:
    """Yield events as JSON objects, in order of time. Each is followed by the events inside it.

    An event that would begin before the previous outer event ends is moved to its end. An inner event is cut to the
    event around it. `process`, `thread`: numbers under which the trace shows the events. `zero_s`: the time that is
    written as 0, in seconds.
    """
    # All times below are whole microseconds.
    # End of the last event
    free = 0
    for outer in sorted(events, key=lambda event: event.began_s):
        # Ends of the events around the next event
        ends: list[int] = []
        longest_first = sorted(
            outer.inside, key=lambda event: (event.began_s, -event.ended_s)
        )
        for event in (outer, *longest_first):
            begin = round(1e6 * (event.began_s - zero_s))
            end = round(1e6 * (event.ended_s - zero_s))
            while len(ends) > 1 and ends[-1] <= begin:
                ends.pop()
            # Not before the last event, not beyond the event around it.
            begin = max(begin, free)
            if ends:
                begin = min(begin, ends[-1])
                end = min(end, ends[-1])
            end = max(begin, end)
            ends.append(end)
            record = {
                "ph": "X",
                "name": event.name,
                "pid": process,
                "tid": thread,
                "ts": begin,
                "dur": end - begin,
            }
            if event.args:
                record["args"] = event.args
            yield record
        free = ends[0]


def _longest_hidden_s(iterations: Sequence[IterationCalls]) -> float:
    """Return the seconds of the longest lap (measured stretch of a call) that is left out of the trace.

    At most MOST_LAPS laps are shown, the longest ones. Return -1 if all laps are shown.
    """
    longest = heapq.nlargest(MOST_LAPS + 1, _lap_seconds(iterations))
    if len(longest) > MOST_LAPS:
        return longest[-1]
    return -1.0


def _lap_seconds(iterations: Iterable[IterationCalls]) -> Iterator[float]:
    for iteration in iterations:
        for call in iteration.calls:
            for spans in call.record.spans:
                for _, began_s, ended_s in laps(spans):
                    yield ended_s - began_s
