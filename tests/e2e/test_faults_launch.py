"""What happens to worker processes when something dies, is missing, or is reserved by another job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.config.blocks.engine import FaultsConfig
from rlplace.config.blocks.machines import AcceleratorConfig, RayConfig
from rlplace.errors import ClusterError, RayDied, WorkerError
from rlplace.execution.faults import Fault, History, Recovery
from rlplace.placement.language.slots import FlexiblePlacementStrategy
from rlplace.placement.machines.topology import Topology
from rlplace.placement.schedule import Residency
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.group import wait_all
from rlplace.workers.ray_launch import servers, session
from tests.contract.launch_workers import Probe, Settling

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parent.parent.parent
EMULATED = AcceleratorConfig(kind="emulated", memory=1000)
GONE_S = 30.0  # for processes to be gone on a busy machine


def on(*accelerators: int) -> FlexiblePlacementStrategy:
    return FlexiblePlacementStrategy([[a] for a in accelerators])


def probes(cluster: Cluster, *accelerators: int, name: str = "probe") -> Any:
    return Probe.create_group().launch(
        cluster, name=name, placement_strategy=on(*accelerators)
    )


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=GONE_S)[1]


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_killed_worker_frees_what_waits_for_it_and_leaves_nothing() -> None:
    """Rank 1 of env is killed while its sibling and another group wait on a channel that has two minutes left.

    It dies in the second of three calls that it was sent together.
    """
    before = set(
        psutil.Process().children(recursive=True)
    )  # servers of other tests stay, on purpose
    with Cluster(1, 4, accelerator=EMULATED, workers=[Probe]) as cluster:
        cluster.reserve()
        channels = {"idle": cluster.channel(ChannelSpec(name="idle", capacity_items=1))}
        groups = cluster.launch_all(
            {
                "env": (Probe.create_group(), on(0, 1), channels),
                "rollout": (Probe.create_group(), on(2), channels),
            }
        )
        pid = groups["env"].process().wait()[1][0]
        env = groups["env"]
        env.hold()
        waiting = [
            env.move(Residency.FULL),
            env.die_or_get(1, "idle"),
            env.move(Residency.OFF),
        ]
        env.flush()
        waiting.append(groups["rollout"].get("idle"))
        with pytest.raises(
            WorkerError,
            match=r"env rank 1 .*die_or_get failed: the worker process died",
        ) as raised:
            wait_all(waiting, timeout_s=90)
        assert (
            raised.value.rank,
            raised.value.cause,
            raised.value.remote_traceback,
        ) == (1, None, None)
        assert str(pid) in str(raised.value)
        for group in groups.values():
            assert group.failure is raised.value
        children = psutil.Process().children(recursive=True)
        assert probes(cluster, 3, name="next").rank().wait() == [0], (
            "the driver and the cluster live on"
        )
        children += psutil.Process().children(recursive=True)
    assert alive(list(set(children) - before)) == []


def wait_for_a_lost_node(cluster: Cluster) -> None:
    while cluster.lost_nodes() == {}:
        time.sleep(0.5)


@pytest.mark.slow
def test_a_raylet_that_ray_counts_as_lost_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The raylet does not answer Ray's GCS. That it is stopped by a signal is not seen here: it may wait for a disk."""
    for name, value in (("period_ms", 500), ("timeout_ms", 500)):
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    monkeypatch.setattr(servers, "_STOPPED", ())
    with Cluster(1, 1, accelerator=EMULATED, workers=[Probe]) as cluster:
        cluster.reserve()
        assert probes(cluster, 0).rank().wait() == [0]
        (raylet,) = (
            each
            for each in psutil.Process().children(recursive=True)
            if each.name() == "raylet"
        )
        assert cluster.lost_nodes() == {}
        raylet.suspend()
        try:
            with pytest.raises(RayDied, match="has not answered Ray's GCS"):
                wait_for_a_lost_node(cluster)
        finally:
            raylet.resume()


