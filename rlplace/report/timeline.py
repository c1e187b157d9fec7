"""One iteration as a picture: accelerators down, seconds across, the laps of ranks in the colours of components.

::

    0   moves │ sync │ env ▁▃█▅▁▃█▅   waits ░░░ │ moves │ actor ████████████
    1   moves │ sync │ rollout ▅▃▁▅▃▁ waits ░░░ │ moves │ actor ██████████░░

A call is drawn light, and over it what of it was work: all but the laps in which the rank waits. Where laps are shorter
than a pixel, a column is as high as the share of its time that was work. Components that are inside calls at once on an
accelerator divide its row.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from rlplace.placement.schedule import base_stage
from rlplace.placement.show.drawing import FONT, colour, style, width_of
from rlplace.report.calls import IterationCalls, clock_offsets, laps
from rlplace.report.utilisation import SYNC, WAITING, shares_of
from rlplace.stopwatch import CallRecord

WIDTH = 960
_MARGIN = 28
_LEFT = 72
_TOP = 118
_LANE = 22
_GAP = 5
_MOST_ROWS = 32
_LEVELS = 8  # heights of a column
_COLUMN_BYTES = 5
_MOST_BYTES = 180_000  # of all columns: above that they are wider
LOOK = (
    ".idle{fill:#818b98;fill-opacity:.13}.moves{fill:#818b98;fill-opacity:.75}.sync{fill:#818b98;fill-opacity:.4}"
    ".wait{fill-opacity:.28}.tick{stroke:#818b98;stroke-opacity:.35}"
)


class _Bar(NamedTuple):
    """One call on one accelerator, cut to the picture; x in pixels, work in seconds."""

    component: str
    look: str
    x: float
    end: float
    work: Sequence[tuple[float, float]]  # x, end
    title: str


class _Axis(NamedTuple):
    """Seconds since the epoch -> pixels."""

    began_s: float
    ended_s: float

    def x(self, at_s: float) -> float:
        share = (at_s - self.began_s) / ((self.ended_s - self.began_s) or 1.0)
        return _LEFT + min(1.0, max(0.0, share)) * (WIDTH - _LEFT - _MARGIN)


def render_timeline(
    iterations: Sequence[IterationCalls],
    accelerators: Sequence[int],
    components: Sequence[str],
    name: str = "",
    scale: float = 1.0,
) -> str:
    """Draw the last iteration in which something was learned; where generation runs ahead, the first.

    `iterations`: the last ones, at least one. `components`: in the order of the plan. `scale`: what a second counts.
    Returns a self-contained SVG document.
    """
    shown = _choose(iterations)
    axis = _Axis(shown.began_s, shown.began_s + shown.seconds)
    rows = _rows(iterations, accelerators)
    bottom = _TOP + len(rows) * (_LANE + _GAP)
    legend, end = _legend(components, bottom + 46)
    height = end + 16
    total = shown.seconds * scale
    words = {"busy": "at work", "bubble": "idle", "moves": "moves", "sync": "sync"}
    shares = shares_of(shown.uses, accelerators, shown.seconds) if accelerators else {}
    shares_text = ", ".join(
        f"{share:.0%} {words[name]}" for name, share in shares.items()
    )
    shares_text += f"; {len(rows)} of {len(accelerators)} accelerators are drawn" * (
        len(rows) < len(accelerators)
    )
    bars = _bars(iterations, axis, components, frozenset(rows), scale)
    pixels = sum(
        bar.end - bar.x for row in bars.values() for bar in row if len(bar.work) > 1
    )
    column = max(1.0, pixels * _COLUMN_BYTES / _MOST_BYTES)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="one iteration of {total:.3g} s: {shares_text}" font-family="{FONT}">',
        style(len(components)),
        f"<style>{LOOK}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="12"/>',
        f'<text class="title ink" x="{_MARGIN}" y="44">{escape(name or shown.title)}: {total:.3g} s</text>',
        f'<text class="soft" x="{_MARGIN}" y="66">{shares_text}</text>',
        *_ticks(total, bottom),
        *_stages(shown, axis, len(rows), scale),
    ]
    for row, number in enumerate(rows):
        y = _TOP + row * (_LANE + _GAP)
        parts.append(
            f'<text class="soft" x="{_LEFT - 12}" y="{y + 15}" text-anchor="end">{number}</text>'
        )
        for bar, lane, lanes in _lanes(bars[number], components):
            parts += _draw(bar, y + lane * _LANE / lanes, _LANE / lanes, column)
    return "\n".join([*parts, *legend, "</svg>", ""])


def _rows(
    iterations: Sequence[IterationCalls], accelerators: Sequence[int]
) -> Sequence[int]:
    """Choose _MOST_ROWS of many accelerators: of neighbours with the same components the first, and others evenly."""
    if len(accelerators) <= _MOST_ROWS:
        return accelerators
    slots = {call.slot for iteration in iterations for call in iteration.calls}
    users = defaultdict[int, set[str]](set)
    for slot in slots:
        for accelerator in slot.accelerators:
            users[accelerator].add(slot.component)
    folds = [
        list(alike)
        for _, alike in itertools.groupby(accelerators, key=lambda a: users[a])
    ]
    folds = folds[:: math.ceil(len(folds) / _MOST_ROWS)]
    left = _MOST_ROWS - len(folds)
    among = sum(map(len, folds))
    counts = [min(len(fold), 1 + left * len(fold) // among) for fold in folds]
    return [
        fold[at * len(fold) // count]
        for fold, count in zip(folds, counts, strict=True)
        for at in range(count)
    ]


def _choose(iterations: Sequence[IterationCalls]) -> IterationCalls:
    """Where generation runs ahead, the calls of an iteration come home with those that learn from them."""
    learned = [iteration for iteration in iterations if iteration.learned] or list(
        iterations
    )
    offsets = clock_offsets(iterations)
    last = learned[-1]
    ahead = any(
        call.record.began_s + offsets[call.slot.node] < last.began_s
        for call in last.calls
    )
    if ahead:
        return learned[0]
    return last


def _bars(
    iterations: Sequence[IterationCalls],
    axis: _Axis,
    components: Sequence[str],
    rows: frozenset[int],
    scale: float,
) -> Mapping[int, list[_Bar]]:
    """Return the bars of each accelerator. Sync is drawn as a stage."""
    offsets = clock_offsets(iterations)
    bars = defaultdict[int, list[_Bar]](list)
    for call in (call for iteration in iterations for call in iteration.calls):
        record = call.record
        component = call.slot.component
        on = rows.intersection(call.slot.accelerators)
        began_s = record.began_s + (offset_s := offsets[call.slot.node])
        moves = call.name.startswith("move ")
        ended_s = began_s + record.seconds
        if not on or ended_s <= axis.began_s or began_s >= axis.ended_s:
            continue
        if base_stage(call.stage) == SYNC and not moves:
            continue
        pieces = list(_work(record))
        busy_s = sum(end - begin for begin, end in pieces)
        took = (
            f"{record.seconds * scale:.3g} s"
            + f", {busy_s * scale:.3g} s at work" * (len(pieces) > 1)
        )
        bar = _Bar(
            component,
            "moves" if moves else f"f{colour(components.index(component))}",
            axis.x(began_s),
            axis.x(ended_s),
            [
                (axis.x(begin + offset_s), axis.x(end + offset_s))
                for begin, end in pieces
            ],
            f"{call.slot.owner}: {call.name}, {took}",
        )
        for accelerator in on:
            bars[accelerator].append(bar)
    return bars


def _work(record: CallRecord) -> Iterator[tuple[float, float]]:
    """Yield begin and end of what is no waiting, in order."""
    at = record.began_s
    ended_s = record.began_s + record.seconds
    waits = (
        (begin, end)
        for spans in record.spans
        for part, begin, end in laps(spans)
        if part in WAITING
    )
    for begin, end in (*sorted(waits), (ended_s, ended_s)):
        if begin > at:
            yield at, begin
        at = max(at, end)


def _lanes(
    bars: Iterable[_Bar], components: Sequence[str]
) -> Iterator[tuple[_Bar, int, int]]:
    """Yield each bar with its lane and how many there are: one for each component where bars overlap."""
    together: list[_Bar] = []
    for bar in (*sorted(bars, key=lambda bar: bar.x), None):
        if (
            bar is None
            or bar.x > max((other.end for other in together), default=math.inf) - 1
        ):
            names = sorted(
                {other.component for other in together}, key=components.index
            )
            yield from (
                (other, names.index(other.component), len(names)) for other in together
            )
            together = []
        if bar is not None:
            together.append(bar)


def _draw(bar: _Bar, y: float, height: float, column: float) -> Iterator[str]:
    title = f"<title>{escape(bar.title)}</title>"
    width = bar.end - bar.x
    whole = len(bar.work) == 1 or bar.look == "moves"
    look = bar.look if whole else f"{bar.look} wait"
    if width < 0.05:
        return
    yield (
        f'<rect class="{look}" x="{bar.x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}">{title}</rect>'
    )
    if not whole:
        matrix = (
            f"{column:.3f} 0 0 {-height / _LEVELS:.4f} {bar.x:.2f} {y + height:.2f}"
        )
        yield f'<path class="{bar.look}" transform="matrix({matrix})" d="{_columns(bar, column)}">{title}</path>'


def _columns(bar: _Bar, column: float) -> str:
    """Write the outline of the columns, in units of columns and levels."""
    width = (bar.end - bar.x) / column
    filled = [0.0] * max(1, math.ceil(width - 1e-3))  # the last one may be cut
    for begin, end in bar.work:
        first = (begin - bar.x) / column
        last = (end - bar.x) / column
        for at in range(int(first), min(len(filled), math.ceil(last))):
            filled[at] += min(last, at + 1) - max(first, at)
    filled[-1] /= min(1.0, width - len(filled) + 1)
    outline = ["M0 0"]
    before = 0
    for level, columns in itertools.groupby(
        round(_LEVELS * min(1.0, share)) for share in filled
    ):
        outline.append(f"v{level - before}h{len(list(columns))}")
        before = level
    return "".join([*outline, f"v{-before}z"])


def _stages(
    shown: IterationCalls, axis: _Axis, rows: int, scale: float
) -> Iterator[str]:
    """Draw each stage, as idle or sync, behind all accelerators; name the longest, as far as there is room."""
    taken: list[tuple[float, float]] = []
    for stage in sorted(shown.stages, key=lambda stage: stage.began_s - stage.ended_s):
        x, end = axis.x(stage.began_s), axis.x(stage.ended_s)
        look = SYNC if stage.stage == SYNC else "idle"
        box = f"h{end - x:.1f}v{_LANE}h{x - end:.1f}z"
        boxes = "".join(
            f"M{x:.1f} {_TOP + row * (_LANE + _GAP)}{box}" for row in range(rows)
        )
        title = f"{escape(stage.stage)} {(stage.ended_s - stage.began_s) * scale:.3g} s"
        yield f'<path class="{look}" d="{boxes}"><title>{title}</title></path>'
        end = x + width_of(stage.stage, bold=True) + 6
        if all(end <= left or x >= right for left, right in taken):
            taken.append((x, end))
            yield f'<path class="tick" d="M{x:.1f} {_TOP - 20}V{_TOP}"/>'
            yield f'<text class="ink name" x="{x + 3:.1f}" y="{_TOP - 10}">{escape(stage.stage)}</text>'


def _ticks(total: float, bottom: float) -> Iterator[str]:
    step = 10 ** math.floor(math.log10(total or 1.0))
    step = next(
        (s for s in (step / 5, step / 2, step, 2 * step) if total / s <= 8), 1.0
    )
    for n in range(int(total / step) + 1):
        x = _LEFT + n * step / (total or 1.0) * (WIDTH - _LEFT - _MARGIN)
        yield f'<path class="tick" d="M{x:.1f} {_TOP - 4} V{bottom}"/>'
        yield f'<text class="soft" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{n * step:.3g} s</text>'


def _legend(components: Sequence[str], y: int) -> tuple[list[str], int]:
    """Return the legend, and y of its last line."""
    parts = list[str]()
    x = float(_LEFT)
    looks = [(f"f{colour(at)}", component) for at, component in enumerate(components)]
    for look, text in (
        *looks,
        ("f0 wait", "waits"),
        ("moves", "moves"),
        ("sync", "sync"),
        ("idle", "idle"),
    ):
        if x + 20 + width_of(text) > WIDTH - 8:
            x = float(_LEFT)
            y = y + _LANE
        parts.append(
            f'<rect class="{look}" x="{x:.1f}" y="{y - 11}" width="14" height="14" rx="4"/>'
        )
        parts.append(
            f'<text class="soft" x="{x + 20:.1f}" y="{y}">{escape(text)}</text>'
        )
        x += 40 + width_of(text)
    return parts, y
