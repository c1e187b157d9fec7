"""Generates with a Hugging Face model and a hand-made continuous batch: the reference of the TextEngine contract.

::

    submit ──▶ waiting ── a row is free: one pass over its tokens ──▶ active ── stop, length ──▶ Completion
                  ▲                                                     │ one pass for all of them per step
                  └──────────────── load: new weights, new keys ────────┘

The answers of a request share the pass over its prompt. It is for where vLLM is not: simple and exact, not fast.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.initialization import no_init_weights

from rlplace.comm.weights.tensors import copy_tensor
from rlplace.models.batch_cache import BatchCache, RowShape
from rlplace.models.building import BUILDING
from rlplace.placement.schedule import Residency
from rlplace.tokens import Completion, Finish, Request
from rlplace.workers.engines.contract import CacheBytes, EngineBudget, EngineShare, MemoryLimit, Sampling, answer_seed
from rlplace.workers.engines.sampling import choose
from rlplace.workers.offload import storages
from rlplace.workers.refusals import (
    attention_not_full,
    cache_below_one_answer,
    engine_busy,
    no_weights,
    prompt_too_long,
    share_of_nothing,
)
from rlplace.workers.worker import not_resident

if TYPE_CHECKING:
    from rlplace.models.lora import Factors
    from rlplace.workers.launch.devices import Device

_WEIGHTS = "engine weights"
_CACHE = "KV cache"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSettings:
    """How one engine is built."""

    model: Path  # a Hugging Face folder; its weights are not read, since a sync brings them
    dtype: Literal["fp32", "bf16", "fp16"]
    context: int  # longest prompt and answer together, in tokens
    memory: MemoryLimit  # an answer reserves cache for the whole context
    step_sequences: int = 256  # most answers in flight at once


@dataclasses.dataclass(slots=True)
class _Answer:
    """An answer in flight."""

    request: Request
    sample: int
    numbers: random.Random
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.request.tokens) + len(self.tokens)

    def finish(self, stops: Sequence[int], context: int) -> Finish | None:
        if self.tokens[-1] in stops:
            return "stop"
        return "length" if len(self.tokens) >= self.request.max_new_tokens or self.length >= context else None


class TransformersEngine:
    """A TextEngine over any decoder of transformers with full attention in all layers.

    Owns the weights' storages, which are emptied in place on the way OFF, and the cache, made anew on the way to FULL.
    After a load the keys and values of answers in flight are computed again by the new weights.
    """

    def __init__(
        self, settings: TransformersSettings, sampling: Sampling, *, device: Device, owner: str, rank: int
    ) -> None:
        self._settings, self._sampling = settings, sampling
        self._device, self._owner, self._rank = device, owner, rank
        self._torch_device = torch.device(device.torch_name)
        config = AutoConfig.from_pretrained(settings.model, local_files_only=True)
        if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
            raise attention_not_full(owner, config.model_type)
        with BUILDING, no_init_weights():  # they are dropped at once
            # sdpa takes masks of yes and no
            model = AutoModelForCausalLM.from_config(config, dtype=_DTYPES[settings.dtype], attn_implementation="sdpa")
        self._model = model.to(self._torch_device).eval().requires_grad_(False)
        # All names, tied weights included; the tensors share storage with the model.
        self._weights: dict[str, Tensor] = self._model.state_dict()
        self._storages = [(storage, storage.nbytes()) for storage in storages(self._weights.values())]
        self._shape = RowShape.of(config, tokens=settings.context, dtype=_DTYPES[settings.dtype])
        self._rows = self._rows_within(settings.memory)
        self._most = min(self._rows, settings.step_sequences)
        self._cache: BatchCache | None = None
        self._waiting: collections.deque[_Answer] = collections.deque()
        self._active: list[_Answer] = []  # by row of the cache
        self.cached_tokens = 0
        self._seed = sampling.seed if sampling.seed is not None else int.from_bytes(os.urandom(4), "little")
        self._residency = Residency.OFF
        self._version: int | None = None
        self._free_weights()

    @property
    def residency(self) -> Residency:
        return self._residency

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def in_flight(self) -> int:
        return len(self._active) + len(self._waiting)

    @property
    def room(self) -> int:
        return max(0, self._most - self.in_flight)

    @property
    def host_bytes(self) -> int:
        return 0

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _rows_within(self, memory: MemoryLimit) -> int:
        """All that fit, also more than are ever used: what is given is held, as the plan has it."""
        match memory:
            case CacheBytes(size_bytes=size):
                cache = size
            case EngineBudget(size_bytes=size):
                cache = size - self._weight_bytes
            case EngineShare() if self._torch_device.type == "cpu":
                raise share_of_nothing()
            case EngineShare(gpu_memory_utilization=share):
                total = torch.cuda.get_device_properties(self._torch_device).total_memory
                cache = int(share * total) - self._weight_bytes
        if cache < self._shape.size_bytes:
            raise cache_below_one_answer(self._owner, cache, self._shape.size_bytes, self._settings.context)
        return cache // self._shape.size_bytes

    @property
    def _weight_bytes(self) -> int:
        return sum(size for _, size in self._storages)

    def move(self, to: Residency) -> int:
        if to < Residency.FULL:
            if self.in_flight:
                raise engine_busy(self._owner, self.in_flight, to)
            self._cache = None
            self._device.release(_CACHE)
        if to == Residency.OFF:
            self._free_weights()
        if to >= Residency.WEIGHTS > self._residency:
            self._device.acquire(self._weight_bytes, _WEIGHTS)
            for storage, size in self._storages:
                storage.resize_(size)
            self._residency = Residency.WEIGHTS
        if to == Residency.FULL > self._residency:
            self._device.acquire(self._rows * self._shape.size_bytes, _CACHE)
            self._cache = BatchCache(self._rows, self._shape, self._torch_device)
        self._residency = to
        return self._held_bytes()

    def _free_weights(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)
        self._device.release(_WEIGHTS)
        self._version = None

    def _held_bytes(self) -> int:
        cache = 0 if self._cache is None else self._cache.size_bytes
        return sum(storage.nbytes() for storage, _ in self._storages) + cache

    def load(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        factors: Mapping[str, Factors] = MappingProxyType({}),
    ) -> None:
        if self._residency < Residency.WEIGHTS:
            raise not_resident(self._owner, "pull_weights", has=self._residency, needs=Residency.WEIGHTS)
        given = dict(weights)
        problems = _misfits(given, self._weights)
        if problems:
            raise ValueError(
                f"{self._owner}: weights of version {version} do not fit the model: " + "; ".join(sorted(problems))
            )
        self._version = None  # until all are copied, this is no version
        for name, weight in given.items():
            added = factors[name].added_to(weight, self._torch_device) if name in factors else weight
            copy_tensor(self._weights[name], added)
        self._version = version
        self._waiting.extendleft(reversed(self._active))
        self._active = []

    # ── generating ───────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: Request) -> None:
        self._ready("submit")
        if len(request.tokens) >= self._settings.context:
            raise prompt_too_long(self._owner, len(request.tokens), self._settings.context)
        for sample in range(request.first_sample, request.first_sample + request.samples):
            numbers = random.Random(answer_seed(self._seed, request, sample))
            self._waiting.append(_Answer(request, sample, numbers))

    @torch.inference_mode()
    def step(self) -> Sequence[Completion]:
        cache = self._ready("step")
        finished: list[Completion] = []
        if self._active:
            positions, mask = cache.extend([answer.length - 1 for answer in self._active])
            tokens = torch.tensor([[answer.tokens[-1]] for answer in self._active], device=self._torch_device)
            output = self._model(
                input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
            )
            self._choose(self._active, output.logits[:, -1])
            finished += self._take_finished(cache)
        while self._waiting and len(self._active) < self._most:
            self._begin(cache)
        return finished + self._take_finished(cache)

    def _begin(self, cache: BatchCache) -> None:
        """One pass over what the next in line have so far: all of one request that have no token yet share it."""
        first = self._waiting.popleft()
        alike = [first]
        while self._waiting and len(self._active) + len(alike) < self._most:
            following = self._waiting[0]
            if following.request is not first.request or following.tokens or first.tokens:
                break
            alike.append(self._waiting.popleft())
        prefix = DynamicCache()
        so_far = torch.from_numpy(np.concatenate([first.request.tokens, np.array(first.tokens, np.int32)]))
        output = self._model(
            input_ids=so_far[None].to(self._torch_device), past_key_values=prefix, use_cache=True, logits_to_keep=1
        )
        cache.fill(len(self._active), len(alike), prefix)
        self.cached_tokens += (len(alike) - 1) * len(so_far)
        self._choose(alike, output.logits[:, -1].expand(len(alike), -1))
        self._active += alike

    def _choose(self, answers: Sequence[_Answer], logits: Tensor) -> None:
        """Adds a token to each answer; `logits` [B, V]."""
        assert self._version is not None
        always = self._sampling.temperature == 0
        uniforms = [None if always or a.request.greedy else a.numbers.random() for a in answers]
        tokens, logprobs = choose(logits, self._sampling, uniforms)
        for answer, token, logprob in zip(answers, tokens.tolist(), logprobs.tolist(), strict=True):
            answer.tokens.append(token)
            answer.logprobs.append(logprob)
            answer.versions.append(self._version)

    def _take_finished(self, cache: BatchCache) -> list[Completion]:
        """Takes them out; the last of the active ones moves into the row that gets free."""
        taken: list[Completion] = []
        for row in reversed(range(len(self._active))):
            answer = self._active[row]
            finish = answer.finish(self._sampling.stop_token_ids, self._settings.context)
            if finish is None:
                continue
            taken.append(self._completion(answer, finish))
            last = self._active.pop()
            if last is not answer:
                cache.copy(len(self._active), row, last.length - 1)
                self._active[row] = last
        return taken[::-1]

    def _completion(self, answer: _Answer, finish: Finish) -> Completion:
        return Completion(
            group=answer.request.group,
            sample=answer.sample,
            turn=answer.request.turn,
            tokens=np.array(answer.tokens, np.int32),
            logprobs=np.array(answer.logprobs, np.float32),
            versions=np.array(answer.versions, np.int32),
            finish=finish,
            rollout_rank=self._rank,
        )

    def abort(self) -> Sequence[Request]:
        dropped = [*self._active, *self._waiting]
        self._active = []
        self._waiting.clear()
        return _requests(dropped)

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> Sequence[float]:
        if self._residency < Residency.WEIGHTS:
            raise not_resident(self._owner, "logprobs", has=self._residency, needs=Residency.WEIGHTS)
        if self._version is None:
            raise no_weights(self._owner, "logprobs")
        given = torch.tensor(list(tokens), device=self._torch_device)
        logits = self._model(input_ids=given[None], use_cache=False).logits[0, :-1]
        return logits.float().log_softmax(-1).gather(-1, given[1:, None])[:, 0].tolist()

    def _ready(self, method: str) -> BatchCache:
        if self._cache is None:
            raise not_resident(self._owner, method, has=self._residency, needs=Residency.FULL)
        if self._version is None:
            raise no_weights(self._owner, method)
        return self._cache

    def close(self) -> None:
        self.abort()
        self.move(Residency.OFF)


def _misfits(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    problems = [f"{name} is missing" for name in own.keys() - given.keys()]
    problems += [f"{name} is not the model's" for name in given.keys() - own.keys()]
    problems += [
        f"{name} is {list(weight.shape)}, expected {list(own[name].shape)}"
        for name, weight in given.items()
        if name in own and weight.shape != own[name].shape
    ]
    return problems


def _requests(answers: Iterable[_Answer]) -> list[Request]:
    """What to submit again: of each request the answers that are here, one request for each run of their numbers."""
    ordered = sorted(answers, key=lambda a: (a.request.iteration, a.request.group, a.request.turn, a.sample))
    # Along a run, number and place grow together.
    runs = itertools.groupby(enumerate(ordered), key=lambda pair: (id(pair[1].request), pair[1].sample - pair[0]))
    found: list[Request] = []
    for _, pairs in runs:
        run = [answer for _, answer in pairs]
        found.append(dataclasses.replace(run[0].request, first_sample=run[0].sample, samples=len(run)))
    return found
