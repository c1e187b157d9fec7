"""What accelerators did with the time of a run, in numbers and as a picture: at work, idle, in moves, in sync.

::

    one accelerator:   moves | sync | moves | rollout ▓▓▓▓▓▓▓░░░ | moves | learn ▓▓▓▓▓▓▓▓░
                                              at work     idle

At work is the time of ranks inside their methods less the waiting they report (`<component>/wait_s`, `/put_s`). Moves
and sync hold up all components, so they count whole, on every accelerator. A rank that waits for its siblings in a
collective is at work, as it is to the accelerator.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rlplace.metrics import Metrics
from rlplace.placement.show.svg import FONT, colour, style, width_of

_WAITING = (
    "wait_s",
    "infer_wait_s",
    "accumulate_wait_s",
    "put_s",
)  # last part of the metrics in which a rank reports waiting
SYNC, MERGED = "sync", "rollout || learn"

Occupancy = Mapping[str, Sequence[tuple[int, ...]]]  # component -> the accelerators of each of its ranks
Work = Mapping[int, Mapping[str, float]]  # accelerator -> component -> seconds at work


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """One stage of one iteration, or summed over iterations."""

    stage: str
    moves_s: float  # on entry
    seconds: float  # of the stage itself
    work: Work

    def busy_s(self, accelerator: int) -> float:
        """Return the busy seconds of an accelerator: the sum over its components, at most the whole stage."""
        return min(self.seconds, sum(self.work.get(accelerator, {}).values()))

    def plus(self, other: StageUse) -> StageUse:
        work = {a: dict(row) for a, row in self.work.items()}
        for accelerator, row in other.work.items():
            mine = work.setdefault(accelerator, {})
            for component, seconds in row.items():
                mine[component] = mine.get(component, 0.0) + seconds
        moves_s, seconds = self.moves_s + other.moves_s, self.seconds + other.seconds
        return StageUse(stage=self.stage, moves_s=moves_s, seconds=seconds, work=work)


class Usage:
    """Collects the busy seconds that ranks report, stage by stage. Owned by the loop; used by one thread."""

    def __init__(self, occupancy: Occupancy, *, merged: bool = False) -> None:
        """`merged`: all stages but sync count as one, because rollout runs ahead and reports its work when it ends."""
        self.accelerators = tuple(sorted({a for ranks in occupancy.values() for held in ranks for a in held}))
        self.seconds = 0.0  # of all iterations
        self.last: tuple[StageUse, ...] = ()  # of the latest iteration
        self._occupancy, self._merged = occupancy, merged
        self._work: dict[int, dict[str, float]] = {}  # of the stage that runs
        self._stages: list[StageUse] = []  # of the iteration that runs
        self._totals: dict[str, StageUse] = {}

    def worked(self, component: str, seconds: Sequence[float], ranks: Sequence[Metrics]) -> None:
        """Record the seconds that each rank spent inside a method, less the waiting it reports."""
        for held, inside, metrics in zip(self._occupancy[component], seconds, ranks, strict=True):
            waited = sum(metric.value for name, metric in metrics.items() if name.rpartition("/")[2] in _WAITING)
            busy = max(0.0, inside - waited)
            for accelerator in held:
                row = self._work.setdefault(accelerator, {})
                row[component] = row.get(component, 0.0) + busy

    def stage_ended(self, stage: str, *, moves_s: float, seconds: float) -> None:
        """Close a stage: all work recorded since the last one belongs to it."""
        name = MERGED if self._merged and stage != SYNC else stage
        use, self._work = StageUse(stage=name, moves_s=moves_s, seconds=seconds, work=self._work), {}
        if name == MERGED and self._stages and self._stages[-1].stage == MERGED:
            use = self._stages.pop().plus(use)
        self._stages.append(use)

    def begin_again(self) -> None:
        """Drop what was recorded of the iteration that runs."""
        self._work, self._stages = {}, []

    def iteration_ended(self, seconds: float) -> dict[str, float]:
        """Close an iteration. Return its shares as metrics; none where no accelerator is used."""
        self.last, self._stages = tuple(self._stages), []
        self.seconds += seconds
        for use in self.last:
            before = self._totals.get(use.stage)
            self._totals[use.stage] = use if before is None else before.plus(use)
        if not self.accelerators or not seconds:
            return {}
        shares = shares_of(self.last, self.accelerators, seconds)
        return {f"util/{name}_share": value for name, value in shares.items()}

    def record(self, planned: Mapping[str, int]) -> dict[str, Any]:
        """Return the whole run as plain values. `planned`: accelerators at work by stage, according to the plan."""
        if not self.accelerators or not self.seconds:
            return {}
        uses, many = tuple(self._totals.values()), len(self.accelerators)
        stages: dict[str, dict[str, Any]] = {}
        for use in uses:
            busy_s = sum(use.busy_s(a) for a in self.accelerators)
            stages[use.stage] = {
                "seconds": use.seconds,
                "moves_s": use.moves_s,
                "at_work": busy_s / use.seconds if use.seconds else 0.0,  # accelerators, on average
                "planned_at_work": planned.get(use.stage),
            }
        return {
            "accelerators": many,
            "accelerator_hours": many * self.seconds / 3600,
            "shares": shares_of(uses, self.accelerators, self.seconds),
            "stages": stages,
            "by_accelerator": {
                str(a): {
                    u.stage: {"busy_s": u.busy_s(a), "idle_s": u.seconds - u.busy_s(a)} for u in uses if u.stage != SYNC
                }
                for a in self.accelerators
            },
        }


def shares_of(uses: Sequence[StageUse], accelerators: Sequence[int], seconds: float) -> dict[str, float]:
    """Divide `seconds` into busy, bubble (idle within a stage), moves and sync; what is left is the driver's."""
    stages = [use for use in uses if use.stage != SYNC]
    everything = len(accelerators) * seconds
    busy = sum(use.busy_s(a) for use in stages for a in accelerators)
    there = len(accelerators) * sum(use.seconds for use in stages)
    return {
        "busy": busy / everything,
        "bubble": (there - busy) / everything,
        "moves": sum(use.moves_s for use in uses) / seconds,
        "sync": sum(use.seconds for use in uses if use.stage == SYNC) / seconds,
    }


