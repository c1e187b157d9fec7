"""The sleep of a vLLM engine: which part of it is on the accelerators, and how each platform moves it.

::

    FULL ── drop cache ──▶ WEIGHTS ── sleep 1 ──▶ OFF   weights go to the host and come back
         ◀── wake cache ──         ── sleep 2 ──▶ OFF   weights are dropped: a sync must bring new ones
                                   ◀── wake weights ──

A move walks the chain one step at a time. On a GPU the steps are vLLM's own; on a CPU they are this module's.
Functions whose first argument is `worker` run in each of the engine's workers, through `collective_rpc`.
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
    adapter_buffers,
    pools,
    releases_its_cache,
    sleep_but_for_what_sleeps,
    unmap_cache,
)
from rlplace.workers.launch.devices import CudaDevice, Room

if TYPE_CHECKING:
    from rlplace.workers.launch.devices import Device

# Labels of the device's account
WEIGHTS = "engine weights"
KV_CACHE = "KV cache"

Level = Literal[1, 2]


class Held(NamedTuple):
    """Measured bytes that one worker of vLLM's engine has.

    `weights`, `cache`: weights and KV cache on the accelerator. `accelerator`: all bytes on the accelerator, including
    those that are not freed by any move. `host`: copies of weights on the host.
    """

    weights: int
    cache: int
    # All bytes of the worker on its accelerator, including what remains during a sleep and no step frees
    accelerator: int
    host: int  # copies of the weights


class EngineMemory(ABC):
    """Moves an engine of vLLM between residencies. The engine starts at FULL, with random weights.

    Each subclass carries out the steps of a move on one platform.
    """

    def __init__(self, engine: Any, device: Device, level: Level) -> None:
        self._engine = engine
        self._device = device
        self._level = level
        held = self.held()
        self._sizes = {WEIGHTS: held.weights, KV_CACHE: held.cache}
        self.residency = Residency.FULL

    def held(self) -> Held:
        """Return the bytes that the engine has.

        The fields for the accelerator are those of the worker with the largest value. `host` is the sum over all
        workers.
        """
        workers = self._measure()
        # The largest of each field
        largest = Held(*map(max, zip(*workers, strict=True)))
        return largest._replace(host=sum(worker.host for worker in workers))

    def move(self, to: Residency, level: Level | None = None) -> None:
        """Move the engine to the residency `to`, one step after the other.

        Each step records bytes in the device's account before it takes memory, and removes them after it has freed
        memory.

        `level`: what a move to OFF does with the weights: 1 copies them to the host, 2 drops them; None: the configured
        level. Raises AcceleratorOutOfMemory; the engine then stays at the last residency that it has reached, and can
        be moved again.
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
        """Remove all bytes of the engine from the device's account, after the engine has ended."""
        for label in self._sizes:
            self._device.release(label)
        self.residency = Residency.OFF

    @abstractmethod
    def drop_cache(self) -> None:
        """Free the memory of the KV cache: the step from FULL to WEIGHTS."""

    @abstractmethod
    def wake_cache(self) -> None:
        """Allocate an empty KV cache: the step from WEIGHTS to FULL."""

    @abstractmethod
    def sleep(self, level: Level) -> None:
        """Copy the weights to the host (level 1) or drop them (level 2), and free their memory: the step from WEIGHTS
        to OFF.
        """

    @abstractmethod
    def wake_weights(self) -> None:
        """Copy the weights back, or allocate memory for new weights if they were dropped: the step from OFF to
        WEIGHTS.
        """

    @abstractmethod
    def _measure(self) -> list[Held]:
        """Return the bytes that each worker of vLLM's engine has."""


