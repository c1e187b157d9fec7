"""What a launched worker group promises, on threads and on Ray alike."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.config.blocks.machines import AcceleratorConfig
from rlplace.errors import (
    AcceleratorOutOfMemory,
    ChannelMisuse,
    ClusterError,
    NotSent,
    PlacementError,
    WorkerError,
    WorkerTimeout,
)
from rlplace.placement.channels import ChannelLocation
from rlplace.placement.language.groups import RuntimeEnv
from rlplace.placement.language.slots import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    Slot,
)
from rlplace.placement.schedule import Residency
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.group import WorkerGroup, close_all, wait_all
from tests.contract.launch_workers import (
    Closing,
    Collective,
    Fragile,
    Meeting,
    Mover,
    OnHost,
    Probe,
)

MakeCluster = Callable[..., Cluster]
NUMBERS = itertools.count()


def on(*accelerators: int) -> FlexiblePlacementStrategy:
    """One rank per accelerator."""
    return FlexiblePlacementStrategy([[a] for a in accelerators])


@pytest.fixture(
    scope="module", params=["inline", pytest.param("ray", marks=pytest.mark.ray)]
)
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def cluster_of(launcher: str, accelerators: int = 4, memory: int = 1000) -> Cluster:
    accelerator = AcceleratorConfig(kind="emulated", memory=memory)
    return Cluster(
        1, accelerators, accelerator=accelerator, launcher=launcher, workers=[Probe]
    )


@pytest.fixture(scope="module")
def kept(launcher: str) -> Iterator[Cluster]:
    """One for this file; for Ray, its workers are forks, and other clusters join its Ray and leave it running."""
    with cluster_of(launcher) as cluster:
        cluster.reserve()
        yield cluster


@pytest.fixture
def cluster(kept: Cluster) -> Iterator[Cluster]:
    """For tests that leave it whole, whose groups end with them. Names of channels are used once in this file."""
    yield kept
    close_all(list(kept._groups.values()))


@pytest.fixture
def make_cluster(launcher: str, kept: Cluster) -> Iterator[MakeCluster]:
    """For tests that close it or fill its memory."""
    with contextlib.ExitStack() as made:
        yield lambda **options: made.enter_context(cluster_of(launcher, **options))


@pytest.fixture(scope="module")
def shared(launcher: str, kept: Cluster) -> Iterator[tuple[Cluster, WorkerGroup]]:
    """Three probes for the tests that break nothing."""
    with cluster_of(launcher) as cluster:
        channels = {"idle": cluster.channel(ChannelSpec(name="idle", capacity_items=2))}
        yield cluster, launch(cluster, "probe", on(0, 1, 2), channels=channels)


@pytest.fixture
def probes(shared: tuple[Cluster, WorkerGroup]) -> WorkerGroup:
    return shared[1]


def launch(
    cluster: Cluster, name: str, strategy: FlexiblePlacementStrategy, **options: Any
) -> WorkerGroup:
    return Probe.create_group("a config").launch(
        cluster, name=name, placement_strategy=strategy, **options
    )


# ── calling ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_calls_fan_out_and_results_come_by_rank(probes: WorkerGroup) -> None:
    assert probes.world_size == 3
    assert probes.rank().wait() == [0, 1, 2]
    assert probes.add(1, b=2, scale=10).wait() == [30, 130, 230]
    assert probes.execute_on(2, 0).add(1).wait() == [201, 1]
    assert probes.execute_on([1]).rank().wait() == [1]
    first, second = probes.add(1), probes.execute_on(1).rank()
    assert wait_all([second, first], timeout_s=30) == [[1], [1, 101, 201]]
    assert first.done()
    assert [first.wait(), first.wait()] == [[1, 101, 201]] * 2
    assert probes.same_thread().wait() == [True] * 3


def test_a_worker_knows_its_place(shared: tuple[Cluster, WorkerGroup]) -> None:
    cluster, probes = shared
    about = probes.about().wait()
    assert [(a["owner"], a["accelerators"]) for a in about] == [
        (f"probe rank {rank}", (rank,)) for rank in range(3)
    ]
    assert all(a["world_size"] == 3 and a["channels"] == ["idle"] for a in about)
    assert all(a["config"] == "a config" and a["rendezvous"].port == 0 for a in about)
    text = cluster.describe()
    assert (
        "4 accelerators, 0-3 (1 node x 4) emulated (computing on the CPU); 3 probe workers"
        in text
    )
    assert "setup" in text
    assert ("processes of Ray" in text) == (
        "forks of a process that has made their imports" in text
    )


@pytest.mark.parametrize(
    "launcher", [pytest.param("ray", marks=pytest.mark.ray)], indirect=True
)
def test_processes_are_called_by_their_workers(probes: WorkerGroup) -> None:
    """In `ps`, after calls by every way: those that Ray makes show a name of their own."""
    owners = [about["owner"] for about in probes.about().wait()]
    titles = [
        Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0 ")
        for pid, *_ in probes.process().wait()
    ]
    assert titles == [f"ray::{owner}" for owner in owners]


def test_unknown_methods_and_ranks_are_refused_at_once(probes: WorkerGroup) -> None:
    with pytest.raises(
        AttributeError, match=r"Probe has no method 'rnak'; did you mean 'rank'\?"
    ):
        probes.rnak()
    with pytest.raises(AttributeError, match="no method '_secret'"):
        probes.execute_on(0)._secret()
    with pytest.raises(PlacementError, match="rank 3 does not exist") as refused:
        probes.execute_on(1, 3)
    assert refused.value.codes == ("no-such-rank",)
    with pytest.raises(PlacementError, match="no rank is named"):
        probes.execute_on()


def test_groups_talk_through_channels(cluster: Cluster) -> None:
    channel = cluster.channel(ChannelSpec(name="mail", capacity_items=1))
    groups = cluster.launch_all(
        {
            "source": (Probe.create_group(), on(0), {"mail": channel}),
            "sink": (Probe.create_group(), on(0), {"mail": channel}),
        }
    )
    getting = groups["sink"].get("mail")
    assert wait_all(
        [groups["source"].put("mail", {"x": 1}), getting], timeout_s=30
    ) == [[None], [{"x": 1}]]
    with pytest.raises(ClusterError) as refused:
        launch(cluster, "sink", on(1))
    assert refused.value.code == "group-exists"
    with pytest.raises(ClusterError) as twice:
        cluster.channel(ChannelSpec(name="mail", capacity_items=1))
    assert twice.value.code == "channel-exists"


def test_groups_that_share_accelerators_are_set_up_one_after_the_other(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The engine first; what shares nothing with a group does not wait for it."""
    placed = {"actor": on(0, 1), "env": on(2), "rollout": on(1, 3)}
    meets = {
        "actor": ["env rank 0"],
        "env": ["rollout rank 0"],
        "rollout": ["env rank 0"],
    }
    cluster.launch_all(
        {
            name: (Meeting.create_group((tmp_path, meets[name])), slots, {})
            for name, slots in placed.items()
        }
    )
    times = {file.name: float(file.read_text()) for file in tmp_path.iterdir()}
    engine_ready = max(times[f"rollout rank {rank} ends"] for rank in (0, 1))
    assert engine_ready < min(times[f"actor rank {rank} begins"] for rank in (0, 1))


