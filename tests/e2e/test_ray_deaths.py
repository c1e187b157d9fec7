"""Deaths of Ray's own processes in a run that has started Ray: the run names what has died, saves, and ends."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from rlplace.checkpoints.checkpoint import MANIFEST
from rlplace.checkpoints.find import find, verify
from tests.e2e.test_ending_signals import RAY_JOB
from tests.e2e.training import Finished, finish, read_until, start

pytestmark = pytest.mark.ray

JOB = (*RAY_JOB, "checkpoint.every=2")

# Every death is named by its cause within so many seconds
NAMED_S = 15


def of_ray(process: subprocess.Popen[str], name: str) -> psutil.Process:
    """Return the process `name` of the Ray that a run has started."""
    found = [
        each
        for each in psutil.Process(process.pid).children(recursive=True)
        if each.name() == name or (each.cmdline() or [""])[0] == name
    ]
    assert len(found) == 1, found
    return found[0]


def named(name: str, process: subprocess.Popen[str]) -> psutil.Process:
    """Return the worker process `name`, such as "env rank 0"."""
    (found,) = (
        each
        for each in psutil.Process(process.pid).children(recursive=True)
        if name in " ".join(each.cmdline())
    )
    return found


def wait_for_a_checkpoint(output: Path) -> None:
    """Wait until a checkpoint is whole: workers write it behind the next iterations, and may die before its end."""
    until = time.monotonic() + 60
    while not any(output.glob(f"*/*/checkpoints/*/{MANIFEST}")):
        assert time.monotonic() < until
        time.sleep(0.05)


def ended_by_the_death_of(name: str, output: Path) -> Finished:
    process = start("hybrid_ppo", output, *JOB)
    seen = read_until(process, "    3 ")
    wait_for_a_checkpoint(output)
    of_ray(process, name).kill()
    began = time.monotonic()
    run = finish(process, output, seen)
    print(f"ended {time.monotonic() - began:.1f} s after the death of {name}")
    return run


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        pytest.param(
            "gcs_server",
            "cluster.ray: the GCS of the Ray that this run has started",
            marks=pytest.mark.slow,
        ),
        ("raylet", "cluster.ray: the raylet of the Ray that this run has started"),
        pytest.param(
            "ray::DashboardAgent",
            "as it does when one of its agents has died",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_death_of_a_process_of_ray_is_named(
    name: str, cause: str, tmp_path: Path
) -> None:
    run = ended_by_the_death_of(name, tmp_path)
    assert run.code == 1, run.out + run.err
    assert cause in run.err, run.err
    assert "[ray-died]" in run.err
    assert "resume=auto" in run.err
    # It is not taken for late or lost workers.
    assert "start_timeout_s" not in run.err
    assert "fault in" not in run.out
    assert run.folder is not None
    assert "[ray-died]" in (run.folder / "error.txt").read_text(encoding="utf-8")
    summary = run.summary()
    assert summary["state"] == "failed"
    checkpoint = find(str(run.folder), Path())
    assert checkpoint is not None
    verify(checkpoint)
    if name == "gcs_server":
        # The workers live on, so that the last iteration is saved.
        assert checkpoint.iteration == summary["iterations"]
    else:
        # Every second iteration is saved, and one checkpoint may be in writing
        assert checkpoint.iteration >= summary["iterations"] - 4


def ended_by_the_stop_of(name: str, output: Path, killed: str = "") -> Finished:
    """Stop a process of Ray for good, and then kill the worker `killed`, if it is named."""
    process = start("hybrid_ppo", output, *JOB)
    seen = read_until(process, "    3 ")
    stopped = of_ray(process, name)
    worker = named(killed, process) if killed else None
    stopped.suspend()
    began = time.monotonic()
    try:
        if worker is not None:
            worker.kill()
        seen += read_until(process, "cluster.ray: ")
        print(f"named {time.monotonic() - began:.1f} s after the stop of {name}")
    finally:
        # The run has let it go on, or has ended it.
        run = finish(process, output, seen)
    assert not stopped.is_running()
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "killed", "cause"),
    [
        ("raylet", "", "the raylet of the Ray that this run has started stands still"),
        (
            "raylet",
            "env rank 0",
            "the raylet of the Ray that this run has started stands",
        ),
        (
            "gcs_server",
            "env rank 0",
            "the GCS of the Ray that this run has started stands",
        ),
        (
            "ray::RuntimeEnvAgent",
            "env rank 0",
            "the agent for environments of the Ray",
        ),
    ],
)
def test_a_process_of_ray_that_stands_still_is_named(
    name: str, killed: str, cause: str, tmp_path: Path
) -> None:
    run = ended_by_the_stop_of(name, tmp_path, killed)
    assert run.code == 1, run.out + run.err
    assert cause in run.err, run.err
    assert "[ray-died]" in run.err
    # Its evidence, and no other cause. A loaded machine looks later than after 8 s
    stopped_s = re.search(r"state T for (\d+) s", run.err)
    assert stopped_s is not None, run.err
    assert 8 <= int(stopped_s[1]) <= NAMED_S
    assert "start_timeout_s" not in run.err
    assert "has died" not in run.err
    assert "fault in" not in run.out
    summary = run.summary()
    assert summary["state"] == "failed"
    # The workers live on, so that the last iteration is saved. One that was killed may have died while the actor
    # learned: then the last checkpoint is what is left.
    behind = 2 if killed and "no checkpoint of this moment" in run.err else 0
    assert run.folder is not None
    checkpoint = find(str(run.folder), Path())
    assert checkpoint is not None
    verify(checkpoint)
    assert checkpoint.iteration >= summary["iterations"] - behind


@pytest.mark.slow
def test_a_raylet_that_stands_still_for_some_seconds_ends_no_run(
    tmp_path: Path,
) -> None:
    process = start("hybrid_ppo", tmp_path, *JOB)
    seen = read_until(process, "    3 ")
    raylet = of_ray(process, "raylet")
    raylet.suspend()
    time.sleep(3.0)
    raylet.resume()
    # A worker can be started again.
    named("env rank 0", process).kill()
    seen += read_until(process, "fault in")
    process.send_signal(signal.SIGINT)
    run = finish(process, tmp_path, seen)
    assert run.code == 130, run.out + run.err
    assert "restarted env rank 0" in run.out
    assert "ray-died" not in run.err


@pytest.mark.slow
def test_ctrl_c_ends_a_recovery_that_waits(tmp_path: Path) -> None:
    """The raylet stands still, so the rank of env that is started again does not come up; the actor is whole."""
    process = start("hybrid_ppo", tmp_path, *JOB, "checkpoint.grace_s=6")
    seen = read_until(process, "    3 ")
    raylet = of_ray(process, "raylet")
    env = named("env rank 0", process)
    raylet.suspend()
    env.kill()
    time.sleep(3.0)
    process.send_signal(signal.SIGINT)
    run = finish(process, tmp_path, seen)
    assert run.code == 130, run.out + run.err
    assert "Traceback" not in run.err, run.err
    assert "SystemError" not in run.err, run.err
    assert run.summary()["state"] == "stopped"
    assert run.folder is not None
    checkpoint = find(str(run.folder), Path())
    assert checkpoint is not None
    verify(checkpoint)
