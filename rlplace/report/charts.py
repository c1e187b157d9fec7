"""Line charts as small SVG pictures, in the colours of components."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from rlplace.placement.show.drawing import colour, element, text, title, width_of
from rlplace.report.record import Series

# Sizes in pixels.
_WIDTH = 320
_HEIGHT = 170
_LEFT = 62
_RIGHT = _WIDTH - 12
_TOP = 42
_BOTTOM = _HEIGHT - 22
_KEY = 12  # height of the names of several lines
_MOST_POINTS = 240  # of a line: of more, the least and the greatest of neighbours
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
STYLE = "path.line{fill:none;stroke-width:1.6;stroke-linejoin:round}.grid{stroke:#818b98;stroke-opacity:.3}"


class Line(NamedTuple):
    """One curve of a chart. `number`: index of its colour. `series`: its values, by iteration."""

    label: str
    number: int
    series: Series


class _Scale(NamedTuple):
    """Converts iterations (`first` to `last`) and values (`low` to `high`) to pixels.

    `top`: y of the value `high`, in pixels.
    """

    first: float
    last: float
    low: float
    high: float
    top: float

    def x(self, iteration: float) -> float:
        span = (self.last - self.first) or 1.0
        return _LEFT + (iteration - self.first) * ((_RIGHT - _LEFT) / span)

    def y(self, value: float) -> float:
        span = self.high - self.low
        return _BOTTOM - (value - self.low) * ((_BOTTOM - self.top) / span)


def number(value: float) -> str:
    """Return a number as text with about four digits, such as 12,345, 45.63 or 0.0017."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def chart(name: str, lines: Sequence[Line]) -> str:
    """Return the SVG element of a chart. The horizontal axis is the iteration.

    `name`: title of the chart. `lines`: one or more curves. The last value of a single curve is written beside the
    title; with several curves, each has its last value in its tooltip.
    """
    scale = _scale(lines)
    parts = [text(8, 16, name, "ink name")]
    parts += _grid(scale)
    for line in lines:
        parts += _curve(line, scale)
    parts += _key(lines)
    return element(
        "svg",
        *parts,
        class_="chart",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=name,
    )


def _scale(lines: Sequence[Line]) -> _Scale:
    """Return a scale with which all lines fit into the chart."""
    low = min(min(line.series.values) for line in lines)
    high = max(max(line.series.values) for line in lines)
    if low == high:
        # A flat line goes through the middle.
        half = (abs(low) or 1.0) / 2
        low -= half
        high += half
    top = _TOP
    if len(lines) > 1:
        top += _KEY
    return _Scale(
        first=min(line.series.iterations[0] for line in lines),
        last=max(line.series.iterations[-1] for line in lines),
        low=low,
        high=high,
        top=top,
    )


def _grid(scale: _Scale) -> Iterator[str]:
    """Yield the SVG elements of the grid: three horizontal lines with their values; the first and last iteration."""
    for value in (scale.low, (scale.low + scale.high) / 2, scale.high):
        y = scale.y(value)
        yield element("path", class_="grid", d=f"M{_LEFT} {y:.1f}H{_RIGHT}")
        yield text(_LEFT - 6, y + 4, _short(value), "soft", text_anchor="end")
    for iteration, anchor in ((scale.first, "start"), (scale.last, "end")):
        x = scale.x(iteration)
        shown = f"{iteration:,.0f}"
        yield text(x, _HEIGHT - 6, shown, "soft", text_anchor=anchor)


def _curve(line: Line, scale: _Scale) -> Iterator[str]:
    """Yield the SVG elements of one line. If it has only one point, a dot is drawn."""
    points = [(scale.x(x), scale.y(y)) for x, y in _thinned(line.series)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    look = colour(line.number)
    hint = title(f"{line.label} {number(line.series.values[-1])}")
    yield element("path", hint, class_=f"s{look} line", d=f"M{path}")
    if len(points) == 1:
        ((x, y),) = points
        yield element("circle", class_=f"f{look}", cx=x, cy=y, r=3)


def _key(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the SVG elements of the chart's key: the last value of a single line, or the names of several lines.

    Names are left out when there is no more room.
    """
    if len(lines) == 1:
        last = number(lines[0].series.values[-1])
        yield text(_RIGHT, 16, last, "soft", text_anchor="end")
        return
    x = 8.0
    for line in lines:
        width = width_of(line.label)
        if x + 14 + width > _WIDTH:
            return
        look = f"f{colour(line.number)}"
        yield element("rect", class_=look, x=x, y=23, width=9, height=9, rx=2)
        yield text(x + 13, 32, line.label, "soft")
        x += 24 + width


def _short(value: float) -> str:
    """Return a number as text with three digits, and G, M or k for a factor of 1e9, 1e6 or 1e3."""
    for least, unit in _UNITS:
        if abs(value) >= least:
            return f"{value / least:.3g}{unit}"
    return f"{value:.3g}"


def _thinned(series: Series) -> list[tuple[float, float]]:
    """Return the points (iteration, value) of a line; at most about `_MOST_POINTS` of a long line.

    A long line is divided into stretches of equally many points, and of each stretch the points with the least and with
    the greatest value are kept.
    """
    points = list(zip(series.iterations, series.values, strict=True))
    each = math.ceil(2 * len(points) / _MOST_POINTS)
    if each <= 2:
        return points
    kept = []
    for at in range(0, len(points), each):
        stretch = points[at : at + each]
        least = min(stretch, key=itemgetter(1))
        greatest = max(stretch, key=itemgetter(1))
        kept += sorted({least, greatest})
    return kept