def test_the_start_tells_the_turns_of_the_set_up() -> None:
    told = list[str]()

    def tell(line: str) -> None:
        # The groups behind it must wait for its report
        if "rollout: ready" in line:
            time.sleep(0.2)
        told.append(line)

    emulated = AcceleratorConfig(kind="emulated")
    with Cluster(1, 4, accelerator=emulated, launcher="inline", tell=tell) as cluster:
        placed = {
            "actor": on(0, 1),
            "critic": on(1),
            "env": on(1, 2),
            "rollout": on(1, 3),
        }
        kinds = {"env": OnHost}
        cluster.launch_all(
            {
                n: (kinds.get(n, Probe).create_group(), slots, {})
                for n, slots in placed.items()
            }
        )
    assert (
        told[0]
        == "  set-up: in turns where accelerators are shared, rollout and env, then actor, then critic"
    )
    reported = [line.partition(":")[0].strip() for line in told if ": ready" in line]
    # The env shares no accelerators, so its set-up ends at any time
    assert reported.count("env") == 1
    reported.remove("env")
    assert reported == ["rollout", "actor", "critic"]


def test_no_group_begins_behind_one_whose_setup_failed(
    cluster: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(WorkerError, match=r"rollout rank 0 .*setup failed"):
        cluster.launch_all(
            {
                "actor": (Meeting.create_group((tmp_path, [])), on(0), {}),
                "rollout": (
                    Meeting.create_group((tmp_path / "missing", [])),
                    on(0),
                    {},
                ),
            }
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "launcher",
    ["inline", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])],
    indirect=True,
)
def test_the_driver_has_an_end_of_its_own(
    make_cluster: MakeCluster, launcher: str
) -> None:
    cluster = make_cluster()
    channel = cluster.channel(ChannelSpec(name="mail", capacity_items=2)).named(
        "driver"
    )
    probe = launch(cluster, "probe", on(0), channels={"mail": channel})
    channel.put({"x": 1})
    assert probe.get("mail").wait() == [{"x": 1}]
    assert (channel.stats().producers, channel.stats().consumers) == (
        ("driver",),
        ("probe rank 0",),
    )
    (folder,) = probe.folder().wait()
    assert (folder is None) == (launcher == "inline")
    cluster.close()
    assert folder is None or not Path(folder).exists(), "it goes with the cluster"


