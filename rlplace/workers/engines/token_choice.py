"""Draws next tokens from logits, each row with a number of its own, so that a draw does not depend on its batch.

Letters: B rows, V vocabulary, K tokens that top_k keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlplace.workers.engines.contract import Sampling

Chosen = tuple[Tensor, Tensor]  # token ids [B] and their log-probabilities [B]


def choose(logits: Tensor, sampling: Sampling, uniforms: Sequence[float | None]) -> Chosen:
    """One token per row of `logits` [B, V]; `uniforms` are in [0, 1), None for the likeliest token."""
    drawn = [row for row, uniform in enumerate(uniforms) if uniform is not None]
    if not drawn:
        return likeliest(logits)
    if len(drawn) == len(logits):
        return draw(logits, sampling, [u for u in uniforms if u is not None])
    tokens, logprobs = likeliest(logits)
    tokens[drawn], logprobs[drawn] = draw(logits[drawn], sampling, [u for u in uniforms if u is not None])
    return tokens, logprobs


def likeliest(logits: Tensor) -> Chosen:
    logprobs, tokens = logits.float().log_softmax(-1).max(-1)
    return tokens, logprobs


def draw(logits: Tensor, sampling: Sampling, uniforms: Sequence[float]) -> Chosen:
    """By inverting the cumulative distribution, in double precision: one number a row is enough for any vocabulary."""
    scaled = logits.float() / sampling.temperature
    kept = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    order = None
    if kept < logits.shape[-1] or sampling.top_p < 1:
        scaled, order = scaled.topk(kept)  # [B, K], the likeliest first
        scaled = _nucleus(scaled, sampling.top_p)
    logprobs = scaled.log_softmax(-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    points = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    # The first entry above the point: never one of probability 0, since that adds nothing to the entry before it.
    places = torch.searchsorted(cumulative, points, right=True).clamp(max=cumulative.shape[-1] - 1)
    tokens = places if order is None else order.gather(-1, places)
    return tokens[:, 0], logprobs.gather(-1, places)[:, 0]


def _nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """Keeps of each row, the likeliest first, the fewest entries that have `top_p` together (Holtzman et al. 2020)."""
    probabilities = scaled.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return scaled.masked_fill(before >= top_p, float("-inf"))
