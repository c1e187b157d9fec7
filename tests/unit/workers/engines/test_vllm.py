"""The sleep of a vLLM engine: steps of a move, the account of its accelerators, and how each platform frees memory."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from rlplace.errors import AcceleratorOutOfMemory
from rlplace.placement.schedule import Residency
from rlplace.workers.engines.vllm_memory import (
    KV_CACHE,
    WEIGHTS,
    CpuMemory,
    CudaMemory,
    EngineMemory,
    Held,
    Level,
    _held_on_gpu,
    cuda_memory,
)
from rlplace.workers.launch.devices import CudaDevice, Room
from tests.fake_vllm import FakeVllm, OlderVllm
from tests.rollout_stage import Ledger

OFF, WEIGHTS_ONLY, FULL = Residency.OFF, Residency.WEIGHTS, Residency.FULL
WEIGHT_BYTES, CACHE_BYTES = 1000, 300


class Memory(EngineMemory):
    """Writes down its steps, and what the account held when each one came."""

    def __init__(self, device: Ledger, level: Level = 2) -> None:
        self.log: list[tuple[str, dict[str, int]]] = []
        super().__init__(None, device, level)
        self.device = device

    def _step(self, name: str) -> None:
        self.log.append((name, dict(self.device.held)))

    def drop_cache(self) -> None:
        self._step("drop cache")

    def wake_cache(self) -> None:
        self._step("wake cache")

    def sleep(self, level: Level) -> None:
        self._step(f"sleep {level}")

    def wake_weights(self) -> None:
        self._step("wake weights")

    def _measure(self) -> list[Held]:
        return [Held(weights=WEIGHT_BYTES, cache=CACHE_BYTES, accelerator=0, host=0)]


def asleep(level: Level = 2, limit: int | None = None) -> Memory:
    """As an engine has it after it was built."""
    memory = Memory(Ledger(limit), level)
    memory.move(OFF, level=2)
    assert ([step for step, _ in memory.log], memory.residency) == (
        ["drop cache", "sleep 2"],
        OFF,
    )
    memory.log.clear()
    return memory


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_acquired_before_a_step_takes_it_and_released_after_it_is_free(
    level: Level,
) -> None:
    memory = asleep(level)
    for to in (FULL, FULL, OFF, OFF, WEIGHTS_ONLY, FULL, WEIGHTS_ONLY, OFF):
        memory.move(to)
        assert memory.residency == to
    both, weights = (
        {WEIGHTS: WEIGHT_BYTES, KV_CACHE: CACHE_BYTES},
        {WEIGHTS: WEIGHT_BYTES},
    )
    once = [
        ("wake weights", weights),
        ("wake cache", both),
        ("drop cache", both),
        (f"sleep {level}", weights),
    ]
    assert memory.log == once * 2
    assert memory.device.held == {}


def test_what_does_not_fit_leaves_the_last_residency_that_was_reached() -> None:
    memory = asleep(limit=WEIGHT_BYTES + CACHE_BYTES - 1)
    with pytest.raises(MemoryError):
        memory.move(FULL)
    assert (memory.residency, memory.device.held) == (
        WEIGHTS_ONLY,
        {WEIGHTS: WEIGHT_BYTES},
    )
    memory.device.limit = None
    memory.move(FULL)
    assert [step for step, _ in memory.log] == ["wake weights", "wake cache"]
    memory.close()
    assert memory.device.held == {}


# ── platforms ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_on_a_gpu_the_steps_are_vllms_own() -> None:
    gpu = FakeVllm()
    memory = CudaMemory(gpu, Ledger(), 1)
    for to in (OFF, FULL):
        memory.move(to)
    stopped = [("step",), ("sleep", 0), ("release_kv_cache_memory",)]
    assert gpu.calls == [
        *stopped,
        ("sleep", 1),
        ("wake_up", "weights"),
        ("wake_up", "kv_cache"),
    ]


@pytest.mark.parametrize("level", [1, 2])
def test_on_a_gpu_any_two_moves_are_legal_to_vllm(level: Level) -> None:
    """And answers are refused until the weights mean something and all is awake."""
    for first, second, third in itertools.product((OFF, WEIGHTS_ONLY, FULL), repeat=3):
        gpu = FakeVllm()
        memory = CudaMemory(gpu, Ledger(), level)
        for to in (first, second, third):
            memory.move(to)
            if to == FULL:
                gpu.update()
                gpu.answer()
            else:
                with pytest.raises(RuntimeError):
                    gpu.answer()


def test_on_a_gpu_a_step_that_vllm_only_logs_is_an_error() -> None:
    gpu = FakeVllm()
    memory = CudaMemory(gpu, Ledger(), 1)
    memory.move(OFF)
    gpu.wake_up(["weights"])  # behind its back
    gpu.wake_up(["kv_cache"])
    gpu.wake_up = lambda tags=None: True
    with pytest.raises(
        AssertionError, match="vLLM is wholly awake after waking weights"
    ):
        memory.move(WEIGHTS_ONLY)


@pytest.mark.parametrize("level", [1, 2])
def test_an_older_vllm_gives_back_its_cache_alone_and_unmaps_nothing_twice(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own sleep takes all it has, also what sleeps."""
    gpu = OlderVllm()
    unmap = {id(each.handle): each for each in gpu.pointer_to_data.values()}
    cumem = types.SimpleNamespace(
        unmap_and_release=lambda handle: gpu.unmap(unmap[id(handle)])
    )
    allocator = types.SimpleNamespace(
        get_mem_allocator_instance=lambda: gpu, cumem=cumem
    )
    monkeypatch.setitem(
        sys.modules, "vllm", types.SimpleNamespace(device_allocator=allocator)
    )
    monkeypatch.setitem(sys.modules, "vllm.device_allocator", allocator)
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", cumem)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        CudaMemory,
        "_measure",
        lambda self: [Held(weights=1, cache=1, accelerator=2, host=0)],
    )
    assert cuda_memory(FakeVllm()) is CudaMemory
    memory = cuda_memory(gpu)(gpu, Ledger(), level)
    for to in [
        step
        for pair in itertools.product((OFF, WEIGHTS_ONLY, FULL), repeat=2)
        for step in pair
    ]:
        memory.move(to)
        assert (
            gpu.mapped
            == {OFF: set(), WEIGHTS_ONLY: {"weights"}, FULL: {"weights", "kv_cache"}}[
                to
            ]
        )
        assert gpu.forgotten or to == FULL
    assert set(gpu.copied) == ({"weights"} if level == 1 else set())
    assert sorted(gpu.pointer_to_data) == [1, 2, 3]


