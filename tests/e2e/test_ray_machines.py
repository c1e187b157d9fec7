"""Plans for the machines of a running Ray cluster: `cluster.ray.machines`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.read import read_config
from rlplace.errors import ClusterError, ConfigError, PlacementError
from rlplace.workers.launch.machines import declared_topology

ROOT = Path(__file__).parents[2]
PLAN = [
    sys.executable,
    "-m",
    "rlplace.plan",
    "--config-name",
    "collocated_ppo",
    "cluster.ray.machines=true",
]
GPUS = 3


def cluster(**more: object) -> ClusterConfig:
    ray = {
        "machines": True,
        **({"address": more.pop("address")} if "address" in more else {}),
    }
    return read_config(
        {
            "cluster": {"component_placement": {"actor": "0"}, "ray": ray, **more},
            "env": {"id": "x"},
        }
    ).cluster


def test_a_plan_says_that_no_ray_runs() -> (
    None
):  # before one is started in this process
    with pytest.raises(ClusterError) as caught:
        declared_topology(cluster(address="127.0.0.1:1"))
    assert (caught.value.code, caught.value.problem.got) == (
        "cluster-unreachable",
        "127.0.0.1:1",
    )


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    import ray
    from ray._private import ray_constants

    from rlplace.workers.ray_launch.session import ray_environment

    with ray_environment(None), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ray_constants, "ENABLE_RAY_CLUSTER", True
        )  # not so where a run in this process imported it first
        resources = {"accelerator_type:H100": 1}
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=GPUS,
            resources=resources,
            include_dashboard=False,
            log_to_driver=False,
        )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.ray
def test_a_plan_is_for_the_machines_that_ray_has(address: str) -> None:
    words = [
        *PLAN,
        f"cluster.ray.address={address}",
        "cluster.accelerators_per_node=auto",
    ]
    placed = "cluster.component_placement={actor: all, env: all, rollout: all}"
    done = subprocess.run(
        [*words, placed, "env.total_num_envs=96"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        f"{GPUS} accelerators, 0-2 (1 node x {GPUS}), H100"
        in done.stdout.splitlines()[0]
    )


@pytest.mark.ray
def test_what_is_declared_beside_them_must_be_right(address: str) -> None:
    topology = declared_topology(cluster(address=address))
    (node,) = topology.nodes
    assert (node.accelerators, node.kind, node.product) == (GPUS, "cuda", "H100")
    emulated = {
        "accelerator": {"kind": "emulated", "memory": "2GiB"},
        "accelerators_per_node": 5,
    }
    (node,) = declared_topology(cluster(address=address, **emulated)).nodes
    assert (node.accelerators, node.kind, node.memory_bytes) == (5, "emulated", 2 << 30)
    for wrong in ({"num_nodes": 2}, {"accelerators_per_node": 8}):
        with pytest.raises(PlacementError, match="the Ray cluster declares") as caught:
            declared_topology(cluster(address=address, **wrong))
        assert caught.value.codes == ("node-count",)


def test_machines_come_from_one_place() -> None:
    with pytest.raises(ConfigError, match="is required beside") as caught:
        declared_topology(cluster())
    assert caught.value.codes == ("missing-key",)
    with pytest.raises(ConfigError) as caught:
        declared_topology(cluster(address="auto", nodes=[{"accelerators": 8}]))
    assert caught.value.codes == ("machines-twice",)
