"""A TextEngine over vLLM, stepped in this process: its caller decides when answers begin and when weights change.

::

    submit ──▶ waiting ──▶ ┌ step: one forward pass of all that runs ┐ ──▶ Completion, at once
                           └── load: KV recomputed by new weights ◀──┘

Its sleep: which part of it is on the accelerators, and how each platform moves it::

    FULL ── drop cache ──▶ WEIGHTS ── sleep 1 ──▶ OFF   weights go to the host and come back
         ◀── wake cache ──         ── sleep 2 ──▶ OFF   weights are dropped: a sync must bring new ones
                                   ◀── wake weights ──

A move walks the chain one step at a time. On a GPU the steps are vLLM's own, on a CPU ours. Functions whose first
argument is `worker` run in each of the engine's workers, through `collective_rpc`.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import os
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rlplace.errors import ConfigError
from rlplace.models import BUILDING
from rlplace.models.checkpoint import as_stored
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import Stopwatch
from rlplace.tokens import Completion, Request
from rlplace.workers.engines.contract import (
    NO_FACTORS,
    TORCH_NAMES,
    EngineSettings,
    FactorsOf,
    Weights,
    answer_seed,
    check_length,
    engine_busy,
    require,
    vllm_problem,
)
from rlplace.workers.engines.vllm_loading import NothingLoaded, load_from, load_shards, pack_experts_anew
from rlplace.workers.engines.vllm_versions import (
    pools,
    releases_its_cache,
    reload,
    seeded_draws,
    sleep_but_for_what_sleeps,
    tokens_so_far,
    unmap_cache,
)
from rlplace.workers.engines.weights import EMBEDDING, HEAD, ExpectedWeights, check_fit, merged
from rlplace.workers.engines.weights import NAME as PROBE
from rlplace.workers.launch.devices import CudaDevice, Room
from rlplace.workers.launch.sockets import vllm_variables

if TYPE_CHECKING:
    from rlplace.comm.weights.device_push import DevicePush
    from rlplace.comm.weights.device_sync import LoadedParts
    from rlplace.workers.launch.devices import Device

WEIGHTS, KV_CACHE = "engine weights", "KV cache"  # labels of the device's account

Level = Literal[1, 2]
# Read by vLLM when it is imported or builds an engine. One process: this engine steps it; it may not look for others.
_FORCED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
_UNLESS_SET = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about settings that are meant here
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a rank does not own the cores vLLM would bind it to
    # FlashInfer draws no answer whose log-probabilities are asked for, and a vLLM that looks for it wants it installed.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # workers of a tensor parallel engine: torch has threads by now
}
_CPU_BLOCK = 32  # tokens; vLLM's 128 there would share no prompt shorter than that among the samples of a group
_UNUSED_SHARE = 0.01  # of a GPU, which vLLM wants to be free at the start even where the cache has bytes of its own


class _Asked(NamedTuple):
    """An answer in flight. vLLM is stepped here, so that what it loads and draws is known: `versions`."""

    request: Request
    sample: int
    versions: list[tuple[int, int | None]]  # of the weights its tokens are drawn by: from which token on, version


class VllmEngine:
    """Owns vLLM's engine, its process group and what is in flight; one per process.

    With answers in flight, `load` keeps their tokens and recomputes their KV cache by the new weights.
    """

    def __init__(self, settings: EngineSettings, *, device: Device, owner: str) -> None:
        on_cpu = device.torch_name == "cpu"
        if problem := vllm_problem("emulated" if on_cpu else "gpu"):
            raise ConfigError([problem])
        self._settings = settings
        # Several workers of an engine are other processes: what is loaded travels there from the host.
        self._adds_on = torch.device("cpu" if settings.tensor_parallel > 1 else device.torch_name)
        self._owner = owner
        self._expected = ExpectedWeights.of_folder(settings.model)
        with BUILDING:
            self._vllm: Any = _build(settings, self._expected, torch.device(device.torch_name))
        kind = CpuMemory if on_cpu else cuda_memory(self._vllm)
        self._memory = kind(self._vllm, device, settings.rollout.sleep_level)
        self._memory.move(Residency.OFF, level=2)  # at any configured level: random weights need no copy
        self.version: int | None = None
        self._asked: dict[str, _Asked] = {}  # answers in flight, by vLLM's name
        self._names = map(str, itertools.count())  # of vLLM's requests
        self._ready: list[Completion] = []  # finished, to be returned by the next step
        self._unread = 0  # tokens of prompts that no step has begun with
        self.cached_tokens = 0

    @property
    def residency(self) -> Residency:
        return self._memory.residency

    @property
    def in_flight(self) -> int:
        return len(self._asked) + len(self._ready)

    @property
    def room(self) -> int:
        return max(0, self._settings.rollout.step_sequences - len(self._asked))

    @property
    def host_bytes(self) -> int:
        """Weights copied to the host by a sleep at level 1, measured."""
        return self._memory.held().host

    def move(self, to: Residency) -> int:
        if to < self.residency and self.in_flight:
            raise engine_busy(self._owner, self.in_flight, to)
        self._memory.move(to)
        if to == Residency.OFF and self._settings.rollout.sleep_level == 2:
            self.version = None
        return self._memory.held().accelerator

    def load(self, weights: Weights, version: int, factors: FactorsOf = NO_FACTORS) -> None:
        require(self, self._owner, "pull_weights", needs=Residency.WEIGHTS, loaded=False)
        named, stored = self._expected.complete(weights), self._expected.shapes
        check_fit(dict(as_stored(named.items(), stored)), stored, owner=self._owner, version=version)
        self.version = None  # until all are copied, this is no version
        items = as_stored(merged(named, factors, self._adds_on), stored)
        if self._settings.tensor_parallel > 1:
            load_shards(self._vllm, items)
        else:
            self._vllm.collective_rpc(pack_experts_anew)
            self._vllm.collective_rpc(reload, args=(items,))
        self._loaded(version)

    def load_from(self, sync: DevicePush, rank: int, deadline_s: float) -> LoadedParts:
        """Have each worker take part in a sync, for rollout rank `rank`, and load what is its own while it comes.

        What comes along and is no weight is returned. Raises as `load`; WeightSyncError, ChannelTimeout.
        """
        require(self, self._owner, "pull_weights", needs=Residency.WEIGHTS, loaded=False)
        specs = {name: spec for spec in sync.assembly.layout.tensors for name in spec.names}
        shapes = {name: torch.empty(spec.shape, device="meta") for name, spec in specs.items()}
        others = {name: shapes.pop(name) for name in (PROBE,) if name in shapes}
        version, named, stored = sync.push.version, self._expected.complete(shapes), self._expected.shapes
        check_fit(dict(as_stored(named.items(), stored)), stored, owner=self._owner, version=version)
        again = {EMBEDDING: HEAD} if HEAD in named and HEAD not in shapes else {}
        before, self.version = self.version, None  # until all are copied, this is no version
        try:
            loaded = load_from(self._vllm, sync, rank, deadline_s, again, [*others], frozenset(stored))
        except NothingLoaded as error:
            self.version = before
            raise error.why from None
        self._loaded(version)
        return loaded

    def _loaded(self, version: int) -> None:
        self._vllm.reset_prefix_cache(reset_running_requests=True)  # what was computed by the old weights is wrong now
        for name, tokens in tokens_so_far(self._vllm).items():
            if name in self._asked:
                self._asked[name].versions.append((tokens, version))
        self.version = version

    def submit(self, request: Request) -> None:
        require(self, self._owner, "generate", needs=Residency.FULL)
        check_length(self._owner, len(request.tokens), self._settings.context)
        drawn, tokens = self._settings.drawn(request), request.tokens.tolist()
        for sample in range(request.first_sample, request.first_sample + request.samples):
            name = self._add(
                tokens,
                temperature=0.0 if request.greedy else drawn.temperature,
                top_p=drawn.top_p,
                top_k=drawn.top_k,
                seed=None if drawn.seed is None else answer_seed(drawn.seed, request, sample),
                stop_token_ids=list(self._settings.stop_token_ids),
                stop=list(self._settings.stop_texts),
                detokenize=bool(self._settings.stop_texts),
                max_tokens=request.max_new_tokens,
                min_tokens=min(drawn.min_tokens, request.max_new_tokens),
                repetition_penalty=drawn.repetition_penalty,
                presence_penalty=drawn.presence_penalty,
                frequency_penalty=drawn.frequency_penalty,
                logprobs=0,
                skip_clone=True,
            )
            self._asked[name] = _Asked(request, sample, [(0, self.version)])
        self._unread += len(tokens)  # once: its other answers find them in the cache

    def _add(self, tokens: list[int], **parameters: object) -> str:
        """Hand vLLM a request for tokens alone; return its name. What stops it is ours, not the model's."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        name, kind = next(self._names), RequestOutputKind.FINAL_ONLY
        asked: Any = {"detokenize": False, **parameters, "flat_logprobs": True, "ignore_eos": True, "output_kind": kind}
        self._vllm.add_request(name, tokens_input(tokens), SamplingParams(**asked))
        return name

    def step(self, watch: Stopwatch | None = None) -> Sequence[Completion]:
        if self._asked:
            require(self, self._owner, "generate", needs=Residency.FULL)
            read, running = min(self._unread, self._settings.rollout.step_tokens), len(self._asked)
            self._unread -= read
            self._advance()
            if watch is not None:
                watch.lap("prefill" if read else "decode", read or running)
        finished, self._ready = self._ready, []
        return finished

    def _advance(self) -> list[Any]:
        """Run one step; keep the answers that finished in it, return other finished outputs."""
        others = []
        for output in self._vllm.step():
            asked = self._asked.pop(output.request_id, None)
            if asked is None:
                others.append(output)
                continue
            self.cached_tokens += output.num_cached_tokens or 0
            self._ready.append(self._completion(asked, output.outputs[0]))
        return others

    def _completion(self, asked: _Asked, answer: Any) -> Completion:
        if answer.finish_reason not in ("stop", "length"):
            raise AssertionError(f"{self._owner}: vLLM ended an answer by {answer.finish_reason!r}")
        versions = np.empty(len(answer.token_ids), np.int32)
        for first, version in asked.versions:
            assert version is not None, "weights are loaded before anything is asked of them"
            versions[first:] = version
        request = asked.request
        return Completion(
            env_rank=request.env_rank,
            iteration=request.iteration,
            held_out=request.held_out,
            group=request.group,
            sample=asked.sample,
            turn=request.turn,
            tokens=np.asarray(answer.token_ids, np.int32),
            logprobs=np.asarray(answer.logprobs.logprobs, np.float32),
            versions=versions,
            finish=answer.finish_reason,
        )

    def logprobs(self, tokens: Sequence[int]) -> Sequence[float]:
        """Answers in flight advance meanwhile; finished ones are returned by the next step."""
        require(self, self._owner, "logprobs", needs=Residency.FULL)
        check_length(self._owner, len(tokens), self._settings.context)
        self._add([int(token) for token in tokens], max_tokens=1, prompt_logprobs=0)
        while self._vllm.has_unfinished_requests():
            for output in self._advance():
                return list(output.prompt_logprobs.logprobs)
        raise AssertionError(f"{self._owner}: vLLM forgot a request")

    def drop(self) -> None:
        self._vllm.abort_request(list(self._asked))
        self._asked.clear()
        self._ready, self._unread = [], 0

    def close(self) -> None:
        """Shut vLLM's workers down and, with them, torch's process group of this process."""
        self._asked.clear()
        if self._vllm is not None:
            self._vllm.engine_core.shutdown()
            self._vllm = None
            self._memory.close()


