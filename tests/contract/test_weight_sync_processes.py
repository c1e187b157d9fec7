"""A weight sync between processes, of which one dies in the middle."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import JobFolder
from rlplace.comm.weights.buffer import DoubleBuffer
from rlplace.comm.weights.receiver import CopyReceiver
from rlplace.comm.weights.sender import WeightSender
from rlplace.comm.weights.shards import Shard, row_blocks
from rlplace.errors import WeightSyncError
from rlplace.placement.flow import Delivery

PATIENCE_S = 60.0
DELIVERY = Delivery(readers=(0,), near=(0, 1))
SHAPE = (6, 1000)


def send(folder: Path, rank: int, dies_in: int | None) -> None:
    """Pushes versions 1 and 2, each filled with its number; in version `dies_in` it only begins."""
    torch.set_num_threads(1)
    blocks = row_blocks(SHAPE, 2)
    channel = SharedChannel.attach(folder / "weights.channel").named(f"actor rank {rank}")
    sender = WeightSender(channel, rank=rank, deliveries=[DELIVERY], folder=folder)
    for version in (1, 2):
        if version == dies_in:
            (file,) = folder.glob("weights-*.buffer")
            DoubleBuffer(file).begin(rank, version, deadline_s=time.monotonic() + PATIENCE_S)
            os.kill(os.getpid(), signal.SIGKILL)
        held = torch.full((blocks[rank].stop - blocks[rank].start,), float(version))
        sender.push(version, [Shard(names=("w",), dtype="float32", shape=SHAPE, blocks=blocks, data=held)])
    sender.close()


def test_a_writer_that_dies_is_named_and_the_version_before_stays_in_use() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with JobFolder.create() as folder:
        channel = SharedChannel.create(folder.path, ChannelSpec(name="weights", capacity_items=8, timeout_s=PATIENCE_S))
        writers = [context.Process(target=send, args=(folder.path, rank, 2 if rank else None)) for rank in (0, 1)]
        for writer in writers:
            writer.start()
        receiver = CopyReceiver(channel.named("rollout rank 0"), 0, folder=folder.path)
        received = receiver.pull(1)
        for writer in writers:
            writer.join(PATIENCE_S)
        assert [writer.exitcode for writer in writers] == [0, -signal.SIGKILL]
        with pytest.raises(WeightSyncError) as caught:
            receiver.pull(2, timeout_s=0.0)
        assert "rollout rank 0: version 2 was not written by actor rank 1" in str(caught.value)
        assert "without version 2 now: rollout rank 0" in str(caught.value)
        assert torch.equal(received.tensors["w"], torch.ones(SHAPE))
        received.release()
        receiver.close()
        channel.destroy()
    assert not folder.path.exists()
