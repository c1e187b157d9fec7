"""The double buffer alone: which buffer takes a version, which ranks hold it, and what dead processes leave behind."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlplace.comm.shared_memory.folder import SPILL
from rlplace.comm.weights import buffer as room
from rlplace.comm.weights.buffer import DoubleBuffer
from rlplace.comm.weights.shards import Assembly, Block, Layout, TensorSpec, assemble
from rlplace.errors import ChannelTimeout, ClusterError, WeightSyncError
from rlplace.placement.flow import Delivery

SOON = 60.0


def assembly(writers: int = 2, readers: int = 2) -> Assembly:
    """One tensor of 64 bytes for each writer, which holds it alone."""
    layout = Layout.of(
        TensorSpec(names=(f"of {rank}",), dtype="uint8", shape=(64,))
        for rank in range(writers)
    )
    held = [
        tuple(Block(0, 64 * (rank == own)) for rank in range(writers))
        for own in range(writers)
    ]
    return assemble(
        layout,
        held,
        Delivery(readers=tuple(range(readers)), near=tuple(range(writers))),
    )


OpenBuffer = Callable[..., DoubleBuffer]


@pytest.fixture
def open_buffer(tmp_path: Path) -> OpenBuffer:
    def make(spec: Assembly | None = None) -> DoubleBuffer:
        return DoubleBuffer.open(
            tmp_path, spec or assembly(), deadline_s=time.monotonic() + SOON
        )

    return make


def write(
    buffer: DoubleBuffer, writer: int, version: int, deadline_s: float = SOON
) -> bool:
    copy = buffer.begin(writer, version, deadline_s=time.monotonic() + deadline_s)
    copy[64 * writer : 64 * (writer + 1)] = version
    return buffer.finish(writer, version, checksum=version)


def write_all(buffer: DoubleBuffer, version: int) -> None:
    assert [write(buffer, writer, version) for writer in (0, 1)] == [False, True]


def read(buffer: DoubleBuffer, reader: int, version: int) -> None:
    assert set(buffer.read(reader, version).tolist()) == {version}
    buffer.release(reader, version, loaded=True)


def test_ranks_that_agree_share_one_file(
    open_buffer: OpenBuffer, tmp_path: Path
) -> None:
    one, same, other = open_buffer(), open_buffer(), open_buffer(assembly(readers=3))
    assert one.path == same.path != other.path
    assert DoubleBuffer(one.path).spec == one.spec == assembly()
    assert {f.suffix for f in tmp_path.iterdir()} == {".buffer", ".lock"}
    assert all(f.stat().st_mode & 0o077 == 0 for f in tmp_path.iterdir())


def test_a_version_is_complete_with_its_last_writer(open_buffer: OpenBuffer) -> None:
    writers, reader = [open_buffer(), open_buffer()], open_buffer()
    assert write(writers[0], 0, 7) is False
    with pytest.raises(
        WeightSyncError, match="version 7 was not written by actor rank 1"
    ):
        reader.read(0, 7)
    assert (reader.late(7), reader.lacking(7)) == ([1], [0, 1])
    assert write(writers[1], 1, 7) is True
    read(reader, 0, 7)
    assert (reader.late(7), reader.lacking(7)) == ([], [1])
    assert reader.sums(7) == {0: 7, 1: 7}


def test_readers_cannot_write(open_buffer: OpenBuffer) -> None:
    buffer = open_buffer()
    write_all(buffer, 1)
    with pytest.raises(ValueError, match="read-only"):
        buffer.read(0, 1)[0] = 5


def test_two_versions_are_there_and_the_third_waits_for_all_readers_of_the_first(
    open_buffer: OpenBuffer,
) -> None:
    buffer = open_buffer()
    for version in (1, 2):
        write_all(buffer, version)
    read(buffer, 0, 1)
    with pytest.raises(ChannelTimeout) as caught:
        write(buffer, 0, 3, deadline_s=0.002)
    assert caught.value.code == "channel-timeout"
    assert "in use by rollout rank 1; rollout ranks 0, 1" in str(caught.value)
    read(buffer, 1, 1)
    write_all(buffer, 3)
    for version in (2, 3):
        for reader in (0, 1):
            read(buffer, reader, version)
    with pytest.raises(WeightSyncError, match="version 1 is no longer there"):
        buffer.read(0, 1)


def test_a_reader_that_goes_on_is_finished_with_what_was_before(
    open_buffer: OpenBuffer,
) -> None:
    buffer = open_buffer()
    for version in (1, 2):
        write_all(buffer, version)
    for reader in (0, 1):
        read(buffer, reader, 2)
    write_all(buffer, 3)
    write_all(buffer, 4)
    read(buffer, 0, 4)


def test_a_version_that_cannot_be_completed_makes_room_and_the_last_whole_one_stays(
    open_buffer: OpenBuffer,
) -> None:
    buffer = open_buffer()
    write_all(buffer, 1)
    held = buffer.read(0, 1)  # in use for long
    write(buffer, 0, 2)  # writer 1 fails before it begins
    with pytest.raises(
        ChannelTimeout, match="in use by rollout ranks 0, 1; actor rank 1"
    ):
        write(buffer, 0, 3, deadline_s=0.002)
    write(buffer, 1, 3)  # and goes on to the next
    assert write(buffer, 0, 3) is True
    assert set(held.tolist()) == {1}
    read(buffer, 1, 3)


def test_dead_processes_hold_nothing(open_buffer: OpenBuffer) -> None:
    buffer = open_buffer()
    for version in (1, 2):
        write_all(buffer, version)
    read(buffer, 1, 1)
    die_reading_1 = multiprocessing.get_context("fork").Process(
        target=_read_and_die, args=(buffer.path,)
    )
    die_reading_1.start()
    die_reading_1.join(SOON)
    assert die_reading_1.exitcode == -signal.SIGKILL
    write_all(buffer, 3)  # reader 0 never finished with 1
    buffer.release(1, 3, loaded=False)
    die_writing_4 = multiprocessing.get_context("fork").Process(
        target=_write_and_die, args=(buffer.path,)
    )
    die_writing_4.start()
    die_writing_4.join(SOON)
    assert buffer.late(4) == [1]
    write(buffer, 0, 5)
    assert write(buffer, 1, 5) is True
    read(buffer, 1, 5)


def _read_and_die(path: Path) -> None:
    DoubleBuffer(path).read(0, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _write_and_die(path: Path) -> None:
    buffer = DoubleBuffer(path)
    write(buffer, 0, 4)
    buffer.begin(1, 4, deadline_s=time.monotonic() + SOON)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_died_while_making_a_buffer_leaves_nothing(
    open_buffer: OpenBuffer, tmp_path: Path
) -> None:
    path = open_buffer().path
    path.unlink()
    path.with_suffix(".part").write_bytes(b"half")
    write_all(open_buffer(), 1)
    assert not path.with_suffix(".part").exists()


class Full:
    """A file system without room; `where` has some."""

    def __init__(self, where: Path | None) -> None:
        self._where = where

    def allocate(self, path: Path, size_bytes: int) -> None:
        if path.parent != self._where:
            raise OSError(errno.ENOSPC, "no room")
        path.write_bytes(b"\0" * size_bytes)


def test_without_room_in_memory_a_buffer_lies_on_disk(
    open_buffer: OpenBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / SPILL).symlink_to(disk)
    monkeypatch.setattr(room, "allocate", Full(disk).allocate)
    buffer = open_buffer()
    write_all(buffer, 1)
    read(open_buffer(), 0, 1)
    assert buffer.path.is_symlink()
    assert buffer.path.resolve().parent == disk


def test_without_any_room_the_size_is_named(
    open_buffer: OpenBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "allocate", Full(None).allocate)
    with pytest.raises(
        ClusterError, match=r"12 KiB of shared memory are needed"
    ) as caught:
        open_buffer()
    assert caught.value.code == "shm-too-small"
    assert not list(tmp_path.glob("*.buffer"))


def test_a_lock_that_is_never_given_back_has_a_deadline(
    open_buffer: OpenBuffer,
) -> None:
    buffer, stuck = open_buffer(), open_buffer()
    stuck._lock.acquire(timeout=SOON)
    with pytest.raises(ChannelTimeout, match="the buffer stayed locked"):
        buffer.begin(0, 1, deadline_s=time.monotonic() + 0.002)
    stuck._lock.release()
    with open(f"{buffer.path}.lock") as making:
        fcntl.flock(making, fcntl.LOCK_EX)
        with pytest.raises(ChannelTimeout, match="the buffer stayed locked"):
            DoubleBuffer.open(buffer.path.parent, buffer.spec, deadline_s=0.0)
