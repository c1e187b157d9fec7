"""Solve for what fits: the largest pass, sequence length or KV cache share, by bisection over the ledger.

Also report what does not fit as a problem, with remedies: changes of the config, each with its saving and cost.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from rlplace.codes import Reason, problem
from rlplace.config.blocks.training import ActorConfig
from rlplace.config.yaml_text import show
from rlplace.errors import PlacementError, Problem
from rlplace.placement.memory.bound import LORA_RANK, too_small
from rlplace.placement.memory.demands import (
    Demand,
    EngineDemand,
    ScoringDemand,
    TrainingDemand,
)
from rlplace.placement.memory.formulas import COPY_BYTES_PER_S
from rlplace.placement.memory.ledger import Account, MemoryCase, MemoryLedger
from rlplace.placement.memory.records import show_room
from rlplace.placement.schedule import Residency
from rlplace.units import counted, plural, show_bytes, verb

SPARE = 0.05  # share of each accelerator that stays free if memory.reserve keeps nothing: the formulas are not exact
_LEAST = 0.01
_MOST_STEPS = 12
_MOST_HOLDERS = 5
# (Demand, key of its config block, value that uses less memory, cost of that value).
_LESS_KEPT = (
    (
        TrainingDemand,
        "checkpointing",
        True,
        "one more forward pass per backward pass, about a third more computing",
    ),
    (
        TrainingDemand,
        "activation_offload",
        True,
        "the input of each layer is copied to the host and back",
    ),
    (TrainingDemand, "zero_stage", 3, "every pass gathers the weights from all ranks"),
    (
        TrainingDemand,
        "optimizer.on_host",
        True,
        "the optimizer steps on the host, at its speed and in its memory",
    ),
    (
        ScoringDemand,
        "sharded",
        True,
        "every forward pass gathers the weights from all ranks",
    ),
    (
        ScoringDemand,
        "on_host",
        True,
        "every forward pass copies the weights from the host",
    ),
    (
        EngineDemand,
        "sleep_level",
        2,
        "none: the sync before each rollout brings the weights anyway",
    ),
)
_NEEDED = "more or larger accelerators are needed"
_NOT_FOUND = (
    "no set of changes that does was found; tried were offloading, smaller passes and caches, recomputing, sharding, "
    "the host, low-rank factors, smaller types and other accelerators"
)
_SLICES = (2, 4, 8)  # accelerators of one engine; more than a node has are refused


class Knob(enum.Enum):
    """A size in the config for which `solve` can find the largest value that fits."""

    MICRO_BATCH = "micro_batch"
    TOKEN_BUDGET = "token_budget"  # of passes that are packed
    SEQUENCE_LENGTH = "sequence_length"
    KV_SHARE = "gpu_memory_utilization"  # in steps of 0.01


_MOST = {
    Knob.MICRO_BATCH: 1 << 16,
    Knob.TOKEN_BUDGET: 1 << 24,
    Knob.SEQUENCE_LENGTH: 1 << 24,
}
# The size of a pass is given either in sequences or in tokens.
_INSTEAD = {Knob.MICRO_BATCH: Knob.TOKEN_BUDGET, Knob.TOKEN_BUDGET: Knob.MICRO_BATCH}


class Solution(NamedTuple):
    """The largest value of a knob with which everything fits. `case`: the memory case with this value."""

    value: float
    case: MemoryCase


def has_knob(demand: Demand | None, knob: Knob) -> bool:
    match demand:
        case TrainingDemand(packed=packed) | ScoringDemand(packed=packed):
            return knob in (
                Knob.TOKEN_BUDGET if packed else Knob.MICRO_BATCH,
                Knob.SEQUENCE_LENGTH,
            )
        case EngineDemand(block=block):
            return knob is Knob.SEQUENCE_LENGTH or (
                knob is Knob.KV_SHARE and block.kv_cache_memory is None
            )
        case _:
            return False


def _having(case: MemoryCase, knob: Knob) -> list[str]:
    return [
        component
        for component, demand in case.demands.items()
        if has_knob(demand, knob)
    ]


def solve(
    case: MemoryCase, knob: Knob, component: str | None = None
) -> Solution | None:
    """Return the largest value of `knob` with which everything fits; None if not even the smallest value fits.

    `case`: the inputs of the plan's memory proof. `component`: the component whose value is changed; None: all
    components whose config has this key. Raises PlacementError if the memory of no accelerator or host is known, or if
    no such component has the key.
    """
    names = [name for name in _having(case, knob) if component in (None, name)]
    if not names:
        raise PlacementError([_no_knob(case, knob, component)])
    if not any(account.capacity_bytes for account in case.ledger().accounts):
        unknown = problem(
            "unknown-memory",
            "cluster.accelerator.memory",
            error="of-solution",
            size=knob.value,
        )
        raise PlacementError([unknown])
    if knob is Knob.KV_SHARE:
        value = _share_left(case, names)
    else:
        value = largest(
            lambda size: case.changed(names, **{knob.value: size}).ledger().fits,
            _MOST[knob],
        )
        if knob is Knob.MICRO_BATCH:
            value = _dividing(case, names, int(value))
    solved = case.changed(names, **{knob.value: value})
    if value and solved.ledger().fits:
        return Solution(value, solved)
    return None


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest of 1..most for which `fits` is true, or 0 if there is none.

    If `fits` is true for a number, it must be true for all smaller numbers.
    """
    low = 0
    high = 1
    while high < most and fits(high):
        low = high
        high = min(most, 2 * high)
    if high == most and fits(most):
        return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _dividing(case: MemoryCase, names: Sequence[str], most: int) -> int:
    """Return the largest micro-batch, at most `most`, that divides the sequences per optimizer step of each replica.

    Return `most` if any micro-batch is allowed. `names`: the components that get the micro-batch.
    """
    whole = math.gcd(*(case.batches[name] for name in names if name in case.batches))
    return next(
        (size for size in range(min(most, whole), 0, -1) if whole % size == 0), most
    )


