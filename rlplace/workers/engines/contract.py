"""What a rollout rank asks of whatever generates text: take weights, continue token sequences, give memory back."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from rlplace.placement.schedule import Residency
from rlplace.tokens import Completion, Request

if TYPE_CHECKING:
    from torch import Tensor

    from rlplace.models.lora import Factors


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How every answer of a run is drawn.

    A completion's log-probabilities are those of the distribution that each token was drawn from: of logits divided by
    the temperature, renormalised over what top_k and top_p keep (vLLM: `logprobs_mode="processed_logprobs"`). A learner
    that divides its logits by the temperature reproduces them where nothing is cut off. Of a greedy answer they are the
    model's own.
    """

    temperature: float = 1.0  # 0: the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    stop_token_ids: tuple[int, ...] = ()  # any of these ends an answer and is its last token
    seed: int | None = None  # None: not reproducible; else what is drawn does not depend on timing: see `answer_seed`


def answer_seed(seed: int, request: Request, sample: int) -> int:
    """32 bits for the draws of one answer; which others are generated beside it, and on which rank, plays no part."""
    numbers = (seed, request.iteration, request.group, sample, request.turn)
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheBytes:
    """The KV cache has this size on each accelerator."""

    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineShare:
    """Everything the engine holds is this share of each accelerator; the KV cache gets what is left of it."""

    gpu_memory_utilization: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineBudget:
    """Everything the engine holds on each accelerator is this much; the KV cache gets what is left of it."""

    size_bytes: int


MemoryLimit = CacheBytes | EngineShare | EngineBudget


class TextEngine(Protocol):
    """Continuous batching under its caller's control. Used by one thread.

    Born OFF without weights; `load` needs WEIGHTS, `submit` and `step` need FULL and loaded weights.

    ::

        OFF ── move(WEIGHTS) ──▶ WEIGHTS ── load ──▶ WEIGHTS (loaded) ── move(FULL) ──▶ FULL ── move(OFF) ──▶ OFF
    """

    @property
    def residency(self) -> Residency: ...

    @property
    def version(self) -> int | None:
        """Of the loaded weights; None without."""
        ...

    @property
    def in_flight(self) -> int:
        """Answers begun and not finished."""
        ...

    @property
    def room(self) -> int:
        """Answers it can take on right now without making them wait; submitting more is allowed."""
        ...

    @property
    def host_bytes(self) -> int:
        """Copies of weights that it keeps on the host, measured."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens since birth whose keys and values did not have to be computed."""
        ...

    def move(self, to: Residency) -> int:
        """Takes or gives back accelerator memory; returns the bytes held afterwards on each accelerator, measured.

        Leaving FULL with answers in flight is refused (EngineBusy): abort or finish them first.
        """
        ...

    def load(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        factors: Mapping[str, Factors] = MappingProxyType({}),
    ) -> None:
        """All weights by their names in the model's checkpoint; tied weights under each of their names.

        A weight that has `factors` is loaded with these added, one after the other: `weights` stay as they are.
        Allowed with answers in flight: what they have is kept, what follows is sampled by the new weights. Raises
        ValueError unless names and shapes are the model's; NotResident when OFF.
        """
        ...

    def submit(self, request: Request) -> None:
        """Begins all answers of a request. Raises ConfigError when the prompt leaves no room in the context."""
        ...

    def step(self) -> Sequence[Completion]:
        """Advances everything in flight by one forward pass; what finished in it, at once.

        Where the context ends, an answer ends by "length", even below its `max_new_tokens`.
        """
        ...

    def abort(self) -> Sequence[Request]:
        """Drops everything in flight; the requests, to be submitted again."""
        ...

    def logprobs(self, tokens: Sequence[int]) -> Sequence[float]:
        """log p(tokens[i] | tokens[:i]) for i >= 1 under the loaded weights, without temperature: to verify a sync."""
        ...

    def close(self) -> None:
        """Frees everything; also after a failure."""
        ...
