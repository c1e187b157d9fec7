"""The report as text: the plan, what sharing saves, what each accelerator holds, the warnings."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rlplace.placement.counts import Count
from rlplace.placement.dedicated import Business
from rlplace.placement.memory.ledger_text import render_ledger
from rlplace.placement.show.columns import indented, table
from rlplace.placement.show.render import WIDTH, plan_sections, warning_sections
from rlplace.placement.show.report import Comparison, PlanReport
from rlplace.units import show_bytes


def render_report(report: PlanReport) -> str:
    """In plain ASCII, 100 columns wide."""
    sections = plan_sections(report.plan)
    if report.counts:
        sections.append(_counts(report.counts))
    if report.comparison is not None:
        sections.append(_savings(report.comparison))
    sections += [_traffic(report), _memory(report), *warning_sections(report.plan)]
    return "\n\n".join(s for s in sections if s)


def _counts(counts: Sequence[Count]) -> str:
    rows: list[tuple[str, str, str]] = []
    left = sum(
        max(len(part) for part in column) + 3 for column in zip(*((c.subject, c.count) for c in counts), strict=True)
    )
    for count in counts:
        first, *more = textwrap.wrap(count.why, max(30, WIDTH - 2 - left))
        rows += [(count.subject, count.count, first), *(("", "", line) for line in more)]
    return "\n".join(["counts: what each number follows from", *indented(table(rows))])


def _memory(report: PlanReport) -> str:
    if report.memory_known:
        return render_ledger(report.ledger)
    notes = [line for note in report.ledger.notes for line in textwrap.wrap(note, WIDTH - 2)]
    return "\n".join(["memory: not known", *indented(notes)])


def _savings(comparison: Comparison) -> str:
    """Both placements by stage: the same work, on how many accelerators."""
    savings, here, apart = comparison.savings, comparison.here, comparison.apart
    sizes = " + ".join(f"{component} {size}" for component, size in savings.by_component.items() if size)
    if not savings.saved:
        return f"savings: none, every component has accelerators of its own ({sizes} = {savings.used})"
    title = f"savings: {savings.used} accelerators do the work of {savings.dedicated}, {savings.saved} fewer"
    rows = [("", "here", "each component on its own"), ("accelerators", str(here.used), str(apart.used))]
    stages = dict.fromkeys((*here.at_work, *apart.at_work))
    rows += [(f"at work in {stage}", _share(here, stage), _share(apart, stage)) for stage in stages]
    if comparison.here_bytes or comparison.apart_bytes:
        rows.append(("fullest holds", show_bytes(comparison.here_bytes), show_bytes(comparison.apart_bytes)))
    counted = textwrap.wrap(f"{savings.dedicated} = {sizes}", WIDTH - 2)
    return "\n".join([title, *indented([*table(rows), *counted])])


def _share(business: Business, stage: str) -> str:
    """Of its accelerators; a stage may be divided in turns here and not there."""
    count = business.at_work.get(stage)
    return "-" if count is None else f"{count} ({count / business.used:.0%})"


def _traffic(report: PlanReport) -> str:
    """What moving and syncing costs in each iteration; nothing where nothing is known to move."""
    traffic = report.traffic
    if not traffic.total_bytes:
        return ""
    rows = [("to the hosts", show_bytes(traffic.to_host_bytes), "what leaves is copied away")]
    rows.append(("from the hosts", show_bytes(traffic.from_host_bytes), "what comes back is copied in"))
    rows += [
        ("weights", show_bytes(size), f"one sync, {transport.value}")
        for transport, size in traffic.weights_bytes.items()
    ]
    return "\n".join(["bytes in each iteration, samples not counted", *indented(table(rows))])