class CpuMemory(EngineMemory):
    """Moves an engine that computes on a CPU, for which vLLM has no sleep.

    The memory of KV cache and weights is freed, and the tensor objects stay. Packed copies of linear layers are
    dropped; the next load packs new ones. At level 1 the weights stay where they are, because they are on the host
    already.
    """

    _asleep_1 = False

    def drop_cache(self) -> None:
        # The blocks that the prefix cache refers to will be gone
        self._engine.reset_prefix_cache()
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
    """Moves an engine on GPUs by vLLM's own sleep, which frees the pages of its memory pools and keeps their
    addresses.
    """

    def __init__(self, engine: Any, device: Device, level: Level) -> None:
        super().__init__(engine, device, level)
        # Only the engine's workers can measure its memory
        if isinstance(device, CudaDevice):
            device.measure = self._room

    def _room(self) -> Room:
        """Return the memory of the fullest GPU: free bytes, capacity, and bytes of the engine, as its workers measure
        them.

        Only the workers know which pages are freed, and they may be other processes.
        """
        rooms: list[Room] = self._engine.collective_rpc(_room_on_gpu)
        return min(rooms, key=lambda room: room.free + room.own)

    def close(self) -> None:
        if isinstance(self._device, CudaDevice):
            self._device.measure = self._device.measure_here
        super().close()

    def drop_cache(self) -> None:
        # vLLM does not count as paused until a step has told the workers which answers have finished
        self._engine.step()
        # Level 0 only stops scheduling, which vLLM requires before it gives back the cache
        self._engine.sleep(level=0)
        self._engine.release_kv_cache_memory()

    def wake_cache(self) -> None:
        self._wake("kv_cache", wholly=True)

    def sleep(self, level: Level) -> None:
        self._engine.sleep(level=level)

    def wake_weights(self) -> None:
        self._wake("weights", wholly=False)

    def _wake(self, tag: str, *, wholly: bool) -> None:
        """Wake the part of the engine that `tag` names: "weights" or "kv_cache". With the KV cache, the scheduler wakes
        too.

        `wholly`: whether the whole engine is then awake. Raises AssertionError if vLLM reports something else, because
        vLLM only writes a log line if it fails to wake a part.
        """
        if self._engine.wake_up(tags=[tag]) is not wholly:
            how = "still asleep in part" if wholly else "wholly awake"
            raise AssertionError(
                f"vLLM is {how} after waking {tag}, at residency {self.residency.word}"
            )

    def _measure(self) -> list[Held]:
        return self._engine.collective_rpc(_held_on_gpu)


class OlderCudaMemory(CudaMemory):
    """CudaMemory for an older vLLM, which can free the KV cache only together with the weights.

    Here, each worker frees the KV cache itself. The scheduler is not stopped, because the engine is not stepped below
    FULL.
    """

    def drop_cache(self) -> None:
        # The blocks that the prefix cache refers to will be gone
        self._engine.reset_prefix_cache()
        self._engine.collective_rpc(unmap_cache)

    def wake_cache(self) -> None:
        self._engine.collective_rpc("wake_up", kwargs={"tags": ["kv_cache"]})

    def sleep(self, level: Level) -> None:
        self._engine.collective_rpc(sleep_but_for_what_sleeps, args=(level,))

    def wake_weights(self) -> None:
        self._engine.collective_rpc("wake_up", kwargs={"tags": ["weights"]})


def cuda_memory(engine: Any) -> type[CudaMemory]:
    """Return the class, CudaMemory or OlderCudaMemory, that fits the installed version of vLLM.

    `engine`: vLLM's engine.
    """
    if releases_its_cache(engine):
        return CudaMemory
    return OlderCudaMemory


# ── in the engine's workers ──────────────────────────────────────────────────────────────────────────────────────────


def _resize_cache(worker: Any, full: bool) -> None:
    """Allocate the KV cache, filled with zeros, if `full` is true; else free its memory. The tensor objects stay.

    `worker`: worker of vLLM's engine.
    """
    for storage, size in _storages(worker.model_runner.kv_caches):
        storage.resize_(size if full else 0)
        if full:
            # Zeros, as vLLM makes it: masked entries are multiplied by zero, which NaN would survive
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _drop_weights(worker: Any) -> None:
    """Free the memory of the weights, without replacing the tensor objects, and drop packed copies of weights.

    `worker`: worker of vLLM's engine.
    """
    model = worker.model_runner.get_model()
    for layer in _packed(model):
        layer.cpu_linear = None
    for storage, _ in _storages(_weights(model)):
        storage.resize_(0)
    libc = ctypes.CDLL(None)
    # Without this, glibc keeps the freed memory for the process
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _make_room_for_weights(worker: Any) -> None:
    """Allocate memory for the weights, without content. The next load fills it, and packs the linear layers again.

    `worker`: worker of vLLM's engine.
    """
    model = worker.model_runner.get_model()
    for storage, size in _storages(_weights(model)):
        storage.resize_(size)
    for layer in _packed(model):
        layer.cpu_linear = nn.functional.linear


