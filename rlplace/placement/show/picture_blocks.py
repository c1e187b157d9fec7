"""The blocks of the picture: one for each component that is resident, as wide as its share of the stage's column."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from rlplace.placement.memory.ledger import MemoryLedger
from rlplace.placement.schedule import Residency
from rlplace.placement.show.picture_rows import Row, holding, load_of
from rlplace.placement.show.picture_style import colour, width_of
from rlplace.placement.transfers import AnyPlan
from rlplace.units import show_bytes

_GAP = 6  # pixels between blocks of one column
_USUAL_FONT, _LEAST_FONT = 12, 10
_TWO_LINES = 44  # pixels of height from which name and state have a line each


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle on the page."""

    x: float
    y: float
    width: float
    height: float

    @property
    def place(self) -> str:
        return f'x="{self.x:.1f}" y="{self.y:.1f}" width="{self.width:.1f}" height="{self.height:.1f}" rx="8"'

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


def draw_run(
    plan: AnyPlan, ledger: MemoryLedger | None, stage: str, run: Sequence[Row], x: float, width: float
) -> Iterator[str]:
    """What a stage holds on neighbouring rows that hold the same."""
    box = Box(x=x, y=run[0].y + 2, width=width, height=run[-1].y + run[-1].height - run[0].y - 4)
    held = holding(plan, stage, run[0])
    if not held:
        middle_x, middle_y = box.middle
        yield f'<g><title>nobody is resident in {escape(stage)}</title><rect class="free" {box.place}/>'
        yield f'<text class="soft" x="{middle_x:.1f}" y="{middle_y + 4:.1f}" text-anchor="middle">free</text></g>'
    each = (width - _GAP * (len(held) - 1)) / max(1, len(held))
    found = load_of(ledger, stage, run[0])
    for at, component in enumerate(held):
        part = dataclasses.replace(box, x=x + at * (each + _GAP), width=each)
        size = found[0].of(component) if found is not None else 0
        yield from _block(plan, stage, component, run, part, size)
    if found is not None and found[1] and found[0].total_bytes > found[1]:
        yield from _overflow(box, found[0].total_bytes, found[1])


def _block(plan: AnyPlan, stage: str, component: str, run: Sequence[Row], box: Box, size: int) -> Iterator[str]:
    held = plan.schedule.residency[stage][component]
    waits = plan.schedule.needs.of(stage, component) is Residency.OFF
    number = colour(plan.placement.components.index(component))
    solid = held is Residency.FULL and not waits
    look = f"f{number}" if solid else f"s{number} " + ("waits" if waits else "weights")
    state = "waits" if waits else held.word
    yield f"<g><title>{escape(_told(stage, component, state, run, size))}</title>"
    yield f'<rect class="{look}" {box.place}/>'
    count = sum(len(row.accelerators) for row in run)
    if solid and box.height / count >= 12 and box.width >= 60:
        for cut in range(1, count):
            y = run[0].y + cut * (box.height + 4) / count
            yield f'<path class="cut" d="M{box.x:.1f} {y:.1f}h14m{box.width - 28:.1f} 0h14"/>'
    yield from _label(component, state, size, "on" if solid else f"t{number}", box)
    yield "</g>"


def _told(stage: str, component: str, state: str, run: Sequence[Row], size: int) -> str:
    """What the pointer reads."""
    rows = f"{run[0].label}, " if len(run) == 1 else f"{run[0].label} to {run[-1].label}, "
    nodes = run[0].fold.label
    held = f": {show_bytes(size)} on each accelerator" if size else ""
    return f"{component} on {rows}{nodes}, {state} in {stage}{held}"


def _label(component: str, state: str, size: int, look: str, box: Box) -> Iterator[str]:
    """Name, state and bytes, one below the other; on one line where the block is low, turned where it is narrow."""
    bytes_held = show_bytes(size) if size else ""
    words = component.split(".")  # reward.math on two lines
    fitting = (box.width - 8) / max(width_of(word, 1, bold=True) for word in words)
    if box.height < _TWO_LINES:
        yield from _one_line(component, state, bytes_held, look, box)
    elif fitting < _LEAST_FONT and box.height > box.width:
        size_px = min(14.0, (box.height - 12) / width_of(f"{component} {state}", 1, bold=True))
        x, y = box.middle
        yield _text(look, x, y + 4, size_px, _named(component, state), f'transform="rotate(-90 {x:.1f} {y:.1f})"')
    else:
        if width_of(component, 15, bold=True) <= box.width - 8:
            words = [component]
        lines = [(word, min(15.0, max(7.0, fitting)), " name") for word in words] + [(state, 12.0, "")]
        if bytes_held and box.height >= 17 * len(lines) + 28 and width_of(bytes_held) <= box.width - 6:
            lines.append((bytes_held, 12.0, ""))
        x, y = box.middle
        top = y - 3 - 8 * (len(lines) - 2)
        for at, (line, size_px, weight) in enumerate(lines):
            yield _text(look + weight, x, top + 17 * at + (at > 0), size_px, escape(line))


def _one_line(component: str, state: str, bytes_held: str, look: str, box: Box) -> Iterator[str]:
    room, whole = box.width - 8, f"{component} {state}"
    size_px = min(12.0, room / width_of(whole, 1, bold=True))
    shown = _named(component, state)
    if size_px < _LEAST_FONT:
        size_px = max(7.0, min(12.0, room / width_of(component, 1, bold=True)))
        shown = _named(component)
    elif bytes_held and width_of(f"{whole} {bytes_held}", bold=True) <= room:
        shown += f" {bytes_held}"
    x, y = box.middle
    yield _text(look, x, y + 4, size_px, shown)


def _named(component: str, state: str = "") -> str:
    return f'<tspan class="name">{escape(component)}</tspan>' + (f" {state}" if state else "")


def _text(look: str, x: float, y: float, size_px: float, shown: str, more: str = "") -> str:
    size = "" if size_px == _USUAL_FONT else f' style="font-size:{size_px:.4g}px"'
    more = f" {more}" if more else ""
    return f'<text class="{look}"{more} x="{x:.1f}" y="{y:.1f}" text-anchor="middle"{size}>{shown}</text>'


def _overflow(box: Box, held: int, capacity: int) -> Iterator[str]:
    told = f"{show_bytes(held)} of {show_bytes(capacity)}: does not fit"
    yield f'<g><title>{told}</title><rect class="over" {box.place}/>'
    yield f'<text class="alarm" x="{box.x:.1f}" y="{box.y - 5:.1f}">{told}</text></g>'
