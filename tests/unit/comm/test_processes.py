"""The lock between processes and the wakers that end their waits, each without a channel around it."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlplace.comm.processes import (
    LOCK_BYTES,
    SharedLock,
    Waker,
    Wakers,
    _called_in_forks,
    in_forks,
)
from tests.channel_peer import FORK, in_child


@pytest.fixture
def lock() -> Iterator[SharedLock]:
    memory = mmap.mmap(-1, 2 * LOCK_BYTES)
    SharedLock.make(memory, LOCK_BYTES)
    made = SharedLock(memory, LOCK_BYTES)
    yield made
    made.close()


def test_one_process_holds_the_lock_at_a_time(lock: SharedLock) -> None:
    assert lock.acquire(timeout=0.0)
    assert in_child(lambda: os._exit(lock.acquire(timeout=0.001))) == 0
    lock.release()
    assert in_child(lambda: os._exit(lock.acquire(timeout=0.0))) == 1


def test_threads_of_one_process_exclude_each_other(lock: SharedLock) -> None:
    assert lock.acquire(timeout=0.0)
    with ThreadPoolExecutor(1) as other:
        assert not other.submit(lock.acquire, timeout=0.001).result()
        taken = other.submit(lock.acquire, timeout=60.0)
        lock.release()
        assert taken.result()
        assert not lock.acquire(timeout=0.0)
        other.submit(lock.release).result()
    assert lock.acquire(timeout=0.0)


@pytest.mark.parametrize("waits", [False, True])
def test_the_kernel_frees_the_lock_of_a_dead_process(
    lock: SharedLock, waits: bool
) -> None:
    reading, writing = os.pipe()

    def die() -> None:
        assert lock.acquire(timeout=0.0)
        os.write(writing, b"x")
        if waits:
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)

    child = FORK.Process(target=die)
    child.start()
    os.read(reading, 1)
    if waits:
        assert not lock.acquire(timeout=0.0)
        threading.Timer(0.05, child.kill).start()  # while this one waits
        assert lock.acquire(timeout=60.0)
    child.join()
    assert waits or lock.acquire(timeout=0.0)
    lock.release()
    assert lock.acquire(timeout=0.0)


def test_a_child_of_the_holder_does_not_keep_the_lock(lock: SharedLock) -> None:
    reading, writing = os.pipe()

    def die_with_a_child() -> None:
        assert lock.acquire(timeout=0.0)
        child = os.fork()
        if child == 0:
            signal.pause()
        os.write(writing, b"%d" % child)
        os._exit(0)

    assert in_child(die_with_a_child) == 0
    assert lock.acquire(timeout=0.0)
    os.kill(int(os.read(reading, 20)), signal.SIGKILL)


def test_a_closed_lock_is_an_error(lock: SharedLock) -> None:
    lock.close()
    with pytest.raises(ValueError, match="closed"):
        lock.acquire(timeout=0.0)


def test_a_wake_before_the_wait_is_not_lost() -> None:
    waker, wakers = Waker(), Wakers()
    assert not waker.wait(0.0)
    wakers.wake(waker.number)
    assert waker.wait(60.0)
    assert not waker.wait(0.0)


def test_waking_never_blocks_and_never_fails() -> None:
    waker, wakers = Waker(), Wakers()
    for _ in range(5000):  # more than any queue of datagrams holds
        wakers.wake(waker.number)
    assert waker.wait(60.0)
    waker.close()
    wakers.wake(waker.number)


def test_a_task_sleeps_until_it_is_woken() -> None:
    async def run() -> None:
        first, second, wakers = Waker(), Waker(), Wakers()
        sleeping = asyncio.create_task(first.sleep(60.0))
        await second.sleep(1e-3)
        assert not sleeping.done()
        wakers.wake(first.number)
        await sleeping
        assert not first.wait(0.0)

    asyncio.run(run())


def test_few_wakers_are_kept_when_many_waited() -> None:
    wakers = Wakers()
    taken = [wakers.take() for _ in range(100)]
    for waker in taken:
        wakers.give_back(waker)
    assert sum(waker._socket.fileno() != -1 for waker in taken) < 50


def test_a_forked_child_tells_what_lives_and_what_is_gone_leaves_nothing() -> None:
    class Held:
        told = 0

        def enter_process(self) -> None:
            self.told += 1

    held, gone = Held(), Held()
    in_forks(held.enter_process)
    before = len(_called_in_forks())
    in_forks(gone.enter_process)
    del gone
    assert len(_called_in_forks()) == before
    assert in_child(lambda: os._exit(held.told)) == 1
    assert held.told == 0
