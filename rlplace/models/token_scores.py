"""Log-probabilities of given tokens and entropies, without ever holding the scores of the whole vocabulary at once.

Letters: N tokens, E size of the hidden states, V of the vocabulary. A chunk is a few of the N; its [chunk, V] scores
are made in the forward pass, thrown away and made again in the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_ELEMENTS = 1 << 22  # of [chunk, V]: large enough for fast products, small beside the model


class TokenScores(NamedTuple):
    logprobs: Tensor  # [N] float32
    entropies: Tensor  # [N] float32, of the whole distribution that the token was drawn from


def token_scores(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float = 1.0, chunk_elements: int = _CHUNK_ELEMENTS
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
            scores = _scores(hidden[part], head, temperature)
            highest = scores.amax(dim=1)
            likely = (scores - highest.unsqueeze(1)).exp_()
            total = likely.sum(dim=1)
            normalisers[part] = highest + total.log()
            means[part] = torch.linalg.vecdot(likely, scores) / total
            chosen[part] = scores.gather(1, targets[part].unsqueeze(1)).squeeze(1)
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
            scores = _scores(hidden[part], head, ctx.temperature)
            likely = (scores - normalisers[part].unsqueeze(1)).exp_()
            if by_entropy is None:
                by_scores = likely
            else:
                by_scores = scores.sub_(means[part].unsqueeze(1)).mul_(by_entropy[part].unsqueeze(1)).mul_(likely)
            if by_logprob is not None:
                weight = by_logprob[part].unsqueeze(1)
                by_scores = by_scores.mul_(weight) if by_entropy is None else by_scores.addcmul_(likely, weight)
                by_scores.scatter_add_(1, targets[part].unsqueeze(1), -weight)
            by_scores = by_scores.mul_(-1.0 / ctx.temperature).to(head.dtype)
            if by_hidden is not None:
                by_hidden[part] = by_scores @ head
            if by_head is not None and head.dtype == torch.float32:
                by_head.addmm_(by_scores.t(), hidden[part])
            elif by_head is not None:
                by_head += by_scores.t() @ hidden[part]
        return by_hidden, None if by_head is None else by_head.to(head.dtype), None, None, None


def _scores(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    """Return [chunk, V] float32, in new memory."""
    scores = (hidden @ head.t()).float()
    return scores if temperature == 1.0 else scores.div_(temperature)
