"""Rollout that runs ahead of learning: what is then resident, what it holds, and what may not take turns with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rlplace.contract.planning import memory_case
from rlplace.errors import PlacementError
from rlplace.placement import Plan
from rlplace.placement.memory.demands import HostPart, Part
from rlplace.placement.schedule import Residency, Schedule, schedule_of, text_needs
from rlplace.placement.show.svg import render_svg
from rlplace.placement.show.text import render_text
from rlplace.placement.show.view import render_json
from tests.unit.placement.placing import place
from tests.unit.placement.reports import shown
from tests.unit.placement.test_llm_channels import LEAVING, config, layout

APART = {"actor": "0-1", "env": "2", "rollout": "2-3"}


def ahead(placement: dict[str, Any], versions: int = 1, **blocks: Any) -> Plan:
    return layout(config(placement, algorithm={"max_staleness": versions}, **blocks))


def test_what_generates_stays_in_full_through_every_stage() -> None:
    plan = ahead(APART, **LEAVING)
    for row in plan.schedule.residency.values():
        assert row["env"] is row["rollout"] is Residency.FULL
    assert all(not (e.releases or e.acquires) for e in plan.schedule.entries.values())
    assert plan.schedule.active == {
        "sync": ("actor", "rollout"),
        "rollout": ("env", "rollout"),
        "learn": ("actor",),
    }
    assert ahead(APART, 0, **LEAVING).schedule.residency["sync"]["env"] is Residency.OFF


def test_the_plan_says_how_far_both_are_apart() -> None:
    plan = ahead(APART, 2)
    assert (
        "rollout || learn: rollout continues in every stage, at most 2 versions apart"
        in render_text(shown(plan))
    )
    assert "rollout \u2016 learn, at most 2 versions apart" in render_svg(shown(plan))
    assert render_json(shown(plan))["schedule"]["ahead"] == 2
    assert "ahead" not in render_json(shown(ahead(APART, 0)))["schedule"]


def test_the_samples_of_all_iterations_that_are_begun_have_room() -> None:
    rooms = [
        next(c for c in ahead(APART, n).channels if c.name == "samples") for n in (0, 2)
    ]
    assert [room.capacity_items for room in rooms] == [6, 18]


def test_the_hosts_of_env_keep_the_samples_that_may_not_be_learned_yet() -> None:
    def kept(ranks: str, versions: int) -> int:
        asked = config(
            {"actor": "0-1", "env": ranks, "rollout": "2-3"},
            algorithm={"max_staleness": versions},
        )
        (host,) = memory_case(layout(asked), asked).ledger().hosts
        return sum(
            hold.size_bytes
            for hold in host.loads[0].holds
            if hold.part is HostPart.SAMPLES
        )

    group = 6 * kept("2", 2) // 18
    assert group > 0
    assert [kept("2", 0), kept("2", 1), kept("2", 2), kept("2-3", 1)] == [
        0,
        2 * group,
        3 * group,
        2 * group,
    ]


def test_memory_is_counted_with_both_at_work() -> None:
    asked = config(
        {"actor": "0-1", "env": "2", "rollout": "0-1"}, algorithm={"max_staleness": 1}
    )
    ledger = memory_case(layout(asked), asked).ledger()
    (learn,) = [
        load
        for load in ledger.accelerators[0].loads
        if load.moment.stage == "learn" and not load.moment.entering
    ]
    parts = {(hold.component, hold.part) for hold in learn.holds}
    assert {
        ("rollout", Part.WORKSPACE),
        ("rollout", Part.KV_CACHE),
        ("actor", Part.GRADIENTS),
    } <= parts


def test_components_that_take_turns_cannot_work_at_once() -> None:
    with pytest.raises(PlacementError) as caught:
        ahead({"actor": "0-2", "env": "2", "rollout": "2-3"}, **LEAVING)
    (problem,) = caught.value.problems
    assert (problem.code, problem.key) == (
        "overlap-takes-turns",
        "algorithm.max_staleness",
    )
    assert "actor shares accelerators 2 with env, 2 with rollout" in (problem.why or "")


def early(
    placement: dict[str, Any], algorithm: dict[str, Any] | None = None, **blocks: Any
) -> Plan:
    return layout(
        config(
            placement,
            algorithm={"accumulate_early": True, **(algorithm or {})},
            **blocks,
        )
    )


def test_an_actor_of_its_own_accelerators_may_begin_in_rollout() -> None:
    asked = config(APART, algorithm={"accumulate_early": True}, **LEAVING)
    plan = layout(asked)
    assert plan.schedule.active["rollout"] == ("env", "rollout", "actor")
    assert plan.schedule.active["learn"] == ("actor",)
    assert plan.schedule.residency["rollout"]["actor"] is Residency.FULL
    loads = [
        load
        for account in memory_case(plan, asked).ledger().accelerators
        for load in account.loads
    ]
    working = {
        load.moment.stage
        for load in loads
        for hold in load.holds
        if hold.part is Part.GRADIENTS
    }
    assert working == {"rollout", "learn"}


@pytest.mark.parametrize(
    ("placement", "algorithm", "why"),
    [
        (
            {"actor": "0-2", "env": "2", "rollout": "3"},
            {},
            "env shares its accelerators",
        ),
        (APART, {"max_staleness": 1}, "engines go on while the actor learns"),
        (APART, {"epochs": 2}, "more than one optimizer step"),
        (APART, {"train_batch": 1}, "more than one optimizer step"),
        (APART, {"name": "reinforce_pp"}, "advantages depend on other groups"),
    ],
    ids=str,
)
def test_what_depends_on_other_groups_cannot_begin_early(
    placement: dict[str, Any], algorithm: dict[str, Any], why: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        early(placement, algorithm, **LEAVING)
    (problem,) = [
        problem for problem in caught.value.problems if problem.code == "learns-late"
    ]
    assert problem.key == "algorithm.accumulate_early"
    assert why in (problem.why or "")


def test_a_round_cannot_end_early_where_engines_go_on_meanwhile() -> None:
    with pytest.raises(PlacementError) as caught:
        early(APART, {"max_staleness": 1, "short_rounds": 2})
    (problem,) = [
        problem for problem in caught.value.problems if problem.code == "short-rounds"
    ]
    assert (problem.key, problem.fix) == ("algorithm.short_rounds", "short_rounds: 0")


def test_components_that_both_stay_may_share() -> None:
    plan = ahead({"actor": "0-2", "env": "3", "rollout": "2-3"})
    assert {row["actor"] for row in plan.schedule.residency.values()} == {
        Residency.FULL
    }


def test_a_scorer_keeps_up_with_rollout_only_where_no_component_ever_needs_its_place() -> (
    None
):
    def scored_by(**block: str) -> Schedule:
        placement = place(block)
        needs = dataclasses.replace(text_needs(placement.components), ahead=1)
        return schedule_of(placement, needs, dict.fromkeys(placement.components, True))

    assert (
        "reference"
        in scored_by(actor="0", env="1", rollout="1", reference="2").active["rollout"]
    )
    beside = scored_by(actor="0", env="1", rollout="1", reference="0")
    assert beside.active["infer 1"] == ("reference",)
    assert beside.residency["learn"]["reference"] is Residency.OFF
