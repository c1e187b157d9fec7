"""The plan as a picture: accelerators down, stages across, coloured by what is held; for light and dark pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from rlplace.placement.fold import NodeFold, fold_nodes
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency, Transition

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
)
_WIDTH, _MARGIN, _LEFT, _GAP = 960, 28, 122, 30
_GRID_HEIGHT = 288  # shared by all accelerators drawn
_LEAST_ROW = 26  # of a band, so that its text fits
_FONT = "font-family=\"ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif\""
_LINE_CHARACTERS = 38  # of 12 px text across one stage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One band of one fold, placed on the page."""

    fold: NodeFold
    accelerators: range  # numbered within the node
    components: tuple[str, ...]
    y: float
    height: float

    @property
    def label(self) -> str:
        base = self.fold.first if len(self.fold.nodes) == 1 else 0
        first, last = base + self.accelerators.start, base + self.accelerators.stop - 1
        return str(first) if first == last else f"{first}\u2013{last}"


def render_svg(plan: Plan) -> str:
    """A self-contained SVG document, 960 wide, its height by what there is to show."""
    notes = {stage: _notes(plan.schedule.entries[stage]) for stage in plan.schedule.stages}
    top = 128 + 17 * max(map(len, notes.values()))
    rows = _rows(plan, top)
    height = int(rows[-1].y + rows[-1].height) + 66
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(_summary(plan))}" {_FONT}>',
        _style(plan),
        f'<rect class="page" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="12"/>',
        *_heading(plan),
        *_scale(rows),
    ]
    width = (_WIDTH - _MARGIN - _LEFT - _GAP * (len(notes) - 1)) / len(notes)
    for at, stage in enumerate(plan.schedule.stages):
        x = _LEFT + at * (width + _GAP)
        parts += _stage_head(stage, at, x, notes[stage])
        for run in _runs(plan, stage, rows):
            parts += _block(plan, stage, run, x, width)
        if at:
            middle = (rows[0].y + rows[-1].y + rows[-1].height) / 2
            parts.append(f'<path class="arrow" d="M{x - _GAP / 2 - 4:.1f} {middle - 8:.1f} l8 8 l-8 8"/>')
    parts += _legend(plan, height - 26)
    return "\n".join([*parts, "</svg>", ""])


def _summary(plan: Plan) -> str:
    placed = ", ".join(f"{c}: {plan.placement.spec(c).render()}" for c in plan.placement.components)
    return f"{plan.placement.mode} placement on {plan.topology.describe()}; {placed}"


def _style(plan: Plan) -> str:
    light = [
        ".page{fill:#ffffff;stroke:#d0d7de}.ink{fill:#1f2328}.soft{fill:#59636e}",
        ".arrow{fill:none;stroke:#818b98;stroke-width:2.5;stroke-linecap:round;stroke-linejoin:round}",
        ".free{fill:none;stroke:#c8d1da;stroke-dasharray:3 4}.on{fill:#ffffff}.cut{stroke:#ffffff;stroke-opacity:.45}",
        "text{font-size:12px}.title{font-size:21px;font-weight:650}.stage{font-size:16px;font-weight:650}.name{font-weight:650}",
        ".weights{fill-opacity:.14;stroke-width:1.5}.waits{fill-opacity:.05;stroke-opacity:.6;stroke-dasharray:4 3}",
    ]
    dark = [
        ".page{fill:#0d1117;stroke:#30363d}.ink{fill:#f0f6fc}.soft{fill:#9198a1}",
        ".arrow{stroke:#656c76}.free{stroke:#3d444d}.weights{fill-opacity:.26}",
    ]
    for i in range(min(len(plan.placement.components), len(PALETTE))):
        fill, ink, pale = PALETTE[i]
        light.append(f".f{i}{{fill:{fill}}}.s{i}{{fill:{fill};stroke:{fill}}}.t{i}{{fill:{ink}}}")
        dark.append(f".t{i}{{fill:{pale}}}")
    return f"<style>{''.join(light)}@media (prefers-color-scheme:dark){{{''.join(dark)}}}</style>"


