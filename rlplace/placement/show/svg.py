"""A plan as a picture: accelerators down, stages across, coloured by component; for light and dark pages."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from rlplace.placement.language.spec import ComponentSpec
from rlplace.placement.machines.topology import Ranges
from rlplace.placement.schedule import Residency
from rlplace.placement.show.view import (
    ELLIPSIS,
    NodeFold,
    PlanView,
    StageView,
    show_move,
)
from rlplace.units import clipped, plural, show_bytes

WIDTH = 960
_MARGIN = 28
_GAP = 30
_LEAST_LEFT = 122  # pixels for the numbers of accelerators
_LEAST_COLUMN = 128  # pixels of a stage: one move fits on a line
_HEAD = 128  # pixels above the grid, without the lines about moves
_LINE = 17
_LOW_ROW = 26  # pixels of a component that has no accelerators
_TALL_ROW = 66
_MOST_TALL = (
    12  # pixels of a band with a line for the state too, and how many are as tall
)
_GRID_HEIGHT = 288  # shared by all accelerators drawn
_BETWEEN_NODES = 16
_MOST_FOLDS = 24
_BLOCK_GAP = 6  # pixels between blocks of one column
_USUAL_FONT = 12
_LEAST_FONT = 10
_LEAST_BYTES = 8
_AT_END = ' text-anchor="end"'
_MIDDLE = ' text-anchor="middle"'
_NO_BREAK = "\u00a0"
_NARROW = 0.38
_USUAL = 0.63
_WIDE = 0.88  # widths of letters, in heights
_TWO_LINES = (
    38  # pixels of height from which name and bytes, or state, have a line each
)
_LEAST_ROW = _TWO_LINES + 4  # pixels of a band
# (fill, ink on a light page, ink on a dark page); the fills carry white text and differ for the colour-blind.
PALETTE = (
    ("#2f6fdb", "#1d4fa8", "#8fb6ff"),
    ("#1c8a5f", "#116142", "#6fd3a8"),
    ("#c9620b", "#8f4404", "#ffb26b"),
    ("#8250df", "#5f33b3", "#c4a7ff"),
    ("#0c7f93", "#07596a", "#6ccfe0"),
    ("#bf3989", "#8d2463", "#ff9bce"),
    ("#7a6a12", "#574b09", "#dcc862"),
    ("#59636e", "#3d444d", "#b1bac4"),
    ("#a3402f", "#772b1f", "#ffa392"),
    ("#4b55c8", "#343c99", "#a9b1ff"),
)
FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
_STYLE = Path(__file__).with_name("picture.css")  # its last block is for dark pages


def colour(number: int) -> int:
    """Return the colour of the component with this number in the plan; colours repeat where there are many."""
    return number % len(PALETTE)


def style(components: int) -> str:
    """Write the style sheet: `f0` fills, `s0` fills and strokes, `t0` writes in the first component's colour."""
    light, at, dark = "".join(
        _STYLE.read_text(encoding="utf-8").splitlines()
    ).partition("@media")
    used = list(enumerate(PALETTE[:components]))
    looks = (
        f".f{i}{{fill:{fill}}}.s{i}{{fill:{fill};stroke:{fill}}}.t{i}{{fill:{ink}}}"
        for i, (fill, ink, _) in used
    )
    inks = "".join(f".t{i}{{fill:{pale}}}" for i, (_, _, pale) in used)
    return f"<style>{light}{''.join(looks)}{at}{dark.removesuffix('}')}{inks}}}</style>"


