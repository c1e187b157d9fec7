"""Routes of rows and of weights, and their transports."""

from __future__ import annotations

from collections import Counter

from rlplace.placement import Topology
from rlplace.placement.flow import (
    Route,
    Routes,
    Transport,
    copy_nearest,
    derive_routes,
    scatter_rows,
)
from tests.unit.placement.placing import TWO, place


def routes(
    actor: str,
    env: str,
    rollout: str,
    topology: Topology,
    rows: int = 64,
    groups: int = 2,
) -> Routes:
    return derive_routes(
        place({"actor": actor, "env": env, "rollout": rollout}, topology), rows, groups
    )


def pairs(route: Route) -> list[tuple[int, int, int, int]]:
    return [(s.source, s.target, s.start, s.stop) for s in route.shares]


def copies(actor: str, rollout: str, topology: Topology) -> Route:
    return copy_nearest(
        place({"actor": actor, "rollout": rollout}, topology), "actor", "rollout"
    )


def test_world_sizes_that_do_not_divide_split_and_merge() -> None:
    found = routes("0", "0-3", "4-6", Topology.uniform(1, 8), rows=16, groups=1)
    first, *others = pairs(found.observations)
    assert first == (0, 0, 0, 4)
    assert others == [
        (1, 0, 4, 6),
        (1, 1, 6, 8),
        (2, 1, 8, 11),
        (2, 2, 11, 12),
        (3, 2, 12, 16),
    ]
    assert found.observations.sends(1) == tuple(found.observations.shares)[1:3]
    assert found.observations.receives(0) == tuple(found.observations.shares)[:2]
    assert [s.target for s in found.trajectories.shares] == [0, 0, 0, 0]


def test_weights_come_from_the_nearest_actor_in_turns() -> None:
    found = copies("0-1", "2-7", TWO)
    assert [s.transport for s in found.shares] == [Transport.SAME_NODE] * 2 + [
        Transport.NETWORK
    ] * 4
    assert Counter(s.source for s in found.shares) == {0: 3, 1: 3}


def test_several_ranks_on_one_accelerator_share_the_sending() -> None:
    found = copies("0:0-3", "0:0-3", Topology.uniform(1, 1))
    assert [s.source for s in found.shares] == [0, 1, 2, 3]


def test_rows_fewer_than_ranks_go_to_the_first() -> None:
    route = scatter_rows(
        place(dict.fromkeys(("actor", "env"), "0-7"), TWO), "env", "actor", 3
    )
    assert [(s.source, s.target, s.start, s.stop) for s in route.shares] == [
        (i, i, i, i + 1) for i in range(3)
    ]