# ── failing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_a_failure_names_its_rank_and_stays(
    cluster: Cluster, kind: type[BaseException]
) -> None:
    probes = launch(cluster, "probe", on(0, 1))
    where = r"probe rank 1 \(node 0, accelerators 1\)"
    with pytest.raises(
        WorkerError, match=f"{where}: fail_on failed: {kind.__name__}"
    ) as raised:
        probes.fail_on(1, kind).wait(timeout_s=60)
    error = raised.value
    assert (error.component, error.rank, error.node, error.accelerators) == (
        "probe",
        1,
        0,
        (1,),
    )
    assert error.method == "fail_on"
    assert isinstance(error.cause, kind)
    assert error.__cause__ is error.cause
    assert "launch_workers.py" in (error.remote_traceback or "")
    assert "host.py" not in (error.remote_traceback or ""), (
        "only the worker's own frames help"
    )
    with pytest.raises(WorkerError) as again:
        probes.rank()
    assert again.value is error
    assert probes.failure is error
    assert probes.closed


def test_a_constructor_that_fails_fails_the_launch(cluster: Cluster) -> None:
    with pytest.raises(WorkerError, match="no constructor on rank 1") as raised:
        Fragile.create_group(1).launch(
            cluster, name="fragile", placement_strategy=on(0, 1)
        )
    assert raised.value.rank == 1
    retry = Fragile.create_group(None).launch(
        cluster, name="fragile", placement_strategy=on(0, 1)
    )
    assert retry.onload().wait()[1].residency is Residency.FULL


@pytest.mark.parametrize(
    "launcher", [pytest.param("ray", marks=pytest.mark.ray)], indirect=True
)
def test_an_argument_that_cannot_be_pickled_fails_before_anything_is_sent(
    probes: WorkerGroup,
) -> None:
    with pytest.raises(NotSent, match="cannot pickle") as caught:
        probes.add(threading.Lock())
    assert caught.value.problem.key == "arguments of add[0]"
    probes.hold()
    probes.rank()
    probes.execute_on(1).add(threading.Lock())
    with pytest.raises(TypeError, match="cannot pickle"):
        probes.flush()
    assert not probes.at_work
    assert probes.add(1).wait(timeout_s=30) == [1, 101, 201]


# ── messages of several calls ────────────────────────────────────────────────────────────────────────────────────────


