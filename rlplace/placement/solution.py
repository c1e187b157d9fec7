"""The answer of `solve` as text: the value, for whom, and what is then the tightest accelerator."""

from __future__ import annotations

from rlplace.placement.memory.case import MemoryCase
from rlplace.placement.memory.ledger import MemoryLedger
from rlplace.placement.memory.solve import Knob, Solution
from rlplace.units import show_bytes


def render_solution(case: MemoryCase, knob: Knob, component: str | None, solution: Solution | None) -> str:
    """`component` None: all that have this size."""
    if solution is None:
        least = "at any value" if knob is Knob.KV_SHARE else "not even with 1"
        return f"{knob.value}: does not fit, {least}\n\n  now: {_tightest(case.ledger())}"
    names = [c for c, demand in solution.case.demands.items() if demand != case.demands[c]]
    whom = component or ", ".join(names) or "as it is"
    value = f"{solution.value:g}" if knob is Knob.KV_SHARE else f"{int(solution.value):,}"
    return "\n".join(
        [
            f"{knob.value}: {value} is the most that fits ({whom})",
            "",
            f"  now:  {_tightest(case.ledger())}",
            f"  then: {_tightest(solution.case.ledger())}",
        ]
    )


def _tightest(ledger: MemoryLedger) -> str:
    account = ledger.tightest
    if account is None:
        return "no accelerator is used"
    many = len(account.numbers) > 1
    of = f" of {show_bytes(account.capacity_bytes)}" if account.capacity_bytes else ""
    worst = account.worst
    who = f"accelerators {account.numbers} hold" if many else f"accelerator {account.numbers} holds"
    return f"{who} {show_bytes(worst.total_bytes)}{of} in {worst.moment}"
