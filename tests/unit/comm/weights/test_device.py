"""Tensors shared with another process, on hosts and on GPUs; whole syncs test what is broadcast."""

from __future__ import annotations

import inspect
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.multiprocessing.reductions as reductions

from rlplace.comm.weights.device import open_shared, share
from rlplace.errors import WeightSyncError

PATIENCE_S = 60.0


@pytest.fixture
def another_process() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rlplace.comm.weights.device"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        yield pool


def double(note: bytes) -> tuple[float, str]:
    """Double the shared tensor; return its sum before, and where it is."""
    tensor = open_shared(note)
    total = tensor.double().sum().item()
    tensor.mul_(2)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return total, tensor.device.type


def test_a_shared_tensor_is_the_same_memory(another_process: ProcessPoolExecutor) -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)[:, 1:]
    assert another_process.submit(double, share(tensor)).result(PATIENCE_S) == (12.0, "cpu")
    assert tensor.tolist() == [[2, 4], [8, 10]]


@pytest.mark.gpu
def test_a_tensor_is_shared_on_an_accelerator_after_what_its_stream_does(another_process: ProcessPoolExecutor) -> None:
    tensor = torch.ones(1 << 20, device="cuda")
    for _ in range(100):
        tensor.add_(1)
    assert another_process.submit(double, share(tensor)).result(PATIENCE_S) == (101.0 * (1 << 20), "cuda")
    assert tensor.unique().tolist() == [202.0]


def test_torch_opens_cuda_memory_by_the_arguments_that_a_note_holds() -> None:
    """The arguments are those of torch's own pickles: another order in a later torch must not go unnoticed."""
    assert list(inspect.signature(reductions.rebuild_cuda_tensor).parameters) == [
        *("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device"),
        *("storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad"),
        *("ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required"),
    ]


@pytest.mark.gpu
def test_an_accelerator_that_is_not_seen_is_named() -> None:
    tensor = torch.ones(1, device="cuda")
    note = json.loads(share(tensor)) | {"accelerator": "GPU-of-another-process"}
    with pytest.raises(WeightSyncError) as caught:
        open_shared(json.dumps(note).encode())
    assert caught.value.code == "accelerator-not-visible"
