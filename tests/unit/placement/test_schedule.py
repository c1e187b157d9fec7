"""Components that stay where others need the room: each is named, unless the config allows it."""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.errors import Problem
from rlplace.jobs.simulator.plan import SIMULATOR_NEEDS
from rlplace.placement import HybridComponentPlacement
from rlplace.placement.schedule import (
    Residency,
    find_clashes,
    schedule_of,
    setup_order,
)
from tests.unit.placement.placing import place

HYBRID = place({"actor": "0-7", "env": "0-3", "rollout": "4-7"})
BOTH_LEAVE = {"actor": False, "env": True, "rollout": True}
ALL_STAY = dict.fromkeys(BOTH_LEAVE, False)


def clashes(
    placement: HybridComponentPlacement,
    offload: dict[str, bool],
    allow: Sequence[str] = (),
) -> list[Problem]:
    return list(find_clashes(placement, SIMULATOR_NEEDS, offload, allow, {}))


def test_a_resident_in_the_way_is_named_with_those_it_hinders() -> None:
    (problem,) = clashes(HYBRID, BOTH_LEAVE)
    assert (problem.code, problem.key) == ("residents-clash", "actor.enable_offload")
    assert "env and rollout" in problem.what
    assert str(problem.fix).startswith("actor.enable_offload: true")
    assert "cluster.allow_resident: [actor]" in str(problem.fix)


def test_each_resident_in_the_way_is_a_problem_of_its_own() -> None:
    assert [p.key.partition(".")[0] for p in clashes(HYBRID, ALL_STAY)] == [
        "actor",
        "env",
        "rollout",
    ]


def test_allowed_residents_stay() -> None:
    assert not clashes(HYBRID, BOTH_LEAVE, allow=["actor"])
    plan = schedule_of(HYBRID, SIMULATOR_NEEDS, BOTH_LEAVE)
    assert {plan.residency[s]["actor"] for s in plan.stages} == {Residency.FULL}
    assert plan.residency["learn"]["rollout"] is Residency.OFF


def test_env_and_rollout_may_share_since_one_stage_needs_both() -> None:
    assert not clashes(
        place({"actor": "0-3", "env": "4-7", "rollout": "4-7"}), ALL_STAY
    )


def test_engines_are_set_up_first_and_each_after_those_that_share_with_it() -> None:
    order = setup_order(
        {
            "actor": range(8),
            "critic": range(4),
            "env": (),
            "rollout": range(4, 8),
            "reward": [9],
        }
    )
    assert list(order) == ["rollout", "actor", "critic", "env", "reward"]
    assert order == {
        "rollout": (),
        "actor": ("rollout",),
        "critic": ("actor",),
        "env": (),
        "reward": (),
    }
