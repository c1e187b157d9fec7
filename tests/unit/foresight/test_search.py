"""Searches leave out most plans of a usual job; that they find the best is tests/property/test_search_oracle.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rlplace.config import compose
from rlplace.contract.planning import make_plan
from rlplace.errors import ConfigError
from rlplace.foresight import answer as answers
from rlplace.foresight.bounds import Bounds
from rlplace.foresight.costs import Costs
from rlplace.foresight.loads import Mode, Size
from rlplace.foresight.predict import Prediction, predict
from rlplace.foresight.search import Search
from rlplace.foresight.space import Layout, Space
from rlplace.runtime.prepare import Prepared, prepare_composed
from tests.foresight_profiles import usual_profile


def prepared(*words: str) -> Prepared:
    (composed,) = compose.with_hydra(["--config-name", "hybrid_ppo", *words])
    return prepare_composed(composed)


def test_few_plans_of_a_usual_job_have_to_be_predicted() -> None:
    job = prepared()
    search = Search(Space(job.config, job.plan), usual_profile())
    answer = search.run(keep=1)
    assert answer.proven
    assert answer.best is not None
    assert answer.gap == 0.0
    assert answer.counts["predicted"] <= 12
    assert answer.current is not None
    assert answer.best.value < answer.current.value
    again = Search(search.space, usual_profile()).run(keep=1)
    assert again.best is not None
    assert again.best.layout == answer.best.layout
    assert again.counts == answer.counts


def test_without_time_the_plan_of_the_config_has_a_gap() -> None:
    job = prepared()
    answer = Search(Space(job.config, job.plan), usual_profile()).run(over=lambda: True)
    assert answer.best is answer.current
    assert not answer.proven
    assert 0.0 < answer.gap < 1.0


def test_a_search_whose_time_ends_goes_down_to_no_further_plan() -> None:
    job = prepared()
    times = iter([False])  # once it is not over
    answer = Search(Space(job.config, job.plan), usual_profile()).run(
        over=lambda: next(times, True)
    )
    assert answer.counts["branches"] == answer.counts["planned"] == 1
    assert answer.best is answer.current
    assert 0.0 < answer.gap < 1.0


def test_what_would_turn_the_choice_is_found_out_within_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, calls = prepared(), list[object]()

    def counted(*given: Any) -> Prediction:
        calls.append(given)
        return predict(*given)

    search = Search(Space(job.config, job.plan), usual_profile())
    best, *others = search.run().found[:3]
    monkeypatch.setattr(answers, "predict", counted)
    told = list(
        answers.turns(
            search, best, others, lambda _, seconds: seconds, lambda: len(calls) > 30
        )
    )
    assert 0 < len(told) < answers.COSTS
    assert len(calls) <= 30 + 3


def test_alike_accelerators_and_nodes_are_tried_once() -> None:
    job = prepared("cluster.num_nodes=3", "cluster.accelerators_per_node=4")
    space = Space(job.config, job.plan)
    (_, half), (other, _) = space.places(
        space.empty, "actor", 2
    )  # on the driver's node, or on one of the others
    assert other == 4
    starts = [start for start, _ in space.places(half, "env", 2)]
    assert starts == [0, 2, 4]  # with the actor, beside it, on another node
    assert [start for start, _ in space.places(half, "env", 8)] == [
        0,
        4,
    ]  # with the driver's node, and without


def test_components_that_are_fixed_and_numbers_of_accelerators_bound_the_space() -> (
    None
):
    job = prepared()
    space = Space(job.config, job.plan, fixed=["actor"], accelerators=[8])
    answer = Search(space, usual_profile()).run()
    for found in answer.found:
        assert found.used == 8
        assert str(found.plan.placement.accelerators("actor")) == "0-7"
    with pytest.raises(ConfigError, match="no such component"):
        Space(job.config, job.plan, fixed=["acto"])
    with pytest.raises(ConfigError, match="there are not so many"):
        Space(job.config, job.plan, accelerators=[9])


def test_plans_that_do_not_fit_and_costs_that_were_not_measured_are_left_out() -> None:
    job = prepared(
        "cluster.accelerator.memory=280MiB"
    )  # of env 256 MiB, of rollout 64 MiB
    profile = usual_profile()
    answer = Search(Space(job.config, job.plan), profile).run()
    assert answer.counts["refused by memory"] > 0
    for found in answer.found:
        assert found.margin_bytes is not None
        assert found.margin_bytes >= 0
        together = found.plan.placement.shared("env", "rollout")
        assert not together, "in rollout both are there in full"
    costs = {
        name: curve
        for name, curve in profile.costs.items()
        if not name.startswith("env.move")
    }
    answer = Search(
        Space(job.config, job.plan), dataclasses.replace(profile, costs=costs)
    ).run()
    assert answer.lacking["env.move_full/rest"] > 0
    assert answer.current is None
    for found in answer.found:
        assert all(
            move.component != "env"
            for entry in found.plan.schedule.entries.values()
            for move in entry.acquires
        )


def test_changes_are_the_lines_that_differ() -> None:
    job = prepared("cluster.component_placement.rollout={same_as: env}")
    space = Space(job.config, job.plan)
    layout = space.current()
    assert space.changes(layout) == {"cluster.component_placement.rollout": "0-3"}
    moved = dataclasses.replace(
        layout,
        mode=Mode(1, False),
        sizes={**layout.sizes, "env": Size(1, 1)},
        starts={**layout.starts, "env": 2},
    )
    found = space.changes(dataclasses.replace(moved, stays=("env",)))
    assert found == {
        "cluster.component_placement.env": 2,
        "cluster.component_placement.rollout": "0-3",
        "rollout.pipeline_stage_num": 1,
        "env.enable_offload": False,
        "cluster.allow_resident": ["env"],
    }


def test_a_process_that_is_shared_on_one_accelerator_is_where_it_is_told() -> None:
    job = prepared()
    space = Space(job.config, job.plan)
    sizes, starts = {**space.current().sizes}, {**space.current().starts}
    for component in ("env", "rollout"):
        sizes[component], starts[component] = Size(1, 1), 5
    config = space.config_of(Layout(mode=Mode(1, True), sizes=sizes, starts=starts))
    placement = make_plan(config, job.plan.topology).placement
    assert [str(placement.accelerators(c)) for c in ("actor", "env", "rollout")] == [
        "0-7",
        "5",
        "5",
    ]


def test_the_bound_of_a_usual_job_is_near() -> None:
    job, profile = prepared(), usual_profile()
    space = Space(job.config, job.plan)
    layout = space.current()
    bounds = Bounds(job.config, job.plan, Costs(profile))
    bound = sum(
        bounds.of_stages(
            job.plan.schedule, layout.mode, layout.sizes, space.spread(layout)
        )
    )
    assert 0.9 < bound / predict(job.config, job.plan, job.case, profile).seconds <= 1.0
