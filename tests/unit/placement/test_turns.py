"""Which components run at once and which in turn, by the needs of an algorithm and their placement."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from rlplace.placement import HybridComponentPlacement, Topology
from rlplace.placement.schedule import (
    Residency,
    Schedule,
    base_stage,
    schedule_of,
    split_stages,
    text_needs,
)

OFF, WEIGHTS, FULL = Residency
Active = dict[str, tuple[str, ...]]


def placed(**block: object) -> HybridComponentPlacement:
    return HybridComponentPlacement(
        {"component_placement": block}, Topology.uniform(1, 8)
    )


def schedule(
    placement: HybridComponentPlacement,
    staying: Collection[str] = (),
    *,
    refreshed: bool = False,
) -> Schedule:
    needs = text_needs(placement.components, refreshed=refreshed)
    return schedule_of(
        placement, needs, {c: c not in staying for c in placement.components}
    )


def scored_by(plan: Schedule) -> Active:
    return {stage: active for stage, active in plan.active.items() if stage != "sync"}


EVERYWHERE = dict.fromkeys(("actor", "critic", "reference", "reward", "rollout"), "0-7")


@pytest.mark.parametrize(
    ("block", "active"),
    [
        (
            EVERYWHERE,
            {
                "rollout": ("rollout",),
                "infer 1": ("reference",),
                "infer 2": ("reward",),
                "infer 3": ("actor",),
                "infer 4": ("critic",),
                "learn 1": ("critic",),
                "learn 2": ("actor",),
            },
        ),
        (  # a scorer with accelerators of its own runs while samples are drawn
            {
                "actor": "0-3",
                "rollout": "0-3",
                "critic": "4-5",
                "reference": 6,
                "reward": 7,
            },
            {
                "rollout": ("rollout", "reference", "reward"),
                "infer": ("actor", "critic"),
                "learn": ("critic", "actor"),
            },
        ),
        (  # of two scorers on the same accelerators the first does
            {
                "actor": "0-3",
                "rollout": "0-3",
                "critic": "4-5",
                "reference": "6-7",
                "reward": "6-7",
            },
            {
                "rollout": ("rollout", "reference"),
                "infer": ("reward", "actor", "critic"),
                "learn": ("critic", "actor"),
            },
        ),
        (  # a critic that only partly overlaps the actor
            {
                "actor": "0-3",
                "critic": "2-5",
                "rollout": "6-7",
                "reference": "0-1",
                "reward": "4-5",
            },
            {
                "rollout": ("rollout", "reference", "reward"),
                "infer 1": ("actor",),
                "infer 2": ("critic",),
                "learn 1": ("critic",),
                "learn 2": ("actor",),
            },
        ),
        (  # rewards on no accelerator are in no component's way, and no critic learns
            {
                "actor": "0-7",
                "rollout": "0-7",
                "reference": "0-7",
                "reward.a": "cpu",
                "reward.b": "cpu",
            },
            {
                "rollout": ("rollout", "reward.a", "reward.b"),
                "infer 1": ("reference",),
                "infer 2": ("actor",),
                "learn": ("actor",),
            },
        ),
    ],
)
def test_turns_follow_from_the_placement(
    block: Mapping[str, object], active: Active
) -> None:
    plan = schedule(placed(**block))
    assert scored_by(plan) == active
    assert plan.stages == ("sync", *active)
    for stage, working in plan.active.items():
        assert all(
            plan.residency[stage][c] >= plan.needs.of(stage, c) > OFF for c in working
        )


def test_components_that_stay_take_no_turns() -> None:
    """Two that stay must fit together anyway, so they work at once."""
    plan = schedule(
        placed(actor="0-3", critic="0-3", rollout="4-7"), staying=("actor", "critic")
    )
    assert scored_by(plan) == {
        "rollout": ("rollout",),
        "infer": ("actor", "critic"),
        "learn": ("critic", "actor"),
    }
    assert all(not e.releases and not e.acquires for e in plan.entries.values())


def test_a_stage_in_which_all_began_early_is_no_stage() -> None:
    needs = text_needs(("actor", "rollout", "reward"), actor_infers=False)
    placement = placed(actor="0-3", rollout="4-7", reward="cpu")
    plan = schedule_of(placement, needs, dict.fromkeys(placement.components, True))
    assert scored_by(plan) == {"rollout": ("rollout", "reward"), "learn": ("actor",)}


def test_a_reference_that_is_refreshed_is_there_in_sync() -> None:
    plan = schedule(placed(**EVERYWHERE), refreshed=True)
    assert plan.active["sync"] == ("actor", "rollout", "reference")
    assert plan.residency["sync"]["reference"] is WEIGHTS
    alone = {"actor": "0-3", "rollout": "0-3", "critic": "0-3", "reference": "4-7"}
    assert schedule(placed(**alone), refreshed=True).active["sync"] == (
        "actor",
        "rollout",
        "reference",
    )
    assert schedule(placed(**EVERYWHERE)).active["sync"] == ("actor", "rollout")


def test_turns_are_taken_once() -> None:
    placement = placed(**EVERYWHERE)
    leaving = dict.fromkeys(placement.components, True)
    once = split_stages(text_needs(placement.components), placement, leaving)
    assert split_stages(once, placement, leaving) == once
    assert [base_stage(stage) for stage in once.stages] == [
        "sync",
        "rollout",
        *["infer"] * 4,
        *["learn"] * 2,
    ]
