"""The calls of iterations as a trace that Chrome and Perfetto show: https://ui.perfetto.dev opens `trace.json`.

::

    process "driver"   thread "stages"         iteration 3 ▸ sync, rollout, learn
    process "node 0"   thread "actor rank 0"   push_weights, move off, move full, learn ▸ wait, learn ▸ minibatch, ...
                       thread "env rank 0"     move full, run ▸ sim, put, wait, sim, ...

Times are whole microseconds since the first iteration began, by the driver's clock: those of another node are moved by
the least that brings its calls into the stages that awaited them (`clock_offsets`), which is not exact.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rlplace.report.calls import IterationCalls, clock_offsets, laps

MOST_LAPS = 100_000  # about 8 MB; of more, the longest
_DRIVER = 0  # number of its process; that of node n is n + 1


class _Event(NamedTuple):
    """Times are in seconds."""

    name: str
    began_s: float
    ended_s: float
    inside: Sequence[_Event] = ()
    args: dict[str, Any] | None = None


def render_trace(iterations: Sequence[IterationCalls]) -> str:
    """Write the trace as JSON, an event on each line. `iterations`: in order."""
    lines = (json.dumps(event, separators=(",", ":")) for event in _events(iterations))
    return '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(lines) + "\n]}\n"


def _events(iterations: Sequence[IterationCalls]) -> Iterator[dict[str, Any]]:
    slots = {
        call.slot.owner: call.slot
        for iteration in iterations
        for call in iteration.calls
    }
    threads = {
        owner: (slot.node + 1, 1 + at)
        for at, (owner, slot) in enumerate(sorted(slots.items()))
    }
    names = [
        ("process_name", _DRIVER, 0, "driver"),
        ("thread_name", _DRIVER, 0, "stages"),
    ]
    names += [
        ("process_name", node + 1, 0, f"node {node}")
        for node in sorted({slot.node for slot in slots.values()})
    ]
    names += [("thread_name", *thread, owner) for owner, thread in threads.items()]
    for kind, process, thread, name in names:
        yield {
            "ph": "M",
            "name": kind,
            "pid": process,
            "tid": thread,
            "args": {"name": name},
        }
    zero_s = iterations[0].began_s if iterations else 0.0
    yield from _nested(_DRIVER, 0, map(_iteration, iterations), zero_s)
    offsets = clock_offsets(iterations)
    hidden_s = _longest_hidden_s(iterations)
    calls = defaultdict[str, list[_Event]](list)
    for call in (call for iteration in iterations for call in iteration.calls):
        record, each = (
            call.record,
            (lap for spans in call.record.spans for lap in laps(spans)),
        )
        inside = [_Event(*lap) for lap in each if lap[2] - lap[1] > hidden_s]
        args = {"stage": call.stage, "cpu_ms": round(1e3 * record.cpu_s, 3)}
        event = _Event(
            call.name, record.began_s, record.began_s + record.seconds, inside, args
        )
        calls[call.slot.owner].append(event)
    for owner, found in calls.items():
        yield from _nested(*threads[owner], found, zero_s - offsets[slots[owner].node])


def _iteration(iteration: IterationCalls) -> _Event:
    at_s = iteration.began_s
    inside = list[_Event]()
    for stage in iteration.stages:
        inside.append(
            _Event(stage.stage, max(at_s, stage.began_s), max(at_s, stage.ended_s))
        )
        at_s = inside[-1].ended_s
    return _Event(
        iteration.title,
        iteration.began_s,
        max(at_s, iteration.began_s + iteration.seconds),
        inside,
    )


def _nested(
    process: int, thread: int, events: Iterable[_Event], zero_s: float
) -> Iterator[dict[str, Any]]:
    """Yield events that follow each other, and those inside of them, each cut to the one in which it begins."""
    free = 0  # when the last event ended, in microseconds, as are all below
    for outer in sorted(events, key=lambda event: event.began_s):
        ends: list[int] = []  # of those around the next
        for event in (
            outer,
            *sorted(outer.inside, key=lambda event: (event.began_s, -event.ended_s)),
        ):
            begin, end = (
                round(1e6 * (at_s - zero_s)) for at_s in (event.began_s, event.ended_s)
            )
            while len(ends) > 1 and ends[-1] <= begin:
                ends.pop()
            begin = min([max(begin, free), *ends[-1:]])
            end = max(begin, min([end, *ends[-1:]]))
            ends.append(end)
            args = {"args": event.args} if event.args else {}
            yield {
                "ph": "X",
                "name": event.name,
                "pid": process,
                "tid": thread,
                "ts": begin,
                "dur": end - begin,
            } | args
        free = ends[0]


def _longest_hidden_s(iterations: Sequence[IterationCalls]) -> float:
    """Return the seconds up to which laps are not shown; below 0 where all are."""
    watches = (
        spans
        for iteration in iterations
        for call in iteration.calls
        for spans in call.record.spans
    )
    longest = heapq.nlargest(
        MOST_LAPS + 1,
        (end - begin for spans in watches for _, begin, end in laps(spans)),
    )
    if len(longest) > MOST_LAPS:
        return longest[-1]
    return -1.0