def _held_on_cpu(worker: Any, weights_asleep: bool) -> Held:
    """Return the bytes of weights and KV cache that one worker of vLLM has on a CPU.

    `weights_asleep`: whether the weights count as host memory instead of accelerator memory. Each weight counts once. A
    packed weight counts with its size in a checkpoint; the packed copy of the output head does not count.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    model = worker.model_runner.get_model()
    cache = sum(
        storage.nbytes() for storage, _ in _storages(worker.model_runner.kv_caches)
    )
    weights = sum(storage.nbytes() for storage, _ in _storages(_weights(model)))
    # A packed layer has given its plain weight away
    for layer in _packed(model):
        if layer.cpu_linear is not None and not layer.weight.numel():
            parameters, _ = get_layerwise_info(layer).restore_metadata
            weights += parameters["weight"].nbytes
    on_accelerator = weights
    on_host = 0
    if weights_asleep:
        on_accelerator = 0
        on_host = weights
    return Held(
        weights=weights, cache=cache, accelerator=cache + on_accelerator, host=on_host
    )


def _room_on_gpu(worker: Any) -> Room:
    """Return the memory of this worker's GPU: free bytes, capacity, and bytes of this worker."""
    free, capacity = torch.cuda.mem_get_info()
    return Room(free, capacity, _held_on_gpu(worker).accelerator)


def _held_on_gpu(worker: Any) -> Held:
    """Return the bytes that one worker of vLLM has on its GPU.

    Torch counts the pages of vLLM's memory pools even after vLLM has freed them. This function counts only pages in
    use.
    """
    from vllm.device_allocator import get_mem_allocator_instance

    allocator: Any = get_mem_allocator_instance()
    allocations = list(allocator.pointer_to_data.values())
    # Mapped bytes by tag
    mapped = collections.Counter[str]()
    copied = 0
    for each in allocations:
        if not each.is_asleep:
            mapped[each.tag] += each.handle[1]
        if each.cpu_backup_tensor is not None:
            copied += each.cpu_backup_tensor.nbytes
    # What torch counts for the pools is replaced by their mapped bytes
    of_pools = 0
    for pool in pools(allocator):
        of_pools += sum(segment["total_size"] for segment in pool.snapshot())
    outside = torch.cuda.memory_reserved() - of_pools
    return Held(
        weights=mapped["weights"],
        cache=mapped["kv_cache"],
        accelerator=outside + mapped.total(),
        host=copied,
    )


def _weights(model: nn.Module) -> Iterator[Tensor]:
    """Yield all weights of the model, and the buffers of its LoRA adapter."""
    yield from model.parameters()
    yield from adapter_buffers(model)


def _packed(model: nn.Module) -> list[Any]:
    """Return the linear layers that vLLM computes by a function of its own on a CPU. They may have a packed copy of the
    weight.
    """
    return [layer for layer in model.modules() if "cpu_linear" in vars(layer)]


def _storages(tensors: Iterable[Tensor]) -> Iterator[tuple[torch.UntypedStorage, int]]:
    """Yield the storage of each tensor, with the largest number of bytes that the tensors need of it; each storage
    once.

    Empty storages are included, because their tensors still have shapes.
    """
    found: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # Offset of the last element, in elements
        last = int(tensor.storage_offset())
        for size, step in zip(tensor.shape, tensor.stride(), strict=True):
            last += (size - 1) * step
        span = (last + 1) * tensor.itemsize if tensor.numel() else 0
        _, before = found.get(storage._cdata, (storage, 0))
        found[storage._cdata] = (storage, max(span, before))
    yield from found.values()