def _share_left(case: MemoryCase, names: Sequence[str]) -> float:
    """Return the largest memory share, rounded down to hundredths, with which every load stays within capacity.

    The share is given to all engines `names`. A small share may leave no room for the KV cache, and a large share no
    room for other components. Only the second condition is monotone, so the search looks at it alone; the KV cache may
    still lack room.
    """

    def fits(hundredths: int) -> bool:
        return (
            case.changed(names, gpu_memory_utilization=hundredths / 100)
            .ledger()
            .within_capacity
        )

    return largest(fits, 100) / 100


def _no_knob(case: MemoryCase, knob: Knob, component: str | None) -> Problem:
    key = knob.value if component is None else f"{component}.{knob.value}"
    # Components that have this size, or the one that stands for it
    instead = _INSTEAD.get(knob, knob)
    components = _having(case, knob)
    which = "of-components"
    if not components:
        components = _having(case, instead)
        which = "by-another-size" if components else "of-no-component"
    return problem(
        "nothing-to-solve",
        key,
        error=which,
        size=knob.value,
        other=instead.value,
        components=", ".join(components),
        first=components[0] if components else None,
    )


def fill_share(case: MemoryCase) -> MemoryCase:
    """Return a case in which each engine gets the share of memory that other components and the reserve leave free.

    `case`: the inputs of the plan's memory proof. Engines with a KV cache of a given size are left alone. The share is
    computed by formulas alone, so it is equal with and without measurements of an earlier run. If nothing is left, the
    share is the smallest possible one, and the ledger states what is lacking. A note is added to the case. Raises
    PlacementError if the memory of some accelerators is not known.
    """
    engines = _having(case, Knob.KV_SHARE)
    if not engines:
        return case
    node = next(
        (
            n
            for n in case.placement.topology.nodes
            if n.accelerators and not n.memory_bytes
        ),
        None,
    )
    if node is not None:
        unknown = problem(
            "unknown-memory",
            f"{engines[0]}.gpu_memory_utilization",
            "auto",
            error="of-share",
            accelerators=node.accelerators,
        )
        raise PlacementError([unknown])
    left = _share_left(dataclasses.replace(case, measured={}), engines)
    kept = any(account.reserve_bytes for account in case.ledger().accelerators)
    share = max(left if kept else round(left - SPARE, 2), _LEAST)
    names = ", ".join(f"{component}.gpu_memory_utilization" for component in engines)
    spare = (
        " and memory.reserve leave" if kept else f" leave, {SPARE:g} of it stays free"
    )
    note = f"{names}: auto is {share:g}; {left:g} is what the others{spare}"
    return dataclasses.replace(
        case.changed(engines, gpu_memory_utilization=share), notes=(*case.notes, note)
    )


