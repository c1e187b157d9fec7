"""Loss terms of simulator policies and language models: the clipped surrogate, the value loss, how tokens are averaged.

Letters: N samples or response tokens of one minibatch or micro-batch; s sequences in it, each whole; O observation
shape, A action shape.

Every term is per sample ([N] in, [N] out). A mean is a sum with weights, and the weights come from the totals of an
optimizer step over all ranks and micro-batches. So neither packing nor the number of ranks changes the loss::

    loss of the step = sum over ranks, micro-batches and tokens of weight * loss of the token
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlplace.algo.kl import kl_k3


class Clip(NamedTuple):
    """How far the ratio new / old may go before a sample stops pushing."""

    low: float  # below 1
    high: float  # above 1; more than `low` leaves unlikely tokens room to grow (DAPO's clip-higher)
    dual: float | None = None  # a loss above this times -A stops pushing as well


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """Return [N] to be minimised: max(-r * A, -clip(r, 1 - low, 1 + high) * A); where A < 0, -dual * A at most.

    Schulman et al. 2017 (arXiv:1707.06347); two bounds: Yu et al. 2025 (DAPO, arXiv:2503.14476), section 3.1; the dual
    clip: Ye et al. 2020 (arXiv:1912.09729), equation 5.
    """
    ratio = log_ratio.exp()
    losses = -advantages
    surrogate = torch.maximum(
        ratio * losses, ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * losses
    )
    if clip.dual is None:
        return surrogate
    return torch.where(
        advantages < 0, torch.minimum(surrogate, clip.dual * losses), surrogate
    )


def cispo(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, clip: Clip
) -> Tensor:
    """Return [N] to be minimised: -clip(r, 1 - low, 1 + high) * A * log p, where the clipped ratio has no gradient.

    Every token pushes, with a weight that is clipped (MiniMax-M1, arXiv:2506.13585, equations 4 and 5; ScaleRL,
    arXiv:2510.13786). `clip.dual` is not used.
    """
    return (
        -log_ratio.detach().exp().clamp(1.0 - clip.low, 1.0 + clip.high)
        * advantages
        * logprobs
    )


def _outside(log_ratio: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Return [N] bool each, of ratios below and above the clip."""
    ratio = log_ratio.exp()
    return ratio < 1.0 - clip.low, ratio > 1.0 + clip.high


def _without_slope(
    log_ratio: Tensor, advantages: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """Return [N] bool each, of tokens that push no more: bad ones of a low ratio, others of a high one."""
    ratio = log_ratio.exp()
    low = (advantages < 0) & (ratio < 1.0 - clip.low)
    high = (advantages > 0) & (ratio > 1.0 + clip.high)
    return low, high if clip.dual is None else high | (
        (advantages < 0) & (ratio > clip.dual)
    )


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None
) -> Tensor:
    """Return [N] half the squared error; with `value_clip`, the worse of the free and the clipped estimate.

    The clip is that of the PPO authors' code (Engstrom et al. 2020, arXiv:2005.12729, section 3, "value function
    clipping").
    """
    error = (values - returns).square()
    if value_clip is not None:
        error = torch.maximum(
            error, _clipped_error(values, old_values, returns, value_clip)
        )
    return 0.5 * error


def is_value_clipped(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None
) -> Tensor:
    """Return [N] 1.0 where the loss is that of the clipped estimate, which has no gradient, else 0.0."""
    if value_clip is None:
        return torch.zeros_like(values)
    error = _clipped_error(values, old_values, returns, value_clip)
    return (error > (values - returns).square()).to(values.dtype)


def _clipped_error(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float
) -> Tensor:
    near = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return (near - returns).square()


@torch.no_grad()
def shares_of(terms: LmTerms, count: int) -> dict[str, Tensor]:
    """Return [] float64 of each term: summed over ranks and micro-batches, these are means over `count` samples."""
    return dict(
        zip(
            terms._fields,
            torch.stack(terms).sum(dim=1, dtype=torch.float64) / count,
            strict=True,
        )
    )


# ── simulator policies: every sample of a minibatch counts alike ─────────────────────────────────────────────────────


class StepSamples(NamedTuple):
    """Samples of a rank, step by step."""

    observations: Tensor  # [N, *O]
    actions: Tensor  # [N, *A]
    logprobs: Tensor  # [N]
    values: Tensor  # [N]
    advantages: Tensor  # [N]
    returns: Tensor  # [N]

    def pick(self, indices: Tensor) -> StepSamples:
        return StepSamples(*(tensor.index_select(0, indices) for tensor in self))


class PPOSlopes(NamedTuple):
    """Of the loss of a step, by this rank's samples of a minibatch, and this rank's shares of the step's means."""

    logprobs: Tensor  # [N]
    values: Tensor  # [N]
    shares: Tensor  # [5], as PPO_MEANS names them


PPO_MEANS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


