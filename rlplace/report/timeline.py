"""One iteration as a picture: a row for each accelerator, time from left to right, calls in the colours of components.

::

    0   moves │ sync │ env ▁▃█▅▁▃█▅   waits ░░░ │ moves │ actor ████████████
    1   moves │ sync │ rollout ▅▃▁▅▃▁ waits ░░░ │ moves │ actor ██████████░░

A call is drawn as a light bar. Over it, the time in which the rank worked is drawn dark; in the other time the rank
waited. If laps are shorter than a pixel, they are drawn as columns: a column is as high as the share of work in its
time. If several components are in a call on the same accelerator, they divide the height of its row.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rlplace.placement.show.drawing import (
    colour,
    element,
    picture,
    swatch,
    text,
    title,
    width_of,
)
from rlplace.report.calls import (
    SENDING,
    IterationCalls,
    RankCall,
    clock_offsets,
    laps,
)
from rlplace.report.utilisation import WAITING, shares_of
from rlplace.stopwatch import CallRecord

# Sizes in pixels.
WIDTH = 960
_MARGIN = 28
_LEFT = 72  # x of the first second
_TOP = 118  # y of the first row
_LANE = 22  # height of a row
_GAP = 5  # between rows
_MOST_ROWS = 32
_LEVELS = 8  # heights of a column
_COLUMN_BYTES = 5  # of the document, for a column
_MOST_BYTES = 180_000  # of all columns: above that they are wider
_LEAST_WIDTH = 0.05  # of a bar that is drawn
_MOST_TICKS = 8
_SHARES = {"busy": "at work", "bubble": "idle", "moves": "moves", "sync": "sync"}
# Entries of the legend that every picture has: look, name
_ALIKE = (
    ("f0 wait", "waits"),
    ("moves", "moves"),
    ("sync", "sync"),
    ("idle", "idle"),
)
LOOK = (
    ".idle{fill:#818b98;fill-opacity:.13}.moves{fill:#818b98;fill-opacity:.75}.sync{fill:#818b98;fill-opacity:.4}"
    ".wait{fill-opacity:.28}.tick{stroke:#818b98;stroke-opacity:.35}"
)


class _Bar(NamedTuple):
    """The bar of one call on one accelerator, cut at the edges of the picture. All x are in pixels.

    `look`: its CSS class. `x`, `end`: x of its begin and end. `work`: x of begin and end of each stretch of work.
    `hint`: text that is shown under the pointer.
    """

    component: str
    look: str
    x: float
    end: float
    work: Sequence[tuple[float, float]]
    hint: str


class _Axis(NamedTuple):
    """The horizontal axis: converts times to pixels. `began_s`, `ended_s`: its ends, in seconds since the epoch."""

    began_s: float
    ended_s: float

    def x(self, at_s: float) -> float:
        seconds = (self.ended_s - self.began_s) or 1.0
        share = (at_s - self.began_s) / seconds
        return _LEFT + min(1.0, max(0.0, share)) * (WIDTH - _LEFT - _MARGIN)


def _y(row: int) -> int:
    """Return the y of the top of row number `row`, in pixels. Rows are counted from 0."""
    return _TOP + row * (_LANE + _GAP)


def render_timeline(
    iterations: Sequence[IterationCalls],
    accelerators: Sequence[int],
    components: Sequence[str],
    name: str = "",
    scale: float = 1.0,
) -> str:
    """Return an SVG document of one iteration: the last one in which the policy was trained.

    If generation runs ahead of learning, the first one in which the policy was trained is drawn, see `_choose`.
    `iterations`: the last iterations of the run, at least one. `accelerators`: numbers of the run's accelerators; each
    has a row, but at most `_MOST_ROWS` are drawn. `components`: the run's components, in the order of the plan. `name`:
    title; if empty, the title names the iteration. `scale`: factor by which the printed seconds are multiplied.
    """
    # The iteration, its accelerators, and the pixels of a second.
    shown = _choose(iterations)
    axis = _Axis(shown.began_s, shown.began_s + shown.seconds)
    rows = _rows(iterations, accelerators)
    bottom = _y(len(rows))
    total = shown.seconds * scale

    # The line below the title: what the accelerators did with the time.
    shares = []
    if accelerators:
        found = shares_of(shown.uses, accelerators, shown.seconds)
        shares = [f"{share:.0%} {_SHARES[key]}" for key, share in found.items()]
    subtitle = ", ".join(shares)
    if len(rows) < len(accelerators):
        subtitle += f"; {len(rows)} of {len(accelerators)} accelerators are drawn"

    parts = [
        text(_MARGIN, 44, f"{name or shown.title}: {total:.3g} s", "title ink"),
        text(_MARGIN, 66, subtitle, "soft"),
        *_ticks(total, bottom),
        *_stages(shown, axis, len(rows), scale),
    ]

    # One row for each accelerator, divided between the components that are there at once.
    bars = _bars(iterations, axis, components, frozenset(rows), scale)
    column = _column_width(bars)
    for row, number in enumerate(rows):
        y = _y(row)
        parts.append(text(_LEFT - 12, y + 15, str(number), "soft", text_anchor="end"))
        for bar, lane, lanes in _lanes(bars[number], components):
            height = _LANE / lanes
            parts += _draw(bar, y + lane * _LANE / lanes, height, column)

    legend, end = _legend(components, bottom + 46)
    return picture(
        WIDTH,
        end + 16,
        f"one iteration of {total:.3g} s: {subtitle}",
        [*parts, *legend],
        components=len(components),
        looks=LOOK,
    )


def _column_width(bars: Mapping[int, Sequence[_Bar]]) -> float:
    """Return the width in pixels of the columns that show work inside bars: 1, or more if the document gets too large.

    `bars`: accelerator -> its bars.
    """
    pixels = 0.0
    for row in bars.values():
        for bar in row:
            if len(bar.work) > 1:
                pixels += bar.end - bar.x
    return max(1.0, pixels * _COLUMN_BYTES / _MOST_BYTES)


def _rows(
    iterations: Sequence[IterationCalls], accelerators: Sequence[int]
) -> Sequence[int]:
    """Return the accelerators that get a row: all of them, but at most `_MOST_ROWS`.

    If there are more, neighbouring accelerators with the same components form a group. The first of each group gets a
    row; further rows are given to the groups by their sizes, at even distances. `iterations`: their calls say which
    components use an accelerator.
    """
    if len(accelerators) <= _MOST_ROWS:
        return accelerators
    users = defaultdict[int, set[str]](set)
    for iteration in iterations:
        for call in iteration.calls:
            for accelerator in call.slot.accelerators:
                users[accelerator].add(call.slot.component)

    # Neighbours with the same components; where there are too many, only some of these.
    folds = []
    for _, alike in itertools.groupby(accelerators, key=lambda a: users[a]):
        folds.append(list(alike))
    folds = folds[:: math.ceil(len(folds) / _MOST_ROWS)]

    # The other rows go to the folds by their sizes.
    left = _MOST_ROWS - len(folds)
    among = sum(map(len, folds))
    rows = []
    for fold in folds:
        count = min(len(fold), 1 + left * len(fold) // among)
        rows += [fold[at * len(fold) // count] for at in range(count)]
    return rows


def _choose(iterations: Sequence[IterationCalls]) -> IterationCalls:
    """Return the iteration to draw: the last one in which the policy was trained.

    If generation runs ahead, the driver waits in one iteration for calls that began in the iteration before. Then only
    the first iteration has all calls that took place in it, so the first one that trained is returned.
    """
    learned = [iteration for iteration in iterations if iteration.learned]
    if not learned:
        learned = list(iterations)
    offsets = clock_offsets(iterations)
    last = learned[-1]
    for call in last.calls:
        if call.record.began_s + offsets[call.slot.node] < last.began_s:
            return learned[0]
    return last


def _bars(
    iterations: Sequence[IterationCalls],
    axis: _Axis,
    components: Sequence[str],
    rows: frozenset[int],
    scale: float,
) -> Mapping[int, list[_Bar]]:
    """Return accelerator -> its bars, for the accelerators in `rows`.

    `components`: in the order of the plan, which decides the colours. Of the calls in a stage that only sends weights,
    only moves have bars, because such a stage is drawn as a whole. `scale`: factor by which the printed seconds are
    multiplied.
    """
    offsets = clock_offsets(iterations)
    bars = defaultdict[int, list[_Bar]](list)
    for iteration in iterations:
        syncs = _syncs(iteration)
        for call in iteration.calls:
            if call.stage in syncs and not _is_move(call):
                continue
            # Only calls on accelerators that are drawn, within the time that is drawn.
            offset_s = offsets[call.slot.node]
            began_s = call.record.began_s + offset_s
            ended_s = began_s + call.record.seconds
            if ended_s <= axis.began_s or began_s >= axis.ended_s:
                continue
            for accelerator in rows.intersection(call.slot.accelerators):
                bar = _bar(call, offset_s, axis, components, scale)
                bars[accelerator].append(bar)
    return bars


def _is_move(call: RankCall) -> bool:
    return call.name.startswith("move ")


def _syncs(iteration: IterationCalls) -> set[str]:
    """Return the stages of an iteration that send weights and do nothing else."""
    return {use.stage for use in iteration.uses if use.only_sync}


def _bar(
    call: RankCall,
    offset_s: float,
    axis: _Axis,
    components: Sequence[str],
    scale: float,
) -> _Bar:
    """Return the bar of one call.

    `offset_s`: seconds to add to the node's clock to get the driver's clock. `components`: in the order of the plan,
    which decides the colours. `scale`: factor by which the printed seconds are multiplied.
    """
    record = call.record
    component = call.slot.component
    work = list(_work(record))
    hint = f"{call.slot.owner}: {call.name}, {record.seconds * scale:.3g} s"
    if len(work) > 1:
        busy_s = sum(end - begin for begin, end in work)
        hint += f", {busy_s * scale:.3g} s at work"
    look = f"f{colour(components.index(component))}"
    if _is_move(call):
        look = "moves"
    elif call.name in SENDING:
        look = "sync"
    began_s = record.began_s + offset_s
    return _Bar(
        component=component,
        look=look,
        x=axis.x(began_s),
        end=axis.x(began_s + record.seconds),
        work=[(axis.x(b + offset_s), axis.x(e + offset_s)) for b, e in work],
        hint=hint,
    )


def _work(record: CallRecord) -> Iterator[tuple[float, float]]:
    """Yield (begin, end), in seconds, of each stretch of a call in which the rank does not wait, in order."""
    waits = []
    for spans in record.spans:
        for part, begin, end in laps(spans):
            if part in WAITING:
                waits.append((begin, end))
    at = record.began_s
    ended_s = record.began_s + record.seconds
    for begin, end in (*sorted(waits), (ended_s, ended_s)):
        if begin > at:
            yield at, begin
        at = max(at, end)


def _lanes(
    bars: Iterable[_Bar], components: Sequence[str]
) -> Iterator[tuple[_Bar, int, int]]:
    """Yield (bar, index of its lane, count of lanes) for each bar of a row. Lanes are counted from 0.

    If bars overlap in time, the height of the row is divided into lanes, one for each component of these bars.
    """
    overlapping: list[_Bar] = []
    # x of the end of the bars that overlap
    end = math.inf
    for bar in sorted(bars, key=lambda bar: bar.x):
        # Touching by a pixel is no overlap
        if bar.x > end - 1:
            yield from _divided(overlapping, components)
            overlapping = []
        overlapping.append(bar)
        end = max(other.end for other in overlapping)
    yield from _divided(overlapping, components)


def _divided(
    bars: Sequence[_Bar], components: Sequence[str]
) -> Iterator[tuple[_Bar, int, int]]:
    names = sorted({bar.component for bar in bars}, key=components.index)
    for bar in bars:
        yield bar, names.index(bar.component), len(names)


def _draw(bar: _Bar, y: float, height: float, column: float) -> Iterator[str]:
    """Yield the SVG elements of a bar. If the rank also waited during the call, its work is drawn as columns.

    `y`, `height`: top and height of the bar. `column`: width of a column. All are in pixels.
    """
    width = bar.end - bar.x
    if width < _LEAST_WIDTH:
        return
    hint = title(bar.hint)
    whole = len(bar.work) == 1 or bar.look in ("moves", "sync")
    look = bar.look
    if not whole:
        look += " wait"
    yield element(
        "rect",
        hint,
        class_=look,
        x=f"{bar.x:.2f}",
        y=f"{y:.2f}",
        width=f"{width:.2f}",
        height=f"{height:.2f}",
    )
    if not whole:
        # From columns and levels to pixels; levels go up, y goes down.
        sizes = f"{column:.3f} 0 0 {-height / _LEVELS:.4f}"
        origin = f"{bar.x:.2f} {y + height:.2f}"
        yield element(
            "path",
            hint,
            class_=bar.look,
            transform=f"matrix({sizes} {origin})",
            d=_columns(bar, column),
        )


def _columns(bar: _Bar, column: float) -> str:
    """Return the SVG path around the columns of a bar. Its units are columns and levels of height.

    `column`: width of a column, in pixels. A column is as high as the share of work in its time.
    """
    width = (bar.end - bar.x) / column
    filled = [0.0] * max(1, math.ceil(width - 1e-3))
    for begin, end in bar.work:
        first = (begin - bar.x) / column
        last = (end - bar.x) / column
        for at in range(int(first), min(len(filled), math.ceil(last))):
            filled[at] += min(last, at + 1) - max(first, at)
    # The last column may be cut: its share is of what there is of it.
    filled[-1] /= min(1.0, width - len(filled) + 1)

    levels = [round(_LEVELS * min(1.0, share)) for share in filled]
    outline = ["M0 0"]
    before = 0
    for level, columns in itertools.groupby(levels):
        outline.append(f"v{level - before}h{len(list(columns))}")
        before = level
    outline.append(f"v{-before}z")
    return "".join(outline)


def _stages(
    shown: IterationCalls, axis: _Axis, rows: int, scale: float
) -> Iterator[str]:
    """Yield the SVG elements of the stages, drawn behind the bars of all accelerators as idle time or sync.

    `shown`: the iteration to draw. Names of stages are written above them, those of long stages first, if there is
    room. `rows`: number of rows. `scale`: factor by which the printed seconds are multiplied.
    """
    # x of the begin and the end of each name that is drawn
    taken: list[tuple[float, float]] = []
    syncs = _syncs(shown)
    for stage in sorted(shown.stages, key=lambda stage: stage.began_s - stage.ended_s):
        x = axis.x(stage.began_s)
        width = axis.x(stage.ended_s) - x
        look = "idle"
        if stage.stage in syncs:
            look = "sync"
        box = f"h{width:.1f}v{_LANE}h{-width:.1f}z"
        boxes = "".join(f"M{x:.1f} {_y(row)}{box}" for row in range(rows))
        seconds = (stage.ended_s - stage.began_s) * scale
        hint = title(f"{stage.stage} {seconds:.3g} s")
        yield element("path", hint, class_=look, d=boxes)

        end = x + width_of(stage.stage, bold=True) + 6
        if all(end <= left or x >= right for left, right in taken):
            taken.append((x, end))
            yield element("path", class_="tick", d=f"M{x:.1f} {_TOP - 20}V{_TOP}")
            yield text(x + 3, _TOP - 10, stage.stage, "ink name")


def _ticks(total: float, bottom: float) -> Iterator[str]:
    """Yield the SVG elements of the time axis, with steps of 1, 2 or 5 times a power of ten.

    `total`: length of the axis in seconds. `bottom`: y of the end of the rows, in pixels.
    """
    power = 10 ** math.floor(math.log10(total or 1.0))
    step = 1.0
    for wider in (power / 5, power / 2, power, 2 * power):
        if total / wider <= _MOST_TICKS:
            step = wider
            break
    for n in range(int(total / step) + 1):
        x = _LEFT + n * step / (total or 1.0) * (WIDTH - _LEFT - _MARGIN)
        yield element("path", class_="tick", d=f"M{x:.1f} {_TOP - 4} V{bottom}")
        seconds = f"{n * step:.3g} s"
        yield text(x, bottom + 14, seconds, "soft", text_anchor="middle")


def _legend(components: Sequence[str], y: int) -> tuple[list[str], int]:
    """Return the SVG elements of the legend, and the y of its last line, in pixels.

    `components`: in the order of the plan. `y`: y of the legend's first line, in pixels.
    """
    entries = [(f"f{colour(at)}", name) for at, name in enumerate(components)]
    parts = list[str]()
    x = float(_LEFT)
    for look, name in (*entries, *_ALIKE):
        if x + 20 + width_of(name) > WIDTH - 8:
            x = float(_LEFT)
            y += _LANE
        parts.append(swatch(x, y - 11, 14, look))
        parts.append(text(x + 20, y, name, "soft"))
        x += 40 + width_of(name)
    return parts, y
