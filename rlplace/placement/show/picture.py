"""The plan as a picture: accelerators down, stages across, coloured by component; for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from rlplace.placement.memory.ledger import MemoryLedger
from rlplace.placement.schedule import Residency, Transition, apart
from rlplace.placement.show.fold import NodeFold
from rlplace.placement.show.picture_blocks import draw_run
from rlplace.placement.show.picture_rows import LEAST_ROW, Row, lay_rows, runs
from rlplace.placement.show.picture_style import FONT, colour, style, width_of
from rlplace.placement.transfers import AnyPlan

WIDTH, _MARGIN, _LEFT, _GAP = 960, 28, 122, 30
_LEAST_COLUMN = 128  # pixels of a stage: one move fits on a line
_HEAD = 128  # pixels above the grid, less the lines about moves
_LINE = 17
_LONGEST_TEXT = 24  # characters of a placement in the heading


def render_svg(plan: AnyPlan, ledger: MemoryLedger | None = None) -> str:
    """A self-contained SVG document, 960 wide or more where stages are many, its height by what there is to show.

    With a ledger, blocks say what they hold, and accelerators that are too small are marked.
    """
    stages = plan.schedule.stages
    beside = _MARGIN + _LEFT + _GAP * (len(stages) - 1)
    page = max(WIDTH, beside + _LEAST_COLUMN * len(stages))
    width = (page - beside) / len(stages)
    notes = {stage: _notes(plan.schedule.entries[stage], width) for stage in stages}
    names, extra = _names(plan, page)
    top = _HEAD + extra + _LINE * max(map(len, notes.values()))
    rows, left_out = lay_rows(plan, top)
    bottom = int(rows[-1].y + rows[-1].height) if rows else int(top)
    legend, legend_height = _legend(plan, bottom + 40, page)
    height = bottom + legend_height + 40 + 16 * bool(left_out)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {page} {height}" width="{page}" height="{height}" '
        f'role="img" aria-label="{escape(_summary(plan), {chr(34): "&quot;"})}" font-family="{FONT}">',
        style(len(plan.placement.components)),
        f'<rect class="page" x="0.5" y="0.5" width="{page - 1}" height="{height - 1}" rx="12"/>',
        f'<text class="title ink" x="{_MARGIN}" y="44">{plan.placement.mode} placement</text>',
        f'<text class="soft" x="{_MARGIN}" y="66">{escape(_below_title(plan))}</text>',
        *names,
        *(_scale(rows) if rows else ()),
    ]
    for at, stage in enumerate(stages):
        x = _LEFT + at * (width + _GAP)
        parts += _stage_head(stage, at, x, extra, notes[stage])
        for run in runs(plan, stage, rows, ledger):
            parts += draw_run(plan, ledger, stage, run, x, width)
        if at and rows:
            middle = (rows[0].y + bottom) / 2
            parts.append(f'<path class="arrow" d="M{x - _GAP / 2 - 4:.1f} {middle - 8:.1f} l8 8 l-8 8"/>')
    if left_out:
        text = f"and {left_out} more kinds of node"
        parts.append(f'<text class="soft" x="{_LEFT}" y="{bottom + 18}">{text}</text>')
    return "\n".join([*parts, *legend, "</svg>", ""])


def _below_title(plan: AnyPlan) -> str:
    overlap = f"; rollout \u2016 learn, {apart(plan.needs)}" if plan.needs.ahead else ""
    return plan.topology.describe() + overlap


def _summary(plan: AnyPlan) -> str:
    placed = ", ".join(f"{c}: {plan.placement.spec(c).render()}" for c in plan.placement.components)
    return f"{plan.placement.mode} placement on {plan.topology.describe()}; {placed}"


def _names(plan: AnyPlan, page: int) -> tuple[list[str], int]:
    """Every component with its colour and its text: at the right of the title, or in lines of their own below it.

    Returns the parts and by how many pixels all else moves down.
    """
    texts = {c: _text(plan, c) for c in plan.placement.components}
    widths = {c: 38 + width_of(f"{c}: {t}", 13.3) for c, t in texts.items()}
    x, y, extra = page - _MARGIN - sum(widths.values()) + 18, 43, 0
    if x < 330:
        x, y, extra = float(_MARGIN), 94, 28
    parts: list[str] = []
    for at, (component, text) in enumerate(texts.items()):
        if x + widths[component] > page and x > _MARGIN:
            x, y, extra = float(_MARGIN), y + 22, extra + 22
        parts.append(f'<rect class="f{colour(at)}" x="{x:.1f}" y="{y - 12}" width="14" height="14" rx="4"/>')
        shown = f'<tspan class="name">{escape(component)}</tspan>: {escape(text)}'
        parts.append(f'<text class="ink" x="{x + 20:.1f}" y="{y}" style="font-size:13px">{shown}</text>')
        x += widths[component]
    return parts, extra


def _text(plan: AnyPlan, component: str) -> str:
    """Where a component is, in few characters."""
    spec = plan.placement.spec(component)
    text = str(spec.accelerators) if spec.accelerators else spec.render()
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 2] + " \u2026"


def _scale(rows: Sequence[Row]) -> Iterator[str]:
    """Accelerator numbers at the left: each where there is room, else each band's."""
    yield f'<text class="soft" x="{_MARGIN}" y="{rows[0].y - 11:.1f}">accelerator</text>'
    previous: NodeFold | None = None
    several = rows[0].fold is not rows[-1].fold or len(rows[0].fold.nodes) > 1
    for row in rows:
        if several and row.fold is not previous:
            yield f'<text class="ink name" x="{_MARGIN}" y="{row.y + 17:.1f}">{row.fold.label}</text>'
            previous = row.fold
            first = True
        else:
            first = False
        each = row.height / len(row.accelerators)
        if several or each < 18:
            below = several and first and row.height >= 2 * LEAST_ROW
            x, anchor, drop = (_MARGIN, "start", 33) if below else (_LEFT - 10, "end", 17)
            nodes = f"{len(row.fold.nodes)} \u00d7 " if below and len(row.fold.nodes) > 1 else ""
            yield f'<text class="soft" x="{x}" y="{row.y + drop:.1f}" text-anchor="{anchor}">{nodes}{row.label}</text>'
            continue
        for at, number in enumerate(row.accelerators):
            y = row.y + (at + 0.5) * each + 4
            yield f'<text class="soft" x="{_LEFT - 14}" y="{y:.1f}" text-anchor="end">{row.fold.first + number}</text>'


