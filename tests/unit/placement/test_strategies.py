"""Packed, flexible and node placement."""

from __future__ import annotations

import pytest

from rlplace.errors import PlacementError
from rlplace.placement import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Topology,
)
from rlplace.placement.language.slots import PlacementStrategy
from tests.unit.placement.placing import EIGHT, SIXTEEN, TWO, place


def accelerators(
    strategy: PlacementStrategy, topology: Topology = EIGHT
) -> list[tuple[int, ...]]:
    return [s.accelerators for s in strategy.get_placement(topology)]


def codes(strategy: PlacementStrategy, topology: Topology = EIGHT) -> set[str]:
    with pytest.raises(PlacementError) as caught:
        strategy.get_placement(topology)
    return set(caught.value.codes)


def test_packed() -> None:
    assert accelerators(PackedPlacementStrategy(2, 4)) == [(2,), (3,), (4,)]
    assert accelerators(PackedPlacementStrategy(0, 7, 2)) == [
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
    ]
    strided = PackedPlacementStrategy(0, 7, num_hardware_per_process=2, stride=2)
    assert accelerators(strided) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert accelerators(PackedPlacementStrategy(0, 7, 2, 4)) == [
        (0, 4),
        (1, 5),
        (2, 6),
        (3, 7),
    ]
    assert accelerators(PackedPlacementStrategy(0, 7, 4), TWO) == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ]


@pytest.mark.parametrize(
    ("strategy", "code"),
    [
        (PackedPlacementStrategy(6, 9, 4), "rank-spans-nodes"),
        (PackedPlacementStrategy(0, 15, 2, 8), "rank-spans-nodes"),
        (FlexiblePlacementStrategy([[0], [7, 8]]), "rank-spans-nodes"),
        (PackedPlacementStrategy(0, 16), "accelerator-out-of-range"),
        (PackedPlacementStrategy(5, 2), "reversed-range"),
        (PackedPlacementStrategy(0, 6, 2), "uneven-packing"),
        (PackedPlacementStrategy(0, 5, 2, 2), "uneven-packing"),
        (PackedPlacementStrategy(0, 7, 0), "bad-strategy"),
        (PackedPlacementStrategy(0, 7, 1, -1), "bad-strategy"),
        (PackedPlacementStrategy(0, 7, node_group="a800"), "unknown-node-group"),
        (FlexiblePlacementStrategy([]), "empty-placement"),
        (FlexiblePlacementStrategy([[]]), "accelerator-out-of-range"),
        (FlexiblePlacementStrategy([[0], [-1]]), "accelerator-out-of-range"),
        (FlexiblePlacementStrategy([[1, 1]]), "duplicate-accelerator"),
        (NodePlacementStrategy([]), "empty-placement"),
        (NodePlacementStrategy([0, 2]), "node-out-of-range"),
        (NodePlacementStrategy([0], node_group_label="robots"), "unknown-node-group"),
    ],
)
def test_what_cannot_be_placed(strategy: PlacementStrategy, code: str) -> None:
    assert codes(strategy, SIXTEEN) == {code}


def test_flexible_keeps_processes_and_sorts_their_accelerators() -> None:
    slots = FlexiblePlacementStrategy([[5, 4], [7], [4]]).get_placement(TWO)
    assert [s.accelerators for s in slots] == [(4, 5), (7,), (4,)]
    assert [s.local_accelerators for s in slots] == [(0, 1), (3,), (0,)]


def test_isolation_decides_what_a_process_sees() -> None:
    strategy = PackedPlacementStrategy(4, 5)
    isolated, open_ = (
        strategy.get_placement(TWO, isolate_accelerator=i)[1] for i in (True, False)
    )
    assert isolated.visible_accelerators == isolated.local_accelerators == (1,)
    assert open_.visible_accelerators == (0, 1, 2, 3)
    assert open_.local_accelerators == (1,)


def test_node_placement_holds_no_accelerator() -> None:
    slots = NodePlacementStrategy([0, 0, 1]).get_placement(TWO)
    assert [(s.rank, s.node, s.local_rank) for s in slots] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
    ]
    assert all(s.accelerators == s.visible_accelerators == () for s in slots)


def test_a_placed_component_is_checked_against_another_cluster() -> None:
    strategy = place(
        {"agent": {"node_group": "node", "placement": "0-1:0-3"}}, TWO
    ).get_strategy("agent")
    assert [s.node for s in strategy.get_placement(Topology.uniform(3, 1))] == [
        0,
        0,
        1,
        1,
    ]
    assert strategy.get_placement(Topology.uniform(2, 4)) == strategy.get_placement(TWO)
    with pytest.raises(ValueError, match="node 1 does not exist"):
        strategy.get_placement(Topology.uniform(1, 4))
    strategy = place({"actor": "0-7:0-3"}).get_strategy("actor")
    assert [s.component for s in strategy.get_placement(EIGHT)] == ["actor"] * 4
    assert codes(strategy, Topology.uniform(1, 4)) == {"accelerator-out-of-range"}
    grouped = place(
        {"actor": {"node_group": "a", "placement": 0}},
        node_groups=[{"label": "a", "node_ranks": 0}],
    )
    assert codes(grouped.get_strategy("actor"), TWO) == {"unknown-node-group"}


@pytest.mark.parametrize(
    ("label", "code", "fix"),
    [
        ("b,a", None, None),
        ("bb", "unknown-node-group", 'node_group="<one of these>"'),
        ("a,a", "node-group-repeated", 'node_group="a"'),
        ("a,nodes", "mixed-node-groups", 'node_group="a"'),
        ("a,cluster", "overlapping-node-groups", 'node_group="a"'),
    ],
)
def test_joined_groups_are_checked_as_in_the_config(
    label: str, code: str | None, fix: str | None
) -> None:
    declared = [
        {"label": "a", "node_ranks": 0},
        {"label": "b", "node_ranks": 1},
        {"label": "nodes", "node_ranks": "0-1", "ignore_hardware": True},
    ]
    groups = place({"actor": 0}, TWO, node_groups=declared).node_groups
    strategy = PackedPlacementStrategy(0, 4, node_group=label)
    if code is None:
        assert [s.accelerators for s in strategy.get_placement(groups)] == [
            (4,),
            (5,),
            (6,),
            (7,),
            (0,),
        ]
        return
    with pytest.raises(PlacementError) as caught:
        strategy.get_placement(groups)
    assert [(p.code, p.fix) for p in caught.value.problems] == [(code, fix)]
    assert [
        s.node for s in NodePlacementStrategy([1], "a,b,nodes").get_placement(groups)
    ] == [1]
