"""The spaces of a job under other values of a few keys, such as micro-batch sizes and the staleness bound.

Gradients are summed over micro-batches, so their size changes seconds and memory, and nothing that is learned but its
rounding. A bound of staleness changes what is learned: it is varied where that is asked for, and the answer says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from rlplace.codes import config_error
from rlplace.contract.planning import make_plan
from rlplace.contract.registry import job_of
from rlplace.errors import ProblemsError, did_you_mean
from rlplace.foresight.loads import Size
from rlplace.foresight.model import model_of
from rlplace.foresight.search import Found
from rlplace.foresight.space import Layout, Space
from rlplace.placement.plan import Plan


def varied(
    config: Any,
    plan: Plan,
    keys: Sequence[str],
    *,
    fixed: Collection[str],
    accelerators: Collection[int],
    tell: Callable[[str], None],
) -> list[Space]:
    """Return the search space of the config, then a space for each other combination of values of some config keys.

    `keys`: the config keys that are varied. `fixed`: components that keep their place. `accelerators`: accelerators
    that the plans may use. `tell`: called with a line of text for each combination that has no plan. Raises ConfigError
    for keys that this job cannot vary, and the errors of `Space`.
    """
    model = model_of(config)
    known = model.values(config)
    for key in keys:
        if key not in known:
            near = did_you_mean(key, known)
            error = "vary"
            if near:
                error = "misspelt-vary"
            elif not known:
                error = "vary-of-none"
            raise config_error(
                "bad-option",
                "vary",
                key,
                error=error,
                near=near,
                known=", ".join(known),
                first=next(iter(known), None),
                job=job_of(config).name,
                keys=",".join(keys),
            )
    spaces = [Space(config, plan, fixed=fixed, accelerators=accelerators)]
    now = tuple(_value(config, key) for key in keys)
    for values in itertools.product(*(known[key] for key in keys)):
        if values == now:
            continue
        other = config
        for key, value in zip(keys, values, strict=True):
            other = model.replaced(other, key.split("."), value)
        changed = {
            key: value
            for key, value, old in zip(keys, values, now, strict=True)
            if value != old
        }
        try:
            holds, base = _plan(other, spaces[0])
        except ProblemsError as error:
            told = ", ".join(f"{key} {value}" for key, value in changed.items())
            tell(f"left out: {told}: {error.problems[0].what}")
            continue
        spaces.append(
            Space(
                holds,
                base,
                fixed=fixed,
                accelerators=accelerators,
                varied=changed,
                written=config,
            )
        )
    return spaces


def _value(config: Any, key: str) -> int:
    block: object = config
    for name in key.split("."):
        block = getattr(block, name)
    assert isinstance(block, int), "it is a number"
    return block


def _plan(config: Any, space: Space) -> tuple[Any, Plan]:
    """Return a config that has a valid plan, and the plan.

    The config is the given one if it has a valid plan; else it has another placement, with generation on accelerators
    of its own.
    """
    topology = space.plan.topology
    pair = space.model.generating
    try:
        return config, make_plan(config, topology)
    except ProblemsError:
        placement = space.plan.placement
        held = {
            c: {*placement.accelerators(c)}
            for c in placement.components
            if c not in space.free
        }
        others = {n for c in held if c not in pair for n in held[c]}
        last = next(
            (n for n in sorted(topology.all, reverse=True) if n not in others), 0
        )
        generating = {last, *(n for c in held if c in pair for n in held[c])}
        first = next((n for n in topology.all if n not in generating), 0)
        starts = {c: last if c in pair else first for c in space.free}
        sizes = {**space.current().sizes, **dict.fromkeys(starts, Size(1, 1))}
        layout = Layout(mode=space.now, sizes=sizes, starts=starts)
        apart = Space(
            config, space.plan, fixed=[c for c in sizes if c not in starts]
        ).config_of(layout)
        return apart, make_plan(apart, topology)


def changed_learning(best: Found) -> Iterator[str]:
    """Yield a line of text for each setting with which the plan `best` learns in another way than the config."""
    return best.space.model.learning_changes(best.space.varied)
