"""Run the best plans of a search for a few iterations; their measurements are added to the profile."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlplace.config.keys import PLACEMENT
from rlplace.foresight.measure import Variant, run
from rlplace.foresight.profile import Profile
from rlplace.foresight.search import Found
from rlplace.units import counted, verb

_ITERATIONS = 6  # in the first round


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The result of a short run of a plan.

    `plan`: a text that describes the plan. `iterations`: number of iterations of the run. `predicted`, `measured`:
    seconds of an iteration.
    """

    plan: str
    iterations: int
    predicted: float
    measured: float


def probe(
    mapping: Mapping[str, Any],
    plans: Sequence[Found],
    profile: Profile,
    tell: Callable[[str], None],
) -> tuple[list[Probe], Profile]:
    """Run the plans, then the faster half of them for twice as many iterations, and so on until one plan is left.

    Return the results of all runs, and `profile` merged with the profiles of the runs. `mapping`: the config. `tell`:
    called with a line of text before each run. Raises ConfigError if a run fails.
    """
    probes = list[Probe]()
    iterations = _ITERATIONS
    while plans:
        timed: list[tuple[float, int]] = []
        for number, found in enumerate(plans):
            tell(f"probing {describe(found)}: {iterations} iterations")
            shown = run(
                Variant(name=describe(found), mapping=changed(mapping, found.changes)),
                iterations,
            )
            profile = profile.merged(shown.profile)
            measured = shown.seconds["iteration"]["measured"]
            timed.append((measured, number))
            probes.append(
                Probe(
                    plan=describe(found),
                    iterations=iterations,
                    predicted=found.seconds,
                    measured=measured,
                )
            )
        plans = [plans[number] for _, number in sorted(timed)[: len(plans) // 2]]
        iterations *= 2
    return probes, profile


def changed(mapping: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the config with some keys changed.

    `changes`: config key -> new value; None: the key is removed.
    """
    whole = copy.deepcopy(dict(mapping))
    for key, value in changes.items():
        # A component name may contain dots.
        component = key.removeprefix(f"{PLACEMENT}.")
        path = (
            key.split(".") if component == key else [*PLACEMENT.split("."), component]
        )
        at = whole
        for name in path[:-1]:
            at = at.setdefault(name, {})
        if value is None:
            del at[path[-1]]
        else:
            at[path[-1]] = value
    return whole


def describe(found: Found) -> str:
    """Return a line of text about a plan: each component's accelerators, and the settings that a search varies."""
    placement = found.plan.placement
    layout = found.layout
    parts = [f"{c} {placement.accelerators(c) or 'cpu'}" for c in placement.components]
    if layout.mode.groups:
        parts.append(counted(layout.mode.groups, "stage group"))
    if layout.mode.shared:
        parts.append("env and rollout in one process")
    if layout.stays:
        stay = verb(len(layout.stays), "stay")
        parts.append(f"{', '.join(layout.stays)} {stay}")
    parts += [f"{key} {value}" for key, value in found.space.varied.items()]
    return "; ".join(parts)
