"""Each PPO term at the points where it changes its mind."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlplace.algo.losses import is_clipped, is_value_clipped, kl_divergence, policy_loss, ppo_terms, value_loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.4, 0.0),  # good action, already likelier than the clip allows: no more push
        (0.5, 2.0, -1.0, -1.0),  # good action made unlikely: full push back
        (0.5, -2.0, 1.6, 0.0),  # bad action, already unlikely enough
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_policy_loss(ratio: float, advantage: float, loss: float, slope: float) -> None:
    log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
    value = policy_loss(log_ratio, torch.tensor([advantage]), clip_low=0.2, clip_high=0.2)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert log_ratio.grad is not None
    assert log_ratio.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("value", "clip", "loss", "slope"),
    [
        (3.0, None, 0.5, -1.0),
        (3.0, 5.0, 0.5, -1.0),  # inside the clip: as without
        (3.0, 0.5, 3.125, 0.0),  # old value 1 may move to 1.5 only, 2.5 short of the return
        (5.0, 0.5, 3.125, 0.0),
        (9.0, 0.5, 12.5, 5.0),  # worse than the clipped estimate: pulled back
    ],
)
def test_value_loss(value: float, clip: float | None, loss: float, slope: float) -> None:
    values = torch.tensor([value], requires_grad=True)
    result = value_loss(values, old_values=torch.tensor([1.0]), returns=torch.tensor([4.0]), value_clip=clip)
    result.sum().backward()
    assert result.item() == pytest.approx(loss)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("value", [0.0, 1.2, 3.0, 9.0])
def test_a_clipped_value_pushes_no_more(value: float, clip: float | None) -> None:
    values = torch.tensor([value], requires_grad=True)
    old, returns = torch.tensor([1.0]), torch.tensor([4.0])
    (slope,) = torch.autograd.grad(value_loss(values, old, returns, clip).sum(), values)
    assert is_value_clipped(values.detach(), old, returns, clip).tolist() == [float(slope.item() == 0.0)]
    assert (slope.item() == 0.0) == (clip is not None and value == 3.0)


@given(st.floats(-3.0, 3.0))
def test_divergence_is_never_negative(log_ratio: float) -> None:
    estimate = kl_divergence(torch.tensor([log_ratio], dtype=torch.float64)).item()
    assert estimate >= 0.0
    assert estimate == pytest.approx(math.exp(log_ratio) - 1.0 - log_ratio, abs=1e-12)


def test_divergence_estimates_the_true_one() -> None:
    old, new = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.3, 0.3, 0.4])
    expected = (old * (old / new).log()).sum()
    assert (old * kl_divergence((new / old).log())).sum().item() == pytest.approx(expected.item(), rel=1e-5)


def test_clipped_on_both_sides() -> None:
    ratios = torch.tensor([0.7, 0.85, 1.0, 1.15, 1.3])
    assert is_clipped(ratios.log(), 0.2, 0.2).tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_terms_of_parts_add_up_to_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    columns = {
        name: torch.randn(10, generator=generator)
        for name in ("logprobs", "values", "entropies", "old_logprobs", "old_values", "advantages", "returns")
    }
    rules = {"clip_low": 0.2, "clip_high": 0.2, "value_clip": 0.3}
    whole = ppo_terms(**columns, **rules)
    parts = [
        ppo_terms(**{name: column[part] for name, column in columns.items()}, **rules)
        for part in (slice(0, 3), slice(3, 3), slice(3, 10))
    ]
    shares = whole.shares(10)
    assert torch.allclose(sum(part.shares(10) for part in parts), shares, atol=1e-6)
    assert torch.allclose(sum(part.loss(0.5, 0.1, 10) for part in parts), whole.loss(0.5, 0.1, 10), atol=1e-6)
    assert shares[2].item() == pytest.approx(columns["entropies"].mean().item(), abs=1e-6)


def test_loss_signs() -> None:
    terms = ppo_terms(
        logprobs=torch.zeros(1),
        values=torch.zeros(1),
        entropies=torch.ones(1),
        old_logprobs=torch.zeros(1),
        old_values=torch.zeros(1),
        advantages=torch.ones(1),
        returns=torch.full((1,), 2.0),
        clip_low=0.2,
        clip_high=0.2,
        value_clip=None,
    )
    assert terms.loss(value_coef=0.5, entropy_coef=0.1, count=1).item() == pytest.approx(-1.0 + 0.5 * 2.0 - 0.1)
    assert terms.loss(value_coef=0.5, entropy_coef=0.0, count=4).item() == pytest.approx((-1.0 + 0.5 * 2.0) / 4)
