"""The report as text: the plan, what sharing saves, what each accelerator holds, the warnings."""

from __future__ import annotations

import textwrap

from rlplace.placement.columns import indented, table
from rlplace.placement.memory.ledger_text import render_ledger
from rlplace.placement.memory.sizes import show_gib
from rlplace.placement.render import WIDTH, plan_sections, warning_sections
from rlplace.placement.report import Comparison, PlanReport


def render_report(report: PlanReport) -> str:
    """In plain ASCII, 100 columns wide."""
    sections = plan_sections(report.plan)
    if report.comparison is not None:
        sections.append(_savings(report.comparison))
    sections += [_traffic(report), _memory(report), *warning_sections(report.plan)]
    return "\n\n".join(s for s in sections if s)


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
    rows += [
        (f"at work in {stage}", _share(count, here.used), _share(apart.at_work[stage], apart.used))
        for stage, count in here.at_work.items()
    ]
    if comparison.here_bytes or comparison.apart_bytes:
        rows.append(("fullest holds", show_gib(comparison.here_bytes), show_gib(comparison.apart_bytes)))
    counted = textwrap.wrap(f"{savings.dedicated} = {sizes}", WIDTH - 2)
    return "\n".join([title, *indented([*table(rows), *counted])])


def _share(count: int, used: int) -> str:
    return f"{count} ({count / used:.0%})"


def _traffic(report: PlanReport) -> str:
    """What moving and syncing costs in each iteration; nothing where nothing is known to move."""
    traffic = report.traffic
    if not traffic.total_bytes:
        return ""
    rows = [("to the hosts", show_gib(traffic.to_host_bytes), "what leaves is copied away")]
    rows.append(("from the hosts", show_gib(traffic.from_host_bytes), "what comes back is copied in"))
    rows += [("weights", show_gib(size), f"one sync, {way.value}") for way, size in traffic.weights_bytes.items()]
    return "\n".join(["bytes in each iteration, samples not counted", *indented(table(rows))])