def _notes(entry: Transition, width: float) -> list[tuple[str, str]]:
    """(arrow, text) lines as wide as a stage: what is released, then what is acquired."""
    lines: list[tuple[str, str]] = []
    for arrow, moves in (("\u2193", entry.releases), ("\u2191", entry.acquires)):
        line = ""
        for move in moves:
            word = f"{move.component} {move.before.word} \u2192 {move.after.word}"
            if line and width_of(f"{line}, {word},") + 14 > width:
                lines.append((arrow, line + ","))
                arrow, line = " ", word
            else:
                line = f"{line}, {word}" if line else word
        if line:
            lines.append((arrow, line))
    return lines or [("", "nothing moves")]


def _stage_head(stage: str, at: int, x: float, extra: int, notes: Sequence[tuple[str, str]]) -> Iterator[str]:
    y = 102 + extra
    yield f'<text class="stage ink" x="{x:.1f}" y="{y}"><tspan class="soft">{at + 1}</tspan> {escape(stage)}</text>'
    for line, (arrow, text) in enumerate(notes):
        y = 122 + extra + _LINE * line
        if arrow.strip():
            yield f'<text class="soft" x="{x:.1f}" y="{y}">{arrow}</text>'
        yield f'<text class="soft" x="{x + (14 if arrow else 0):.1f}" y="{y}">{escape(text)}</text>'


def _legend(plan: AnyPlan, y: float, page: int) -> tuple[list[str], int]:
    """What the looks mean, as far as they occur, and the height it takes."""
    held = [
        ("waits" if plan.schedule.needs.of(stage, c) is Residency.OFF else level.word)
        for stage, row in plan.schedule.residency.items()
        for c, level in row.items()
        if level > Residency.OFF
    ]
    parts: list[str] = []
    x = float(_LEFT)
    entries = (
        ("full", "f0", "full: at work with all its state"),
        ("weights", "s0 weights", "weights only"),
        ("waits", "s0 waits", "waits: resident, not needed, in nobody's way"),
    )
    for word, look, text in entries:
        if word in held:
            parts.append(f'<rect class="{look}" x="{x:.1f}" y="{y - 11:.1f}" width="22" height="14" rx="4"/>')
            parts.append(f'<text class="soft" x="{x + 30:.1f}" y="{y:.1f}">{escape(text)}</text>')
            x += 56 + width_of(text)
    moves = any(e.releases or e.acquires for e in plan.schedule.entries.values())
    text = "\u2193 released first, then \u2191 acquired; 1, 2, 3, and again" if moves else "1, 2, 3, and again"
    text = text.replace("1, 2, 3", ", ".join(str(i + 1) for i in range(len(plan.schedule.stages))))
    extra = _LINE + 4 if x + width_of(text) > page - _MARGIN else 0
    end = f'<text class="soft" x="{page - _MARGIN}" y="{y + extra:.1f}" text-anchor="end">{text}</text>'
    return [*parts, end], 26 + extra
