"""Whole runs as Ray processes: every placement, equal numbers in all of them, deaths and signals."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.training import (
    INLINE,
    ONE_RANK_EACH,
    PLACEMENTS,
    SMALL,
    Finished,
    finish,
    placed,
    read_until,
    start,
    train,
)

pytestmark = pytest.mark.ray


@pytest.fixture(
    scope="module",
    params=[("hybrid_ppo",), pytest.param(tuple(PLACEMENTS), marks=pytest.mark.slow)],
    ids=["one as processes", "all as processes"],
)
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Finished]:
    """The same job, same seed, in all three placements; what `params` does not name runs in threads."""
    jobs = {
        config: (*INLINE, *placed(*where)) for config, where in ONE_RANK_EACH.items()
    }
    jobs |= {config: (*SMALL, *placed(*PLACEMENTS[config])) for config in request.param}
    return {
        c: train(c, tmp_path_factory.mktemp(c), *jobs[c], "runner.total_iterations=4")
        for c in PLACEMENTS
    }


def test_every_placement_trains(runs: dict[str, Finished]) -> None:
    for config, run in runs.items():
        assert run.code == 0, f"{config}:\n{run.err}"
        assert run.summary()["iterations"] == 4
        assert f"plan: {config.removesuffix('_ppo')}" in run.out


@pytest.mark.parametrize(
    "metric", ["env/return", "actor/policy_loss", "actor/value_loss", "actor/grad_norm"]
)
def test_placement_does_not_change_the_numbers(
    runs: dict[str, Finished], metric: str
) -> None:
    """Sampling noise belongs to environments, minibatches to global samples: where ranks sit changes nothing."""
    curves = [
        [line[metric] for line in run.metrics() if metric in line]
        for run in runs.values()
    ]
    assert curves[0]
    assert curves[1] == pytest.approx(curves[0], rel=2e-3, abs=2e-4)
    assert curves[2] == pytest.approx(curves[0], rel=2e-3, abs=2e-4)


def test_only_shared_accelerators_cause_moves(runs: dict[str, Finished]) -> None:
    """What each component was measured at tells where it has been."""
    seen = {
        config: {c: set(rows) for c, rows in run.summary()["memory"].items()}
        for config, run in runs.items()
    }
    assert seen["disaggregated_ppo"] == {
        "actor": {"full"},
        "env": {"full"},
        "rollout": {"full"},
    }
    everywhere = {"off", "weights", "full"}
    assert seen["hybrid_ppo"] == {
        "actor": everywhere,
        "env": {"off", "full"},
        "rollout": everywhere,
    }


@pytest.fixture
def homes() -> Iterator[tuple[Path, Path]]:
    """For shared memory and for temporary files, of this test alone; short names leave room for Ray's sockets."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
        tempfile.TemporaryDirectory(dir="/tmp") as disk,
    ):
        yield Path(shm), Path(disk)


@pytest.mark.parametrize(
    "ending", [pytest.param("killed worker", marks=pytest.mark.slow), "SIGTERM"]
)
def test_a_run_that_ends_early_says_why_and_leaves_nothing(
    ending: str, homes: tuple[Path, Path], tmp_path: Path
) -> None:
    """Ray would replace the handler of SIGTERM."""
    shm, disk = homes
    overrides = (
        *SMALL,
        *placed("0-1", "0", "1"),
        "runner.total_iterations=390625",
        f"cluster.comm.shm_folder={shm}",
    )
    overrides += ("faults.restarts=0",)
    process = start(
        "hybrid_ppo", tmp_path, *overrides, env={**os.environ, "TMPDIR": str(disk)}
    )
    seen = read_until(process, "    2 ")
    (folder,) = shm.iterdir()
    assert {path.suffix for path in folder.iterdir()} >= {".channel"}
    started = psutil.Process(process.pid).children(recursive=True)
    if ending == "SIGTERM":
        process.terminate()
    else:
        next(p for p in started if "RayHost" in " ".join(p.cmdline())).kill()
    run = finish(process, tmp_path, seen)
    assert run.code == (128 + signal.SIGTERM if ending == "SIGTERM" else 1)
    words = (
        ["stopped by SIGTERM"]
        if ending == "SIGTERM"
        else ["rank", "stage ", "policy version"]
    )
    assert [word for word in words if word not in run.err] == []
    assert "Traceback (most recent call last)" not in run.err.splitlines()[0]
    assert run.summary()["iterations"] >= 2
    _, alive = psutil.wait_procs(started, timeout=20.0)
    assert [child.cmdline() for child in alive] == []
    assert [*shm.iterdir(), *disk.glob("rlplace-*")] == []


