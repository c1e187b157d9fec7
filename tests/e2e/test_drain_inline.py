"""`rlplace drain`: a run moves off a node that is to leave, with the numbers of a run that was never there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlplace.cli.drain import main
from rlplace.runtime.requests import Requests
from tests.e2e.test_replace_command import Asking
from tests.e2e.test_resume import CONSTANT, numbers
from tests.e2e.training import INLINE_LAUNCHER, Finished, placed, train

# Node 0 has accelerators 0-1, node 1 has 2-3
NODES = (
    "cluster.num_nodes=2",
    "cluster.accelerators_per_node=2",
    "cluster.accelerator.kind=emulated",
    "env.total_num_envs=16",
    "algorithm.rollout_steps=16",
    "algorithm.epochs=2",
    INLINE_LAUNCHER,
    *CONSTANT,
    "checkpoint.every=100",
    "runner.total_iterations=4",
    "runner.seed=5",
)
BOTH = placed("0", "1", "2-3")


class Draining(Asking):
    """As Asking, for `rlplace drain`."""

    command = staticmethod(main)


def drained(
    output: Path, monkeypatch: pytest.MonkeyPatch, *words: str, job: Any = BOTH
) -> tuple[Finished, int]:
    """Return a run of four iterations that is asked after the second one, and the exit code of the command."""
    asking = Draining(*words)
    monkeypatch.setattr(Requests, "take", asking.at(2))
    finished = train("hybrid_ppo", output, *NODES, *job)
    assert asking.answer is not None
    return finished, asking.answer.result(60.0)


def test_a_run_leaves_a_node_and_its_numbers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, code = drained(tmp_path / "drained", monkeypatch, "1")
    assert (run.code, code) == (0, 0), run.err + run.out
    (change,) = run.summary()["changes"]
    assert change["after"] == 2
    # Accelerator 0 and 1 have other components, so the ranks share them
    assert change["moved"] == {"rollout": ["2-3", "0-1"]}
    (event,) = run.summary()["nodes"]
    assert (event["event"], event["node"], event["after"]) == ("drained", 1, 2)
    assert "node 1 (this machine) is empty, and may leave" in run.out
    monkeypatch.undo()
    there = train("hybrid_ppo", tmp_path / "there", *NODES, *placed("0", "1", "0-1"))
    assert numbers(run) == numbers(there)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["0"], "the driver of the run is on this node"),
        (["2"], "the run has no such node"),
        (["1", "--release"], "the node was not drained"),
    ],
)
def test_a_node_that_cannot_be_drained_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    why: str,
) -> None:
    run, code = drained(tmp_path, monkeypatch, *words)
    assert (run.code, code) == (0, 2), run.err
    assert why in run.out + capsys.readouterr().err
    assert "changes" not in run.summary()


def test_a_drain_is_refused_if_nothing_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A simulator takes 256 MiB, and a rollout rank 64 MiB
    small = (*BOTH, f"cluster.accelerator.memory={300 << 20}")
    tight = [*small, "cluster.component_placement.env=0-1"]
    run, code = drained(tmp_path, monkeypatch, "1", job=tight)
    assert (run.code, code) == (0, 2), run.err
    shown = run.out + capsys.readouterr().err
    assert "the run cannot do without the node" in shown
    assert "accelerator 0 is too small" in shown


def test_a_node_without_workers_is_left_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, code = drained(tmp_path, monkeypatch, "1", job=placed("0", "0", "1"))
    assert (run.code, code) == (0, 0), run.err
    assert "changes" not in run.summary()
    assert json.dumps(run.summary()["nodes"]).count("drained") == 1
