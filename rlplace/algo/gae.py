"""Generalised advantage estimation (GAE), over simulator steps and over response tokens.

Schulman et al. 2015 (arXiv:1506.02438): A_t = delta_t + gamma * lambda * A_{t+1}, where
delta_t = r_t + gamma * V(s_{t+1}) - V(s_t); returns are A_t + V(s_t).

Letters: T steps, B rows, K truncations; S samples, N response tokens of all of them, sample after sample, without those
that the environment wrote: the state after a response token is that before the next one, whatever came in between.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    *,
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    final_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, both [T, B], of rows whose episodes end and restart inside the batch.

    A terminated step has no successor, so V(s_{t+1}) is 0. At a truncated one it is the value of the observation the
    episode was cut at (Pardo et al. 2018, arXiv:1712.00378). Either way the sum stops there.

    `rewards`, `values`, `terminated`, `truncated` are [T, B], `last_values` [B] are of the observations after step T-1,
    `final_values` [K] of the observations at the cuts, in the order of `argwhere(truncated)`.
    """
    next_values = torch.cat([values[1:], last_values[None]])
    next_values[truncated] = final_values  # boolean indexing is in argwhere order
    deltas = rewards + gamma * next_values.masked_fill(terminated, 0.0) - values
    decay = gamma * gae_lambda * (~(terminated | truncated)).to(rewards.dtype)
    advantages = torch.empty_like(deltas)
    following = torch.zeros_like(last_values)
    for t in reversed(range(len(deltas))):
        following = deltas[t] + decay[t] * following
        advantages[t] = following
    return advantages, advantages + values


def token_gae(
    *, rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, [N] both; `rewards` and `values` [N], `lengths` [S] are response tokens.

    The value after a sample's last token is 0, also where a length cut the answer: the score is of the answer as it is.

    Samples differ in length, so the sum is found for all tokens at once, in log2 of the longest sample's steps. With
    the sum over the next n terms at every token, the sum over 2n is that plus the one n tokens on (Hillis and Steele
    1986, "Data parallel algorithms").
    """
    tokens = torch.arange(int(lengths.sum()), device=lengths.device)
    following = lengths.cumsum(0).repeat_interleave(lengths) - 1 - tokens  # [N] tokens of the sample after each token
    ahead = torch.cat([values[1:], values.new_zeros(1)]) if len(values) else values
    sums = rewards + gamma * torch.where(following > 0, ahead, 0.0) - values
    longest, reach, decay = int(following.max()) if len(following) else 0, 1, gamma * gae_lambda
    while reach <= longest and decay > 0.0:
        further = sums[reach:] * decay
        sums[:-reach] += further.masked_fill_(following[:-reach] < reach, 0.0)
        reach, decay = 2 * reach, decay * decay
    return sums, sums + values


def token_rewards(scores: Tensor, lengths: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Return [N] rewards: -kl_coef * kl at every token, plus the sample's score at its last one.

    Stiennon et al. 2020 (arXiv:2009.01325): R = r - beta * log(pi / rho), each token's KL where it arises.
    `scores` [S] of samples without response tokens are lost; `lengths` [S] are response tokens; `kl` [N] is an estimate
    for each token, of the estimators in `algo.kl` the unbiased k1 or k3.
    """
    tokens = int(lengths.sum())
    rewards = scores.new_zeros(tokens) if kl is None else -kl_coef * kl.to(scores.dtype)
    some = lengths > 0
    return rewards.index_add(0, lengths.cumsum(0)[some] - 1, scores[some])


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one, less for worse.

    0 where returns do not vary: there is nothing to explain.
    """
    varies = float(returns.double().var(correction=0)) if len(returns) else 0.0
    if varies == 0.0:
        return 0.0
    return 1.0 - float((returns.double() - values.double()).var(correction=0)) / varies
