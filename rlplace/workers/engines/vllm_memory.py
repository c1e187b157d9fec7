"""The sleep of a vLLM engine: what of it is on the accelerators, which steps are legal, how each platform does them.

::

    AWAKE ── drop cache ──▶ WEIGHTS_ONLY ── sleep 1 ──▶ LEVEL_1   weights go to the host and come back
          ◀── wake cache ──              ── sleep 2 ──▶ LEVEL_2   weights are dropped: a sync must bring new ones
                                         ◀── wake weights ── either

The schedule knows residencies; the config names the level that OFF means. A move walks the chain one step at a time,
so that no step is taken in a state that does not allow it. On a GPU the steps are vLLM's own, on a CPU ours. Functions
whose first argument is `worker` run in each of the engine's workers, through `collective_rpc`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from rlplace.placement.schedule import Residency

if TYPE_CHECKING:
    from rlplace.workers.launch.devices import Device

WEIGHTS, KV_CACHE = "engine weights", "KV cache"  # labels of the device's account

Level = Literal[1, 2]


class Sleep(enum.Enum):
    AWAKE = Residency.FULL, 0
    WEIGHTS_ONLY = Residency.WEIGHTS, 0
    LEVEL_1 = Residency.OFF, 1
    LEVEL_2 = Residency.OFF, 2

    @property
    def residency(self) -> Residency:
        return self.value[0]


class Order(enum.Enum):
    WAKE_WEIGHTS = "wake weights"
    WAKE_CACHE = "wake cache"
    DROP_CACHE = "drop cache"
    SLEEP_1 = "sleep at level 1"
    SLEEP_2 = "sleep at level 2"


LEGAL: Mapping[tuple[Sleep, Order], Sleep] = {
    (Sleep.AWAKE, Order.DROP_CACHE): Sleep.WEIGHTS_ONLY,
    (Sleep.WEIGHTS_ONLY, Order.WAKE_CACHE): Sleep.AWAKE,
    (Sleep.WEIGHTS_ONLY, Order.SLEEP_1): Sleep.LEVEL_1,
    (Sleep.WEIGHTS_ONLY, Order.SLEEP_2): Sleep.LEVEL_2,
    (Sleep.LEVEL_1, Order.WAKE_WEIGHTS): Sleep.WEIGHTS_ONLY,
    (Sleep.LEVEL_2, Order.WAKE_WEIGHTS): Sleep.WEIGHTS_ONLY,
}


def orders(state: Sleep, to: Residency, level: Level) -> Iterator[Order]:
    """Give the orders that bring an engine from `state` to `to`; none when it is there, at whichever level."""
    while state.residency != to:
        if state is Sleep.AWAKE:
            order = Order.DROP_CACHE
        elif state is not Sleep.WEIGHTS_ONLY:
            order = Order.WAKE_WEIGHTS
        elif to is Residency.FULL:
            order = Order.WAKE_CACHE
        else:
            order = Order.SLEEP_1 if level == 1 else Order.SLEEP_2
        yield order
        state = LEGAL[state, order]


class EngineMemory(Protocol):
    """Carries the orders out on one platform. All bytes are measured, the largest of the engine's accelerators."""

    def carry_out(self, order: Order) -> None: ...

    def weight_bytes(self) -> int: ...

    def cache_bytes(self) -> int: ...

    def held_bytes(self) -> int:
        """All that is on the accelerator, including what no order frees: the residue of a sleep."""
        ...

    def host_bytes(self) -> int:
        """Copies held on the host."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SleepReport:
    """Result of a move, measured."""

    before: Residency
    after: Residency
    held_bytes: int  # on each accelerator now; after a sleep, its residue
    freed_bytes: int  # negative when it woke
    seconds: float

    def __str__(self) -> str:
        change = f"freed {self.freed_bytes:,}" if self.freed_bytes >= 0 else f"took {-self.freed_bytes:,}"
        return (
            f"engine {self.before.word} -> {self.after.word}: {change} bytes in {self.seconds:.3f} s, "
            f"{self.held_bytes:,} are held"
        )


class Sleeper:
    """Owns the sleep state of one engine that was just built: awake, with random weights.

    Acquires memory from the device's account before an order takes it, releases it after an order freed it.
    """

    def __init__(self, memory: EngineMemory, device: Device, level: Level) -> None:
        self._memory = memory
        self._device = device
        self._level = level
        self._sizes = {WEIGHTS: memory.weight_bytes(), KV_CACHE: memory.cache_bytes()}
        self.state = Sleep.AWAKE

    def fall_asleep(self) -> None:
        """Move to OFF before any weights were loaded: there is nothing to copy, whatever the level."""
        for order in (Order.DROP_CACHE, Order.SLEEP_2):
            self._memory.carry_out(order)
            self.state = LEGAL[self.state, order]

    def move(self, to: Residency) -> SleepReport:
        """Raises AcceleratorOutOfMemory; the state is then the last one that was reached, and can be moved again."""
        began, before, held = time.perf_counter(), self.state.residency, self._memory.held_bytes()
        for order in orders(self.state, to, self._level):
            self._follow(order)
        now = self._memory.held_bytes()
        return SleepReport(
            before=before,
            after=to,
            held_bytes=now,
            freed_bytes=held - now,
            seconds=time.perf_counter() - began,
        )

    def close(self) -> None:
        """Give everything back to the account, after the engine is gone."""
        for label in self._sizes:
            self._device.release(label)
        self.state = Sleep.LEVEL_2

    def _follow(self, order: Order) -> None:
        after = LEGAL[self.state, order]  # a KeyError is our own bug
        label = KV_CACHE if order in (Order.WAKE_CACHE, Order.DROP_CACHE) else WEIGHTS
        if after.residency > self.state.residency:
            self._device.acquire(self._sizes[label], label)
            self._memory.carry_out(order)
        else:
            self._memory.carry_out(order)
            self._device.release(label)
        self.state = after


# ── platforms ────────────────────────────────────────────────────────────────────────────────────────────────────────


class LlmEngine(Protocol):
    """The part of vLLM's LLMEngine that is used here."""

    def collective_rpc(self, method: Callable[..., Any], /, *, args: tuple[Any, ...] = ...) -> list[Any]: ...

    def sleep(self, level: int = ...) -> None: ...

    def release_kv_cache_memory(self) -> None: ...

    def wake_up(self, tags: list[str] | None = ...) -> bool: ...


