"""What a run does when machines are lost, without machines: the job that it goes on with, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlplace.checkpoints.checkpoint import CONFIG, RUN
from rlplace.checkpoints.find import find
from rlplace.checkpoints.store import Contents, Store
from rlplace.cli.train import _run
from rlplace.errors import ClusterError, NodeLost, Problem, WorkerError
from rlplace.execution.faults import Fault, History
from rlplace.report.summary import SIMULATED, Progress
from rlplace.report.typed import Typed
from rlplace.runtime import node_loss
from rlplace.runtime.launched import JobSpec, job_spec
from rlplace.runtime.prepare import Prepared, prepare
from rlplace.runtime.resume import resumed
from rlplace.runtime.run import run as train
from rlplace.signals import Signals

FOLDER = Path("runs/job/now")
MACHINES = {
    "num_nodes": 2,
    "accelerators_per_node": 4,
    "accelerator": {"kind": "emulated", "memory": "2GiB"},
}


def too_small() -> ClusterError:
    """The error of a cluster with too few nodes."""
    key = "cluster.num_nodes"
    what = "the cluster has 1 node"
    return ClusterError(Problem(code="cluster-too-small", key=key, what=what))


def job(
    *, env: str = "0-1,6-7", rollout: str = "4-5", envs: int = 16, **faults: Any
) -> Prepared:
    placed = {"actor": "0-1,4-5", "env": env, "rollout": rollout}
    return prepare(
        {
            "cluster": {**MACHINES, "component_placement": placed},
            "actor": {"enable_offload": True},
            "env": {
                "id": "CartPole-v1",
                "total_num_envs": envs,
                "enable_offload": True,
            },
            "rollout": {"enable_offload": True},
            "faults": {"on_node_loss": "replan", **faults},
        }
    )


def lost() -> NodeLost:
    return NodeLost(
        Problem(code="node-lost", key="node 1 (10.0.0.3)", what="was lost", why="Ray"),
        {1},
        FOLDER,
    )


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A checkpoint is there, and as many machines as `others` says at each look; the waits that were asked for."""
    waits: list[float] = []

    def await_machines(
        ray: object, slots: object, topology: object, wait_s: float
    ) -> None:
        waits.append(wait_s)
        if len(waits) > 1 or wait_s == 0.0:
            raise too_small()

    monkeypatch.setattr(node_loss, "await_machines", await_machines)
    monkeypatch.setattr(node_loss, "find", lambda *_: None)
    monkeypatch.setattr(
        node_loss,
        "resumed",
        lambda job: type("Found", (), {"text": f"resumes {job.config.resume}"}),
    )
    return waits


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run with two checkpoints of job(); what is found there is found."""
    monkeypatch.setattr(node_loss, "find", find)
    monkeypatch.setattr(node_loss, "resumed", resumed)
    store = Store(tmp_path, keep_last=2, keep_best=0)
    began = {"progress": Progress(measures=SIMULATED, began=0.0).state(), "files": {}}
    texts = {CONFIG: yaml.safe_dump(dict(job().mapping)), RUN: json.dumps(began)}
    for iteration in (10, 30):
        part = store.begin(iteration, ())
        of = Contents(
            ranks={}, texts=texts, version=iteration, score=None, libraries={}
        )
        store.commit(part, of, timeout_s=20, cancelled=threading.Event())
    return tmp_path


class Machines:
    """A cluster of which node 1 is gone when the workers are started."""

    @classmethod
    def from_config(cls, *config: object, **options: object) -> Machines:
        return cls()

    def lost_nodes(self) -> dict[int, str]:
        return {1: "10.0.0.3"}

    def ray_died(self) -> None:
        return None

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing was started."""


@pytest.mark.parametrize("was_ready", [True, False])
def test_a_loss_while_workers_are_started_again_is_another_loss(
    run: Path, monkeypatch: pytest.MonkeyPatch, was_ready: bool
) -> None:
    def launch(cluster: Machines, spec: JobSpec, staying: object) -> None:
        raise WorkerError(
            component="actor", rank=1, node=1, method="start", what="died with its node"
        )

    monkeypatch.setattr("rlplace.runtime.run.Cluster", Machines)
    monkeypatch.setattr("rlplace.runtime.launched.launch", launch)
    before, history, checkpoint = (
        job(),
        History(),
        find(str(run / "checkpoints/000010"), Path()),
    )
    assert checkpoint is not None
    if was_ready:
        history.ready(trained_s=0.0)
    spec = job_spec(before.config, before.plan)
    with pytest.raises(NodeLost if was_ready else WorkerError) as ended:
        train(
            spec,
            before.view,
            resolved=before.mapping,
            resumed=checkpoint,
            history=history,
        )
    assert "died with its node" in str(ended.value)
    if isinstance(ended.value, NodeLost):
        assert (ended.value.nodes, ended.value.folder) == ({1}, checkpoint.folder)
        (event,) = history.ready(trained_s=0.0)
        assert event.what.startswith(
            "node 1 (10.0.0.3) was lost with actor rank 2, actor rank 3, env rank 2,"
        )


