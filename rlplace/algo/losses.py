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
    """Bounds of the ratio r = new / old probability; beyond them, a sample has no gradient."""

    low: float  # below 1
    # Above 1; more than `low` leaves unlikely tokens room to grow (DAPO's clip-higher).
    high: float
    # A loss above this times -A has no gradient either; None: no such bound.
    dual: float | None = None


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """Return [N] losses: max(-r * A, -clip(r, 1 - low, 1 + high) * A); where A < 0, -dual * A at most.

    `log_ratio`: [N] log r. `advantages`: [N] A. Schulman et al. 2017 (arXiv:1707.06347); two bounds: Yu et al. 2025
    (DAPO, arXiv:2503.14476), section 3.1; the dual clip: Ye et al. 2020 (arXiv:1912.09729), equation 5.
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    losses = -advantages
    surrogate = torch.maximum(ratio * losses, clipped * losses)
    if clip.dual is None:
        return surrogate
    bounded = torch.minimum(surrogate, clip.dual * losses)
    return torch.where(advantages < 0, bounded, surrogate)


def cispo(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, clip: Clip
) -> Tensor:
    """Return [N] losses: -clip(r, 1 - low, 1 + high) * A * log p, where the clipped ratio has no gradient.

    `log_ratio`: [N] log r. `logprobs`: [N] log p. `advantages`: [N] A. Every token has a gradient, with a weight that
    is clipped (MiniMax-M1, arXiv:2506.13585, equations 4 and 5; ScaleRL, arXiv:2510.13786). `clip.dual` is not used.
    """
    weights = log_ratio.detach().exp().clamp(1.0 - clip.low, 1.0 + clip.high)
    return -weights * advantages * logprobs


def _outside(log_ratio: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Return two [N] bool: tokens whose ratio is below the clip, and tokens whose ratio is above it.

    `log_ratio`: [N] log of the ratio.
    """
    ratio = log_ratio.exp()
    return ratio < 1.0 - clip.low, ratio > 1.0 + clip.high


def _without_slope(
    log_ratio: Tensor, advantages: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """Return two [N] bool of tokens to which the clip leaves no gradient.

    `log_ratio`: [N] log of the ratio. `advantages`: [N] A. The first are tokens with A < 0 and a ratio below the clip.
    The second are tokens with A > 0 and a ratio above it, and tokens with A < 0 and a ratio above the dual clip.
    """
    ratio = log_ratio.exp()
    bad = advantages < 0
    low = bad & (ratio < 1.0 - clip.low)
    high = (advantages > 0) & (ratio > 1.0 + clip.high)
    if clip.dual is not None:
        high = high | (bad & (ratio > clip.dual))
    return low, high


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None
) -> Tensor:
    """Return [N] losses: half the squared error of the value.

    With `value_clip`: half the larger of this squared error and the squared error of the clipped value.

    `values`, `old_values`, `returns`: [N]; the old values are those of the policy that sampled. A clipped value is at
    most `value_clip` from the old value; None: no clip. The clip is that of the PPO authors' code (Engstrom et al.
    2020, arXiv:2005.12729, section 3, "value function clipping").
    """
    error = (values - returns).square()
    if value_clip is not None:
        clipped = _clipped_error(values, old_values, returns, value_clip)
        error = torch.maximum(error, clipped)
    return 0.5 * error


def is_value_clipped(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None
) -> Tensor:
    """Return [N]: 1.0 where `value_loss` returns the loss of the clipped value, which has no gradient, else 0.0.

    The arguments are those of `value_loss`.
    """
    if value_clip is None:
        return torch.zeros_like(values)
    error = _clipped_error(values, old_values, returns, value_clip)
    return (error > (values - returns).square()).to(values.dtype)


def _clipped_error(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float
) -> Tensor:
    """Return [N]: the squared error of values that are clipped to at most `value_clip` from the old values."""
    near = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return (near - returns).square()


@torch.no_grad()
def shares_of(terms: LmTerms, count: int) -> dict[str, Tensor]:
    """Return name -> [] float64 of each term: its sum over the tokens of a micro-batch, divided by `count`.

    `terms`: [N] each. The sums of these results over ranks and micro-batches are means over `count` samples or tokens.
    """
    means = torch.stack(terms).sum(dim=1, dtype=torch.float64) / count
    return dict(zip(terms._fields, means, strict=True))


# ── simulator policies: every sample of a minibatch counts alike ─────────────────────────────────────────────────────


class StepSamples(NamedTuple):
    """Simulator samples of one rank, step by step, as they were drawn."""

    observations: Tensor  # [N, *O]
    actions: Tensor  # [N, *A]
    logprobs: Tensor  # [N]
    values: Tensor  # [N]
    advantages: Tensor  # [N]
    returns: Tensor  # [N]

    def pick(self, indices: Tensor) -> StepSamples:
        return StepSamples(*(tensor.index_select(0, indices) for tensor in self))


