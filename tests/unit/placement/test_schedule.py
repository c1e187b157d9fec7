"""Residency and moves derived from needs, sharing and offload."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlplace.errors import Problem
from rlplace.placement import HybridComponentPlacement, Topology
from rlplace.placement.schedule import SIMULATOR_NEEDS, Residency, Schedule, find_clashes, schedule_of

OFF, WEIGHTS, FULL = Residency.OFF, Residency.WEIGHTS, Residency.FULL
ALL = ("actor", "env", "rollout")


def placed(actor: str, env: str, rollout: str) -> HybridComponentPlacement:
    block = {"actor": actor, "env": env, "rollout": rollout}
    return HybridComponentPlacement({"component_placement": block}, Topology.uniform(1, 8))


def schedule(placement: HybridComponentPlacement, offload: Sequence[str]) -> Schedule:
    return schedule_of(placement, SIMULATOR_NEEDS, {c: c in offload for c in ALL})


def clashes(placement: HybridComponentPlacement, offload: Sequence[str], allow: Sequence[str] = ()) -> list[Problem]:
    return list(find_clashes(placement, SIMULATOR_NEEDS, {c: c in offload for c in ALL}, allow, {}))


@pytest.mark.parametrize("offload", [(), ALL])
def test_disjoint_sets_never_move(offload: Sequence[str]) -> None:
    plan = schedule(placed("0-3", "4-5", "6-7"), offload)
    assert all(held is FULL for row in plan.residency.values() for held in row.values())
    assert all(entry.releases == entry.acquires == () for entry in plan.entries.values())
    assert {m.component for m in plan.first.acquires} == set(ALL)


def test_only_components_that_share_move() -> None:
    plan = schedule(placed("0-3", "0-3", "4-7"), ALL)
    assert {m.component for e in plan.entries.values() for m in (*e.releases, *e.acquires)} == {"actor", "env"}


def test_a_resident_in_the_way_is_named_with_those_it_hinders() -> None:
    (problem,) = clashes(placed("0-7", "0-3", "4-7"), ("env", "rollout"))
    assert (problem.code, problem.key) == ("residents-clash", "actor.enable_offload")
    assert "env and rollout" in problem.what
    assert str(problem.fix).startswith("actor.enable_offload: true")
    assert "cluster.allow_resident: [actor]" in str(problem.fix)


def test_each_resident_in_the_way_is_a_problem_of_its_own() -> None:
    found = clashes(placed("0-7", "0-3", "4-7"), ())
    assert [p.key.partition(".")[0] for p in found] == ["actor", "env", "rollout"]


def test_allowed_residents_stay() -> None:
    assert not clashes(placed("0-7", "0-3", "4-7"), ("env", "rollout"), allow=["actor"])
    plan = schedule(placed("0-7", "0-3", "4-7"), ("env", "rollout"))
    assert {plan.residency[s]["actor"] for s in plan.stages} == {FULL}
    assert plan.residency["learn"]["rollout"] is OFF


def test_env_and_rollout_may_share_since_one_stage_needs_both() -> None:
    assert not clashes(placed("0-3", "4-7", "4-7"), ())
