"""Line charts as small SVG pictures, in the colours of components."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from rlplace.placement.show.drawing import colour, width_of
from rlplace.report.record import Series

_WIDTH = 320
_HEIGHT = 170
_LEFT = 62
_TOP = 34
_BOTTOM = 22
_KEY = 12  # height of the names of several lines
_MOST_POINTS = 240  # of a line: of more, the least and the greatest of neighbours
STYLE = "path.line{fill:none;stroke-width:1.6;stroke-linejoin:round}.grid{stroke:#818b98;stroke-opacity:.3}"


class Line(NamedTuple):
    """One curve. `number` chooses the colour."""

    label: str
    number: int
    series: Series


def number(value: float) -> str:
    """Write about four digits: 12,345, 45.63, 0.0017."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def chart(title: str, lines: Sequence[Line]) -> str:
    """Draw lines over iterations. The last value stands beside the title, or in the key of each of several lines."""
    values = [v for line in lines for v in line.series.values]
    low = min(values)
    high = max(values)
    if low == high:
        low = low - (abs(low) or 1.0) / 2
        high = high + (abs(high) or 1.0) / 2
    first = min(line.series.iterations[0] for line in lines)
    last = max(line.series.iterations[-1] for line in lines)
    right = _WIDTH - 12
    bottom = _HEIGHT - _BOTTOM
    top = _TOP + 8 + _KEY * (len(lines) > 1)
    across = (right - _LEFT) / ((last - first) or 1.0)
    down = (bottom - top) / (high - low)
    parts = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
    ]
    parts.append(f'<text class="ink name" x="8" y="16">{escape(title)}</text>')
    for at in (low, (low + high) / 2, high):
        y = bottom - (at - low) * down
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
        parts.append(
            f'<text class="soft" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(at)}</text>'
        )
    for at, anchor in ((first, "start"), (last, "end")):
        x = _LEFT + (at - first) * across
        parts.append(
            f'<text class="soft" x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{at:,.0f}</text>'
        )
    for line in lines:
        points = [
            (_LEFT + (x - first) * across, bottom - (y - low) * down)
            for x, y in _thinned(line.series)
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        look = colour(line.number)
        text = f"<title>{escape(line.label)} {number(line.series.values[-1])}</title>"
        parts.append(f'<path class="s{look} line" d="M{path}">{text}</path>')
        if len(points) == 1:
            parts.append(
                f'<circle class="f{look}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3"/>'
            )
    return "".join([*parts, *_key(title, lines), "</svg>"])


def _key(title: str, lines: Sequence[Line]) -> Iterator[str]:
    """Write the last value beside the title, or name the lines below it as far as there is room."""
    if len(lines) == 1:
        text = number(lines[0].series.values[-1])
        yield f'<text class="soft" x="{_WIDTH - 12}" y="16" text-anchor="end">{text}</text>'
        return
    x = 8.0
    for line in lines:
        width = width_of(line.label)
        if x + 14 + width > _WIDTH:
            return
        yield f'<rect class="f{colour(line.number)}" x="{x:.1f}" y="23" width="9" height="9" rx="2"/>'
        yield f'<text class="soft" x="{x + 13:.1f}" y="32">{escape(line.label)}</text>'
        x += 24 + width


def _short(value: float) -> str:
    units = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e3, 1e3, "k"), (0.0, 1.0, ""))
    scale, unit = next(
        (scale, unit) for least, scale, unit in units if abs(value) >= least
    )
    return f"{value / scale:.3g}{unit}"


def _thinned(series: Series) -> list[tuple[float, float]]:
    """Return points of a line: of each stretch the least and the greatest where there are too many."""
    points = list(zip(series.iterations, series.values, strict=True))
    each = math.ceil(2 * len(points) / _MOST_POINTS)
    if each <= 2:
        return points
    stretches = (points[at : at + each] for at in range(0, len(points), each))
    return [
        point
        for s in stretches
        for point in sorted({min(s, key=lambda p: p[1]), max(s, key=lambda p: p[1])})
    ]
