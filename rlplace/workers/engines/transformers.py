"""Generates with a Hugging Face model and a hand-made continuous batch: the reference of the TextEngine contract.

::

    submit ──▶ waiting ── a row is free: one pass over its tokens ──▶ active ── stop, length ──▶ Completion
                  ▲                                                     │ one pass for all of them per step
                  └──────────────── load: new weights, new keys ────────┘

The answers of a request share the pass over its prompt. For machines without vLLM: simple and exact, not fast.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.initialization import no_init_weights

from rlplace.models import BUILDING
from rlplace.models.batch_cache import BatchCache, RowShape
from rlplace.placement.schedule import Residency
from rlplace.tokens import Completion, Finish, Request
from rlplace.workers.engines.contract import (
    TORCH_NAMES,
    CacheBytes,
    EngineBudget,
    EngineSettings,
    EngineShare,
    MemoryLimit,
    Sampling,
    answer_seed,
)
from rlplace.workers.engines.errors import (
    attention_not_full,
    cache_below_one_answer,
    engine_busy,
    prompt_too_long,
    require,
    share_of_nothing,
)
from rlplace.workers.engines.token_choice import choose
from rlplace.workers.engines.torch import ModuleWeights

if TYPE_CHECKING:
    from rlplace.models.lora import Factors
    from rlplace.workers.launch.devices import Device

_CACHE = "KV cache"


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

    The cache is made anew on the way to FULL. After a load, keys and values of answers in flight are computed again by
    the new weights.
    """

    def __init__(self, settings: EngineSettings, sampling: Sampling, *, device: Device, owner: str, rank: int) -> None:
        self._settings, self._sampling = settings, sampling
        self._device, self._owner, self._rank = device, owner, rank
        config = AutoConfig.from_pretrained(settings.model, local_files_only=True)
        if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
            raise attention_not_full(owner, config.model_type)
        dtype: torch.dtype = getattr(torch, TORCH_NAMES[settings.dtype])
        with BUILDING, no_init_weights():  # the weights are dropped at once
            # sdpa takes boolean masks
            self._model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        self._weights = ModuleWeights(self._model, device, owner=owner, label="engine weights", noun="model")
        self._torch_device = self._weights.torch_device
        self._shape = RowShape.of(config, tokens=settings.context, dtype=dtype)
        self._rows = self._rows_within(settings.memory)
        self._most = min(self._rows, settings.step_sequences)
        self._cache: BatchCache | None = None
        self._waiting: collections.deque[_Answer] = collections.deque()
        self._active: list[_Answer] = []  # by row of the cache
        self.cached_tokens = 0
        self._seed = sampling.seed if sampling.seed is not None else int.from_bytes(os.urandom(4), "little")
        self.residency = Residency.OFF

    @property
    def version(self) -> int | None:
        return self._weights.version

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
        """Return the cache rows that fit: one for each answer of full length.

        There may be more of them than are ever used: the plan counts the whole limit as held.
        """
        match memory:
            case CacheBytes(size_bytes=size):
                cache = size
            case EngineBudget(size_bytes=size):
                cache = size - self._weights.size_bytes
            case EngineShare() if self._torch_device.type == "cpu":
                raise share_of_nothing()
            case EngineShare(gpu_memory_utilization=share):
                total = torch.cuda.get_device_properties(self._torch_device).total_memory
                cache = int(share * total) - self._weights.size_bytes
        if cache < self._shape.size_bytes:
            raise cache_below_one_answer(self._owner, cache, self._shape.size_bytes, self._settings.context)
        return cache // self._shape.size_bytes

    def move(self, to: Residency) -> int:
        if to < Residency.FULL:
            if self.in_flight:
                raise engine_busy(self._owner, self.in_flight, to)
            self._cache = None
            self._device.release(_CACHE)
        if to == Residency.OFF:
            self._weights.drop()
        if to >= Residency.WEIGHTS > self.residency:
            self._weights.allocate()
            self.residency = Residency.WEIGHTS
        if to == Residency.FULL > self.residency:
            self._device.acquire(self._rows * self._shape.size_bytes, _CACHE)
            self._cache = BatchCache(self._rows, self._shape, self._torch_device)
        self.residency = to
        return self._weights.held_bytes + (0 if self._cache is None else self._cache.size_bytes)

    def load(
        self, weights: Mapping[str, Tensor], version: int, factors: Mapping[str, Factors] = MappingProxyType({})
    ) -> None:
        require(self, self._owner, "pull_weights", needs=Residency.WEIGHTS, loaded=False)
        self._weights.load(weights, version, factors)
        self._waiting.extendleft(reversed(self._active))
        self._active = []

    # ── generating ───────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: Request) -> None:
        require(self, self._owner, "submit", needs=Residency.FULL)
        if len(request.tokens) >= self._settings.context:
            raise prompt_too_long(self._owner, len(request.tokens), self._settings.context)
        for sample in range(request.first_sample, request.first_sample + request.samples):
            numbers = random.Random(answer_seed(self._seed, request, sample))
            self._waiting.append(_Answer(request, sample, numbers))

    @torch.inference_mode()
    def step(self) -> Sequence[Completion]:
        require(self, self._owner, "step", needs=Residency.FULL)
        assert self._cache is not None, "FULL has a cache"
        cache = self._cache
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
        """Run one pass over the tokens of the next waiting answer; answers of its request without tokens share it."""
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
        """Add a token to each answer; `logits` [B, V]."""
        assert self.version is not None
        always = self._sampling.temperature == 0
        uniforms = [None if always or a.request.greedy else a.numbers.random() for a in answers]
        tokens, logprobs = choose(logits, self._sampling, uniforms)
        for answer, token, logprob in zip(answers, tokens.tolist(), logprobs.tolist(), strict=True):
            answer.tokens.append(token)
            answer.logprobs.append(logprob)
            answer.versions.append(self.version)

    def _take_finished(self, cache: BatchCache) -> list[Completion]:
        """Remove finished answers; the last active answer moves into the row that becomes free."""
        taken: list[Completion] = []
        for row in reversed(range(len(self._active))):
            answer = self._active[row]
            finish = answer.finish(self._sampling.stop_token_ids, self._settings.context)
            if finish is None:
                continue
            taken.append(
                Completion(
                    group=answer.request.group,
                    sample=answer.sample,
                    turn=answer.request.turn,
                    tokens=np.array(answer.tokens, np.int32),
                    logprobs=np.array(answer.logprobs, np.float32),
                    versions=np.array(answer.versions, np.int32),
                    finish=finish,
                    rollout_rank=self._rank,
                )
            )
            last = self._active.pop()
            if last is not answer:
                cache.copy(len(self._active), row, last.length - 1)
                self._active[row] = last
        return taken[::-1]

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> Sequence[float]:
        require(self, self._owner, "logprobs", needs=Residency.WEIGHTS)
        given = torch.tensor(list(tokens), device=self._torch_device)
        logits = self._model(input_ids=given[None], use_cache=False).logits[0, :-1]
        return logits.float().log_softmax(-1).gather(-1, given[1:, None])[:, 0].tolist()

    def close(self) -> None:
        self._active = []
        self._waiting.clear()
        self.move(Residency.OFF)
