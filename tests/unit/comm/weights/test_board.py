"""The board alone: which buffer takes a version, who holds it, and what dead processes leave behind."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rlplace.comm.shared.folder import SPILL
from rlplace.comm.weights import board as room
from rlplace.comm.weights.board import Board
from rlplace.comm.weights.plan import Assembly, Block, Layout, TensorSpec, assemble
from rlplace.errors import ChannelTimeout, ClusterError, WeightSyncError
from rlplace.placement.flow import Delivery

SOON = 60.0


def assembly(writers: int = 2, readers: int = 2) -> Assembly:
    """One tensor of 64 bytes for each writer, who holds it alone."""
    layout = Layout.of(
        TensorSpec(names=(f"of {rank}",), dtype="uint8", itemsize=1, shape=(64,)) for rank in range(writers)
    )
    held = [tuple(Block(0, 64 * (rank == own)) for rank in range(writers)) for own in range(writers)]
    return assemble(layout, held, Delivery(readers=tuple(range(readers)), near=tuple(range(writers))))


OpenBoard = Callable[..., Board]


@pytest.fixture
def open_board(tmp_path: Path) -> Iterator[OpenBoard]:
    opened: list[Board] = []

    def make(spec: Assembly | None = None) -> Board:
        opened.append(Board.open(tmp_path, spec or assembly(), deadline_s=time.monotonic() + SOON))
        return opened[-1]

    yield make
    for board in opened:
        board.close()


def write(board: Board, writer: int, version: int, deadline_s: float = SOON) -> bool:
    copy = board.begin(writer, version, deadline_s=time.monotonic() + deadline_s)
    copy[64 * writer : 64 * (writer + 1)] = version
    return board.finish(writer, version, checksum=version)


def write_all(board: Board, version: int) -> None:
    assert [write(board, writer, version) for writer in (0, 1)] == [False, True]


def read(board: Board, reader: int, version: int) -> None:
    copy = board.read(reader, version)
    assert set(copy.tolist()) == {version}
    board.release(reader, version, loaded=True)


def test_ranks_that_agree_share_one_file(open_board: OpenBoard, tmp_path: Path) -> None:
    one, same, other = open_board(), open_board(), open_board(assembly(readers=3))
    assert one.path == same.path != other.path
    assert Board.attach(one.path).spec == one.spec == assembly()
    assert {f.suffix for f in tmp_path.iterdir()} == {".board", ".lock"}
    assert all(f.stat().st_mode & 0o077 == 0 for f in tmp_path.iterdir())


def test_a_version_is_complete_with_its_last_writer(open_board: OpenBoard) -> None:
    writers, reader = [open_board(), open_board()], open_board()
    assert write(writers[0], 0, 7) is False
    with pytest.raises(WeightSyncError, match="version 7 was not written by actor rank 1"):
        reader.read(0, 7)
    assert (reader.late(7), reader.lacking(7)) == ([1], [0, 1])
    assert write(writers[1], 1, 7) is True
    read(reader, 0, 7)
    assert (reader.late(7), reader.lacking(7)) == ([], [1])
    assert reader.sums(7) == {0: 7, 1: 7}


def test_readers_cannot_write(open_board: OpenBoard) -> None:
    board = open_board()
    write_all(board, 1)
    with pytest.raises(ValueError, match="read-only"):
        board.read(0, 1)[0] = 5


def test_two_versions_are_there_and_the_third_waits_for_all_readers_of_the_first(open_board: OpenBoard) -> None:
    board = open_board()
    for version in (1, 2):
        write_all(board, version)
    read(board, 0, 1)
    with pytest.raises(ChannelTimeout) as caught:
        write(board, 0, 3, deadline_s=0.002)
    assert caught.value.code == "channel-timeout"
    assert "in use by rollout rank 1; rollout ranks 0, 1" in str(caught.value)
    read(board, 1, 1)
    write_all(board, 3)
    for version in (2, 3):
        for reader in (0, 1):
            read(board, reader, version)
    with pytest.raises(WeightSyncError, match="version 1 is no longer there"):
        board.read(0, 1)


def test_a_reader_that_goes_on_is_finished_with_what_was_before(open_board: OpenBoard) -> None:
    board = open_board()
    for version in (1, 2):
        write_all(board, version)
    for reader in (0, 1):
        read(board, reader, 2)
    write_all(board, 3)
    write_all(board, 4)
    read(board, 0, 4)


def test_a_version_nobody_can_complete_makes_room_and_the_last_whole_one_stays(open_board: OpenBoard) -> None:
    board = open_board()
    write_all(board, 1)
    held = board.read(0, 1)  # in use for long
    write(board, 0, 2)  # writer 1 fails before it begins
    with pytest.raises(ChannelTimeout, match="in use by rollout ranks 0, 1; actor rank 1"):
        write(board, 0, 3, deadline_s=0.002)
    write(board, 1, 3)  # and goes on to the next
    assert write(board, 0, 3) is True
    assert set(held.tolist()) == {1}
    read(board, 1, 3)


def test_an_older_version_than_what_is_there_is_refused(open_board: OpenBoard) -> None:
    board = open_board()
    write_all(board, 5)
    with pytest.raises(WeightSyncError, match="version 4 was pushed after version 5") as caught:
        board.begin(0, 4, deadline_s=time.monotonic())
    assert caught.value.code == "version-mismatch"


def test_contents_are_those_of_a_whole_version(open_board: OpenBoard) -> None:
    board = open_board()
    write_all(board, 1)
    write(board, 0, 2)
    assert board.contents(0) is None
    assert board.contents(2) is None
    contents = board.contents(1)
    assert contents is not None
    assert np.array_equal(contents, np.ones(128, np.uint8))


def test_dead_processes_hold_nothing(open_board: OpenBoard) -> None:
    board = open_board()
    for version in (1, 2):
        write_all(board, version)
    read(board, 1, 1)
    die_reading_1 = multiprocessing.get_context("fork").Process(target=_read_and_die, args=(board.path,))
    die_reading_1.start()
    die_reading_1.join(SOON)
    assert die_reading_1.exitcode == -signal.SIGKILL
    write_all(board, 3)  # reader 0 never finished with 1
    board.release(1, 3, loaded=False)
    die_writing_4 = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(board.path,))
    die_writing_4.start()
    die_writing_4.join(SOON)
    assert board.late(4) == [1]
    write(board, 0, 5)
    assert write(board, 1, 5) is True
    read(board, 1, 5)


def _read_and_die(path: Path) -> None:
    board = Board.attach(path)
    board.read(0, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _write_and_die(path: Path) -> None:
    board = Board.attach(path)
    write(board, 0, 4)
    board.begin(1, 4, deadline_s=time.monotonic() + SOON)
    os.kill(os.getpid(), signal.SIGKILL)


def test_who_died_while_making_a_board_leaves_nothing(open_board: OpenBoard, tmp_path: Path) -> None:
    path = open_board().path
    path.unlink()
    path.with_suffix(".part").write_bytes(b"half")
    write_all(open_board(), 1)
    assert not path.with_suffix(".part").exists()


class Full:
    """A file system without room; `where` has some."""

    def __init__(self, where: Path | None) -> None:
        self._where = where

    def allocate(self, path: Path, size_bytes: int) -> None:
        if path.parent != self._where:
            raise OSError(errno.ENOSPC, "no room")
        path.write_bytes(b"\0" * size_bytes)


def test_without_room_in_memory_a_board_lies_on_disk(
    open_board: OpenBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / SPILL).symlink_to(disk)
    monkeypatch.setattr(room, "allocate", Full(disk).allocate)
    board = open_board()
    write_all(board, 1)
    read(open_board(), 0, 1)
    assert board.path.is_symlink()
    assert board.path.resolve().parent == disk


def test_without_any_room_the_size_is_named(
    open_board: OpenBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "allocate", Full(None).allocate)
    with pytest.raises(ClusterError, match=r"12 KiB of shared memory are needed") as caught:
        open_board()
    assert caught.value.code == "shm-too-small"
    assert not list(tmp_path.glob("*.board"))


def test_a_lock_that_is_never_given_back_has_a_deadline(open_board: OpenBoard) -> None:
    import fcntl

    board = open_board()
    with open(f"{board.path}.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ChannelTimeout, match="the board stayed locked"):
            board.begin(0, 1, deadline_s=time.monotonic() + 0.002)
