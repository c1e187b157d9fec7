"""The sleep of a vLLM engine: which part of it is on the accelerators, and how each platform moves it.

::

    FULL ── drop cache ──▶ WEIGHTS ── sleep 1 ──▶ OFF   weights go to the host and come back
         ◀── wake cache ──         ── sleep 2 ──▶ OFF   weights are dropped: a sync must bring new ones
                                   ◀── wake weights ──

A move walks the chain one step at a time. On a GPU the steps are vLLM's own, on a CPU ours. Functions whose first
argument is `worker` run in each of the engine's workers, through `collective_rpc`.
"""

from __future__ import annotations

import collections
import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rlplace.placement.schedule import Residency
from rlplace.workers.engines.vllm_versions import (
    pools,
    releases_its_cache,
    sleep_but_for_what_sleeps,
    unmap_cache,
)
from rlplace.workers.launch.devices import CudaDevice, Room

if TYPE_CHECKING:
    from rlplace.workers.launch.devices import Device

WEIGHTS = "engine weights"
KV_CACHE = "KV cache"  # labels of the device's account

Level = Literal[1, 2]


class Held(NamedTuple):
    """Bytes that one of the engine's workers holds, measured."""

    weights: int
    cache: int
    # Everything there, including what no step frees: the residue of a sleep
    accelerator: int
    host: int  # copies of the weights


class EngineMemory(ABC):
    """Owns the residency of one engine that was just built: FULL, with random weights.

    A subclass carries the steps out on one platform.
    """

    def __init__(self, engine: Any, device: Device, level: Level) -> None:
        self._engine = engine
        self._device = device
        self._level = level
        held = self.held()
        self._sizes = {WEIGHTS: held.weights, KV_CACHE: held.cache}
        self.residency = Residency.FULL

    def held(self) -> Held:
        """Return the most that is on any of the engine's accelerators, and all of its copies on the host."""
        workers = self._measure()
        return Held(*map(max, zip(*workers, strict=True)))._replace(
            host=sum(worker.host for worker in workers)
        )

    def move(self, to: Residency, level: Level | None = None) -> None:
        """Acquire from the device's account before a step takes memory, release after a step freed it.

        `level`: of a sleep, if not the configured one. Raises AcceleratorOutOfMemory; the residency is then the last
        one that was reached, and can be moved again.
        """
        if to < self.residency == Residency.FULL:
            self.drop_cache()
            self._device.release(KV_CACHE)
            self.residency = Residency.WEIGHTS
        if to < self.residency:
            self.sleep(level or self._level)
            self._device.release(WEIGHTS)
            self.residency = Residency.OFF
        if to > self.residency == Residency.OFF:
            self._device.acquire(self._sizes[WEIGHTS], WEIGHTS)
            self.wake_weights()
            self.residency = Residency.WEIGHTS
        if to > self.residency:
            self._device.acquire(self._sizes[KV_CACHE], KV_CACHE)
            self.wake_cache()
            self.residency = Residency.FULL

    def close(self) -> None:
        """Give everything back to the account, after the engine is gone."""
        for label in self._sizes:
            self._device.release(label)
        self.residency = Residency.OFF

    @abstractmethod
    def drop_cache(self) -> None: ...
    @abstractmethod
    def wake_cache(self) -> None: ...
    @abstractmethod
    def sleep(self, level: Level) -> None: ...
    @abstractmethod
    def wake_weights(self) -> None: ...
    @abstractmethod
    def _measure(self) -> list[Held]: ...


class CpuMemory(EngineMemory):
    """An engine in host memory, where vLLM has no sleep.

    The storages below the KV cache and the weights are emptied in place, and the copies of linear layers that are
    packed for the processor are dropped: the next load packs new ones. Level 1 leaves the weights where they are, since
    they are on the host already.
    """

    _asleep_1 = False

    def drop_cache(self) -> None:
        self._engine.reset_prefix_cache()  # which would find blocks that are gone
        self._engine.collective_rpc(_resize_cache, args=(False,))

    def wake_cache(self) -> None:
        self._engine.collective_rpc(_resize_cache, args=(True,))

    def sleep(self, level: Level) -> None:
        if level == 1:
            self._asleep_1 = True
        else:
            self._engine.collective_rpc(_drop_weights)

    def wake_weights(self) -> None:
        if not self._asleep_1:
            self._engine.collective_rpc(_make_room_for_weights)
        self._asleep_1 = False

    def _measure(self) -> list[Held]:
        return self._engine.collective_rpc(_held_on_cpu, args=(self._asleep_1,))


class CudaMemory(EngineMemory):
    """vLLM's own sleep, which unmaps the pages of its pools and keeps their addresses."""

    def __init__(self, engine: Any, device: Device, level: Level) -> None:
        super().__init__(engine, device, level)
        if isinstance(device, CudaDevice):
            device.measure = self._room

    def _room(self) -> Room:
        """Measure in the engine's workers, which may be other processes and know what is unmapped; the fullest GPU."""
        rooms: list[Room] = self._engine.collective_rpc(_room_on_gpu)
        return min(rooms, key=lambda room: room.free + room.own)

    def close(self) -> None:
        if isinstance(self._device, CudaDevice):
            self._device.measure = self._device.measure_here
        super().close()

    def drop_cache(self) -> None:
        self._engine.step()  # tells the workers which answers have finished: until then vLLM does not count as paused
        self._engine.sleep(level=0)  # only stops scheduling, which vLLM asks for first
        self._engine.release_kv_cache_memory()

    def wake_cache(self) -> None:
        self._wake("kv_cache", wholly=True)

    def sleep(self, level: Level) -> None:
        self._engine.sleep(level=level)

    def wake_weights(self) -> None:
        self._wake("weights", wholly=False)

    def _wake(self, tag: str, *, wholly: bool) -> None:
        """Wake one part, with the cache the scheduler too. vLLM only logs what it does not do, so its answer counts."""
        if self._engine.wake_up(tags=[tag]) is not wholly:
            how = "wholly awake" if not wholly else "still asleep in part"
            raise AssertionError(
                f"vLLM is {how} after waking {tag}, at residency {self.residency.word}"
            )

    def _measure(self) -> list[Held]:
        return self._engine.collective_rpc(_held_on_gpu)


