"""Seconds of a weight sync between processes of this machine, beside the machine's own memcpy.

    python benchmarks/weight_sync.py [--gib 1] [--senders 2] [--receivers 2]
    python benchmarks/weight_sync.py --apart encrypted       senders and receivers as if on two nodes, over loopback

Each sender holds its rows of float32 matrices of 16 MiB; a sync begins when the first sender starts to write. It is
*mapped* when every receiver can read the whole new version, and *loaded* when every receiver has copied it into tensors
of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.network import Site, process, serve
from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import JobFolder
from rlplace.placement.flow import Delivery

COLUMNS = 2048
WARM_UP = 2
REPETITIONS = 7  # syncs; the first two touch the pages of the two buffers
PATIENCE_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    rows: tuple[int, ...]  # of each matrix
    senders: int
    receivers: int
    verify_every: int
    keys: Any  # of the channel server between senders and receivers; None: they are on one node
    endpoint: str = ""  # of that server

    @classmethod
    def of(
        cls, size_bytes: int, senders: int, receivers: int, verify_every: int, keys: Any
    ) -> Case:
        rows = size_bytes // (4 * COLUMNS)
        return cls(
            rows=tuple(min(COLUMNS, rows - first) for first in range(0, rows, COLUMNS)),
            senders=senders,
            receivers=receivers,
            verify_every=verify_every,
            keys=keys,
        )

    @property
    def deliveries(self) -> tuple[Delivery, ...]:
        near = tuple(range(self.senders)) if self.keys is None else ()
        return (Delivery(readers=tuple(range(self.receivers)), near=near),)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The best of the syncs: what else the machine does only adds."""

    mapped_s: float
    loaded_s: float


def measure(size_bytes: int, senders: int, receivers: int) -> float:
    """Seconds until every receiver has loaded `size_bytes` of new weights."""
    return figures(size_bytes, senders, receivers).loaded_s


def figures(
    size_bytes: int,
    senders: int,
    receivers: int,
    *,
    verify_every: int = 0,
    keys: Any = None,
) -> Figures:
    case = Case.of(size_bytes, senders, receivers, verify_every, keys)
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(senders + receivers)
    with JobFolder.create() as folder, contextlib.ExitStack() as serving:
        capacity = (
            64 if keys is None else 2 * receivers
        )  # as a run has it between nodes
        spec = ChannelSpec(
            name="weights", capacity_items=capacity, timeout_s=PATIENCE_S
        )
        channel = SharedChannel.create(folder.path, spec)
        if keys is not None:
            server = serving.enter_context(process(serve, Site(), channel.path, keys))
            case = dataclasses.replace(case, endpoint=server.recv())
            serving.callback(server.send, "end")
        ends = []
        processes = []
        for work, count in ((send, senders), (receive, receivers)):
            for rank in range(count):
                mine, theirs = context.Pipe(duplex=False)
                processes.append(
                    context.Process(
                        target=work, args=(case, rank, folder.path, together, theirs)
                    )
                )
                ends.append(mine)
        for each in processes:
            each.start()
        stamps = [end.recv() for end in ends]
        for each in processes:
            each.join(PATIENCE_S)
    began = [
        min(of_one) for of_one in zip(*(s[0] for s in stamps[:senders]), strict=True)
    ][WARM_UP:]
    mapped, loaded = (
        [max(of_one) for of_one in zip(*(s[i] for s in stamps[senders:]), strict=True)][
            WARM_UP:
        ]
        for i in (0, 1)
    )
    return Figures(
        mapped_s=min(m - b for m, b in zip(mapped, began, strict=True)),
        loaded_s=min(x - b for x, b in zip(loaded, began, strict=True)),
    )


def syncs(together: Barrier) -> Iterator[int]:
    for version in range(WARM_UP + REPETITIONS):
        together.wait(PATIENCE_S)
        yield version


def send(
    case: Case, rank: int, folder: Path, together: Barrier, result: Connection
) -> None:
    import torch

    from rlplace.comm.weights.host_sync import WeightSender
    from rlplace.comm.weights.shards import Shard, row_blocks

    channel: Any = SharedChannel.attach(folder / "weights.channel")
    if case.keys is not None:
        from rlplace.comm.network import Connection, RemoteChannel

        channel = RemoteChannel(Connection(case.endpoint, case.keys), channel.spec)
    torch.set_num_threads(1)
    shards = []
    for number, rows in enumerate(case.rows):
        blocks = row_blocks((rows, COLUMNS), case.senders)
        held = torch.full((blocks[rank].stop - blocks[rank].start,), float(number))
        shards.append(
            Shard(
                names=(f"layer.{number}",),
                dtype="float32",
                shape=(rows, COLUMNS),
                blocks=blocks,
                data=held,
            )
        )
    sender = WeightSender(
        channel.named(f"actor rank {rank}"),
        rank=rank,
        deliveries=case.deliveries,
        folder=folder,
        verify_every=case.verify_every,
    )
    began = []
    for version in syncs(together):
        began.append(time.perf_counter())  # one clock for all processes of a machine
        sender.push(version, shards)
    sender.close()
    if case.keys is not None:
        channel.connection.close()
    result.send([began])


def receive(
    case: Case, rank: int, folder: Path, together: Barrier, result: Connection
) -> None:
    import torch

    from rlplace.comm.weights.host_sync import CopyReceiver
    from rlplace.comm.weights.shards import copy_tensor

    torch.set_num_threads(1)
    own = {
        f"layer.{number}": torch.zeros(rows, COLUMNS)
        for number, rows in enumerate(case.rows)
    }
    channel = SharedChannel.attach(folder / "weights.channel").named(
        f"rollout rank {rank}"
    )
    receiver = CopyReceiver(channel, rank, folder=folder)
    mapped = []
    loaded = []
    for version in syncs(together):
        with receiver.pull(version) as received:
            mapped.append(time.perf_counter())
            for name, tensor in own.items():
                copy_tensor(tensor, received.tensors[name])
        loaded.append(time.perf_counter())
    assert all(
        float(tensor[-1, -1]) == number for number, tensor in enumerate(own.values())
    )
    receiver.close()
    result.send([mapped, loaded])


def memcpy_s(size_bytes: int) -> float:
    """One process copies `size_bytes` once, between warm memory."""
    block = min(size_bytes, 256 << 20)
    source = np.ones(block, np.uint8)
    target = np.ones(block, np.uint8)
    seconds = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return min(seconds) * size_bytes / block


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--senders", type=int, default=2)
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--verify-every", type=int, default=0)
    parser.add_argument("--apart", choices=("password", "encrypted"))
    asked = parser.parse_args()
    keys = None
    if asked.apart:
        from rlplace.comm.network import JobKeys, JobPassword

        keys = JobKeys.create() if asked.apart == "encrypted" else JobPassword.create()
    size_bytes = int(asked.gib * (1 << 30))
    copied_s = memcpy_s(size_bytes)
    found = figures(
        size_bytes,
        asked.senders,
        asked.receivers,
        verify_every=asked.verify_every,
        keys=keys,
    )
    print(
        f"{asked.gib:g} GiB, {asked.senders} -> {asked.receivers} ranks"
        + f", {asked.apart}" * bool(asked.apart)
    )
    for what, seconds in (
        ("memcpy, one process", copied_s),
        ("mapped", found.mapped_s),
        ("loaded", found.loaded_s),
    ):
        print(
            f"  {what:<20} {seconds:6.3f} s  {size_bytes / seconds / 1e9:5.1f} GB/s  {copied_s / seconds:4.2f} memcpy"
        )


if __name__ == "__main__":
    main()
