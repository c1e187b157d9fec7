"""Nodes that a run leaves: how they are named, what is refused, and the plan that is made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rlplace.errors import ConfigError, PlacementError, Problem
from rlplace.placement.plan import Plan
from rlplace.runtime.draining import node_named, plan_without
from tests.unit.test_changes import job

FOLDER = Path("runs/job/now")
NODES = {0: "10.0.0.1", 1: "10.0.0.2", 2: "10.0.0.3", 3: "10.0.0.3"}


@pytest.mark.parametrize(("text", "node"), [("1", 1), ("10.0.0.2", 1), ("3", 3)])
def test_a_node_is_named_by_its_number_or_its_address(text: str, node: int) -> None:
    assert node_named(text, NODES, FOLDER) == node


@pytest.mark.parametrize("text", ["4", "10.0.0.3", "", "node 1"])
def test_another_name_is_refused_with_all_nodes(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        node_named(text, NODES, FOLDER)
    (problem,) = refused.value.problems
    assert problem.code == "bad-drain"
    assert problem.why is not None
    assert "1 (10.0.0.2)" in problem.why
    assert problem.fix == "python -m rlplace.drain runs/job/now 3"


def on_two_nodes(**places: str) -> Plan:
    block = {"actor": "0-3", "env": "0-3", "rollout": "4-7", **places}
    cluster = {
        "num_nodes": 2,
        "accelerators_per_node": 4,
        "component_placement": block,
    }
    return job("", cluster=cluster).plan


class Planner:
    """Refuses places until `right` come, and keeps all that it was asked for."""

    def __init__(self, right: Mapping[str, object] | None = None) -> None:
        self.right = right
        self.asked: list[Mapping[str, object]] = []

    def __call__(self, places: Mapping[str, object]) -> str:
        self.asked.append(places)
        if places != self.right:
            what = f"does not fit: {places}"
            wrong = Problem(code="does-not-fit", key="cluster", what=what)
            raise PlacementError([wrong])
        return "planned"


def test_the_first_placement_that_can_be_planned_is_taken() -> None:
    planner = Planner({"rollout": "0-1"})
    found = plan_without(on_two_nodes(), 1, (), FOLDER, planner)
    assert found == "planned"
    assert planner.asked == [{"rollout": "0-3"}, {"rollout": "0-1"}]


def test_a_run_that_fits_nowhere_else_is_told_why() -> None:
    with pytest.raises(ConfigError) as refused:
        plan_without(on_two_nodes(), 1, (), FOLDER, Planner())
    (problem,) = refused.value.problems
    assert problem.code == "bad-drain"
    assert problem.why is not None
    assert "of 3 placements on the other nodes none can be planned" in problem.why
    assert "does not fit: {'rollout': '0-3'}" in problem.why


def test_a_component_without_another_place_is_named() -> None:
    with pytest.raises(ConfigError) as refused:
        plan_without(on_two_nodes(), 1, {0}, FOLDER, Planner())
    (problem,) = refused.value.problems
    assert problem.why == "rollout has no place on the other nodes"