def ppo_slopes(
    logprobs: Tensor,
    values: Tensor,
    entropies: Tensor,
    old: StepSamples,
    clip: Clip,
    *,
    value_clip: float | None,
    value_coef: float,
    count: int,
) -> PPOSlopes:
    """Differentiate the mean of policy loss + value_coef * value loss over `count` samples, of which these are a part.

    All tensors are [N], possibly none; `old` has the samples as they were drawn. The loss is `clipped_surrogate` and
    `value_loss` (Schulman et al. 2017, with the sign turned); without autograd, whose calls cost more than the numbers.
    """
    log_ratio = logprobs - old.logprobs
    moved = log_ratio.expm1()
    ratio = moved + 1.0
    near = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    free = ratio * old.advantages
    clipped = near * old.advantages  # to be as large as possible
    least = torch.minimum(free, clipped)
    error = values - old.returns
    squared = error.square()
    slopes = error * (value_coef / count)
    if value_clip is not None:
        change = values - old.values
        held = change.clamp(-value_clip, value_clip)
        worse = (old.values + held - old.returns).square()
        # Within the clip both are the same estimate, but for rounding.
        slopes.masked_fill_((worse > squared) & (held != change), 0.0)
        squared = torch.maximum(squared, worse)
    means = torch.stack(
        (
            -least,
            0.5 * squared,
            entropies,
            moved - log_ratio,
            (near != ratio).to(ratio.dtype),
        )
    )
    return PPOSlopes(
        logprobs=(free * (free <= clipped)).mul_(-1.0 / count),
        values=slopes,
        shares=means.sum(dim=1).div_(count),
    )


# ── language models: tokens are weighed by sequence and step ─────────────────────────────────────────────────────────


class Totals(NamedTuple):
    """Of one optimizer step, over all ranks and micro-batches."""

    samples: int
    tokens: int  # response tokens
    longest: int  # most response tokens a sample can have; a constant of the job, not of the step


def sequence_ratio(log_ratio: Tensor, lengths: Tensor) -> Tensor:
    """Return [N] at each token the mean over its sequence: the logarithm of the length-normalised sequence ratio.

    Zheng et al. 2025 (GSPO, arXiv:2507.18071), section 4.1: s = (p_new(y) / p_old(y)) ** (1 / |y|). With the weights of
    the sequence mean, the loss and its gradient are those of one term per sequence. `lengths` [s] are response tokens.
    """
    sequence = torch.repeat_interleave(lengths, output_size=len(log_ratio))
    sums = log_ratio.new_zeros(len(lengths)).index_add(0, sequence, log_ratio)
    return (sums / lengths.clamp(min=1))[sequence]


def token_weights(mean: str, lengths: Tensor, totals: Totals) -> Tensor:
    """Return [N] the weight of each token; `lengths` [s] int64 are the response tokens of each sequence, possibly 0.

    token       all tokens weigh alike (Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.3)
    sequence    all samples weigh alike, whatever their length (Shao et al. 2024, GRPO, arXiv:2402.03300)
    constant    a sum over tokens, which favours no length (Liu et al. 2025, Dr. GRPO, arXiv:2503.20783, section 3.2 and
                the implementation given there)
    """
    if mean == "sequence":
        weights = 1.0 / (lengths.clamp(min=1) * totals.samples).float()
    else:
        counted = {
            "token": max(1, totals.tokens),
            "constant": totals.samples * totals.longest,
        }[mean]
        weights = torch.full(lengths.shape, 1.0 / counted, device=lengths.device)
    return weights.repeat_interleave(lengths)


class LmTerms(NamedTuple):
    """The loss and metrics of a language model by token, [N] each."""

    policy_loss: Tensor
    entropy: Tensor
    approx_kl: Tensor  # of the old policy from the new; no gradient
    # 1.0 where a bad token was already unlikely enough to push no more; with cispo where its weight was raised. As the
    # next, without gradient.
    clipped_low: Tensor
    clipped_high: Tensor  # 1.0 where a good one was likely enough, a bad one above the dual clip; or weight was cut

    def loss(self, weights: Tensor, entropy_coef: float = 0.0) -> Tensor:
        """Return [] this micro-batch's share of the step's loss, to differentiate; without tokens a 0 that still is."""
        each = self.policy_loss
        if entropy_coef != 0.0:  # a zero gradient is not worth its cost
            each = each - entropy_coef * self.entropy
        return (weights * each).sum()


def lm_terms(
    *,
    logprobs: Tensor,
    entropies: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    clip: Clip,
    ratio: str = "token",
    surrogate: str = "clip",
    importance: Tensor | None = None,
) -> LmTerms:
    """All tensors are [N], `lengths` [s]; only `logprobs` and `entropies` carry a gradient.

    `old_logprobs` are those of the policy before the first step on these tokens. `ratio`: token, each token's own as in
    PPO, GRPO and DAPO, or sequence. `surrogate`: clip, of the ratio, or cispo, of a weight. `importance` weighs each
    token's surrogate (`kl.importance_weights`); None: alike.
    """
    log_ratio = logprobs - old_logprobs
    limited = sequence_ratio(log_ratio, lengths) if ratio == "sequence" else log_ratio
    weighed = surrogate == "cispo"
    each = (
        cispo(limited, logprobs, advantages, clip)
        if weighed
        else clipped_surrogate(limited, advantages, clip)
    )
    with torch.no_grad():
        low, high = (
            _outside(limited, clip)
            if weighed
            else _without_slope(limited, advantages, clip)
        )
        approx_kl = kl_k3(log_ratio)
    return LmTerms(
        policy_loss=each if importance is None else importance * each,
        entropy=entropies,
        approx_kl=approx_kl,
        clipped_low=low.to(logprobs.dtype),
        clipped_high=high.to(logprobs.dtype),
    )
