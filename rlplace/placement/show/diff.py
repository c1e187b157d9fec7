"""Two placements side by side: accelerators, residency, moves, bytes and memory; differences are marked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rlplace.placement.flow import Transport
from rlplace.placement.show.text import show_work, table
from rlplace.placement.show.view import PlanView, clipped
from rlplace.units import show_bytes

_NONE = "-"
_LONGEST = 31


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing that both placements have, or one of them lacks."""

    what: str
    left: str
    right: str

    @property
    def differs(self) -> bool:
        return self.left != self.right


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    title: str
    lines: tuple[Line, ...]


def compare(left: PlanView, right: PlanView) -> tuple[Chapter, ...]:
    """Chapters without lines are left out."""
    chapters: dict[str, Callable[[PlanView], Iterable[tuple[str, str]]]] = {
        "machines": _machines,
        "placement": _placement,
        "residency": _residency,
        "moves in each iteration": _moves,
        "pairs of ranks by transport": _transports,
        "memory": _memory,
    }
    found = []
    for title, facts in chapters.items():
        sides = dict(facts(left)), dict(facts(right))
        names = [n for n in dict.fromkeys((*sides[0], *sides[1])) if any(side.get(n, _ZERO) != _ZERO for side in sides)]
        lines = [Line(what=n, left=sides[0].get(n, _NONE), right=sides[1].get(n, _NONE)) for n in names]
        found.append(Chapter(title=title, lines=tuple(lines)))
    return tuple(c for c in found if c.lines)


_ZERO = show_bytes(0)  # a line with this on both sides is left out


def render_diff(left: PlanView, right: PlanView) -> str:
    """Both in columns, `*` before differences; 100 columns wide."""
    chapters = compare(left, right)
    count = sum(line.differs for c in chapters for line in c.lines)
    rows = [("", "", left.name, right.name)]
    ends: list[tuple[int, str]] = []
    for chapter in chapters:
        ends.append((len(rows), chapter.title))
        rows += [("*" if x.differs else "", x.what, x.left, x.right) for x in chapter.lines]
    lines = table([tuple(clipped(cell, _LONGEST) for cell in row) for row in rows])
    for at, title in reversed(ends):
        lines[at:at] = ["", title]
    noun = "line" if count == 1 else "lines"
    title = f"{count} {noun} differ, marked *" if count else "the same placement twice"
    return "\n".join([f"diff: {title}", *(f"  {line}" if line else "" for line in lines)])


def diff_record(left: PlanView, right: PlanView) -> dict[str, Any]:
    """The same as plain values, ready for JSON."""
    return {
        "left": left.name,
        "right": right.name,
        "fits": [left.fits, right.fits],
        "chapters": [
            {"title": c.title, "lines": [dataclasses.asdict(x) | {"differs": x.differs} for x in c.lines]}
            for c in compare(left, right)
        ],
    }


def _machines(view: PlanView) -> Iterator[tuple[str, str]]:
    placement, comparison = view.plan.placement, view.comparison
    yield "accelerators in use", f"{len(placement.used)} of {view.plan.topology.num_accelerators}"
    yield "nodes", str(view.plan.topology.num_nodes)
    yield "mode", placement.mode
    if comparison is not None:
        yield "fewer than each on its own", str(comparison.savings.saved)
        yield from ((f"at work in {s}", show_work(comparison.here, s)) for s in comparison.here.at_work)


def _placement(view: PlanView) -> Iterator[tuple[str, str]]:
    for c in view.components:
        yield c.name, f"{c.placement} ({c.spec.world_size} rank{'s' * (c.spec.world_size > 1)})"


def _residency(view: PlanView) -> Iterator[tuple[str, str]]:
    for c in view.components:  # `weights, off, full`: in the order of the stages
        yield c.name, ", ".join(stage.held[c.name].level.word for stage in view.stages)


def _moves(view: PlanView) -> Iterator[tuple[str, str]]:
    traffic = view.traffic
    yield "moves", str(view.moves)
    yield "copied to hosts", show_bytes(traffic.to_host_bytes)
    yield "copied from hosts", show_bytes(traffic.from_host_bytes)
    for transport in Transport:
        yield f"weights, {transport.value}", show_bytes(traffic.weights_bytes.get(transport, 0))


def _transports(view: PlanView) -> Iterator[tuple[str, str]]:
    for t in view.transfers:
        yield f"{t.name} to {t.target}", t.by_transport.replace(":", "")


def _memory(view: PlanView) -> Iterator[tuple[str, str]]:
    tightest = view.ledger.tightest
    yield "fits", "yes" if view.fits else "NO"
    if tightest is not None:
        yield "fullest accelerator holds", f"{show_bytes(tightest.worst.total_bytes)} in {tightest.worst.moment}"
        if tightest.margin_bytes is not None:
            yield "margin there", show_bytes(tightest.margin_bytes)
    yield "shared memory per node", show_bytes(max((a.shared_bytes for a in view.ledger.hosts), default=0))
