"""Searches find what trying every placement finds, and leave out most of it."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rlplace.config import compose
from rlplace.config.schema import Config
from rlplace.errors import ConfigError, ProblemsError
from rlplace.foresight.bounds import Bounds
from rlplace.foresight.costs import Costs
from rlplace.foresight.loads import Mode, Size
from rlplace.foresight.predict import Prediction, predict
from rlplace.foresight.search import Search
from rlplace.foresight.space import Layout, Space
from rlplace.placement.memory.case import memory_case
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan, make_plan
from rlplace.prepare import Prepared, prepare_composed
from tests.foresight_profiles import random_profile, usual_profile


def prepared(*words: str) -> Prepared:
    (composed,) = compose.with_hydra(["--config-name", "hybrid_ppo", *words])
    return prepare_composed(composed)


SMALL = (
    "cluster.accelerators_per_node=3",
    "env.total_num_envs=12",
    *(f"cluster.component_placement.{c}=0" for c in ("actor", "env", "rollout")),
)


def every_layout(space: Space) -> Iterator[Layout]:
    """Yield all intervals of all components, whether alike or not."""
    count = space.plan.topology.num_accelerators
    for mode in space.modes:
        sizes = space.sizes(mode)
        if not all(sizes.values()):
            continue
        choices = [
            [(component, size, start) for size in sizes[component] for start in range(count - size.accelerators + 1)]
            for component in space.free
        ]
        for chosen in itertools.product(*choices):
            layout = Layout(
                mode=mode, sizes={c: size for c, size, _ in chosen}, starts={c: start for c, _, start in chosen}
            )
            if mode.shared and len({(size, start) for c, size, start in chosen if c != "actor"}) > 1:
                continue
            for number in range(4):
                for stays in itertools.combinations(space.free, number):
                    yield dataclasses.replace(layout, stays=stays)


class Invented(Search):
    """Predicts at least the bound, by a number drawn for all plans that take as long."""

    seed = 0

    def predict(self, config: Config, plan: Plan, case: MemoryCase, layout: Layout) -> Prediction:
        key = self.key(plan.schedule, layout)
        if key not in self.predicted:
            off = random.Random(f"{self.seed} {key}").choice([1.0, 1.01, 1.3])
            found: Any = SimpleNamespace(seconds=self.bound(layout, plan.schedule) * off)
            self.predicted[key] = found
        return self.predicted[key]


@pytest.mark.parametrize("tries", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_the_best_is_that_of_all_placements(tries: int) -> None:
    job = prepared(*SMALL)
    space = Space(job.config, job.plan)
    known: dict[object, tuple[Layout, Plan]] = {}
    keys = Search(space, usual_profile())
    for layout in every_layout(space):
        config = space.config_of(layout)
        try:
            plan = make_plan(config, job.plan.topology)
        except ProblemsError:
            continue
        if memory_case(plan, config).ledger().fits:
            known.setdefault((keys.key(plan.schedule, layout), len(plan.placement.used)), (layout, plan))
    assert len(known) > 300
    for seed in range(tries):
        objective = ("seconds", "accelerator_seconds")[seed % 2]
        search = Invented(space, random_profile(random.Random(seed)))
        search.seed = seed
        answer = search.run(objective=objective, keep=3)
        worth = {}
        for (key, used), (layout, plan) in known.items():
            seconds = search.predict(job.config, plan, job.case, layout).seconds
            value = seconds * used if objective == "accelerator_seconds" else seconds
            worth[key] = min(value, worth.get(key, value))
        assert answer.proven
        assert [f.value for f in answer.found] == pytest.approx(sorted(worth.values())[: len(answer.found)])


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


def test_alike_accelerators_and_nodes_are_tried_once() -> None:
    job = prepared("cluster.num_nodes=3", "cluster.accelerators_per_node=4")
    space = Space(job.config, job.plan)
    (_, half), (other, _) = space.places(space.empty, "actor", 2)  # on the driver's node, or on one of the others
    assert other == 4
    starts = [start for start, _ in space.places(half, "env", 2)]
    assert starts == [0, 2, 4]  # with the actor, beside it, on another node
    assert [start for start, _ in space.places(half, "env", 8)] == [0, 4]  # with the driver's node, and without


def test_components_that_are_fixed_and_numbers_of_accelerators_bound_the_space() -> None:
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
    job = prepared("cluster.accelerator.memory=280MiB")  # of env 256 MiB, of rollout 64 MiB
    profile = usual_profile()
    answer = Search(Space(job.config, job.plan), profile).run()
    assert answer.counts["refused by memory"] > 0
    for found in answer.found:
        assert found.margin_bytes is not None
        assert found.margin_bytes >= 0
        together = found.plan.placement.shared("env", "rollout")
        assert not together, "in rollout both are there in full"
    costs = {name: curve for name, curve in profile.costs.items() if not name.startswith("env.move")}
    answer = Search(Space(job.config, job.plan), dataclasses.replace(profile, costs=costs)).run()
    assert answer.lacking["env.move_full/rest"] > 0
    assert answer.current is None
    for found in answer.found:
        assert all(move.component != "env" for entry in found.plan.schedule.entries.values() for move in entry.acquires)


def test_changes_are_the_lines_that_differ() -> None:
    job = prepared("cluster.component_placement.rollout={same_as: env}")
    space = Space(job.config, job.plan)
    layout = space.current()
    assert space.changes(layout) == {"cluster.component_placement.rollout": "0-3"}
    moved = dataclasses.replace(
        layout, mode=Mode(1, False), sizes={**layout.sizes, "env": Size(1, 1)}, starts={**layout.starts, "env": 2}
    )
    found = space.changes(dataclasses.replace(moved, stays=("env",)))
    assert found == {
        "cluster.component_placement.env": 2,
        "cluster.component_placement.rollout": "0-3",
        "rollout.pipeline_stage_num": 1,
        "env.enable_offload": False,
        "cluster.allow_resident": ["env"],
    }


def test_the_bound_of_a_usual_job_is_near() -> None:
    job, profile = prepared(), usual_profile()
    space = Space(job.config, job.plan)
    layout = space.current()
    bounds = Bounds(job.config, job.plan.topology, Costs(profile))
    bound = bounds.of_plan(job.plan.schedule, layout.mode, layout.sizes, space.spread(layout))
    assert 0.9 < bound / predict(job.config, job.plan, job.case, profile).seconds <= 1.0
