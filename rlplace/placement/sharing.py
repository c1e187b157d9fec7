"""Sizes of components that work on the same rows on shared accelerators, and what a placement saves by sharing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rlplace.errors import Problem, Source, source_of
from rlplace.placement.language.hybrid import COLLOCATED, HybridComponentPlacement
from rlplace.placement.language.spec import role_of
from rlplace.placement.machines.ranges import Ranges
from rlplace.placement.schedule import Needs, Residency

# (partner, leader): the partner answers about rows that the leader's ranks hold.
_PARTNERS = (("reference", "actor"), ("reward", "critic"))


def check_partners(placement: HybridComponentPlacement, sources: Mapping[str, Source]) -> list[Problem]:
    """Partners that share accelerators and whose ranks cannot be matched one to one or several to one."""
    problems: list[Problem] = []
    for partner, leader in _pairs(placement):
        ranks, others = placement.world_size(partner), placement.world_size(leader)
        if placement.shared(partner, leader) and ranks % others and others % ranks:
            key = placement.spec(partner).key
            problems.append(
                Problem(
                    code="uneven-partners",
                    key=key,
                    what=f"{ranks} {partner} ranks and {others} {leader} ranks share accelerators",
                    got=placement.spec(partner).text,
                    source=source_of(key, sources),
                    why=f"{partner} answers about the rows of {leader}; one number of ranks divides the other, "
                    "so that rows stay on their accelerator",
                    fix=f"{partner}: {{same_as: {leader}}}",
                )
            )
    return problems


def find_partner_warnings(placement: HybridComponentPlacement, sources: Mapping[str, Source]) -> list[Problem]:
    """Partners that share only some of their accelerators: the others wait."""
    warnings: list[Problem] = []
    for partner, leader in _pairs(placement):
        shared = placement.shared(partner, leader)
        if shared and placement.relation(partner, leader) != COLLOCATED:
            mine, theirs = (len(placement.accelerators(c)) for c in (partner, leader))
            key = placement.spec(partner).key
            warnings.append(
                Problem(
                    code="unequal-partners",
                    key=key,
                    what=f"{partner} is on {mine} accelerators, {leader} on {theirs}, {len(shared)} of them shared",
                    source=source_of(key, sources),
                    why="libraries that colocate the two ask for the same number; here it works, and some wait",
                    fix=f"{partner}: {{same_as: {leader}}}",
                )
            )
    return warnings


def find_engine_warnings(
    placement: HybridComponentPlacement, needs: Needs, sources: Mapping[str, Source]
) -> list[Problem]:
    """Engines on some of the actor's accelerators only, while nobody works on the others."""
    if not {"actor", "rollout"} <= {*placement.components} or not placement.shared("actor", "rollout"):
        return []
    spec, busy = placement.spec("rollout"), Ranges(())
    for component in placement.components:
        if component != "actor" and needs.of("rollout", component) > Residency.OFF:
            busy |= placement.accelerators(component)
    pool, used = placement.accelerators("actor"), placement.accelerators("rollout")
    idle = pool - busy
    if not idle:
        return []
    size = spec.accelerators_per_copy
    near = min((n for n in range(1, len(pool) + 1) if len(pool) % n == 0), key=lambda n: (abs(n - size), n))
    sized = f", tensor_parallel_size: {near}" if near > 1 else ""
    return [
        Problem(
            code="engines-leave-idle",
            key=spec.key,
            what=f"nobody uses accelerators {idle} of the actor while engines generate",
            got=spec.text,
            source=source_of(spec.key, sources),
            why=f"{len(used) // size} engines x {size} = {len(used)} accelerators, and the actor has {len(pool)}; "
            "libraries that colocate the two ask for the same number, here it works",
            fix=f"rollout: {{same_as: actor{sized}}}        ({len(pool) // near} engines x {near} = {len(pool)})",
        )
    ]


def _pairs(placement: HybridComponentPlacement) -> list[tuple[str, str]]:
    return [
        (a, b)
        for partner, leader in _PARTNERS
        for a in placement.components
        for b in placement.components
        if role_of(a) == partner and role_of(b) == leader
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What sharing saves against giving every component accelerators of its own, at the same sizes."""

    by_component: Mapping[str, int]  # accelerators each one uses
    used: int

    @property
    def dedicated(self) -> int:
        return sum(self.by_component.values())

    @property
    def saved(self) -> int:
        return self.dedicated - self.used

    def __str__(self) -> str:
        sizes = " + ".join(f"{component} {size}" for component, size in self.by_component.items() if size)
        return f"{self.used} accelerators instead of {self.dedicated} ({sizes})"


def count_savings(placement: HybridComponentPlacement) -> Savings:
    sizes = {c: len(placement.accelerators(c)) for c in placement.components}
    return Savings(by_component=sizes, used=len(placement.used))
