"""One measured iteration as a picture: accelerators down, seconds across, each at work, idle, in moves or in sync.

Within a stage only sums are measured, so work is drawn from the stage's begin: one resident after another, or each in a
lane of its own where together they took longer than the stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from rlplace.placement.show.svg import FONT, colour, style, width_of
from rlplace.report.utilisation import SYNC, StageUse, shares_of

WIDTH, _MARGIN, _LEFT, _TOP, _LANE, _GAP = 960, 28, 72, 118, 22, 5
_MOST_ROWS = 64
_LOOK = (
    "<style>.idle{fill:#818b98;fill-opacity:.13}.moves{fill:#818b98;fill-opacity:.75}.sync{fill:#818b98;fill-opacity:.4}"
    ".tick{stroke:#818b98;stroke-opacity:.35}</style>"
)


def render_timeline(
    uses: Sequence[StageUse], accelerators: Sequence[int], components: Sequence[str], name: str = ""
) -> str:
    """A self-contained SVG document of the stages of one iteration, in order; `components` in the order of the plan."""
    total = sum(use.moves_s + use.seconds for use in uses) or 1.0
    scale = (WIDTH - _LEFT - _MARGIN) / total
    shown = accelerators[:_MOST_ROWS]
    bottom = _TOP + len(shown) * (_LANE + _GAP)
    height = bottom + 62
    words = {"busy": "at work", "bubble": "idle", "moves": "moves", "sync": "sync"}
    shares = shares_of(uses, accelerators, total) if accelerators else {}
    shares_text = ", ".join(f"{share:.0%} {words[name]}" for name, share in shares.items())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="one iteration of {total:.3g} s: {shares_text}" font-family="{FONT}">',
        style(len(components)),
        _LOOK,
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="12"/>',
        f'<text class="title ink" x="{_MARGIN}" y="44">{escape(name or "one iteration")}: {total:.3g} s</text>',
        f'<text class="soft" x="{_MARGIN}" y="66">{shares_text}</text>',
        *_ticks(total, scale, bottom),
        *_stages(uses, scale, len(shown)),
    ]
    for row, number in enumerate(shown):
        y = _TOP + row * (_LANE + _GAP)
        parts.append(f'<text class="soft" x="{_LEFT - 12}" y="{y + 15}" text-anchor="end">{number}</text>')
        parts += _row(uses, number, components, y, scale)
    if len(accelerators) > len(shown):
        parts.append(
            f'<text class="soft" x="{_MARGIN}" y="{bottom + 18}">and {len(accelerators) - len(shown)} more</text>'
        )
    return "\n".join([*parts, *_legend(components, bottom + 46), "</svg>", ""])


def _row(uses: Sequence[StageUse], number: int, components: Sequence[str], y: float, scale: float) -> Iterator[str]:
    x = float(_LEFT)
    for use in uses:
        x += use.moves_s * scale
        work = use.work.get(number, {}) if use.stage != SYNC else {}
        one_lane = sum(work.values()) <= use.seconds
        lane, left, top = _LANE if one_lane else _LANE / len(work), x, y
        for component, seconds in work.items():
            width = min(seconds, use.seconds) * scale
            look = f"f{colour(components.index(component))}"
            yield _box(look, left, top, width, lane, f"{component} {seconds:.3g} s of {use.stage}")
            left, top = (left + width, top) if one_lane else (left, top + lane)
        x += use.seconds * scale


def _stages(uses: Sequence[StageUse], scale: float, rows: int) -> Iterator[str]:
    """Draw what is the same on all accelerators: moves, sync, and the idle background of each stage."""
    x = float(_LEFT)
    begins: list[float] = []
    for use in uses:
        moving, staying = use.moves_s * scale, use.seconds * scale
        begins.append(x + moving)
        for row in range(rows):
            y = _TOP + row * (_LANE + _GAP)
            yield _box("moves", x, y, moving, _LANE, f"moves into {use.stage} {use.moves_s:.3g} s")
            look = "sync" if use.stage == SYNC else "idle"
            yield _box(look, x + moving, y, staying, _LANE, f"{use.stage} {use.seconds:.3g} s")
        x += moving + staying
    taken: list[tuple[float, float]] = []
    for begin, use in sorted(zip(begins, uses, strict=True), key=lambda pair: -pair[1].seconds):  # the longest is named
        end = begin + width_of(use.stage, bold=True) + 6
        if all(end <= left or begin >= right for left, right in taken):
            taken.append((begin, end))
            yield f'<text class="ink name" x="{begin:.1f}" y="{_TOP - 10}">{escape(use.stage)}</text>'


def _box(look: str, x: float, y: float, width: float, height: float, title: str) -> str:
    if width < 0.05:
        return ""
    return (
        f'<rect class="{look}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _ticks(total: float, scale: float, bottom: float) -> Iterator[str]:
    step = 10 ** math.floor(math.log10(total))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if total / s <= 8)
    for n in range(int(total / step) + 1):
        x = _LEFT + n * step * scale
        yield f'<path class="tick" d="M{x:.1f} {_TOP - 4} V{bottom}"/>'
        yield f'<text class="soft" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{n * step:.3g} s</text>'


def _legend(components: Sequence[str], y: float) -> Iterator[str]:
    x = float(_LEFT)
    looks = [(f"f{colour(at)}", component) for at, component in enumerate(components)]
    for look, text in (*looks, ("moves", "moves"), ("sync", "sync"), ("idle", "idle")):
        yield f'<rect class="{look}" x="{x:.1f}" y="{y - 11:.1f}" width="14" height="14" rx="4"/>'
        yield f'<text class="soft" x="{x + 20:.1f}" y="{y:.1f}">{escape(text)}</text>'
        x += 40 + width_of(text)
