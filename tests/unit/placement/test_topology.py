"""Accelerators numbered over the cluster and within nodes."""

from __future__ import annotations

import pytest

from rlplace.placement import Node, Topology


def test_uniform_numbers_both_ways() -> None:
    topology = Topology.uniform(2, 8, "cuda", 80 << 30)
    assert topology.num_accelerators == 16
    assert topology.local(11) == (1, 3)
    assert topology.number(1, 3) == 11
    assert [n.numbers for n in topology.nodes] == [range(8), range(8, 16)]
    assert (topology.nodes[1].kind, topology.nodes[1].memory_bytes) == ("cuda", 80 << 30)


def test_uneven_nodes_and_nodes_without_accelerators() -> None:
    topology = Topology.uneven([2, 0, 3])
    assert [topology.local(a) for a in range(5)] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]
    assert topology.describe() == "5 accelerators, 0-4 (3 nodes: 2 + 0 + 3)"


@pytest.mark.parametrize(
    ("count", "text"), [(8, "8 accelerators, 0-7 (1 node x 8)"), (1, "1 accelerator, 0 (1 node x 1)")]
)
def test_description_has_the_numbers(count: int, text: str) -> None:
    assert Topology.uniform(1, count).describe() == text


def test_numbers_that_do_not_exist_raise() -> None:
    topology = Topology.uniform(1, 4)
    for bad in (-1, 4):
        with pytest.raises(IndexError):
            topology.node_of(bad)
    with pytest.raises(IndexError):
        topology.number(0, 4)


def test_boundaries_inside_a_window() -> None:
    topology = Topology.uniform(4, 8)
    assert list(topology.boundaries(range(32))) == [1, 2, 3]
    assert list(topology.boundaries(range(8, 16))) == []
    assert list(topology.boundaries(range(6, 9))) == [1]


def test_nodes_must_be_numbered_through() -> None:
    with pytest.raises(ValueError, match="expected node 1 at 8"):
        Topology((Node(rank=0, accelerators=8, first=0), Node(rank=1, accelerators=8, first=7)))


def test_a_cluster_has_a_node() -> None:
    with pytest.raises(ValueError, match="at least one node"):
        Topology.uniform(0, 8)
