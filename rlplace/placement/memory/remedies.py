"""What to do where something does not fit: the shortage as a problem, and changes computed anew with their cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from rlplace.errors import Problem
from rlplace.placement.memory.demands import EngineModel, FrozenModel, KvBytes, KvShare, TrainedModel
from rlplace.placement.memory.ledger import Account, MemoryCase, MemoryLedger
from rlplace.placement.memory.solve import Knob, largest, solve
from rlplace.placement.schedule import Residency
from rlplace.units import show_bytes

_MOST_STEPS = 6
_MOST_HOLDERS = 5
_SHORTER = "a shorter algorithm.sequence_length"
_MOST_FACTOR = 64  # more is no remedy but another job


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change. `enough`: with it, and with those listed before it if `also` says so, everything has room."""

    fix: str
    cost: str
    saves_bytes: int  # at the worst moment of the accelerators, or hosts, that lack most
    enough: bool
    case: MemoryCase
    also: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    fix: str
    cost: str
    case: MemoryCase


def find_remedies(case: MemoryCase) -> tuple[Remedy, ...]:
    """Changes that are each enough, the gentlest first; where there are none, changes that are enough together.

    Where not even those are, they are what helps most. Empty when everything fits.
    """
    ledger = case.ledger()
    short = shortest(ledger)
    if short is None:
        return ()
    single = [r for change in _changes(case, short) if (r := _weigh(change, ledger, also=False)) is not None]
    return tuple(r for r in single if r.enough) or _together(case)


def _together(case: MemoryCase) -> tuple[Remedy, ...]:
    steps: list[Remedy] = []
    while len(steps) < _MOST_STEPS and not (steps and steps[-1].enough):
        ledger = case.ledger()
        short = shortest(ledger)
        assert short is not None, "as long as no step was enough, something is short"
        weighed = [_weigh(change, ledger, also=True) for change in _changes(case, short)]
        best = max((r for r in weighed if r is not None), key=lambda r: r.saves_bytes, default=None)
        if best is None:
            break
        steps.append(best)
        case = best.case
    return tuple(steps)


def shortest(ledger: MemoryLedger) -> Account | None:
    """The account that lacks most; None when all fit."""
    short = [account for account in (*ledger.accelerators, *ledger.hosts) if not account.fits]
    return min(short, key=lambda account: account.margin_bytes or 0, default=None)


def _weigh(change: _Change, before: MemoryLedger, *, also: bool) -> Remedy | None:
    """None for a change that saves nothing where it matters."""
    after = change.case.ledger()
    pairs = zip((*before.accelerators, *before.hosts), (*after.accelerators, *after.hosts), strict=True)
    saved, _ = max(
        ((a.worst.total_bytes - b.worst.total_bytes, a.margin_bytes) for a, b in pairs if a is shortest(before)),
        default=(0, None),
    )
    if saved <= 0:
        return None
    return Remedy(
        fix=change.fix, cost=change.cost, saves_bytes=saved, enough=shortest(after) is None, case=change.case, also=also
    )


def _changes(case: MemoryCase, short: Account) -> Iterator[_Change]:
    """The gentlest first, over the blocks of what holds something there, the largest holder first."""
    held = dict.fromkeys(hold.component for hold in short.worst.holds)
    present = [component for component in held if component in case.placement.components]
    holders = list({case.block(component): component for component in reversed(present)}.values())[::-1]
    for component in holders:
        yield from _offload(case, component)
    for component in holders:
        yield from _smaller_batch(case, component, short)
    for component in holders:
        yield from _smaller_cache(case, component, short)
    for kind in (_less_kept, _more_ranks):
        for component in holders:
            yield from kind(case, component)


def _sharers(case: MemoryCase, component: str) -> list[str]:
    """The components that one block speaks of."""
    return [c for c in case.placement.components if case.block(c) == case.block(component)]


def _with(case: MemoryCase, component: str, key: str, value: object) -> MemoryCase:
    """With another value of a key that demands have by the same name."""
    found = {c: case.demands[c] for c in _sharers(case, component) if c in case.demands}
    # Every demand is a dataclass, which its Protocol cannot say.
    turned = {c: dataclasses.replace(demand, **{key: value}) for c, demand in found.items()}  # type: ignore[type-var]
    return dataclasses.replace(case, demands={**case.demands, **turned})