def width_of(text: str, size: float = 12.0, *, bold: bool = False) -> float:
    """Estimate how wide a text is, in pixels: in DejaVu Sans, the widest of the fonts."""
    ems = sum(
        _NARROW
        if c in "iljft.,:;|()-\u2013 "
        else _WIDE
        if c in "mwMWGB%\u2192"
        else _USUAL
        for c in text
    )
    return ems * size * (1.12 if bold else 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One band of accelerators of one fold, placed on the page."""

    fold: NodeFold
    accelerators: range  # numbered within the node
    components: tuple[str, ...]
    y: float
    height: float

    @property
    def label(self) -> str:
        """Their numbers over the cluster, within the node where several nodes are alike."""
        base = self.fold.first if len(self.fold.nodes) == 1 else 0
        first = base + self.accelerators.start
        last = base + self.accelerators.stop - 1
        if first == last:
            return str(first)
        return f"{first}\u2013{last}"

    @property
    def starts_fold(self) -> bool:
        """Whether the label of the nodes stands here, with the numbers below it."""
        return self.accelerators.start == 0


class Cell(NamedTuple):
    """What a row holds in one stage; neighbouring rows with the same cell are one block."""

    nodes: range
    residents: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes of each resident; 0 where not known
    total: int  # bytes on the fullest accelerator
    capacity: int


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    x: float
    y: float
    width: float
    height: float

    def __str__(self) -> str:
        return f'x="{self.x:.1f}" y="{self.y:.1f}" width="{self.width:.1f}" height="{self.height:.1f}" rx="8"'


def render_svg(view: PlanView) -> str:
    """Draw a self-contained SVG, 960 wide or more. With known memory, blocks show bytes and misfits are marked."""
    plan = view.plan
    stages = view.stages
    folds = [f for f in view.folds if f.accelerators]
    rows = [
        Row(fold, *band, y=0.0, height=0.0)
        for fold in folds[:_MOST_FOLDS]
        for band in fold.bands()
    ]
    several = len(folds) > 1 or any(len(f.nodes) > 1 for f in folds)
    left = _left(rows) if several else _LEAST_LEFT
    beside = _MARGIN + left + _GAP * (len(stages) - 1)
    page = max(WIDTH, int(beside + _LEAST_COLUMN * len(stages)))
    width = (page - beside) / len(stages)
    notes = [_notes(stage, width) for stage in stages]
    names, extra = _names(view, page)
    top = _HEAD + extra + _LINE * max(map(len, notes))
    rows = _placed(view, rows, width, top)
    bottom = int(rows[-1].y + rows[-1].height) if rows else int(top)
    elsewhere = [
        (c.name, bottom + 8 + (_LOW_ROW + 4) * at)
        for at, c in enumerate(_without_accelerators(view))
    ]
    grid_bottom = bottom
    bottom = bottom + (_LOW_ROW + 4) * len(elsewhere) + 8 * bool(elsewhere)
    below = (
        [f"and {len(folds) - _MOST_FOLDS} more kinds of node"]
        if len(folds) > _MOST_FOLDS
        else []
    )
    below += [
        f"{c.name} is on {c.pool.noun}s: {c.render()}"
        for c in _without_accelerators(view)
    ]
    height = bottom + 40 + _LINE * len(below)
    legend, legend_height = _legend(view, left, height, page)
    height += legend_height
    ahead = f"; rollout \u2016 learn, {view.ahead}" if view.ahead else ""
    placed = ", ".join(f"{c.name}: {c.render()}" for c in view.components)
    summary = escape(
        f"{plan.placement.mode} placement on {plan.topology.describe()}; {placed}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {page} {height}" width="{page}" height="{height}" '
        f'role="img" aria-label="{summary}" font-family="{FONT}">',
        style(len(view.components)),
        f'<rect class="page" x="0.5" y="0.5" width="{page - 1}" height="{height - 1}" rx="12"/>',
        _text(_MARGIN, 44, f"{plan.placement.mode} placement", "title ink"),
        _text(_MARGIN, 66, escape(plan.topology.describe() + ahead)),
        *names,
        *(_scale(rows, left, several) if rows else ()),
        *(
            _text(_MARGIN, y + 17, _place_of(view, component))
            for component, y in elsewhere
        ),
    ]
    for at, stage in enumerate(stages):
        x = left + at * (width + _GAP)
        parts.append(
            _text(
                x,
                102 + extra,
                f'<tspan class="soft">{at + 1}</tspan> {escape(stage.name)}',
                "stage ink",
            )
        )
        for line, (arrow, note) in enumerate(notes[at]):
            y = 122 + extra + _LINE * line
            if arrow.strip():
                parts.append(_text(x, y, arrow))
            parts.append(_text(x + 14 if arrow else x, y, escape(note)))
        for cell, run in itertools.groupby(
            rows, key=lambda row: _cell(view, stage, row)
        ):
            parts += _draw_run(view, stage, cell, list(run), x, width)
        for component, y in elsewhere:
            parts += _draw_elsewhere(view, component, stage, Box(x, y, width, _LOW_ROW))
        if at and rows:
            middle = (rows[0].y + grid_bottom) / 2
            parts.append(
                f'<path class="arrow" d="M{x - _GAP / 2 - 4:.1f} {middle - 8:.1f} l8 8 l-8 8"/>'
            )
    parts += [
        _text(left, bottom + 18 + _LINE * at, escape(clipped(line, 110)))
        for at, line in enumerate(below)
    ]
    return "\n".join([*parts, *legend, "</svg>", ""])


def _without_accelerators(view: PlanView) -> list[ComponentSpec]:
    return [c for c in view.components if not c.accelerators]


def _place_of(view: PlanView, component: str) -> str:
    """Write where a component without accelerators is: `node 0`, `nodes 0-3`, `Arms 0-1`."""
    spec = view.plan.placement.spec(component)
    places = Ranges.of(s.accelerators for s in spec.written)
    return f"{plural(len(places), spec.pool.noun)} {clipped(str(places), 8, ELLIPSIS)}"


def _text(x: float, y: float, shown: str, look: str = "soft", more: str = "") -> str:
    """Write a text, which is escaped already, with `more` attributes."""
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}"{more}>{shown}</text>'


def _swatch(x: float, y: float, width: int, look: str) -> str:
    return f'<rect class="{look}" x="{x:.1f}" y="{y:.1f}" width="{width}" height="14" rx="4"/>'


def _placed(view: PlanView, rows: Sequence[Row], width: float, top: float) -> list[Row]:
    """Place the rows of the grid from its top down, as high as their accelerators and their texts ask for."""
    unit = _GRID_HEIGHT / max(8, sum(len(row.accelerators) for row in rows))
    least = _TALL_ROW if len(rows) <= _MOST_TALL else _LEAST_ROW
    placed = list[Row]()
    y = top
    for at, row in enumerate(rows):
        y += _BETWEEN_NODES if at and row.starts_fold else 0
        height = max(
            least, unit * len(row.accelerators), _turned_height(view, row, width)
        )
        placed.append(dataclasses.replace(row, y=y, height=height))
        y += height
    return placed


def _turned_height(view: PlanView, row: Row, width: float) -> float:
    """Return the height that the texts of a row's blocks need where they are too narrow to be read across."""
    lengths = [0.0]
    for stage in view.stages:
        cell = _cell(view, stage, row)
        each = _share(cell, width)
        for component, size in zip(cell.residents, cell.sizes, strict=True):
            bytes_held = show_bytes(size) if size else ""
            if _is_narrow(component, bytes_held, each):
                text = f"{component} {stage.look(component)} {bytes_held}"
                lengths.append(width_of(text, _LEAST_FONT, bold=True) + 18 + _LINE)
    return max(lengths)


def _share(cell: Cell, width: float) -> float:
    """Return the width of each block of a column of `width`."""
    return (width - _BLOCK_GAP * (len(cell.residents) - 1)) / max(
        1, len(cell.residents)
    )


def _is_narrow(component: str, bytes_held: str, width: float) -> bool:
    """Whether the name or the bytes of a block would be too small to read across."""
    longest = max(
        width_of(word, _LEAST_FONT, bold=True) for word in component.split(".")
    )
    return longest > width - 8 or width_of(bytes_held, _LEAST_BYTES) > width - 4


def _left(rows: Sequence[Row]) -> int:
    """Return the room for the labels of nodes, beside the numbers of accelerators where both are on one line."""
    widths = [
        width_of(row.fold.label, bold=True)
        if row.starts_fold
        else 10 + width_of(row.label)
        for row in rows
    ]
    return max(_LEAST_LEFT, int(_MARGIN + max(widths, default=0) + 14))


def _names(view: PlanView, page: int) -> tuple[list[str], int]:
    """Draw each component's colour and place; also return how many pixels all else moves down for them."""
    texts = [
        f"{c.name}: {clipped(str(c.accelerators) or c.render(), 24, ELLIPSIS)}"
        for c in view.components
    ]
    widths = [38 + width_of(text, 13.3) for text in texts]
    x = page - _MARGIN - sum(widths) + 18
    y = 43
    extra = 0
    if x < 330:
        x = float(_MARGIN)
        y = 94
        extra = 28
    parts: list[str] = []
    for at, (text, width) in enumerate(zip(texts, widths, strict=True)):
        if x + width > page and x > _MARGIN:
            x = float(_MARGIN)
            y = y + 22
            extra = extra + 22
        component, _, place = escape(text).partition(":")
        shown = f'<tspan class="name">{component}</tspan>:{place}'
        parts += [
            _swatch(x, y - 12, 14, f"f{colour(at)}"),
            _text(x + 20, y, shown, "ink", ' style="font-size:13px"'),
        ]
        x += width
    return parts, extra


def _scale(rows: Sequence[Row], left: int, several: bool) -> Iterator[str]:
    """Write accelerator numbers at the left: each where there is room, else each band's."""
    yield _text(_MARGIN, rows[0].y - 11, "accelerator")
    for row in rows:
        each = row.height / len(row.accelerators)
        if several and row.starts_fold:
            yield _text(_MARGIN, row.y + 17, row.fold.label, "ink name")
            nodes = f"{len(row.fold.nodes)} \u00d7 " if len(row.fold.nodes) > 1 else ""
            yield _text(_MARGIN, row.y + 33, nodes + row.label)
        elif several or each < 18:
            yield _text(left - 10, row.y + 17, row.label, more=_AT_END)
        else:
            for at, number in enumerate(row.accelerators):
                yield _text(
                    left - 14,
                    row.y + (at + 0.5) * each + 4,
                    str(row.fold.first + number),
                    more=_AT_END,
                )


def _notes(stage: StageView, width: float) -> list[tuple[str, str]]:
    """Return (arrow, text) lines as wide as a stage: releases, then acquires."""
    lines: list[tuple[str, str]] = []
    for arrow, moves in (("\u2193", stage.releases), ("\u2191", stage.acquires)):
        words = ", ".join(show_move(move).replace(" ", _NO_BREAK) for move in moves)
        wrapped = textwrap.wrap(
            words, int((width + _GAP - 22) / width_of("x")), break_long_words=False
        )
        lines += [
            (" " if at else arrow, line.replace(_NO_BREAK, " "))
            for at, line in enumerate(wrapped)
        ]
    return lines or [("", "nothing moves")]


def _legend(view: PlanView, left: int, y: float, page: int) -> tuple[list[str], int]:
    """Draw the meaning of the looks that occur; also return the height it takes."""
    looks = {stage.look(c) for stage in view.stages for c in stage.held}
    parts: list[str] = []
    x = float(left)
    for look, kind, meaning in (
        ("full", "f0", "full: at work with all its state"),
        ("weights", "s0 weights", "weights only"),
        ("waits", "s0 waits", "waits: resident, not needed"),
    ):
        if look in looks:
            parts += [_swatch(x, y - 11, 22, kind), _text(x + 30, y, meaning)]
            x += 56 + width_of(meaning)
    numbers = ", ".join(str(i + 1) for i in range(len(view.stages)))
    moves = "\u2193 released first, then \u2191 acquired; " if view.moves else ""
    text = f"{moves}{numbers}, and again"
    extra = _LINE + 4 if x + width_of(text) > page - _MARGIN else 0
    return [*parts, _text(page - _MARGIN, y + extra, text, more=_AT_END)], 26 + extra


def _cell(view: PlanView, stage: StageView, row: Row) -> Cell:
    """Return what the fullest accelerator of a row holds in a stage."""
    residents = tuple(c for c in row.components if stage.held[c] > Residency.OFF)
    first = row.fold.first
    window = Ranges.of(
        [range(first + row.accelerators.start, first + row.accelerators.stop)]
    )
    found = [
        (load.total_bytes, account.room_bytes, tuple(load.of(c) for c in residents))
        for account in view.ledger.accelerators
        if account.numbers & window
        for load in account.loads
        if load.moment.stage == stage.name and not load.moment.entering
    ]
    total, capacity, sizes = max(
        found, key=itemgetter(0), default=(0, 0, (0,) * len(residents))
    )
    return Cell(row.fold.nodes, residents, sizes, total, capacity)


def _draw_run(
    view: PlanView,
    stage: StageView,
    cell: Cell,
    run: Sequence[Row],
    x: float,
    width: float,
) -> Iterator[str]:
    """Draw one block for each resident component, side by side."""
    over = 0 < cell.capacity < cell.total
    top = run[0].y + 2 + _LINE * over  # the alarm has its line above the block
    box = Box(x, top, width, run[-1].y + run[-1].height - top - 2)
    if not cell.residents:
        yield f'<g><title>nothing is resident in {escape(stage.name)}</title><rect class="free" {box}/>'
        yield (
            _text(
                box.x + box.width / 2, box.y + box.height / 2 + 4, "free", more=_MIDDLE
            )
            + "</g>"
        )
    each = _share(cell, width)
    for at, (component, size) in enumerate(
        zip(cell.residents, cell.sizes, strict=True)
    ):
        yield from _block(
            view,
            stage,
            component,
            run,
            Box(x + at * (each + _BLOCK_GAP), box.y, each, box.height),
            size,
        )
    if over:
        short = f"{show_bytes(cell.total)} of {show_bytes(cell.capacity)}"
        text = f"{short}: does not fit"
        yield f'<g><title>{text}</title><rect class="over" {box}/>'
        yield (
            _text(
                box.x,
                box.y - 5,
                text if width_of(text, bold=True) <= width else short,
                "alarm",
            )
            + "</g>"
        )


def _block(
    view: PlanView,
    stage: StageView,
    component: str,
    run: Sequence[Row],
    box: Box,
    size: int,
) -> Iterator[str]:
    look = stage.look(component)
    number = colour(view.plan.placement.components.index(component))
    rows = run[0].label if len(run) == 1 else f"{run[0].label} to {run[-1].label}"
    bytes_held = f": {show_bytes(size)} on each accelerator" if size else ""
    solid = look == Residency.FULL.word
    shown = escape(
        f"{component} on {rows}, {run[0].fold.label}, {look} in {stage.name}{bytes_held}"
    )
    yield f"<g><title>{shown}</title>"
    yield _filled(number, look, box)
    count = sum(len(row.accelerators) for row in run)
    if solid and box.height / count >= 12 and box.width >= 60:
        for cut in range(1, count):
            y = box.y + cut * box.height / count
            yield f'<path class="cut" d="M{box.x:.1f} {y:.1f}h14m{box.width - 28:.1f} 0h14"/>'
    yield from _label(
        component,
        look,
        show_bytes(size) if size else "",
        "on" if solid else f"t{number}",
        box,
    )
    yield "</g>"


def _filled(number: int, look: str, box: Box) -> str:
    return f'<rect class="{f"f{number}" if look == Residency.FULL.word else f"s{number} {look}"}" {box}/>'


def _draw_elsewhere(
    view: PlanView, component: str, stage: StageView, box: Box
) -> Iterator[str]:
    """Draw a component that has no accelerators."""
    look = stage.look(component)
    number = colour(view.plan.placement.components.index(component))
    yield f"<g><title>{escape(f'{component} on {_place_of(view, component)}, {look} in {stage.name}')}</title>"
    if look == Residency.OFF.word:
        yield f'<rect class="free" {box}/></g>'
        return
    yield _filled(number, look, box)
    yield from _label(
        component, look, "", "on" if look == Residency.FULL.word else f"t{number}", box
    )
    yield "</g>"


def _label(
    component: str, state: str, bytes_held: str, look: str, box: Box
) -> Iterator[str]:
    """Write name, state and bytes below each other; on one line where the block is low, turned where it is narrow."""
    words = component.split(".")  # reward.math on two lines
    fitting = (box.width - 8) / max(width_of(word, 1, bold=True) for word in words)
    whole = f"{component} {state}"
    named = f'<tspan class="name">{escape(component)}</tspan>'
    x = box.x + box.width / 2
    y = box.y + box.height / 2
    if box.height < _TWO_LINES:
        room = box.width - 8
        size = min(12.0, room / width_of(whole, 1, bold=True))
        shown = f"{named} {state}"
        if size < _LEAST_FONT:
            size = max(7.0, min(12.0, room / width_of(component, 1, bold=True)))
            shown = named
        elif (
            bytes_held
            and width_of(component, bold=True) + width_of(f" {state} {bytes_held}")
            <= room
        ):
            shown += f" {bytes_held}"
        yield _text(x, y + 4, shown, look, _sized(size))
    elif _is_narrow(component, bytes_held, box.width) and box.height > box.width:
        if (
            bytes_held
            and width_of(f"{whole} {bytes_held}", _LEAST_FONT, bold=True)
            <= box.height - 12
        ):
            state = f"{state} {bytes_held}"
        size = min(
            14.0, (box.height - 12) / width_of(f"{component} {state}", 1, bold=True)
        )
        yield _text(
            x,
            y + 4,
            f"{named} {state}",
            look,
            f' transform="rotate(-90 {x:.1f} {y:.1f})"{_sized(size)}',
        )
    else:
        if width_of(component, 15, bold=True) <= box.width - 8:
            words = [component]
        lines = [(word, min(15.0, max(7.0, fitting)), " name") for word in words]
        room = int((box.height - 4) / 17) - len(words)  # lines below the name
        small = min(12.0, (box.width - 4) / max(1, width_of(bytes_held, 1)))
        if bytes_held and small >= _LEAST_BYTES and room == 1:
            lines.append((bytes_held, small, ""))
        else:
            lines.append((state, 12.0, ""))
            lines += (
                [(bytes_held, small, "")]
                if bytes_held and small >= _LEAST_BYTES and room > 1
                else []
            )
        top = y - 3 - 8 * (len(lines) - 2)
        for at, (line, size, weight) in enumerate(lines):
            yield _text(
                x, top + 17 * at + (at > 0), escape(line), look + weight, _sized(size)
            )


def _sized(size: float) -> str:
    return _MIDDLE + ("" if size == _USUAL_FONT else f' style="font-size:{size:.4g}px"')
