"""Places without a node that leaves: accelerators keep their numbers, and the nearest places come first."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rlplace.placement import HybridComponentPlacement, Topology
from rlplace.placement.language.drained import places_without

TWO = Topology.uniform(2, 4)  # 0 1 2 3 | 4 5 6 7


def found(block: dict[str, Any], *gone: int, most: int = 4) -> list[dict[str, object]]:
    placement = HybridComponentPlacement({"component_placement": block}, TWO)
    return [*itertools.islice(places_without(placement, gone), most)]


def test_ranks_of_other_nodes_stay_and_keep_their_numbers() -> None:
    assert found({"actor": "0-7", "env": "6-7", "rollout": "0"}, 0)[0] == {
        "actor": "4-7",
        # Nothing is free, so it shares accelerators
        "rollout": "4",
    }


def test_free_accelerators_come_before_shared_ones() -> None:
    places = found({"actor": "0-1", "rollout": "4-5", "env": "6"}, 1)
    assert places[0] == {"rollout": "2-3", "env": "0"}
    # As many ranks, by sharing; then fewer
    assert places[1:3] == [
        {"rollout": "0-1", "env": "0"},
        {"rollout": "2", "env": "0"},
    ]


@pytest.mark.parametrize(
    ("place", "there"),
    [
        (
            {"placement": "4-7", "accelerators_per_rank": 2},
            # Two ranks of two accelerators each
            "0-3:0-1",
        ),
        ("4-5:0-3", "1-2:0-3"),
        ("2-7", "2-3,1"),
        (
            {"node_group": "node", "placement": "1:0-2"},
            {"node_group": "node", "placement": "0:0-2"},
        ),
    ],
)
def test_the_shape_of_ranks_stays(place: object, there: object) -> None:
    assert found({"actor": "0", "env": place}, 1)[0] == {"env": there}


def test_numbers_of_ranks_that_are_tried_divide_the_present_one() -> None:
    places = found({"actor": "0-3", "env": "0-5"}, 1, most=20)
    worlds = {
        HybridComponentPlacement({"component_placement": each}, TWO).world_size("env")
        for each in places
    }
    assert worlds == {4, 3, 2, 1}


def test_nothing_is_found_without_another_node() -> None:
    assert found({"actor": "0-7"}, 0, 1) == []
