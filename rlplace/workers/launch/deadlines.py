"""What a passed deadline says: which ranks were still working, where in their code, and on which channels they wait."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlplace.comm.waiting import report, view
from rlplace.errors import Problem, WorkerTimeout

if TYPE_CHECKING:
    from rlplace.workers.launch.group import Pending

SETTLE_S = 30.0  # longest wait for a cancelled group to be stopped; its parts have shorter limits
_ASK_S = 1.0  # how long a rank may take to say where it is


def passed(pending: Sequence[Pending], timeout_s: float) -> WorkerTimeout:
    """Asks the ranks that are late; blocks about a second when they cannot answer."""
    late = {p: [rank for rank, call in p.calls.items() if not call.done()] for p in pending}
    late = {p: ranks for p, ranks in late.items() if ranks}
    working = [f"{p.group.name} {_ranks(ranks)} in {p.method}" for p, ranks in late.items()]
    first = next(iter(late))
    return WorkerTimeout(
        Problem(
            code="worker-deadline",
            key=f"{first.group.name}.{first.method}",
            what=f"not finished after {timeout_s:g} s",
            got="still working: " + "; ".join(working),
            why="\n".join([*_positions(late), *_waiters(late)]) or None,
            fix="a longer timeout_s (runner.stage_timeout_s in a run), or end what they wait for",
        )
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ",".join(map(str, sorted(ranks)))


def _positions(late: dict[Pending, list[int]]) -> list[str]:
    asked = {f"{p.group.name} rank {r}": p.group.handles[r].where() for p, ranks in late.items() for r in ranks}
    concurrent.futures.wait(asked.values(), _ASK_S)
    told = {who: f.result() for who, f in asked.items() if f.done() and f.exception() is None}
    lines: dict[str, list[str]] = {}
    for who in asked:
        place = told.get(who)
        lines.setdefault("does not answer" if place is None else place or "has not begun", []).append(who)
    return [f"{', '.join(who)}: {place}" for place, who in lines.items()]


def _waiters(late: dict[Pending, list[int]]) -> list[str]:
    waits = report(view({name: channel for p in late for name, channel in p.group.channels.items()}))
    return [waits] if waits else []
