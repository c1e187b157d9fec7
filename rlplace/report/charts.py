"""Line charts in the colours of components: an SVG picture, and data from which a script draws axes and hover.

`curves.js` and the library uPlot replace the picture in a browser that runs scripts.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from operator import itemgetter
from pathlib import Path
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
_MOST_POINTS = 500  # most points of a line; of more, the least and greatest of neighbouring points are drawn
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_GAP = (
    1.5  # a distance between values above this multiple of the usual distance is a gap
)
_UPLOT = Path(__file__).with_name("uplot")
_SCRIPT = Path(__file__).with_name("curves.js")
_STYLE = Path(__file__).with_name("curves.css")
# uPlot formats numbers in the language of the browser. A browser that starts without a language has none that it knows,
# such as "en-US@posix", and uPlot would end with a RangeError.
_KNOWN_LANGUAGE = """\
try { new Intl.NumberFormat(navigator.language) }
catch { Object.defineProperty(navigator, "language", {value: "en-US"}) }
"""
# Shown where scripts run; 0 is the values as they are.
CONTROLS = (
    '<label class="controls" hidden>smoothing '
    '<input type="range" min="0" max="0.98" step="0.02" value="0"/></label>'
)


class Line(NamedTuple):
    """One curve of a chart.

    `number`: index of its colour. `series`: its values, by iteration. `steps`: iteration -> env steps or samples until
    then, the horizontal axis; None: the axis is the iteration.
    """

    label: str
    number: int
    series: Series
    steps: Mapping[float, float] | None = None

    def stretches(self) -> list[list[tuple[float, float]]]:
        """Return the points (x, value) of the line, in stretches between its gaps.

        There is a gap where two values are more iterations apart than usual: the iterations between them had no value.
        """
        iterations = self.series.iterations
        usual = 1.0
        distances = [b - a for a, b in itertools.pairwise(iterations)]
        if distances:
            usual = statistics.median(distances)
        found: list[list[tuple[float, float]]] = [[]]
        before = iterations[0]
        for iteration, value in zip(iterations, self.series.values, strict=True):
            if iteration - before > _GAP * usual:
                found.append([])
            before = iteration
            x = iteration
            if self.steps is not None:
                x = self.steps.get(iteration, iteration)
            if math.isfinite(value):
                found[-1].append((x, value))
        return [_thinned(stretch, len(iterations)) for stretch in found if stretch]


Stretches = Sequence[Sequence[tuple[float, float]]]


class _Scale(NamedTuple):
    """Converts places on the axis (`first` to `last`) and values (`low` to `high`) to pixels.

    `top`: y of the value `high`, in pixels.
    """

    first: float
    last: float
    low: float
    high: float
    top: float

    def x(self, place: float) -> float:
        span = (self.last - self.first) or 1.0
        return _LEFT + (place - self.first) * ((_RIGHT - _LEFT) / span)

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


def scripts() -> tuple[str, ...]:
    """Return the scripts that draw the charts of a page in a browser: the library uPlot, then ours."""
    library = (_UPLOT / "uPlot.iife.min.js").read_text(encoding="utf-8")
    return _KNOWN_LANGUAGE + library, _SCRIPT.read_text(encoding="utf-8")


def styles() -> str:
    """Return the style sheet of the charts, as text."""
    sheets = (_UPLOT / "uPlot.min.css", _STYLE)
    return "\n".join(sheet.read_text(encoding="utf-8") for sheet in sheets)


def chart(
    name: str, lines: Sequence[Line], axis: str = "iterations", wide: bool = False
) -> str:
    """Return a chart as HTML: a picture, and its data for the script.

    `name`: title of the chart. `lines`: one or more curves, each with a finite value. `axis`: name of the horizontal
    axis. `wide`: whether the chart is as wide as the page. The last value of a single curve is written beside the
    title; with several curves, each has its last value in its tooltip.
    """
    found = [(line, line.stretches()) for line in lines]
    curves = [(line, stretches) for line, stretches in found if stretches]
    if not curves:
        return ""
    drawn = [line for line, _ in curves]
    scale = _scale([stretches for _, stretches in curves], len(drawn) > 1)
    parts = [text(8, 16, name, "ink name"), *_grid(scale, axis)]
    for line, stretches in curves:
        parts += _curve(line, stretches, scale)
    parts += _key(drawn)
    picture = element(
        "svg",
        *parts,
        class_="chart",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=name,
    )
    data = {"axis": axis, "lines": [_data(*curve) for curve in curves]}
    # A text in the data must not end the element
    told = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    look = "curve wide" if wide else "curve"
    return (
        f'<figure class="{look}">{_caption(name, drawn)}{picture}<div class="plot"></div>'
        f'<script type="application/json">{told}</script></figure>'
    )


def _data(line: Line, stretches: Stretches) -> dict[str, object]:
    """Return a curve for the script: label, colour, places on the axis, and values; null is a gap."""
    xs: list[float] = []
    values: list[float | None] = []
    for stretch in stretches:
        if xs:
            # Put the gap between the last point before it and the first point after it
            xs.append((xs[-1] + stretch[0][0]) / 2)
            values.append(None)
        for x, value in stretch:
            xs.append(x)
            values.append(float(f"{value:.6g}"))
    return {"label": line.label, "colour": colour(line.number), "x": xs, "y": values}


def _caption(name: str, lines: Sequence[Line]) -> str:
    """Return the caption of a chart that the script draws: its title, a key of several lines, the last value."""
    shown = f"<b>{escape(name)}</b>"
    last = ""
    look = "readout"
    if len(lines) == 1:
        last = number(lines[0].series.values[-1])
    else:
        for line in lines:
            sample = element(
                "rect", class_=f"f{colour(line.number)}", width=9, height=9, rx=2
            )
            dot = element("svg", sample, class_="dot")
            shown += f'<span class="key">{dot}{escape(line.label)}</span>'
        look += " several"
    return f'<figcaption>{shown}<span class="{look}">{last}</span></figcaption>'


def _scale(curves: Sequence[Stretches], has_key: bool) -> _Scale:
    """Return a scale with which all curves fit into the chart. `has_key`: whether names of lines need room above."""
    points = [point for stretches in curves for points in stretches for point in points]
    xs, values = zip(*points, strict=True)
    low = min(values)
    high = max(values)
    if low == high:
        # A flat line goes through the middle.
        half = (abs(low) or 1.0) / 2
        low -= half
        high += half
    top = _TOP
    if has_key:
        top += _KEY
    return _Scale(first=min(xs), last=max(xs), low=low, high=high, top=top)


def _grid(scale: _Scale, axis: str) -> Iterator[str]:
    """Yield the SVG elements of the grid: three horizontal lines with their values; both ends and name of the axis."""
    for value in (scale.low, (scale.low + scale.high) / 2, scale.high):
        y = scale.y(value)
        yield element("path", class_="grid", d=f"M{_LEFT} {y:.1f}H{_RIGHT}")
        yield text(_LEFT - 6, y + 4, _short(value), "soft", text_anchor="end")
    for place, anchor in ((scale.first, "start"), (scale.last, "end")):
        x = scale.x(place)
        yield text(x, _HEIGHT - 6, f"{place:,.0f}", "soft", text_anchor=anchor)
    middle = (_LEFT + _RIGHT) / 2
    yield text(middle, _HEIGHT - 6, axis, "soft", text_anchor="middle")


def _curve(line: Line, stretches: Stretches, scale: _Scale) -> Iterator[str]:
    """Yield the SVG elements of one line. Of a stretch with only one point, a dot is drawn."""
    look = colour(line.number)
    path = ""
    for stretch in stretches:
        points = [(scale.x(x), scale.y(y)) for x, y in stretch]
        path += "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        if len(points) == 1:
            ((x, y),) = points
            yield element("circle", class_=f"f{look}", cx=x, cy=y, r=3)
    hint = title(f"{line.label} {number(line.series.values[-1])}")
    yield element("path", hint, class_=f"s{look} line", d=path)


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


def _thinned(points: list[tuple[float, float]], of: int) -> list[tuple[float, float]]:
    """Return the points (x, value) of a stretch; of a line with very many points, fewer.

    `of`: number of points of the whole line. If there are more than `_MOST_POINTS`, the stretch is divided into parts
    of equally many points, and of each part the points with the least and with the greatest value are kept.
    """
    each = math.ceil(2 * of / _MOST_POINTS)
    if each <= 2:
        return points
    kept = []
    for at in range(0, len(points), each):
        part = points[at : at + each]
        least = min(part, key=itemgetter(1))
        greatest = max(part, key=itemgetter(1))
        kept += sorted({least, greatest})
    return kept