class PPOSlopes(NamedTuple):
    """Gradients of a minibatch's loss with respect to this rank's outputs, and this rank's part of the means."""

    logprobs: Tensor  # [N], gradient by log-probabilities
    values: Tensor  # [N], gradient by values
    shares: Tensor  # [5], this rank's part of each mean, as PPO_MEANS names them


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
    """Return the gradients of the mean of policy loss + value_coef * value loss, and partial sums of PPO_MEANS.

    `logprobs`, `values`, `entropies`: of the present policy. `value_clip`: as in `value_loss`. The mean is over `count`
    samples of all ranks, of which this rank has N, possibly none. All tensors are [N]; `old` has the samples as they
    were drawn. The losses are `clipped_surrogate` (Schulman et al. 2017, with the sign turned) and `value_loss`.
    Autograd is not used: its calls cost more than the numbers.
    """
    # The clipped surrogate, with the sign turned.
    log_ratio = logprobs - old.logprobs
    moved = log_ratio.expm1()
    ratio = moved + 1.0
    near = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    free = ratio * old.advantages
    clipped = near * old.advantages  # to be as large as possible
    least = torch.minimum(free, clipped)

    # The value loss and its gradient.
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

    # In the order of PPO_MEANS; the KL is the estimate k3.
    approx_kl = moved - log_ratio
    is_clipped = (near != ratio).to(ratio.dtype)
    means = torch.stack((-least, 0.5 * squared, entropies, approx_kl, is_clipped))
    # The gradient of the surrogate is 0 where the clipped term is the smaller one.
    has_slope = free <= clipped
    return PPOSlopes(
        logprobs=(free * has_slope).mul_(-1.0 / count),
        values=slopes,
        shares=means.sum(dim=1).div_(count),
    )


# ── language models: tokens are weighed by sequence and step ─────────────────────────────────────────────────────────


class Totals(NamedTuple):
    """Sizes of one optimizer step over all ranks and micro-batches."""

    samples: int
    tokens: int  # response tokens
    # Most response tokens that a sample can have: a constant of the job, not of the step.
    longest: int


def sequence_ratio(log_ratio: Tensor, lengths: Tensor) -> Tensor:
    """Return [N]: at each token the mean of `log_ratio` [N] over its sequence.

    `lengths`: [s] response tokens of each sequence. The mean is the logarithm of the length-normalised sequence ratio
    of Zheng et al. 2025 (GSPO, arXiv:2507.18071), section 4.1: s = (p_new(y) / p_old(y)) ** (1 / |y|). With the weights
    that `token_weights` returns for the mean `sequence`, the loss and its gradient are those of one term per sequence.
    """
    sequence = torch.repeat_interleave(lengths, output_size=len(log_ratio))
    sums = log_ratio.new_zeros(len(lengths)).index_add(0, sequence, log_ratio)
    return (sums / lengths.clamp(min=1))[sequence]


def token_weights(mean: str, lengths: Tensor, totals: Totals) -> Tensor:
    """Return [N]: the weight of each token in the loss of its step.

    `lengths` [s] int64: the response tokens of each sequence, possibly 0. `totals`: of the step. `mean`: one of

    token       all tokens weigh alike (Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.3)
    sequence    all samples weigh alike, whatever their length (Shao et al. 2024, GRPO, arXiv:2402.03300)
    constant    a sum over tokens, which favours no length (Liu et al. 2025, Dr. GRPO, arXiv:2503.20783, section 3.2 and
                the implementation given there)
    """
    if mean == "sequence":
        weights = 1.0 / (lengths.clamp(min=1) * totals.samples).float()
    else:
        all_tokens = max(1, totals.tokens)
        constant = totals.samples * totals.longest
        counted = {"token": all_tokens, "constant": constant}[mean]
        weights = torch.full(lengths.shape, 1.0 / counted, device=lengths.device)
    return weights.repeat_interleave(lengths)


class LmTerms(NamedTuple):
    """The loss and metrics of a language model at each token, [N] each."""

    policy_loss: Tensor
    entropy: Tensor
    # All below have no gradient.
    approx_kl: Tensor  # of the old policy from the new
    # 1.0 where a bad token is so unlikely that the clip takes its gradient; with cispo where
    # its weight was raised.
    clipped_low: Tensor
    # 1.0 where a good token is so likely that the clip takes its gradient, or a bad one is
    # above the dual clip; with cispo where its weight was cut.
    clipped_high: Tensor

    def loss(self, weights: Tensor, entropy_coef: float = 0.0) -> Tensor:
        """Return []: this micro-batch's part of the step's loss, with a gradient even without tokens.

        `weights`: [N], the result of `token_weights`. `entropy_coef`: weight of the entropy, which lowers the loss.
        """
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
    """Return the loss and metrics at each token. All tensors are [N], but `lengths` [s].

    `advantages`: of each token. Only `logprobs` and `entropies` carry a gradient. `old_logprobs`: of the policy before
    the first step on these tokens. `lengths`: response tokens of each sequence. `ratio`: `token` for the ratio of each
    token, as in PPO, GRPO and DAPO, or `sequence` for the ratio of its sequence. `surrogate`: `clip` for
    `clipped_surrogate`, or `cispo` for `cispo`. `importance`: a factor of each token's loss (`kl.importance_weights`);
    None: 1.
    """
    log_ratio = logprobs - old_logprobs
    # The ratio that the clip limits: of the token, or of its sequence.
    limited = log_ratio
    if ratio == "sequence":
        limited = sequence_ratio(log_ratio, lengths)
    if surrogate == "cispo":
        each = cispo(limited, logprobs, advantages, clip)
        with torch.no_grad():
            low, high = _outside(limited, clip)
    else:
        each = clipped_surrogate(limited, advantages, clip)
        with torch.no_grad():
            low, high = _without_slope(limited, advantages, clip)
    with torch.no_grad():
        approx_kl = kl_k3(log_ratio)
    if importance is not None:
        each = importance * each
    return LmTerms(
        policy_loss=each,
        entropy=entropies,
        approx_kl=approx_kl,
        clipped_low=low.to(logprobs.dtype),
        clipped_high=high.to(logprobs.dtype),
    )
