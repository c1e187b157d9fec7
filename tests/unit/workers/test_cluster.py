"""What a cluster is declared to be, without starting anything."""

from __future__ import annotations

import pytest

from rlplace.config import AcceleratorConfig, ClusterConfig, RayConfig
from rlplace.errors import ClusterError
from rlplace.workers.launch.cluster import Cluster, whole
from rlplace.workers.launch.machines import declared_topology


def config(**changes: object) -> ClusterConfig:
    return ClusterConfig(component_placement={}, **changes)  # type: ignore[arg-type]


def test_emulated_accelerators_have_the_memory_of_the_config() -> None:
    emulated = AcceleratorConfig(kind="emulated", memory=123)
    topology = declared_topology(config(num_nodes=2, accelerators_per_node=3, accelerator=emulated))
    assert topology.num_accelerators == 6
    assert {(n.kind, n.memory_bytes) for n in topology.nodes} == {("emulated", 123)}
    assert declared_topology(config(accelerator=emulated)).num_accelerators == 8


def test_more_gpus_than_there_are() -> None:
    cuda = AcceleratorConfig(kind="cuda")
    with pytest.raises(ClusterError) as refused:
        declared_topology(config(accelerators_per_node=4096, accelerator=cuda))
    assert refused.value.code == "too-few-accelerators"
    assert refused.value.problem.got == "4096"
    elsewhere = config(accelerators_per_node=4096, accelerator=cuda, ray=RayConfig(address="auto"))
    assert declared_topology(elsewhere).num_accelerators == 4096, "the machines of another cluster are checked there"


def test_the_whole_topology_is_one_slot_per_node() -> None:
    cluster = Cluster(2, 3, accelerator=AcceleratorConfig(kind="emulated"), launcher="inline")
    assert [(s.node, s.accelerators, s.local_accelerators) for s in whole(cluster.topology)] == [
        (0, (0, 1, 2), (0, 1, 2)),
        (1, (3, 4, 5), (0, 1, 2)),
    ]
