"""Advantages: generalized advantage estimation (GAE) over steps and tokens, and rewards relative to other samples.

GAE, Schulman et al. 2015 (arXiv:1506.02438): A_t = delta_t + gamma * lambda * A_{t+1}, where delta_t = r_t + gamma *
V(s_{t+1}) - V(s_t); returns are A_t + V(s_t).

Letters: T steps, B rows, K truncated steps; S samples of an iteration in G groups; N response tokens of all samples,
sample after sample. Only tokens that the policy wrote are response tokens. If the environment wrote tokens between two
response tokens, they are skipped: the state after a response token is the state before the next response token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlplace.algo.normalize import LEAST_DEVIATION
from rlplace.tokens import ROUNDING, Sample, rewards_differ


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
    """Return advantages and returns by GAE, both [T, B], for T steps of B rows. Episodes may end within the steps.

    `rewards`, `values`, `terminated`, `truncated`: [T, B]. `last_values`: [B], values of the observations after the
    last step. `final_values`: [K], for each of K truncated steps the value of the episode's last observation, in the
    order of `argwhere(truncated)`. `gamma`: the discount. `gae_lambda`: lambda of GAE.

    A terminated step has no successor, so the value after it is 0. After a truncated step, the value is that of the
    episode's last observation (Pardo et al. 2018, arXiv:1712.00378). In both cases the sum over later steps stops.
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
    """Return advantages and returns by GAE, both [N], for N response tokens, sample after sample.

    `rewards`, `values`: [N]. `lengths`: [S], number of response tokens of each of S samples. `gamma`: the discount.
    `gae_lambda`: lambda of GAE. The value after a sample's last token is 0, also if the answer was cut by a length
    limit, because the score is for the answer as it is.

    The sums are computed for all tokens at once, in log2(longest sample) passes. If a pass has for each token the sum
    over the next n terms, the next pass adds the sum at the token n places later, which gives the sum over 2n terms
    (Hillis and Steele 1986, "Data parallel algorithms").
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
    """Return the rewards of N response tokens, [N]: -kl_coef * kl at each token, plus the sample's score at its last
    response token.

    Stiennon et al. 2020 (arXiv:2009.01325): R = r - beta * log(pi / rho), with each token's KL at that token.

    `scores`: [S], one for each of S samples; a sample without response tokens gets no reward. `lengths`: [S], number of
    response tokens of each sample. `kl`: [N], an estimate for each token by the unbiased estimators k1 or k3 of
    `algo.kl`; None: no KL.
    """
    rewards = scores.new_zeros(int(lengths.sum()))
    if kl is not None:
        rewards = -kl_coef * kl.to(scores.dtype)
    some = lengths > 0
    last = lengths.cumsum(0)[some] - 1
    return rewards.index_add(0, last, scores[some])


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns): how well a critic's values predict the returns.

    The result is 1 for a perfect critic, 0 for a constant value, and negative for values that are worse than a
    constant. If all returns are equal, or if there are no returns, the result is 0.
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
    """Rewards, groups and lengths of all S samples of an iteration, from all ranks, in any order.

    `rewards`: [S] float64. `groups`: [S] int64, index of the sample's group from 0 to G - 1; a group is the samples of
    one prompt. `lengths`: [S] int64, number of response tokens.
    """

    rewards: Tensor
    groups: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, groups: Sequence[Sequence[Sample]]) -> Outcomes:
        """Return the outcomes of all samples in `groups`, each of which is a complete group.

        Groups are numbered anew from 0, in their order, because their own numbers may repeat over iterations.
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
        """Return [S] float64: for each of the S samples the sum of `values` over the samples of its group. `values`:
        [S].
        """
        sums = self._per_group().index_add(0, self.groups, values)
        return sums[self.groups]

    def group_sizes(self) -> Tensor:
        """Return [S] float64: for each of the S samples the number of samples in its group."""
        return self.over_group(torch.ones_like(self.rewards))

    def mixed(self) -> Tensor:
        """Return [S] bool: for each of the S samples whether its group has samples with different rewards.

        Rewards that differ by the rounding of sums are equal.
        """
        high = self._end("amax")
        low = self._end("amin")
        largest = torch.maximum(high.abs(), low.abs()).clamp(min=1.0)
        return (high - low > ROUNDING * largest)[self.groups]

    def _end(self, end: str) -> Tensor:
        """Return the highest or the lowest reward of each of the G groups, [G].

        `end`: `amax` for the highest, `amin` for the lowest.
        """
        return self._per_group().scatter_reduce(
            0, self.groups, self.rewards, end, include_self=False
        )

    def _per_group(self) -> Tensor:
        """Return a new tensor of zeros, [G] float64, with one element for each of the G groups."""
        groups = 0
        if len(self.groups):
            groups = int(self.groups.max()) + 1
        return torch.zeros(groups, dtype=torch.float64)