def render_solution(
    case: MemoryCase, knob: Knob, component: str | None, solution: Solution | None
) -> str:
    """Return the result of `solve` as text, also if there is no solution.

    `component`: the component that was solved for; None: all components whose config has the key of the knob.
    `solution`: the result of `solve`; None: no value fits.
    """
    now = _tightest(case.ledger())
    if solution is None:
        least = "at any value" if knob is Knob.KV_SHARE else "not even with 1"
        return f"{knob.value}: does not fit, {least}\n\n  now: {now}"
    names = [
        c for c, demand in solution.case.demands.items() if demand != case.demands[c]
    ]
    whose = component or ", ".join(names) or "as it is"
    value = (
        f"{solution.value:g}" if knob is Knob.KV_SHARE else f"{int(solution.value):,}"
    )
    then = _tightest(solution.case.ledger())
    return f"{knob.value}: {value} is the most that fits ({whose})\n\n  now:  {now}\n  then: {then}"


def _tightest(ledger: MemoryLedger) -> str:
    account = ledger.tightest
    if account is None:
        return "no accelerator is used"
    many = len(account.numbers)
    holders = f"{plural(many, 'accelerator')} {account.numbers} {verb(many, 'hold')}"
    of = f" of {show_room(account)}" if account.capacity_bytes else ""
    return f"{holders} {show_bytes(account.worst.total_bytes)}{of} in {account.worst.moment}"