DRIVER = """
    import sys
    from rlplace.config.blocks.machines import AcceleratorConfig
    from rlplace.workers.launch.cluster import Cluster
    from rlplace.placement.language.slots import FlexiblePlacementStrategy
    from tests.contract.launch_workers import Probe

    with Cluster(1, 2, accelerator=AcceleratorConfig(kind="emulated")) as cluster:
        strategy = FlexiblePlacementStrategy([[0], [1]])
        group = Probe.create_group().launch(cluster, name="probe", placement_strategy=strategy)
        (folder, _), stuck = group.folder().wait(), group.execute_on(0).stuck()
        print(folder, flush=True)
        stuck.wait()
"""


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGINT, id="interrupted", marks=pytest.mark.slow),
    ],
)
def test_a_driver_that_ends_leaves_no_process_and_no_memory(
    number: signal.Signals,
) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert driver.stdout is not None
    try:
        folder = Path(driver.stdout.readline().decode().strip())
        assert folder.is_dir()
        spill = (folder / "spill").readlink()
        spill.mkdir()  # as the first item would that finds no room
        children = psutil.Process(driver.pid).children(recursive=True)
        assert sum("ray::" in p.name() for p in children) >= 2
    finally:
        driver.send_signal(number)
    driver.communicate(timeout=60)
    assert alive(children) == []
    deadline = time.monotonic() + GONE_S
    while folder.exists() or spill.exists():
        assert time.monotonic() < deadline, f"{folder} or {spill} is left"
    assert driver.returncode == (
        -signal.SIGKILL if number == signal.SIGKILL else -signal.SIGINT
    )


# ── machines that are not what the plan needs ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_an_address_without_a_cluster(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private import services

    # As after a cluster that has ended: its address is still in a file, which is of all users of this machine.
    monkeypatch.setattr(session, "_at_work", lambda: (set(), []))
    monkeypatch.setattr(
        services, "find_bootstrap_address", lambda folder: "127.0.0.1:1"
    )
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        Cluster(1, 1, accelerator=EMULATED, ray=RayConfig(address=address)) as cluster,
        pytest.raises(ClusterError) as refused,
    ):
        cluster.start()
    assert refused.value.code == "cluster-unreachable"
    assert refused.value.problem.got == address
    assert "refused" in (refused.value.problem.why or "")


def test_auto_does_not_choose_among_several_clusters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private import services

    monkeypatch.setattr(
        session, "_at_work", lambda: ({"127.0.0.1:2", "127.0.0.1:1"}, [])
    )
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for stale in (None, "127.0.0.1:3"):
        monkeypatch.setattr(
            services, "find_bootstrap_address", lambda folder, found=stale: found
        )
        with pytest.raises(ClusterError) as refused:
            session._join("auto")
        assert refused.value.code == "cluster-unreachable"
        assert (refused.value.problem.why or "").startswith(
            "several are here, 127.0.0.1:1, 127.0.0.1:2: RAY_ADDRESS"
        )


@pytest.fixture(scope="module")
def four_gpus() -> Iterator[Any]:
    """A Ray that was given four GPUs that do not exist, which is enough to see which worker would get which."""
    import ray

    from rlplace.workers.ray_launch.session import ray_environment

    with ray_environment(None):
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=4,
            include_dashboard=False,
            log_to_driver=False,
        )
    yield ray
    ray.shutdown()


def gpu_cluster(nodes: int = 1, gpus: int = 4, **timeouts: float) -> Cluster:
    return Cluster(
        topology=Topology.uniform(nodes, gpus, "cuda"), ray=RayConfig(**timeouts)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
def test_auto_does_not_join_the_ray_that_a_program_has_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private import services

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: None)
    with pytest.raises(ClusterError) as refused:
        session._join("auto")
    assert refused.value.code == "cluster-private"
    assert f"process {os.getpid()}," in (refused.value.problem.why or "")


CUT_OFF = """
import socket, sys, threading
from rlplace.errors import ClusterError
from rlplace.workers.ray_launch.session import RaySession
from rlplace.config.blocks.machines import RayConfig

head = socket.create_server(("127.0.0.1", 0))
address = f"127.0.0.1:{head.getsockname()[1]}"
threading.Thread(target=lambda: (head.accept(), head.close()), daemon=True).start()
try:
    RaySession(RayConfig(address=address)).start()
except ClusterError as error:
    sys.exit(error.code)
"""