def _change(case: MemoryCase, component: str, key: str, value: object, cost: str) -> _Change:
    shown = str(value).lower() if isinstance(value, bool) else value
    written = "optimizer.on_host" if key == "optimizer_on_host" else key
    fix = f"{case.block(component)}.{written}: {shown}"
    return _Change(fix=fix, cost=cost, case=_with(case, component, key, value))


def _offload(case: MemoryCase, component: str) -> Iterator[_Change]:
    if case.offload.get(component, False):
        return
    copied = case.ledger().host_bytes(component, Residency.OFF)
    seconds = 2 * copied / _copy_bytes_per_s(case)
    cost = f"a rank copies {show_bytes(copied)} each way per iteration, about {seconds:.1f} s"
    leaving = dict.fromkeys(_sharers(case, component), True)
    yield _Change(
        fix=f"{case.block(component)}.enable_offload: true",
        cost=cost if copied else "little: nothing is copied, what it holds is made anew",
        case=dataclasses.replace(case, offload={**case.offload, **leaving}),
    )


def _copy_bytes_per_s(case: MemoryCase) -> float:
    """Of the slowest node that says so."""
    known = [1e9 * n.links.pcie_gb_per_s for n in case.placement.topology.nodes if n.links.pcie_gb_per_s]
    return min(known, default=case.assumptions.copy_bytes_per_s)


def _smaller_batch(case: MemoryCase, component: str, short: Account) -> Iterator[_Change]:
    """In sequences or, where passes are packed, in tokens."""
    match case.demands.get(component):
        case (
            TrainedModel(token_budget=int(now), sequence_length=least)
            | FrozenModel(token_budget=int(now), sequence_length=least)
        ):
            knob = Knob.TOKEN_BUDGET
        case TrainedModel(token_budget=None, micro_batch=now) | FrozenModel(token_budget=None, micro_batch=now):
            knob, least = Knob.MICRO_BATCH, 1
        case _:
            return
    if now > least:
        solution = solve(case, knob, component)
        size = int(solution.value) if solution is not None else _useful(case, component, knob, (least, now), short)
        cost = f"{now / size:.3g} times as many passes, each less well filled"
        yield _change(case, component, knob.value, size, cost)


def _useful(case: MemoryCase, component: str, knob: Knob, sizes: tuple[int, int], short: Account) -> int:
    """The largest that lets those moments fit which the least lets fit: others need a change of their own."""
    least, now = sizes

    def totals(size: int) -> list[int]:
        ledger = _with(case, component, knob.value, size).ledger()
        accounts = (*ledger.accelerators, *ledger.hosts)
        (same,) = (a for a in accounts if (a.kind, a.numbers) == (short.kind, short.numbers))
        return [load.total_bytes for load in same.loads]

    bounds = [max(short.capacity_bytes, total) for total in totals(least)]
    return max(least, largest(lambda size: all(t <= b for t, b in zip(totals(size), bounds, strict=True)), now))


def _smaller_cache(case: MemoryCase, component: str, short: Account) -> Iterator[_Change]:
    cost = "a smaller KV cache: fewer sequences are generated at once"
    match case.demands.get(component):
        case EngineModel(cache=KvShare()):
            solution = solve(case, Knob.KV_SHARE, component)
            if solution is not None:
                yield _Change(
                    fix=f"{component}.gpu_memory_utilization: {solution.value}", cost=cost, case=solution.case
                )
        case EngineModel(cache=KvBytes(size_bytes=size)) as engine:
            left = size - (short.worst.total_bytes - short.capacity_bytes)
            if left > 0:
                changed = dataclasses.replace(engine, cache=KvBytes(size_bytes=left))
                yield _Change(
                    fix=f"{component}.kv_cache_memory: {left}", cost=cost, case=case.with_demand(component, changed)
                )


def _less_kept(case: MemoryCase, component: str) -> Iterator[_Change]:
    """State that can be dropped, recomputed or kept elsewhere."""
    match case.demands.get(component):
        case TrainedModel() as trained:
            if not trained.checkpointing:
                cost = "one more forward pass for each backward pass, about a third more computing"
                yield _change(case, component, "checkpointing", True, cost)
            if not trained.optimizer_on_host:
                cost = "the optimizer steps on the host, at its speed and in its memory"
                yield _change(case, component, "optimizer_on_host", True, cost)
        case FrozenModel() as frozen:
            if not frozen.sharded:
                cost = "every forward pass gathers the weights from all ranks"
                yield _change(case, component, "sharded", True, cost)
            if not frozen.on_host:
                cost = "every forward pass copies the weights from the host"
                yield _change(case, component, "on_host", True, cost)
        case EngineModel(sleep_level=1):
            cost = "none: the sync before each rollout brings the weights anyway"
            yield _change(case, component, "sleep_level", 2, cost)


