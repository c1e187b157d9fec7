"""Advantages: generalized advantage estimation (GAE) over steps and tokens, and rewards relative to other samples.

GAE, Schulman et al. 2015 (arXiv:1506.02438): A_t = delta_t + gamma * lambda * A_{t+1}, where
delta_t = r_t + gamma * V(s_{t+1}) - V(s_t); returns are A_t + V(s_t).

Letters: T steps, B rows, K truncations; S samples of an iteration in G groups, N response tokens of all of them, sample
after sample, without those that the environment wrote: the state after a response token is that before the next one,
whatever came in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlplace.algo.normalize import LEAST_DEVIATION
from rlplace.tokens import Sample


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

    `gamma`: the discount. `gae_lambda`: lambda of GAE. `rewards`, `values`, `terminated`, `truncated` are [T, B].
    `last_values` [B] are of the observations after step T-1. `final_values` [K] are of the observations at which
    episodes were cut, in the order of `argwhere(truncated)`.

    A terminated step has no successor, so V(s_{t+1}) is 0. At a truncated step V(s_{t+1}) is the value of the
    observation at which the episode was cut (Pardo et al. 2018, arXiv:1712.00378). Either way the sum over later steps
    stops.
    """
    next_values = torch.cat([values[1:], last_values[None]])
    next_values[truncated] = final_values  # boolean indexing is in argwhere order
    # At the end of an episode the sum stops: the decay is 0 there.
    deltas = rewards + gamma * next_values.masked_fill(terminated, 0.0) - values
    decay = gamma * gae_lambda * (~(terminated | truncated)).to(rewards.dtype)
    advantages = torch.empty_like(deltas)
    following = torch.zeros_like(last_values)
    for t in reversed(range(len(deltas))):
        following = deltas[t] + decay[t] * following
        advantages[t] = following
    return advantages, advantages + values


def token_gae(
    rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, both [N]. `rewards`, `values`: [N]. `lengths`: [S] response tokens of each sample.

    `gamma`: the discount. `gae_lambda`: lambda of GAE. The value after a sample's last token is 0, also where a length
    limit cut the answer: the score is of the answer as it is.

    Samples differ in length, so the sum is found for all tokens at once, in log2 of the longest sample's steps. With
    the sum over the next n terms at every token, the sum over 2n terms is this sum plus the sum at the token n further
    on (Hillis and Steele 1986, "Data parallel algorithms").
    """
    # [N] how many tokens of the sample come after each token.
    tokens = torch.arange(int(lengths.sum()), device=lengths.device)
    following = lengths.cumsum(0).repeat_interleave(lengths) - 1 - tokens
    # The value after the last token of a sample is 0.
    ahead = values
    if len(values):
        ahead = torch.cat([values[1:], values.new_zeros(1)])
    sums = rewards + gamma * torch.where(following > 0, ahead, 0.0) - values

    # With each turn the sums reach twice as many terms ahead.
    longest = 0
    if len(following):
        longest = int(following.max())
    reach = 1
    decay = gamma * gae_lambda
    while reach <= longest and decay > 0.0:
        further = sums[reach:] * decay
        sums[:-reach] += further.masked_fill_(following[:-reach] < reach, 0.0)
        reach = 2 * reach
        decay = decay * decay
    return sums, sums + values


def token_rewards(
    scores: Tensor, lengths: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Return [N] rewards: -kl_coef * kl at every token, plus the sample's score at its last token.

    Stiennon et al. 2020 (arXiv:2009.01325): R = r - beta * log(pi / rho), with each token's KL at that token. `scores`:
    [S]; the score of a sample without response tokens is lost. `lengths`: [S] response tokens of each sample. `kl`: [N]
    an estimate for each token, by the unbiased estimators k1 or k3 of `algo.kl`; None: no KL.
    """
    rewards = scores.new_zeros(int(lengths.sum()))
    if kl is not None:
        rewards = -kl_coef * kl.to(scores.dtype)
    some = lengths > 0
    last = lengths.cumsum(0)[some] - 1
    return rewards.index_add(0, last, scores[some])


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns).

    It is 1 for a perfect critic, 0 for a constant value, and negative for a worse critic. It is also 0 if all returns
    are equal, or without returns.
    """
    if not len(returns):
        return 0.0
    varies = float(returns.double().var(correction=0))
    if varies == 0.0:
        return 0.0  # there is nothing to explain
    errors = returns.double() - values.double()
    return 1.0 - float(errors.var(correction=0)) / varies


# ── relative to other samples: an advantage counts for each response token of its sample ─────────────────────────────


class Outcomes(NamedTuple):
    """Rewards, groups and lengths of the samples of an iteration, of all ranks, in any order."""

    rewards: Tensor  # [S] float64
    groups: Tensor  # [S] int64 in 0 .. G - 1, equal for answers to the same prompt
    lengths: Tensor  # [S] int64, response tokens of each

    @classmethod
    def of(cls, groups: Sequence[Sequence[Sample]]) -> Outcomes:
        """Return the outcomes of whole groups, which are numbered from 0 in their order.

        The groups' own numbers are not used, because they may repeat over iterations.
        """
        rewards = []
        numbers = []
        lengths = []
        for number, group in enumerate(groups):
            for sample in group:
                rewards.append(sample.reward)
                numbers.append(number)
                lengths.append(sample.response_tokens)
        return cls(
            rewards=torch.tensor(rewards, dtype=torch.float64),
            groups=torch.tensor(numbers, dtype=torch.int64),
            lengths=torch.tensor(lengths, dtype=torch.int64),
        )

    def over_group(self, values: Tensor) -> Tensor:
        """Return [S] float64: for each sample the sum of `values` [S] over its group."""
        sums = self._per_group().index_add(0, self.groups, values)
        return sums[self.groups]

    def group_sizes(self) -> Tensor:
        """Return [S] float64: for each sample the number of samples in its group."""
        return self.over_group(torch.ones_like(self.rewards))

    def mixed(self) -> Tensor:
        """Return [S] bool: for each sample whether the rewards of its group differ."""
        return (self._end("amax") > self._end("amin"))[self.groups]

    def _end(self, end: str) -> Tensor:
        """Return [G]: the highest (`amax`) or lowest (`amin`) reward of each group."""
        return self._per_group().scatter_reduce(
            0, self.groups, self.rewards, end, include_self=False
        )

    def _per_group(self) -> Tensor:
        """Return [G] float64 zeros, one for each group."""
        groups = 0
        if len(self.groups):
            groups = int(self.groups.max()) + 1
        return torch.zeros(groups, dtype=torch.float64)


def carries_signal(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of one group differ; where they do not, all its advantages are zero.

    Yu et al. 2025 (DAPO, arXiv:2503.14476), section 3.2, sample other groups in place of groups without a difference.
    """
    return bool(rewards) and min(rewards) < max(rewards)


