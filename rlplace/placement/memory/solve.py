"""The largest pass, sequence length or KV share that fits, by bisection over the ledger itself."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlplace.errors import PlacementError, Problem
from rlplace.placement.memory.demands import EngineDemand, ScoringDemand, TrainingDemand
from rlplace.placement.memory.footprint import Demand
from rlplace.placement.memory.ledger import MemoryCase, MemoryLedger
from rlplace.units import show_bytes

RESERVE = 0.05  # of each accelerator: allocators split what they hold, and the formulas are not exact
_LEAST = 0.01


class Knob(enum.Enum):
    """What can be solved for: a field of demands."""

    MICRO_BATCH = "micro_batch"
    TOKEN_BUDGET = "token_budget"  # of passes that are packed
    SEQUENCE_LENGTH = "sequence_length"
    KV_SHARE = "gpu_memory_utilization"  # in steps of 0.01


_MOST = {Knob.MICRO_BATCH: 1 << 16, Knob.TOKEN_BUDGET: 1 << 24, Knob.SEQUENCE_LENGTH: 1 << 24}
# A pass has a size in sequences or in tokens.
_INSTEAD = {Knob.MICRO_BATCH: Knob.TOKEN_BUDGET, Knob.TOKEN_BUDGET: Knob.MICRO_BATCH}


class Solution(NamedTuple):
    """The largest value that fits, and the case with it."""

    value: float
    case: MemoryCase


def has_knob(demand: Demand | None, knob: Knob) -> bool:
    match demand:
        case TrainingDemand(packed=packed) | ScoringDemand(packed=packed):
            return knob in (Knob.TOKEN_BUDGET if packed else Knob.MICRO_BATCH, Knob.SEQUENCE_LENGTH)
        case EngineDemand(block=block):
            return knob is Knob.SEQUENCE_LENGTH or (knob is Knob.KV_SHARE and block.kv_cache_memory is None)
        case _:
            return False


def _having(case: MemoryCase, knob: Knob) -> list[str]:
    return [component for component, demand in case.demands.items() if has_knob(demand, knob)]


def solve(case: MemoryCase, knob: Knob, component: str | None = None) -> Solution | None:
    """The largest value of `knob` for one component, or for all that have it, with which everything fits.

    None where not even the least does. Raises PlacementError where no memory is known, and where no such component has
    the knob.
    """
    names = [name for name in _having(case, knob) if component in (None, name)]
    if not names:
        raise PlacementError([_no_knob(case, knob, component)])
    if not any(account.capacity_bytes for account in case.ledger().accounts):
        why = f"the largest {knob.value} depends on how much memory an accelerator has"
        raise _unknown_memory("cluster.accelerator.memory", "is not known", None, why, "memory: 80GiB")
    if knob is Knob.KV_SHARE:
        value = _share_left(case, names)
    else:
        value = largest(lambda size: case.changed(names, **{knob.value: size}).ledger().fits, _MOST[knob])
    solved = case.changed(names, **{knob.value: value})
    return Solution(value, solved) if value and solved.ledger().fits else None


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


def _share_left(case: MemoryCase, names: Sequence[str]) -> float:
    """The largest share in hundredths that fits for every engine, whether or not it leaves room for a KV cache.

    A small share leaves no room for the cache and a large one none for the others: only the latter is monotone.
    """

    def fits(hundredths: int) -> bool:
        return case.changed(names, gpu_memory_utilization=hundredths / 100).ledger().within_capacity

    return largest(fits, 100) / 100


def _unknown_memory(key: str, what: str, got: str | None, why: str, fix: str) -> PlacementError:
    return PlacementError([Problem(code="unknown-memory", key=key, what=what, got=got, why=why, fix=fix)])


def _no_knob(case: MemoryCase, knob: Knob, component: str | None) -> Problem:
    instead = _INSTEAD.get(knob, knob)
    why, fix = "no component of this job has it", "solve for another size"
    if having := _having(case, knob):
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


def fill_share(case: MemoryCase) -> MemoryCase:
    """Give every engine without a KV cache size the same share: what the others leave, less a reserve; and note it.

    By formulas alone, so that it is the same whether or not an earlier run was measured. Where nothing is left, it is
    the least that can be asked for, and the ledger states what lacks. Raises PlacementError where no memory is known.
    """
    engines = _having(case, Knob.KV_SHARE)
    if not engines:
        return case
    node = next((n for n in case.placement.topology.nodes if n.accelerators and not n.memory_bytes), None)
    if node is not None:
        key, what = f"{engines[0]}.gpu_memory_utilization", "auto needs to know how much memory an accelerator has"
        why = "it is the share that the others leave; neither cluster.nodes nor nvidia-smi states the memory"
        fix = f"cluster.nodes: [{{accelerators: {node.accelerators}, memory: 80GiB}}]        (or a number)"
        raise _unknown_memory(key, what, "auto", why, fix)
    left = _share_left(dataclasses.replace(case, measured={}), engines)
    share = max(round(left - RESERVE, 2), _LEAST)
    names = ", ".join(f"{component}.gpu_memory_utilization" for component in engines)
    note = f"{names}: auto is {share:g}; {left:g} is what the others leave, {RESERVE:g} of it stays free"
    return dataclasses.replace(case.changed(engines, gpu_memory_utilization=share), notes=(*case.notes, note))


def render_solution(case: MemoryCase, knob: Knob, component: str | None, solution: Solution | None) -> str:
    """`component` None: all that have this size."""
    now = _tightest(case.ledger())
    if solution is None:
        least = "at any value" if knob is Knob.KV_SHARE else "not even with 1"
        return f"{knob.value}: does not fit, {least}\n\n  now: {now}"
    names = [c for c, demand in solution.case.demands.items() if demand != case.demands[c]]
    whose = component or ", ".join(names) or "as it is"
    value = f"{solution.value:g}" if knob is Knob.KV_SHARE else f"{int(solution.value):,}"
    then = _tightest(solution.case.ledger())
    return f"{knob.value}: {value} is the most that fits ({whose})\n\n  now:  {now}\n  then: {then}"


def _tightest(ledger: MemoryLedger) -> str:
    account = ledger.tightest
    if account is None:
        return "no accelerator is used"
    holders = f"accelerator{'s' * (len(account.numbers) > 1)} {account.numbers} hold{'s' * (len(account.numbers) == 1)}"
    of = f" of {show_bytes(account.capacity_bytes)}" if account.capacity_bytes else ""
    return f"{holders} {show_bytes(account.worst.total_bytes)}{of} in {account.worst.moment}"
