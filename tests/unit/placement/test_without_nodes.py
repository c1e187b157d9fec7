"""A `cluster` block that has lost nodes: what is left stays where it is, in new numbers."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.placement import HybridComponentPlacement, Topology
from rlplace.placement.language.without_nodes import placed_again, without_nodes

FOUR = Topology.uneven([2, 4, 2, 2])  # 0 1 | 2 3 4 5 | 6 7 | 8 9
GROUPS = [
    {"label": "big", "node_ranks": 1},
    {
        "label": "small",
        "node_ranks": "0,2-3",
        "env_configs": [
            {"node_ranks": "2", "env_vars": [{"A": "2"}]},
            {"node_ranks": "0,3", "env_vars": [{"A": "03"}]},
        ],
    },
    {
        "label": "arms",
        "node_ranks": "1-2",
        "hardware": {"type": "Arm", "configs": [{"node_rank": 1}, {"node_rank": 2}]},
    },
]


def placed(cluster: dict[str, Any], topology: Topology) -> HybridComponentPlacement:
    return HybridComponentPlacement(cluster, topology)


def left(
    cluster: dict[str, Any], lost: set[int], again: str = "rest"
) -> dict[str, Any]:
    return without_nodes(cluster, placed(cluster, FOUR), lost, again)


def smaller(lost: set[int]) -> Topology:
    return Topology.uneven(
        [node.accelerators for node in FOUR.nodes if node.rank not in lost]
    )


@pytest.mark.parametrize("lost", [{0}, {1}, {3}, {0, 2}])
@pytest.mark.parametrize(
    "lines",
    [
        {"actor": "all", "env": "0-1", "rollout": "8-9"},
        {"actor": "2-9", "env": "6-7:0-3", "rollout": "2-5:0-1"},
        {
            "actor": "8-9,2-3,0",
            "env": {"same_as": "actor"},
            "rollout": {"accelerators": 4, "accelerators_per_rank": 2},
        },
        {
            "actor": {"node_group": "small", "placement": "1-5"},
            "env": {"node_group": "arms", "placement": "all"},
        },
        {
            "actor": {"node_group": "small,big", "placement": "0-8"},
            "reward": {"node_group": "node", "placement": "0,2"},
        },
        {
            "actor": "0-7",
            "env": {"placement": "0-7", "process": "shared"},
            "rollout": {"same_as": "env", "process": "shared"},
        },
    ],
)
def test_every_rank_on_another_node_stays_where_it_is(
    lines: dict[str, Any], lost: set[int]
) -> None:
    cluster = {"component_placement": lines, "node_groups": GROUPS, "num_nodes": 4}
    before, block = placed(cluster, FOUR), left(cluster, lost)
    assert block["num_nodes"] == 4 - len(lost)
    homeless = placed_again(before, lost)
    block["component_placement"] = {
        n: text for n, text in block["component_placement"].items() if n not in homeless
    }
    after = placed(block, smaller(lost))
    for name in after.components:
        kept = [slot for slot in before.slots(name) if slot.node not in lost]
        now = after.slots(name)
        nodes = [slot.node - sum(node < slot.node for node in lost) for slot in kept]
        assert [slot.node for slot in now] == nodes
        for ours, theirs in zip(now, kept, strict=True):
            assert ours.local_accelerators == theirs.local_accelerators
            assert ours.runtime_env == theirs.runtime_env
            assert [item.config.keys() for item in ours.hardware] == [
                item.config.keys() for item in theirs.hardware
            ]
        assert [slot.rank for slot in now] == list(range(len(kept)))
        assert bool(after.spec(name).process) == bool(before.spec(name).process)


def test_what_has_nothing_left_is_placed_again_where_the_config_allows() -> None:
    lines = {
        "actor": "0-1",
        "rollout": {"placement": "2-5", "accelerators_per_rank": 2},
        "env": {"node_group": "node", "placement": "1:0-2"},
        "critic": {"node_group": "big", "placement": "all"},
    }
    cluster = {"component_placement": lines, "node_groups": GROUPS}
    assert placed_again(placed(cluster, FOUR), {1}) == ["rollout", "env", "critic"]
    assert left(cluster, {1})["component_placement"] == {
        "actor": "0-1",
        "rollout": {"placement": "rest", "accelerators_per_rank": 2},
        "env": {"node_group": "node", "placement": "0:0-2"},
        "critic": {
            "node_group": "big",
            "placement": "all",
        },  # there is no such group any more: it is refused
    }
    assert left(cluster, {1}, "all")["component_placement"]["rollout"] == {
        "placement": "all",
        "accelerators_per_rank": 2,
    }
    assert [group["label"] for group in left(cluster, {1})["node_groups"]] == [
        "small",
        "arms",
    ]
    assert "num_nodes" not in left(cluster, {1})


def test_declared_machines_are_those_that_are_left() -> None:
    nodes = [
        {"rank": 1, "count": 2, "memory": 2, "accelerators": 2, "product": "A100"},
        {"rank": 0, "memory": 1, "accelerators": 2},
        {"rank": 3, "memory": 3, "accelerators": 2},
    ]
    cluster: dict[str, Any] = {"component_placement": {"actor": "0"}, "nodes": nodes}
    uniform = Topology.uniform(4, 2)

    def machines(*lost: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = without_nodes(
            cluster, placed(cluster, uniform), lost
        )["nodes"]
        return found

    two = {"count": 2, "memory": 2, "accelerators": 2, "product": "A100"}
    assert machines(3) == [{"memory": 1, "accelerators": 2}, two]
    assert machines(0, 1)[0] == {
        "count": 1,
        "memory": 2,
        "accelerators": 2,
        "product": "A100",
    }
    assert machines(1, 2) == [
        {"memory": 1, "accelerators": 2},
        {"memory": 3, "accelerators": 2},
    ]