class OlderCudaMemory(CudaMemory):
    """The same of a vLLM that gives its cache back only together with the weights: each worker is asked itself.

    Its scheduler is not stopped, since nothing steps it below FULL.
    """

    def drop_cache(self) -> None:
        self._engine.reset_prefix_cache()  # which would find blocks that are gone
        self._engine.collective_rpc(unmap_cache)

    def wake_cache(self) -> None:
        self._engine.collective_rpc("wake_up", kwargs={"tags": ["kv_cache"]})

    def sleep(self, level: Level) -> None:
        self._engine.collective_rpc(sleep_but_for_what_sleeps, args=(level,))

    def wake_weights(self) -> None:
        self._engine.collective_rpc("wake_up", kwargs={"tags": ["weights"]})


def cuda_memory(engine: Any) -> type[CudaMemory]:
    if releases_its_cache(engine):
        return CudaMemory
    return OlderCudaMemory


# ── in the engine's workers ──────────────────────────────────────────────────────────────────────────────────────────


def _resize_cache(worker: Any, full: bool) -> None:
    for storage, size in _storages(worker.model_runner.kv_caches):
        storage.resize_(size if full else 0)
        if full:  # as vLLM makes it: what attention masks out is still multiplied by zero, and must not be nan
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _drop_weights(worker: Any) -> None:
    model = worker.model_runner.get_model()
    for layer in _packed(model):
        layer.cpu_linear = None
    for storage, _ in _storages(model.parameters()):
        storage.resize_(0)
    libc = ctypes.CDLL(None)
    # Glibc would keep the freed memory for this process
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _make_room_for_weights(worker: Any) -> None:
    """Allocate the weights without content; the next load fills them and packs the linear layers again."""
    model = worker.model_runner.get_model()
    for storage, size in _storages(model.parameters()):
        storage.resize_(size)
    for layer in _packed(model):
        layer.cpu_linear = nn.functional.linear


def _held_on_cpu(worker: Any, weights_asleep: bool) -> Held:
    """Count each weight once, packed ones at their size in a checkpoint; the packed copy of the head is not counted."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    model = worker.model_runner.get_model()
    cache = sum(
        storage.nbytes() for storage, _ in _storages(worker.model_runner.kv_caches)
    )
    weights = sum(storage.nbytes() for storage, _ in _storages(model.parameters()))
    for layer in _packed(model):
        if layer.cpu_linear is not None and not layer.weight.numel():
            parameters, _ = get_layerwise_info(layer).restore_metadata
            weights += parameters["weight"].nbytes
    on_accelerator, on_host = (0, weights) if weights_asleep else (weights, 0)
    return Held(
        weights=weights, cache=cache, accelerator=cache + on_accelerator, host=on_host
    )


def _room_on_gpu(worker: Any) -> Room:
    free, capacity = torch.cuda.mem_get_info()
    return Room(free, capacity, _held_on_gpu(worker).accelerator)


def _held_on_gpu(worker: Any) -> Held:
    from vllm.device_allocator import get_mem_allocator_instance

    allocator: Any = get_mem_allocator_instance()
    allocations = list(allocator.pointer_to_data.values())
    mapped = collections.Counter[str]()
    for each in allocations:
        mapped[each.tag] += 0 if each.is_asleep else each.handle[1]
    # Torch counts all of vLLM's pools: also pages that vLLM unmapped below it, to sleep or for good.
    of_pools = sum(
        segment["total_size"]
        for pool in pools(allocator)
        for segment in pool.snapshot()
    )
    return Held(
        weights=mapped["weights"],
        cache=mapped["kv_cache"],
        accelerator=torch.cuda.memory_reserved() - of_pools + mapped.total(),
        host=sum(
            each.cpu_backup_tensor.nbytes
            for each in allocations
            if each.cpu_backup_tensor is not None
        ),
    )


def _packed(model: nn.Module) -> list[Any]:
    """Layers whose product with their weight is a function of vLLM's, which may own a packed copy of the weight."""
    return [layer for layer in model.modules() if "cpu_linear" in vars(layer)]


def _storages(tensors: Iterable[Tensor]) -> Iterator[tuple[torch.UntypedStorage, int]]:
    """Each storage once, also an empty one, with the bytes that the tensors upon it span."""
    found: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = int(tensor.storage_offset()) + sum(
            (size - 1) * step for size, step in steps
        )
        span = (last + 1) * tensor.itemsize if tensor.numel() else 0
        found[storage._cdata] = (
            storage,
            max(span, found.get(storage._cdata, (storage, 0))[1]),
        )
    yield from found.values()
