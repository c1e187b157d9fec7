"""A placement that changes while a run on Ray goes on: the curve of a resumed run, and ranks that die in the change."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlplace.comm.shared_memory.folder import SHARED_MEMORY
from tests.e2e.language import tiny
from tests.e2e.test_resume import CONSTANT, numbers
from tests.e2e.test_resume_llm import SEEDED, curve
from tests.e2e.training import ROOT, SMALL, Finished, finish, placed, train

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

HERE = (*SMALL, *CONSTANT, *placed("0-3", "0-1", "2-3"), "runner.seed=3")
THERE = placed("0-1", "2-3", "2-3")
AWAY = "{after: 2, component_placement: {actor: 0-1, env: 2-3}}"
BACK = "{after: 4, component_placement: {actor: 0-3, env: 0-1}}"


def iterations(number: int) -> str:
    return f"runner.total_iterations={number}"


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run whose actor and simulators move after two iterations, and back after four."""
    folder = tmp_path_factory.mktemp("changed")
    changes = f"cluster.changes=[{AWAY}, {BACK}]"
    return train("hybrid_ppo", folder, *HERE, iterations(6), changes)


def test_a_run_changes_and_goes_back_with_the_numbers_of_a_resumed_run(
    changed: Finished, tmp_path: Path
) -> None:
    assert changed.code == 0, changed.err
    train("hybrid_ppo", tmp_path, *HERE, iterations(2))
    train("hybrid_ppo", tmp_path, *HERE, *THERE, iterations(4), "resume=auto")
    resumed = train("hybrid_ppo", tmp_path, *HERE, iterations(6), "resume=auto")
    assert resumed.code == 0, resumed.err
    assert numbers(changed) == numbers(resumed)
    changes = changed.summary()["changes"]
    assert [change["after"] for change in changes] == [2, 4]
    assert {change["where"] for change in changes} == {"shared memory"}