class Pool:
    """A pool of torch's with segments of `sizes` bytes."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes

    def snapshot(self) -> list[dict[str, int]]:
        return [{"total_size": size} for size in self._sizes]


def cumem(allocations: Sequence[object], pools: Mapping[str, Sequence[Pool]]) -> object:
    """Make what vllm 0.32 has in device_allocator/cumem.py: allocations, and pools by tag with their allocators."""
    kept = {
        tag: [(pool, "its allocator") for pool in each] for tag, each in pools.items()
    }
    return types.SimpleNamespace(
        pointer_to_data=dict(enumerate(allocations)), allocator_and_pools=kept
    )


def test_on_a_gpu_what_sleeps_is_not_held_and_copies_of_all_workers_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is what vLLM has trimmed from its pools, which torch goes on counting."""
    copy = torch.zeros(70, dtype=torch.uint8)
    allocations = [  # tag, bytes, asleep, copy on the host
        types.SimpleNamespace(
            tag=tag, handle=(0, size), is_asleep=asleep, cpu_backup_tensor=backup
        )
        for tag, size, asleep, backup in (
            ("weights", 100, False, None),
            ("weights", 70, True, copy),
            ("kv_cache", 30, False, None),
        )
    ]
    own = cumem(
        allocations, {"weights": [Pool(100, 70), Pool(25)], "kv_cache": [Pool(30)]}
    )  # 25: trimmed
    allocator = types.SimpleNamespace(get_mem_allocator_instance=lambda: own)
    monkeypatch.setitem(
        sys.modules, "vllm", types.SimpleNamespace(device_allocator=allocator)
    )
    monkeypatch.setitem(sys.modules, "vllm.device_allocator", allocator)
    monkeypatch.setattr(
        torch.cuda, "memory_reserved", lambda: 275
    )  # and 50 in none of these pools

    class Workers(FakeVllm):
        def collective_rpc(
            self, method: Callable[..., Any], /, *, args: tuple[Any, ...] = ()
        ) -> list[Any]:
            return [
                method(None, *args),
                Held(weights=90, cache=40, accelerator=170, host=5),
            ]

    assert CudaMemory(Workers(), Ledger(), 1).held() == (100, 40, 180, 75)


