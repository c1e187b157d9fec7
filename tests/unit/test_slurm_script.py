"""`scripts/slurm.sbatch`, with stand-ins for what it calls; tests/e2e/test_slurm.py tries it under a real Slurm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks

SCRIPT = ROOT / "scripts" / "slurm.sbatch"
RUN = """
trap 'echo saved by TERM >>calls; exit 85' TERM
trap 'echo saved by USR1 >>calls; exit 85' USR1
echo "train $*" >>calls
while :; do /bin/sleep 0.05; done
"""
SRUN = """
words="$*"
echo "srun ${words//[[:space:]]/ } ($SRUN_CPUS_PER_TASK cpus)" >>calls
echo "Ray runtime started" >runs/slurm_7/ray/0.txt
exec /bin/sleep 60
"""
PROGRAMS = {
    "hostname": "echo 10.0.0.1 fd00::1",
    "sleep": "/bin/sleep 0.05",
    "python": 'shift 2; exec "$@"',
    "ray": 'echo "ray $*" >>calls; echo "Ray runtime started"; exec /bin/sleep 60',
    "srun": SRUN,
    "scancel": 'echo "scancel $*" >>calls',
    "scontrol": 'echo "scontrol $*" >>calls',
    "rlplace": RUN,
}


class Job:
    """The script at work in a folder."""

    def __init__(self, folder: Path, **variables: str) -> None:
        programs = folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        (programs / "activate").touch()
        for name, text in PROGRAMS.items():
            (programs / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
            (programs / name).chmod(0o755)
        given = {
            "SLURM_JOB_ID": "7",
            "SLURM_NNODES": "1",
            "SLURM_CPUS_PER_TASK": "64",
            "SLURMD_NODENAME": "one",
        }
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self._calls = folder / "calls"
        self.process = subprocess.Popen(
            ["bash", str(SCRIPT), "hybrid_ppo", "algorithm.gamma=0.9"],
            cwd=folder,
            env={**os.environ, **given, **variables, "PATH": path},
            start_new_session=True,
        )

    def calls(self) -> list[str]:
        return (
            self._calls.read_text(encoding="utf-8").splitlines()
            if self._calls.exists()
            else []
        )

    def wait_for(self, call: str) -> None:
        while not any(line.startswith(call) for line in self.calls()):
            assert self.process.poll() is None
            time.sleep(0.02)


@contextlib.contextmanager
def job(folder: Path, **variables: str) -> Iterator[Job]:
    started = Job(folder, **variables)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                started.process.pid, signal.SIGKILL
            )  # the script, and the run that it has started
        started.process.wait()


def test_a_warning_saves_and_queues_the_job_again(tmp_path: Path) -> None:
    with job(tmp_path) as ours:
        ours.wait_for("train ")
        ours.process.send_signal(signal.SIGUSR1)
        assert ours.process.wait() == 85
    words = "resume=auto runner.output_dir=runs/slurm_7 runner.requeue_exit_code=85 hybrid_ppo algorithm.gamma=0.9"
    assert ours.calls() == [
        f"train train {words}",
        "saved by USR1",
        "scontrol requeue 7",
    ]


def test_a_job_that_is_cancelled_is_saved_and_not_queued_again(tmp_path: Path) -> None:
    with job(tmp_path) as ours:
        ours.wait_for("train ")
        ours.process.send_signal(signal.SIGTERM)
        assert ours.process.wait() == 85
    assert ours.calls()[1:] == ["saved by TERM"]


def test_tasks_of_an_array_have_folders_and_seeds_of_their_own(tmp_path: Path) -> None:
    with job(tmp_path, SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="3") as ours:
        ours.wait_for("train ")
    assert "runner.output_dir=runs/slurm_5_3 " in ours.calls()[0]
    assert " runner.seed=3 " in ours.calls()[0]


def test_several_machines_have_a_ray_that_ends_with_the_job(tmp_path: Path) -> None:
    with job(tmp_path, SLURM_NNODES="3") as ours:
        (tmp_path / "runs" / "slurm_7" / "ray").mkdir(parents=True, exist_ok=True)
        ours.wait_for("srun ")
        (tmp_path / "runs" / "slurm_7" / "ray" / "1.txt").write_text(
            "Ray runtime started\n", encoding="utf-8"
        )
        ours.wait_for("train ")
        ours.process.send_signal(signal.SIGUSR1)
        assert ours.process.wait() == 85
    head, others, train, *ended = ours.calls()
    assert head == "ray start --head --node-ip-address=10.0.0.1 --port=20007 --block"
    assert others.startswith("srun --nodes=2 --ntasks=2 --exclude=one ")
    assert others.endswith("ray start --address=10.0.0.1:20007 --block (64 cpus)")
    assert "cluster.num_nodes=3 cluster.ray.address=10.0.0.1:20007" in train
    assert ended == ["saved by USR1", "scancel --signal=KILL 7.0", "scontrol requeue 7"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_before_the_run_begins_ends_the_job(
    tmp_path: Path, number: signal.Signals
) -> None:
    with job(tmp_path, SLURM_NNODES="3") as ours:
        ours.wait_for("srun ")
        ours.process.send_signal(number)
        assert ours.process.wait() == 128 + number
    assert not any(call.startswith(("train", "scontrol")) for call in ours.calls())


def test_the_page_shows_the_script() -> None:
    (shown,) = [
        block.text
        for block in blocks(ROOT / "docs" / "cluster.md")
        if block.title == "slurm.sbatch"
    ]
    assert shown == SCRIPT.read_text(encoding="utf-8")
