"""Segments: written once, held by one at a time, used again by any process, and given back when their holder dies."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared_memory import arena as arena_module
from rlplace.comm.shared_memory.arena import (
    CHANGING,
    SMALLEST,
    WARM,
    Arena,
    Arenas,
    NoRoomError,
    OwnedMemory,
    segment_bytes,
)
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import JobFolder
from rlplace.comm.table import E_STATE, IN_LINE
from rlplace.errors import ChannelTimeout, OutputError
from tests.channel_peer import held_bytes, in_child


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with JobFolder.create(tmp_path) as made:
        yield made.path


@pytest.fixture
def arena(folder: Path) -> Arena:
    return Arena(folder)


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_LOOK_S", 0.0)


def of(size: int, value: int = 1) -> Any:
    return np.full(size, value, np.uint8)


@pytest.mark.parametrize(
    "lengths",
    [(5,), (0,), (64, 1, 0, 100_000), (SMALLEST,), (3 * SMALLEST + 1, 7), (1,) * 5000],
)
def test_what_was_written_comes_out(arena: Arena, lengths: tuple[int, ...]) -> None:
    pieces = [of(length, i % 250) for i, length in enumerate(lengths)]
    segment = arena.write(pieces)
    assert [
        bytes(piece)
        for piece in arena.copy(segment, lambda size: np.empty(size, np.uint8))
    ] == [bytes(piece) for piece in pieces]
    assert held_bytes(arena)[0] == 0


def test_sizes_waste_an_eighth_at_most_and_each_has_its_class() -> None:
    sizes = sorted(
        {segment_bytes(int(size)) for size in np.geomspace(1, 1 << 40, 5000)}
    )
    assert all(
        segment_bytes(size + 1) - size <= max(SMALLEST, size // 8) for size in sizes
    )
    assert [arena_module._class_of(size) for size in sizes] == list(range(len(sizes)))


def test_a_process_that_keeps_the_lock_is_not_waited_for_for_ever(
    folder: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be freed meanwhile is freed with the next change."""
    monkeypatch.setattr(arena_module, "_PATIENCE_S", 0.05)
    mine, lent = arena.write([of(100_000)]), arena.write([of(100_000)])
    arena.pass_to(lent, 7)
    stopped = Arena(folder)
    assert stopped._lock.acquire(timeout=1.0)
    with pytest.raises(ChannelTimeout, match="lock of large items"):
        arena.write([of(100_000)])
    arena.free(mine)
    arena.free(lent, 7)
    stopped._lock.release()
    assert held_bytes(arena)[0] == 2 * segment_bytes(100_000 + 128)
    arena.free(arena.write([of(100_000)]))
    assert held_bytes(arena)[0] == 0


def test_a_segment_that_one_process_made_and_another_freed_is_used_again(
    folder: Path, arena: Arena
) -> None:
    segment = arena.write([of(100_000)])
    arena.pass_to(segment, 7)
    held = held_bytes(arena)[0]

    def take() -> None:
        other = Arena(folder)
        other.pass_to(segment, 0)
        other.free(segment)

    in_child(take)
    assert held_bytes(arena) == (0, held)
    assert arena.write([of(100_000)]) == segment
    assert held_bytes(arena) == (held, 0)


def test_many_producers_of_mixed_sizes_hold_no_more_than_was_in_use_at_a_time(
    tmp_path: Path,
) -> None:
    """A channel of 20 items, 20 producers in turn: what one has made, the next uses."""
    channel = SharedChannel.create(
        tmp_path, ChannelSpec(name="test", capacity_items=20)
    )
    arena, most = Arena(tmp_path), 0

    def produce(seed: int) -> None:
        for size in np.random.default_rng(seed).integers(20_000, 2_000_000, 20):
            channel.put(of(int(size)))

    for seed in range(20):
        in_child(produce, seed)
        most = max(most, held_bytes(arena)[0])
        for _ in range(20):
            channel.get()
        assert held_bytes(arena)[0] == 0
        assert sum(held_bytes(arena)) <= most + segment_bytes(2_000_000)
    blocks = (tmp_path / "arena").stat().st_blocks * 512
    assert blocks <= 1.25 * most
    channel.destroy()


def test_what_a_dead_process_held_is_free_again(folder: Path, arena: Arena) -> None:
    def die() -> None:
        Arena(folder).write([of(100_000)])
        os.kill(os.getpid(), signal.SIGKILL)

    in_child(die)
    held = held_bytes(arena)
    arena.write([of(100_000)])
    assert held_bytes(arena) == held


def test_a_death_in_the_middle_of_a_change_is_repaired(
    folder: Path, arena: Arena
) -> None:
    free, used = arena.write([of(100_000)]), arena.write([of(200_000)])
    arena.free(free)
    held = held_bytes(arena)

    def die() -> None:
        other = Arena(folder)
        with other._change():
            other._words[WARM : WARM + 4] = (
                memoryview(np.full(4, 77)).cast("B").cast("q")
            )
            os.kill(os.getpid(), signal.SIGKILL)

    in_child(die)
    assert arena._words[CHANGING] != 0
    assert held_bytes(arena) == held
    assert arena.write([of(100_000)]) == free
    arena.free(used)


