"""Normalisation of observations, rewards, scores and advantages by moments that merge exactly over ranks.

A batch is first reduced to three sums that simply add up over ranks; only then is it merged into the running moments.
The result therefore does not depend on how rows are spread.

Letters: N values, S scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

# Added to deviations: values that differ by rounding are not to look far apart.
LEAST_DEVIATION = 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Count, mean and population variance of values [N, *S], all float64."""

    count: Tensor  # []
    mean: Tensor  # [*S]
    var: Tensor  # [*S]


def no_moments(
    shape: tuple[int, ...] = (), device: torch.device | str = "cpu"
) -> Moments:
    """Return the moments of an empty batch: count 0, mean 0, variance 1. `shape`: *S, the shape of one value."""
    return Moments(
        count=torch.zeros((), dtype=torch.float64, device=device),
        mean=torch.zeros(shape, dtype=torch.float64, device=device),
        var=torch.ones(shape, dtype=torch.float64, device=device),
    )


def shifted_sums(samples: Tensor, shift: Tensor) -> Tensor:
    """Return [1 + 2 * size] float64: count, sum and sum of squares of `samples - shift`; additive over any split.

    `samples` is [N, *S], `shift` [*S]; size is the number of elements of S. A good shift is near the mean, such as the
    running mean, which is equal on all ranks: it keeps the sum of squares from cancelling (Chan, Golub, LeVeque 1983,
    "Algorithms for computing the sample variance").
    """
    centred = (samples.double() - shift).reshape(len(samples), shift.numel())
    number = float(len(samples))
    count = torch.full((1,), number, dtype=torch.float64, device=samples.device)
    return torch.cat([count, centred.sum(dim=0), centred.square().sum(dim=0)])


def merge(running: Moments, sums: Tensor) -> Moments:
    """Return the moments of the values of `running` and of a batch together.

    `sums`: the `shifted_sums` of the batch, shifted by `running.mean`. An empty batch changes nothing. Chan, Golub,
    LeVeque 1983: M2 = M2_a + M2_b + delta^2 * n_a n_b / (n_a + n_b).
    """
    count = sums[0]
    if float(count) == 0.0:
        return running
    total, squares = sums[1:].view(2, *running.mean.shape)
    delta = total / count  # batch mean minus running mean
    batch_m2 = squares - total * delta
    merged_count = running.count + count
    between = delta.square() * (running.count * count / merged_count)
    m2 = running.var * running.count + batch_m2 + between
    return Moments(
        count=merged_count,
        mean=running.mean + delta * (count / merged_count),
        var=(m2 / merged_count).clamp(min=0.0),
    )


def moments_of(values: Tensor) -> Moments:
    """Return the moments of all elements of one tensor [N].

    For values of several ranks, sum their `shifted_sums` over the ranks, and `merge` the result.
    """
    nothing = no_moments((), values.device)
    return merge(nothing, shifted_sums(values, nothing.mean))


def normalized(
    values: Tensor, moments: Moments, least_deviation: float = LEAST_DEVIATION
) -> Tensor:
    """Return [N]: `values` [N] less the mean, divided by the deviation.

    `moments` []: of all values over all ranks. `least_deviation`: added to the deviation.
    """
    deviation = moments.var.sqrt() + least_deviation
    return ((values - moments.mean) / deviation).to(values.dtype)


class ReturnScale:
    """Scales rewards by the running deviation of the discounted return. Keeps the discounted return of each row so far.

    Engstrom et al. 2020 (arXiv:2005.12729), section 3, "reward scaling": rewards are scaled, never shifted.
    """

    CLIP = 10.0  # scaled rewards beyond this are outliers of the first iterations

    def __init__(
        self, rows: int, gamma: float, device: torch.device | str = "cpu"
    ) -> None:
        self.moments = no_moments((), device)
        self._gamma = gamma
        self.returns = torch.zeros(rows, dtype=torch.float64, device=device)

    def __call__(
        self, rewards: Tensor, done: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return [T, B] scaled rewards. The deviation that scales them already includes this batch.

        `rewards`: [T, B] of T steps and the B rows of this rank. `done`: [T, B] bool, True at the last step of an
        episode, whether it ended or was cut. `sum_over_ranks`: returns the sum of a tensor over all ranks. All ranks
        must call this method, also ranks without rows.
        """
        returns = torch.empty(rewards.shape, dtype=torch.float64, device=rewards.device)
        for t, (reward, last) in enumerate(zip(rewards.double(), done, strict=True)):
            self.returns = self.returns * self._gamma + reward
            returns[t] = self.returns
            self.returns = torch.where(last, 0.0, self.returns)
        sums = sum_over_ranks(shifted_sums(returns.flatten(), self.moments.mean))
        self.moments = merge(self.moments, sums)
        scale = torch.sqrt(self.moments.var + 1e-8)
        return (rewards / scale.to(rewards.dtype)).clamp(-self.CLIP, self.CLIP)
