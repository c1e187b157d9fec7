"""A TextEngine over vLLM, stepped in this process: the caller decides when answers begin and when weights change.

::

    submit ──▶ waiting ──▶ ┌ step: one forward pass of all that runs ┐ ──▶ Completion, at once
                           └── load: KV recomputed by new weights ◀──┘

The module `vllm_memory` manages its memory on the accelerators.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rlplace.errors import ConfigError
from rlplace.models import BUILDING
from rlplace.models.adapter_folder import factor_name
from rlplace.models.checkpoint import as_stored
from rlplace.models.lora import stored_factors
from rlplace.placement.memory.demands import vllm_lora_rank
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import Stopwatch
from rlplace.tokens import Completion, Request
from rlplace.workers.engines.contract import (
    NO_FACTORS,
    TORCH_NAMES,
    AdapterSettings,
    EngineSettings,
    FactorsOf,
    Weights,
    answer_seed,
    check_length,
    engine_busy,
    require,
    vllm_problem,
)
from rlplace.workers.engines.vllm_loading import (
    NothingLoaded,
    leave_syncs,
    load_from,
    load_shards,
    pack_experts_anew,
)
from rlplace.workers.engines.vllm_memory import CpuMemory, cuda_memory
from rlplace.workers.engines.vllm_versions import (
    adapter_request,
    load_nothing,
    put_adapter,
    reload,
    seeded_draws,
    tokens_so_far,
)
from rlplace.workers.engines.weights import (
    EMBEDDING,
    HEAD,
    ExpectedWeights,
    check_fit,
    merged,
)
from rlplace.workers.engines.weights import NAME as PROBE
from rlplace.workers.launch.sockets import vllm_variables
from rlplace.workers.process_group import GROUP_USERS

if TYPE_CHECKING:
    from rlplace.comm.weights.device_push import DevicePush
    from rlplace.comm.weights.device_sync import LoadedParts
    from rlplace.workers.launch.devices import Device

_CPU_BLOCK = 32  # tokens; with vLLM's 128, samples of a group would share no prompt that is shorter
# Share of a GPU that vLLM needs free at the start, even for a cache of a fixed size
_UNUSED_SHARE = 0.01


class _Running(NamedTuple):
    """An answer in flight, and the versions of the weights with which its tokens are sampled.

    `sample`: index of the answer in its group. `versions`: pairs (index of a token, version of the weights with which
    the tokens from this index on are sampled).
    """

    request: Request
    sample: int
    # Pairs: number of a token, and the version that draws the tokens from this one on
    versions: list[tuple[int, int | None]]


class VllmEngine:
    """A TextEngine that runs vLLM in this process. Owns vLLM's engine, its process group and the answers in flight.

    A process can have only one such engine. If answers are in flight, `load` keeps their tokens, and recomputes their
    KV cache with the new weights.
    """

    def __init__(self, settings: EngineSettings, *, device: Device, owner: str) -> None:
        on_cpu = device.torch_name == "cpu"
        if problem := vllm_problem("emulated" if on_cpu else "gpu"):
            raise ConfigError([problem])
        self._settings = settings
        # Where factors are added. Several workers are other processes, which receive weights from the host.
        several = settings.tensor_parallel > 1
        self._adds_on = torch.device("cpu" if several else device.torch_name)
        self._owner = owner
        self._expected = ExpectedWeights.of_folder(settings.model)
        with BUILDING:
            self._vllm: Any = _build(
                settings, self._expected, torch.device(device.torch_name)
            )
        with GROUP_USERS.lock:
            GROUP_USERS.add()
        kind = CpuMemory if on_cpu else cuda_memory(self._vllm)
        # vLLM's name of the factors in each request
        self._adapter = None if settings.adapter is None else adapter_request()
        self._memory = kind(self._vllm, device, settings.rollout.sleep_level)
        # Level 2 at the start: random weights need no copy on the host
        self._memory.move(Residency.OFF, level=2)
        self.version: int | None = None
        # Answers in flight, by vLLM's name
        self._running: dict[str, _Running] = {}
        # Names for the next requests to vLLM
        self._names = map(str, itertools.count())
        # Finished, to be returned by the next step
        self._ready: list[Completion] = []
        # Prompt tokens that no step has begun with
        self._unread = 0
        self.cached_tokens = 0

    @property
    def residency(self) -> Residency:
        return self._memory.residency

    @property
    def in_flight(self) -> int:
        return len(self._running) + len(self._ready)

    @property
    def room(self) -> int:
        return max(0, self._settings.rollout.step_sequences - len(self._running))

    @property
    def host_bytes(self) -> int:
        """Bytes of the weights that vLLM's sleep at level 1 has copied to the host, as measured."""
        return self._memory.held().host

    def move(self, to: Residency) -> int:
        if to < self.residency and self.in_flight:
            raise engine_busy(self._owner, self.in_flight, to)
        self._memory.move(to)
        if to == Residency.OFF and self._settings.rollout.sleep_level == 2:
            self.version = None
        return self._memory.held().accelerator

    def load(
        self, weights: Weights, version: int, factors: FactorsOf = NO_FACTORS
    ) -> None:
        require(
            self, self._owner, "pull_weights", needs=Residency.WEIGHTS, loaded=False
        )
        named = self._expected.complete(weights)
        stored = self._expected.shapes
        check_fit(
            dict(as_stored(named.items(), stored)),
            stored,
            owner=self._owner,
            version=version,
        )
        if self._settings.adapter is not None:
            self._check_factors(factors, version)
        # Until all weights are copied, there is no version
        self.version = None
        adapter = self._settings.adapter
        added = factors if adapter is None else NO_FACTORS
        items = as_stored(merged(named, added, self._adds_on), stored)
        if self._settings.tensor_parallel > 1:
            load_shards(self._vllm, items)
        else:
            self._vllm.collective_rpc(pack_experts_anew)
            self._vllm.collective_rpc(reload, args=(items,))
        if adapter is not None:
            self._put(factors, adapter)
        self._loaded(version)

    def load_factors(self, factors: FactorsOf, version: int) -> None:
        require(self, self._owner, "pull_weights", needs=Residency.WEIGHTS)
        assert self._settings.adapter is not None, (
            "the engine was built with an adapter"
        )
        self._check_factors(factors, version)
        # Until all workers have the factors, there is no version
        self.version = None
        self._put(factors, self._settings.adapter)
        self._loaded(version)

    def _check_factors(self, factors: FactorsOf, version: int) -> None:
        """Raise UnfitWeights if the factors are not those of the engine's layers, or have other shapes."""
        adapter = self._settings.adapter
        assert adapter is not None, "the engine was built with an adapter"
        targets = _targets(adapter, self._expected)
        expected: dict[str, tuple[int, ...]] = {}
        for name, shape in self._expected.shapes.items():
            layer = name.removesuffix(".weight")
            if layer.rpartition(".")[2] in targets:
                expected[f"{layer}.lora_A.weight"] = (adapter.rank, shape[1])
                expected[f"{layer}.lora_B.weight"] = (shape[0], adapter.rank)
        given = stored_factors(factors)
        check_fit(given, expected, owner=self._owner, version=version)

    def _put(self, factors: FactorsOf, adapter: AdapterSettings) -> None:
        """Replace the factors of the adapter in each of vLLM's workers."""
        tensors = {}
        for name, tensor in stored_factors(factors).items():
            # vLLM scales its factors in place, and a view would be sent with all of its memory
            tensors[factor_name(name)] = tensor.detach().to("cpu", copy=True)
        alpha = adapter.scale * adapter.rank
        self._vllm.collective_rpc(put_adapter, args=(tensors, adapter.rank, alpha))

    def load_from(self, sync: DevicePush, rank: int, deadline_s: float) -> LoadedParts:
        """Let each of vLLM's workers receive a weight sync itself, and load its own part of the weights as they arrive.

        Return the transports that carried the bytes, and the tensors of the sync that are not weights. If an error
        occurs after a worker began to load, the engine has no version, and refuses to generate until the next load.

        `sync`: the sync. `rank`: the rollout rank for which the workers receive. `deadline_s`: deadline, in seconds of
        the monotonic clock. Raises the errors of `load`, WeightSyncError and ChannelTimeout.
        """
        require(
            self, self._owner, "pull_weights", needs=Residency.WEIGHTS, loaded=False
        )
        # Shapes of what the sync sends, without the data
        shapes: dict[str, torch.Tensor] = {}
        for spec in sync.assembly.layout.tensors:
            for name in spec.names:
                shapes[name] = torch.empty(spec.shape, device="meta")
        # Tensors that are no weights
        others = {name: shapes.pop(name) for name in (PROBE,) if name in shapes}
        version = sync.push.version
        named = self._expected.complete(shapes)
        stored = self._expected.shapes
        check_fit(
            dict(as_stored(named.items(), stored)),
            stored,
            owner=self._owner,
            version=version,
        )
        # A tied head is loaded from the embedding
        is_tied = HEAD in named and HEAD not in shapes
        further_names = {EMBEDDING: HEAD} if is_tied else {}
        before = self.version
        self.version = None
        try:
            loaded = load_from(
                self._vllm,
                sync,
                rank,
                deadline_s,
                further_names,
                [*others],
                frozenset(stored),
            )
        except NothingLoaded as error:
            self.version = before
            raise error.why from None
        self._loaded(version)
        return loaded

    def _loaded(self, version: int) -> None:
        """Record that weights of `version` are loaded, for the engine and for the next tokens of each answer in flight.

        The prefix cache is emptied, because it belongs to the old weights.
        """
        # Keys and values by the old weights are wrong now
        self._vllm.reset_prefix_cache(reset_running_requests=True)
        for name, tokens in tokens_so_far(self._vllm).items():
            if name in self._running:
                self._running[name].versions.append((tokens, version))
        self.version = version

    def submit(self, request: Request) -> None:
        require(self, self._owner, "generate", needs=Residency.FULL)
        check_length(self._owner, len(request.tokens), self._settings.context)
        drawn = self._settings.drawn(request)
        stop_token_ids, stop_texts = self._settings.stops(request)
        tokens = request.tokens.tolist()
        for sample in range(
            request.first_sample, request.first_sample + request.samples
        ):
            name = self._add(
                tokens,
                temperature=0.0 if request.greedy else drawn.temperature,
                top_p=drawn.top_p,
                top_k=drawn.top_k,
                seed=_seed_of(drawn.seed, request, sample),
                stop_token_ids=list(stop_token_ids),
                stop=list(stop_texts),
                detokenize=bool(stop_texts),
                max_tokens=request.max_new_tokens,
                min_tokens=min(drawn.min_tokens, request.max_new_tokens),
                repetition_penalty=drawn.repetition_penalty,
                presence_penalty=drawn.presence_penalty,
                frequency_penalty=drawn.frequency_penalty,
                logprobs=0,
                skip_clone=True,
            )
            self._running[name] = _Running(request, sample, [(0, self.version)])
        # Once per request: its other answers find the prompt in the cache
        self._unread += len(tokens)

    def _add(self, tokens: list[int], **parameters: object) -> str:
        """Pass a prompt of token ids to vLLM, and return the name of the request.

        The answer ends as the engine's settings say; the model's own end token is ignored.

        `parameters`: sampling parameters of vLLM.
        """
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        name = next(self._names)
        kind = RequestOutputKind.FINAL_ONLY
        asked: Any = {
            "detokenize": False,
            **parameters,
            "flat_logprobs": True,
            "ignore_eos": True,
            "output_kind": kind,
        }
        self._vllm.add_request(
            name,
            tokens_input(tokens),
            SamplingParams(**asked),
            lora_request=self._adapter,
        )
        return name

    def step(self, watch: Stopwatch | None = None) -> Sequence[Completion]:
        if self._running:
            # vLLM does not say which tokens a step reads; it reads waiting prompts first
            require(self, self._owner, "generate", needs=Residency.FULL)
            read = min(self._unread, self._settings.rollout.step_tokens)
            running = len(self._running)
            self._unread -= read
            self._advance()
            if watch is not None:
                watch.lap("prefill" if read else "decode", read or running)
        finished = self._ready
        self._ready = []
        return finished

    def _advance(self) -> list[Any]:
        """Run one step of vLLM, and keep the answers that it has finished for the next call of `step`.

        Return vLLM's outputs for all other requests, such as those of `logprobs`.
        """
        others = []
        for output in self._vllm.step():
            running = self._running.pop(output.request_id, None)
            if running is None:
                others.append(output)
                continue
            self.cached_tokens += output.num_cached_tokens or 0
            self._ready.append(self._completion(running, output.outputs[0]))
        return others

    def _completion(self, running: _Running, answer: Any) -> Completion:
        """Return a finished answer of vLLM as a Completion, with the version of the weights for each token.

        `running`: request and weight versions of the answer. `answer`: vLLM's output for the answer.
        """
        if answer.finish_reason not in ("stop", "length"):
            raise AssertionError(
                f"{self._owner}: vLLM ended an answer by {answer.finish_reason!r}"
            )
        # Each version holds from its first token on
        versions = np.empty(len(answer.token_ids), np.int32)
        for first, version in running.versions:
            assert version is not None, (
                "weights are loaded before anything is asked of them"
            )
            versions[first:] = version
        request = running.request
        return Completion(
            env_rank=request.env_rank,
            iteration=request.iteration,
            held_out=request.held_out,
            group=request.group,
            sample=running.sample,
            turn=request.turn,
            tokens=np.asarray(answer.token_ids, np.int32),
            logprobs=np.asarray(answer.logprobs.logprobs, np.float32),
            versions=versions,
            finish=answer.finish_reason,
        )

    def logprobs(self, tokens: Sequence[int]) -> Sequence[float]:
        """Return log p(tokens[i] | tokens[:i]) for each i >= 1, by the loaded weights, at temperature 1.

        Answers in flight advance at the same time. Those that finish are returned by the next `step`.
        """
        (scores,) = self.logprobs_of([tokens], len(tokens))
        return scores

    def logprobs_of(
        self, sequences: Sequence[Sequence[int]], token_budget: int
    ) -> Sequence[Sequence[float]]:
        """Return the result of `logprobs` for each of the sequences.

        `token_budget` is not used: vLLM reads prompts in steps of `step_tokens` tokens at most.
        """
        require(self, self._owner, "logprobs", needs=Residency.FULL)
        for sequence in sequences:
            check_length(self._owner, len(sequence), self._settings.context)
        names = []
        for sequence in sequences:
            tokens = [int(token) for token in sequence]
            names.append(self._add(tokens, max_tokens=1, prompt_logprobs=0))
        found: dict[str, list[float]] = {}
        while len(found) < len(names) and self._vllm.has_unfinished_requests():
            for output in self._advance():
                found[output.request_id] = list(output.prompt_logprobs.logprobs)
        assert len(found) == len(names), f"{self._owner}: vLLM forgot a request"
        return [found[name] for name in names]

    def drop(self) -> None:
        self._vllm.abort_request(list(self._running))
        self._running.clear()
        self._ready = []
        self._unread = 0

    def close(self) -> None:
        """Shut down vLLM's workers and torch's process group in this process."""
        self._running.clear()
        if self._vllm is not None:
            # Workers that are other processes leave by their end
            if self._settings.tensor_parallel == 1:
                self._vllm.collective_rpc(leave_syncs)
            GROUP_USERS.leave_by(self._vllm.engine_core.shutdown)
            self._vllm = None
            self._memory.close()


