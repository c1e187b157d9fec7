"""A weight sync past the host between processes, of which one dies in the middle: no one is left waiting."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import JobFolder
from rlplace.comm.weights.rendezvous import StoreAddress
from rlplace.errors import ChannelTimeout, WeightSyncError
from tests.contract.device_sync import Mixture, serve
from tests.contract.weight_ends import PATIENCE_S, Weights, held_by

MIXTURE = Mixture(actors=2, hosts=(1, None), on_host=(2,), bucket_bytes=4096)


def weights(version: int) -> Weights:
    return {"w": torch.full((6, 1000), float(version)), "b": torch.full((7,), version).bfloat16()}


def act(folder: Path, point: StoreAddress, rank: int) -> None:
    """Pushes versions 1 and 2; rank 0 dies in the second, when half of its part is out."""
    torch.set_num_threads(1)
    sender = MIXTURE.sender(SharedChannel.attach(folder / "weights.channel"), rank, point, folder)
    sender.push(1, held_by(rank, MIXTURE.actors, weights(1)))
    if rank == 0:
        _die_after(sender, buckets=4)
    with pytest.raises((ChannelTimeout, WeightSyncError)) as failed:
        sender.push(2, held_by(rank, MIXTURE.actors, weights(2)))
    (folder / f"actor-{rank}.txt").write_text(str(failed.value))
    sender.close()


def _die_after(sender: object, *, buckets: int) -> None:
    member = sender._device._member  # type: ignore[attr-defined]
    broadcast, left = member.broadcast, [buckets]

    def deadly(bucket: torch.Tensor, owner: int) -> None:
        broadcast(bucket, owner)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    member.broadcast = deadly


def test_a_death_in_the_middle_is_named_and_leaves_the_version_before() -> None:
    """Members that share an accelerator, members that do not, and a reader on the host at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    store, point = serve()
    with JobFolder.create() as folder, ThreadPoolExecutor(3) as threads:
        spec = ChannelSpec(name="weights", capacity_items=8, timeout_s=PATIENCE_S)
        channel = SharedChannel.create(folder.path, spec)
        actors = [context.Process(target=act, args=(folder.path, point, rank)) for rank in range(MIXTURE.actors)]
        for actor in actors:
            actor.start()
        receivers = {rank: MIXTURE.receiver(channel, rank, folder.path) for rank in MIXTURE.readers}
        for received in threads.map(lambda receiver: receiver.pull(1), receivers.values()):
            assert torch.equal(received.tensors["w"], weights(1)["w"])
            assert torch.equal(received.tensors["b"], weights(1)["b"])
            received.release()
        for pull in [threads.submit(receivers[rank].pull, 2) for rank in (0, 1)]:
            error = pull.exception(PATIENCE_S)
            assert isinstance(error, WeightSyncError)
            assert "version 2 broke off" in str(error)
            assert "without version 2 now: rollout ranks 0, 1; the weights in use are unchanged" in str(error)
        for actor in actors:
            actor.join(PATIENCE_S)
        assert [actor.exitcode for actor in actors] == [-signal.SIGKILL, 0]
        assert "actor rank 1: version 2 broke off" in (folder.path / "actor-1.txt").read_text()
        for receiver in receivers.values():
            receiver.close()
        channel.destroy()
    del store