def test_a_loss_is_told_once_where_the_new_workers_find_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = too_small()
    ends = [lost(), refused, None]

    def ended(*_: object, **__: object) -> None:
        if (error := ends.pop(0)) is not None:
            raise error

    monkeypatch.setattr("rlplace.runtime.run.run", ended)
    monkeypatch.setattr(node_loss, "await_machines", lambda *_: None)
    found = types.SimpleNamespace(text="resumes", checkpoint=None)
    monkeypatch.setattr(node_loss, "resumed", lambda job: found)
    _run(job(on_node_loss="wait"), None, Signals(), Typed("rlplace train"), ())
    said = capsys.readouterr().out
    assert (said.count(str(lost())), said.count(str(refused)), ends) == (1, 1, [])


def go_on(
    before: Prepared, history: History | None = None
) -> tuple[Prepared, list[str]]:
    told: list[str] = []
    after, _ = node_loss.go_on(before, lost(), history or History(), tell=told.append)
    return after, told


def test_a_plan_for_what_is_left() -> None:
    after, told = go_on(job())
    placement = after.plan.placement
    assert placement.topology.num_nodes == 1
    assert {name: placement.spec(name).render() for name in placement.components} == {
        "actor": "0-1",
        "env": "0-1",
        "rollout": "2-3",  # nothing of it was left: the accelerators that no other uses
    }
    assert after.mapping["resume"] == str(FOLDER.absolute())
    assert told == [str(lost()), f"resumes {FOLDER.absolute()}"]


@pytest.mark.parametrize(
    ("folder", "iteration"), [("checkpoints/000010", 10), (".", 30)]
)
def test_it_goes_on_with_the_checkpoint_that_the_run_had(
    run: Path, folder: str, iteration: int
) -> None:
    before, error = job(), lost()
    error.folder = run / folder
    after, found = node_loss.go_on(before, error, History(), tell=lambda line: None)
    assert found.checkpoint.iteration == iteration
    assert after.config.resume == str(run / folder)


def test_where_that_is_damaged_it_ends_and_offers_another(run: Path) -> None:
    error = lost()
    error.folder = run / "checkpoints" / "000010"
    (error.folder / CONFIG).write_text("")
    with pytest.raises(NodeLost) as ended:
        node_loss.go_on(job(), error, History(), tell=lambda line: None)
    assert "[checkpoint-damaged]" in str(ended.value)
    assert f"fix: resume={run}/checkpoints/000030" in str(ended.value)


def test_without_free_accelerators_it_goes_to_all_if_the_config_allows_that() -> None:
    after, _ = go_on(job(env="0-3", rollout="4-7"))
    assert after.plan.placement.spec("rollout").render() == "0-3"


@pytest.mark.parametrize(
    ("faults", "job_of", "why"),
    [
        ({"on_node_loss": "fail"}, {}, "Ray"),
        ({"restarts": 0}, {}, "after 0 recoveries within an hour; faults.restarts: 0"),
        (
            {},
            {"env": "0-2,4", "envs": 16},
            "faults.on_node_loss: replan cannot go on",
        ),  # 16 over 3 ranks
    ],
)
def test_what_is_refused_ends_the_run(
    faults: dict[str, Any], job_of: dict[str, Any], why: str
) -> None:
    with pytest.raises(NodeLost) as ended:
        go_on(job(**job_of, **faults))
    assert why in str(ended.value)
    assert str(ended.value).startswith("node 1 (10.0.0.3): was lost")


def test_a_run_waits_as_long_as_it_may(others: list[float]) -> None:
    waiting = job(on_node_loss="wait", node_wait_s=7.0)
    after, told = go_on(waiting)
    assert (others, after.plan) == ([7.0], waiting.plan)
    assert "waiting up to 7 s for machines" in told[1]
    with pytest.raises(NodeLost, match="the cluster has 1 node"):
        go_on(waiting)


def test_the_clock_and_the_faults_go_on_in_new_workers() -> None:
    history = History()
    assert history.ready(trained_s=5.0) == []
    assert [history.admits(2) for _ in range(3)] == [True, True, False]
    fault = Fault(
        at_s=history.since_ready_s,
        iteration=9,
        stage="learn",
        what="node 1",
        why="",
        replaced=(),
        redone_s=30.0,
        recovery_s=0.0,
    )
    recorded = history.faults
    history.lose(fault)
    history.lose(
        dataclasses.replace(fault, at_s=fault.at_s + 7.0, redone_s=22.0)
    )  # before all were ready again
    assert recorded == []
    outlasted = history.ready(trained_s=22.0)
    assert [event.redone_s for event in outlasted] == [8.0, 0.0]
    assert outlasted[0].recovery_s == pytest.approx(7.0)
    assert (recorded, history.trained_s) == (outlasted, 5.0)
    assert history.ready(trained_s=23.0) == []