def limited(monkeypatch: pytest.MonkeyPatch, folder: Path, budget: int) -> None:
    """Room for `budget` bytes in the arena of this folder."""
    allocate = os.posix_fallocate

    def limit(descriptor: int, offset: int, size: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if (
            path == str(folder / "arena")
            and os.fstat(descriptor).st_blocks * 512 + size > budget
        ):
            raise OSError(errno.ENOSPC, "full")
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", limit)


def test_a_full_memory_is_emptied_of_what_is_free_first(
    arena: Arena, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = [arena.write([of(1 << 20)]) for _ in range(4)]
    for segment in segments:
        arena.free(segment)
    limited(monkeypatch, folder, 4 << 20)
    arena.free(arena.write([of(3 << 20)]))
    with pytest.raises(NoRoomError):
        arena.write([of(5 << 20)])
    assert arena.write([of(1000)])


def test_what_does_not_fit_goes_to_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = SharedChannel.create(folder, ChannelSpec(name="test", capacity_items=8))
    channel.put(of(1000))
    limited(monkeypatch, folder, 3 << 20)
    for i in range(6):
        channel.put(of(1 << 20, i))
    assert (folder / "spill" / "arena").exists()
    assert channel.get().size == 1000
    assert [int(channel.get()[-1]) for _ in range(6)] == list(range(6))
    channel.destroy()


def test_no_room_anywhere_is_an_error_that_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas = Arenas(folder)
    arenas.write((b"x",))
    (folder / "spill").unlink()
    limited(monkeypatch, folder, 1 << 20)
    with pytest.raises(OutputError) as caught:
        arenas.write((of(2 << 20),))
    assert caught.value.problem.code == "shm-full"


def test_an_arena_that_cannot_be_made_is_one_on_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = arena_module.allocate

    def full(path: Path, size: int) -> None:
        if path.parent == folder:
            raise OSError(errno.ENOSPC, "full")
        made(path, size)

    monkeypatch.setattr(arena_module, "allocate", full)
    channel = SharedChannel.create(folder, ChannelSpec(name="test", capacity_items=8))
    channel.put(of(100_000))
    assert channel.get().sum() == 100_000
    assert not (folder / "arena").exists()


@pytest.mark.parametrize(
    ("limit", "ended"), [(resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_AS, 1)]
)
def test_limits_of_a_process(folder: Path, limit: int, ended: int) -> None:
    """A largest file bounds the arena; too few addresses for it are a Problem."""
    # Arenas of earlier tests would give back addresses later. Not in the child: a child of a process with threads must
    # not run the finalisers of arbitrary objects.
    gc.collect()

    def write() -> None:
        used = (
            4096 * int(Path("/proc/self/statm").read_text().split()[0])
            if limit == resource.RLIMIT_AS
            else 0
        )
        resource.setrlimit(limit, (used + (1 << 30),) * 2)
        try:
            Arenas(folder).write((of(100_000),))
        except OutputError as error:
            os._exit(error.problem.code == "shm-full")
        os._exit(0)

    assert in_child(write) == ended


def test_breaking_a_channel_frees_its_own_segments_alone(tmp_path: Path) -> None:
    """A process that died while it put an item left the place of an earlier one, which another channel uses by now."""
    one, other = (
        SharedChannel.create(tmp_path, ChannelSpec(name=name, capacity_items=4))
        for name in "ab"
    )
    one.put(of(100_000, 1))
    one.get()
    other.put(of(100_000, 2))
    table = one._attachment.table
    table.words[table.entries + E_STATE] = IN_LINE
    one.break_("a process died")
    one.destroy()
    arena = Arena(tmp_path)
    assert held_bytes(arena)[0] > 0
    arena.write([of(100_000, 3)])
    assert (other.get() == 2).all()
    other.destroy()


# ── memory of the caller's own ───────────────────────────────────────────────────────────────────────────────────────

SIZE = 1000


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> OwnedMemory:
    monkeypatch.setattr(arena_module, "LARGE", SIZE)
    return OwnedMemory()


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize(
    "made_of", [np.asarray, lambda a: np.ndarray((10,), "<f4", a), torch.frombuffer]
)
def test_memory_is_used_again_only_when_all_that_was_made_of_it_is_gone(
    owned: OwnedMemory, made_of: Any
) -> None:
    first = owned.take(SIZE)
    at = address(first)
    kept = (
        made_of(first, dtype=torch.uint8)
        if made_of is torch.frombuffer
        else made_of(first)
    )
    kept = kept[1:]
    del first
    second = owned.take(SIZE)
    assert address(second) != at
    del kept
    assert address(owned.take(SIZE)) == at


def test_a_block_serves_for_what_is_a_little_smaller_and_not_for_what_is_larger_or_tiny(
    owned: OwnedMemory,
) -> None:
    at = address(owned.take(SIZE + 100))
    smaller = owned.take(SIZE)
    assert (address(smaller), smaller.nbytes) == (at, SIZE)
    del smaller
    assert owned.take(5 * SIZE).nbytes == 5 * SIZE
    assert len(owned._idle) == 1  # only the last: what did not serve was given up
    many = [owned.take(SIZE) for _ in range(5)]
    many.clear()
    assert len(owned._idle) == 2
    owned._idle.clear()
    owned.take(SIZE - 1)
    assert len(owned._idle) == 0
