"""Contracts of generation engines: load weights, generate, give the accelerator back.

::

    OFF ── move(WEIGHTS) ──▶ WEIGHTS ── load ──▶ WEIGHTS (loaded) ── move(FULL) ──▶ FULL ── move(OFF) ──▶ OFF

`VectorEngine` decides on batches of observations, `TextEngine` continues token sequences.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.schedule import Residency
from rlplace.tokens import Completion, Request

if TYPE_CHECKING:
    from torch import Tensor

    from rlplace.models.lora import Factors

Dtype = Literal["fp32", "bf16", "fp16"]
TORCH_NAMES: Mapping[Dtype, Literal["float32", "bfloat16", "float16"]] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}


class Engine(Protocol):
    """What all engines have in common. Used by one thread. Starts OFF without weights; `load` needs WEIGHTS."""

    @property
    def residency(self) -> Residency: ...

    @property
    def version(self) -> int | None:
        """Version of the loaded weights; None without weights."""
        ...

    @property
    def host_bytes(self) -> int:
        """Bytes of weight copies that the engine keeps on the host, measured."""
        ...

    def move(self, to: Residency) -> int:
        """Take or give back accelerator memory; return the bytes held afterwards on each accelerator, measured.

        OFF drops the weights unless the engine copies them to the host: the next sync brings all of them. Raises
        AcceleratorOutOfMemory; EngineBusy when answers are in flight.
        """
        ...

    def load(
        self, weights: Mapping[str, Tensor], version: int, factors: Mapping[str, Factors] = MappingProxyType({})
    ) -> None:
        """Copy all weights in, by their names in the checkpoint; tied weights under each of their names.

        A weight that has `factors` is loaded with them added; `weights` stay as they are. With answers in flight,
        their tokens are kept and the following tokens are sampled by the new weights. Raises ValueError unless names
        and shapes are the model's; NotResident when OFF.
        """
        ...

    def close(self) -> None:
        """Free everything; also after a failure."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Actions for a batch of B observations, action shape A. The arrays belong to the caller."""

    actions: NDArray[Any]  # [B, *A]
    logprobs: NDArray[np.float32]  # [B]
    values: NDArray[np.float32]  # [B]
    version: int  # of the policy that decided


class VectorEngine(Engine, Protocol):
    def decide(self, observations: NDArray[np.float32], noise: NDArray[np.float32]) -> Decision:
        """Sample one action per row with that row's noise. Raises NotResident below FULL or without weights."""
        ...

    def digest(self) -> str:
        """SHA-256 of all weights by name: equal if and only if they are equal bit for bit. Raises NotResident."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How every answer of a run is drawn.

    Log-probabilities of a completion belong to the distribution that each token was drawn from: logits divided by the
    temperature, renormalised over what top_k and top_p keep (vLLM: `logprobs_mode="processed_logprobs"`). A learner
    that divides its logits by the temperature reproduces them where nothing is cut off. Those of a greedy answer are
    the model's own.
    """

    temperature: float = 1.0  # 0: the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    stop_token_ids: tuple[int, ...] = ()  # any of these ends an answer and is its last token
    seed: int | None = None  # None: not reproducible; else draws do not depend on timing: see `answer_seed`


def answer_seed(seed: int, request: Request, sample: int) -> int:
    """Return 32 bits for the draws of one answer, independent of its batch and of the rank that generates it."""
    numbers = (seed, request.iteration, request.group, sample, request.turn)
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheBytes:
    """The KV cache has this size on each accelerator."""

    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineShare:
    """All that the engine holds is this share of each accelerator; the KV cache gets what weights leave of it."""

    gpu_memory_utilization: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineBudget:
    """All that the engine holds on each accelerator is this much; the KV cache gets what weights leave of it."""

    size_bytes: int


MemoryLimit = CacheBytes | EngineShare | EngineBudget


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How one text engine is built. The transformers engine ignores what stands below `step_sequences`."""

    model: Path  # a Hugging Face folder; of its weights only names and shapes are read, since a sync brings them
    dtype: Dtype
    context: int  # longest prompt and answer together, in tokens
    memory: MemoryLimit
    step_sequences: int = 256  # most answers in flight at once
    step_tokens: int = 8192
    tensor_parallel: int = 1
    enforce_eager: bool = True
    cache_fp8: bool = False  # keys and values are rounded to 8 bits; else they are kept as they are computed
    sleep_level: Literal[1, 2] = 2


class TextEngine(Engine, Protocol):
    """Continuous batching under its caller's control: `submit` and `step` need FULL and loaded weights."""

    @property
    def in_flight(self) -> int:
        """Answers begun and not finished."""
        ...

    @property
    def room(self) -> int:
        """Answers that can begin at once; submitting more is allowed, they wait."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens, since the engine was built, whose keys and values did not have to be computed."""
        ...

    def submit(self, request: Request) -> None:
        """Begin all answers of a request. Raises ConfigError when the prompt leaves no room in the context."""
        ...

    def step(self) -> Sequence[Completion]:
        """Advance all answers in flight by one forward pass; return those that finished in it.

        An answer ends by "length" at the end of the context, even below its `max_new_tokens`.
        """
        ...

    def logprobs(self, tokens: Sequence[int]) -> Sequence[float]:
        """log p(tokens[i] | tokens[:i]) for i >= 1 under the loaded weights, without temperature: verifies a sync."""
        ...