def test_calls_that_are_held_run_in_order_and_have_results_and_records_of_their_own(
    probes: WorkerGroup,
) -> None:
    probes.hold()
    asked = [
        probes.acquire(100, "weights"),
        probes.execute_on(1, 2).add(1),
        probes.release("weights"),
    ]
    assert not any(pending.done() for pending in asked)
    probes.flush()
    assert wait_all(asked, timeout_s=30) == [[100] * 3, [101, 201], [0] * 3]
    records = [[call.record for call in pending.calls] for pending in asked]
    assert [[record.method for record in each if record] for each in records] == [
        ["acquire"] * 3,
        ["add"] * 2,
        ["release"] * 3,
    ]


def test_a_failure_within_a_message_is_that_of_its_call_and_what_is_behind_it_is_not_begun(
    cluster: Cluster,
) -> None:
    probes = launch(cluster, "probe", on(0, 1))
    probes.outlast = "give up"
    probes.hold()
    asked = [
        probes.acquire(100, "weights"),
        probes.fail_on(1),
        probes.release("weights"),
    ]
    probes.flush()
    with pytest.raises(
        WorkerError, match=r"probe rank 1 .*: fail_on failed: ValueError"
    ):
        wait_all(asked, timeout_s=60)
    before, failing, behind = (pending.calls[1] for pending in asked)
    assert (before.result(), failing.stopped, behind.stopped) == (100, False, True)
    assert set(probes.lost()) == {1}
    probes.go_on({})
    assert probes.execute_on(1).acquire(0, "nothing").wait(timeout_s=30) == [100], (
        "it was not released"
    )


def test_a_cancelled_rank_leaves_a_message_between_two_calls(cluster: Cluster) -> None:
    probes = launch(cluster, "probe", on(0, 1))
    probes.outlast, probes.grace_s = "give up", 30.0
    probes.hold()
    waiting, behind = probes.until_cancelled(), probes.acquire(100, "weights")
    probes.flush()
    probes.cancel("a test")
    probes.wait_wound_down()
    assert [call.result() for call in waiting.calls] == [True, True]
    assert [call.stopped for call in behind.calls] == [True, True]
    assert not probes.lost()
    probes.go_on({})
    assert probes.acquire(0, "nothing").wait(timeout_s=30) == [0, 0], (
        "nothing was acquired"
    )


# ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_deadline_names_the_ranks_that_still_work(probes: WorkerGroup) -> None:
    pending = probes.execute_on(0, 2).get("idle")
    assert probes.execute_on(1).rank().wait(timeout_s=30) == [1]
    with pytest.raises(
        WorkerTimeout, match=r"probe\.get: not finished after 0\.1 s"
    ) as raised:
        pending.wait(timeout_s=0.1)
    assert raised.value.code == "worker-deadline"
    assert raised.value.problem.got == "still working: probe ranks 0,2 in get"
    why = raised.value.problem.why or ""
    assert "launch_workers.py" in why, "the line a rank is at"
    assert "channel idle: 0 of " in why
    assert (
        "probe rank 0, probe rank 2: " in why or "probe rank 2, probe rank 0: " in why
    )
    assert not pending.done()
    for item in ("a", "b"):
        probes.execute_on(1).put("idle", item).wait(timeout_s=30)
    assert sorted(pending.wait(timeout_s=30)) == ["a", "b"], "a deadline breaks nothing"


# ── sharing a process ────────────────────────────────────────────────────────────────────────────────────────────────


def sharing(cluster: Cluster, *accelerators: int) -> list[Slot]:
    """Slots as planned with `process: shared`: rank by rank in the processes of the components that share them."""
    slots = on(*accelerators).get_placement(cluster)
    return [
        dataclasses.replace(slot, process=f"env+rollout {slot.rank}") for slot in slots
    ]


def together(cluster: Cluster) -> tuple[dict[str, WorkerGroup], Channel]:
    """env and rollout, two ranks each, and the channel between them, whose keys never leave a process."""
    locations = [
        ChannelLocation(
            node=0,
            process=f"env+rollout {rank}",
            keys=(str(rank),),
            capacity_items=2,
            under_way=2,
        )
        for rank in range(2)
    ]
    inside = cluster.channel(
        ChannelSpec(name=f"inside {next(NUMBERS)}", capacity_items=4, keys=("0", "1")),
        locations,
    )
    launch = (Probe.create_group(), sharing(cluster, 0, 1), {"inside": inside})
    return cluster.launch_all({"env": launch, "rollout": launch}), inside


