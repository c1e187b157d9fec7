"""Two placements side by side: accelerators, residency, moves, bytes and memory; differences are marked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rlplace.placement.flow import Transport
from rlplace.placement.show.text import show_work, table
from rlplace.placement.show.view import PlanView, clipped
from rlplace.units import show_bytes

_NONE = "-"
_ZERO = show_bytes(0)  # a line with this on both sides is left out
_LONGEST = 31


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One thing that both placements have, or one of them lacks."""

    chapter: str
    what: str
    left: str
    right: str

    @property
    def differs(self) -> bool:
        return self.left != self.right


def compare(left: PlanView, right: PlanView) -> tuple[Line, ...]:
    """Put two plans side by side, line by line; the lines of a chapter are neighbours."""
    here, there = dict(_facts(left)), dict(_facts(right))
    keys = sorted(dict.fromkeys((*here, *there)), key=lambda key: _CHAPTERS.index(key[0]))
    shown = [key for key in keys if {here.get(key, _ZERO), there.get(key, _ZERO)} != {_ZERO}]
    return tuple(Line(*key, here.get(key, _NONE), there.get(key, _NONE)) for key in shown)


def render_diff(left: PlanView, right: PlanView) -> str:
    """Write both in columns, `*` before differences; 100 columns wide."""
    lines = compare(left, right)
    rows = [("", "", left.name, right.name)]
    rows += [("*" if line.differs else "", line.what, line.left, line.right) for line in lines]
    heading, *texts = table([tuple(clipped(cell, _LONGEST) for cell in row) for row in rows])
    count = sum(line.differs for line in lines)
    title = f"{count} {'line' if count == 1 else 'lines'} differ, marked *" if count else "the same placement twice"
    parts, chapter = [f"diff: {title}", f"  {heading}"], ""
    for line, text in zip(lines, texts, strict=True):
        if line.chapter != chapter:
            chapter = line.chapter
            parts += ["", f"  {chapter}"]
        parts.append(f"  {text}")
    return "\n".join(parts)


def diff_record(left: PlanView, right: PlanView) -> dict[str, Any]:
    """Return the same as plain values, ready for JSON."""
    chapters: dict[str, list[dict[str, Any]]] = {}
    for line in compare(left, right):
        record = {"what": line.what, "left": line.left, "right": line.right, "differs": line.differs}
        chapters.setdefault(line.chapter, []).append(record)
    return {
        "left": left.name,
        "right": right.name,
        "fits": [left.fits, right.fits],
        "chapters": [{"title": title, "lines": lines} for title, lines in chapters.items()],
    }


_CHAPTERS = (
    "machines",
    "placement",
    "residency",
    "moves in each iteration",
    "pairs of ranks by transport",
    "memory",
)


def _facts(view: PlanView) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield (chapter, what) and how it is in a plan."""
    machines, placement, residency, moves, transports, memory = _CHAPTERS
    comparison, traffic, tightest = view.comparison, view.traffic, view.ledger.tightest
    yield (machines, "accelerators in use"), f"{len(view.plan.placement.used)} of {view.plan.topology.num_accelerators}"
    yield (machines, "nodes"), str(view.plan.topology.num_nodes)
    yield (machines, "mode"), view.plan.placement.mode
    if comparison is not None:
        yield (machines, "fewer than each on its own"), str(comparison.savings.saved)
        for stage in comparison.here.at_work:
            yield (machines, f"at work in {stage}"), show_work(comparison.here, stage)
    for c in view.components:
        yield (placement, c.name), f"{c.render()} ({c.world_size} rank{'s' * (c.world_size > 1)})"
        # `weights, off, full`: in the order of the stages
        yield (residency, c.name), ", ".join(stage.held[c.name].level.word for stage in view.stages)
    yield (moves, "moves"), str(view.moves)
    yield (moves, "copied to hosts"), show_bytes(traffic.to_host_bytes)
    yield (moves, "copied from hosts"), show_bytes(traffic.from_host_bytes)
    for transport in Transport:
        yield (moves, f"weights, {transport.value}"), show_bytes(traffic.weights_bytes.get(transport, 0))
    for t in view.transfers:
        yield (transports, f"{t.name} to {t.target}"), t.by_transport.replace(":", "")
    yield (memory, "fits"), "yes" if view.fits else "NO"
    if tightest is not None:
        worst = tightest.worst
        yield (memory, "fullest accelerator holds"), f"{show_bytes(worst.total_bytes)} in {worst.moment}"
        if tightest.margin_bytes is not None:
            yield (memory, "margin there"), show_bytes(tightest.margin_bytes)
    yield (memory, "shared memory per node"), show_bytes(max((a.shared_bytes for a in view.ledger.hosts), default=0))