class CpuMemory:
    """An engine in host memory, where vLLM has no sleep.

    The storages below the KV cache and the weights are emptied in place, and the copies of linear layers that are
    packed for the processor are dropped: the next load packs new ones. Level 1 leaves the weights where they are, since
    they are on the host already.
    """

    def __init__(self, engine: LlmEngine) -> None:
        self._engine = engine
        self._asleep_1 = False

    def carry_out(self, order: Order) -> None:
        match order:
            case Order.DROP_CACHE:
                self._engine.collective_rpc(_resize_cache, args=(False,))
            case Order.WAKE_CACHE:
                self._engine.collective_rpc(_resize_cache, args=(True,))
            case Order.SLEEP_1:
                self._asleep_1 = True
            case Order.SLEEP_2:
                self._engine.collective_rpc(_drop_weights)
            case Order.WAKE_WEIGHTS if self._asleep_1:
                self._asleep_1 = False
            case Order.WAKE_WEIGHTS:
                self._engine.collective_rpc(_make_room_for_weights)

    def weight_bytes(self) -> int:
        return max(self._engine.collective_rpc(_cpu_weight_bytes))

    def cache_bytes(self) -> int:
        return max(self._engine.collective_rpc(_cpu_cache_bytes))

    def held_bytes(self) -> int:
        return self.cache_bytes() + (0 if self._asleep_1 else self.weight_bytes())

    def host_bytes(self) -> int:
        return self.weight_bytes() if self._asleep_1 else 0