def test_a_cluster_that_ends_while_it_is_joined_is_an_error_soon() -> None:
    quick = {
        "RAY_gcs_rpc_server_connect_timeout_s": "1",
        "RAY_py_gcs_connect_timeout_s": "1",
    }  # 5 and 30 by default
    done = subprocess.run(
        [sys.executable, "-c", CUT_OFF],
        cwd=ROOT,
        env=os.environ | quick,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.splitlines()[-1] == "cluster-unreachable", done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
def test_each_worker_sees_exactly_its_accelerators() -> None:
    with gpu_cluster() as cluster:
        two_each = FlexiblePlacementStrategy([[0, 1], [2, 3]])
        groups = cluster.launch_all(
            {
                "actor": (Probe.create_group(), two_each, {}),
                "rollout": (Probe.create_group(), on(3, 0, 3), {}),
            }
        )
        assert [seen for _, seen, _ in groups["actor"].process().wait()] == [
            "0,1",
            "2,3",
        ]
        assert [seen for _, seen, _ in groups["rollout"].process().wait()] == [
            "3",
            "0",
            "3",
        ]


@pytest.mark.slow  # five clusters of a Ray; reservations have tests of their own
@pytest.mark.usefixtures("four_gpus")
def test_a_second_job_waits_for_accelerators_and_says_which_are_missing() -> None:
    with gpu_cluster() as first:
        assert first.launch_all({"actor": (Probe.create_group(), on(0, 2, 3), {})})[
            "actor"
        ].rank().wait() == [0, 1, 2]
        with gpu_cluster(reserve_timeout_s=0.5) as second:
            with pytest.raises(ClusterError) as refused:
                probes(second, 0)
            assert refused.value.code == "reserve-timeout"
            assert (refused.value.problem.got or "").endswith("needs 4 GPU, has 1")
            assert "within 0.5 s" in refused.value.problem.what
        with gpu_cluster() as third:
            lone = third.launch_all({"actor": (Probe.create_group(), on(1), {})})[
                "actor"
            ]
            assert len(lone.process().wait()[0][1] or "") == 1, (
                "what the first left over is one GPU"
            )
            with pytest.raises(ClusterError) as outside:
                probes(third, 2, name="late")
            assert (outside.value.code, outside.value.problem.key) == (
                "not-reserved",
                "late rank 0",
            )
    with gpu_cluster() as fourth:
        assert probes(fourth, 3).rank().wait() == [0], "closing gave everything back"


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
def test_ranks_that_cannot_start_again_move_to_accelerators_that_are_free(
    tmp_path: Path,
) -> None:
    """All ranks of the accelerator move, as long as there is another."""
    bad, history = tmp_path / "bad", History()
    history.ready(0.0)

    def fail(accelerator: int) -> Fault:
        bad.write_text(str(accelerator))
        with pytest.raises(WorkerError) as died:
            groups["env"].execute_on(1).die_or_get(1, "none").wait()
        return recovery.recover(
            died.value, iteration=accelerator, stage="rollout", redone_s=0.0
        )

    with gpu_cluster(gpus=3) as cluster:
        made = Settling.create_group(bad)
        groups = cluster.launch_all(
            {"env": (made, on(0, 1), {}), "rollout": (made, on(1), {})}
        )
        before = [seen for _, seen, _ in groups["env"].process().wait()]
        recovery = Recovery(
            cluster,
            groups,
            FaultsConfig(),
            history,
            tell=print,
            patience_s=1.0,
            replaceable=("env", "rollout"),
        )
        fault = fail(1)
        assert fault.moved == (
            "env rank 1 to accelerator 2",
            "rollout rank 0 to accelerator 2",
        )
        assert fault.replaced == ("env rank 1", "rollout rank 0")
        assert [about["accelerators"] for about in groups["env"].about().wait()] == [
            (0,),
            (2,),
        ]
        (stays, moved), (shares,) = (
            [seen for _, seen, _ in groups[name].process().wait()] for name in groups
        )
        assert stays == before[0]
        assert moved == shares
        assert moved not in before
        with pytest.raises(
            WorkerError,
            match=r"no accelerator here\n.*3 times there, and there is no other",
        ):
            fail(2)
