"""Offloading empties storages in place: a tensor and its views have the same bytes afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlplace.errors import AcceleratorOutOfMemory
from rlplace.workers.launch.devices import EmulatedDevice, MemoryAccount
from rlplace.workers.offload import Offloadable
from tests.open_calls import slot_of


def odd_bits() -> Tensor:
    """Values that a copy by value could change: signed zero, infinity, a nan with a payload, a subnormal."""
    patterns = [-(1 << 31), 0x7F800000, 0x7FC0BEEF, 1]
    return torch.tensor(patterns, dtype=torch.int32).view(torch.float32).repeat(8)


def test_the_way_there_and_back_changes_no_bit() -> None:
    tensor, accelerator = (
        odd_bits(),
        EmulatedDevice(MemoryAccount([1 << 10]), slot_of("actor")),
    )
    view, before = tensor[3:7], tensor.view(torch.int32).tolist()
    part = Offloadable(
        "weights", accelerator, lambda: [tensor, view, torch.zeros(0)]
    )  # shared storage counts once
    assert (part.accelerator_bytes, part.host_bytes, accelerator.held_bytes()) == (
        128,
        0,
        128,
    )
    part.offload()
    assert tensor.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0
    assert (part.accelerator_bytes, part.host_bytes, accelerator.held_bytes()) == (
        0,
        128,
        0,
    )
    part.onload()
    assert tensor.view(torch.int32).tolist() == before
    assert view.view(torch.int32).tolist() == before[3:7]
    view.fill_(2.0)
    assert tensor[3:7].tolist() == [2.0] * 4
    assert (part.accelerator_bytes, part.host_bytes, accelerator.held_bytes()) == (
        128,
        0,
        128,
    )


@pytest.mark.gpu
def test_a_gpu_gets_its_memory_back() -> None:
    from rlplace.workers.launch.devices import CudaDevice

    tensor = torch.randn(64 << 20, device="cuda")
    before, held = tensor.sum().item(), torch.cuda.memory_reserved()
    part = Offloadable("weights", CudaDevice(), lambda: [tensor])
    part.offload()
    assert torch.cuda.memory_reserved() <= held - (256 << 20)
    part.onload()
    assert tensor.sum().item() == before


@pytest.mark.gpu
def test_a_gpu_refuses_what_it_has_no_room_for_before_it_is_taken() -> None:
    from rlplace.workers.launch.devices import CudaDevice

    device, before = CudaDevice(), torch.cuda.memory_reserved()
    free, capacity = torch.cuda.mem_get_info()
    device.acquire(free // 2, "weights")
    with pytest.raises(AcceleratorOutOfMemory, match="weights") as refused:
        device.acquire(capacity, "KV cache")
    assert refused.value.lacking_bytes > 0
    assert torch.cuda.memory_reserved() == before
    device.release("weights")