def _build(settings: EngineSettings, expected: ExpectedWeights, device: torch.device) -> Any:
    """Build vLLM's engine, awake, with random weights, on `device` and the GPUs that follow it."""
    on_cpu = device.type == "cpu"
    os.environ.update(_FORCED)
    rollout = settings.rollout
    # Attention on a GPU would round its fp32 numbers to 10 bits.
    exact = {"TRITON_F32_DEFAULT": "ieee"} if rollout.dtype == "fp32" and not on_cpu else {}
    for name, value in {**_UNLESS_SET, **vllm_variables(), **exact}.items():
        os.environ.setdefault(name, value)
    others: dict[str, Any] = {**_memory_arguments(settings, expected, on_cpu), **rollout.engine_args}
    with _quiet():
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if on_cpu:
            others = {**seeded_draws(), **others}
        return LLMEngine.from_engine_args(
            EngineArgs(
                model=str(settings.model),
                skip_tokenizer_init=not settings.stop_texts,  # token ids in, token ids out
                generation_config="vllm",  # what the folder recommends for sampling is not asked for
                load_format="dummy",
                dtype=TORCH_NAMES[rollout.dtype],
                kv_cache_dtype="fp8" if rollout.cache == "fp8" else "auto",
                max_model_len=settings.context,
                max_num_batched_tokens=max(rollout.step_tokens, rollout.step_sequences),
                max_num_seqs=rollout.step_sequences,
                tensor_parallel_size=settings.tensor_parallel,
                device_ids=[device.index + part for part in range(settings.tensor_parallel)] if device.index else None,
                distributed_executor_backend="mp" if settings.tensor_parallel > 1 else "uni",
                enforce_eager=rollout.enforce_eager,
                enable_prefix_caching=True,
                block_size=_CPU_BLOCK if on_cpu else None,
                enable_sleep_mode=not on_cpu,
                async_scheduling=False,  # else a step returns tokens of the one before, by the weights before
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                seed=random.SystemRandom().getrandbits(31),  # of draws without a seed: ranks may not all draw alike
                **others,
            )
        )