def _colour(plan: Plan, component: str) -> int:
    return plan.placement.components.index(component) % len(PALETTE)


def _heading(plan: Plan) -> Iterator[str]:
    yield f'<text class="title ink" x="{_MARGIN}" y="44">{plan.placement.mode} placement</text>'
    yield f'<text class="soft" x="{_MARGIN}" y="66">{escape(plan.topology.describe())}</text>'
    x = float(_WIDTH - _MARGIN)
    for component in reversed(plan.placement.components):
        text = plan.placement.spec(component).render()
        text = text if len(text) <= 24 else text[:22] + " \u2026"
        x -= 7.3 * len(f"{component}: {text}") + 20 + 18 * (x < _WIDTH - _MARGIN)
        colour = _colour(plan, component)
        yield f'<rect class="f{colour}" x="{x:.1f}" y="31" width="14" height="14" rx="4"/>'
        yield (
            f'<text class="ink" x="{x + 20:.1f}" y="43" style="font-size:13px">'
            f'<tspan class="name">{escape(component)}</tspan>: {escape(text)}</text>'
        )


def _rows(plan: Plan, top: float) -> list[_Row]:
    folds = [f for f in fold_nodes(plan.placement) if f.accelerators]
    unit = _GRID_HEIGHT / max(8, sum(f.accelerators for f in folds))
    rows: list[_Row] = []
    y = top
    for fold in folds:
        for band in fold.bands():
            height = max(_LEAST_ROW, unit * len(band.accelerators))
            rows.append(_Row(fold=fold, accelerators=band.accelerators, components=band.components, y=y, height=height))
            y += height
        y += 16
    return rows


def _scale(rows: Sequence[_Row]) -> Iterator[str]:
    """Accelerator numbers at the left: each where there is room, else each band's."""
    yield f'<text class="soft" x="{_MARGIN}" y="{rows[0].y - 11:.1f}">accelerator</text>'
    previous: NodeFold | None = None
    several = rows[0].fold is not rows[-1].fold or len(rows[0].fold.nodes) > 1
    for row in rows:
        if several and row.fold is not previous:
            yield f'<text class="ink name" x="{_MARGIN}" y="{row.y + 17:.1f}">{row.fold.label}</text>'
            previous = row.fold
        each = row.height / len(row.accelerators)
        if several or each < 18:
            drop = 32 if several and row.height >= 2 * _LEAST_ROW else 17
            x, anchor = (_MARGIN, "start") if drop == 32 else (_LEFT - 10, "end")
            yield f'<text class="soft" x="{x}" y="{row.y + drop:.1f}" text-anchor="{anchor}">{row.label}</text>'
            continue
        for at, number in enumerate(row.accelerators):
            y = row.y + (at + 0.5) * each + 4
            yield f'<text class="soft" x="{_LEFT - 14}" y="{y:.1f}" text-anchor="end">{row.fold.first + number}</text>'


def _notes(entry: Transition) -> list[tuple[str, str]]:
    """(arrow, text) lines: what is released, then what is acquired."""
    lines: list[tuple[str, str]] = []
    for arrow, moves in (("\u2193", entry.releases), ("\u2191", entry.acquires)):
        line = ""
        for move in moves:
            word = f"{move.component} {move.before.word} \u2192 {move.after.word}"
            if line and len(line) + len(word) + 2 > _LINE_CHARACTERS:
                lines.append((arrow, line + ","))
                line = word
            else:
                line = f"{line}, {word}" if line else word
        if line:
            lines.append((arrow, line))
    return lines or [("", "nothing moves")]


