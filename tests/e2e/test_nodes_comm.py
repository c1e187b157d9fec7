"""Jobs whose components sit on different nodes: what travels goes through channel servers; a lost one ends the job."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.config.blocks.machines import CommConfig, RayConfig
from rlplace.errors import ClusterError, WorkerError
from rlplace.metrics import reduce_metrics
from rlplace.placement.language.slots import (
    FlexiblePlacementStrategy,
    PackedPlacementStrategy,
)
from rlplace.placement.machines.topology import Topology
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.group import WorkerGroup
from rlplace.workers.launch.reservation import Machine
from rlplace.workers.worker import Worker
from tests.contract.launch_workers import Probe
from tests.contract.own_weights import Dying, Model, Sampler, started, sync
from tests.contract.tool_workers import Joined, Peer
from tests.e2e.namespaces import machines_with_ray
from tests.e2e.training import (
    INLINE,
    SMALL,
    Finished,
    finish,
    placed,
    read_until,
    start,
    train,
)

if TYPE_CHECKING:
    from rlplace.workers.ray_launch.channels import RemoteNode

pytestmark = [pytest.mark.ray, pytest.mark.slow]

GONE_S = 60.0  # for everything to be gone on a busy machine
# Node 0 has accelerators 0-3, node 1 has 4-7.
APART = (*SMALL, *placed("0", "0", "4"), "cluster.num_nodes=2")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A Ray of two nodes on this machine, each with its own raylet and two GPUs that exist in name only."""
    from ray.cluster_utils import Cluster as Nodes

    from rlplace.workers.ray_launch.session import ray_environment

    with ray_environment("auto"):
        nodes = Nodes(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "num_gpus": 2, "include_dashboard": False},
        )
        nodes.add_node(num_cpus=1, num_gpus=2)
        yield nodes
        nodes.shutdown()


@pytest.fixture(scope="module")
def address(nodes: Any) -> str:
    return str(nodes.address)


@pytest.fixture
def driver(address: str) -> Iterator[Any]:
    """This process, as one that has joined that Ray."""
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder of shared memory for this test alone."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def joining(address: str, shm: Path) -> tuple[str, ...]:
    return f"cluster.ray.address={address}", f"cluster.comm.shm_folder={shm}"


def listening(pid: int) -> set[int]:
    """Ports on which the Ray processes of a job's nodes' channels listen."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {
            c.laddr.port
            for c in psutil.Process(pid).net_connections("tcp")
            if c.status == psutil.CONN_LISTEN
        }
    return set()


def servers() -> list[psutil.Process]:
    return [
        p
        for p in psutil.process_iter(["cmdline"])
        if any("NodeChannels" in part for part in p.info["cmdline"] or ())
    ]


def use(node: RemoteNode) -> None:
    """Until it fails: the processes of a node end a little later than Ray's server there."""
    deadline, count = time.monotonic() + GONE_S, itertools.count()
    while time.monotonic() < deadline:
        node.create(ChannelSpec(name=f"mail {next(count)}", capacity_items=1))


def numbers(run: Finished, metric: str) -> list[float]:
    return [line[metric] for line in run.metrics() if metric in line]


def test_a_job_over_two_nodes_trains_on_the_same_numbers(
    address: str, tmp_path: Path, shm: Path
) -> None:
    budget = "runner.total_iterations=4"
    apart = train(
        "hybrid_ppo", tmp_path / "apart", *APART, budget, *joining(address, shm)
    )
    assert apart.code == 0, apart.err
    assert apart.folder is not None
    assert "network" in (apart.folder / "plan.txt").read_text(encoding="utf-8")
    together = train(
        "hybrid_ppo", tmp_path / "inline", *INLINE, *placed("0", "0", "1"), budget
    )
    assert together.code == 0, together.err
    for metric in ("env/return", "actor/policy_loss", "actor/grad_norm"):
        assert numbers(apart, metric) == pytest.approx(
            numbers(together, metric), rel=2e-3, abs=2e-4
        )
    assert list(shm.iterdir()) == [], "nothing stays in shared memory"
    assert servers() == []


