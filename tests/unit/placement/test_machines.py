"""Machines: numbered through, declared, and as Ray lists them."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.checks import machines
from rlplace.checks.rule import broken
from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.read import read_config
from rlplace.errors import PlacementError, Source
from rlplace.placement import (
    FlexiblePlacementStrategy,
    HybridComponentPlacement,
    Topology,
)
from rlplace.placement.machines.pools import accelerator_pool
from rlplace.placement.machines.topology import Ranges, declare_topology, in_rank_order
from rlplace.workers.launch.machines import declared_topology


def cluster(*nodes: dict[str, Any], **more: Any) -> ClusterConfig:
    block = {"component_placement": {"actor": "0"}, "nodes": list(nodes), **more}
    return read_config({"cluster": block, "env": {"id": "x"}}).cluster


def declared(*nodes: dict[str, Any]) -> Topology:
    return declare_topology(cluster(*nodes).nodes)


def problems(*nodes: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(PlacementError) as caught:
        declare_topology(
            cluster(*nodes).nodes,
            sources={"cluster.nodes": Source(file="big.yaml", line=3)},
        )
    assert all(
        p.why and p.fix and str(p.source) == "big.yaml:3" for p in caught.value.problems
    )
    return caught.value.codes


@pytest.mark.parametrize(
    ("product", "gib"),
    [
        ("H100-80GB", 79.1),
        ("NVIDIA H100 80GB HBM3", 79.1),
        ("NVIDIA A100-SXM4-40GB", 39.3),
        ("A100-40G", 39.3),  # as Ray labels it
        ("A100-80G", 79.1),
        ("H100-80G", 79.1),
        ("A10G", 22.0),
        ("H200", 139.7),
        ("RTX4090", 23.5),
        ("A100", 0),  # of two sizes
        ("NVIDIA H100 NVL", 92.9),
        ("H200 NVL", 139.7),
        ("NVIDIA B200", 178.3),
        ("NVIDIA GB200", 184.3),
        ("NVIDIA H20", 95.0),
        ("NVIDIA H800", 79.1),
        ("NVIDIA A800-SXM4-80GB", 79.1),
        ("NVIDIA A800 80GB PCIe", 79.1),
        ("AMD Instinct MI300X OAM", 191.6),
        ("NVIDIA GeForce RTX 5090", 31.3),
        ("NVIDIA RTX A6000", 47.2),
        ("A6000", 47.2),
        ("", 0),
    ],
)
def test_known_products_have_their_memory(product: str, gib: float) -> None:
    (node,) = declared({"accelerators": 8, "product": product}).nodes
    assert node.memory_bytes == int(gib * (1 << 30))
    (mixed,) = declared(
        {"mixed": [{"count": 2, "product": product}, {"count": 1, "memory": "300GiB"}]}
    ).nodes
    assert mixed.runs[0].memory_bytes == int(gib * (1 << 30))


def test_a_memory_that_is_written_counts_as_it_is_written() -> None:
    sizes = {"80GiB": 80 << 30, "80GB": 80 * 10**9}
    for text, size in sizes.items():
        assert (
            declared({"accelerators": 8, "product": "H100", "memory": text})
            .nodes[0]
            .memory_bytes
            == size
        )


@pytest.mark.parametrize(
    ("node", "where"),
    [
        ({"accelerators": 1, "product": "H100", "memory": "80GiB"}, "nodes[0]"),
        (
            {
                "mixed": [
                    {"count": 1, "product": "L4"},
                    {"count": 1, "product": "H100", "memory": "80GiB"},
                ]
            },
            "nodes[0].mixed[1]",
        ),
        ({"accelerators": 1, "product": "H100", "memory": "79GiB"}, None),
        ({"accelerators": 1, "product": "A100", "memory": "80GiB"}, None),  # not known
    ],
)
def test_more_memory_than_a_product_has_is_warned_of(
    node: dict[str, Any], where: str | None
) -> None:
    warnings = list(broken(machines.WARNINGS, cluster(node)))
    assert [(w.code, w.key) for w in warnings] == (
        [("memory-overstated", f"cluster.{where}.memory")] if where else []
    )
    assert all("79.1GiB" in w.why and w.fix == "memory: 79.1GiB" for w in warnings)


def test_machines_of_several_shapes() -> None:
    topology = declared(
        {
            "count": 2,
            "accelerators": 8,
            "product": "A100",
            "memory": "80GiB",
            "host_memory": "1TiB",
        },
        {
            "accelerators": 4,
            "product": "RTX4090",
            "memory": "24GiB",
            "pcie_gb_per_s": 32,
            "network_gb_per_s": 12.5,
        },
        {},
    )
    assert topology.describe() == "20 accelerators, 0-19 (4 nodes: 8 + 8 + 4 + 0)"
    assert topology.order == "as written in cluster.nodes"
    first, second, third, last = topology.nodes
    assert (first.product, first.memory_bytes, first.host_memory_bytes) == (
        "A100",
        80 << 30,
        1 << 40,
    )
    assert first.kind == "cuda"
    assert second.product == "A100"
    assert third.pcie_gb_per_s == 32
    assert (last.accelerators, last.alike) == (0, ())


def test_explicit_ranks_order_the_nodes() -> None:
    topology = declared(
        {"rank": 2, "accelerators": 1}, {"rank": 0, "count": 2, "accelerators": 8}
    )
    assert [n.accelerators for n in topology.nodes] == [8, 8, 1]
    assert topology.order == "by the ranks given in cluster.nodes"
    assert problems({"rank": 0}, {}) == ("node-ranks",)
    assert problems({"rank": 0, "count": 2}, {"rank": 1}) == ("node-ranks",)
    assert problems({"rank": 1}) == ("node-ranks",)


def test_the_number_of_nodes_is_said_once_or_rightly() -> None:
    nodes = cluster({"count": 3, "accelerators": 1}).nodes
    assert declare_topology(nodes, num_nodes=3).num_nodes == 3
    with pytest.raises(PlacementError) as caught:
        declare_topology(nodes, num_nodes=18)
    assert (caught.value.codes, caught.value.problems[0].fix) == (
        ("node-count",),
        "one of\nnum_nodes: 3\ncount: 18        (in the entry of nodes)",
    )
    with pytest.raises(PlacementError):
        declared_topology(cluster({"accelerators": 1}, num_nodes=2))


def test_accelerators_of_a_node_beside_declared_nodes_are_right_or_refused() -> None:
    assert (
        declared_topology(
            cluster({"accelerators": 8}, accelerators_per_node=8)
        ).num_accelerators
        == 8
    )
    # The number may belong into a single entry; of several entries, it is not clear into which
    of_one_entry = (
        "one of\n"
        "accelerators_per_node: auto\n"
        "cluster.nodes.0.accelerators=16        "
        "(on the command line; in a file, accelerators: 16 in the entry of nodes)"
    )
    for nodes, fix in (
        ([{"accelerators": 8}], of_one_entry),
        (
            [{"accelerators": 16}, {"mixed": [{"count": 8}]}],
            "accelerators_per_node: auto        (or declare other nodes)",
        ),
    ):
        with pytest.raises(PlacementError) as caught:
            declared_topology(
                cluster(*nodes, accelerators_per_node=16),
                {"cluster": Source(file="a.yaml", line=3)},
            )
        (problem,) = caught.value.problems
        assert (problem.code, problem.key) == (
            "node-count",
            "cluster.accelerators_per_node",
        )
        assert (problem.fix, str(problem.source)) == (fix, "a.yaml:3")


def test_no_rank_uses_accelerators_of_two_products() -> None:
    a100 = {"count": 3, "product": "A100", "memory": "80GiB"}
    topology = declared(
        {"mixed": [a100, {"count": 5, "product": "L40", "memory": "48GiB"}]}
    )
    assert (topology.nodes[0].product, topology.nodes[0].memory_bytes) == (
        "A100 + L40",
        48 << 30,
    )

    def place(text: object) -> HybridComponentPlacement:
        return HybridComponentPlacement(
            {"component_placement": {"actor": text}}, topology
        )

    assert place("1-2:0,3-6:1-2").slots("actor")[1].local_accelerators == (3, 4)
    for text in ("0-7:0", {"placement": "0-7", "accelerators_per_rank": 4}):
        with pytest.raises(PlacementError) as caught:
            place(text)
        assert caught.value.codes == ("rank-spans-products",)
    with pytest.raises(PlacementError) as caught:
        FlexiblePlacementStrategy([[2, 3]]).get_placement(topology)
    assert caught.value.codes == ("rank-spans-products",)
    assert problems({"accelerators": 4, "mixed": [{"count": 3}]}) == ("mixed-count",)


def test_a_declared_cluster_wins_over_this_machine() -> None:
    assert declared_topology(cluster({"accelerators": 8})).nodes[0].kind == "cuda"
    emulated = declared_topology(
        cluster({"accelerators": 8}, accelerator={"kind": "emulated", "memory": "2GiB"})
    )
    assert (emulated.nodes[0].kind, emulated.nodes[0].memory_bytes) == (
        "emulated",
        2 << 30,
    )


def ray_node(address: str, gpus: int = 0, **more: Any) -> dict[str, Any]:
    resources = {"CPU": 8.0, "memory": 1e9} | (
        {"GPU": float(gpus), "accelerator_type:A100": 1.0} if gpus else {}
    )
    return {
        "Alive": True,
        "NodeManagerAddress": address,
        "Resources": resources,
        "Labels": {},
        **more,
    }


def test_ray_nodes_come_head_first_then_by_address() -> None:
    head = ray_node("10.0.0.9")
    head["Resources"]["node:__internal_head__"] = 1.0
    nodes = [
        ray_node("10.0.0.10", 8),
        ray_node("10.0.0.2", 4, NodeManagerHostname="b"),
        head,
        ray_node("gpu-host", 1),
        ray_node("10.0.0.1", 8, Alive=False),
    ]
    assert [n["NodeManagerAddress"] for n in in_rank_order(nodes)] == [
        "10.0.0.9",
        "10.0.0.2",
        "10.0.0.10",
        "gpu-host",
    ]
    assert in_rank_order(nodes[::-1]) == in_rank_order(nodes)


def test_ray_labels_give_explicit_ranks() -> None:
    def labelled(address: str, rank: object) -> dict[str, Any]:
        return ray_node(
            address, 1, Labels={} if rank is None else {"rlplace-node-rank": rank}
        )

    assert [
        n["NodeManagerAddress"]
        for n in in_rank_order([labelled("b", "1"), labelled("a", "0")])
    ] == ["a", "b"]
    for ranks in (("0", None), ("0", "0"), ("0", "2"), ("0", "x")):
        with pytest.raises(PlacementError) as caught:
            in_rank_order([labelled("a", ranks[0]), labelled("b", ranks[1])])
        assert caught.value.codes == ("node-ranks",)
    lost = {**labelled("b", "1"), "Alive": False}
    two = [labelled("c", "2"), labelled("a", "0")]
    assert [n["NodeManagerAddress"] for n in in_rank_order([lost, *two])] == ["a", "c"]
    assert [
        n["NodeManagerAddress"] for n in in_rank_order([lost, *two, labelled("d", "1")])
    ] == ["a", "d", "c"]
    with pytest.raises(PlacementError) as caught:
        in_rank_order([])
    assert caught.value.codes == ("no-node",)


def test_nodes_are_numbered_through() -> None:
    topology = Topology.uniform(2, 8, "cuda", 80 << 30)
    assert [n.numbers for n in topology.nodes] == [range(8), range(8, 16)]
    assert (topology.nodes[1].kind, topology.nodes[1].memory_bytes) == (
        "cuda",
        80 << 30,
    )
    uneven = Topology.uneven([2, 0, 3])
    assert [uneven.node_of(a).rank for a in range(5)] == [0, 0, 2, 2, 2]
    assert uneven.describe() == "5 accelerators, 0-4 (3 nodes: 2 + 0 + 3)"
    assert Topology.uniform(1, 1).describe() == "1 accelerator, 0 (1 node x 1)"
    for bad in (-1, 5):
        with pytest.raises(IndexError):
            uneven.node_of(bad)


def test_nodes_of_a_window() -> None:
    topology = Topology.uneven([2, 0, 3, 4])
    found = [(node.rank, part) for node, part in topology.parts(range(1, 6))]
    assert found == [(0, range(1, 2)), (2, range(2, 5)), (3, range(5, 6))]
    assert [part for _, part in topology.parts(range(2, 5))] == [range(2, 5)]


def test_a_window_of_ranges() -> None:
    ranges = Ranges.of([range(2), range(5, 7)])
    assert str(ranges.within(range(3, 6))) == "5"
    assert not ranges.within(range(2, 5))
    assert str(ranges.shifted(2)) == "2-3,7-8"
    million = Ranges.of([range(1_000_000)])
    assert len(million & Ranges.of([range(500_000, 2_000_000)])) == 500_000


def test_pools_of_nodes_out_of_order() -> None:
    nodes = Topology.uneven([2, 3, 4]).nodes
    pool = accelerator_pool([nodes[2], nodes[0]])
    assert pool.outside(range(3, 6)) == (
        (range(3, 4), range(8, 9)),
        (range(4, 6), range(2)),
    )
    assert pool.outside(range(1, 3)) == ((range(1, 3), range(6, 8)),)
    assert [s.node for s in pool.intervals_in(range(3, 6))] == [2, 0]
    assert [(s.node, s.numbers) for s in pool.intervals] == [
        (2, range(4)),
        (0, range(4, 6)),
    ]
