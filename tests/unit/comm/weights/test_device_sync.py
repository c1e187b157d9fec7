"""Tensors shared with another process, on hosts and on GPUs; notes between members. Whole syncs test the rest."""

from __future__ import annotations

import inspect
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing.reductions as reductions

from rlplace.comm.weights.device_group import open_shared, share
from rlplace.comm.weights.rendezvous import (
    StoreAddress,
    SyncRendezvous,
    serve_store,
)
from rlplace.errors import ChannelTimeout, WeightSyncError
from tests.worker_ranks import fork_server

PATIENCE_S = 60.0


@pytest.fixture
def another_process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=fork_server()) as pool:
        yield pool


def double(note: bytes) -> tuple[float, str]:
    """Double the shared tensor; return its sum before, and where it is."""
    tensor = open_shared(note)
    total = tensor.double().sum().item()
    tensor.mul_(2)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return total, tensor.device.type


def test_a_shared_tensor_is_the_same_memory(
    another_process: ProcessPoolExecutor,
) -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)[:, 1:]
    assert another_process.submit(double, share(tensor)).result(PATIENCE_S) == (
        12.0,
        "cpu",
    )
    assert tensor.tolist() == [[2, 4], [8, 10]]


@pytest.mark.gpu
def test_a_tensor_is_shared_on_an_accelerator_after_what_its_stream_does(
    another_process: ProcessPoolExecutor,
) -> None:
    tensor = torch.ones(1 << 20, device="cuda")
    for _ in range(100):
        tensor.add_(1)
    assert another_process.submit(double, share(tensor)).result(PATIENCE_S) == (
        101.0 * (1 << 20),
        "cuda",
    )
    assert tensor.unique().tolist() == [202.0]


def test_torch_opens_cuda_memory_by_the_arguments_that_a_note_holds() -> None:
    """The arguments are those of torch's own pickles: another order in a later torch must not go unnoticed."""
    assert list(inspect.signature(reductions.rebuild_cuda_tensor).parameters) == [
        *(
            "tensor_cls",
            "tensor_size",
            "tensor_stride",
            "tensor_offset",
            "storage_cls",
            "dtype",
            "storage_device",
        ),
        *(
            "storage_handle",
            "storage_size_bytes",
            "storage_offset_bytes",
            "requires_grad",
        ),
        *(
            "ref_counter_handle",
            "ref_counter_offset",
            "event_handle",
            "event_sync_required",
        ),
    ]


@pytest.mark.gpu
def test_an_accelerator_that_is_not_seen_is_named() -> None:
    tensor = torch.ones(1, device="cuda")
    note = json.loads(share(tensor)) | {"accelerator": "GPU-of-another-process"}
    with pytest.raises(WeightSyncError) as caught:
        open_shared(json.dumps(note).encode())
    assert caught.value.code == "accelerator-not-visible"


MEMBERS = ("actor rank 0", "rollout rank 0", "rollout rank 1")


def members() -> list[SyncRendezvous]:
    store = dist.HashStore()
    return [SyncRendezvous(store, member) for member in MEMBERS]


def test_a_note_that_does_not_come_names_its_source() -> None:
    actor, first, _ = members()
    actor.refuse(0, "", ())
    with pytest.raises(
        ChannelTimeout,
        match=r"actor rank 0 waited .* s for rollout rank 1: bucket 3 taken",
    ):
        actor.read("bucket 3 taken", "rollout rank 1", deadline_s=0.0)
    first.refuse(0, "", ())
    first.note("bucket 3 taken", b"yes")
    assert (
        actor.read(
            "bucket 3 taken", "rollout rank 0", deadline_s=time.monotonic() + 60.0
        )
        == b"yes"
    )


def test_syncs_with_prefixes_of_their_own_meet_apart_at_one_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        served = serve_store("127.0.0.1", port, listening.detach(), PATIENCE_S)
    first, second = (
        SyncRendezvous(
            StoreAddress(host="127.0.0.1", port=port, prefix=name).connect(PATIENCE_S),
            "learner rank 0",
        )
        for name in ("weights.learner.sampler", "weights.learner.judge")
    )
    first.refuse(0, "asked for another version", ())
    first.set_version(3)
    until = time.monotonic() + PATIENCE_S
    assert second.join(0, "-", ["learner rank 0"], deadline_s=until) == ["-"]
    assert second.version_of("learner rank 0") == -1
    assert first.version_of("learner rank 0") == 3
    del served


def test_notes_are_forgotten_two_rounds_later_and_versions_are_not() -> None:
    actor = members()[0]
    actor.set_version(7)
    for round in range(10):
        actor.refuse(round, "", ())
        actor.note("something", b"x" * 100)
    assert actor.store.num_keys() <= 3 * 3 + 1
    assert (actor.version_of("actor rank 0"), actor.version_of("rollout rank 0")) == (
        7,
        -1,
    )
