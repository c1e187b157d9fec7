"""Slots of ranks, and shares that are computed when asked for."""

from __future__ import annotations

import pickle

import pytest

from rlplace.placement import HybridComponentPlacement, Topology
from rlplace.placement.flow import derive_routes
from rlplace.placement.machines.pools import accelerator_pool

TWO = Topology.uniform(2, 4)


def placed(text: object, topology: Topology = TWO) -> HybridComponentPlacement:
    return HybridComponentPlacement({"component_placement": {"actor": text, "env": text, "rollout": text}}, topology)


@pytest.mark.parametrize("text", ["0-7", "0-7:0-3", "0-3:0-7", "4-5:2-3,0-1:0-1", "2-5:0-7,0-1", "7,0,3"])
def test_local_ranks_count_the_ranks_of_a_node(text: str) -> None:
    slots = placed(text).slots("actor")
    assert [s.local_rank for s in slots if s.node == 0] == list(range(sum(s.node == 0 for s in slots)))


def test_a_process_that_is_not_isolated_sees_its_node() -> None:
    strategy = placed("0-7").get_strategy("actor")
    assert strategy.get_placement(TWO, isolate_accelerator=False)[5].visible_accelerators == (0, 1, 2, 3)


def test_a_component_on_nodes_is_checked_against_another_cluster() -> None:
    block = {"agent": {"node_group": "node", "placement": "0-1:0-3"}}
    strategy = HybridComponentPlacement({"component_placement": block}, TWO).get_strategy("agent")
    assert [s.node for s in strategy.get_placement(Topology.uniform(3, 1))] == [0, 0, 1, 1]
    assert strategy.get_placement(Topology.uniform(2, 4)) == strategy.get_placement(TWO)
    with pytest.raises(ValueError, match="node 1 does not exist"):
        strategy.get_placement(Topology.uniform(1, 4))


def test_shares_by_number_and_through_pickle() -> None:
    routes = derive_routes(placed("0-7"), 48, 2)
    shares = routes.trajectories.shares
    assert [shares[i] for i in range(len(shares))] == list(shares)
    assert shares[-1] == tuple(shares)[-1]
    assert shares != tuple(shares)[1:]
    assert pickle.loads(pickle.dumps(routes)) == routes
    with pytest.raises(IndexError):
        shares[len(shares)]
    with pytest.raises(TypeError):
        hash(shares)


def test_rows_fewer_than_ranks_go_to_the_first() -> None:
    from rlplace.placement.flow import scatter_rows

    route = scatter_rows(placed("0-7"), "env", "actor", 3)
    assert [(s.source, s.target, s.start, s.stop) for s in route.shares] == [(i, i, i, i + 1) for i in range(3)]


def test_pools_of_nodes_out_of_order() -> None:
    nodes = Topology.uneven([2, 3, 4]).nodes
    pool = accelerator_pool([nodes[2], nodes[0]])
    assert pool.outside(range(3, 6)) == ((range(3, 4), range(8, 9)), (range(4, 6), range(2)))
    assert pool.outside(range(1, 3)) == ((range(1, 3), range(6, 8)),)
    assert [s.node for s in pool.intervals_in(range(3, 6))] == [2, 0]
    assert [(s.node, s.numbers) for s in pool.intervals] == [(2, range(4)), (0, range(4, 6))]