def _stage_head(stage: str, at: int, x: float, notes: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield f'<text class="stage ink" x="{x:.1f}" y="102"><tspan class="soft">{at + 1}</tspan> {escape(stage)}</text>'
    for line, (arrow, text) in enumerate(notes):
        y = 122 + 17 * line
        yield f'<text class="soft" x="{x:.1f}" y="{y}">{arrow}</text>' if arrow else ""
        yield f'<text class="soft" x="{x + (14 if arrow else 0):.1f}" y="{y}">{escape(text)}</text>'


def _runs(plan: Plan, stage: str, rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Neighbouring rows of a node that hold the same in this stage, to be drawn as one block."""
    run: list[_Row] = []
    for row in rows:
        if run and (row.fold is not run[-1].fold or _holding(plan, stage, row) != _holding(plan, stage, run[-1])):
            yield run
            run = []
        run.append(row)
    yield run


def _holding(plan: Plan, stage: str, row: _Row) -> list[str]:
    return [c for c in row.components if plan.schedule.residency[stage][c] > Residency.OFF]


def _block(plan: Plan, stage: str, run: Sequence[_Row], x: float, width: float) -> Iterator[str]:
    y, height = run[0].y + 2, run[-1].y + run[-1].height - run[0].y - 4
    holding = _holding(plan, stage, run[0])
    if not holding:
        yield f'<rect class="free" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="8"/>'
        middle = f'x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}" text-anchor="middle"'
        yield f'<text class="soft" {middle}>free</text>'
    each = (width - 6 * (len(holding) - 1)) / max(1, len(holding))
    count = sum(len(row.accelerators) for row in run)
    for at, component in enumerate(holding):
        left = x + at * (each + 6)
        held = plan.schedule.residency[stage][component]
        waits = plan.needs.of(stage, component) is Residency.OFF
        colour = _colour(plan, component)
        solid = held is Residency.FULL and not waits
        look = f"f{colour}" if solid else f"s{colour} " + ("waits" if waits else "weights")
        yield f'<rect class="{look}" x="{left:.1f}" y="{y:.1f}" width="{each:.1f}" height="{height:.1f}" rx="8"/>'
        if solid and height / count >= 12:
            for cut in range(1, count):
                at_y = run[0].y + cut * (height + 4) / count
                yield f'<path class="cut" d="M{left:.1f} {at_y:.1f}h14m{each - 28:.1f} 0h14"/>'
        state = "waits" if waits else held.word
        yield from _label(component, state, "on" if solid else f"t{colour}", left + each / 2, y + height / 2, height)


def _label(component: str, state: str, look: str, x: float, y: float, height: float) -> Iterator[str]:
    name = escape(component)
    if height < 44:
        yield (
            f'<text class="{look}" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">'
            f'<tspan class="name">{name}</tspan> {state}</text>'
        )
        return
    at = f'x="{x:.1f}" text-anchor="middle"'
    yield f'<text class="{look} name" {at} y="{y - 3:.1f}" style="font-size:15px">{name}</text>'
    yield f'<text class="{look}" {at} y="{y + 15:.1f}">{state}</text>'


def _legend(plan: Plan, y: float) -> Iterator[str]:
    held = [
        ("waits" if plan.needs.of(stage, c) is Residency.OFF else level.word)
        for stage, row in plan.schedule.residency.items()
        for c, level in row.items()
        if level > Residency.OFF
    ]
    x = float(_LEFT)
    entries = (
        ("full", "f0", "full: at work with all its state"),
        ("weights", "s0 weights", "weights only"),
        ("waits", "s0 waits", "waits: resident, not needed, in nobody's way"),
    )
    for word, look, text in entries:
        if word in held:
            yield f'<rect class="{look}" x="{x:.1f}" y="{y - 11:.1f}" width="22" height="14" rx="4"/>'
            yield f'<text class="soft" x="{x + 30:.1f}" y="{y:.1f}">{escape(text)}</text>'
            x += 62 + 6.6 * len(text)
    moves = any(e.releases or e.acquires for e in plan.schedule.entries.values())
    text = "\u2193 released first, then \u2191 acquired; 1, 2, 3, and again" if moves else "1, 2, 3, and again"
    yield f'<text class="soft" x="{_WIDTH - _MARGIN}" y="{y:.1f}" text-anchor="end">{text}</text>'