def test_workers_of_one_process_pass_items_by_reference(
    cluster: Cluster, launcher: str
) -> None:
    groups, inside = together(cluster)
    pids = [
        [pid for pid, _, _ in groups[name].process().wait()]
        for name in ("env", "rollout")
    ]
    assert pids[0] == pids[1]
    assert len(set(pids[0])) == (1 if launcher == "inline" else 2), (
        "each rank has a process of its own"
    )
    for group in groups.values():
        assert group.same_thread().wait() == [True] * 2, (
            "each worker has its own thread"
        )
        assert group.rank().wait() == [0, 1]
    getting = groups["rollout"].get_by_rank("inside")
    putting = groups["env"].put_lock("inside")
    assert wait_all([putting, getting], timeout_s=60) == [[None] * 2, ["lock"] * 2]
    stats = inside.stats()
    assert (stats.puts, stats.gets, set(stats.producers)) == (
        2,
        2,
        {"env rank 0", "env rank 1"},
    )
    groups["env"].close()
    assert groups["rollout"].rank().wait() == [0, 1], (
        "a process ends with the last of its workers"
    )


def test_a_failure_frees_the_partner_in_the_same_process(cluster: Cluster) -> None:
    groups, _ = together(cluster)
    waiting = [groups["rollout"].get_by_rank("inside"), groups["env"].fail_on(1)]
    with pytest.raises(WorkerError, match="rank 1 was to fail") as raised:
        wait_all(waiting, timeout_s=60)
    assert (raised.value.component, raised.value.rank) == ("env", 1)
    assert groups["rollout"].failure is raised.value


@pytest.mark.parametrize(
    "launcher", [pytest.param("ray", marks=pytest.mark.ray)], indirect=True
)
def test_what_a_driver_cannot_do_with_a_shared_process(cluster: Cluster) -> None:
    _, inside = together(cluster)
    with pytest.raises(
        ChannelMisuse, match="share process 'env\\+rollout 0'"
    ) as refused:
        inside.put("from outside", key="0")
    assert refused.value.code == "inside-a-process"
    with pytest.raises(ClusterError, match="runs already") as late:
        cluster.launch_all({"late": (Probe.create_group(), sharing(cluster, 0), {})})
    assert late.value.code == "process-cannot-be-shared"


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_emulated_memory_is_shared_and_names_the_residents(cluster: Cluster) -> None:
    groups = cluster.launch_all(
        {
            "actor": (Probe.create_group(), on(0, 1), {}),
            "rollout": (Probe.create_group(), on(1), {}),
        }
    )
    assert groups["actor"].acquire(600, "weights").wait() == [600, 600]
    assert groups["actor"].acquire(400, "weights").wait() == [400, 400], (
        "a label is replaced, not added to"
    )
    assert groups["rollout"].acquire(500, "kv cache").wait() == [500]
    with pytest.raises(WorkerError) as raised:
        groups["rollout"].acquire(200, "workspace").wait(timeout_s=60)
    cause = raised.value.cause
    assert isinstance(cause, AcceleratorOutOfMemory)
    assert (cause.code, cause.accelerator, cause.lacking_bytes) == (
        "accelerator-out-of-memory",
        1,
        100,
    )
    assert "actor rank 1: weights 400 bytes" in (cause.problem.why or "")
    assert groups["actor"].release("weights").wait() == [0, 0], "other groups live on"


