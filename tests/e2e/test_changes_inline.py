"""A placement that changes while a run goes on, in threads of one process: the numbers are those of a resumed run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlplace.codes import problem
from rlplace.errors import ClusterError, WorkerError
from rlplace.execution.loop import Loop
from rlplace.runtime import replace
from rlplace.runtime.launched import JobSpec, Launched
from rlplace.runtime.saving import Saving
from rlplace.workers.launch.cluster import Cluster
from tests.e2e.test_resume import ONE_EACH, numbers
from tests.e2e.training import Finished, train

MOVE = "cluster.changes=[{after: 2, component_placement: {env: 2-3}}]"
ENV_MOVED = "cluster.component_placement.env=2-3"


def run(output: Path, *words: str, iterations: int = 4) -> Finished:
    total = f"runner.total_iterations={iterations}"
    return train("hybrid_ppo", output, *ONE_EACH, total, "runner.seed=5", *words)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("changed")
    return run(folder, MOVE, "checkpoint.every=3", "checkpoint.keep_last=4")


def test_the_numbers_are_those_of_a_run_that_is_stopped_and_resumed_there(
    changed: Finished, tmp_path: Path
) -> None:
    assert changed.code == 0, changed.err
    assert run(tmp_path, iterations=2).code == 0
    resumed = run(tmp_path, ENV_MOVED, "resume=auto")
    assert resumed.code == 0, resumed.err
    assert [line["iteration"] for line in changed.metrics()] == [1, 2, 3, 4]
    assert numbers(changed) == numbers(resumed)


def test_a_change_is_told_and_recorded(changed: Finished) -> None:
    (change,) = changed.summary()["changes"]
    assert (change["after"], change["moved"]) == (2, {"env": ["0", "2-3"]})
    assert (change["where"], change["kept"]) == ("disk", "")
    assert change["bytes"] > 0
    assert "change after iteration 2: env 0 -> 2-3; " in changed.out
    times = [line.get("time/change_s") for line in changed.metrics()]
    assert times == [None, None, pytest.approx(change["seconds"]), None]
    assert changed.folder is not None
    assert not (changed.folder / "change").exists()
    plan = (changed.folder / "plan.txt").read_text(encoding="utf-8")
    assert "2-3" in plan.partition("env")[2].splitlines()[0]


def test_a_checkpoint_after_a_change_is_resumed_with_its_placement(
    changed: Finished,
) -> None:
    assert changed.folder is not None
    third = changed.folder / "checkpoints" / "000003"
    resumed = run(changed.folder.parents[1], MOVE, f"resume={third}")
    assert resumed.code == 0, resumed.err
    assert "the placement is that of the change after iteration 2" in resumed.out
    assert "starting 1 actor, 2 env, 1 rollout workers" in resumed.out
    assert "changes" not in resumed.summary()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run without a change."""
    return run(tmp_path_factory.mktemp("plain"))


def failing_once(method: Any, fails: Any) -> Any:
    """Return `method`, which does `fails` instead at its first call."""
    calls: list[Any] = []

    def replaced(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            return fails()
        return method(*arguments, **more)

    return replaced


def worker_fails() -> None:
    raise WorkerError(component="env", rank=1, node=0, method="load", what="no disk")


def node_fails() -> None:
    raise ClusterError(problem("node-lost", "node 1", error="channels", method="clear"))


@pytest.mark.parametrize(
    ("owner", "name", "fails", "why"),
    [
        (Saving, "hand_over", lambda: None, "its state could not be saved"),
        (Cluster, "retire", node_fails, "node 1: did not answer"),
        (Cluster, "launch_all", worker_fails, "env rank 1"),
        (Loop, "read_state", worker_fails, "env rank 1"),
    ],
)
def test_a_change_that_fails_in_the_middle_goes_back_with_all_state(
    plain: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    fails: Any,
    why: str,
) -> None:
    save = replace.Replacing.save

    def saving(*arguments: Any) -> Any:
        # From here on, so that the start is left alone. The state is saved in two places if the first has no room
        attempt = failing_once(getattr(owner, name), fails)
        if name == "hand_over":
            attempt = lambda *_: None  # noqa: E731
        monkeypatch.setattr(owner, name, attempt)
        return save(*arguments)

    monkeypatch.setattr(replace.Replacing, "save", saving)
    kept = run(tmp_path, MOVE)
    assert kept.code == 0, kept.err
    (change,) = kept.summary()["changes"]
    assert change["kept"].startswith(why)
    assert numbers(kept) == numbers(plain)


@pytest.mark.parametrize("lost_copy", [False, True])
def test_a_run_keeps_its_placement_if_the_change_fails(
    plain: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_copy: bool
) -> None:
    """`lost_copy`: the placement before cannot be launched again, either."""
    launched = replace.launched
    attempts: list[int] = []

    def fails(
        cluster: Cluster, job: JobSpec, *rest: Any, **more: Mapping[str, Any]
    ) -> Launched:
        attempts.append(job.plan.placement.world_size("env"))
        if len(attempts) == 1 or lost_copy:
            raise WorkerError(
                component="env", rank=1, node=0, method="setup", what="no room"
            )
        return launched(cluster, job, *rest, **more)

    monkeypatch.setattr(replace, "launched", fails)
    kept = run(tmp_path / "kept", MOVE, "checkpoint.every=100")
    assert attempts == [2, 1]
    assert kept.folder is not None
    (change,) = kept.summary()["changes"]
    assert change["kept"].startswith("env rank 1")
    assert not (kept.folder / "change").exists()
    if lost_copy:
        assert kept.code == 1
        # The state is not lost with the workers
        assert (kept.folder / "checkpoints" / "000002" / "manifest.json").is_file()
        return
    assert kept.code == 0, kept.err
    assert "change after iteration 2: the placement stays as it was: " in kept.out
    assert numbers(kept) == numbers(plain)