# Where something does not fit.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change of the config that saves memory.

    `fix`: the config lines to write, as text. `cost`: what the change costs, in words. `case`: the memory case with the
    change. `saves_bytes`: bytes saved where most is lacking, at the worst moment. `enough`: whether everything fits
    with this change. `also`: whether the change is meant together with the remedies that are listed before it. `lines`:
    key path -> new value.
    """

    fix: str
    cost: str
    case: MemoryCase
    # On the accelerators or hosts that lack most, at their worst moment.
    saves_bytes: int = 0
    enough: bool = False
    also: bool = False
    # Key path -> value, the same as in `fix`.
    lines: Mapping[str, object] = dataclasses.field(default_factory=dict)


def find_remedies(case: MemoryCase) -> tuple[Remedy, ...]:
    """Return the changes that make the job fit: if possible, changes of which each alone is enough.

    `case`: the inputs of the plan's memory proof. The changes are ordered from least to most intrusive. If no single
    change is enough, the result is a set of changes that are needed together, or that help most if even the set is not
    enough. The result is empty if everything fits.
    """
    if shortest(case.ledger()) is None:
        return ()
    if single := tuple(
        remedy for remedy in _weighed(case, also=False) if remedy.enough
    ):
        return single
    steps: list[Remedy] = []
    while len(steps) < _MOST_STEPS and not (steps and steps[-1].enough):
        best = next(_for_cache(case), None)
        if shortest(case.ledger()) is not None:
            best = max(
                _weighed(case, also=True),
                key=lambda remedy: remedy.saves_bytes,
                default=None,
            )
        if best is None:
            break
        steps.append(best)
        case = best.case
    return tuple(steps)


def shortest(ledger: MemoryLedger) -> Account | None:
    """Return the account of accelerators or hosts that lacks the most bytes; None if all fit."""
    short = [account for account in ledger.accounts if not account.fits]
    return min(short, key=lambda account: account.margin_bytes or 0, default=None)


def _weighed(case: MemoryCase, *, also: bool) -> Iterator[Remedy]:
    """Yield every change that saves memory on the accelerators or hosts that lack most, with the bytes that it saves.

    `also`: the value of `Remedy.also` for each change: whether it is meant together with earlier ones.
    """
    before = case.ledger()
    short = shortest(before)
    assert short is not None, "asked where something is short"
    for change in _changes(case, short):
        changed = change.case
        # Plan and check the changed config anew.
        if case.job is not None:
            planned = case.with_lines(change.lines)
            if planned is None:
                continue
            changed = planned
        after = changed.ledger()
        saved = short.worst.total_bytes - _worst_bytes(after, short)
        if saved > 0:
            enough = shortest(after) is None if case.job is None else after.fits
            yield dataclasses.replace(
                change, case=changed, saves_bytes=saved, enough=enough, also=also
            )


def _for_cache(case: MemoryCase) -> Iterator[Remedy]:
    """Yield the changes that make everything fit, for a case in which a KV cache lacks room.

    Nothing is yielded for a case without a config.
    """
    for component, _ in case.ledger().lacking if case.job is not None else ():
        for change in (
            *_smaller_cache(case, component),
            *_other_engine(case, component),
        ):
            planned = case.with_lines(change.lines)
            if planned is not None and planned.ledger().fits:
                yield dataclasses.replace(change, case=planned, enough=True, also=True)


def _worst_bytes(ledger: MemoryLedger, short: Account) -> int:
    """Return the largest load, in bytes, that `ledger` has on the accelerators or hosts of `short`.

    `short`: an account of another ledger, which may group accelerators and hosts differently.
    """
    same = [
        a for a in ledger.accounts if a.kind == short.kind and a.numbers & short.numbers
    ]
    return max((account.worst.total_bytes for account in same), default=0)


def _changes(case: MemoryCase, short: Account) -> Iterator[Remedy]:
    """Yield possible changes of the components that hold memory in `short`, the least intrusive kind of change first.

    Within each kind, the component that holds the most memory comes first. `short`: the account that lacks memory.
    """
    held = dict.fromkeys(hold.component for hold in short.worst.holds)
    present = [
        component for component in held if component in case.placement.components
    ]
    holders = list(
        {case.block(component): component for component in reversed(present)}.values()
    )[::-1]
    for component in holders:
        yield from _offload(case, component)
    if case.job is not None and short.worst.moment.stage == "sync":
        yield from _sync_through_host(case, holders)
    for component in holders:
        yield from _smaller_batch(case, component, short)
    for component in holders:
        yield from _smaller_cache(
            case, component, short.worst.total_bytes - short.room_bytes
        )
    for component in holders:
        demand = case.demands.get(component)
        for kind, key, value, cost in _LESS_KEPT:
            if isinstance(demand, kind) and attrgetter(key)(demand.block) != value:
                yield _change(case, component, key, value, cost)
    if case.job is not None:
        yield from _without_lending(case)
        for component in holders:
            yield from _more_ranks(case, component)
        for component in holders:
            demand = case.demands.get(component)
            if isinstance(demand, TrainingDemand | ScoringDemand) and demand.packed:
                what = "have the tokens of each sample between them, and exchange them for heads around attention"
                yield from _shared(case, component, "context_parallel_size", what)
        for component in holders:
            yield from _other_training(case, component)
            yield from _other_engine(case, component)


def _without_lending(case: MemoryCase) -> Iterator[Remedy]:
    """Yield the change that lends no accelerators, for a plan that lends some."""
    for component in case.placement.components:
        spec = case.placement.spec(component)
        if spec.lent_ranks:
            lines = dict.fromkeys(f"cluster.lend.{name}" for name in spec.lenders)
            fix = "\nand: ".join(f"{line}: null" for line in lines)
            cost = f"{counted(spec.lent_ranks, 'rank')} fewer, on accelerators that are idle meanwhile"
            yield Remedy(fix=fix, cost=cost, case=case, lines=lines)


def _sync_through_host(case: MemoryCase, holders: Sequence[str]) -> Iterator[Remedy]:
    """Yield the remedy to sync weights through the hosts, if engines in `holders` hold windows of whole weights or a
    second copy during a sync.
    """
    found = [case.demands.get(component) for component in holders]
    syncs = [demand.sync for demand in found if isinstance(demand, EngineDemand)]
    if not any(sync.copy or sync.windows for sync in syncs):
        return
    for component, demand in case.demands.items():
        if isinstance(demand, TrainingDemand) and isinstance(demand.block, ActorConfig):
            path = f"{case.block(component)}.sync.through_host"
            cost = "a slower sync: weights go by the memory of the hosts"
            yield Remedy(fix=f"{path}: true", cost=cost, case=case, lines={path: True})


def _other_training(case: MemoryCase, component: str) -> Iterator[Remedy]:
    """Yield changes that alter the training itself: 8-bit Adam, and LoRA. They are the last to be tried."""
    demand = case.demands.get(component)
    if not isinstance(demand, TrainingDemand):
        return
    if (
        demand.block.optimizer.kind != "adamw_8bit"
        and not demand.block.optimizer.on_host
    ):
        values = {"optimizer.kind": "adamw_8bit"}
        # With weights below float32 and no master copies, small optimizer steps are lost in rounding.
        if demand.block.weights != "fp32":
            values = {"weights": "fp32"} | values
        yield _changed(case, component, values, "Adam's moments are rounded to 8 bits")
    if isinstance(demand.block, ActorConfig) and demand.block.lora_rank is None:
        yield _change(
            case,
            component,
            "lora_rank",
            LORA_RANK,
            "low-rank factors are trained, not all weights",
        )


def _other_engine(case: MemoryCase, component: str) -> Iterator[Remedy]:
    """Yield changes of an engine: tensor parallelism over more accelerators, and a KV cache with a smaller dtype."""
    demand = case.demands.get(component)
    if not isinstance(demand, EngineDemand):
        return
    yield from _shared(
        case, component, _several(case), "compute each token of an engine together"
    )
    if (
        demand.block.engine == "vllm"
        and demand.block.cache_dtype is None
        and demand.block.dtype != "fp16"
    ):
        yield _change(
            case,
            component,
            "cache_dtype",
            "fp8",
            "keys and values of 8 bits: answers differ a little",
        )


def _several(case: MemoryCase) -> str:
    """Return the config key with which an engine gets several accelerators.

    In a job that can run, one rank drives all accelerators of an engine, so the key is `accelerators_per_rank`. In a
    case that is only planned, the key is `tensor_parallel_size`.
    """
    runs = any(
        isinstance(d, TrainingDemand) and d.packed for d in case.demands.values()
    )
    if runs:
        return "accelerators_per_rank"
    return "tensor_parallel_size"


def _shared(case: MemoryCase, component: str, key: str, what: str) -> Iterator[Remedy]:
    """Yield changes of the placement with which more accelerators divide the work that one accelerator does now.

    `key`: the key of the component's line that is changed. `what`: what the accelerators do together, in words.
    """
    spec = case.placement.spec(component)
    written = spec.canonical()
    block = dict(written) if isinstance(written, dict) else {"placement": written}
    now = max(
        [
            getattr(spec.parallel, key, 1),
            *(s.accelerators_per_rank for s in spec.segments),
        ]
    )
    if now == 1 or key in block:
        for slices in (
            n for n in _SLICES if n > now and spec.world_size * now % n == 0
        ):
            path = f"cluster.component_placement.{component}"
            value = {**block, key: slices}
            cost = f"{slices} accelerators {what}"
            yield Remedy(
                fix=f"{path}: {show(value)}", cost=cost, case=case, lines={path: value}
            )


def _change(
    case: MemoryCase, component: str, key: str, value: object, cost: str
) -> Remedy:
    """Return the remedy that sets one key in the component's config block. `cost`: what the change costs, in words."""
    return _changed(case, component, {key: value}, cost)


