"""Rules for components of language models that score another component's rows, and for engines beside the actor."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks import machines, names, waste
from rlplace.checks.rule import Found, Rule, at_line, broken
from rlplace.errors import Problem
from rlplace.placement.language.hybrid import COLLOCATED, HybridComponentPlacement
from rlplace.placement.language.spec import role_of
from rlplace.placement.machines.topology import Ranges
from rlplace.placement.plan import Placed, Rules, weight_routes
from rlplace.placement.schedule import Residency

# Role -> the role whose ranks hold the rows that it scores.
PARTNERS = {
    "reference": "actor",
    "reward": "critic",
}


def _partners(placement: HybridComponentPlacement) -> list[tuple[str, str]]:
    """Return the pairs (component, leader) that share accelerators, where the component scores the rows of the
    leader.
    """
    return [
        (a, b)
        for partner, leader in PARTNERS.items()
        for a in placement.components
        for b in placement.components
        if role_of(a) == partner and role_of(b) == leader and placement.shared(a, b)
    ]


def _uneven(case: Placed) -> Iterator[Found]:
    """Yield a finding for each pair (component, leader) in which neither component's number of ranks divides the
    other's.

    The component scores the leader's rows and shares accelerators with it.
    """
    placement = case.placement
    for partner, leader in _partners(placement):
        ranks = placement.world_size(partner)
        others = placement.world_size(leader)
        if ranks % others and others % ranks:
            yield at_line(
                placement.spec(partner),
                partner=partner,
                leader=leader,
                ranks=ranks,
                others=others,
            )


def _unequal(case: Placed) -> Iterator[Found]:
    """Yield a finding for each pair (component, leader) that shares only some of its accelerators.

    The component scores the leader's rows.
    """
    placement = case.placement
    for partner, leader in _partners(placement):
        if placement.relation(partner, leader) == COLLOCATED:
            continue
        yield at_line(
            placement.spec(partner),
            partner=partner,
            leader=leader,
            own=len(placement.accelerators(partner)),
            others=len(placement.accelerators(leader)),
            shared=len(placement.shared(partner, leader)),
        )


def _actor_shares_with_engines(case: Placed) -> bool:
    placement = case.placement
    both = {"actor", "rollout"} <= {*placement.components}
    return both and bool(placement.shared("actor", "rollout"))


def _idle_beside_engines(case: Placed) -> Iterator[Found]:
    """Yield one finding if the actor has accelerators that no other component uses while the engines generate. `case`:
    the placement of the job, with its cluster.
    """
    placement = case.placement
    busy = Ranges(())
    for component in placement.components:
        works = case.active.of("rollout", component) > Residency.OFF
        if component != "actor" and works:
            busy |= placement.accelerators(component)
    spec = placement.spec("rollout")
    pool = placement.accelerators("actor")
    used = placement.accelerators("rollout")
    idle = pool - busy
    if not idle:
        return
    # The size of engine nearest to this one with which engines fill the actor's accelerators
    size = spec.accelerators_per_copy
    fitting = [n for n in range(1, len(pool) + 1) if len(pool) % n == 0]
    near = min(fitting, key=lambda n: (abs(n - size), n))
    error = "engines-of-one"
    if near > 1:
        error = "engines-of-several"
    yield at_line(
        spec,
        error,
        idle=idle,
        engines=len(used) // size,
        size=size,
        used=len(used),
        pool=len(pool),
        near=near,
        fitting=len(pool) // near,
    )


RULES = (Rule(code="uneven-partners", facts=_uneven),)
WARNINGS = (
    Rule(code="unequal-partners", facts=_unequal),
    Rule(
        code="engines-leave-idle",
        applies=_actor_shares_with_engines,
        facts=_idle_beside_engines,
    ),
)


def _check_block(placed: Placed) -> Iterator[Problem]:
    return broken((*names.RULES, *RULES), placed)


def _waste_of_block(placed: Placed) -> Iterator[Problem]:
    yield from broken((*waste.WARNINGS, *WARNINGS), placed)
    yield from broken(machines.WARNINGS, placed.cluster)


# What a cluster block of roles of language models has to keep, without the rest of a config
OF_BLOCK = Rules(check=_check_block, waste=_waste_of_block, routes=weight_routes)
