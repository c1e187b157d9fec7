"""Two placements side by side: accelerators, residency, moves, bytes and memory; differences are marked."""

from __future__ import annotations

import dataclasses
import itertools
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

    what: str
    left: str
    right: str

    @property
    def differs(self) -> bool:
        return self.left != self.right


def compare(left: PlanView, right: PlanView) -> dict[str, list[Line]]:
    """Put two plans side by side, line by line in each chapter."""
    there = _facts(right)
    return {
        chapter: [
            Line(what, facts.get(what, _NONE), there[chapter].get(what, _NONE))
            for what in dict.fromkeys((*facts, *there[chapter]))
            if {facts.get(what, _ZERO), there[chapter].get(what, _ZERO)} != {_ZERO}
        ]
        for chapter, facts in _facts(left).items()
    }


def render_diff(left: PlanView, right: PlanView) -> str:
    """Write both in columns, `*` before differences; 100 columns wide."""
    chapters = {chapter: lines for chapter, lines in compare(left, right).items() if lines}
    rows = [("*" * line.differs, line.what, line.left, line.right) for lines in chapters.values() for line in lines]
    rows.insert(0, ("", "", left.name, right.name))
    heading, *texts = (f"  {text}" for text in table([tuple(clipped(c, _LONGEST) for c in row) for row in rows]))
    count = sum(line.differs for lines in chapters.values() for line in lines)
    title = f"{count} {'line' if count == 1 else 'lines'} differ, marked *" if count else "the same placement twice"
    parts, following = [f"diff: {title}", heading], iter(texts)
    for chapter, lines in chapters.items():
        parts += ["", f"  {chapter}", *itertools.islice(following, len(lines))]
    return "\n".join(parts)


def diff_record(left: PlanView, right: PlanView) -> dict[str, Any]:
    """Return the same as plain values, ready for JSON."""
    chapters = [
        {"title": title, "lines": [dataclasses.asdict(line) | {"differs": line.differs} for line in lines]}
        for title, lines in compare(left, right).items()
        if lines
    ]
    return {"left": left.name, "right": right.name, "fits": [left.fits, right.fits], "chapters": chapters}


def _facts(view: PlanView) -> dict[str, dict[str, str]]:
    """Map each chapter to its lines, of every plan the same chapters: what is compared, and how it is in this plan."""
    placement, comparison, traffic, tightest = view.plan.placement, view.comparison, view.traffic, view.ledger.tightest
    machines = {
        "accelerators in use": f"{len(placement.used)} of {view.plan.topology.num_accelerators}",
        "nodes": str(view.plan.topology.num_nodes),
        "mode": placement.mode,
    }
    if comparison is not None:
        machines["fewer than each on its own"] = str(comparison.savings.saved)
        machines |= {f"at work in {s}": show_work(n, comparison.savings.used) for s, n in comparison.here.items()}
    moves = {
        "moves": str(view.moves),
        "copied to hosts": show_bytes(traffic.to_host_bytes),
        "copied from hosts": show_bytes(traffic.from_host_bytes),
    }
    memory = {"fits": "yes" if view.fits else "NO"}
    if tightest is not None:
        worst = tightest.worst
        memory["fullest accelerator holds"] = f"{show_bytes(worst.total_bytes)} in {worst.moment}"
        if tightest.margin_bytes is not None:
            memory["margin there"] = show_bytes(tightest.margin_bytes)
    shared = max((account.shared_bytes for account in view.ledger.hosts), default=0)
    return {
        "machines": machines,
        "placement": {c.name: f"{c.render()} ({c.world_size} rank{'s' * (c.world_size > 1)})" for c in view.components},
        # `weights, off, full`: in the order of the stages
        "residency": {c.name: ", ".join(s.held[c.name].word for s in view.stages) for c in view.components},
        "moves in each iteration": moves
        | {f"weights, {t.value}": show_bytes(traffic.weights_bytes.get(t, 0)) for t in Transport},
        "pairs of ranks by transport": {
            f"{t.name} to {t.target}": t.by_transport.replace(":", "") for t in view.transfers
        },
        "memory": memory | {"shared memory per node": show_bytes(shared)},
    }
