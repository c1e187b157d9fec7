"""Two placements side by side: accelerators, residency, moves, bytes and memory; what differs is marked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rlplace.placement.flow import Transport
from rlplace.placement.show.columns import clipped, indented, table
from rlplace.placement.show.report import PlanReport
from rlplace.placement.transfers import AnyPlan, transfers
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


def compare(left: PlanReport, right: PlanReport) -> tuple[Chapter, ...]:
    """Chapters without lines are left out."""
    chapters = (
        Chapter(title="machines", lines=tuple(_machines(left, right))),
        Chapter(title="placement", lines=tuple(_placement(left.plan, right.plan))),
        Chapter(title="residency", lines=tuple(_residency(left.plan, right.plan))),
        Chapter(title="moves in each iteration", lines=tuple(_moves(left, right))),
        Chapter(title="pairs of ranks by transport", lines=tuple(_ways(left.plan, right.plan))),
        Chapter(title="memory", lines=tuple(_memory(left, right))),
    )
    return tuple(c for c in chapters if c.lines)


def render_diff(left: PlanReport, right: PlanReport) -> str:
    """Both in columns, `*` before what differs; 100 columns wide."""
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
    return "\n".join([f"diff: {title}", *indented(lines)])


def diff_record(left: PlanReport, right: PlanReport) -> dict[str, Any]:
    """The same as plain values, ready for JSON."""
    return {
        "left": left.name,
        "right": right.name,
        "fits": [left.fits, right.fits],
        "chapters": [
            {
                "title": chapter.title,
                "lines": [
                    {"what": x.what, "left": x.left, "right": x.right, "differs": x.differs} for x in chapter.lines
                ],
            }
            for chapter in compare(left, right)
        ],
    }


def _machines(left: PlanReport, right: PlanReport) -> Iterator[Line]:
    plans = left.plan, right.plan
    yield _line("accelerators in use", *(_used(p) for p in plans))
    yield _line("nodes", *(str(p.topology.num_nodes) for p in plans))
    yield _line("mode", *(p.placement.mode for p in plans))
    yield _line("fewer than each on its own", *(_saved(r) for r in (left, right)))
    for stage in _both(left.plan.schedule.needs.stages, right.plan.schedule.needs.stages):
        yield _line(f"at work in {stage}", *(_at_work(r, stage) for r in (left, right)))


def _used(plan: AnyPlan) -> str:
    return f"{len(plan.placement.used)} of {plan.topology.num_accelerators}"


def _saved(report: PlanReport) -> str:
    return _NONE if report.comparison is None else str(report.comparison.savings.saved)


def _at_work(report: PlanReport, stage: str) -> str:
    if report.comparison is None or stage not in report.comparison.here.at_work:
        return _NONE
    count, used = report.comparison.here.at_work[stage], report.comparison.here.used
    return f"{count} ({count / used:.0%})"


def _placement(left: AnyPlan, right: AnyPlan) -> Iterator[Line]:
    for component in _both(left.placement.components, right.placement.components):
        yield _line(component, *(_where(p, component) for p in (left, right)))


def _where(plan: AnyPlan, component: str) -> str:
    if component not in plan.placement.components:
        return _NONE
    ranks = plan.placement.world_size(component)
    return f"{plan.placement.spec(component).render()} ({ranks} rank{'s' * (ranks > 1)})"


def _residency(left: AnyPlan, right: AnyPlan) -> Iterator[Line]:
    for component in _both(left.placement.components, right.placement.components):
        yield _line(component, *(_levels(p, component) for p in (left, right)))


def _levels(plan: AnyPlan, component: str) -> str:
    """`weights, off, full`: in the order of the stages."""
    if component not in plan.placement.components:
        return _NONE
    return ", ".join(plan.schedule.residency[stage][component].word for stage in plan.schedule.stages)


def _moves(left: PlanReport, right: PlanReport) -> Iterator[Line]:
    yield _line("moves", *(str(_count_moves(r.plan)) for r in (left, right)))
    if left.traffic.total_bytes or right.traffic.total_bytes:
        yield _line("copied to hosts", *(show_bytes(r.traffic.to_host_bytes) for r in (left, right)))
        yield _line("copied from hosts", *(show_bytes(r.traffic.from_host_bytes) for r in (left, right)))
        for transport in Transport:
            sizes = [r.traffic.weights_bytes.get(transport, 0) for r in (left, right)]
            if any(sizes):
                yield _line(f"weights, {transport.value}", *map(show_bytes, sizes))


def _count_moves(plan: AnyPlan) -> int:
    return sum(len(e.releases) + len(e.acquires) for e in plan.schedule.entries.values())


def _ways(left: AnyPlan, right: AnyPlan) -> Iterator[Line]:
    found = [
        {f"{t.name} to {t.target}": t.by_transport.replace(":", "") for t in transfers(plan)} for plan in (left, right)
    ]
    for key in _both(tuple(found[0]), tuple(found[1])):
        yield _line(key, *(transports.get(key, _NONE) for transports in found))


def _memory(left: PlanReport, right: PlanReport) -> Iterator[Line]:
    reports = left, right
    yield _line("fits", *("yes" if r.fits else "NO" for r in reports))
    yield _line("fullest accelerator holds", *(_tightest(r) for r in reports))
    yield _line("margin there", *(_margin(r) for r in reports))
    if any(_shared(r) for r in reports):
        yield _line("shared memory per node", *(show_bytes(_shared(r)) for r in reports))


def _tightest(report: PlanReport) -> str:
    tightest = report.ledger.tightest
    if tightest is None:
        return _NONE
    return f"{show_bytes(tightest.worst.total_bytes)} in {tightest.worst.moment}"


def _shared(report: PlanReport) -> int:
    return max((account.shared_bytes for account in report.ledger.hosts), default=0)


def _margin(report: PlanReport) -> str:
    tightest = report.ledger.tightest
    if tightest is None or tightest.margin_bytes is None:
        return _NONE
    return show_bytes(tightest.margin_bytes)


def _both(left: tuple[str, ...], right: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*left, *right)))


def _line(what: str, left: str, right: str) -> Line:
    return Line(what=what, left=left, right=right)
