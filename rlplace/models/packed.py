"""Packed sequences, one after the other without padding: attention within each, and the scores of their tokens.

Letters: T tokens of all sequences together, s sequences, N tokens that are scored, H query heads, K key heads, D size
of a head, E size of the hidden states, V of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rlplace.placement.memory.formulas import CHUNK_ELEMENTS

_NAME = "rlplace_packed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Whole sequences, and the positions of the tokens to score."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, 0 at the first token of each sequence
    edges: Tensor  # [s + 1] int32, where sequences begin; the last is T
    lengths: tuple[int, ...]  # [s], the same for the host
    scored: Tensor  # [N] int64 in 1 .. T - 1, never the first token of a sequence: nothing predicts it

    @classmethod
    def of(
        cls, sequences: Sequence[NDArray[Any]], masks: Sequence[NDArray[np.bool_]], device: torch.device | str = "cpu"
    ) -> Packed:
        """Pack sequences; `masks` are true at tokens to score. Without sequences: one token that is not scored."""
        whole = [(tokens, mask) for tokens, mask in zip(sequences, masks, strict=True) if len(tokens)]
        sequences = [tokens for tokens, _ in whole] or [np.zeros(1, np.int64)]
        masks = [mask for _, mask in whole] or [np.zeros(1, np.bool_)]
        lengths = tuple(map(len, sequences))
        firsts = np.cumsum([0, *lengths])
        scored = np.concatenate(masks)
        if scored[firsts[:-1]].any():
            raise ValueError("the first token of a sequence has no probability: nothing comes before it")
        return cls(
            tokens=torch.tensor(np.concatenate(sequences), dtype=torch.int64, device=device),
            positions=torch.tensor(np.concatenate([np.arange(n) for n in lengths]), dtype=torch.int64, device=device),
            edges=torch.tensor(firsts, dtype=torch.int32, device=device),
            lengths=lengths,
            scored=torch.tensor(np.flatnonzero(scored), dtype=torch.int64, device=device),
        )

    @property
    def targets(self) -> Tensor:
        return self.tokens[self.scored]


# ── attention ────────────────────────────────────────────────────────────────────────────────────────────────────────


def attend_packed(model: PreTrainedModel) -> None:
    """Make `model(..., packed=...)` attend within each sequence alone. Raises ValueError where it cannot."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{type(model).__name__} does not let its attention be replaced")
    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, lambda *_, **__: None)  # the edges of the sequences define it
    model.config._attn_implementation = _NAME


def attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,  # [1, K, T, D]
    attention_mask: None,
    *,
    packed: Packed,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return [1, T, H, D]; the signature is that of attention functions in transformers."""
    if softcap is not None or s_aux is not None or dropout:
        raise ValueError(f"{type(module).__name__} wants capped scores, sinks or dropout: packed attention has none")
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):  # all sequences by one kernel
        rows = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # [T, heads, D]
        seen = (-1 if sliding_window is None else sliding_window - 1, 0)
        return _varlen_kernel()(*rows, packed.edges, max(packed.lengths), scaling, seen).unsqueeze(0), None
    attend, grouped, attended = functional.scaled_dot_product_attention, query.shape[1] != key.shape[1], []
    for q, k, v in zip(*(tensor.split(packed.lengths, dim=2) for tensor in (query, key, value)), strict=True):
        length, mask = q.shape[2], None
        if sliding_window is not None and length > sliding_window:  # [length, length], true where a token sees another
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
        attended.append(attend(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped))
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous(), None


@functools.cache
def _varlen_kernel() -> Callable[..., Tensor]:
    """Return FlashAttention of flash-attn where that is installed, else the one in torch."""
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        return lambda q, k, v, edges, longest, scale, seen: flash_attn_varlen_func(
            q, k, v, edges, edges, longest, longest, softmax_scale=scale, causal=True, window_size=seen
        )
    from torch.nn.attention.varlen import varlen_attn

    def in_torch(
        q: Tensor, k: Tensor, v: Tensor, edges: Tensor, longest: int, scale: float | None, seen: tuple[int, int]
    ) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        attended = varlen_attn(
            q, k, v, edges, edges, longest, longest, scale=scale, window_size=seen, enable_gqa=grouped
        )
        return cast(Tensor, attended)  # alone, where no auxiliary output is asked for

    return in_torch


# ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Never of the whole vocabulary for all tokens at once. A chunk is a few of the N tokens; its [chunk, V] scores are made
# in the forward pass, thrown away and made again in the backward pass.


class TokenScores(NamedTuple):
    logprobs: Tensor  # [N] float32
    entropies: Tensor  # [N] float32, of the whole distribution that the token was drawn from


def token_scores(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float = 1.0, chunk_elements: int = CHUNK_ELEMENTS
) -> TokenScores:
    """Score `targets` [N] given `hidden` [N, E] before the head [V, E]: float32, from products in the head's dtype."""
    chunk = max(1, chunk_elements // len(head))
    return TokenScores(*_TokenScores.apply(hidden, head, targets, temperature, chunk))


class _TokenScores(torch.autograd.Function):
    """With z the scores, log p = z - logsumexp(z) and H = -sum p log p:

    d log p_t / d z = [t] - p        dH / d z = -p * (z - sum p z)
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        normalisers, means, chosen = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for part in (slice(first, first + chunk) for first in range(0, len(hidden), chunk)):
            normalisers[part], means[part], chosen[part] = _chunk_terms(hidden[part], head, targets[part], temperature)
        ctx.save_for_backward(hidden, head, targets, normalisers, means)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return chosen - normalisers, normalisers - means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, targets, normalisers, means = ctx.saved_tensors
        by_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        by_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in (slice(first, first + ctx.chunk) for first in range(0, len(hidden), ctx.chunk)):
            logprob = None if by_logprob is None else by_logprob[part].unsqueeze(1)
            entropy = None if by_entropy is None else by_entropy[part].unsqueeze(1)
            terms = (normalisers[part].unsqueeze(1), means[part].unsqueeze(1), targets[part].unsqueeze(1))
            by_scores = _chunk_gradient(hidden[part], head, terms, logprob, entropy, ctx.temperature)
            if by_hidden is not None:
                by_hidden[part] = by_scores @ head
            if by_head is not None and head.dtype == torch.float32:
                by_head.addmm_(by_scores.t(), hidden[part])
            elif by_head is not None:
                by_head += by_scores.t() @ hidden[part]
            del by_scores  # before the next chunk is made
        return by_hidden, None if by_head is None else by_head.to(head.dtype), None, None, None


# Functions of their own, so that a chunk's tensors are gone before the next one's are made.


def _chunk_terms(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return logsumexp(z), sum p z and z[target] of a chunk, [chunk] each."""
    scores = _scores(hidden, head, temperature)
    highest = scores.amax(dim=1)
    likely = (scores - highest.unsqueeze(1)).exp_()
    total = likely.sum(dim=1)
    chosen = scores.gather(1, targets.unsqueeze(1)).squeeze(1)
    return highest + total.log(), likely.mul_(scores).sum(dim=1) / total, chosen


def _chunk_gradient(
    hidden: Tensor,
    head: Tensor,
    terms: tuple[Tensor, Tensor, Tensor],  # logsumexp(z), sum p z, targets: [chunk, 1] each
    by_logprob: Tensor | None,  # [chunk, 1], as by_entropy
    by_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Return [chunk, V] in the dtype of the head: the gradient by its products, before the temperature."""
    scores, (normaliser, mean, targets) = _scores(hidden, head, temperature), terms
    likely = (scores - normaliser).exp_()
    by_scores = likely if by_entropy is None else scores.sub_(mean).mul_(by_entropy).mul_(likely)
    if by_logprob is not None:
        if by_entropy is None:
            by_scores.mul_(by_logprob)
        else:
            by_scores.addcmul_(likely, by_logprob)
        by_scores.scatter_add_(1, targets, -by_logprob)
    return by_scores.mul_(-1.0 / temperature).to(head.dtype)


def _scores(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    """Return [chunk, V] float32, in new memory."""
    scores = (hidden @ head.t()).float()
    return scores if temperature == 1.0 else scores.div_(temperature)
