"""The lock between processes and the wakers that end their waits, each without a channel around it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplace.comm.shared_memory.lock import FileLock
from rlplace.comm.shared_memory.wakeup import LoopWaker, SocketWaker, SocketWakers


@pytest.fixture
def locks(tmp_path: Path) -> Iterator[tuple[FileLock, FileLock]]:
    """Two holds on one file, as two processes would have them."""
    path = tmp_path / "file"
    path.touch()
    two = FileLock(path), FileLock(path)
    yield two
    for lock in two:
        lock.close()


def test_one_holds_the_lock_at_a_time(locks: tuple[FileLock, FileLock]) -> None:
    first, second = locks
    assert first.acquire(0.0)
    assert not second.acquire(0.001)
    first.release()
    assert second.acquire(0.0)
    second.release()


def test_threads_of_one_process_exclude_each_other(locks: tuple[FileLock, FileLock]) -> None:
    lock = locks[0]
    assert lock.acquire(0.0)
    refused: list[bool] = []
    thread = threading.Thread(target=lambda: refused.append(lock.acquire(0.001)))
    thread.start()
    thread.join()
    assert refused == [False]
    lock.release()


def dies_with_the_lock(path: Path) -> None:
    assert FileLock(path).acquire(0.0)
    os._exit(1)


def test_the_lock_of_the_dead_is_free(locks: tuple[FileLock, FileLock], tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=dies_with_the_lock, args=(tmp_path / "file",))
    process.start()
    process.join()
    assert process.exitcode == 1
    assert locks[0].acquire(0.0)
    locks[0].release()


def test_a_wake_before_the_wait_is_not_lost() -> None:
    waker, wakers = SocketWaker(), SocketWakers()
    assert not waker.wait(0.0)
    wakers.wake(waker.number)
    assert waker.wait(60.0)
    assert not waker.wait(0.0)


def test_waking_never_blocks_and_never_fails() -> None:
    waker, wakers = SocketWaker(), SocketWakers()
    for _ in range(5000):  # more than any queue of datagrams holds
        wakers.wake(waker.number)
    assert waker.wait(60.0)
    waker.close()
    wakers.wake(waker.number)


def test_wakers_have_different_numbers() -> None:
    wakers = [SocketWaker() for _ in range(20)]
    numbers = {waker.number for waker in wakers}
    assert len(numbers) == 20
    assert 0 not in numbers


def test_a_loop_listens_only_while_a_task_waits() -> None:
    async def run() -> None:
        loop, waker, wakers = asyncio.get_running_loop(), LoopWaker(), SocketWakers()
        woken = [asyncio.Event(), asyncio.Event()]
        for event in woken:
            waker.add(loop, event, event.set)
        wakers.wake(waker.number)
        for event in woken:
            await event.wait()
            waker.remove(loop, event)
        assert not loop.remove_reader(waker._socket.fileno())  # no reader is left
        waker.close()

    asyncio.run(run())