def _changed(
    case: MemoryCase, component: str, values: Mapping[str, object], cost: str
) -> Remedy:
    """Return the remedy that sets several keys in the component's config block.

    `values`: key -> value. `cost`: what the change costs, in words.
    """
    lines = {f"{case.block(component)}.{key}": value for key, value in values.items()}
    fix = "\nand: ".join(f"{path}: {show(value)}" for path, value in lines.items())
    return Remedy(
        fix=fix, cost=cost, case=case.changed([component], **values), lines=lines
    )


def _offload(case: MemoryCase, component: str) -> Iterator[Remedy]:
    if case.offload.get(component, False):
        return
    copied = case.ledger().host_bytes(component, Residency.OFF)
    known = [
        1e9 * n.pcie_gb_per_s for n in case.placement.topology.nodes if n.pcie_gb_per_s
    ]
    seconds = 2 * copied / min(known, default=COPY_BYTES_PER_S)
    cost = f"a rank copies {show_bytes(copied)} each way per iteration, about {seconds:.1f} s"
    leaving = dict.fromkeys(case.sharers(component), True)
    yield Remedy(
        fix=f"{case.block(component)}.enable_offload: true",
        cost=cost
        if copied
        else "little: nothing is copied, what it holds is made anew",
        case=dataclasses.replace(case, offload={**case.offload, **leaving}),
        lines={f"{case.block(component)}.enable_offload": True},
    )


