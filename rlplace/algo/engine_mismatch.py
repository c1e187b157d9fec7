"""The engine samples by slightly other probabilities than the trainer computes: how far apart, and what corrects it.

Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training". Letters: N learned tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlplace.algo.losses import kl_divergence
from rlplace.metrics import Metric, Metrics


def importance_weights(trainer_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """[N] min(p_trainer / p_engine, cap), without gradient: truncated importance sampling (TIS).

    Both are of the policy version that sampled, before the first step on these tokens. The factor stands before the
    clipped surrogate, whose own ratio is then new / old of the trainer alone.
    """
    with torch.no_grad():
        return (trainer_logprobs - engine_logprobs).exp().clamp(max=cap)


def mismatch_metrics(trainer_logprobs: Tensor, engine_logprobs: Tensor, cap: float | None) -> Metrics:
    """Of all tokens this rank learns in an iteration, possibly none; they reduce over ranks. `cap` None: none is used.

    The divergence is KL(engine || trainer) by the estimator k3, since the engine drew the tokens.
    """
    with torch.no_grad():
        log_ratio = (trainer_logprobs - engine_logprobs).double()
        apart = log_ratio.abs()
        capped = log_ratio > (math.inf if cap is None else math.log(cap))
        tokens = len(apart)
        sums = torch.stack([apart.sum(), kl_divergence(log_ratio).sum(), capped.sum()]) / max(1, tokens)
        mean, divergence, share = sums.tolist()
        return {
            "actor/mismatch": Metric(mean, weight=tokens),  # |log p_trainer - log p_engine|
            "actor/mismatch_max": Metric(float(apart.max()) if tokens else 0.0, "max"),
            "actor/mismatch_kl": Metric(divergence, weight=tokens),
            "actor/mismatch_capped": Metric(share, weight=tokens),
        }