@pytest.mark.parametrize(
    ("seen", "more_s", "number"),
    [
        ("starting ", 0.2, signal.SIGTERM),
        *(
            pytest.param("starting ", more_s, signal.SIGINT, marks=pytest.mark.slow)
            for more_s in (0.0, 0.7, 1.5)
        ),
        pytest.param("  Ray: started", 0.1, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(
            "  actor: 2 workers started", 0.1, signal.SIGTERM, marks=pytest.mark.slow
        ),
        pytest.param("  Ray: started", 0.3, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_run_can_be_stopped_while_it_starts(
    seen: str,
    more_s: float,
    number: signal.Signals,
    homes: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    """Ctrl-C goes to all processes of a terminal, SIGTERM to the driver alone."""
    shm, disk = homes
    overrides = (*SMALL, *placed("0-1", "0", "1"), f"cluster.comm.shm_folder={shm}")
    environment = {**os.environ, "TMPDIR": str(disk)}
    process = start(
        "hybrid_ppo", tmp_path, *overrides, env=environment, start_new_session=True
    )
    before = read_until(process, seen)
    time.sleep(more_s)
    started = psutil.Process(process.pid).children(recursive=True)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    run = finish(process, tmp_path, before)
    assert run.code == 128 + number
    deferred = f"\n{number.name}: taken after this step\n"  # if Ray was being called
    assert run.err.removeprefix(deferred).startswith(f"stopped by {number.name}\n")
    assert "Traceback" not in run.err
    _, alive = psutil.wait_procs(started, timeout=20.0)
    assert [child.cmdline() for child in alive] == []
    assert [*shm.iterdir(), *disk.glob("rlplace*")] == []


@pytest.mark.slow
@pytest.mark.parametrize("start_by", ["fork", "plain"])
def test_nothing_stays_of_a_server_of_ray_that_answers_no_more_while_workers_start(
    start_by: str, homes: tuple[Path, Path], tmp_path: Path
) -> None:
    """As on a busy machine: Ray kills a server that does not end within a second, and what it has started stays."""
    shm, disk = homes
    overrides = (
        *SMALL,
        *placed("0-1", "0", "1"),
        f"cluster.comm.shm_folder={shm}",
        f"cluster.ray.start={start_by}",
    )
    process = start(
        "hybrid_ppo",
        tmp_path,
        *overrides,
        env={**os.environ, "TMPDIR": str(disk)},
        start_new_session=True,
    )
    before = read_until(process, "  Ray: started")
    driver, workers, server = psutil.Process(process.pid), list[psutil.Process](), None
    while not workers:
        server = server or next(
            (p for p in driver.children(recursive=True) if p.name() == "raylet"), None
        )
        workers = (
            [
                p
                for p in server.children()
                if "default_worker.py" in " ".join(p.cmdline())
            ]
            if server
            else []
        )
    assert server is not None
    server.suspend()
    started = driver.children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    run = finish(process, tmp_path, before)
    assert run.code == 128 + signal.SIGINT
    _, alive = psutil.wait_procs(started, timeout=5.0)
    assert [child.cmdline() for child in alive] == []
    assert [*shm.iterdir(), *disk.glob("rlplace*")] == []


@pytest.mark.slow
def test_a_reservation_that_cannot_come_true_is_refused(tmp_path: Path) -> None:
    run = train(
        "hybrid_ppo",
        tmp_path,
        *SMALL,
        *placed("4-5", "0", "1"),
        "cluster.num_nodes=2",
        "env.total_num_envs=16",
    )
    assert run.code == 2
    assert "[cluster-too-small]" in run.err
    assert "nothing was started" in run.err