def _seed_of(seed: int | None, request: Request, sample: int) -> int | None:
    """Return the seed of one answer; None if the engine has no seed.

    `seed`: seed of the engine. `sample`: index of the answer in its group.
    """
    return None if seed is None else answer_seed(seed, request, sample)


def _build(
    settings: EngineSettings, expected: ExpectedWeights, device: torch.device
) -> Any:
    """Return a new engine of vLLM with random weights, at residency FULL.

    `expected`: shapes of the model's weights. `device`: first of the engine's GPUs, or the CPU; the engine also uses
    the GPUs with the next numbers.
    """
    on_cpu = device.type == "cpu"
    rollout = settings.rollout
    # On a GPU, attention would round fp32 numbers to 10 bits of mantissa
    exact = {}
    if rollout.dtype == "fp32" and not on_cpu:
        exact = {"TRITON_F32_DEFAULT": "ieee"}
    for name, value in {**vllm_variables(), **exact}.items():
        os.environ.setdefault(name, value)
    with _quiet():
        from rlplace.workers.engines import vllm_modules
    os.environ.update(vllm_modules.FORCED)
    for name, value in {**vllm_modules.UNLESS_SET, **vllm_modules.SET_BY_VLLM}.items():
        os.environ.setdefault(name, value)
    others: dict[str, Any] = {
        **_memory_arguments(settings, expected, on_cpu),
        **rollout.engine_args,
    }
    if settings.adapter is not None:
        others |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": vllm_lora_rank(settings.adapter.rank),
            "lora_target_modules": sorted(_targets(settings.adapter, expected)),
        }
    # None: vLLM's own choice, which starts with GPU 0
    device_ids: list[int | str] | None = None
    if device.index:
        device_ids = [device.index + part for part in range(settings.tensor_parallel)]
    executor = "mp" if settings.tensor_parallel > 1 else "uni"
    # Draws without a seed: ranks must not all draw alike
    random_seed = random.SystemRandom().getrandbits(31)
    with _quiet():
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if on_cpu:
            load_nothing()
            others = {**seeded_draws(), **others}
        return LLMEngine.from_engine_args(
            EngineArgs(
                model=str(settings.model),
                # Token ids in, token ids out, but for texts that end an answer
                skip_tokenizer_init=not (settings.stop_texts or settings.takes_texts),
                generation_config="vllm",  # not the sampling that the folder recommends
                load_format="dummy",
                dtype=TORCH_NAMES[rollout.dtype],
                kv_cache_dtype="fp8" if rollout.cache == "fp8" else "auto",
                max_model_len=settings.context,
                max_num_batched_tokens=max(rollout.step_tokens, rollout.step_sequences),
                max_num_seqs=rollout.step_sequences,
                tensor_parallel_size=settings.tensor_parallel,
                device_ids=device_ids,
                distributed_executor_backend=executor,
                enforce_eager=rollout.enforce_eager,
                enable_prefix_caching=True,
                block_size=_CPU_BLOCK if on_cpu else None,
                enable_sleep_mode=not on_cpu,
                # Otherwise a step returns tokens of the step before, drawn by older weights
                async_scheduling=False,
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                seed=random_seed,
                **others,
            )
        )