def test_a_lost_channel_server_ends_the_run_with_its_address(
    address: str, tmp_path: Path, shm: Path
) -> None:
    process = start(
        "hybrid_ppo",
        tmp_path,
        *APART,
        "runner.total_iterations=390625",
        *joining(address, shm),
    )
    try:
        seen = read_until(process, "    2 ")
        (server,) = servers()
        ports = listening(server.pid)
        server.kill()
    except BaseException:
        process.terminate()
        finish(process, tmp_path)
        raise
    run = finish(process, tmp_path, seen)
    assert run.code == 1
    assert "channel-broken" in run.err
    named = {int(port) for port in re.findall(r"tcp://[0-9.]+:([0-9]+)", run.err)}
    assert named & ports, f"it listened on {ports}:\n{run.err}"
    assert list(shm.iterdir()) == [], "the folder of the lost node is removed, too"


def test_a_killed_driver_leaves_nothing_on_any_node(
    address: str, tmp_path: Path, shm: Path
) -> None:
    process = start(
        "hybrid_ppo",
        tmp_path,
        *APART,
        "runner.total_iterations=390625",
        *joining(address, shm),
    )
    try:
        read_until(process, "    1 ")
        assert len(list(shm.iterdir())) == 2, "one folder for each node"
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + GONE_S
    while list(shm.iterdir()) or servers():
        assert time.monotonic() < deadline, f"left: {list(shm.iterdir())}, {servers()}"
        time.sleep(0.1)


def test_ranks_sit_on_the_nodes_of_the_plan(address: str, driver: Any) -> None:
    head = driver.get_runtime_context().get_node_id()
    with Cluster(
        topology=Topology.uniform(2, 2, "cuda"), ray=RayConfig(address=address)
    ) as cluster:
        packed = PackedPlacementStrategy(0, 3)
        group = Probe.create_group().launch(
            cluster, name="probe", placement_strategy=packed
        )
        where = group.node_id().wait()
        assert where[0] == where[1] == head, "node 0 is the head"
        assert where[2] == where[3] != head
        assert [seen for _, seen, _ in group.process().wait()] == ["0", "1", "0", "1"]
        victim = group.process().wait()[3][0]
        stuck = group.stuck()
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(
            WorkerError, match=r"probe rank 3 \(node 1, accelerators 3\)"
        ):
            stuck.wait(timeout_s=90)


@pytest.mark.usefixtures("driver")
def test_weights_of_own_workers_reach_both_nodes_and_a_loss_frees_all(
    address: str, shm: Path
) -> None:
    places = {"learner": "0-1", "sampler": "3-5"}  # node 0 has accelerators 0-3
    with Cluster(
        topology=Topology.uniform(2, 4, "emulated", 1 << 30),
        ray=RayConfig(address=address),
        comm=CommConfig(shm_folder=str(shm)),
    ) as cluster:
        groups = started(
            cluster,
            {
                "learner": (Dying, Model(seed=1, width=30_000)),
                "sampler": (Sampler, Model(seed=2, width=30_000)),
            },
            [("learner", "sampler")],
            places,
            timeout_s=600.0,
        )
        learner = groups["learner"]
        sampler = groups["sampler"]
        pushed, _ = sync(learner, sampler, 0)
        moved = reduce_metrics(pushed)
        size = moved["learner/pushed_bytes"] / 2
        assert moved["learner/pushed_same_node_bytes"] == size, "once to this node"
        assert moved["learner/pushed_network_bytes"] == size, "once to the other"
        assert size == pytest.approx(moved["learner/weights_bytes"], rel=0.01)
        assert sampler.bits().wait() == [learner.bits().wait()[0]] * 3
        with pytest.raises(WorkerError, match="learner rank 1") as lost:
            sync(learner, sampler, 1)
        assert lost.value.component == "learner"


