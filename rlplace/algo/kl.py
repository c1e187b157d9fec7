"""How far two policies are apart: KL estimators, the controller of the KL's weight, engine against trainer.

Letters: N response tokens, drawn from p; q is the distribution that p is compared with. Estimators of KL(p || q) from
these tokens (Schulman, "Approximating KL divergence", 2020), and whose gradient each has on average in a loss::

    k1  log p - log q            unbiased, of either sign    none: use it in the reward
    k2  (log p - log q)^2 / 2    biased, never negative      KL(p || q)
    k3  q / p - 1 - log(q / p)   unbiased, never negative    KL(q || p), which is near KL(p || q) where p is near q

k3 is that of Shao et al. 2024 (arXiv:2402.03300).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rlplace.metrics import Metric, Metrics

# Relative error of the KL that changes its weight most: larger ones count as this.
_LARGEST_ERROR = 0.2

# Largest logarithm of a ratio of probabilities: one that is larger counts as this one
MOST_LOG_RATIO = 20.0

KlEstimator = Callable[[Tensor], Tensor]  # [N] of log q - log p


def finite_ratio_log(log_ratio: Tensor) -> Tensor:
    """Return logarithms of ratios, none of them above MOST_LOG_RATIO, so that their exponentials are finite.

    One infinite ratio would make the gradient of a whole step NaN: its factor may be 0. A ratio beyond the bound has
    no gradient. `log_ratio`: of any shape.
    """
    return log_ratio.clamp(max=MOST_LOG_RATIO)


def kl_k3(log_ratio: Tensor) -> Tensor:
    """Return [N]: the estimate k3 of KL(p || q) at each of N tokens that were drawn from p.

    `log_ratio`: [N], log q - log p of each token; see `finite_ratio_log`.
    """
    log_ratio = finite_ratio_log(log_ratio)
    return log_ratio.expm1() - log_ratio


KL_ESTIMATORS: Mapping[str, KlEstimator] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": kl_k3,
}


def next_kl_coef(
    kl_coef: float, kl: float, samples: int, target: float, horizon: int
) -> float:
    """Return the weight of the KL (beta) for the next iteration, which moves the KL towards `target`.

    `kl_coef`: the weight in the last iteration. `kl`: the KL of a whole answer (its sum over response tokens), averaged
    over the last iteration's `samples` samples. `target`: the KL to reach. `horizon`: the number of samples over which
    the weight adapts.

    Ziegler et al. 2019 (arXiv:1909.08593), section 2.2: e = clip((KL - target) / target, -0.2, 0.2) and beta = beta *
    (1 + K * e), a log-space proportional controller. Here K is samples / horizon, as in the code published with the
    paper, so that neither the batch size nor the number of iterations changes how fast beta adapts.
    """
    error = min(max(kl / target - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
    return kl_coef * (1.0 + error * samples / horizon)


# ── engines sample by slightly other probabilities than the trainer computes ─────────────────────────────────────────
# Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"


class Correction(NamedTuple):
    """Bounds of the importance weights that correct the difference between engine and trainer.

    A weight is p_trainer / p_engine of one token or, with the level `sequence`, the product of these ratios over a
    sequence. TRL's `sequence_mask` leaves out sequences above the cap; IcePop (Ling team 2025, "Every Step Evolves",
    arXiv:2510.18855) leaves out tokens above the cap or below the floor.

    `cap`: upper bound. `level`: "token" or "sequence". `above`: what weights above the cap become: with "cap", the cap;
    with "drop", 0.
    `floor`: weights below it become 0; None: no lower bound.
    """

    cap: float
    level: str = "token"
    above: str = "cap"
    floor: float | None = None


class Corrected(NamedTuple):
    """The importance weights of N tokens, within bounds.

    `weights`: [N]. `cut`: [N] bool, tokens with a weight that was above the cap or below the floor.
    """

    weights: Tensor
    cut: Tensor


@torch.no_grad()
def importance_weights(
    trainer_logprobs: Tensor,
    engine_logprobs: Tensor,
    lengths: Tensor,
    correction: Correction,
) -> Corrected:
    """Return the importance weight p_trainer / p_engine of each of N tokens, within the bounds of `correction`.

    With only an upper bound, this is truncated importance sampling (TIS): min(p_trainer / p_engine, cap). The weights
    carry no gradient. The loss multiplies the clipped surrogate by the weight; the ratio inside the surrogate is then
    new / old probability, both by the trainer. Tokens with weight 0 still count in means.

    `trainer_logprobs`, `engine_logprobs`: [N], both by the policy version that sampled the tokens, before the first
    optimizer step on these tokens. `lengths`: [s], number of tokens of each of s sequences.
    """
    log_ratio = trainer_logprobs - engine_logprobs
    if correction.level == "sequence":
        # Each token has the ratio of its whole sequence.
        sequence = torch.repeat_interleave(lengths, output_size=len(log_ratio))
        sums = log_ratio.new_zeros(len(lengths)).index_add(0, sequence, log_ratio)
        log_ratio = sums[sequence]
    above = log_ratio > math.log(correction.cap)
    weights = log_ratio.exp().clamp(max=correction.cap)
    left_out = torch.zeros_like(above)
    if correction.above == "drop":
        left_out = above
    if correction.floor is not None:
        below = log_ratio < math.log(correction.floor)
        above = above | below
        left_out = left_out | below
    return Corrected(weights.masked_fill(left_out, 0.0), above)


@torch.no_grad()
def mismatch_metrics(
    trainer_logprobs: Tensor, engine_logprobs: Tensor, on_policy: Tensor, cut: Tensor
) -> Metrics:
    """Return metrics of the difference between `trainer_logprobs` and `engine_logprobs`.

    Both are [N], for the response tokens of this rank in an iteration; N may be 0. `on_policy`: [N] bool, tokens that
    were sampled with the weights that the trainer has now. Only these tokens enter the metrics of the difference;
    without such tokens, the metrics have weight 0. `cut`: [N] bool, tokens with an importance weight that was changed
    by a bound. The KL is KL(engine || trainer) by the estimator k3, because the engine drew the tokens.
    """
    log_ratio = (trainer_logprobs - engine_logprobs).double()
    share = float(cut.sum()) / max(1, len(cut))
    same = log_ratio[on_policy]
    tokens = len(same)
    apart = same.abs()
    sums = torch.stack([apart.sum(), kl_k3(same).sum()])
    mean, kl = (sums / max(1, tokens)).tolist()
    most = 0.0
    if tokens:
        most = float(apart.max())
    return {
        "actor/mismatch": Metric(mean, weight=tokens),  # |log p_trainer - log p_engine|
        "actor/mismatch_max": Metric(most, "max", weight=tokens),
        "actor/mismatch_kl": Metric(kl, weight=tokens),
        "actor/mismatch_capped": Metric(share, weight=len(cut)),  # of all tokens
    }