def carries_signal(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of one group differ. If they do not differ, all advantages of the group are zero.

    Rewards that differ by the rounding of sums are equal.
    Yu et al. 2025 (DAPO, arXiv:2503.14476), section 3.2, replace groups with equal rewards by other groups.
    """
    return rewards_differ(rewards)


def grpo(outcomes: Outcomes) -> Tensor:
    """Return the advantages of all S samples, [S]: (r - mean) / std, for a sample with reward r, and mean and std of
    its group's rewards.

    The method is that of Shao et al. 2024 (arXiv:2402.03300, section 4.1.2). The paper does not say which deviation std
    is. Here it is the sample deviation (division by n - 1), as in common implementations. If all rewards of a group are
    equal, for example in a group of one sample, the advantages are zero.
    """
    centred = dr_grpo(outcomes)
    others = (outcomes.group_sizes() - 1).clamp(min=1)
    variance = outcomes.over_group(centred.square()) / others
    return centred / (variance.sqrt() + LEAST_DEVIATION)


def dr_grpo(outcomes: Outcomes) -> Tensor:
    """Return the advantages of all S samples, [S]: r - mean, for a sample with reward r, and the mean of its group's
    rewards.

    This is Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), section 3.2. Unlike GRPO, it does not divide by the deviation,
    which would give the most weight to very easy and very hard prompts. The other part of the method is the loss that
    `losses.token_weights` calls `constant`.
    """
    mean = outcomes.over_group(outcomes.rewards) / outcomes.group_sizes()
    # Exactly 0 for equal rewards: their mean may be rounded.
    return torch.where(outcomes.mixed(), outcomes.rewards - mean, 0.0)


def rloo(outcomes: Outcomes) -> Tensor:
    """Return the advantages of all S samples, [S]: reward minus the mean reward of all other samples of the group.

    In a group of one sample, the advantage is 0. Ahmadian et al. 2024 (arXiv:2402.14740), the RLOO estimator: r - (sum
    - r) / (n - 1) = (r - mean) * n / (n - 1).
    """
    size = outcomes.group_sizes()
    return dr_grpo(outcomes) * size / (size - 1).clamp(min=1)


def reinforce_pp(outcomes: Outcomes) -> Tensor:
    """Return the advantages of all S samples, [S]: rewards normalised by mean and deviation over all response tokens of
    the iteration.

    Hu et al. 2025 (arXiv:2501.03262), global advantage normalisation: each token counts once, so long answers have more
    weight in mean and deviation. Groups are not used. If the KL from a reference is part of the reward, each token gets
    the KL of the whole answer. The paper leaves out the KL of earlier tokens; this does not change the mean of the
    gradients.
    """
    return _over_tokens(outcomes.rewards, outcomes.lengths)


def reinforce_pp_baseline(outcomes: Outcomes) -> Tensor:
    """Return the advantages of all S samples, [S]: rewards minus the mean reward of the group, normalised over all
    response tokens.

    This is a variant of `reinforce_pp`, from the same paper (Hu et al. 2025, arXiv:2501.03262).
    """
    return _over_tokens(dr_grpo(outcomes), outcomes.lengths)


def _over_tokens(values: Tensor, lengths: Tensor) -> Tensor:
    """Return `values` [S], one for each of S samples, normalised to mean 0 and deviation 1, where each value is
    weighted by its sample's tokens.

    `lengths`: [S], number of response tokens of each sample; a sample without tokens gets 0.
    """
    share = lengths.double() / lengths.sum().clamp(min=1)
    mean = (share * values).sum()
    centred = torch.where(lengths > 0, values - mean, 0.0)
    deviation = (share * centred.square()).sum().sqrt()
    return centred / (deviation + LEAST_DEVIATION)


def distill(outcomes: Outcomes) -> Tensor:
    """Return zeros, [S]: nothing is learned from the rewards of the S samples, only from a teacher."""
    return torch.zeros_like(outcomes.rewards)


def distillation(
    log_ratio: Tensor, lengths: Tensor, coef: float, discount: float
) -> Tensor:
    """Return what a teacher adds to the advantages of N response tokens, [N].

    For a token t of a sample: coef * sum over k >= 0 of discount^k * log_ratio[t + k], up to the end of the sample.
    With discount 0, this is the token's own log-ratio (Thinking Machines 2025, "On-Policy Distillation"). With discount
    1, the policy gradient is that of the reverse KL of whole answers, KL(p || q) = E_p[sum of log p - log q].

    `log_ratio`: [N], log q - log p of each token, for the teacher q and the policy p that drew it. `lengths`: [S],
    number of response tokens of each sample. `coef`: weight of the teacher. `discount`: from 0 to 1.
    """
    no_values = torch.zeros_like(log_ratio)
    signals, _ = token_gae(
        coef * log_ratio, no_values, lengths, gamma=discount, gae_lambda=1.0
    )
    return signals


ESTIMATORS: Mapping[str, Callable[[Outcomes], Tensor]] = {
    "grpo": grpo,
    "dapo": grpo,  # it differs in clipping, averaging and which groups are kept
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "distill": distill,
}
