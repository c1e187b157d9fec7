"""Millions of small items between processes that are killed at random: none twice, none torn, no memory left behind."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.errors import ChannelBroken, ChannelEmpty, ChannelTimeout

ITEMS = int(os.environ.get("RLPLACE_STRESS_ITEMS", "150000"))
KEYS = ("a", "b")
PATIENCE_S = 0.02  # of a consumer at one key: all may wait at the one while the channel is full of the other
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def produce(channel: SharedChannel, producer: int, first: int) -> None:
    seed = random.Random(first)
    i = first
    while True:
        channel.put(
            (producer, i, "x" * seed.randrange(300)), key=KEYS[i % 2], weight=i % 3
        )
        i += 1


def consume(channel: SharedChannel, done: SharedChannel, consumer: int) -> None:
    seed = random.Random(consumer)
    while True:
        key = seed.choice(KEYS)
        try:
            if seed.random() < 0.1:
                batch = channel.get_batch(
                    seed.randrange(1, 9), key=key, timeout_s=PATIENCE_S
                )
            else:
                batch = [channel.get(key=key, timeout_s=PATIENCE_S)]
        except ChannelTimeout:
            continue
        done.put([(producer, i) for producer, i, _ in batch])


def resident_kib(process: BaseProcess) -> int:
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    return 0


def test_a_long_life_leaves_nothing_behind(
    tmp_path: Path, start: Callable[..., BaseProcess]
) -> None:
    """Four producers and four consumers, undisturbed: each item once, memory and descriptors flat."""
    channel = SharedChannel.create(
        tmp_path, ChannelSpec(name="items", capacity_items=64, keys=KEYS, timeout_s=600)
    )
    done = SharedChannel.create(
        tmp_path, ChannelSpec(name="done", capacity_items=256, timeout_s=600)
    )
    workers = [
        start(quietly, produce, channel.named(f"env rank {i}"), i, 0) for i in range(4)
    ]
    workers += [
        start(quietly, consume, channel.named(f"rollout {i}"), done, i)
        for i in range(4)
    ]
    taken: list[tuple[int, int]] = []
    warm, files = [0] * 8, 0
    while len(taken) < ITEMS:
        taken += done.get()
        if len(taken) > ITEMS // 10 and not files:
            warm, files = (
                [resident_kib(worker) for worker in workers],
                len(os.listdir("/proc/self/fd")),
            )
    now = [resident_kib(worker) for worker in workers]
    assert all(after < before * 1.2 for after, before in zip(now, warm, strict=True))
    assert len(os.listdir("/proc/self/fd")) == files
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "done.channel",
        "items.channel",
    ]
    assert len(set(taken)) == len(taken), "an item came twice"
    for producer in range(4):  # what is missing is still under way
        numbers = [i for owner, i in taken if owner == producer]
        assert max(numbers) - len(numbers) < 1000


def test_random_kills(tmp_path: Path, start: Callable[..., BaseProcess]) -> None:
    """When one is killed, the others go on, or get ChannelBroken; none hangs."""
    seed = random.Random(7)
    deadline = time.monotonic() + ITEMS / 10_000  # seconds
    survived = lives = 0
    while time.monotonic() < deadline or not survived:
        lives += 1
        survived += deaths_survived(tmp_path, seed, f"{lives}", start)
        assert list(tmp_path.iterdir()) == []


def deaths_survived(
    folder: Path, seed: random.Random, name: str, start: Callable[..., BaseProcess]
) -> int:
    """A channel whose users are killed and replaced until a death breaks it or twenty have died."""
    channel = SharedChannel.create(
        folder,
        ChannelSpec(name=name, capacity_items=8, keys=(*KEYS, "never"), timeout_s=60),
    )
    done = SharedChannel.create(
        folder, ChannelSpec(name=f"done {name}", capacity_items=64, timeout_s=60)
    )

    def replace(place: int, born: int) -> BaseProcess:
        if place < 2:
            return start(quietly, produce, channel.named(f"env rank {born}"), born, 0)
        return start(
            quietly, consume, channel.named(f"rollout rank {born}"), done, born
        )

    living = [replace(place, place) for place in range(4)]
    taken: set[tuple[int, int]] = set()
    survived = 0
    for born in range(4, 24):
        for _ in range(seed.randrange(1, 30)):
            taken_before = len(taken)
            batch = done.get(timeout_s=60)
            taken.update(batch)
            assert len(taken) == taken_before + len(batch), "an item came twice"
        victim = seed.randrange(4)
        living[victim].kill()
        living[victim].join()
        if any(map(is_broken, (channel, done))):
            break
        survived += 1
        living[victim] = replace(victim, born)
    channel.break_("the test is over")
    done.break_("the test is over")
    for process in living:
        process.join(60)
        assert not process.is_alive(), "it did not hear that the channel is broken"
    for end in (channel, done):
        end.destroy()
        end.detach()
    return survived


def is_broken(channel: SharedChannel) -> bool:
    try:
        channel.get_nowait(key="never")
    except ChannelBroken:
        return True
    except ChannelEmpty:
        pass
    return False


def quietly(work: Callable[..., None], *arguments: object) -> None:
    with contextlib.suppress(ChannelBroken):
        work(*arguments)
