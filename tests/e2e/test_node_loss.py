"""A machine that a run has lost: the run ends and says so, waits for another, or goes on with those that are left."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import language
from tests.e2e.training import SMALL, Finished, finish, placed, read_until, start

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 300.0
QUICK = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
# Node 0 has accelerators 0-3, node 1 has 4-7.
NODES = ("cluster.accelerators_per_node=4", "cluster.num_nodes=2", "checkpoint.every=2")
JOB = {
    "hybrid_ppo": (*SMALL, *NODES, "runner.total_iterations=390625"),
    "hybrid_grpo_llm": (*NODES, "runner.total_iterations=1000"),
}


@pytest.fixture(scope="module")
def head() -> Iterator[Any]:
    """A Ray on this machine that finds soon when one of its nodes is gone."""
    from ray.cluster_utils import Cluster as Nodes

    from rlplace.workers.ray_launch.session import ray_environment

    with ray_environment("auto"):
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": QUICK}
        nodes = Nodes(initialize_head=True, head_node_args=head)
        yield nodes
        nodes.shutdown()


@pytest.fixture
def nodes(head: Any) -> Iterator[Any]:
    """The same with a second node, which is gone afterwards, as are those that a test adds."""
    head.add_node(num_cpus=1)
    head.wait_for_nodes()
    yield head
    for node in [*head.worker_nodes]:
        head.remove_node(node, allow_graceful=False)
    head.wait_for_nodes()


class Run:
    """A run of two nodes in a process of its own."""

    def __init__(
        self, nodes: Any, output: Path, *overrides: str, config: str = "hybrid_ppo"
    ) -> None:
        self._nodes, self._output = nodes, output
        self._shm = tempfile.TemporaryDirectory(dir="/dev/shm")
        joining = (
            f"cluster.ray.address={nodes.address}",
            f"cluster.comm.shm_folder={self._shm.name}",
        )
        self.process: subprocess.Popen[str] = start(
            config, output, *JOB[config], *joining, *overrides
        )
        self._seen = ""

    def until(self, begin: str) -> None:
        self._seen += read_until(self.process, begin)

    def lose_node(self) -> None:
        """Kill the server of node 1, which takes its workers with it, as a machine does that goes down."""
        (node,) = self._nodes.worker_nodes
        self._nodes.remove_node(node, allow_graceful=False)

    def stop(self) -> Finished:
        self.process.terminate()
        return self.end()

    def end(self) -> Finished:
        run = finish(self.process, self._output, self._seen, limit_s=LIMIT_S)
        assert list(Path(self._shm.name).iterdir()) == []
        self._shm.cleanup()
        return run


def events(run: Finished) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run.summary()["faults"]["events"]
    return found


def replace_node(run: Run, nodes: Any) -> None:
    run.until("waiting up to 120 s for machines")
    nodes.add_node(num_cpus=1)


def went_on(run: Run) -> Finished:
    """Stop the run once it has gone on: its metrics have each iteration once."""
    run.until("continues after iteration")
    run.until("    9 ")
    ended = run.stop()
    assert ended.code == 143, ended.err
    assert [line["policy/version"] for line in ended.metrics()] == list(
        range(1, len(ended.metrics()) + 1)
    )
    return ended


def test_a_lost_node_ends_the_run_with_its_name(nodes: Any, tmp_path: Path) -> None:
    run = Run(nodes, tmp_path, *placed("0", "0", "4"))
    run.until("    4 ")
    run.lose_node()
    ended = run.end()
    assert ended.code == 1
    assert "node 1 (" in ended.err
    assert "[node-lost]" in ended.err
    assert "got: rollout rank 0" in ended.err
    assert (
        "fix: resume=auto        (faults.on_node_loss=wait or replan goes on by itself)"
        in ended.err
    )


def test_a_run_waits_for_a_machine_in_place_of_the_lost_one(
    nodes: Any, tmp_path: Path
) -> None:
    run = Run(
        nodes,
        tmp_path,
        *placed("[0,4]", "0", "4"),
        "faults.on_node_loss=wait",
        "faults.node_wait_s=120",
    )
    run.until("    4 ")
    run.lose_node()
    replace_node(run, nodes)
    ended = went_on(run)
    (event,) = events(ended)
    assert event["what"].startswith("node 1 (")
    assert event["what"].endswith("was lost with actor rank 1, rollout rank 0")
    assert event["recovery_s"] > 0.0
    assert event["redone_s"] > 0.0
    assert 0.0 < ended.summary()["faults"]["effective_share"] < 1.0


def test_a_machine_that_is_lost_while_the_run_starts_again(
    nodes: Any, tmp_path: Path
) -> None:
    run = Run(
        nodes,
        tmp_path,
        *placed("[0,4]", "0", "4"),
        "faults.on_node_loss=wait",
        "faults.node_wait_s=120",
    )
    run.until("    4 ")
    run.lose_node()
    replace_node(run, nodes)
    run.until("starting ")
    run.lose_node()
    replace_node(run, nodes)
    ended = went_on(run)
    assert [event["what"].partition(" (")[0] for event in events(ended)] == [
        "node 1",
        "node 1",
    ]


def test_a_run_goes_on_with_the_machines_that_are_left(
    nodes: Any, tmp_path: Path
) -> None:
    """What was on both nodes keeps its part of the first; rollout was on the second only, and is placed again."""
    run = Run(
        nodes,
        tmp_path,
        *placed("[0-1,4-5]", "[0-1,6-7]", "4-5"),
        "faults.on_node_loss=replan",
    )
    run.until("    4 ")
    run.lose_node()
    ended = went_on(run)
    assert "cluster.num_nodes: 2 -> 1" in ended.out
    assert "actor: its samples are dealt to 2 ranks instead of 4" in ended.out
    (event,) = events(ended)
    assert "rollout rank 0" in event["what"]
    assert "ready after" in ended.out.split("continues after iteration")[1]


@pytest.mark.parametrize(
    ("then", "where"),
    [
        ("wait", placed("[0,4]", "0", "[1,5]")),
        ("replan", placed("[0-1,4-5]", "0", "4-5")),
    ],
    ids=["wait", "replan"],
)
def test_a_language_model_goes_on(
    nodes: Any, model: Path, then: str, where: tuple[str, ...], tmp_path: Path
) -> None:
    """Half of the actor is lost, and half of the engines, or all of them, which are placed again."""
    job = (
        *language.tiny(model),
        *where,
        f"faults.on_node_loss={then}",
        "faults.node_wait_s=120",
    )
    run = Run(nodes, tmp_path, *job, config="hybrid_grpo_llm")
    run.until("    4 ")
    run.lose_node()
    if then == "wait":
        replace_node(run, nodes)
    ended = went_on(run)
    assert {line["actor/samples"] for line in ended.metrics()} == {32.0}
    (event,) = events(ended)
    assert "was lost with actor rank" in event["what"]
    assert ("cluster.num_nodes: 2 -> 1" in ended.out) == (then == "replan")
