"""Turns: where an algorithm lets components work independently, who works at once and who one after another.

::

    declared        placement and enable_offload                           becomes
    infer           reference 0-3, reward 4-7, critic 0-7; all leave       infer 1: reference, reward    infer 2: critic
    learn           critic 0-7, actor 0-7; both leave                      learn 1: critic               learn 2: actor
    learn           critic 0-3, actor 4-7                                  learn: critic, actor
    infer           reference 4-7, where nobody works in rollout           it works in rollout already
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplace.placement.language.hybrid import HybridComponentPlacement
    from rlplace.placement.schedule import Needs, Residency

    Row = dict[str, Residency]  # component -> what a stage needs of it, in the order in which turns are given


def take_turns(needs: Needs, placement: HybridComponentPlacement, offload: Mapping[str, bool]) -> Needs:
    """The same needs with the stages that this placement makes of them; none of them is left to be divided.

    A component may begin early where nobody is at work on its accelerators; where rollout goes on throughout, where
    nobody ever is. Two that share accelerators work one after the other if both leave them; one that stays would take
    no less memory by waiting. A stage that nobody is left in is no stage.
    """
    rows: dict[str, Row] = {stage: dict(needs.residency[stage]) for stage in needs.stages}
    for component, stage in needs.early.items():
        busy = [c for row in rows.values() for c in row if c != component] if needs.ahead else rows[stage]
        if component in placement.components and not any(_share(placement, component, other) for other in busy):
            later = [rows[name] for name in needs.turns if component in rows[name]]
            rows[stage][component] = max(row.pop(component) for row in later)
    residency: dict[str, Mapping[str, Residency]] = {}
    for stage, row in rows.items():
        turns = _divide(row, placement, offload) if stage in needs.turns else [row]
        names = [f"{stage} {number}" for number in range(1, len(turns) + 1)] if len(turns) > 1 else [stage]
        residency |= zip(names, turns, strict=False)
    return dataclasses.replace(needs, stages=tuple(residency), residency=residency, turns=(), early={})


def base_stage(stage: str) -> str:
    """The stage that a turn is of: `infer 2` is one of infer."""
    return stage.partition(" ")[0]


def _divide(row: Row, placement: HybridComponentPlacement, offload: Mapping[str, bool]) -> list[Row]:
    """Each component to the first turn in which it is in nobody's way."""
    leaving = {component for component, leaves in offload.items() if leaves}
    turns: list[Row] = []
    for component, need in row.items():
        free = (
            turn
            for turn in turns
            if not any(c in leaving and component in leaving and _share(placement, component, c) for c in turn)
        )
        turn = next(free, None)
        if turn is None:
            turns.append(turn := {})
        turn[component] = need
    return turns


def _share(placement: HybridComponentPlacement, a: str, b: str) -> bool:
    """Whether they have accelerators in common; what could not be placed has none."""
    return {a, b} <= {*placement.components} and bool(placement.shared(a, b))
