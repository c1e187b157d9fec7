"""Sockets find a short folder where the one for temporary files is long."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplace.comm.shared_memory.folder import JobFolder
from rlplace.errors import ClusterError
from rlplace.workers.launch.sockets import (
    SHORT,
    ray_variables,
    socket_folder,
    vllm_variables,
)
from rlplace.workers.ray_launch.connections import Service
from rlplace.workers.ray_launch.template import Template


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one, whatever the name of the user and of the test."""
    with tempfile.TemporaryDirectory(prefix="sockets_", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TMPDIR of which the path of a socket has no room."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    return folder


def test_a_long_folder_for_temporary_files_has_no_sockets(temporary: Path) -> None:
    assert tempfile.gettempdir() == str(temporary)
    assert socket_folder() == SHORT
    assert ray_variables() == {"RAY_TMPDIR": "/tmp"}
    assert vllm_variables() == {"VLLM_RPC_BASE_PATH": "/tmp"}
    template = Template(["json"])
    try:
        assert template.why_not() is None
    finally:
        template.stop()


def test_a_short_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert (socket_folder(), ray_variables(), vllm_variables()) == (
        Path("/var/tmp"),
        {},
        {},
    )


def test_one_of_slurm_is_too_long_for_ray_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        tempfile, "tempdir", "/local/scratch/somebody/job.12345678.batch"
    )
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert socket_folder() == Path("/local/scratch/somebody/job.12345678.batch")
    assert ray_variables() == {"RAY_TMPDIR": "/tmp"}


def test_a_folder_of_ray_that_is_too_long_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(temporary))
    with pytest.raises(ClusterError) as raised:
        ray_variables()
    assert (raised.value.code, raised.value.problem.fix) == (
        "long-folder",
        "export RAY_TMPDIR=/tmp",
    )


def test_the_longest_folder_of_shared_memory_has_room_for_sockets(
    tmp_path: Path,
) -> None:
    longest = 107 - len(f"/rlplace-{os.getuid()}-12345678/calls-12345678")
    for length, fits in ((longest, True), (longest + 1, False)):
        folder = tmp_path / ("x" * (length - len(str(tmp_path)) - 1))
        folder.mkdir()
        if fits:
            with JobFolder.create(folder) as job:
                Service(job.path)._listening.close()
        else:
            with pytest.raises(ClusterError) as raised:
                JobFolder.create(folder)
            assert raised.value.code == "long-folder"


def test_the_limit_is_that_of_the_kernel(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"{tmp_path}/{'x' * (106 - len(str(tmp_path)))}")
    with socket.socket(socket.AF_UNIX) as one, pytest.raises(OSError, match="too long"):
        one.bind(f"{tmp_path}/{'x' * (107 - len(str(tmp_path)))}")
