"""Changes of the placement during a run: what is refused before the start, and the plan of each part of the run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from rlplace.config.compose import with_hydra
from rlplace.errors import ConfigError, PlacementError, ProblemsError, Source
from rlplace.runtime.changes import job_after
from rlplace.runtime.prepare import Prepared, prepare


@functools.cache
def shipped() -> Mapping[str, Any]:
    (composed,) = with_hydra(["hybrid_ppo"])
    return composed.mapping


def job(changes: str, **blocks: Mapping[str, object]) -> Prepared:
    """Return the prepared job. `blocks`: block of the config -> keys that are replaced in it."""
    mapping: dict[str, Any] = dict(shipped())
    cluster = {"changes": yaml.safe_load(f"[{changes}]")}
    for name, keys in blocks.items():
        mapping[name] = {**mapping.get(name, {}), **keys}
    mapping["cluster"] = {**mapping["cluster"], **cluster}
    return prepare(mapping)


def change(after: int, places: str) -> str:
    return f"{{after: {after}, component_placement: {{{places}}}}}"


def places(prepared: Prepared) -> dict[str, str]:
    placement = prepared.plan.placement
    return {name: placement.spec(name).render() for name in placement.components}


def test_each_change_is_merged_over_the_placement_before() -> None:
    planned = job(f"{change(5, 'env: 0-7')}, {change(9, 'actor: 0-3')}")
    assert [each.after for each in planned.changes] == [5, 9]
    first, second = (each.job for each in planned.changes)
    assert places(planned) == {"actor": "0-7", "env": "0-3", "rollout": "4-7"}
    assert places(first) == {"actor": "0-7", "env": "0-7", "rollout": "4-7"}
    assert places(second) == {"actor": "0-3", "env": "0-7", "rollout": "4-7"}
    assert planned.mapping["cluster"]["changes"]
    assert second.config.cluster.changes == ()


@pytest.mark.parametrize(
    ("iterations", "env"), [(0, "0-3"), (4, "0-3"), (5, "0-7"), (8, "0-7"), (9, "0-1")]
)
def test_a_change_holds_from_the_iteration_after_it(iterations: int, env: str) -> None:
    planned = job(f"{change(5, 'env: 0-7')}, {change(9, 'env: 0-1')}")
    assert places(job_after(planned, iterations))["env"] == env


@pytest.mark.parametrize(
    ("changes", "faults", "key", "code"),
    [
        (
            f"{change(5, 'env: 0-7')}, {change(5, 'env: 0-1')}",
            {},
            "[1].after",
            "bad-change",
        ),
        (change(400, "env: 0-7"), {}, "[0].after", "bad-change"),
        (change(0, "env: 0-7"), {}, "[0].after", "out-of-bounds"),
        (
            change(5, "enw: 0-7"),
            {},
            "[0].component_placement.enw",
            "unknown-component",
        ),
        (change(5, "env: 0-3"), {}, "[0]", "bad-change"),
        (change(5, "env: 0-7"), {"on_node_loss": "replan"}, "", "bad-change"),
        (
            f"{change(5, 'env: 0-7')}, {change(9, 'rollout: 6-9')}",
            {},
            "[1].component_placement.rollout",
            "accelerator-out-of-range",
        ),
    ],
)
def test_a_change_is_refused_before_the_start(
    changes: str, faults: Mapping[str, object], key: str, code: str
) -> None:
    with pytest.raises(ProblemsError) as refused:
        job(changes, faults=faults)
    (problem,) = refused.value.problems
    assert (problem.key, problem.code) == (f"cluster.changes{key}", code)


def test_counts_that_do_not_divide_after_a_change_name_the_change() -> None:
    with pytest.raises((ConfigError, PlacementError)) as refused:
        job(change(50, "env: 0-2"))
    (problem,) = refused.value.problems
    assert problem.key == "env.total_num_envs"
    assert problem.what.startswith("after iteration 50: 128 environments do not divide")
    assert problem.fix == "choose other places: cluster.changes[0].component_placement"


@pytest.mark.parametrize("wrong", ["env: 0-8", "envv: 0-7"])
def test_the_fix_of_a_change_is_a_whole_list_that_can_be_pasted(wrong: str) -> None:
    with pytest.raises(ProblemsError) as refused:
        job(change(50, wrong))
    (problem,) = refused.value.problems
    assert problem.fix is not None
    (planned,) = yaml.safe_load(problem.fix)["changes"]
    assert planned == {"after": 50, "component_placement": {"env": "0-7"}}
    typed = dataclasses.replace(problem, source=Source(file="command line: changes"))
    assert typed.pasted == (
        "'cluster.changes=[{after: 50, component_placement: {env: 0-7}}]'"
    )


def test_memory_is_proven_after_each_change() -> None:
    accelerator = {"accelerator": {"kind": "emulated", "memory": 300 << 20}}
    planned = job(change(50, "env: 0-7"), cluster=accelerator)
    assert planned.view.fits
    assert planned.refused
    assert "after iteration 50: " in planned.shortages


def test_the_differences_of_all_changes_are_shown() -> None:
    planned = job(f"{change(5, 'env: 0-7')}, {change(9, 'env: 0-1')}")
    assert planned.changes_short.splitlines() == [
        "change after iteration 5: env 0-3 -> 0-7",
        "change after iteration 9: env 0-7 -> 0-1",
    ]
    text = planned.changes_text
    assert "change after iteration 5, diff: " in text
    assert "change after iteration 9, diff: " in text
    assert job("").changes_text == ""