def _more_ranks(case: MemoryCase, component: str) -> Iterator[_Change]:
    """Twice, four times ... the accelerators, up to the first that is enough; nothing where none is.

    Others do not shrink by this component's having more.
    """
    if not isinstance(case.demands.get(component), (TrainedModel, FrozenModel)):
        return
    now, factor = case.ranks.get(component, case.placement.world_size(component)), 2
    while shortest(_with_ranks(case, component, now * factor).ledger()) is not None:
        factor *= 2
        if factor > _MOST_FACTOR:
            return
    yield _Change(
        fix=f"cluster.component_placement.{component}: {now * factor} accelerators",
        cost=f"{now * (factor - 1)} more accelerators",
        case=_with_ranks(case, component, now * factor),
    )


def _with_ranks(case: MemoryCase, component: str, ranks: int) -> MemoryCase:
    return dataclasses.replace(case, ranks={**case.ranks, component: ranks})


def find_shortages(case: MemoryCase) -> tuple[Problem, ...]:
    """One problem for every kind of accelerator or host that is too small, and for every cache without room.

    Empty exactly when the ledger of `case` fits.
    """
    ledger = case.ledger()
    if ledger.fits:
        return ()
    remedies = find_remedies(case)
    worst = shortest(ledger)
    problems: list[Problem] = []
    for account in (*ledger.accelerators, *ledger.hosts):
        if not account.fits:  # remedies stand with the account that lacks most
            fix = proposals(remedies if account is worst else ()) if remedies else None
            problems.append(_too_small(account, fix, bool(remedies)))
    problems += [_no_cache(case, component, why) for component, why in ledger.lacking]
    return tuple(problems)


def _too_small(account: Account, fix: str | None, helped: bool) -> Problem:
    host, many, load = account.kind == "host", len(account.numbers) > 1, account.worst
    has, needed = show_bytes(account.capacity_bytes), show_bytes(load.total_bytes)
    what = f"accelerator{'s' * many} {account.numbers} {'are' if many else 'is'} too small"
    if host:
        what = f"the host memory of node{'s' * many} {account.numbers} is too small"
    when = "at the start" if load.moment.start else f"in stage {load.moment.stage}"  # no other entry is fuller
    lines = [f"{'a node' if host else 'each' if many else 'it'} has {has}; the largest holders are"]
    lines += [f"{h.component}: {h.part.value} {show_bytes(h.size_bytes)}" for h in load.holds[:_MOST_HOLDERS]]
    if rest := sum(h.size_bytes for h in load.holds[_MOST_HOLDERS:]):
        lines.append(f"all others {show_bytes(rest)}")
    return Problem(
        code="does-not-fit" if not host else "host-does-not-fit",
        key="cluster.component_placement",
        what=what,
        got=f"{needed} {when}, {show_bytes(load.total_bytes - account.capacity_bytes)} too much",
        why="\n".join(lines),
        fix=fix if helped else f"{'hosts' if host else 'accelerators'} of {needed} or more, or less on each",
    )


def proposals(remedies: Sequence[Remedy]) -> str | None:
    """The `fix` of a problem: one line for each; None where there are none."""
    if not remedies:
        return None
    lines = [f"{r.fix}        saves {show_bytes(r.saves_bytes)}; costs: {r.cost}" for r in remedies]
    if not remedies[0].also:
        return "\n".join(f"{'or: ' * (i > 0)}{line}" for i, line in enumerate(lines))
    end = [] if remedies[-1].enough else ["and still it does not fit: more or larger accelerators are needed"]
    return "\n".join([*(f"{'and: ' * (i > 0)}{line}" for i, line in enumerate(lines)), *end])


def _no_cache(case: MemoryCase, component: str, why: str) -> Problem:
    """The only demand that can lack something is an engine's, for its KV cache."""
    match case.demands[component]:
        case EngineModel(cache=KvBytes()):
            knob, fix = "kv_cache_memory", f"a larger {component}.kv_cache_memory, or {_SHORTER}"
        case _:
            knob, found = Knob.KV_SHARE.value, solve(case, Knob.KV_SHARE, component)
            fix = _SHORTER if found is None else f"{component}.{knob}: {found.value}        (the largest that fits)"
    return Problem(
        code="kv-cache-too-small",
        key=f"{component}.{knob}",
        what="leaves too little for the KV cache",
        why=why,
        fix=fix,
    )
