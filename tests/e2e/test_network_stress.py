"""Many processes through one server, killed at random: what arrives, what may be lost, and what stays behind."""

from __future__ import annotations

import multiprocessing
import random
from collections import Counter
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.network import ChannelServer, Connection, JobKeys, RemoteChannel
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import JobFolder

pytestmark = pytest.mark.slow

SPEC = ChannelSpec(name="test", capacity_items=8, timeout_s=120.0)
KILLS, ITEMS = 8, 2_000
Item = tuple[str, int]


def produce(endpoint: str, keys: JobKeys, name: str, said: Pipe) -> None:
    """Says each item after its put has returned."""
    end = RemoteChannel(Connection(endpoint, keys), SPEC).named(name)
    large, number = np.zeros(50_000), 0
    while True:
        end.put((name, number, large if number % 50 == 0 else None))
        said.send((name, number))
        number += 1


def consume(endpoint: str, keys: JobKeys, name: str, said: Pipe) -> None:
    """Says each item once it has it."""
    end = RemoteChannel(Connection(endpoint, keys), SPEC).named(name)
    while True:
        producer, number, _ = end.get()
        said.send((producer, number))


class Crowd:
    """Processes of one kind; who is killed is replaced by a new one."""

    def __init__(self, target: Any, kind: str, endpoint: str, keys: JobKeys) -> None:
        self._start = (target, kind, endpoint, keys)
        self._context = multiprocessing.get_context("spawn")
        self._count = 0
        self.alive: dict[Pipe, Any] = {}
        self.said: list[Item] = []

    def add(self) -> None:
        target, kind, endpoint, keys = self._start
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=target, args=(endpoint, keys, f"{kind} {self._count}", theirs))
        process.start()
        theirs.close()
        self.alive[ours] = process
        self._count += 1

    def kill(self, pipe: Pipe) -> None:
        process = self.alive.pop(pipe)
        process.kill()
        process.join()
        self._hear_out(pipe)

    def hear(self, pipe: Pipe) -> None:
        self.said.append(pipe.recv())

    def _hear_out(self, pipe: Pipe) -> None:
        try:
            while True:
                self.said.append(pipe.recv())
        except (EOFError, OSError):  # the end, or a word that was cut off
            pipe.close()


def test_killed_at_random_each_item_arrives_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplace.comm.network.server.LOST_S", 0.2)
    monkeypatch.setattr("rlplace.comm.network.server.PROBE_S", 0.05)
    chance, keys = random.Random(0), JobKeys.create()
    with JobFolder.create() as folder:
        channel = SharedChannel.create(folder.path, SPEC)
        server = ChannelServer(host="127.0.0.1", keys=keys)
        server.add("test", channel)
        endpoint = server.start()
        producers = Crowd(produce, "env", endpoint, keys)
        consumers = Crowd(consume, "rollout", endpoint, keys)
        for crowd in (producers, consumers):
            crowd.add()
            crowd.add()
        for kill in range(KILLS + 1):
            while len(consumers.said) < ITEMS * (kill + 1) // (KILLS + 1):
                ready = wait([*producers.alive, *consumers.alive], timeout=60.0)
                assert ready, f"nothing moves any more: {channel.stats()}"
                for pipe in ready:
                    (producers if pipe in producers.alive else consumers).hear(pipe)
            if kill < KILLS:
                crowd = (producers, consumers)[kill % 2]
                crowd.kill(chance.choice(list(crowd.alive)))
                crowd.add()
        for crowd in (producers, consumers):
            for pipe in list(crowd.alive):
                crowd.kill(pipe)
        while (stats := channel.stats()).waits or len(stats.dead) < len({*stats.producers, *stats.consumers}):
            pass
        left = [channel.get_nowait()[:2] for _ in range(channel.stats().depth_items)]
        server.close()
        stats = channel.stats()
        channel.destroy()
        channel.detach()

    taken = Counter([*consumers.said, *left])
    killed_consumers = KILLS // 2 + 2
    doubled = sum(count - 1 for count in taken.values())
    lost = set(producers.said) - set(taken)
    assert doubled <= killed_consumers, "at most what a consumer had said and not confirmed"
    assert len(lost) <= killed_consumers, "at most what a consumer had confirmed and not said"
    assert (stats.depth_items, stats.waits) == (0, ())
    for name in {name for name, _ in taken}:
        numbers = sorted(number for owner, number in taken if owner == name)
        assert len(range(numbers[0], numbers[-1] + 1)) - len(numbers) <= killed_consumers