def hurt(
    output: Path,
    moment: str,
    rank: tuple[str, int] | None,
    *more: str,
    copied_bytes: int | None = None,
) -> Finished:
    words = [*HERE, iterations(6), f"cluster.changes=[{AWAY}, {BACK}]", *more]
    asked = {
        "config": "hybrid_ppo",
        "overrides": [f"runner.output_dir={output}", *words],
        "moment": moment,
        "rank": rank,
        "copied_bytes": copied_bytes,
    }
    command = [sys.executable, "-u", "-m", "tests.e2e.hurt_change", json.dumps(asked)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    return finish(process, output)


@pytest.mark.parametrize("rank", [("actor", 0), ("env", 1)])
def test_a_rank_that_dies_while_it_loads_is_replaced(
    changed: Finished, tmp_path: Path, rank: tuple[str, int]
) -> None:
    run = hurt(tmp_path, "load", rank)
    assert run.code == 0, run.err
    assert "sent SIGKILL" in run.out
    assert [change["kept"] for change in run.summary()["changes"]] == ["", ""]
    # In both changes, all ranks load the state of the change again
    assert len(run.summary()["faults"]["events"]) == 2
    for line, expected in zip(numbers(run), numbers(changed), strict=True):
        line.pop("faults/restarts", None)
        assert line == expected


def test_a_rank_that_dies_while_it_is_set_up_brings_the_placement_before_back(
    tmp_path: Path,
) -> None:
    run = hurt(tmp_path, "setup", ("env", 1))
    assert run.code == 0, run.err
    # The second change would go back to where everything is
    (change,) = run.summary()["changes"]
    assert change["kept"].startswith("env rank 1")
    assert len(run.metrics()) == 6


@pytest.mark.parametrize("rank", [("actor", 1), ("env", 0)])
def test_a_rank_that_dies_while_it_saves_loses_no_iteration_for_good(
    tmp_path: Path, rank: tuple[str, int]
) -> None:
    run = hurt(tmp_path, "save", rank)
    assert run.code == 0, run.err
    assert "sent SIGKILL" in run.out
    assert [line["iteration"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6]
    changes = run.summary()["changes"]
    assert changes[-1]["after"] == 4


def test_a_driver_that_is_killed_in_a_change_leaves_nothing_in_shared_memory(
    tmp_path: Path,
) -> None:
    run = hurt(tmp_path, "load", None)
    assert run.code == -signal.SIGKILL
    (line,) = [line for line in run.out.splitlines() if line.startswith("state in ")]
    folder = Path(line.removeprefix("state in "))
    assert folder.parent == SHARED_MEMORY
    until = time.monotonic() + 60.0
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.2)
    assert not folder.exists()


# Only the simulators move: to as many ranks elsewhere, and to fewer ranks
ENV_AWAY = "{after: 2, component_placement: {env: 2-3}}"
ENV_FEWER = "{after: 4, component_placement: {env: 0}}"
ENV_MOVES = f"cluster.changes=[{ENV_AWAY}, {ENV_FEWER}]"


def processes(run: Finished) -> list[dict[str, int]]:
    """Return the process ids of all ranks before each iteration."""
    head = "processes: "
    lines = [line for line in run.out.splitlines() if line.startswith(head)]
    return [json.loads(line.removeprefix(head)) for line in lines]


@pytest.fixture(scope="module")
def env_moved(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("env_moved")
    return hurt(folder, "", None, ENV_MOVES)


def test_workers_that_do_not_move_stay_with_the_numbers_of_a_resumed_run(
    env_moved: Finished, tmp_path: Path
) -> None:
    assert env_moved.code == 0, env_moved.err
    first, _, second, _, third, _ = processes(env_moved)
    for rank in ("actor rank 0", "actor rank 3", "rollout rank 0", "rollout rank 1"):
        assert first[rank] == second[rank] == third[rank]
    assert {rank for rank in first if rank.startswith("env")} == {
        "env rank 0",
        "env rank 1",
    }
    assert not {first["env rank 0"], first["env rank 1"]} & set(second.values())
    assert "env rank 1" not in third
    changes = env_moved.summary()["changes"]
    assert [change["stayed"] for change in changes] == [["actor", "rollout"]] * 2
    assert [change["kept"] for change in changes] == ["", ""]
    train("hybrid_ppo", tmp_path, *HERE, iterations(2))
    away = placed("0-3", "2-3", "2-3")
    train("hybrid_ppo", tmp_path, *HERE, *away, iterations(4), "resume=auto")
    fewer = placed("0-3", "0", "2-3")
    resumed = train("hybrid_ppo", tmp_path, *HERE, *fewer, iterations(6), "resume=auto")
    assert resumed.code == 0, resumed.err
    assert numbers(env_moved) == numbers(resumed)


@pytest.mark.parametrize("moment", ["follow", "load"])
@pytest.mark.parametrize("rank", [("actor", 1), ("rollout", 0)])
def test_a_rank_that_stays_and_dies_in_the_change_loses_no_iteration(
    env_moved: Finished, tmp_path: Path, moment: str, rank: tuple[str, int]
) -> None:
    run = hurt(tmp_path, moment, rank, ENV_MOVES)
    assert run.code == 0, run.err
    assert "sent SIGKILL" in run.out
    metrics = [line["iteration"] for line in run.metrics()]
    assert metrics == [1, 2, 3, 4, 5, 6]
    assert run.summary()["changes"][-1]["after"] == 4


def test_a_large_state_that_stays_is_not_copied_and_the_numbers_are_the_same(
    env_moved: Finished, tmp_path: Path
) -> None:
    run = hurt(tmp_path, "", None, ENV_MOVES, copied_bytes=0)
    assert run.code == 0, run.err
    changes = run.summary()["changes"]
    copied = env_moved.summary()["changes"]
    for change, whole in zip(changes, copied, strict=True):
        assert change["stayed"] == ["actor", "rollout"]
        assert 0 < change["bytes"] < whole["bytes"]
    assert numbers(run) == numbers(env_moved)


@pytest.mark.parametrize("moment", ["follow", "load"])
def test_a_state_that_stays_and_is_lost_is_that_of_the_newest_checkpoint(
    env_moved: Finished, tmp_path: Path, moment: str
) -> None:
    more = (ENV_MOVES, "checkpoint.every=3")
    run = hurt(tmp_path, moment, ("actor", 1), *more, copied_bytes=0)
    assert run.code == 0, run.err
    assert "sent SIGKILL" in run.out
    lines = run.metrics()
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5, 6]
    # There was none before the first change
    assert "continues after iteration 0" in run.out


@pytest.mark.parametrize(
    ("moves", "there", "stay"),
    [
        ("actor: 0, env: 1", ("0", "1", "1-2"), ["rollout"]),
        ("env: 1, rollout: 0-1", ("0-1", "1", "0-1"), ["actor"]),
    ],
)
def test_a_language_model_changes_with_the_curve_of_a_resumed_run(
    model: Path,
    tmp_path: Path,
    moves: str,
    there: tuple[str, str, str],
    stay: list[str],
) -> None:
    job = (*tiny(model), *SEEDED, *placed("0-1", "0", "1-2"))
    change = f"{{after: 1, component_placement: {{{moves}}}}}"
    changed = train(
        "hybrid_grpo_llm",
        tmp_path / "changed",
        *job,
        iterations(3),
        f"cluster.changes=[{change}]",
    )
    assert changed.code == 0, changed.err
    train("hybrid_grpo_llm", tmp_path / "cut", *job, iterations(1))
    (made,) = changed.summary()["changes"]
    assert made["stayed"] == stay
    resumed = train(
        "hybrid_grpo_llm",
        tmp_path / "cut",
        *job,
        *placed(*there),
        iterations(3),
        "resume=auto",
    )
    assert resumed.code == 0, resumed.err
    for numbers_of_one, expected in zip(curve(changed), curve(resumed), strict=True):
        assert numbers_of_one == pytest.approx(expected, rel=1e-4)
    tokens = changed.summary()["tokens_learned"]
    assert tokens == resumed.summary()["tokens_learned"]