def test_of_an_older_vllm_the_last_pool_of_each_tag_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = types.SimpleNamespace(
        pointer_to_data={},
        allocator_and_pools={
            "weights": (Pool(100), "its allocator"),
            "kv_cache": (Pool(30), "..."),
        },
    )
    allocator = types.SimpleNamespace(get_mem_allocator_instance=lambda: own)
    monkeypatch.setitem(
        sys.modules, "vllm", types.SimpleNamespace(device_allocator=allocator)
    )
    monkeypatch.setitem(sys.modules, "vllm.device_allocator", allocator)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 150)
    assert _held_on_gpu(None) == (0, 0, 20, 0)


def test_on_a_gpu_what_is_unmapped_is_not_there_to_be_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch goes on counting pages that vLLM unmapped below it; and of workers in other processes it knows nothing."""
    asleep = types.SimpleNamespace(
        tag="weights", handle=(0, 70), is_asleep=True, cpu_backup_tensor=None
    )
    own = cumem([asleep], {"weights": [Pool(70)]})
    allocator = types.SimpleNamespace(get_mem_allocator_instance=lambda: own)
    monkeypatch.setitem(
        sys.modules, "vllm", types.SimpleNamespace(device_allocator=allocator)
    )
    monkeypatch.setitem(sys.modules, "vllm.device_allocator", allocator)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index=0: 80)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index=0: (30, 200))
    others = [Room(free=90, capacity=200, own=40), Room(free=20, capacity=200, own=10)]

    class Workers(FakeVllm):
        rooms: Sequence[Room] = ()

        def collective_rpc(
            self, method: Callable[..., Any], /, *, args: tuple[Any, ...] = ()
        ) -> list[Any]:
            own = method(None, *args)
            return [own, *self.rooms] if isinstance(own, Room) else [own]

    engine, device = Workers(), CudaDevice()
    assert device.measure() == (30, 200, 80)
    memory = CudaMemory(engine, device, 1)
    assert device.measure() == (30, 200, 10)
    assert device.held_bytes() == 10
    with pytest.raises(
        AcceleratorOutOfMemory,
        match=r"KV cache needs 41 bytes(.|\n)*other processes: all they hold 160",
    ):
        device.acquire(41, "KV cache")
    device.acquire(40, "KV cache")
    engine.rooms = others
    with pytest.raises(AcceleratorOutOfMemory, match="31 bytes"):
        device.acquire(31, "KV cache")
    memory.close()
    assert device.measure() == (30, 200, 80)


class Packed(nn.Linear):
    """A linear layer whose product is a function of its own, as vLLM makes it on a CPU."""

    def __init__(self) -> None:
        super().__init__(4, 3, bias=False)
        self.cpu_linear: Any = nn.functional.linear


class Cpu(FakeVllm):
    """One worker: two layers with views of one cache of 4 KiB, and a model of 12 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Packed()
        whole = torch.ones(1024)
        self.caches = [whole[:512].view(8, 64), whole[512:].view(8, 64)]
        runner = types.SimpleNamespace(
            kv_caches=self.caches, get_model=lambda: self.model
        )
        self.worker = types.SimpleNamespace(model_runner=runner)

    def reset_prefix_cache(self) -> bool:
        return True

    def collective_rpc(
        self, method: Callable[..., Any], /, *, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        return [method(self.worker, *args)]


def test_the_cache_is_emptied_in_place_and_comes_back_as_zeros() -> None:
    cpu = Cpu()
    memory = CpuMemory(cpu, Ledger(), 2)
    assert memory.held() == (48, 4096, 4096 + 48, 0)
    memory.drop_cache()
    assert memory.held().accelerator == 48
    memory.wake_cache()
    assert memory.held().cache == 4096
    assert [int(cache.count_nonzero()) for cache in cpu.caches] == [0, 0]
    cpu.caches[1].fill_(1)
    assert int(cpu.caches[0].count_nonzero()) == 0


def test_at_level_2_weights_and_what_was_packed_of_them_are_dropped() -> None:
    cpu = Cpu()
    memory = CpuMemory(cpu, Ledger(), 2)
    memory.sleep(2)
    assert cpu.model.cpu_linear is None
    assert cpu.model.weight.untyped_storage().nbytes() == 0
    memory.wake_weights()
    assert cpu.model.cpu_linear is not None
    assert cpu.model.weight.untyped_storage().nbytes() == 48


def test_at_level_1_weights_stay_on_the_host() -> None:
    cpu = Cpu()
    memory, before = CpuMemory(cpu, Ledger(), 2), cpu.model.weight.clone()
    memory.sleep(1)
    assert (memory.held().accelerator, memory.held().host) == (4096, 48)
    memory.wake_weights()
    assert memory.held().host == 0
    assert torch.equal(cpu.model.weight, before)
    assert cpu.model.cpu_linear is not None
