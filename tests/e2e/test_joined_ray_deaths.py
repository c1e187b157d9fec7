"""Deaths of processes of a Ray that a run has joined: without its GCS the run saves and ends, others are no concern."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlplace.checkpoints.find import find, verify
from rlplace.workers.ray_launch.servers import Head
from tests.e2e.test_ending_signals import RAY_JOB
from tests.e2e.training import Finished, finish, read_until, start

pytestmark = [pytest.mark.ray, pytest.mark.slow]

RAY = Path(sysconfig.get_path("scripts")) / "ray"
JOB = (*RAY_JOB, "checkpoint.every=2")


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """A Ray that `ray start` has started: the address of its GCS, and its processes, which belong to no program."""

    address: str
    folder: Path

    def processes(self) -> list[psutil.Process]:
        found = list[psutil.Process]()
        port = self.address.rpartition(":")[2]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                # Some have only the address of the GCS.
                if any(str(self.folder) in w or w.endswith(f":{port}") for w in words):
                    found += [process, *process.children(recursive=True)]
        return list(dict.fromkeys(found))

    def process(self, word: str) -> psutil.Process:
        """Return the process with `word` in its command line."""
        found = list[psutil.Process]()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if word in " ".join(process.cmdline()[:3]):
                    found.append(process)
        assert len(found) == 1, (word, found)
        return found[0]


@pytest.fixture
def joined() -> Iterator[Joined]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as name:
        ray = Joined(f"127.0.0.1:{port}", Path(name))
        command = [
            *(str(RAY), "start", "--head", f"--port={port}", "--num-cpus=2"),
            *("--node-ip-address=127.0.0.1", "--include-dashboard=false"),
            *(f"--temp-dir={name}", "--object-store-memory=100000000"),
        ]
        try:
            started = subprocess.run(
                command, capture_output=True, text=True, timeout=200, check=False
            )
            assert started.returncode == 0, started.stdout + started.stderr
            yield ray
        finally:
            left = ray.processes()
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=20)


def run_in(ray: Joined, output: Path) -> tuple[subprocess.Popen[str], str]:
    """Return a run that has joined `ray` and is at work, and what it has printed."""
    process = start("hybrid_ppo", output, *JOB, f"cluster.ray.address={ray.address}")
    return process, read_until(process, "    3 ")


def is_saved(run: Finished, behind: int = 0) -> None:
    """Check that the newest checkpoint is whole, and at most `behind` iterations older than the last iteration."""
    assert run.folder is not None
    checkpoint = find(str(run.folder), Path())
    assert checkpoint is not None
    verify(checkpoint)
    assert checkpoint.iteration >= run.summary()["iterations"] - behind


def test_the_death_of_the_gcs_ends_the_run_with_its_error_and_a_checkpoint(
    joined: Joined, tmp_path: Path
) -> None:
    process, seen = run_in(joined, tmp_path)
    joined.process("gcs_server").kill()
    began = time.monotonic()
    run = finish(process, tmp_path, seen)
    print(f"ended {time.monotonic() - began:.1f} s after the death of the GCS")
    # Ray itself would end the driver by an exit of its C++ code.
    assert run.code == 1, run.out + run.err
    assert "cluster.ray.address: the GCS of the Ray that was joined" in run.err, run.err
    assert "[ray-died]" in run.err
    assert "the GCS of the Ray that was joined has not answered for 3" in run.err
    assert "fault in" not in run.out
    assert "start_timeout_s" not in run.err
    assert run.summary()["state"] == "failed"
    is_saved(run)


def test_a_gcs_that_stands_still_is_named_where_a_worker_has_to_be_started(
    joined: Joined, tmp_path: Path
) -> None:
    head = Head(joined.address)
    assert head.answers()
    process, seen = run_in(joined, tmp_path)
    gcs = joined.process("gcs_server")
    (worker,) = (
        each for each in joined.processes() if "env rank 0" in " ".join(each.cmdline())
    )
    gcs.suspend()
    began = time.monotonic()
    try:
        # Its threads stop one after the other.
        while head.answers():
            time.sleep(0.1)
        worker.kill()
        seen += read_until(process, "cluster.ray.address: ")
        print(f"named {time.monotonic() - began:.1f} s after the stop of the GCS")
    finally:
        gcs.resume()
        run = finish(process, tmp_path, seen)
    assert run.code == 1, run.out + run.err
    assert "the GCS of the Ray that was joined has not answered for 3" in run.err
    assert "start_timeout_s" not in run.err
    assert run.summary()["state"] == "failed"
    # The worker may have died while the actor learned: then the last checkpoint is what is left.
    is_saved(run, behind=2 if "no checkpoint of this moment" in run.err else 0)
    assert head.answers()


@pytest.mark.parametrize("name", ["log_monitor.py", "monitor.py"])
def test_other_processes_of_ray_may_die(
    name: str, joined: Joined, tmp_path: Path
) -> None:
    process, seen = run_in(joined, tmp_path)
    joined.process(f"/{name}").kill()
    # Longer than a GCS may be silent
    time.sleep(35.0)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    run = finish(process, tmp_path, seen)
    assert run.code == 130, run.out + run.err
    assert "ray-died" not in run.out + run.err
    is_saved(run)