def _targets(adapter: AdapterSettings, expected: ExpectedWeights) -> set[str]:
    """Return the last parts of the names of the layers that have factors.

    `expected`: shapes of the model's weights, among which all matrices are linear layers, except embedding and head.
    """
    if adapter.targets:
        return set(adapter.targets)
    found = set()
    for name, shape in expected.shapes.items():
        if len(shape) == 2 and name not in (EMBEDDING, HEAD):
            found.add(name.removesuffix(".weight").rpartition(".")[2])
    return found


def _memory_arguments(
    settings: EngineSettings, expected: ExpectedWeights, on_cpu: bool
) -> dict[str, Any]:
    """Return the arguments of vLLM's engine that limit its KV cache.

    On a CPU the limit is always in bytes, because vLLM would otherwise take a share of the machine's memory.

    `expected`: shapes of the model's weights. `on_cpu`: whether the engine runs on a CPU.
    """
    rollout = settings.rollout
    if rollout.kv_cache_memory is None and not on_cpu:
        return {"gpu_memory_utilization": settings.share}
    # Bytes of weights per accelerator
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[rollout.dtype])
    weights = expected.elements * dtype.itemsize // settings.tensor_parallel
    size = settings.cache_bytes(settings.emulated_memory, weights)
    cache = {"kv_cache_memory_bytes": size}
    if on_cpu:
        return cache
    return {**cache, "gpu_memory_utilization": _UNUSED_SHARE}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Return a context manager for the import and build of vLLM, which silences warnings during its `with` block.

    At the end it restores torch.set_num_threads, which vLLM replaces by a function that does nothing.
    """
    settable = torch.set_num_threads
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = settable