class CudaMemory:
    """vLLM's own sleep, which unmaps the pages of its pools and keeps their addresses."""

    def __init__(self, engine: LlmEngine) -> None:
        self._engine = engine

    def carry_out(self, order: Order) -> None:
        match order:
            case Order.DROP_CACHE:
                self._engine.sleep(level=0)  # only stops scheduling, which vLLM asks for first
                self._engine.release_kv_cache_memory()
            case Order.WAKE_CACHE:
                self._engine.wake_up(tags=["kv_cache"])
            case Order.SLEEP_1:
                self._engine.sleep(level=1)
            case Order.SLEEP_2:
                self._engine.sleep(level=2)
            case Order.WAKE_WEIGHTS:
                self._engine.wake_up(tags=["weights"])

    def weight_bytes(self) -> int:
        return max(self._engine.collective_rpc(_cuda_mapped_bytes, args=("weights",)))

    def cache_bytes(self) -> int:
        return max(self._engine.collective_rpc(_cuda_mapped_bytes, args=("kv_cache",)))

    def held_bytes(self) -> int:
        return max(self._engine.collective_rpc(_cuda_held_bytes))

    def host_bytes(self) -> int:
        return sum(self._engine.collective_rpc(_cuda_host_bytes))


def _resize_cache(worker: Any, full: bool) -> None:
    for storage, size in _storages(_cache(worker)):
        storage.resize_(size if full else 0)
        if full:  # as vLLM makes it: what attention masks out is still multiplied by zero, and must not be nan
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _drop_weights(worker: Any) -> None:
    model = _model(worker)
    for layer in _packed(model):
        layer.cpu_linear = None
    for storage, _ in _storages(model.parameters()):
        storage.resize_(0)
    _trim()


def _trim() -> None:
    """Give freed memory back to the system, which glibc would keep for this process."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _make_room_for_weights(worker: Any) -> None:
    """Allocate the weights without content; the next load fills them and packs the linear layers again."""
    for storage, size in _storages(_model(worker).parameters()):
        storage.resize_(size)
    for layer in _packed(_model(worker)):
        layer.cpu_linear = nn.functional.linear


def _cpu_cache_bytes(worker: Any) -> int:
    return sum(storage.nbytes() for storage, _ in _storages(_cache(worker)))


def _cpu_weight_bytes(worker: Any) -> int:
    """Each weight once, packed ones at their size in a checkpoint; the packed copy of the head is not counted."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    model = _model(worker)
    held = sum(storage.nbytes() for storage, _ in _storages(model.parameters()))
    for layer in _packed(model):
        if layer.cpu_linear is not None and not layer.weight.numel():
            parameters, _ = get_layerwise_info(layer).restore_metadata
            held += parameters["weight"].nbytes
    return held


def _cuda_mapped_bytes(worker: Any, tag: str) -> int:
    return sum(a.handle[1] for a in _allocations() if a.tag == tag and not a.is_asleep)


def _cuda_held_bytes(worker: Any) -> int:
    """Subtract what sleeps: torch goes on counting the pages that vLLM unmapped below it."""
    return torch.cuda.memory_reserved() - sum(a.handle[1] for a in _allocations() if a.is_asleep)


def _cuda_host_bytes(worker: Any) -> int:
    return sum(a.cpu_backup_tensor.nbytes for a in _allocations() if a.cpu_backup_tensor is not None)


def _allocations() -> Iterable[Any]:
    from vllm.device_allocator import get_mem_allocator_instance

    allocator: Any = get_mem_allocator_instance()
    return allocator.pointer_to_data.values()


def _model(worker: Any) -> nn.Module:
    return worker.model_runner.get_model()


def _packed(model: nn.Module) -> list[Any]:
    """Layers whose product with their weight is a function of vLLM's, which may own a packed copy of the weight."""
    return [layer for layer in model.modules() if "cpu_linear" in vars(layer)]


def _cache(worker: Any) -> list[Tensor]:
    return worker.model_runner.kv_caches


def _storages(tensors: Iterable[Tensor]) -> Iterator[tuple[torch.UntypedStorage, int]]:
    """Each storage once, also an empty one, with the bytes that the tensors upon it span."""
    found: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = int(tensor.storage_offset()) + sum((size - 1) * step for size, step in steps)
        span = (last + 1) * tensor.itemsize if tensor.numel() else 0
        found[storage._cdata] = (storage, max(span, found.get(storage._cdata, (storage, 0))[1]))
    yield from found.values()
