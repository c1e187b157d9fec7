"""KL divergences: their estimators from sampled tokens, and the controller of their weight.

Letters: N response tokens, drawn from p; q is the distribution that p is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

_LARGEST_ERROR = 0.2  # relative: one iteration far off moves the weight by no more


def kl_k1(log_ratio: Tensor) -> Tensor:
    """[N] log p - log q from log q - log p: unbiased, of either sign.

    Use it in the reward. In the loss its gradient is zero on average, so it would hold nothing back.
    """
    return -log_ratio


def kl_k2(log_ratio: Tensor) -> Tensor:
    """[N] half the squared log-ratio: biased, never negative.

    In the loss its gradient is on average that of KL(p || q), though its value is not.
    """
    return 0.5 * log_ratio.square()


def kl_k3(log_ratio: Tensor) -> Tensor:
    """[N] q / p - 1 - log(q / p): unbiased, never negative (Shao et al. 2024, arXiv:2402.03300).

    In the loss its gradient is on average that of KL(q || p), which is near KL(p || q) where p is near q.
    """
    return log_ratio.expm1() - log_ratio


KlEstimator = Callable[[Tensor], Tensor]  # of log q - log p
# KL(p || q) estimated from tokens of p: Schulman, "Approximating KL divergence" (2020).
KL_ESTIMATORS: Mapping[str, KlEstimator] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def next_kl_coef(kl_coef: float, *, kl: float, target: float, horizon: int, samples: int) -> float:
    """Return the weight for the next iteration, after one of `samples` with `kl` on average.

    Ziegler et al. 2019 (arXiv:1909.08593), section 2.2: e = clip((KL - target) / target, -0.2, 0.2) and
    beta = beta * (1 + K * e), a log-space proportional controller. K is samples / horizon here, as in the code that the
    paper was published with, so that neither batch size nor number of iterations changes how fast it adapts. KL is of
    whole answers: the sum over response tokens, averaged over samples.
    """
    error = min(max(kl / target - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
    return kl_coef * (1.0 + error * samples / horizon)