def grpo(outcomes: Outcomes) -> Tensor:
    """Return the advantages [S]: (r - mean) / std, where r is the sample's reward, and mean and std are over its group.

    The method is that of Shao et al. 2024 (arXiv:2402.03300, section 4.1.2).

    The paper does not say which deviation std is. Here it is the sample deviation (division by n - 1), as in common
    implementations. The advantage is zero where all rewards of a group are equal, as in a group of one.
    """
    centred = dr_grpo(outcomes)
    others = (outcomes.group_sizes() - 1).clamp(min=1)
    variance = outcomes.over_group(centred.square()) / others
    return centred / (variance.sqrt() + LEAST_DEVIATION)


def dr_grpo(outcomes: Outcomes) -> Tensor:
    """Return the advantages [S]: r - mean, where r is the sample's reward, and mean is over its group.

    A division by the deviation would give the most weight to easy and hard prompts. The method is that of Liu et al.
    2025 (arXiv:2503.20783), section 3.2; the other half of the method is the mean `constant` of `losses.token_weights`.
    """
    mean = outcomes.over_group(outcomes.rewards) / outcomes.group_sizes()
    # Exactly 0 for equal rewards: their mean may be rounded.
    return torch.where(outcomes.mixed(), outcomes.rewards - mean, 0.0)


def rloo(outcomes: Outcomes) -> Tensor:
    """Return the advantages [S]: the reward r less the mean reward of the group's other samples; 0 in a group of one.

    Ahmadian et al. 2024 (arXiv:2402.14740), the RLOO estimator: r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1).
    """
    size = outcomes.group_sizes()
    return dr_grpo(outcomes) * size / (size - 1).clamp(min=1)


def reinforce_pp(outcomes: Outcomes) -> Tensor:
    """Return the advantages [S]: rewards normalised over all response tokens of the iteration; groups do not matter.

    Hu et al. 2025 (arXiv:2501.03262), global advantage normalisation: each token counts once, so long answers weigh
    more in mean and deviation. Where the KL from a reference is part of the reward, each token gets the KL of the whole
    answer. The paper leaves out the KL of earlier tokens, which does not change the mean of gradients.
    """
    return _over_tokens(outcomes.rewards, outcomes.lengths)


def reinforce_pp_baseline(outcomes: Outcomes) -> Tensor:
    """Return the advantages [S]: rewards less the mean of the sample's group, then normalised as in `reinforce_pp`.

    This is a variant in the paper of `reinforce_pp`.
    """
    return _over_tokens(dr_grpo(outcomes), outcomes.lengths)


def _over_tokens(values: Tensor, lengths: Tensor) -> Tensor:
    """Return [S]: `values` [S] with mean 0 and deviation 1, each value counted as often as its sample has tokens.

    `lengths`: [S] response tokens of each sample; a sample without tokens gets 0.
    """
    share = lengths.double() / lengths.sum().clamp(min=1)
    mean = (share * values).sum()
    centred = torch.where(lengths > 0, values - mean, 0.0)
    deviation = (share * centred.square()).sum().sqrt()
    return centred / (deviation + LEAST_DEVIATION)


ESTIMATORS: Mapping[str, Callable[[Outcomes], Tensor]] = {
    "grpo": grpo,
    "dapo": grpo,  # it differs in clipping, averaging and which groups are kept
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}
