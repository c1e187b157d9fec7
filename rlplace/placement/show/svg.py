"""A plan as a picture: accelerators down, stages across, coloured by component.

Pages may be light or dark. Neighbouring accelerators with the same components are one
row of the grid; nodes that are alike are drawn once.
"""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from operator import itemgetter
from typing import NamedTuple

from rlplace.placement.language.lend import whole_component
from rlplace.placement.language.spec import ComponentSpec
from rlplace.placement.machines.topology import Ranges
from rlplace.placement.schedule import Residency
from rlplace.placement.show.drawing import (
    Attribute,
    colour,
    element,
    picture,
    span,
    swatch,
    text,
    title,
    width_of,
)
from rlplace.placement.show.view import (
    ELLIPSIS,
    NodeFold,
    PlanView,
    StageView,
    show_move,
)
from rlplace.units import clipped, plural, show_bytes

# All sizes are pixels.
WIDTH = 960  # of the page, at least
_MARGIN = 28
_GAP = 30  # between two stages
_LEAST_LEFT = 122  # for the numbers of accelerators
_LEAST_COLUMN = 128  # width of a stage: one move fits on a line
_HEAD = 128  # height above the grid, without the lines about moves
_LINE = 17  # height of a line of text
_SIGN = 14  # width of the arrow before a line about moves
_LOW_ROW = 26  # height of a component that has no accelerators
_LOW_GAP = 4  # below such a component
_TALL_ROW = 66  # height of a band with a line for the state too
_MOST_TALL = 12  # bands; of more, none is tall
_GRID_HEIGHT = 288  # shared by all accelerators that are drawn
_BETWEEN_NODES = 16
_MOST_FOLDS = 24  # kinds of node that are drawn
_BLOCK_GAP = 6  # between blocks of one column
_USUAL_FONT = 12
_LEAST_FONT = 10
_LEAST_BYTES = 8  # height of the smallest text for bytes
_NO_BREAK = "\u00a0"
_TWO_LINES = 38  # height from which name and bytes, or state, have a line each
_LEAST_ROW = _TWO_LINES + 4  # height of a band
_CUT = 14  # length of the marks between the accelerators of a block


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row of the grid: neighbouring accelerators with the same components.

    `fold`: the node that the row belongs to, or several equal nodes that are drawn once. `accelerators`: numbered
    within the node. `y`, `height`: where the row is on the page, in pixels.
    """

    fold: NodeFold
    accelerators: range  # numbered within the node
    components: tuple[str, ...]
    y: float
    height: float

    @property
    def label(self) -> str:
        """The accelerator numbers as text: numbers in the cluster if `fold` is a single node, else within the node."""
        base = 0
        if len(self.fold.nodes) == 1:
            base = self.fold.first
        first = base + self.accelerators.start
        last = base + self.accelerators.stop - 1
        if first == last:
            return str(first)
        return f"{first}\u2013{last}"

    @property
    def starts_fold(self) -> bool:
        """Whether this row is the first row of its nodes. The label of the nodes stands beside their first row only."""
        return self.accelerators.start == 0


class Cell(NamedTuple):
    """The content of the accelerators of a row in one stage. Neighbouring rows with equal cells are drawn as one block.

    `nodes`: the nodes of the row. `residents`: the components in memory. `sizes`: bytes of each resident; 0: not known.
    `total`, `capacity`: bytes held by the fullest accelerator, and its capacity.
    """

    nodes: range
    residents: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes of each resident; 0 where not known
    total: int  # bytes on the fullest accelerator
    capacity: int  # bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A rectangle on the page, in pixels."""

    x: float
    y: float
    width: float
    height: float

    def drawn(self, look: str) -> str:
        return element(
            "rect",
            class_=look,
            x=float(self.x),
            y=float(self.y),
            width=float(self.width),
            height=float(self.height),
            rx=8,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The positions of the parts of the page, in pixels. Every stage has a column that is `width` wide.

    `page`: width of the page. `left`: x of the first stage. `extra`: by how much everything below the names of the
    components moves down. `notes`: for each stage, lines (arrow, text) about its moves. `elsewhere`: (component, y) for
    components without accelerators. `grid_bottom`: y of the lower end of the grid.
    """

    page: int  # width of the page
    left: int  # x of the first stage
    width: float
    extra: int  # how far all below the names of the components moves down
    rows: Sequence[Row]
    notes: Sequence[Sequence[tuple[str, str]]]  # of each stage: (arrow, text) lines
    elsewhere: Sequence[tuple[str, int]]  # components without accelerators, with y
    grid_bottom: int

    def x(self, stage: int) -> float:
        return self.left + stage * (self.width + _GAP)


def render_svg(view: PlanView) -> str:
    """Return the plan as an SVG document that needs no other file. It is at least 960 pixels wide.

    If memory is known, the blocks show bytes, and stages that do not fit are marked.
    """
    plan = view.plan
    folds = [fold for fold in view.folds if fold.accelerators]
    several = len(folds) > 1 or any(len(fold.nodes) > 1 for fold in folds)
    names, layout = _lay_out(view, folds, several)

    # Below the grid: components without accelerators, remarks, the legend.
    bottom = layout.grid_bottom
    if layout.elsewhere:
        bottom += (_LOW_ROW + _LOW_GAP) * len(layout.elsewhere) + 8
    below = _remarks(view, folds)
    height = bottom + 40 + _LINE * len(below)
    legend, legend_height = _legend(view, layout.left, height, layout.page)
    height += legend_height

    # Above it: the title, the machines, the colours of the components.
    mode = f"{plan.placement.mode} placement"
    machines = plan.topology.describe()
    subtitle = machines
    if view.ahead:
        subtitle += f"; rollout \u2016 learn, {view.ahead}"
    parts = [
        _text(_MARGIN, 44, mode, "title ink"),
        _text(_MARGIN, 66, subtitle),
        *names,
    ]
    if layout.rows:
        parts += _scale(layout.rows, layout.left, several)
    for component, y in layout.elsewhere:
        parts.append(_text(_MARGIN, y + 17, _place_of(view, component)))

    for number, stage in enumerate(view.stages):
        parts += _draw_stage(view, layout, number, stage)
    for line, remark in enumerate(below):
        shown = clipped(remark, 110)
        parts.append(_text(layout.left, bottom + 18 + _LINE * line, shown))

    placed = ", ".join(f"{c.name}: {c.render()}" for c in view.components)
    label = f"{mode} on {machines}; {placed}"
    return picture(
        layout.page,
        height,
        label,
        [*parts, *legend],
        components=len(view.components),
    )


def _lay_out(
    view: PlanView, folds: Sequence[NodeFold], several: bool
) -> tuple[list[str], _Layout]:
    """Return the drawn names of the components (SVG), and the places of stages, rows and texts.

    `folds`: the nodes with accelerators; equal neighbours are one entry. `several`: whether there is more than one
    node.
    """
    # Across: the labels at the left, then a column for each stage.
    rows = []
    for fold in folds[:_MOST_FOLDS]:
        for accelerators, components in fold.bands():
            rows.append(Row(fold, accelerators, components, y=0.0, height=0.0))
    left = _LEAST_LEFT
    if several:
        left = _left(rows)
    stages = len(view.stages)
    beside = _MARGIN + left + _GAP * (stages - 1)
    page = max(WIDTH, int(beside + _LEAST_COLUMN * stages))
    width = (page - beside) / stages

    # Down: names, lines about moves, the grid, components without accelerators.
    notes = [_notes(stage, width) for stage in view.stages]
    names, extra = _names(view, page)
    top = _HEAD + extra + _LINE * max(map(len, notes))
    rows = _placed(view, rows, width, top)
    bottom = int(top)
    if rows:
        bottom = int(rows[-1].y + rows[-1].height)
    elsewhere = []
    for at, spec in enumerate(_without_accelerators(view)):
        elsewhere.append((spec.name, bottom + 8 + (_LOW_ROW + _LOW_GAP) * at))
    layout = _Layout(
        page=page,
        left=left,
        width=width,
        extra=extra,
        rows=rows,
        notes=notes,
        elsewhere=elsewhere,
        grid_bottom=bottom,
    )
    return names, layout


def _remarks(view: PlanView, folds: Sequence[NodeFold]) -> list[str]:
    """Return the lines of text below the grid: how many kinds of nodes are not drawn, and the components on hosts."""
    remarks = []
    if len(folds) > _MOST_FOLDS:
        remarks.append(f"and {len(folds) - _MOST_FOLDS} more kinds of node")
    for spec in _without_accelerators(view):
        remarks.append(f"{spec.name} is on {spec.pool.noun}s: {spec.render()}")
    return remarks


def _draw_stage(
    view: PlanView, layout: _Layout, number: int, stage: StageView
) -> Iterator[str]:
    """Yield the drawn parts (SVG) of a stage's column: name, moves on entry, blocks, and an arrow.

    The arrow comes from the stage before; the first stage has none. `number`: index of the stage.
    """
    x = layout.x(number)
    heading = f"{span(str(number + 1), 'soft')} {escape(stage.name)}"
    yield _markup(x, 102 + layout.extra, heading, "stage ink")

    for line, (arrow, note) in enumerate(layout.notes[number]):
        y = 122 + layout.extra + _LINE * line
        if arrow.strip():
            yield _text(x, y, arrow)
        shift = _SIGN if arrow else 0
        yield _text(x + shift, y, note)

    # Neighbouring rows that hold the same are one block.
    for cell, run in itertools.groupby(
        layout.rows, key=lambda row: _cell(view, stage, row)
    ):
        yield from _draw_run(view, stage, cell, list(run), x, layout.width)
    for component, y in layout.elsewhere:
        box = Box(x, y, layout.width, _LOW_ROW)
        yield _draw_elsewhere(view, component, stage, box)

    if number and layout.rows:
        middle = (layout.rows[0].y + layout.grid_bottom) / 2
        start = f"M{x - _GAP / 2 - 4:.1f} {middle - 8:.1f}"
        yield element("path", class_="arrow", d=f"{start} l8 8 l-8 8")


def _without_accelerators(view: PlanView) -> list[ComponentSpec]:
    return [spec for spec in view.components if not spec.accelerators]


def _place_of(view: PlanView, component: str) -> str:
    """Return where a component without accelerators is, as text such as `node 0`, `nodes 0-3` or `Arms 0-1`."""
    spec = view.plan.placement.spec(component)
    places = Ranges.of(segment.accelerators for segment in spec.written)
    noun = plural(len(places), spec.pool.noun)
    return f"{noun} {clipped(str(places), 8, ELLIPSIS)}"


def _text(
    x: float, y: float, shown: str, look: str = "soft", **attributes: Attribute
) -> str:
    """Return an SVG text element at (`x`, `y`), rounded to one decimal. `look`: its class in the style sheet."""
    return text(float(x), float(y), shown, look, **attributes)


def _markup(x: float, y: float, inside: str, look: str, **attributes: Attribute) -> str:
    """Return an SVG text element at (`x`, `y`). `inside`: its content, in SVG. `look`: its class in the style sheet."""
    return element("text", inside, class_=look, x=float(x), y=float(y), **attributes)


def _placed(view: PlanView, rows: Sequence[Row], width: float, top: float) -> list[Row]:
    """Return the rows of the grid with their `y` and `height` filled in.

    A row is as high as its accelerators and its texts need. `width`: width of a column, in pixels. `top`: y of the
    first row.
    """
    drawn = sum(len(row.accelerators) for row in rows)
    unit = _GRID_HEIGHT / max(8, drawn)
    least = _LEAST_ROW
    if len(rows) <= _MOST_TALL:
        least = _TALL_ROW
    placed = list[Row]()
    y = top
    for row in rows:
        if placed and row.starts_fold:
            y += _BETWEEN_NODES
        of_accelerators = unit * len(row.accelerators)
        height = max(least, of_accelerators, _turned_height(view, row, width))
        placed.append(dataclasses.replace(row, y=y, height=height))
        y += height
    return placed


def _turned_height(view: PlanView, row: Row, width: float) -> float:
    """Return the height in pixels that the vertical texts in the narrow blocks of a row need; 0 if no block is narrow.

    `width`: width of a column, in pixels.
    """
    longest = 0.0
    for stage in view.stages:
        cell = _cell(view, stage, row)
        each = _share(cell, width)
        for component, size in zip(cell.residents, cell.sizes, strict=True):
            bytes_held = _held(size)
            if _is_narrow(component, bytes_held, each):
                shown = f"{component} {stage.look(component)} {bytes_held}"
                length = width_of(shown, _LEAST_FONT, bold=True) + 18 + _LINE
                longest = max(longest, length)
    return longest


def _held(size: int) -> str:
    """Return a number of bytes as text, such as "4.2 GiB"; "" for 0, which means that the number is not known."""
    if size:
        return show_bytes(size)
    return ""


def _share(cell: Cell, width: float) -> float:
    """Return the width of each block if all components of `cell` lie side by side. `width`: width of the column."""
    blocks = len(cell.residents)
    return (width - _BLOCK_GAP * (blocks - 1)) / max(1, blocks)


def _is_narrow(component: str, bytes_held: str, width: float) -> bool:
    """Return whether a block is too narrow to show the component's name and bytes in letters that can be read.

    `bytes_held`: the bytes, as text. `width`: width of the block, in pixels.
    """
    words = component.split(".")
    longest = max(width_of(word, _LEAST_FONT, bold=True) for word in words)
    return longest > width - 8 or width_of(bytes_held, _LEAST_BYTES) > width - 4


def _left(rows: Sequence[Row]) -> int:
    """Return the width of the left margin in pixels: it has room for the longest label of the rows."""
    widest = 0.0
    for row in rows:
        # Beside the label of the nodes
        width = 10 + width_of(row.label)
        if row.starts_fold:
            width = width_of(row.fold.label, bold=True)
        widest = max(widest, width)
    return max(_LEAST_LEFT, int(_MARGIN + widest + 14))


def _names(view: PlanView, page: int) -> tuple[list[str], int]:
    """Return the drawn names of the components (SVG), each with its colour and place, and the height that they need.

    `page`: width of the page. All sizes are in pixels.
    """
    labels = []
    for spec in view.components:
        place = str(spec.accelerators) or spec.render()
        labels.append((spec.name, clipped(place, 24, ELLIPSIS)))
    widths = [38 + width_of(f"{name}: {place}", 13.3) for name, place in labels]

    # On the line of the title where they fit at its right, else on lines of their own.
    x = page - _MARGIN - sum(widths) + 18
    y = 43
    extra = 0
    if x < 330:
        x = float(_MARGIN)
        y = 94
        extra = 28

    parts: list[str] = []
    for at, (name, place) in enumerate(labels):
        if x + widths[at] > page and x > _MARGIN:
            x = float(_MARGIN)
            y += 22
            extra += 22
        shown = f"{span(name, 'name')}: {escape(place)}"
        parts.append(swatch(float(x), float(y - 12), 14, f"f{colour(at)}"))
        parts.append(_markup(x + 20, y, shown, "ink", style="font-size:13px"))
        x += widths[at]
    return parts, extra


def _scale(rows: Sequence[Row], left: int, several: bool) -> Iterator[str]:
    """Yield the accelerator numbers (SVG) at the left of the grid.

    There is one number for each accelerator if there is room, else the range of each row. `left`: x of the first stage.
    `several`: whether the grid has more than one node.
    """
    yield _text(_MARGIN, rows[0].y - 11, "accelerator")
    for row in rows:
        each = row.height / len(row.accelerators)
        if several and row.starts_fold:
            numbers = row.label
            if len(row.fold.nodes) > 1:
                numbers = f"{len(row.fold.nodes)} \u00d7 {numbers}"
            yield _text(_MARGIN, row.y + 17, row.fold.label, "ink name")
            yield _text(_MARGIN, row.y + 33, numbers)
        elif several or each < 18:
            yield _text(left - 10, row.y + 17, row.label, text_anchor="end")
        else:
            for at, number in enumerate(row.accelerators):
                y = row.y + (at + 0.5) * each + 4
                shown = str(row.fold.first + number)
                yield _text(left - 14, y, shown, text_anchor="end")


def _notes(stage: StageView, width: float) -> list[tuple[str, str]]:
    """Return the moves on entry to a stage as lines (arrow, text), releases before acquires.

    The lines fit in a column that is `width` pixels wide. Only the first line of the releases and of the acquires has
    an arrow; further lines have a space. Without moves, the only line is ("", "nothing moves").
    """
    letters = int((width + _GAP - 22) / width_of("x"))
    lines: list[tuple[str, str]] = []
    for arrow, moves in (("\u2193", stage.releases), ("\u2191", stage.acquires)):
        # A line ends between two moves, never inside one.
        whole = [show_move(move).replace(" ", _NO_BREAK) for move in moves]
        sign = arrow
        for line in textwrap.wrap(", ".join(whole), letters, break_long_words=False):
            lines.append((sign, line.replace(_NO_BREAK, " ")))
            sign = " "
    return lines or [("", "nothing moves")]


def _legend(view: PlanView, left: int, y: float, page: int) -> tuple[list[str], int]:
    """Return the drawn legend (SVG), which explains each style of block that occurs, and its height in pixels.

    `left`, `y`: where the legend begins. `page`: width of the page.
    """
    # Only looks that some component has in some stage.
    looks = {stage.look(c) for stage in view.stages for c in stage.held}
    parts: list[str] = []
    x = float(left)
    for look, kind, meaning in (
        ("full", "f0", "full: at work with all its state"),
        ("weights", "s0 weights", "weights only"),
        ("waits", "s0 waits", "waits: resident, not needed"),
    ):
        if look in looks:
            parts.append(swatch(x, float(y - 11), 22, kind))
            parts.append(_text(x + 30, y, meaning))
            x += 56 + width_of(meaning)

    # The order of stages and moves, at the right; on a line of its own where it would overlap.
    numbers = ", ".join(str(at + 1) for at in range(len(view.stages)))
    order = f"{numbers}, and again"
    if view.moves:
        order = f"\u2193 released first, then \u2191 acquired; {order}"
    extra = 0
    if x + width_of(order) > page - _MARGIN:
        extra = _LINE + 4
    parts.append(_text(page - _MARGIN, y + extra, order, text_anchor="end"))
    return parts, 26 + extra


def _cell(view: PlanView, stage: StageView, row: Row) -> Cell:
    """Return what the fullest accelerator of a row holds in a stage."""
    residents = tuple(c for c in row.components if stage.held[c] > Residency.OFF)
    first = row.fold.first
    window = Ranges.of(
        [range(first + row.accelerators.start, first + row.accelerators.stop)]
    )
    found = []
    for account in view.ledger.accelerators:
        if not account.numbers & window:
            continue
        for load in account.loads:
            # The load of the stage itself, not that of a moment on entry.
            if load.moment.stage == stage.name and not load.moment.entering:
                sizes = tuple(load.of(whole_component(c)) for c in residents)
                found.append((load.total_bytes, account.room_bytes, sizes))
    unknown = (0, 0, (0,) * len(residents))
    total, capacity, sizes = max(found, key=itemgetter(0), default=unknown)
    return Cell(row.fold.nodes, residents, sizes, total, capacity)


def _draw_run(
    view: PlanView,
    stage: StageView,
    cell: Cell,
    run: Sequence[Row],
    x: float,
    width: float,
) -> Iterator[str]:
    """Yield the blocks (SVG) of neighbouring rows with equal cells: one for each component in memory, side by side.

    `cell`: the content of each row of `run`. `x`, `width`: place of the column. A cell without residents gives one
    block "free". A frame marks a cell with more bytes than its capacity.
    """
    over = 0 < cell.capacity < cell.total
    top = run[0].y + 2
    if over:
        # The alarm has its line above the block
        top += _LINE
    box = Box(x, top, width, run[-1].y + run[-1].height - top - 2)

    # An empty cell says so, in place of blocks.
    if not cell.residents:
        middle_x = box.x + box.width / 2
        middle_y = box.y + box.height / 2 + 4
        free = _text(middle_x, middle_y, "free", text_anchor="middle")
        hint = title(f"nothing is resident in {stage.name}")
        yield element("g", hint, box.drawn("free"), "\n", free)

    # The residents divide the width of the stage evenly.
    each = _share(cell, width)
    for at, component in enumerate(cell.residents):
        block = Box(x + at * (each + _BLOCK_GAP), box.y, each, box.height)
        yield _block(view, stage, component, run, block, cell.sizes[at])

    # A frame around all blocks, with both sizes as far as there is room for words.
    if over:
        held = show_bytes(cell.total)
        short = f"{held} of {show_bytes(cell.capacity)}"
        alarm = f"{short}: does not fit"
        shown = held
        for longer in (short, alarm):
            if width_of(longer, bold=True) <= width:
                shown = longer
        words = _text(box.x, box.y - 5, shown, "alarm")
        yield element("g", title(alarm), box.drawn("over"), "\n", words)


def _block(
    view: PlanView,
    stage: StageView,
    component: str,
    run: Sequence[Row],
    box: Box,
    size: int,
) -> str:
    """Return the drawn block (SVG) of a component on the neighbouring rows `run`.

    `box`: the rectangle of the block. `size`: bytes on each accelerator; 0 if not known.
    """
    look = stage.look(component)
    number = colour(_index(view, component))
    solid = look == Residency.FULL.word

    # What a browser shows at the pointer.
    rows = run[0].label
    if len(run) > 1:
        rows = f"{run[0].label} to {run[-1].label}"
    hint = f"{component} on {rows}, {run[0].fold.label}, {look} in {stage.name}"
    if size:
        hint += f": {show_bytes(size)} on each accelerator"
    parts = [title(hint), _filled(number, look, box)]

    # Marks at both sides between accelerators, where there is room for them.
    count = sum(len(row.accelerators) for row in run)
    if solid and box.height / count >= 12 and box.width >= 60:
        for cut in range(1, count):
            y = box.y + cut * box.height / count
            across = f"h{_CUT}m{box.width - 2 * _CUT:.1f} 0h{_CUT}"
            parts.append(
                element("path", class_="cut", d=f"M{box.x:.1f} {y:.1f}{across}")
            )

    parts += _label(component, look, _held(size), _ink(number, look), box)
    return element("g", "\n".join([*parts, ""]))


def _index(view: PlanView, component: str) -> int:
    """Return the index of a component in the plan. A part of a component has the index of its component."""
    return view.plan.placement.components.index(whole_component(component))


def _filled(number: int, look: str, box: Box) -> str:
    if look == Residency.FULL.word:
        return box.drawn(f"f{number}")
    return box.drawn(f"s{number} {look}")


def _ink(number: int, look: str) -> str:
    """Return the style class of a text on a block: white on a block in full colour, else the component's colour.

    `number`: the component's colour. `look`: the style class of the block.
    """
    if look == Residency.FULL.word:
        return "on"
    return f"t{number}"


def _draw_elsewhere(view: PlanView, component: str, stage: StageView, box: Box) -> str:
    """Return the drawn block (SVG) of a component without accelerators. `box`: the rectangle of the block."""
    look = stage.look(component)
    number = colour(_index(view, component))
    place = _place_of(view, component)
    hint = title(f"{component} on {place}, {look} in {stage.name}")
    if look == Residency.OFF.word:
        return element("g", hint, "\n", box.drawn("free"))
    parts = [hint, _filled(number, look, box)]
    parts += _label(component, look, "", _ink(number, look), box)
    return element("g", "\n".join([*parts, ""]))


def _label(
    component: str, state: str, bytes_held: str, look: str, box: Box
) -> list[str]:
    """Return the texts (SVG) on a block: name, state and bytes of a component.

    A low block has them on one line, a narrow block on one vertical line, any other block on a line each. `state`:
    "off", "weights", "full" or "waits". `bytes_held`: bytes as text; "" if not known. `look`: class of the texts in the
    style sheet. `box`: the rectangle of the block.
    """
    if box.height < _TWO_LINES:
        return [_low_label(component, state, bytes_held, look, box)]
    if _is_narrow(component, bytes_held, box.width) and box.height > box.width:
        return [_turned_label(component, state, bytes_held, look, box)]
    return _tall_label(component, state, bytes_held, look, box)


def _low_label(component: str, state: str, bytes_held: str, look: str, box: Box) -> str:
    """Return one line of text (SVG) on a low block: the name, then state and bytes if there is room.

    `state`: "off", "weights", "full" or "waits". `bytes_held`: bytes as text; "" if not known. `look`: class of the
    text in the style sheet. `box`: the rectangle of the block.
    """
    room = box.width - 8
    named = span(component, "name")
    size = min(12.0, room / width_of(f"{component} {state}", 1, bold=True))
    shown = f"{named} {state}"
    if size < _LEAST_FONT:
        # Too small to read with the state: the name alone.
        size = max(7.0, min(12.0, room / width_of(component, 1, bold=True)))
        shown = named
    elif bytes_held:
        name_width = width_of(component, bold=True)
        if name_width + width_of(f" {state} {bytes_held}") <= room:
            shown += f" {bytes_held}"
    x = box.x + box.width / 2
    y = box.y + box.height / 2
    return _centred(x, y + 4, shown, look, size)


def _turned_label(
    component: str, state: str, bytes_held: str, look: str, box: Box
) -> str:
    """Return one vertical line of text (SVG) on a narrow block: name and state, then the bytes if there is room.

    `state`: "off", "weights", "full" or "waits". `bytes_held`: bytes as text; "" if not known. `look`: class of the
    text in the style sheet. `box`: the rectangle of the block.
    """
    room = box.height - 12
    words = f"{component} {state}"
    with_bytes = f"{words} {bytes_held}"
    if bytes_held and width_of(with_bytes, _LEAST_FONT, bold=True) <= room:
        words = with_bytes
        state = f"{state} {bytes_held}"
    size = min(14.0, room / width_of(words, 1, bold=True))
    x = box.x + box.width / 2
    y = box.y + box.height / 2
    shown = f"{span(component, 'name')} {state}"
    turn = f"rotate(-90 {x:.1f} {y:.1f})"
    return _centred(x, y + 4, shown, look, size, transform=turn)


def _tall_label(
    component: str, state: str, bytes_held: str, look: str, box: Box
) -> list[str]:
    """Return the texts (SVG) on a block that is not low or narrow: the name, and state and bytes on the lines below.

    A name that is too long is split at its dots. `state`: "off", "weights", "full" or "waits". `bytes_held`: bytes as
    text; "" if not known. `look`: class of the texts in the style sheet. `box`: the rectangle of the block.
    """
    # `reward.math` has two lines where one would be too long.
    words = component.split(".")
    room = box.width - 8
    fitting = room / max(width_of(word, 1, bold=True) for word in words)
    if width_of(component, 15, bold=True) <= room:
        words = [component]
    name_size = min(15.0, max(7.0, fitting))
    lines = [(word, name_size, " name") for word in words]

    # Below the name: bytes go before the state where only one line is left.
    lines_left = int((box.height - 4) / _LINE) - len(words)
    small = min(12.0, (box.width - 4) / max(1, width_of(bytes_held, 1)))
    legible = bool(bytes_held) and small >= _LEAST_BYTES
    if legible and lines_left == 1:
        lines.append((bytes_held, small, ""))
    else:
        lines.append((state, 12.0, ""))
        if legible and lines_left > 1:
            lines.append((bytes_held, small, ""))

    x = box.x + box.width / 2
    y = box.y + box.height / 2 - 3 - 8 * (len(lines) - 2)
    parts = []
    for line, size, weight in lines:
        parts.append(_centred(x, y, escape(line), look + weight, size))
        if len(parts) == 1:
            # The name is larger than the lines below it
            y += 1
        y += _LINE
    return parts


def _centred(
    x: float,
    y: float,
    inside: str,
    look: str,
    size: float,
    transform: str | None = None,
) -> str:
    """Return an SVG text element whose middle is at `x` and whose base line is at `y`.

    `inside`: its content, in SVG. `look`: its class in the style sheet. `size`: font size in pixels. `transform`: its
    SVG attribute of this name; None: no attribute.
    """
    sized = None
    if size != _USUAL_FONT:
        sized = f"font-size:{size:.4g}px"
    return _markup(
        x,
        y,
        inside,
        look,
        transform=transform,
        text_anchor="middle",
        style=sized,
    )
