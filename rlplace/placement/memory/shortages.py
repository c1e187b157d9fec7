"""What does not fit, said as problems: where, when, who holds most, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.errors import Problem
from rlplace.placement.memory.case import MemoryCase
from rlplace.placement.memory.demands import EngineModel, KvBytes
from rlplace.placement.memory.ledger import Account
from rlplace.placement.memory.remedies import Remedy, find_remedies, shortest
from rlplace.placement.memory.solve import Knob, solve
from rlplace.units import show_bytes

_MOST_HOLDERS = 5


def find_shortages(case: MemoryCase) -> tuple[Problem, ...]:
    """One problem for every kind of accelerator or host that is too small, and for every cache without room.

    Empty exactly when the ledger of `case` fits.
    """
    ledger = case.ledger()
    if ledger.fits:
        return ()
    remedies = find_remedies(case)
    worst = shortest(ledger)
    helped = bool(remedies)  # then they stand with the account that lacks most
    problems = [_does_not_fit(a, remedies if a is worst else (), helped) for a in ledger.accelerators if not a.fits]
    problems += [_host_too_small(a, remedies if a is worst else (), helped) for a in ledger.hosts if not a.fits]
    problems += [_cannot_work(case, component, why) for component, why in ledger.lacking]
    return tuple(problems)


def _does_not_fit(account: Account, remedies: Sequence[Remedy], helped: bool) -> Problem:
    many = len(account.numbers) > 1
    return Problem(
        code="does-not-fit",
        key="cluster.component_placement",
        what=f"accelerator{'s' * many} {account.numbers} {'are' if many else 'is'} too small",
        got=f"{_needed(account)} {_when(account)}, {_excess(account)} too much",
        why=_holders(f"{'each' if many else 'it'} has {show_bytes(account.capacity_bytes)}", account),
        fix=proposals(remedies) if helped else f"accelerators of {_needed(account)} or more, or less on each",
    )


def _host_too_small(account: Account, remedies: Sequence[Remedy], helped: bool) -> Problem:
    many = len(account.numbers) > 1
    return Problem(
        code="host-does-not-fit",
        key="cluster.component_placement",
        what=f"the host memory of node{'s' * many} {account.numbers} is too small",
        got=f"{_needed(account)} {_when(account)}, {_excess(account)} too much",
        why=_holders(f"a node has {show_bytes(account.capacity_bytes)}", account),
        fix=proposals(remedies) if helped else f"hosts of {_needed(account)} or more, or less on each",
    )


def _needed(account: Account) -> str:
    return show_bytes(account.worst.total_bytes)


def _excess(account: Account) -> str:
    return show_bytes(account.worst.total_bytes - account.capacity_bytes)


def _when(account: Account) -> str:
    moment = account.worst.moment  # no other entry is fuller than its stage
    return "at the start" if moment.start else f"in stage {moment.stage}"


def _holders(has: str, account: Account) -> str:
    holds = account.worst.holds
    lines = [f"{h.component}: {h.part.value} {show_bytes(h.size_bytes)}" for h in holds[:_MOST_HOLDERS]]
    rest = sum(h.size_bytes for h in holds[_MOST_HOLDERS:])
    if rest:
        lines.append(f"all others {show_bytes(rest)}")
    return "\n".join([f"{has}; the largest holders are", *lines])


def proposals(remedies: Sequence[Remedy]) -> str | None:
    """The `fix` of a problem: one line for each; None where there are none."""
    if not remedies:
        return None
    lines = [f"{r.fix}        saves {show_bytes(r.saves_bytes)}; costs: {r.cost}" for r in remedies]
    if not remedies[0].also:
        return "\n".join(f"{'or: ' * (i > 0)}{line}" for i, line in enumerate(lines))
    end = [] if remedies[-1].enough else ["and still it does not fit: more or larger accelerators are needed"]
    return "\n".join([*(f"{'and: ' * (i > 0)}{line}" for i, line in enumerate(lines)), *end])


def _cannot_work(case: MemoryCase, component: str, why: str) -> Problem:
    engine = case.demands[component]
    assert isinstance(engine, EngineModel), "only a cache can be without room"
    shorter = "a shorter algorithm.sequence_length"
    if isinstance(engine.cache, KvBytes):
        knob = "kv_cache_memory"
        fix = f"a larger {component}.{knob}, or {shorter}"
    else:
        knob = Knob.KV_SHARE.value
        largest = solve(case, Knob.KV_SHARE, component)
        fix = f"{component}.{knob}: {largest.value}        (the largest that fits)" if largest is not None else shorter
    return Problem(
        code="kv-cache-too-small",
        key=f"{component}.{knob}",
        what="leaves too little for the KV cache",
        why=why,
        fix=fix,
    )
