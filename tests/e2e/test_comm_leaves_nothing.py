"""However a run ends, its shared memory, its folder on disk and its sockets end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.training import SMALL, finish, placed, read_until, start

pytestmark = [pytest.mark.ray, pytest.mark.slow]

GONE_S = 120.0  # for everything to be gone on a busy machine
TABLES = ("unix", "tcp", "tcp6")


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder of shared memory for this test alone."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder for temporary files, of a name that leaves room for Ray's sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def sockets_of(run: subprocess.Popen[str]) -> set[str]:
    """Inodes of the sockets that the processes of a run have open."""
    inodes = set()
    for process in (psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)):
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(descriptor)
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    return inodes


def all_sockets() -> set[str]:
    """Inodes of all sockets of this machine that are bound or connected."""
    return {
        field
        for table in TABLES
        for line in Path(f"/proc/net/{table}").read_text().splitlines()
        for field in line.split()
    }


def worker_of(run: subprocess.Popen[str]) -> psutil.Process:
    hosts = [p for p in psutil.Process(run.pid).children(recursive=True) if "RayHost" in " ".join(p.cmdline())]
    assert hosts, "no worker runs"
    return hosts[0]


@pytest.mark.parametrize("ending", ["killed worker", "interrupted", "killed driver"])
def test_nothing_is_left(tmp_path: Path, shm: Path, disk: Path, ending: str) -> None:
    budget = "runner.total_iterations=390625"
    overrides = (*SMALL, *placed("0", "0", "1"), budget, f"cluster.comm.shm_folder={shm}")
    run = start("hybrid_ppo", tmp_path, *overrides, env={**os.environ, "TMPDIR": str(disk)})
    try:
        seen = read_until(run, "    1 ")
        (folder,) = shm.iterdir()
        assert {path.suffix for path in folder.iterdir()} >= {".channel"}
        opened = sockets_of(run)
        assert opened & all_sockets(), "a run that waits has wakers"
        if ending == "killed worker":
            worker_of(run).kill()
        elif ending == "interrupted":
            run.send_signal(signal.SIGINT)
        else:
            run.kill()
        finish(run, tmp_path, seen)
    finally:
        run.kill()
        run.communicate()
    deadline = time.monotonic() + GONE_S
    while left := [*shm.iterdir(), *disk.glob("rlplace-*"), *sorted(opened & all_sockets())]:
        assert time.monotonic() < deadline, f"left after a run that was {ending}: {left}"
        time.sleep(0.1)