def usage_rows(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Render the record for the summary of a run."""
    if not record:
        return []
    shares, many = record["shares"], record["accelerators"]
    stages = ", ".join(
        f"{stage} {row['at_work']:.1f}" + (f" ({row['planned_at_work']})" if row["planned_at_work"] is not None else "")
        for stage, row in record["stages"].items()
        if stage != SYNC
    )
    whole = (
        f"{shares['busy']:.0%} of the time of {many} accelerator{'s' * (many > 1)}, idle {shares['bubble']:.0%}, "
        f"moves {shares['moves']:.0%}, sync {shares['sync']:.0%}; {record['accelerator_hours']:.3g} accelerator hours"
    )
    return [("at work", whole), ("", f"{stages}   accelerators at work, measured (planned)")]


# ── one iteration as a picture ───────────────────────────────────────────────────────────────────────────────────────

WIDTH, _MARGIN, _LEFT, _TOP, _LANE, _GAP = 960, 28, 72, 118, 22, 5
_MOST_ROWS = 64
_LOOK = (
    "<style>.idle{fill:#818b98;fill-opacity:.13}.moves{fill:#818b98;fill-opacity:.75}.sync{fill:#818b98;fill-opacity:.4}"
    ".tick{stroke:#818b98;stroke-opacity:.35}</style>"
)


def render_timeline(
    uses: Sequence[StageUse], accelerators: Sequence[int], components: Sequence[str], name: str = ""
) -> str:
    """Draw an iteration: accelerators down, seconds across. `uses` in order, `components` in the order of the plan.

    Within a stage only sums are measured, so work is drawn from the stage's begin: one resident after another, or each
    in a lane of its own where together they took longer than the stage. Returns a self-contained SVG document.
    """
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
