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

from rlplace.algo.kl import finite_ratio_log, kl_k3


class Clip(NamedTuple):
    """Bounds of the ratio r = new / old probability. A token with a ratio beyond its bound gets no gradient.

    `low`: how far r may be below 1. `high`: how far r may be above 1; with `high` above `low`, unlikely tokens can
    become likely faster (DAPO's clip-higher).
    `dual`: for advantages A < 0, a loss above `dual` * -A gets no gradient either; None: no such bound.
    """

    low: float
    high: float
    dual: float | None = None


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """Return the policy losses of N tokens, [N]: max(-r * A, -clip(r, 1 - low, 1 + high) * A), and at most -dual * A
    where A < 0.

    `log_ratio`: [N], log r, for r = new / old probability. `advantages`: [N], A. `clip`: has low, high and dual.
    Schulman et al. 2017 (arXiv:1707.06347); different bounds low and high: Yu et al. 2025 (DAPO, arXiv:2503.14476),
    section 3.1; the dual clip: Ye et al. 2020 (arXiv:1912.09729), equation 5.
    """
    ratio = finite_ratio_log(log_ratio).exp()
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
    """Return the policy losses of N tokens, [N]: -clip(r, 1 - low, 1 + high) * A * log p, where no gradient flows
    through the clipped r.

    `log_ratio`: [N], log r, for r = new / old probability. `logprobs`: [N], log p. `advantages`: [N], A. Each token
    keeps a gradient; only its weight is clipped (MiniMax-M1, arXiv:2506.13585, equations 4 and 5; ScaleRL,
    arXiv:2510.13786). `clip.dual` is not used.
    """
    weights = log_ratio.detach().exp().clamp(1.0 - clip.low, 1.0 + clip.high)
    return -weights * advantages * logprobs


