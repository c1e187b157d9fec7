"""What the processes of `benchmarks/comm.py` do, each in a process of its own, all from the same moment `start` on.

Every job takes a channel of either kind. Moments are those of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

SMALL = {  # 300 bytes when packed
    "env_rank": 3,
    "step": 1_234,
    "rewards": [0.5, 1.0, -0.25, 0.0, 2.0, 1.5, 0.125, 3.0],
    "done": False,
    "info": {"episode": 17, "length": 999, "note": "x" * 100},
    "source": "env rank 3 of 8, stage group 1",
}
OBSERVATION = {  # of 64 environments
    "observations": np.ones((64, 17), np.float32),
    "rewards": np.ones(64, np.float32),
    "dones": np.zeros(64, bool),
    "step": 1,
}
ACTION = {
    "actions": np.ones((64, 6), np.float32),
    "logprobs": np.ones(64, np.float32),
    "step": 1,
}
TENSORS = 16
DEADLINE_S = 120.0
PACE_S = 0.002  # between messages whose latency is measured, so that the consumer sleeps when one comes


def wait_until(start: float) -> None:
    time.sleep(max(0.0, start - time.monotonic()))


# ── channels ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def put_all(
    start: float, channel: Any, size_bytes: int, warm_up: int, count: int
) -> None:
    """`count` arrays of that size, or small dicts for 0, and `warm_up` before that."""
    item = np.ones(size_bytes, np.uint8) if size_bytes else SMALL
    wait_until(start)
    for _ in range(warm_up + count):
        channel.put(item)


def get_all(start: float, channel: Any, warm_up: int, count: int) -> float:
    """Items per second after `warm_up`, when what is made on first use is there."""
    wait_until(start)
    for i in range(warm_up + count):
        if i == warm_up:
            began = time.monotonic()
        channel.get()
    return count / (time.monotonic() - began)


def put_paced(start: float, channel: Any, count: int) -> None:
    for i in range(count):
        wait_until(start + i * PACE_S)
        channel.put({**SMALL, "at": time.monotonic()})


def get_paced(start: float, channel: Any, count: int) -> float:
    """Median microseconds from before a put until it was there."""
    return _median_us([-(channel.get()["at"] - time.monotonic()) for _ in range(count)])


def ask(
    start: float,
    observations: Any,
    actions: Any,
    count: int,
    *,
    observation: Any = OBSERVATION,
) -> float:
    """The env's side of a round trip: its median microseconds."""
    taken = []
    wait_until(start)
    for _ in range(count):
        began = time.monotonic()
        observations.put(observation)
        actions.get()
        taken.append(time.monotonic() - began)
    return _median_us(taken)


def ask_small(start: float, questions: Any, answers: Any, count: int) -> float:
    return ask(start, questions, answers, count, observation=SMALL)


def answer_small(start: float, questions: Any, answers: Any, count: int) -> None:
    answer(start, questions, answers, count, action=SMALL)


def answer(
    start: float, observations: Any, actions: Any, count: int, *, action: Any = ACTION
) -> None:
    """The rollout's side, without any inference."""
    for _ in range(count):
        observations.get()
        actions.put(action)


def wait_in_vain(start: float, channel: Any, seconds: float) -> float:
    """Percent of a core that a consumer uses while nothing comes."""
    wait_until(start)
    began = time.process_time()
    with contextlib.suppress(TimeoutError):
        channel.get(timeout_s=seconds)
    return 100 * (time.process_time() - began) / seconds


# ── weight sync ──────────────────────────────────────────────────────────────────────────────────────────────────────


def push(
    start: float,
    channel: Any,
    folder: Path,
    rank: int,
    ranks: int,
    size_bytes: int,
    versions: int,
) -> list[float]:
    """One actor rank's share of `size_bytes` of weights in float32; the moments when its pushes began."""
    import torch

    from rlplace.comm.weights.host_sync import WeightSender
    from rlplace.comm.weights.shards import Shard, row_blocks
    from rlplace.placement.flow import Delivery

    shape = (size_bytes // 4 // TENSORS // 1024, 1024)
    began = []
    blocks = row_blocks(shape, ranks)
    mine = torch.ones(blocks[rank].stop - blocks[rank].start)
    shards = [
        Shard(
            names=(f"layer.{i}",),
            dtype="float32",
            shape=shape,
            blocks=blocks,
            data=mine.clone(),
        )
        for i in range(TENSORS)
    ]
    everybody = tuple(range(ranks))
    sender = WeightSender(
        channel,
        rank=rank,
        deliveries=[Delivery(readers=everybody, near=everybody)],
        folder=folder,
    )
    wait_until(start)
    for version in range(versions):
        began.append(time.monotonic())
        sender.push(version, shards)
        for _ in everybody:
            channel.get(key=f"loaded, for actor {rank}")
    sender.close()
    return began


def pull(
    start: float,
    channel: Any,
    folder: Path,
    rank: int,
    ranks: int,
    versions: int,
    load: bool,
) -> list[float]:
    """The moments when one version after another was here, mapped or copied into tensors of this rank's own."""
    from rlplace.comm.weights.host_sync import CopyReceiver

    receiver = CopyReceiver(channel, rank, folder=folder)
    ended = []
    own: dict[str, Any] = {}
    wait_until(start)
    for version in range(versions):
        with receiver.pull(version, timeout_s=DEADLINE_S) as received:
            if load:
                own = own or {
                    name: tensor.clone() for name, tensor in received.tensors.items()
                }
                for name, tensor in received.tensors.items():
                    own[name].copy_(tensor)
        ended.append(time.monotonic())
        for actor in range(ranks):
            channel.put(None, key=f"loaded, for actor {actor}")
    receiver.close()
    return ended


# ── the machine's own limits ─────────────────────────────────────────────────────────────────────────────────────────


def copy_memory(start: float, size_bytes: int) -> float:
    """MiB/s of one copy from warm memory to warm memory: the median of some."""
    source = np.ones(size_bytes, np.uint8)
    target = np.ones(size_bytes, np.uint8)
    taken = []
    for _ in range(max(5, min(200, (256 << 20) // size_bytes))):
        began = time.monotonic()
        np.copyto(target, source)
        taken.append(time.monotonic() - began)
    return size_bytes / (1 << 20) / statistics.median(taken)


def ping(start: float, end: socket.socket, begins: bool, count: int) -> float:
    """Median microseconds of half a round trip through UNIX sockets, between two processes that sleep meanwhile."""
    taken = []
    with end:
        wait_until(start)
        for _ in range(count):
            began = time.monotonic()
            if begins:
                end.send(b"x")
            end.recv(16)
            if not begins:
                end.send(b"x")
            taken.append((time.monotonic() - began) / 2)
    return _median_us(taken)


def pour(start: float, end: socket.socket, sends: bool, count: int) -> float:
    """Messages of 300 bytes per second through a UNIX socket."""
    with end:
        wait_until(start)
        for _ in range(count):
            if sends:
                end.send(bytes(300))
            else:
                end.recv(400)
        return count / (time.monotonic() - start)


def _median_us(seconds: list[float]) -> float:
    return 1e6 * statistics.median(seconds)