@pytest.mark.usefixtures("driver")
def test_own_workers_of_two_nodes_talk_join_and_free_each_other(
    address: str, shm: Path
) -> None:
    with Cluster(
        topology=Topology.uniform(2, 4, "emulated", 1 << 30),  # node 1 has 4-7
        ray=RayConfig(address=address),
        comm=CommConfig(shm_folder=str(shm)),
    ) as cluster:

        def launch(name: str, worker: type[Worker], *accelerators: int) -> WorkerGroup:
            strategy = FlexiblePlacementStrategy([[number] for number in accelerators])
            return worker.create_group("a config").launch(
                cluster, name=name, placement_strategy=strategy, channels={}
            )

        joined = launch("joined", Joined, 0, 4, 5)
        assert joined.variables().wait() == [
            ["0", "3", "0", "1"],
            ["1", "3", "0", "2"],
            ["2", "3", "1", "2"],
        ]
        assert joined.reduced().wait() == [6.0] * 3
        joined.close()
        actor = launch("actor", Peer, 0, 4)
        rollout = launch("rollout", Peer, 1, 5)
        assert actor.exchange().wait() == ["of 1", "of 0"]
        sent = actor.execute_on(0).send_batch("rollout", 1)  # to the other node
        (got,) = rollout.execute_on(1).receive_two("actor", 0).wait()
        assert [name for name, _, _ in got] == ["0.0", "0.1"]
        sent.wait()
        channel = cluster.channel(ChannelSpec(name="handed over", capacity_items=4))
        assert actor.put(channel, "item").wait() == ["actor rank 0", "actor rank 1"]
        assert rollout.get(channel).wait() == ["item", "item"]
        began = time.monotonic()
        waits = rollout.receive("actor", 1)
        with pytest.raises(WorkerError):
            actor.execute_on(1).die().wait()
        with pytest.raises(WorkerError, match="peer-gone"):
            waits.wait()
        assert time.monotonic() - began < GONE_S / 2


@pytest.mark.usefixtures("driver")
def test_what_another_node_lacks_and_its_loss_are_said_with_its_address(
    nodes: Any, shm: Path
) -> None:
    from rlplace.workers.ray_launch.channels import RemoteNode

    third = nodes.add_node(num_cpus=1)
    machine = Machine(id=third.node_id, address="10.0.0.3", total={})
    node = RemoteNode(machine, shm, GONE_S)
    assert node.folder().parent == shm
    with pytest.raises(ClusterError, match="docker run --shm-size=") as small:
        node.check(1 << 60)
    assert (small.value.code, small.value.problem.key) == (
        "shm-too-small",
        "cluster.comm.shm_folder",
    )
    nodes.remove_node(third, allow_graceful=False)
    with pytest.raises(ClusterError, match="did not answer") as lost:
        use(node)
    assert (lost.value.code, lost.value.problem.key) == ("node-lost", "node 10.0.0.3")
    node.close()
    deadline = time.monotonic() + GONE_S
    while list(shm.iterdir()):
        assert time.monotonic() < deadline, (
            "the folder of the lost node is removed, too"
        )
        time.sleep(0.1)


def test_two_machines_on_a_cable(tmp_path: Path, shm: Path) -> None:
    with machines_with_ray(mbit_per_s=200, delay_ms=10) as (two, ray_address):
        overrides = (*APART, "runner.total_iterations=4", *joining(ray_address, shm))
        run = train("hybrid_ppo", tmp_path, *overrides, inside=two.inside(0))
        assert run.code == 0, run.err
        assert run.summary()["iterations"] == 4
        carried = two.received_bytes(1)
        observations = 1024 * 4 * 4  # float32 [4] for each step
        assert carried > observations, "observations went over the cable"
    assert list(shm.iterdir()) == []
