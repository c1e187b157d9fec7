"""Engine mismatch: engines sample by slightly other probabilities than the trainer computes. Measure and correct it.

Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training". Letters: N response tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlplace.algo.kl import kl_k3
from rlplace.metrics import Metric, Metrics


def importance_weights(trainer_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """Return [N] min(p_trainer / p_engine, cap), without gradient: truncated importance sampling (TIS).

    Both are of the policy version that sampled, before the first step on these tokens. The factor stands before the
    clipped surrogate, whose own ratio is then new / old of the trainer alone.
    """
    with torch.no_grad():
        return (trainer_logprobs - engine_logprobs).exp().clamp(max=cap)


def mismatch_metrics(trainer_logprobs: Tensor, engine_logprobs: Tensor, cap: float | None) -> Metrics:
    """Measure all response tokens of this rank in an iteration, possibly none. `cap` None: no correction is used.

    The KL is KL(engine || trainer) by the estimator k3, since the engine drew the tokens.
    """
    with torch.no_grad():
        log_ratio = (trainer_logprobs - engine_logprobs).double()
        apart = log_ratio.abs()
        capped = log_ratio > (math.inf if cap is None else math.log(cap))
        tokens = len(apart)
        sums = torch.stack([apart.sum(), kl_k3(log_ratio).sum(), capped.sum()]) / max(1, tokens)
        mean, kl, share = sums.tolist()
        return {
            "actor/mismatch": Metric(mean, weight=tokens),  # |log p_trainer - log p_engine|
            "actor/mismatch_max": Metric(float(apart.max()) if tokens else 0.0, "max"),
            "actor/mismatch_kl": Metric(kl, weight=tokens),
            "actor/mismatch_capped": Metric(share, weight=tokens),
        }
