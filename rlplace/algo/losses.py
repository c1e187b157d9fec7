"""The terms of PPO, one small function each, and their sum over one rank's part of a minibatch.

Every function here is per sample ([N] in, [N] out), so that a mean over ranks is a sum of local sums divided by the
global count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def policy_loss(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Clipped surrogate, to be minimised (Schulman et al. 2017, arXiv:1707.06347)."""
    ratio, losses = log_ratio.exp(), -advantages
    return torch.maximum(ratio * losses, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * losses)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None) -> Tensor:
    """Half the squared error; with `value_clip`, the worse of the free and the clipped estimate.

    The clip is that of the PPO authors' code (Engstrom et al. 2020, arXiv:2005.12729, section 3, "value function
    clipping").
    """
    error = (values - returns).square()
    if value_clip is not None:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        error = torch.maximum(error, (near - returns).square())
    return 0.5 * error


def is_value_clipped(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None) -> Tensor:
    """1.0 where the loss is that of the clipped estimate, which has no gradient, else 0.0."""
    if value_clip is None:
        return torch.zeros_like(values)
    near = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return ((near - returns).square() > (values - returns).square()).to(values.dtype)


def kl_divergence(log_ratio: Tensor) -> Tensor:
    """Estimates KL(old || new) from samples of old: r - 1 - log r, unbiased and never negative.

    It is the estimator k3 of Schulman, "Approximating KL divergence" (2020), with r = new / old.
    """
    return log_ratio.expm1() - log_ratio


def is_clipped(log_ratio: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """1.0 where the ratio left the trust region, else 0.0."""
    change = log_ratio.exp() - 1.0
    return ((change > clip_high) | (-change > clip_low)).to(log_ratio.dtype)


class PPOTerms(NamedTuple):
    """What PPO weighs, by sample, [N] each."""

    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    approx_kl: Tensor  # no gradient
    clip_fraction: Tensor  # no gradient

    def loss(self, value_coef: float, entropy_coef: float, count: int) -> Tensor:
        """[] to differentiate (Schulman et al. 2017, with the sign turned); see `shares`."""
        each = self.policy_loss + value_coef * self.value_loss
        if entropy_coef != 0.0:  # its gradient would be nothing, its cost would not
            each = each - entropy_coef * self.entropy
        return each.sum() / count

    @torch.no_grad()
    def shares(self, count: int) -> Tensor:
        """[5] float64, this rank's share of each mean: summed over ranks they are the means over `count` samples."""
        return torch.stack(self).sum(dim=1, dtype=torch.float64) / count


def ppo_terms(
    *,
    logprobs: Tensor,
    values: Tensor,
    entropies: Tensor,
    old_logprobs: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    clip_low: float,
    clip_high: float,
    value_clip: float | None,
) -> PPOTerms:
    """All tensors are [N], this rank's samples of a minibatch, possibly none."""
    log_ratio = logprobs - old_logprobs
    with torch.no_grad():
        approx_kl, clipped = kl_divergence(log_ratio), is_clipped(log_ratio, clip_low, clip_high)
    return PPOTerms(
        policy_loss=policy_loss(log_ratio, advantages, clip_low, clip_high),
        value_loss=value_loss(values, old_values, returns, value_clip),
        entropy=entropies,
        approx_kl=approx_kl,
        clip_fraction=clipped,
    )
