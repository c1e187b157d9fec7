"""What a channel in shared memory adds to the contract: fixed places, forks, pickled ends, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.comm import codec, ends
from rlplace.comm.queue import Get, Put
from rlplace.comm.shared_memory.arena import Arena, Arenas
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.table import MAX_NAME_BYTES
from rlplace.errors import (
    ChannelBroken,
    ChannelError,
    ChannelFull,
    ChannelMisuse,
    ClusterError,
)
from tests.channel_peer import FORK, PATIENCE_S, held_bytes


def descriptors(folder: Path) -> int:
    """Of files in a channel's folder, of wakers; what else is open is not the channel's."""
    gc.collect()
    with open("/proc/net/unix", encoding="ascii", errors="replace") as sockets:
        datagrams = {
            f"socket:[{words[6]}]"
            for words in map(str.split, sockets)
            if words[4] == "0002"
        }
    opened = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(name in datagrams or name.startswith(str(folder)) for name in opened)


def test_two_channels_of_one_name_do_not_meet(make: Callable, tmp_path: Path) -> None:
    channel = make(name="env -> actor/1")
    with pytest.raises(FileExistsError):
        make(name="env -> actor/1")
    channel.put("a")
    assert channel.get() == "a"
    assert sorted(p.name for p in tmp_path.iterdir()) == [channel.path.name]


def test_a_full_memory_is_an_error_before_anything_is_there(
    make: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ClusterError) as caught:
        make()
    assert caught.value.problem.key == "cluster.comm.shm_folder"
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_behind(make: Callable, tmp_path: Path) -> None:
    make(name="warm").detach()
    before = descriptors(tmp_path)
    channel = make()
    SharedChannel.attach(channel.path).put("of an end that is forgotten")
    assert channel.get() == "of an end that is forgotten"
    other = SharedChannel.attach(channel.path)
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(other.get)
        channel.put(np.ones(100_000))
        assert taken.result().sum() == 100_000
    channel.destroy()
    with pytest.raises(ChannelBroken, match="destroyed"):
        other.get()
    channel.destroy()
    channel.detach()
    other.detach()
    del channel, other
    assert descriptors(tmp_path) == before
    assert [p.name for p in tmp_path.glob("*.channel*")] == ["warm.channel"]
    assert held_bytes(Arena(tmp_path))[0] == 0


def both(channel: SharedChannel, first: int) -> None:
    gc.collect()  # a child lets go of what was its parent's
    for i in range(first, first + 300):
        channel.put(i)


def test_a_forked_child_shares_the_channel_but_not_the_lock(make: Callable) -> None:
    channel = make(capacity_items=602)
    channel.put(-1)  # the parent's lock, wakers and names are in use before
    channel.put(np.ones(100_000), key="large")
    child = FORK.Process(target=both, args=(channel.named("child"), 300))
    child.start()
    both(channel.named("parent"), 0)
    child.join()
    taken = [channel.get_nowait() for _ in range(601)]
    assert sorted(taken) == list(range(-1, 600))
    assert [i for i in taken if i >= 300] == list(range(300, 600))
    channel.put(np.ones(100_000), key="large")
    assert [channel.get(key="large").sum() for _ in range(2)] == [100_000, 100_000]
    assert set(channel.stats().producers) == {"an unnamed worker", "parent", "child"}


def test_names_have_a_limit(make: Callable) -> None:
    channel = make()
    longest = "ü" * (MAX_NAME_BYTES // 2)
    channel.named(longest).put("a", key=longest)
    assert channel.stats().producers == (longest,)
    for end, key in ((channel, longest + "x"), (channel.named(longest + "x"), "")):
        with pytest.raises(ChannelMisuse, match="too long") as caught:
            end.put("b", key=key)
        assert caught.value.code == "name-too-long"
    assert channel.get(key=longest) == "a"


def test_a_crowd_is_refused(make: Callable) -> None:
    channel = make(participants=8)
    queue = channel._attachment.queue
    waiting = [Get("rollout rank 0", "", None) for _ in range(8)]
    assert not any(queue.get(request, 1, 0.0) for request in waiting)
    with pytest.raises(ChannelError, match="places for 8 waiters") as caught:
        channel.named("one more").get()
    assert caught.value.code == "channel-crowded"
    for request in waiting:
        queue.withdraw(request, 0.0)
    for i in range(8 - 2):
        queue.participants.find(f"env rank {i}", "", queue.process)
    with pytest.raises(ChannelError, match="places for 8 names"):
        channel.named("yet another").get_nowait()
    assert not channel.stats().waits


@pytest.mark.parametrize("size", [10, 100_000])
def test_what_a_server_reserves_is_filled_or_withdrawn(
    make: Callable, size: int
) -> None:
    channel = make(capacity_items=1)
    item = np.arange(size)

    def reserve() -> Put:
        return asyncio.run(channel.put_packed(None, "a", 1.0, None, 1.0))

    channel.give_back(reserve())
    put = reserve()
    assert channel.stats().depth_by_key == {"a": 1}
    with pytest.raises(ChannelFull):
        channel.put_nowait("b")
    channel.fill(put, codec.Packer(1000).pack(item))
    np.testing.assert_array_equal(channel.get(key="a"), item)
    broken = reserve()
    channel.break_("the run ends")
    with pytest.raises(ChannelBroken):
        channel.fill(broken, codec.Packer(1000).pack(item))
    channel.give_back(broken)


@pytest.mark.parametrize("size", [10, 100_000])
def test_what_a_server_could_not_deliver_goes_back_to_the_front(
    make: Callable, size: int
) -> None:
    channel = make(capacity_items=2)
    for i in range(2):
        channel.put(np.full(size, i), weight=3.0)

    get = asyncio.run(channel.take(6.0, "", None))
    assert [codec.unpack(packed)[0] for packed, _, _ in get.taken] == [0, 1]
    channel.put(np.full(size, 2))
    channel.give_back(get)
    stats = channel.stats()
    assert (stats.depth_items, stats.gets) == (3, 0)
    assert [channel.get()[0] for _ in range(3)] == [0, 1, 2]
    channel.died()
    assert channel.stats().dead == ("an unnamed worker",)


def test_items_that_cannot_be_read_for_a_client_leave_their_room(
    make: Callable[..., SharedChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make(capacity_items=1)

    def fails(payload: object) -> codec.Packed:
        raise MemoryError

    monkeypatch.setattr(channel._attachment.store, "packed", fails)
    for i in range(40):
        channel.put(i)
        with pytest.raises(MemoryError):
            asyncio.run(channel.take(None, "", None))
    monkeypatch.undo()
    channel.put(2)
    assert channel.get() == 2


def test_credit_comes_back_though_the_lock_is_kept(
    make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "LOCK_PATIENCE_S", 0.01)
    channel = make(capacity_items=1)
    with ThreadPoolExecutor(1) as other:

        def fail(packed: object) -> None:
            assert other.submit(channel._attachment.lock.acquire, timeout=0.0).result()
            raise OSError(errno.ENOSPC, "no space left")

        monkeypatch.setattr(channel._attachment.store, "write", fail)
        with pytest.raises(OSError, match="no space left"):
            channel.put(np.ones(100_000))
        other.submit(channel._attachment.lock.release).result()
    channel.put_nowait("credit")
    assert channel.get() == "credit"


def test_a_remote_client_that_dies_while_it_waits_leaves_the_table_whole(
    make: Callable,
) -> None:
    """Its waits are withdrawn once: by their tasks, whose end comes after the server has noticed the death."""
    channel = make()

    async def die_waiting() -> list[object]:
        takes = [
            asyncio.ensure_future(channel.take(None, "", PATIENCE_S)) for _ in range(2)
        ]
        while len(channel._attachment.queue._waiting()) < 2:
            await asyncio.sleep(0)
        for take in takes:
            take.cancel()
        channel.died()
        return await asyncio.gather(*takes, return_exceptions=True)

    assert all(
        isinstance(ended, asyncio.CancelledError)
        for ended in asyncio.run(die_waiting())
    )
    assert SharedChannel.attach(channel.path).stats().dead == ("an unnamed worker",)
    with ThreadPoolExecutor(3) as getters:
        found = [getters.submit(channel.get) for _ in range(3)]
        for i in range(3):
            channel.put(i)
        assert sorted(each.result(PATIENCE_S) for each in found) == [0, 1, 2]


def test_large_items_of_a_job_that_is_gone(make: Callable, tmp_path: Path) -> None:
    channel = make()
    for _ in range(2):
        channel.put(np.ones(100_000))
    other = SharedChannel.attach(channel.path)
    other._attachment.store.arenas = Arenas(
        tmp_path
    )  # as in another process, which has not mapped them yet
    for file in tmp_path.iterdir():
        file.unlink()
    tmp_path.rmdir()
    with pytest.raises(ChannelBroken, match="the memory of the job is gone"):
        other.get()
    tmp_path.mkdir()