def _outside(log_ratio: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Return two bool tensors [N], for N tokens: whether a token's ratio is below the lower bound, and whether it is
    above the upper bound.

    `log_ratio`: [N], log of the ratio. `clip`: the bounds.
    """
    ratio = log_ratio.exp()
    return ratio < 1.0 - clip.low, ratio > 1.0 + clip.high


def _without_slope(
    log_ratio: Tensor, advantages: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """Return two bool tensors [N]; together they mark which of N tokens have no gradient in `clipped_surrogate`.

    First: tokens with A < 0 and a ratio below the lower bound. Second: tokens with A > 0 and a ratio above the upper
    bound, and tokens with A < 0 and a ratio above the dual bound. `log_ratio`: [N], log of the ratio. `advantages`:
    [N], A.
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
    """Return the losses of N values, [N]: half the squared error of each value.

    With `value_clip`: half the larger one of this squared error and the squared error of the clipped value.

    `values`, `old_values`, `returns`: [N]; the old values are from the policy that sampled. `value_clip`: the clipped
    value differs from the old value by at most this much; None: no clip. The clip is that of the PPO authors' code
    (Engstrom et al. 2020, arXiv:2005.12729, section 3, "value function clipping").
    """
    error = (values - returns).square()
    if value_clip is not None:
        clipped = _clipped_error(values, old_values, returns, value_clip)
        error = torch.maximum(error, clipped)
    return 0.5 * error


def is_value_clipped(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None
) -> Tensor:
    """Return a tensor [N], for N values: 1.0 where `value_loss` uses the error of the clipped value, so that there is
    no gradient; else 0.0.

    `values`, `old_values`, `returns`: [N], as given to `value_loss`. `value_clip`: greatest difference of the clipped
    value from the old value; None: no clip.
    """
    if value_clip is None:
        return torch.zeros_like(values)
    error = _clipped_error(values, old_values, returns, value_clip)
    return (error > (values - returns).square()).to(values.dtype)


def _clipped_error(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float
) -> Tensor:
    """Return the squared errors of N values, [N], after they are clipped to within `value_clip` of the old values.

    `values`, `old_values`, `returns`: [N].
    """
    near = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return (near - returns).square()


@torch.no_grad()
def shares_of(terms: LmTerms, count: int) -> dict[str, Tensor]:
    """Return for each field of `terms` its sum over the tokens of a micro-batch, divided by `count`: name of the field
    -> float64 scalar.

    `count`: number of samples or tokens over all ranks and micro-batches. Added up over ranks and micro-batches, the
    results are means over these samples or tokens.
    """
    means = torch.stack(terms).sum(dim=1, dtype=torch.float64) / count
    return dict(zip(terms._fields, means, strict=True))


# ── simulator policies: every sample of a minibatch counts alike ─────────────────────────────────────────────────────


class StepSamples(NamedTuple):
    """N samples (steps of simulators) on one rank.

    `observations`: [N, *O], for observations of shape O. `actions`: [N, *A], for actions of shape A. All other fields:
    [N]. `logprobs`, `values`: by the policy that drew the samples. `advantages`, `returns`: targets of policy and
    value.
    """

    observations: Tensor
    actions: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def pick(self, indices: Tensor) -> StepSamples:
        return StepSamples(*(tensor.index_select(0, indices) for tensor in self))


class PPOSlopes(NamedTuple):
    """Gradients of a minibatch's loss with respect to the outputs of this rank's N samples, and parts of metrics.

    `logprobs`, `values`: [N], gradients with respect to log-probabilities and values.
    `shares`: [5], this rank's part of each mean in PPO_MEANS; the sum over ranks is the mean.
    """

    logprobs: Tensor
    values: Tensor
    shares: Tensor


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
    """Return the gradients of PPO's loss, and this rank's parts of the means in PPO_MEANS.

    The loss is the mean of policy loss + `value_coef` * value loss over `count` samples of all ranks; this rank has N
    of them, possibly none. `logprobs`, `values`, `entropies`: [N], of the present policy. `old`: the N samples as they
    were drawn. `clip`: bounds of the policy ratio. `value_clip`: greatest difference of the clipped value from the old
    value; None: no clip. The losses are `clipped_surrogate` (Schulman et al. 2017) and `value_loss`. The gradients are
    computed by explicit formulas, because autograd would cost more time than the arithmetic.
    """
    # The clipped surrogate, with the sign turned. Beyond the bound of the ratio there is no gradient.
    unbounded = logprobs - old.logprobs
    log_ratio = finite_ratio_log(unbounded)
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
    has_slope = (free <= clipped) & (log_ratio == unbounded)
    return PPOSlopes(
        logprobs=(free * has_slope).mul_(-1.0 / count),
        values=slopes,
        shares=means.sum(dim=1).div_(count),
    )


# ── language models: tokens are weighed by sequence and step ─────────────────────────────────────────────────────────


class Totals(NamedTuple):
    """Sizes of one optimizer step over all ranks and micro-batches.

    `samples`: number of samples. `tokens`: number of response tokens.
    `longest`: the most response tokens that a sample can have, a constant of the job.
    """

    samples: int
    tokens: int
    longest: int


def sequence_ratio(log_ratio: Tensor, lengths: Tensor) -> Tensor:
    """Return for each of N tokens the mean of `log_ratio` over the token's sequence, [N].

    `log_ratio`: [N]. `lengths`: [s], number of response tokens of each of s sequences. The mean is the logarithm of the
    length-normalised sequence ratio of Zheng et al. 2025 (GSPO, arXiv:2507.18071), section 4.1: s = (p_new(y) /
    p_old(y)) ** (1 / |y|). With `token_weights` for the mean `sequence`, loss and gradient are the same as with one
    term for each sequence.
    """
    sequence = torch.repeat_interleave(lengths, output_size=len(log_ratio))
    sums = log_ratio.new_zeros(len(lengths)).index_add(0, sequence, log_ratio)
    return (sums / lengths.clamp(min=1))[sequence]


def sequence_token_ratio(logprobs: Tensor, of_sequences: Tensor) -> Tensor:
    """Return for each of N tokens the logarithm of its ratio in GSPO-token, [N].

    `logprobs`: [N], log p_new of the tokens. `of_sequences`: [N], the result of `sequence_ratio`. The value is that of
    the sequence. The gradient is that of the token's own log-probability: s = sg(s_sequence) * p_new / sg(p_new), with
    sg for "no gradient" (Zheng et al. 2025, arXiv:2507.18071, equation 14). So a weight or an advantage of a token acts
    on this token alone.
    """
    return of_sequences.detach() + logprobs - logprobs.detach()


def token_weights(mean: str, lengths: Tensor, totals: Totals) -> Tensor:
    """Return the weight of each of N response tokens in the loss of an optimizer step, [N].

    `lengths`: [s] int64, number of response tokens of each of s sequences, possibly 0. `totals`: sizes of the step.
    `mean`: how tokens are averaged:

    token       all tokens have equal weight (Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.3)
    sequence    all samples have equal weight, whatever their length (Shao et al. 2024, GRPO, arXiv:2402.03300)
    constant    a sum over tokens, divided by a constant, which favours no length (Liu et al. 2025, Dr. GRPO,
                arXiv:2503.20783, section 3.2 and the implementation given there)
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
    """The loss and metrics of a language model at each of N tokens. Each field is [N].

    Only `policy_loss` and `entropy` carry a gradient. `approx_kl`: KL of the old policy from the new policy.
    `clipped_low`: 1.0 for a token with a negative advantage that is so unlikely that the clip removes its gradient;
    with the surrogate cispo, for a token with a weight raised to the lower bound.
    `clipped_high`: 1.0 for a token with a positive advantage that is so likely that the clip removes its gradient, or
    with a negative advantage above the dual clip; with cispo, for a token with a weight cut to the upper bound.
    """

    policy_loss: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clipped_low: Tensor
    clipped_high: Tensor

    def loss(self, weights: Tensor, entropy_coef: float = 0.0) -> Tensor:
        """Return a scalar: this micro-batch's part of the loss of an optimizer step. It has a gradient even without
        tokens.

        `weights`: the result of `token_weights`, one for each token. `entropy_coef`: weight of the entropy; more
        entropy means less loss.
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
    """Return the loss and metrics at each of N response tokens. All tensors are [N], except `lengths` [s].

    `logprobs`, `entropies`: of the present policy; only these carry a gradient. `old_logprobs`: of the policy before
    the first step on these tokens. `advantages`: of each token. `lengths`: number of response tokens of each of s
    sequences. `ratio`: "token" for the ratio of each token, as in PPO, GRPO and DAPO; "sequence" for the ratio of its
    sequence (GSPO); "sequence_token" for the same value with the gradient of the token (GSPO-token). `surrogate`:
    "clip" for the loss `clipped_surrogate`, "cispo" for the loss `cispo`. `importance`: a factor for each token's loss,
    see `kl.importance_weights`; None: 1.
    """
    log_ratio = logprobs - old_logprobs
    # The ratio that the clip limits: of the token, or of its sequence.
    limited = log_ratio
    if ratio != "token":
        limited = sequence_ratio(log_ratio, lengths)
    if ratio == "sequence_token":
        limited = sequence_token_ratio(logprobs, limited)
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