def _smaller_batch(
    case: MemoryCase, component: str, short: Account
) -> Iterator[Remedy]:
    """Yield a change to smaller passes: fewer sequences, or fewer tokens if passes are packed."""
    demand = case.demands.get(component)
    if not isinstance(demand, (TrainingDemand, ScoringDemand)):
        return
    knob = Knob.MICRO_BATCH
    now = demand.block.micro_batch
    least = 1
    if demand.packed:
        knob = Knob.TOKEN_BUDGET
        now = demand.block.token_budget
        least = demand.sequence_length
    if now <= least:
        return
    solution = solve(case, knob, component)
    size = (
        int(solution.value)
        if solution is not None
        else _useful(case, component, knob, (least, now), short)
    )
    if knob is Knob.MICRO_BATCH:
        size = _dividing(case, [component], size)
    cost = f"{now / size:.3g} times as many passes, each less well filled"
    yield _change(case, component, knob.value, size, cost)


def _useful(
    case: MemoryCase, component: str, knob: Knob, sizes: tuple[int, int], short: Account
) -> int:
    """Return the largest value of `knob` that helps as much as the smallest value, at every moment.

    Two conditions make a value help as much. First, every moment that fits with the smallest value also fits with this
    value. Second, no other moment holds more bytes than with the smallest value. `sizes`: (smallest value, present
    value). `short`: the account that does not fit.
    """
    least, now = sizes

    def totals(size: int) -> list[int]:
        accounts = case.changed([component], **{knob.value: size}).ledger().accounts
        (same,) = (
            a for a in accounts if (a.kind, a.numbers) == (short.kind, short.numbers)
        )
        return [load.total_bytes for load in same.loads]

    bounds = [max(short.room_bytes, total) for total in totals(least)]
    return max(
        least,
        largest(
            lambda size: all(t <= b for t, b in zip(totals(size), bounds, strict=True)),
            now,
        ),
    )


def _smaller_cache(
    case: MemoryCase, component: str, lacking_bytes: int = 0
) -> Iterator[Remedy]:
    cost = "a smaller KV cache: fewer sequences are generated at once"
    demand = case.demands.get(component)
    if has_knob(demand, Knob.KV_SHARE):
        if (found := solve(case, Knob.KV_SHARE, component)) is not None:
            yield _change(case, component, Knob.KV_SHARE.value, found.value, cost)
    elif isinstance(demand, EngineDemand) and demand.block.kv_cache_memory is not None:
        left = demand.block.kv_cache_memory - lacking_bytes
        if lacking_bytes and left > 0:
            yield _change(case, component, "kv_cache_memory", left, cost)


def _more_ranks(case: MemoryCase, component: str) -> Iterator[Remedy]:
    """Yield the placement on all accelerators for a trained or scoring model that has only some of them.

    Nothing is yielded if several ranks of the component share an accelerator.
    """
    if not isinstance(case.demands.get(component), (TrainingDemand, ScoringDemand)):
        return
    spec = case.placement.spec(component)
    everything = len(case.placement.topology.all)
    each, uneven = divmod(len(spec.accelerators), spec.world_size)
    if each and not uneven and len(spec.accelerators) < everything:
        path = f"cluster.component_placement.{component}"
        kept = spec.canonical()
        block = (
            {**kept, "placement": "all"}
            if isinstance(kept, dict) and "node_group" not in kept
            else "all"
        )
        cost = f"{everything - len(spec.accelerators)} more accelerators, which others may use as well"
        yield Remedy(
            fix=f"{path}: {show(block)}", cost=cost, case=case, lines={path: block}
        )