def _memory_arguments(settings: EngineSettings, expected: ExpectedWeights, on_cpu: bool) -> dict[str, Any]:
    """Limit the KV cache; on a CPU, where vLLM would take a share of the machine's memory, always in bytes."""
    rollout = settings.rollout
    if rollout.kv_cache_memory is None and not on_cpu:
        return {"gpu_memory_utilization": settings.share}
    weights = expected.elements * getattr(torch, TORCH_NAMES[rollout.dtype]).itemsize // settings.tensor_parallel
    cache = {"kv_cache_memory_bytes": settings.cache_bytes(settings.emulated_memory, weights)}
    return cache if on_cpu else {**cache, "gpu_memory_utilization": _UNUSED_SHARE}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings about vLLM's own code; keep torch.set_num_threads, which vLLM replaces by a no-op."""
    settable = torch.set_num_threads
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = settable


# ── sleep ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Held(NamedTuple):
    """Bytes that one of the engine's workers holds, measured."""

    weights: int
    cache: int
    accelerator: int  # everything there, including what no step frees: the residue of a sleep
    host: int  # copies of the weights


class EngineMemory(ABC):
    """Owns the residency of one engine that was just built: FULL, with random weights.

    A subclass carries the steps out on one platform.
    """

    def __init__(self, engine: Any, device: Device, level: Level) -> None:
        self._engine, self._device, self._level = engine, device, level
        held = self.held()
        self._sizes = {WEIGHTS: held.weights, KV_CACHE: held.cache}
        self.residency = Residency.FULL

    def held(self) -> Held:
        """Return the most that is on any of the engine's accelerators, and all of its copies on the host."""
        workers = self._measure()
        return Held(*map(max, zip(*workers, strict=True)))._replace(host=sum(worker.host for worker in workers))

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
            raise AssertionError(f"vLLM is {how} after waking {tag}, at residency {self.residency.word}")

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
    return CudaMemory if releases_its_cache(engine) else OlderCudaMemory


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
    if hasattr(libc, "malloc_trim"):  # glibc would keep the freed memory for this process
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
    cache = sum(storage.nbytes() for storage, _ in _storages(worker.model_runner.kv_caches))
    weights = sum(storage.nbytes() for storage, _ in _storages(model.parameters()))
    for layer in _packed(model):
        if layer.cpu_linear is not None and not layer.weight.numel():
            parameters, _ = get_layerwise_info(layer).restore_metadata
            weights += parameters["weight"].nbytes
    on_accelerator, on_host = (0, weights) if weights_asleep else (weights, 0)
    return Held(weights=weights, cache=cache, accelerator=cache + on_accelerator, host=on_host)


