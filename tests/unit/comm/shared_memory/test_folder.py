"""A job's folder is its own, goes with its owner, and what a killed owner left goes with the next job."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from rlplace.comm.shared_memory.folder import JobFolder, claim, spill_of, sweep
from rlplace.errors import ClusterError
from rlplace.workers.ray_launch.session import _REMOVE

OWNER = """
import sys
from pathlib import Path
from rlplace.comm.shared_memory.folder import JobFolder, spill_of
folder = JobFolder.create(Path(sys.argv[1]))
spill_of(folder.path)
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_is_private_and_goes_with_its_spill(tmp_path: Path) -> None:
    with JobFolder.create(tmp_path) as folder:
        spill = (folder.path / "spill").resolve()
        assert not spill.exists()
        assert spill_of(folder.path) == folder.path / "spill"
        assert (
            stat.S_IMODE(folder.path.stat().st_mode)
            == stat.S_IMODE(spill.stat().st_mode)
            == 0o700
        )
        (folder.path / "x.channel").write_bytes(b"data")
        (spill / "y").write_bytes(b"data")
    assert list(tmp_path.iterdir()) == []
    assert not spill.exists()
    folder.close()


def test_what_a_killed_owner_left_is_swept_by_the_next_job(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        spill = (left / "spill").resolve()
        assert spill.exists()
        sweep(tmp_path)
        assert spill.exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert left.exists()
    with JobFolder.create(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder.path]
        assert not spill.exists()


def test_only_abandoned_folders_of_this_user_are_swept(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (tmp_path / f"rlplace-{os.getuid()}-link").symlink_to(elsewhere)
    (tmp_path / f"rlplace-{os.getuid()}-file").touch()
    (tmp_path / "rlplace-other").mkdir()
    abandoned = tmp_path / f"rlplace-{os.getuid()}-old"
    abandoned.mkdir()
    (abandoned / "spill").symlink_to(
        elsewhere
    )  # not the spill of this folder: it has another name
    sweep(tmp_path)
    assert (elsewhere / "kept").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [
            "elsewhere",
            "rlplace-other",
            f"rlplace-{os.getuid()}-link",
            f"rlplace-{os.getuid()}-file",
        ]
    )


@pytest.mark.parametrize("parent", ["missing", "file"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError) as caught:
        JobFolder.create(tmp_path / parent)
    assert (caught.value.problem.code, caught.value.problem.key) == (
        "shm-folder",
        "cluster.comm.shm_folder",
    )


@pytest.mark.parametrize("how", ["closed", "swept", "by the guard"])
def test_what_libraries_share_goes_with_the_folder(tmp_path: Path, how: str) -> None:
    """A segment and a semaphore, as a killed engine leaves them; that of another program stays."""
    segment, other = (
        SharedMemory(create=True, size=64),
        SharedMemory(create=True, size=64),
    )
    others = SharedMemory(name=f"of_others_{os.getpid()}", create=True, size=64)
    try:
        folder = JobFolder.create(tmp_path)
        claim(folder.path, [os.getpid(), 1 << 22])  # the latter has ended
        other_name = folder.path / "segments" / other.name
        other_name.unlink()  # as if another process had it
        if how == "by the guard":
            subprocess.run(
                ["/bin/sh", "-c", _REMOVE, "guard", str(folder.path)], check=True
            )
        elif how == "swept":
            assert folder._lock is not None
            os.close(folder._lock)
            sweep(tmp_path)
        else:
            folder.close()
        assert not folder.path.exists()
        there = {file.name for file in Path("/dev/shm").iterdir()}
        assert (segment.name in there, other.name in there, others.name in there) == (
            False,
            True,
            True,
        )
    finally:
        for memory in (segment, other, others):
            memory.close()
            with contextlib.suppress(FileNotFoundError):
                memory.unlink()