def find_shortages(case: MemoryCase) -> tuple[Problem, ...]:
    """Return one problem for each group of accelerators or hosts that is too small, and for each KV cache without room.

    `case`: the inputs of the plan's memory proof. The result is empty if, and only if, the ledger of `case` fits.
    """
    ledger = case.ledger()
    if ledger.fits:
        return ()
    remedies = find_remedies(case)
    worst = shortest(ledger)
    problems: list[Problem] = []
    for account in ledger.accounts:
        # Remedies are shown only with the account that lacks most.
        if not account.fits:
            fix = proposals(remedies if account is worst else ())
            problems.append(_too_small(account, fix, bool(remedies)))
    return (
        *problems,
        *(_no_cache(case, component, why) for component, why in ledger.lacking),
    )


def _too_small(account: Account, fix: str | None, helped: bool) -> Problem:
    host = account.kind == "host"
    many = len(account.numbers) > 1
    count = len(account.numbers)
    load = account.worst
    needed = show_bytes(load.total_bytes)
    # No entry except the start is fuller than its stage.
    when = "at the start" if load.moment.start else f"in stage {load.moment.stage}"
    # What there is, and what holds it
    room = "room-without-reserve" if account.reserve_bytes else "room"
    if account.kind == "emulated" and not account.reserve_bytes:
        room = "emulated-room"
    reasons: list[str | Reason] = [room]
    for hold in load.holds[:_MOST_HOLDERS]:
        held = show_bytes(hold.size_bytes)
        facts = {"component": hold.component, "part": hold.part.value, "held": held}
        reasons.append(Reason("holder", facts))
    rest = sum(hold.size_bytes for hold in load.holds[_MOST_HOLDERS:])
    if rest:
        reasons.append("other-holders")
    return problem(
        "host-does-not-fit" if host else "does-not-fit",
        "cluster.component_placement",
        f"{needed} {when}, {show_bytes(load.total_bytes - account.room_bytes)} too much",
        error="with-remedies" if helped else "without-remedy",
        reasons=reasons,
        places=f"{plural(count, 'node' if host else 'accelerator')} {account.numbers}",
        are="are" if many else "is",
        each="each" if many else "it",
        capacity=show_bytes(account.capacity_bytes),
        reserve=show_bytes(account.reserve_bytes),
        rest=show_bytes(rest),
        enough=show_bytes(load.total_bytes + account.reserve_bytes),
        remedies=fix,
    )


def proposals(remedies: Sequence[Remedy]) -> str | None:
    """Return the remedies as the `fix` text of a problem, at least one line for each; None without remedies."""
    if not remedies:
        return None
    joined = "and: " if remedies[0].also else "or: "
    saves = [
        f"saves {show_bytes(r.saves_bytes)}; " if r.saves_bytes else ""
        for r in remedies
    ]
    lines = [
        f"{r.fix}        {saved}costs: {r.cost}"
        for r, saved in zip(remedies, saves, strict=True)
    ]
    text = "\n".join(f"{joined * (i > 0)}{line}" for i, line in enumerate(lines))
    if remedies[0].also and not remedies[-1].enough:
        proof = too_small(remedies[-1].case)
        text += "\nand still it does not fit: " + (
            _NOT_FOUND if proof is None else f"{proof}: {_NEEDED}"
        )
    return text


def _no_cache(case: MemoryCase, component: str, reason: str) -> Problem:
    """Return the problem of an engine whose KV cache lacks room. `reason`: what is lacking, in words.

    Only engines can report that something is lacking.
    """
    largest_share = None
    if not has_knob(case.demands[component], Knob.KV_SHARE):
        knob = "kv_cache_memory"
        which = "larger-cache"
    else:
        knob = Knob.KV_SHARE.value
        which = "shorter-sequences"
        found = solve(case, Knob.KV_SHARE, component)
        if found is not None:
            which = "largest-share"
            largest_share = found.value
    remedies = [dataclasses.replace(each, also=False) for each in _for_cache(case)]
    if remedies:
        which = "cache-remedies"
    return problem(
        "kv-cache-too-small",
        f"{component}.{knob}",
        error=which,
        reason=reason,
        component=component,
        parallel=_several(case),
        share=largest_share,
        remedies=proposals(remedies),
    )
