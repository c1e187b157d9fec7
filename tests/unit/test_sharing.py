"""Folders of `rlplace share`: those of commands that were killed are removed, and no others."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlplace.execution.lease import MARK
from rlplace.runtime import sharing


def test_only_abandoned_folders_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = {n: tmp_path / f"rlplace-share-{n}" for n in ("killed", "alive", "new")}
    for folder in folders.values():
        folder.mkdir()
    (folders["killed"] / "lock").touch()
    with (folders["alive"] / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sharing._remove_abandoned()
    assert [each.name for each in sorted(tmp_path.iterdir())] == [
        "rlplace-share-alive",
        "rlplace-share-new",
    ]


def test_processes_of_a_run_are_found_by_their_mark() -> None:
    mark = f"{os.getpid()}/pole"
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(100)"],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
    )
    try:
        assert list(sharing._marked(mark)) == [process.pid]
        assert list(sharing._marked(f"{mark}-2")) == []
    finally:
        process.kill()
        process.communicate()
    assert list(sharing._marked(mark)) == []
