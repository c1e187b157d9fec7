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

KlEstimator = Callable[[Tensor], Tensor]  # [N] of log q - log p


def kl_k3(log_ratio: Tensor) -> Tensor:
    """Return [N]: the estimate k3 of KL(p || q) at each token.

    `log_ratio`: [N] of log q - log p.
    """
    return log_ratio.expm1() - log_ratio


KL_ESTIMATORS: Mapping[str, KlEstimator] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": kl_k3,
}


def next_kl_coef(
    kl_coef: float, kl: float, samples: int, target: float, horizon: int
) -> float:
    """Return the weight of the KL for the next iteration.

    `kl_coef`: the weight in the last iteration. `kl`: the KL of a whole answer in that iteration, the sum over response
    tokens, averaged over its `samples`. `target`: the KL to reach. `horizon`: the samples over which the weight adapts.

    Ziegler et al. 2019 (arXiv:1909.08593), section 2.2: e = clip((KL - target) / target, -0.2, 0.2) and beta = beta *
    (1 + K * e), a log-space proportional controller. K is samples / horizon here, as in the code that the paper was
    published with, so that neither batch size nor number of iterations changes how fast beta adapts.
    """
    error = min(max(kl / target - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
    return kl_coef * (1.0 + error * samples / horizon)


# ── engines sample by slightly other probabilities than the trainer computes ─────────────────────────────────────────
# Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"


class Correction(NamedTuple):
    """Bounds of importance weights.

    A weight is p_trainer / p_engine of one token or, with the level `sequence`, the product of these ratios over a
    sequence. TRL's `sequence_mask` leaves out sequences above the cap; IcePop (Ling team 2025, "Every Step Evolves",
    arXiv:2510.18855) leaves out tokens that are above the cap or below the floor.
    """

    cap: float
    level: str = "token"  # token | sequence
    # Weights above the cap: cap, they become the cap | drop, they become 0.
    above: str = "cap"
    # Weights below become 0; None: no bound.
    floor: float | None = None


class Corrected(NamedTuple):
    """Importance weights of tokens, and the tokens whose weight a bound has changed."""

    weights: Tensor  # [N]
    cut: Tensor  # [N] bool, above the cap or below the floor


@torch.no_grad()
def importance_weights(
    trainer_logprobs: Tensor,
    engine_logprobs: Tensor,
    lengths: Tensor,
    correction: Correction,
) -> Corrected:
    """Return the importance weight p_trainer / p_engine of each token, within the bounds of `correction`.

    With a cap alone this is truncated importance sampling (TIS): min(p_trainer / p_engine, cap). The weights have no
    gradient. `trainer_logprobs`, `engine_logprobs`: [N] of the policy version that sampled, before the first step on
    these tokens. `lengths`: [s] tokens of each sequence.

    The loss multiplies the clipped surrogate by the weight. The ratio in the surrogate is then new / old probability of
    the trainer alone. Tokens of weight 0 still count in means.
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

    Both are [N], of this rank's response tokens in an iteration, possibly none. `on_policy`: [N] bool, tokens that were
    sampled under the version that the trainer has. Only these tokens show the difference of engine and trainer under
    the same weights. An iteration without these tokens has no weight in the metrics of the difference. `cut`: [N] bool,
    tokens whose weight the correction has changed. The KL is KL(engine || trainer) by the estimator k3, because the
    engine drew the tokens.
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
