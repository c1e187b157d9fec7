"""The changes of a run's placement in its report: where components were over time, what changes cost and gained."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from rlplace.placement.show.drawing import PALETTE
from rlplace.report.record import RunRecord, Series

HEADER = (
    ">after iteration",
    "change",
    ">seconds",
    "save + end + launch + load",
    ">iteration before",
    ">iteration after",
    ">paid back after",
)
NOTE = (
    "Seconds of an iteration are medians, without the first iteration after a start or a change. A change is paid back"
    " when the iterations after it have saved its seconds."
)
_ITERATION_S = "time/iteration_s"


class Stretch(NamedTuple):
    """Iterations with one placement. `first`, `last`: from 1. `places`: component -> its place."""

    first: int
    last: int
    places: Mapping[str, str]


def stretches(run: RunRecord) -> list[Stretch]:
    """Return the placements of a run, in the order of iterations; one if it has not changed."""
    made = [each for each in run.summary.get("changes", ()) if not each["kept"]]
    components = run.plan["components"]
    places = {name: str(it.get("placement", "")) for name, it in components.items()}
    # The plan in the folder is the last one
    for change in reversed(made):
        places |= {name: old for name, (old, _) in change["moved"].items()}
    found: list[Stretch] = []
    first = 1
    for change in made:
        found.append(Stretch(first, int(change["after"]), dict(places)))
        places |= {name: new for name, (_, new) in change["moved"].items()}
        first = int(change["after"]) + 1
    found.append(Stretch(first, int(run.summary["iterations"]), places))
    return found


def picture(run: RunRecord) -> str:
    """Return HTML that shows where each component was over the iterations; "" for a run without changes."""
    found = stretches(run)
    if len(found) == 1:
        return ""
    rows = [
        _row(name, found, PALETTE[at % len(PALETTE)][0])
        for at, name in enumerate(found[0].places)
    ]
    axis = "".join(
        f'<div style="flex:{_length(each)};text-align:right">{each.last}</div>'
        for each in found
    )
    return (
        f'<div role="img" aria-label="placement over time">{"".join(rows)}'
        f'<div style="display:flex"><div style="flex:0 0 9em">iteration</div>'
        f'<div style="display:flex;flex:1">{axis}</div></div></div>'
    )


def _row(name: str, found: Sequence[Stretch], colour: str) -> str:
    """Return the bars of one component. Neighbouring stretches with the same place are one bar."""
    bars: list[list[Any]] = []
    for each in found:
        place = each.places[name]
        if bars and bars[-1][0] == place:
            bars[-1][1] += _length(each)
        else:
            bars.append([place, _length(each)])
    shown = "".join(
        f'<div title="{escape(name)}: {escape(place)}" style="flex:{length};min-width:0;overflow:hidden;'
        f"white-space:nowrap;background:{colour};color:#fff;padding:1px 5px;margin:1px;"
        f'border-radius:3px">{escape(place)}</div>'
        for place, length in bars
    )
    return (
        f'<div style="display:flex"><div style="flex:0 0 9em">{escape(name)}</div>'
        f'<div style="display:flex;flex:1;min-width:0">{shown}</div></div>'
    )


def _length(stretch: Stretch) -> int:
    return max(1, stretch.last - stretch.first + 1)


def rows(run: RunRecord) -> Iterator[Sequence[str]]:
    """Yield a row of the table for each change of the run, with `HEADER` above it."""
    series = run.metrics.get(_ITERATION_S)
    changes: Sequence[Mapping[str, Any]] = run.summary.get("changes", ())
    ends = [int(each["after"]) for each in changes] + [int(run.summary["iterations"])]
    begin = 0
    for number, change in enumerate(changes):
        after = int(change["after"])
        before_s = _median_s(series, begin, after)
        after_s = _median_s(series, after, ends[number + 1])
        begin = after
        parts = " + ".join(
            f"{change[part]:.1f}" for part in ("save_s", "end_s", "launch_s", "load_s")
        )
        yield (
            str(after),
            _moves(change),
            f"{change['seconds']:.1f} s",
            parts,
            _shown(before_s),
            _shown(after_s),
            "-"
            if change["kept"]
            else _paid_back(float(change["seconds"]), before_s, after_s),
        )


def _moves(change: Mapping[str, Any]) -> str:
    moves = ", ".join(f"{c} {old} → {new}" for c, (old, new) in change["moved"].items())
    if change["kept"]:
        return f"{moves}: not made: {change['kept']}"
    stayed = change.get("stayed") or ()
    if stayed:
        return f"{moves} ({' and '.join(stayed)} stayed)"
    return moves


def _median_s(series: Series | None, begin: int, end: int) -> float | None:
    """Return the median seconds of the iterations begin + 1 to end, without the first if there are others; None if
    none is known.
    """
    if series is None:
        return None
    known = [
        seconds
        for iteration, seconds in zip(series.iterations, series.values, strict=True)
        if begin < iteration <= end
    ]
    return statistics.median(known[1:] or known) if known else None


def _paid_back(cost_s: float, before_s: float | None, after_s: float | None) -> str:
    """Return after how many iterations a change has saved its seconds, as text."""
    if before_s is None or after_s is None:
        return "-"
    gain_s = before_s - after_s
    if gain_s <= 0:
        return "never: iterations are not shorter"
    return f"{cost_s / gain_s:,.0f} iterations"


def _shown(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s"
