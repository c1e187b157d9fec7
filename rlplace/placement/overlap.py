"""Generating while the actor learns: what is then resident at all times, and whether a placement allows it.

::

               actor     env    rollout                  actor     env    rollout
    sync       weights          weights        ──▶       weights   full   full
    rollout              full   full                               full   full
    learn      full                                      full      full   full      rollout is under way in all of them
"""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.errors import Problem, Source, source_of
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.schedule import Needs, Residency

_KEY = "algorithm.max_staleness"


def check_overlap(
    placement: HybridComponentPlacement, needs: Needs, offload: Mapping[str, bool], sources: Mapping[str, Source]
) -> list[Problem]:
    """Those that leave their accelerators to what generates, which would then have to leave as well.

    `needs` in turns. Who does not leave shares accelerators for good: the memory ledger says whether both fit.
    """
    if not needs.ahead:
        return []
    generating = [c for c in placement.components if needs.of("rollout", c) > Residency.OFF]
    turns = {
        component: others
        for component in placement.components
        if component not in generating and offload[component]
        if (others := [c for c in generating if placement.shared(component, c)])
    }
    return [_takes_turns(placement, needs, c, others, sources) for c, others in turns.items()]


def _takes_turns(
    placement: HybridComponentPlacement,
    needs: Needs,
    component: str,
    others: list[str],
    sources: Mapping[str, Source],
) -> Problem:
    where = ", ".join(f"{placement.shared(component, other)} with {other}" for other in others)
    return Problem(
        code="overlap-takes-turns",
        key=_KEY,
        what=f"{component} takes turns with {' and '.join(others)}, so neither can go on while the other works",
        got=f"max_staleness: {needs.ahead}",
        source=source_of(_KEY, sources),
        why=f"above 0, rollout goes on while the actor learns; {component} shares accelerators {where}",
        fix=f"max_staleness: 0        (or accelerators of its own for {component}; or, where both fit, "
        f"{component}.enable_offload: false)",
    )
