"""The largest pass, sequence length or KV share that fits, by bisection over the ledger itself."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence

from rlplace.errors import PlacementError, Problem
from rlplace.placement.memory.demands import EngineModel, FrozenModel, KvShare, TrainedModel
from rlplace.placement.memory.footprint import Demand
from rlplace.placement.memory.ledger import MemoryCase, MemoryLedger
from rlplace.units import show_bytes


class Knob(enum.Enum):
    """What can be solved for."""

    MICRO_BATCH = "micro_batch"
    TOKEN_BUDGET = "token_budget"  # of passes that are packed
    SEQUENCE_LENGTH = "sequence_length"
    KV_SHARE = "gpu_memory_utilization"  # in steps of 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The largest value that fits, and the case with it."""

    knob: Knob
    value: float
    case: MemoryCase


_MOST = {Knob.MICRO_BATCH: 1 << 16, Knob.TOKEN_BUDGET: 1 << 24, Knob.SEQUENCE_LENGTH: 1 << 24, Knob.KV_SHARE: 100}


def solve(case: MemoryCase, knob: Knob, component: str | None = None) -> Solution | None:
    """The largest value of `knob` for one component, or for all that have it, with which everything fits.

    None where not even the least does. Raises PlacementError where no memory is known, and where no such component has
    the knob.
    """
    names = [name for name in _having(case, knob) if component in (None, name)]
    if not names:
        raise PlacementError([_no_knob(case, knob, component)])
    ledger = case.ledger()
    if not any(account.capacity_bytes for account in (*ledger.accelerators, *ledger.hosts)):
        raise PlacementError([_no_capacity(knob)])

    # A small share leaves no room for the KV cache and a large one none for the others: only the latter is monotone.
    fits = _within_capacity if knob is Knob.KV_SHARE else _fits
    step = largest(lambda step: fits(_with_value(case, knob, names, step).ledger()), _MOST[knob])
    solved = _with_value(case, knob, names, step)
    if not step or not solved.ledger().fits:
        return None
    return Solution(knob=knob, value=step / 100 if knob is Knob.KV_SHARE else step, case=solved)


def share_left(case: MemoryCase) -> float:
    """The largest share that fits for every engine, whether or not it leaves room for a KV cache; 0 for none."""
    names = _having(case, Knob.KV_SHARE)
    step = largest(
        lambda step: _within_capacity(_with_value(case, Knob.KV_SHARE, names, step).ledger()), _MOST[Knob.KV_SHARE]
    )
    return step / 100


def _with_value(case: MemoryCase, knob: Knob, names: Sequence[str], step: int) -> MemoryCase:
    turned = {c: _turned(case.demands[c], knob, step) for c in names}
    return dataclasses.replace(case, demands={**case.demands, **{c: d for c, d in turned.items() if d is not None}})


def _fits(ledger: MemoryLedger) -> bool:
    return ledger.fits


def _within_capacity(ledger: MemoryLedger) -> bool:
    return all(account.fits for account in (*ledger.accelerators, *ledger.hosts))


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest of 1..most that fits, 0 for none; whatever is below a value that fits must fit too."""
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, min(most, 2 * high)
    if high == most and fits(most):
        return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _turned(demand: Demand, knob: Knob, step: int) -> Demand | None:
    """The demand with another value; None where it has no such knob."""
    match demand, knob:
        case (TrainedModel(token_budget=int()) | FrozenModel(token_budget=int()), Knob.TOKEN_BUDGET):
            return dataclasses.replace(demand, token_budget=step)
        case (TrainedModel(token_budget=None) | FrozenModel(token_budget=None), Knob.MICRO_BATCH):
            return dataclasses.replace(demand, micro_batch=step)
        case (TrainedModel() | FrozenModel() | EngineModel(), Knob.SEQUENCE_LENGTH):
            return dataclasses.replace(demand, sequence_length=step)
        case (EngineModel(cache=KvShare()), Knob.KV_SHARE):
            return dataclasses.replace(demand, cache=KvShare(gpu_memory_utilization=step / 100))
        case _:
            return None


# A pass has a size in sequences or in tokens.
_INSTEAD = {Knob.MICRO_BATCH: Knob.TOKEN_BUDGET, Knob.TOKEN_BUDGET: Knob.MICRO_BATCH}


def _no_knob(case: MemoryCase, knob: Knob, component: str | None) -> Problem:
    having, instead = _having(case, knob), _INSTEAD.get(knob, knob)
    why, fix = "no component of this job has it", "solve for another size"
    if having:
        why, fix = f"it is a size of {', '.join(having)}", f"solve {knob.value} {having[0]}"
    elif others := _having(case, instead):
        why = f"a pass of {', '.join(others)} has its size by {instead.value}"
        fix = f"solve {instead.value} {others[0]}"
    return Problem(
        code="nothing-to-solve",
        key=knob.value if component is None else f"{component}.{knob.value}",
        what=f"no {knob.value} to solve for",
        why=why,
        fix=fix,
    )


def _having(case: MemoryCase, knob: Knob) -> list[str]:
    return [c for c, demand in case.demands.items() if _turned(demand, knob, 1) is not None]


def _no_capacity(knob: Knob) -> Problem:
    return Problem(
        code="unknown-memory",
        key="cluster.accelerator.memory",
        what="is not known",
        why=f"the largest {knob.value} depends on how much memory an accelerator has",
        fix="memory: 80GiB",
    )


RESERVE = 0.05  # of each accelerator: allocators split what they hold, and the formulas are not exact
_LEAST = 0.01


def fill_share(case: MemoryCase) -> MemoryCase:
    """The case with that share for every engine that has one, and a note that says it.

    By formulas alone, so that it is the same whether or not an earlier run was measured. Where nothing is left, it is
    the least that can be asked for, and the ledger says what lacks. Raises PlacementError where no memory is known.
    """
    engines = {c: d for c, d in case.demands.items() if isinstance(d, EngineModel) and isinstance(d.cache, KvShare)}
    if not engines:
        return case
    _check_memory(case, next(iter(engines)))
    left = share_left(dataclasses.replace(case, measured={}))
    share = max(round(left - RESERVE, 2), _LEAST)
    cache = KvShare(gpu_memory_utilization=share)
    names = ", ".join(f"{component}.gpu_memory_utilization" for component in engines)
    note = f"{names}: auto is {share:g}; {left:g} is what the others leave, {RESERVE:g} of it stays free"
    filled = {c: dataclasses.replace(engine, cache=cache) for c, engine in engines.items()}
    return dataclasses.replace(case, demands={**case.demands, **filled}, notes=(*case.notes, note))


def _check_memory(case: MemoryCase, component: str) -> None:
    node = next((n for n in case.placement.topology.nodes if n.accelerators and not n.memory_bytes), None)
    if node is None:
        return
    raise PlacementError(
        [
            Problem(
                code="unknown-memory",
                key=f"{component}.gpu_memory_utilization",
                what="auto needs to know how much memory an accelerator has",
                got="auto",
                why="it is the share of it which the others leave; neither cluster.nodes nor nvidia-smi says it",
                fix=f"cluster.nodes: [{{accelerators: {node.accelerators}, memory: 80GiB}}]        (or a number)",
            )
        ]
    )


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
