"""Scores in chunks are those of the whole vocabulary at once, and so are their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlplace.models.token_scores import token_scores

TOKENS, HIDDEN, VOCABULARY = 7, 5, 11


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, head, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def plain(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax((hidden @ head.t()).float() / temperature, dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(dim=-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_elements", [1, 3 * VOCABULARY, 1 << 20], ids=["single", "three", "all"])
def test_chunks_change_nothing(temperature: float, chunk_elements: int) -> None:
    hidden, head, targets = inputs(torch.float32)
    scores = token_scores(hidden, head, targets, temperature, chunk_elements)
    logprobs, entropies = plain(hidden, head, targets, temperature)
    torch.testing.assert_close(scores.logprobs, logprobs)
    torch.testing.assert_close(scores.entropies, entropies)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.6, -0.3)], ids=["logprobs", "entropies", "both"])
def test_gradients_are_those_of_the_plain_formula(temperature: float, weights: tuple[float, float]) -> None:
    hidden, head, targets = inputs(torch.float32)
    uneven = torch.linspace(-1.0, 1.0, TOKENS)

    def gradients(scores: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        used = [(weight * uneven * score).sum() for weight, score in zip(weights, scores, strict=True) if weight]
        return torch.autograd.grad(torch.stack(used).sum(), [hidden, head])

    expected = gradients(plain(hidden, head, targets, temperature))
    torch.testing.assert_close(gradients(token_scores(hidden, head, targets, temperature, 2 * VOCABULARY)), expected)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head, targets = inputs(torch.float32)
    head.requires_grad_(False)
    token_scores(hidden, head, targets).logprobs.sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


def test_no_token_is_a_loss_of_nothing() -> None:
    hidden, head, targets = inputs(torch.float32)
    token_scores(hidden[:0], head, targets[:0]).logprobs.sum().backward()
    assert head.grad is not None
    assert not head.grad.any()


def test_half_precision_is_summed_in_float32() -> None:
    hidden, head, targets = inputs(torch.bfloat16)
    scores = token_scores(hidden, head, targets)
    logprobs, _ = plain(hidden, head, targets, 1.0)
    assert scores.logprobs.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs, logprobs)
    scores.logprobs.sum().backward()
    assert hidden.grad is not None
    assert head.grad is not None
    assert hidden.grad.dtype == head.grad.dtype == torch.bfloat16


def test_large_scores_do_not_overflow() -> None:
    hidden, head, targets = inputs(torch.float32)
    assert torch.stack(token_scores(hidden * 1e4, head, targets)).isfinite().all()
