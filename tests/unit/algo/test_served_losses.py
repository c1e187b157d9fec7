"""The losses of the training API beside their formulas, written token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlplace.algo.served_losses import ServedLoss, token_losses

LOGPROBS = [-1.0, -0.2, -2.0, -0.5]
OLD = [-1.1, -0.8, -1.0, -0.5]
ADVANTAGES = [1.0, 2.0, -1.0, -0.5]


def expected(name: str, p: float, q: float, a: float) -> tuple[float, float]:
    """Loss of a token, and its derivative by log p."""
    r = math.exp(p - q)
    clipped = min(max(r, 0.8), 1.2)
    if name == "importance_sampling":
        return -r * a, -r * a
    if name == "cispo":
        return -clipped * a * p, -clipped * a
    if name == "dro":
        return -(a * p - 0.15 * (p - q) ** 2), -(a - 0.3 * (p - q))
    if r * a <= clipped * a:
        return -r * a, -r * a
    return -clipped * a, 0.0


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
def test_losses_of_policies(name: Any) -> None:
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    inputs: dict[Any, torch.Tensor] = {
        "logprobs": torch.tensor(OLD, dtype=torch.float64),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
    }
    settings = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "beta": 0.3}
    losses = token_losses(ServedLoss(name=name, settings=settings), logprobs, inputs)
    losses.sum().backward()
    assert logprobs.grad is not None
    given = zip(LOGPROBS, OLD, ADVANTAGES, strict=True)
    for token, numbers in enumerate(given):
        loss, slope = expected(name, *numbers)
        assert losses[token].item() == pytest.approx(loss)
        assert logprobs.grad[token].item() == pytest.approx(slope)


def test_cross_entropy_is_a_weighted_sum() -> None:
    logprobs = torch.tensor(LOGPROBS)
    weights = torch.tensor([0.0, 1.0, 0.5, -1.0])
    loss = ServedLoss(name="cross_entropy", settings={})
    found = token_losses(loss, logprobs, {"weights": weights})
    assert found.tolist() == pytest.approx([0.0, 0.2, 1.0, -0.5])
