"""Node groups: relative numbers, several groups, nodes, robots, environments, and everything wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.read import read_config
from rlplace.errors import PlacementError, Problem
from rlplace.placement import (
    FlexiblePlacementStrategy,
    HybridComponentPlacement,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Topology,
)
from rlplace.placement.language.group_blocks import read_node_groups
from tests.unit.placement import placing

FRANKA = {
    "type": "Franka",
    "configs": [
        {"robot_ip": "10.10.10.2", "node_rank": 4, "camera_serials": ["3", "4"]},
        {"robot_ip": "10.10.10.1", "node_rank": 3},
        {"robot_ip": "10.10.10.3", "node_rank": 4},
    ],
}
GROUPS: list[dict[str, Any]] = [
    {
        "label": "a800",
        "node_ranks": "0-1",
        "env_configs": [
            {"node_ranks": 0, "python_interpreter_path": "/opt/venv/bin/python3"},
            {
                "node_ranks": 1,
                "env_vars": [{"GLOO_SOCKET_IFNAME": "eth0"}, {"OMP_NUM_THREADS": 1}],
            },
        ],
    },
    {"label": 4090, "node_ranks": [2]},
    {"label": "franka", "node_ranks": "3-4", "hardware": FRANKA},
    {"label": "cpu", "node_ranks": 5},
    {"label": "idle", "node_ranks": "0-1", "ignore_hardware": True},
]
# Nodes 0 and 1 with 8 accelerators, 2 with 4, robots at 3 and 4, 5 without anything.
MIXED = Topology.uneven([8, 8, 4, 0, 0, 0])


def place(block: Mapping[str, Any]) -> HybridComponentPlacement:
    return placing.place(block, MIXED, node_groups=GROUPS)


def problems(
    block: Mapping[str, Any], groups: Sequence[object] = GROUPS
) -> tuple[Problem, ...]:
    return placing.problems(block, MIXED, node_groups=groups)


def in_group(group: object, placement: object, **more: Any) -> dict[str, Any]:
    return {"actor": {"node_group": group, "placement": placement, **more}}


def test_numbers_are_relative_to_the_group() -> None:
    slots = place(in_group(4090, "0-3:0-1")).slots("actor")
    assert [
        (s.node, s.accelerators, s.local_accelerators, s.node_group) for s in slots
    ] == [
        (2, (16, 17), (0, 1), "4090"),
        (2, (18, 19), (2, 3), "4090"),
    ]


@pytest.mark.parametrize(
    "group", ["4090,a800", " 4090 , a800", ["4090", "a800"], [4090, "a800"]]
)
def test_several_groups_are_joined_in_written_order(group: object) -> None:
    placement = place(in_group(group, "2-11"))
    assert [s.accelerators[0] for s in placement.slots("actor")] == [18, 19, *range(8)]
    assert [s.node_group for s in placement.slots("actor")][1:3] == ["4090", "a800"]
    assert str(placement.accelerators("actor")) == "0-7,18-19"
    assert placement.spec("actor").canonical() == {
        "node_group": "4090,a800",
        "placement": "2-11",
    }
    assert [s.local_rank for s in placement.slots("actor")][1:3] == [1, 0]


def test_a_rank_never_lies_in_two_groups() -> None:
    (problem,) = problems(in_group("a800,4090", "12-19:0"))
    assert (problem.code, problem.key) == (
        "rank-spans-nodes",
        "cluster.component_placement.actor.placement",
    )
    assert place(in_group("a800,4090", "12-19:0-1")).world_size("actor") == 2


def test_the_node_group_places_on_nodes() -> None:
    placement = place(
        {"actor": "0-7", "agent": {"node_group": "node", "placement": "0-1:0-3,4:4-5"}}
    )
    slots = placement.slots("agent")
    assert [(s.node, s.local_rank) for s in slots] == [
        (n, r) for n in (0, 1, 4) for r in (0, 1)
    ]
    assert not any(s.accelerators for s in slots)
    assert not placement.accelerators("agent")
    assert placement.relation("actor", "agent") == "disaggregated"
    (problem,) = problems({"agent": {"node_group": "node", "placement": "0-1:0"}})
    assert (problem.code, problem.fix) == (
        "rank-spans-nodes",
        "placement: 0-1        (1 node for each rank)",
    )
    assert (
        problems({"agent": {"node_group": "node", "placement": "0-6"}})[0].code
        == "node-out-of-range"
    )


def test_robots_are_numbered_by_node_and_come_with_their_config() -> None:
    slots = place(in_group("franka", "0-2:0-2")).slots("actor")
    assert [(s.node, s.hardware[0].config["robot_ip"]) for s in slots] == [
        (3, "10.10.10.1"),
        (4, "10.10.10.2"),
        (4, "10.10.10.3"),
    ]
    assert place(in_group("franka", "1-2:0")).slots("actor")[0].hardware[1].number == 2
    # Calls of a run are counted by slot.
    assert len(set(slots)) == 3
    (problem,) = problems(in_group("franka", "0-3"))
    assert problem.what == "Franka 3 does not exist"
    assert "node group franka has 3 Frankas" in str(problem.why)
    assert problems(in_group("franka", "0-1:0"))[0].code == "rank-spans-nodes"


def test_groups_without_accelerators_count_nodes() -> None:
    assert [s.node for s in place(in_group("cpu", "0:0-1")).slots("actor")] == [5, 5]
    slots = place(in_group("idle", "all", ranks_per_accelerator=2)).slots("actor")
    assert [(s.node, s.accelerators) for s in slots] == [
        (0, ()),
        (0, ()),
        (1, ()),
        (1, ()),
    ]
    assert [
        s.node
        for s in place(in_group("node", 2) | {"env": {"same_as": "actor"}}).slots("env")
    ] == [2]
    assert [
        s.node
        for s in place({"env": {"node_group": "node", "accelerators": 2}}).slots("env")
    ] == [0, 1]


def test_runtime_environments_reach_the_slots() -> None:
    slots = place(in_group("a800", "7-8")).slots("actor")
    assert slots[0].runtime_env.interpreter == "/opt/venv/bin/python3"
    assert slots[1].runtime_env.env_vars == (
        ("GLOO_SOCKET_IFNAME", "eth0"),
        ("OMP_NUM_THREADS", "1"),
    )
    assert place({"actor": "7"}).slots("actor")[0].runtime_env.env_vars == ()


@pytest.mark.parametrize(
    ("group", "code", "fix"),
    [
        ("a80", "unknown-node-group", "node_group: <one of these>"),
        ("a800,409", "unknown-node-group", "node_group: <one of these>"),
        ("h100", "unknown-node-group", "node_group: <one of these>"),
        ("", "unknown-node-group", None),
        ("a800,a800", "node-group-repeated", "node_group: a800"),
        ("a800,franka", "mixed-node-groups", "node_group: a800"),
        ("a800,cluster", "overlapping-node-groups", "node_group: a800"),
    ],
)
def test_groups_that_cannot_be_meant(group: str, code: str, fix: str | None) -> None:
    (problem,) = problems(in_group(group, "0-3"))
    assert (problem.code, problem.key) == (
        code,
        "cluster.component_placement.actor.node_group",
    )
    assert fix is None or problem.fix == fix


def declared(**changes: Any) -> list[dict[str, Any]]:
    return [{"label": "a800", "node_ranks": "0-1"} | changes]


@pytest.mark.parametrize(
    ("changes", "code", "key"),
    [
        ({"nodes": 1}, "unknown-key", ".nodes"),
        ({"label": None}, "bad-label", ".label"),
        ({"label": ["x"]}, "bad-label", ".label"),
        ({"label": "node"}, "bad-label", ".label"),
        ({"label": "a,b"}, "bad-label", ".label"),
        ({"node_ranks": None}, "empty-placement", ".node_ranks"),
        ({"node_ranks": "0-9"}, "node-out-of-range", ".node_ranks"),
        ({"node_ranks": "0\u20131"}, "not-a-hyphen", ".node_ranks"),
        ({"node_ranks": "0-1:0-3"}, "bad-placement", ".node_ranks"),
        ({"env_configs": "x"}, "bad-env-config", ".env_configs"),
        ({"env_configs": ["x"]}, "bad-env-config", ".env_configs[0]"),
        ({"env_configs": [{"envs": 1}]}, "unknown-key", ".env_configs[0].envs"),
        (
            {"env_configs": [{"node_ranks": "0-2"}]},
            "node-outside-group",
            ".env_configs[0].node_ranks",
        ),
        (
            {"env_configs": [{"node_ranks": "1-3"}]},
            "node-outside-group",
            ".env_configs[0].node_ranks",
        ),
        (
            {"env_configs": [{"node_ranks": "x"}]},
            "bad-placement",
            ".env_configs[0].node_ranks",
        ),
        (
            {"env_configs": [{}, {"node_ranks": 0}]},
            "overlapping-env-configs",
            ".env_configs[1].node_ranks",
        ),
        (
            {"env_configs": [{"node_ranks": 0}, {}]},
            "overlapping-env-configs",
            ".env_configs[1].node_ranks",
        ),
        ({"env_configs": [{"python_interpreter_path": 3}]}, "bad-env-config", None),
        ({"env_configs": [{"env_vars": "A=1"}]}, "bad-env-config", None),
        ({"env_configs": [{"env_vars": [{"A": 1}, {"A": 2}]}]}, "env-var-twice", None),
        ({"hardware": "Franka"}, "bad-hardware", ".hardware"),
        ({"hardware": {}}, "bad-hardware", ".hardware.type"),
        (
            {"hardware": {"type": "Franka", "configs": []}},
            "bad-hardware",
            ".hardware.configs",
        ),
        ({"hardware": {"type": "Franka"}}, "bad-hardware", ".hardware.configs"),
        (
            {"hardware": {"type": "Arm", "configs": ["x"]}},
            "bad-hardware",
            ".hardware.configs[0]",
        ),
        (
            {"hardware": {"type": "Arm", "configs": [{"ip": 1}]}},
            "node-outside-group",
            None,
        ),
        (
            {"hardware": {"type": "Arm", "configs": [{"node_rank": 2}]}},
            "node-outside-group",
            None,
        ),
        (
            {"hardware": {"type": "node", "configs": [{"node_rank": 0}]}},
            "bad-hardware",
            ".hardware.type",
        ),
    ],
)
def test_what_a_group_cannot_say(
    changes: Mapping[str, Any], code: str, key: str | None
) -> None:
    (problem,) = problems({"actor": "0"}, declared(**changes))
    assert problem.code == code
    assert key is None or problem.key == f"cluster.node_groups[0]{key}"


def test_robots_have_the_types_and_keys_that_rlinf_gives_them() -> None:
    """As in RLinf, rlinf/scheduler/hardware/robots: its types are open, so types and keys are kept as written."""
    franka = {
        "node_rank": 1,
        "robot_ip": "10.0.0.2",
        "camera_type": "zed",
        "gripper_type": "robotiq",
    }
    franka |= {
        "gripper_connection": "/dev/ttyUSB0",
        "controller_node_rank": 0,
        "disable_validate": True,
    }
    dual = {
        "node_rank": 1,
        "left_robot_ip": "10.0.0.2",
        "right_robot_ip": "10.0.0.3",
        "base_camera_type": "lumos",
    }
    dual |= {
        "left_gripper_type": "robotiq",
        "left_controller_node_rank": 0,
        "right_controller_node_rank": 1,
    }
    for type_, config in (
        ("Franka", franka),
        ("DualFranka", dual),
        ("SO101", {"node_rank": 1, "port": "/dev/ttyACM0"}),
    ):
        groups, found = read_node_groups(
            declared(hardware={"type": type_, "configs": [config]}), MIXED, {}
        )
        assert not found
        (item,) = groups["a800"].items
        assert (item.type, item.config) == (type_, config)


def test_env_vars_may_be_one_block_and_hardware_of_any_type_is_kept() -> None:
    hardware = {"type": "Arm", "configs": [{"node_rank": 1, "speed": 3}]}
    envs = {"node_ranks": 1, "env_vars": {"A": 1, "B": "x"}}
    groups, found = read_node_groups(
        declared(env_configs=envs, hardware=hardware), MIXED, {}
    )
    assert not found
    assert groups.runtime_envs["a800", 1].env_vars == (("A", "1"), ("B", "x"))
    assert groups["a800"].items[0].config == {"node_rank": 1, "speed": 3}
    found = read_node_groups([*declared(env_configs=None), *declared()], MIXED, {})[1]
    assert [p.code for p in found] == ["node-group-declared-twice"]


def test_groups_come_from_every_form_of_config() -> None:
    block = in_group("a800", "0-3")
    cluster = ClusterConfig(component_placement=block, node_groups=tuple(GROUPS))
    mapping = {
        "cluster": {"component_placement": block, "node_groups": GROUPS},
        "env": {"id": "x"},
    }
    for cfg in (cluster, mapping, read_config(mapping)):
        assert HybridComponentPlacement(cfg, MIXED).world_size("actor") == 4
    assert place(block).node_groups.labels[-2:] == ("cpu", "idle")
    (problem,) = placing.problems({"actor": 0}, MIXED, node_groups="a800")
    assert problem.code == "bad-node-group"


def test_a_group_with_a_problem_is_not_reported_again_where_it_is_used() -> None:
    assert [
        p.code for p in problems(in_group("a800", "0-3"), declared(node_ranks="0-9"))
    ] == ["node-out-of-range"]


CLUSTER = read_node_groups(GROUPS, MIXED, {})[0]


def test_strategies_know_the_groups_of_their_cluster() -> None:
    packed = PackedPlacementStrategy(0, 3, 2, node_group="4090").get_placement(CLUSTER)
    assert [s.accelerators for s in packed] == [(16, 17), (18, 19)]
    flexible = FlexiblePlacementStrategy([[7], [8, 9]], "a800").get_placement(CLUSTER)
    assert [(s.node, s.node_group) for s in flexible] == [(0, "a800"), (1, "a800")]
    robots = FlexiblePlacementStrategy([[1, 2]], "franka").get_placement(CLUSTER)
    assert [item.config["robot_ip"] for item in robots[0].hardware] == [
        "10.10.10.2",
        "10.10.10.3",
    ]
    nodes = NodePlacementStrategy([1, 0], "franka").get_placement(CLUSTER)
    assert [(s.node, s.node_group) for s in nodes] == [(4, "franka"), (3, "franka")]
    for strategy in (
        NodePlacementStrategy([2], "franka"),
        PackedPlacementStrategy(0, 4, node_group="4090"),
    ):
        with pytest.raises(PlacementError, match="node group"):
            strategy.get_placement(CLUSTER)
    with pytest.raises(PlacementError, match="did you mean 'franka'"):
        NodePlacementStrategy([0], "frank").get_placement(CLUSTER)