def test_moves_are_accounted_and_end_with_the_worker(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(accelerators=1, memory=150)
    group = Mover.create_group().launch(cluster, name="mover", placement_strategy=on(0))
    assert [r.accelerator_bytes for r in group.onload().wait()] == [150]
    assert [r.accelerator_bytes for r in group.move(Residency.WEIGHTS).wait()] == [100]
    assert [r.accelerator_bytes for r in group.offload().wait()] == [0]
    group.onload().wait()
    group.close()
    again = Mover.create_group().launch(cluster, name="mover", placement_strategy=on(0))
    assert [r.accelerator_bytes for r in again.onload().wait()] == [150], (
        "the closed worker's memory is free"
    )


def test_a_rank_on_a_node_alone_fills_no_accelerator(cluster: Cluster) -> None:
    groups = cluster.launch_all(
        {
            "reward": (Mover.create_group(), NodePlacementStrategy([0, 0]), {}),
            "actor": (Mover.create_group(), on(0), {}),
        }
    )
    for group in (groups["reward"], groups["actor"], groups["reward"]):
        group.onload().wait()
    assert [r.accelerator_bytes for r in groups["reward"].onload().wait()] == [0, 0]


# ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_closing_closes_each_worker_once(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster()
    with Closing.create_group(str(tmp_path)).launch(
        cluster, name="closing", placement_strategy=on(0, 1)
    ) as group:
        group.onload().wait()
    group.close()
    assert {f.name: f.read_text() for f in tmp_path.iterdir()} == {
        "0": "closed\n",
        "1": "closed\n",
    }
    with pytest.raises(ClusterError) as refused:
        group.onload()
    assert refused.value.code == "group-closed"
    cluster.close()
    cluster.close()
    with pytest.raises(ClusterError) as gone:
        launch(cluster, "late", on(0))
    assert gone.value.code == "cluster-closed"


def test_closing_frees_busy_ranks(cluster: Cluster) -> None:
    idle = {"idle": cluster.channel(ChannelSpec(name="idle", capacity_items=1))}
    group = launch(cluster, "busy", on(0, 1), channels=idle)
    calls = [group.execute_on(0).get("idle"), group.execute_on(1).stuck()]
    with ThreadPoolExecutor(1) as watcher:
        waiting = watcher.submit(wait_all, calls, timeout_s=60)
        group.close(grace_s=0.5)
        assert isinstance(waiting.exception(30.0), WorkerError)


# ── where they differ ────────────────────────────────────────────────────────────────────────────────────────────────


def test_threads_cannot_share_a_process_group() -> None:
    with Cluster(
        1, 2, launcher="inline", accelerator=AcceleratorConfig(kind="emulated")
    ) as cluster:
        with pytest.raises(ClusterError, match=r"actor \(2 ranks\)") as refused:
            Collective.create_group().launch(
                cluster, name="actor", placement_strategy=on(0, 1)
            )
        assert refused.value.code == "inline-needs-one-rank"
        alone = Collective.create_group().launch(
            cluster, name="actor", placement_strategy=on(0)
        )
        assert alone.meet().wait() == [[]]


@pytest.mark.ray
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("launcher", ["ray"], indirect=True)
def test_processes_are_placed_seen_and_met() -> None:
    with Cluster(1, 4, accelerator=AcceleratorConfig(kind="emulated")) as cluster:
        group = Collective.create_group().launch(
            cluster, name="actor", placement_strategy=on(0, 1, 2)
        )
        assert group.meet().wait(timeout_s=60) == [[1, 2], [], []]
        probes = launch(cluster, "probe", on(0, 0))
        seen = probes.process().wait()
        assert len({pid for pid, _, _ in seen}) == 2, (
            "two ranks of one accelerator are two processes"
        )
        assert [(visible, threads) for _, visible, threads in seen] == [("", "1")] * 2
        assert probes.device_order().wait() == ["PCI_BUS_ID"] * 2, (
            "GPUs have the numbers that Ray gives them"
        )
        found = RuntimeEnv(
            env_vars=(("OMP_NUM_THREADS", "2"),), interpreter=sys.executable
        )  # as by `env_configs`
        slots = [
            dataclasses.replace(slot, runtime_env=found)
            for slot in on(0).get_placement(cluster)
        ]
        changed = cluster.launch_all({"changed": (Probe.create_group(), slots, {})})[
            "changed"
        ]
        assert [threads for _, _, threads in changed.process().wait()] == ["2"]