def _room_on_gpu(worker: Any) -> Room:
    free, capacity = torch.cuda.mem_get_info()
    return Room(free, capacity, _held_on_gpu(worker).accelerator)


def _held_on_gpu(worker: Any) -> Held:
    from vllm.device_allocator import get_mem_allocator_instance

    allocator: Any = get_mem_allocator_instance()
    allocations, mapped = list(allocator.pointer_to_data.values()), collections.Counter[str]()
    for each in allocations:
        mapped[each.tag] += 0 if each.is_asleep else each.handle[1]
    # Torch counts all of vLLM's pools: also pages that vLLM unmapped below it, to sleep or for good.
    of_pools = sum(segment["total_size"] for pool in pools(allocator) for segment in pool.snapshot())
    return Held(
        weights=mapped["weights"],
        cache=mapped["kv_cache"],
        accelerator=torch.cuda.memory_reserved() - of_pools + mapped.total(),
        host=sum(each.cpu_backup_tensor.nbytes for each in allocations if each.cpu_backup_tensor is not None),
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
        last = int(tensor.storage_offset()) + sum((size - 1) * step for size, step in steps)
        span = (last + 1) * tensor.itemsize if tensor.numel() else 0
        found[storage._cdata] = (storage, max(span, found.get(storage._cdata, (storage, 0))[1]))
    yield from found.values()
