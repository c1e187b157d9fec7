"""`process: shared`: which components share processes, and which cannot."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from rlplace.placement import Topology
from rlplace.placement.counts import dedicate
from tests.unit.placement.placing import TWO, place, problems

placed = partial(place, topology=TWO)
ROBOTS = [
    {
        "label": "arms",
        "node_ranks": 0,
        "hardware": {"type": "Arm", "configs": [{"node_rank": 0}]},
    }
]


def at(numbers: object, **more: object) -> dict[str, object]:
    return {"placement": numbers, "process": "shared", **more}


def test_ranks_at_one_place_live_in_one_process() -> None:
    placement = placed({"actor": "0-7", "env": at("0-3"), "rollout": at("0-3")})
    for component in ("env", "rollout"):
        assert [s.process for s in placement.slots(component)] == [
            f"env+rollout {rank}" for rank in range(4)
        ]
        assert placement.slots(component)[2].process == "env+rollout 2"
    assert {s.process for s in placement.slots("actor")} == {""}


@pytest.mark.parametrize(
    ("env", "rollout"),
    [
        (at("0-3,4-7"), at("0-7")),  # however it is written
        (at("0-1:0-3"), {"same_as": "env", "process": "shared"}),
        (at("0-7:0-1"), at([0, 1, 2, 3, 4, 5, 6, 7], accelerators_per_rank=4)),
        (at("0:0-1", node_group="node"), at("0:0-1", node_group="node")),
    ],
)
def test_places_are_compared_rank_by_rank(
    env: Mapping[str, object], rollout: Mapping[str, object]
) -> None:
    placement = placed({"env": env, "rollout": rollout})
    assert [s.process for s in placement.slots("env")] == [
        s.process for s in placement.slots("rollout")
    ]
    assert placement.slots("env")[1].process == "env+rollout 1"


def test_those_at_one_place_share() -> None:
    assert (
        placed({"env,rollout": at("0-3")}).slots("rollout")[0].process
        == "env+rollout 0"
    )
    several = placed({"a": at("0-1"), "b": at("2-3"), "c": at("2-3"), "d": at("0-1")})
    assert [several.slots(c)[0].process for c in "abcd"] == [
        "a+d 0",
        "b+c 0",
        "b+c 0",
        "a+d 0",
    ]
    assert placed({"env": {"placement": "0-3", "process": "own"}}).canonical() == {
        "env": "0-3"
    }


def test_processes_go_along_where_a_placement_is_used_again() -> None:
    placement = placed({"actor": "0-7", "env": at("0-3"), "rollout": at("0-3")})
    assert placement.canonical()["env"] == {"placement": "0-3", "process": "shared"}
    assert placed(placement.canonical()).slots("env") == placement.slots("env")
    elsewhere = placement.get_strategy("env").get_placement(Topology.uniform(1, 8))
    assert [s.process for s in elsewhere] == [f"env+rollout {r}" for r in range(4)]
    apart = dedicate(placement)
    assert apart is not None
    assert {s.process for c in ("env", "rollout") for s in apart.slots(c)} == {""}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (
            {"env": at("0-3"), "rollout": "0-3"},
            [("process-alone", "env", "rollout: {same_as: env, process: shared}")],
        ),
        ({"env": at("0-3")}, [("process-alone", "env", "process: own")]),
        (
            {"env": at("0-3"), "actor": "0-3"},
            [("process-alone", "env", "process: own")],
        ),
        (
            {"env": at("0-3"), "rollout": at("4-7")},
            [("process-apart", "rollout", "{same_as: env, process: shared}")],
        ),
        (
            {"env": at("0-3:0-7"), "rollout": at("0-3")},
            [("process-apart", "rollout", "same_as: env")],
        ),
        (
            {"env": at("0"), "b": at("0"), "c": at("1")},
            [("process-apart", "c", "c: {same_as: env")],
        ),
        (
            {"env": at("1"), "b": at("0"), "c": at("0")},
            [("process-apart", "env", "env: {same_as: b")],
        ),
        (
            {"env": at("0"), "b": at("1"), "c": at("2")},
            [("process-apart", c, "same_as: env") for c in "bc"],
        ),
        (
            {"actor": at("0-3"), "env": at("0-3")},
            [("process-of-its-own", "actor", "process: own")],
        ),
        (
            {"reward.math": at("0"), "env": at("0")},
            [("process-of-its-own", "reward.math", "process: own")],
        ),
        (
            {"env": at("0-3", process="yes")},
            [("bad-placement", "env", "process: shared")],
        ),
        (
            {"env": at("0-3", process=["shared"])},
            [("bad-placement", "env", "process: shared")],
        ),
        (
            {"env": at("0-3"), "rollout": at("0-99")},
            [("accelerator-out-of-range", "rollout", "<numbers")],
        ),  # one at a time
    ],
)
def test_what_cannot_share(
    block: Mapping[str, Any], expected: list[tuple[str, str, str]]
) -> None:
    found = problems(block, TWO)
    assert [
        (
            p.code,
            p.key.removeprefix("cluster.component_placement.").removesuffix(".process"),
        )
        for p in found
    ] == [
        (
            code,
            component
            if code != "accelerator-out-of-range"
            else f"{component}.placement",
        )
        for code, component, _ in expected
    ]
    for problem, (_, _, fix) in zip(found, expected, strict=True):
        assert problem.fix is not None
        assert fix in problem.fix


def test_a_process_has_the_runtime_environment_of_one_node_group() -> None:
    block = {"env": at(0, node_group="arms"), "rollout": at(0, node_group="node")}
    (problem,) = problems(block, TWO, node_groups=ROBOTS)
    assert problem.code == "process-apart"
