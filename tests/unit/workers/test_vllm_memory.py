"""How orders become calls of vLLM on a GPU, and emptied storages on a CPU, without either."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rlplace.workers.engines.vllm_memory import CpuMemory, CudaMemory, Order


class Gpu:
    """Writes down what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def collective_rpc(self, method: Callable[..., Any], /, *, args: tuple[Any, ...] = ()) -> list[Any]:
        raise AssertionError("nothing is asked of the workers themselves")

    def sleep(self, level: int = 1) -> None:
        self.calls.append(("sleep", level))

    def release_kv_cache_memory(self) -> None:
        self.calls.append(("release_kv_cache_memory",))

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self.calls.append(("wake_up", *(tags or ())))
        return True


@pytest.mark.parametrize(
    ("order", "calls"),
    [
        (Order.DROP_CACHE, [("sleep", 0), ("release_kv_cache_memory",)]),
        (Order.SLEEP_1, [("sleep", 1)]),
        (Order.SLEEP_2, [("sleep", 2)]),
        (Order.WAKE_WEIGHTS, [("wake_up", "weights")]),
        (Order.WAKE_CACHE, [("wake_up", "kv_cache")]),
    ],
)
def test_on_a_gpu_orders_are_vllms_own(order: Order, calls: list[tuple[object, ...]]) -> None:
    gpu = Gpu()
    CudaMemory(gpu).carry_out(order)
    assert gpu.calls == calls


class Packed(nn.Linear):
    """A linear layer whose product is a function of its own, as vLLM makes it on a CPU."""

    def __init__(self) -> None:
        super().__init__(4, 3, bias=False)
        self.cpu_linear: Any = nn.functional.linear


class Cpu(Gpu):
    """One worker: two layers with views of one cache of 4 KiB, and a model of 12 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Packed()
        whole = torch.ones(1024)
        self.caches = [whole[:512].view(8, 64), whole[512:].view(8, 64)]
        runner = types.SimpleNamespace(kv_caches=self.caches, get_model=lambda: self.model)
        self.worker = types.SimpleNamespace(model_runner=runner)

    def collective_rpc(self, method: Callable[..., Any], /, *, args: tuple[Any, ...] = ()) -> list[Any]:
        return [method(self.worker, *args)]


def test_the_cache_is_emptied_in_place_and_comes_back_as_zeros() -> None:
    cpu = Cpu()
    memory = CpuMemory(cpu)
    assert memory.cache_bytes() == 4096
    memory.carry_out(Order.DROP_CACHE)
    assert memory.cache_bytes() == 0
    memory.carry_out(Order.WAKE_CACHE)
    assert memory.cache_bytes() == 4096
    assert [int(cache.count_nonzero()) for cache in cpu.caches] == [0, 0]
    cpu.caches[1].fill_(1)
    assert int(cpu.caches[0].count_nonzero()) == 0


def test_at_level_2_weights_and_what_was_packed_of_them_are_dropped() -> None:
    cpu = Cpu()
    memory = CpuMemory(cpu)
    memory.carry_out(Order.SLEEP_2)
    assert cpu.model.cpu_linear is None
    assert cpu.model.weight.untyped_storage().nbytes() == 0
    memory.carry_out(Order.WAKE_WEIGHTS)
    assert cpu.model.cpu_linear is not None
    assert cpu.model.weight.untyped_storage().nbytes() == 48


def test_at_level_1_weights_stay_on_the_host() -> None:
    cpu = Cpu()
    memory = CpuMemory(cpu)
    before = cpu.model.weight.clone()
    memory.carry_out(Order.SLEEP_1)
    memory.carry_out(Order.WAKE_WEIGHTS)
    assert torch.equal(cpu.model.weight, before)
    assert cpu.model.cpu_linear is not None
