"""Advantages of samples relative to the others of their group or iteration, by the estimators of the field.

Letters: S samples of an iteration, G groups. A sample's advantage counts for each of its response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlplace.algo.normalize import LEAST_DEVIATION
from rlplace.tokens import Sample


class Outcomes(NamedTuple):
    """Rewards, groups and lengths of the samples of an iteration, of all ranks, in any order."""

    rewards: Tensor  # [S] float64
    groups: Tensor  # [S] int64 in 0 .. G - 1, equal for answers to the same prompt
    lengths: Tensor  # [S] int64, response tokens of each

    @classmethod
    def of(cls, groups: Sequence[Sequence[Sample]]) -> Outcomes:
        """Number whole groups one after another: their own numbers may repeat over iterations."""
        samples = [sample for group in groups for sample in group]
        sizes = torch.tensor([len(group) for group in groups], dtype=torch.int64)
        return cls(
            rewards=torch.tensor([s.reward for s in samples], dtype=torch.float64),
            groups=torch.repeat_interleave(sizes),
            lengths=torch.tensor([s.response_tokens for s in samples], dtype=torch.int64),
        )


Estimator = Callable[[Outcomes], Tensor]


def carries_signal(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of one group differ: without that its advantages are all zero.

    Yu et al. 2025 (DAPO, arXiv:2503.14476), section 3.2, sample other groups in place of those; here they are left out.
    """
    return bool(rewards) and min(rewards) < max(rewards)


def grpo(outcomes: Outcomes) -> Tensor:
    """Return [S] (r - mean) / std over the group (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    The paper leaves open which deviation: it is that of a sample here (n - 1), as implementations have it. Where all
    rewards of a group are equal, as in a group of one, nothing is better than anything else: zero.
    """
    size = _group_sizes(outcomes)
    centred = dr_grpo(outcomes)
    variance = _over_group(centred.square(), outcomes.groups) / (size - 1).clamp(min=1)
    return centred / (variance.sqrt() + LEAST_DEVIATION)


def dr_grpo(outcomes: Outcomes) -> Tensor:
    """Return [S] r - mean over the group: without the deviation, which weighs easy and hard prompts most.

    Liu et al. 2025 (arXiv:2503.20783), section 3.2; its other half is the constant of `token_weights`.
    """
    rewards, groups = outcomes.rewards, outcomes.groups
    mean = _over_group(rewards, groups) / _group_sizes(outcomes)
    return torch.where(_mixed(outcomes)[groups], rewards - mean, 0.0)  # the mean of equals may be rounded


def rloo(outcomes: Outcomes) -> Tensor:
    """Return [S] r less the mean reward of the *others* of its group; zero in a group of one, which has no others.

    Ahmadian et al. 2024 (arXiv:2402.14740), the RLOO estimator: r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1).
    """
    size = _group_sizes(outcomes)
    return dr_grpo(outcomes) * size / (size - 1).clamp(min=1)


def reinforce_pp(outcomes: Outcomes) -> Tensor:
    """Return [S] rewards normalised over all response tokens of the iteration, groups or not.

    Hu et al. 2025 (arXiv:2501.03262), global advantage normalisation: each token counts once, so long answers weigh
    more in mean and deviation. Where the KL from a reference is part of the reward, it is that of the whole answer at
    each of its tokens; the paper leaves out what came before the token, which changes no mean of gradients.
    """
    return _over_tokens(outcomes.rewards, outcomes.lengths)


def reinforce_pp_baseline(outcomes: Outcomes) -> Tensor:
    """Return [S] r - mean over the group, then normalised over all response tokens of the iteration.

    Hu et al. 2025 (arXiv:2501.03262), REINFORCE++ with baseline.
    """
    return _over_tokens(dr_grpo(outcomes), outcomes.lengths)


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": grpo,
    "dapo": grpo,  # it differs in clipping, averaging and which groups are kept
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def _mixed(outcomes: Outcomes) -> Tensor:
    """Return [G] bool: groups whose rewards are not all equal."""
    rewards, groups = outcomes.rewards, outcomes.groups
    highest = _per_group(groups).scatter_reduce(0, groups, rewards, "amax", include_self=False)
    lowest = _per_group(groups).scatter_reduce(0, groups, rewards, "amin", include_self=False)
    return highest > lowest


def _group_sizes(outcomes: Outcomes) -> Tensor:
    """Return [S] float64, the size of each sample's group."""
    return _over_group(torch.ones_like(outcomes.rewards), outcomes.groups)


def _over_group(values: Tensor, groups: Tensor) -> Tensor:
    """Return [S] the sum of each sample's group."""
    return _per_group(groups).index_add(0, groups, values)[groups]


def _per_group(groups: Tensor) -> Tensor:
    """Return [G] float64 zeros."""
    return torch.zeros(int(groups.max()) + 1 if len(groups) else 0, dtype=torch.float64)


def _over_tokens(values: Tensor, lengths: Tensor) -> Tensor:
    """Return [S] values centred and scaled as if each value stood `lengths` times in the batch."""
    share = lengths.double() / lengths.sum().clamp(min=1)
    centred = torch.where(lengths > 0, values - (share * values).sum(), 0.0)
    return centred / ((share * centred.square()).sum().sqrt() + LEAST_DEVIATION)
