"""A plan with everything that is computed from it: what the plan command shows, in whatever form."""

from __future__ import annotations

import dataclasses

from rlplace.errors import Problem
from rlplace.placement.counts import Count
from rlplace.placement.dedicated import Business, count_business, dedicate
from rlplace.placement.memory.ledger import MemoryCase, MemoryLedger
from rlplace.placement.memory.remedies import find_shortages
from rlplace.placement.sharing import Savings, count_savings
from rlplace.placement.transfers import AnyPlan, Traffic, count_traffic


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """This placement beside the dedicated one of the same components."""

    savings: Savings
    here: Business
    apart: Business
    here_bytes: int  # of the fullest accelerator at its worst moment
    apart_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Never changes once made."""

    name: str  # of the config
    plan: AnyPlan
    case: MemoryCase
    ledger: MemoryLedger
    shortages: tuple[Problem, ...]
    traffic: Traffic
    comparison: Comparison | None  # None where no component has accelerators
    counts: tuple[Count, ...] = ()  # of a language-model job

    @property
    def fits(self) -> bool:
        """Nothing is known that does not fit."""
        return self.ledger.fits

    @property
    def memory_known(self) -> bool:
        """Whether anything is known of what components hold."""
        return any(account.worst.total_bytes for account in self.ledger.accelerators)


def make_report(name: str, plan: AnyPlan, case: MemoryCase, counts: tuple[Count, ...] = ()) -> PlanReport:
    """`case` is the plan's own: its placement, needs and offloads, and what each component asks of memory."""
    ledger = case.ledger()
    return PlanReport(
        name=name,
        plan=plan,
        case=case,
        ledger=ledger,
        shortages=() if ledger.fits else find_shortages(case),
        traffic=count_traffic(plan, ledger),
        comparison=_compare(plan, case, ledger),
        counts=counts,
    )


def _compare(plan: AnyPlan, case: MemoryCase, ledger: MemoryLedger) -> Comparison | None:
    apart = dedicate(plan.placement)
    if apart is None:
        return None
    alone = dataclasses.replace(case, placement=apart)
    return Comparison(
        savings=count_savings(plan.placement),
        here=count_business(plan.placement, plan.schedule.needs),
        apart=count_business(apart, alone.schedule().needs),
        here_bytes=_fullest(ledger),
        apart_bytes=_fullest(alone.ledger()),
    )


def _fullest(ledger: MemoryLedger) -> int:
    return max((account.worst.total_bytes for account in ledger.accelerators), default=0)
