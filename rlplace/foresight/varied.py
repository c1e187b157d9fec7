"""The search spaces of a job with other values of a few config keys, such as micro-batch sizes.

Another micro-batch size changes seconds and memory, but not what is learned, except for rounding: gradients are summed
over micro-batches. Another staleness bound changes what is learned. It is varied only on request, and the answer says
so.
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
    """Return the search space of the config, and a space for each other combination of values of `keys`.

    `keys`: the config keys to vary. `fixed`: components that keep their place. `accelerators`: allowed numbers of
    accelerators of a plan. `tell`: called with a line of text for each combination that is left out because it has no
    valid plan. Raises ConfigError for keys that this job cannot vary, for unknown components and for too many
    accelerators.
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
    """Return the config and its plan if the plan is valid; else a changed config with a valid plan, and that plan.

    The changed config has generation on accelerators of its own. `space`: the search space of the unchanged config.
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
    """Yield a line of text for each setting of the plan `best` that changes what is learned.

    The settings are compared with the user's config.
    """
    return best.space.model.learning_changes(best.space.varied)
