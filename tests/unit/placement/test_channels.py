"""Where the keys of each channel live, and how much each location holds."""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.placement import Topology
from rlplace.placement.channels import ChannelLocation, ChannelPlan, participants_of
from rlplace.placement.show.view import locate
from tests.unit.placement.memory_cases import ppo
from tests.unit.placement.placing import TWO, place

SHARED = {"placement": "0-3", "process": "shared"}


def channels(
    placement: Mapping[str, object], topology: Topology = TWO, envs: int = 64
) -> dict[str, ChannelPlan]:
    return {c.name: c for c in ppo(placement, topology=topology, envs=envs)[0].channels}


def location(node: int, keys: str, under_way: int, capacity: int) -> ChannelLocation:
    return ChannelLocation(
        node=node,
        process="",
        keys=tuple(keys.split()),
        capacity_items=capacity,
        under_way=under_way,
    )


def test_a_key_lives_on_the_node_of_its_consumer() -> None:
    found = channels({"actor": "0-7", "env": "0-1", "rollout": "3-4"})
    assert found["observations"].locations() == (
        location(0, "0", 2, 2),
        location(1, "1", 2, 2),
    )
    assert found["actions"].locations() == (location(0, "0/0 0/1 1/0 1/1", 4, 4),)
    assert found["trajectories"].locations() == (
        location(0, "0 1 2 3", 4, 4),
        location(1, "4 5 6 7", 4, 4),
    )
    assert found["weights"].locations() == (
        location(0, "0", 1, 2),
        location(1, "1", 1, 2),
    )


def test_a_channel_has_places_for_all_its_ranks() -> None:
    block, topology = (
        {"actor": "0", "env": "0-4095", "rollout": "0"},
        Topology.uniform(512, 8),
    )
    found, placement = channels(block, topology, envs=8192), place(block, topology)
    places = {
        name: participants_of(channel, placement) for name, channel in found.items()
    }
    assert places == {
        "observations": 8194,
        "actions": 8194,
        "trajectories": 8194,
        "weights": 1024,
    }


def test_where_a_channel_lives_in_words() -> None:
    spread = channels({"actor": "0-7", "env": "0-3", "rollout": "3-6"})
    assert locate(spread["actions"]) == "node 0"
    assert locate(spread["trajectories"]) == "nodes 0-1, 4 items each"
    assert locate(spread["observations"]) == "nodes 0-1, 2 to 6 items each"
    together = channels({"actor": "0-7", "env": SHARED, "rollout": SHARED})
    assert list(together) == ["trajectories", "weights"], (
        "what env and rollout ask each other is a call"
    )
