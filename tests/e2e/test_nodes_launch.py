"""Ranks on several nodes: simulated ones, each with its own raylet and its own GPUs that exist in name only."""

from __future__ import annotations

import os
import signal

import pytest

from rlplace.config.schema import RayConfig
from rlplace.errors import WorkerError
from rlplace.placement.language.slots import PackedPlacementStrategy
from rlplace.placement.machines.topology import Topology
from rlplace.workers.launch.cluster import Cluster
from tests.contract.launch_workers import Probe


@pytest.mark.ray
@pytest.mark.slow
def test_ranks_sit_on_the_nodes_of_the_plan() -> None:
    import ray
    from ray.cluster_utils import Cluster as Nodes

    from rlplace.workers.ray_launch.session import ray_environment

    with ray_environment("auto"):
        nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 2, "include_dashboard": False})
        nodes.add_node(num_cpus=1, num_gpus=2)
        try:
            ray.init(address=nodes.address, log_to_driver=False)
            head = ray.get_runtime_context().get_node_id()
            topology = Topology.uniform(2, 2, "cuda")
            with Cluster(topology=topology, ray=RayConfig(address=nodes.address)) as cluster:
                packed = PackedPlacementStrategy(0, 3)
                group = Probe.create_group().launch(cluster, name="probe", placement_strategy=packed)
                where = group.node_id().wait()
                assert where[0] == where[1] == head, "node 0 is the head"
                assert where[2] == where[3] != head
                assert [seen for _, seen, _ in group.process().wait()] == ["0", "1", "0", "1"]
                victim = group.process().wait()[3][0]
                stuck = group.stuck()
                os.kill(victim, signal.SIGKILL)
                with pytest.raises(WorkerError, match=r"probe rank 3 \(node 1, accelerators 3\)"):
                    stuck.wait(timeout_s=90)
        finally:
            ray.shutdown()
            nodes.shutdown()
