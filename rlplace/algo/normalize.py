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
    """Number, mean and population variance of values of shape S; all are float64.

    `count`: []. `mean`, `var`: [*S].
    """

    count: Tensor
    mean: Tensor
    var: Tensor


def no_moments(
    shape: tuple[int, ...] = (), device: torch.device | str = "cpu"
) -> Moments:
    """Return the moments of an empty batch: count 0, mean 0, variance 1. `shape`: shape of one value."""
    return Moments(
        count=torch.zeros((), dtype=torch.float64, device=device),
        mean=torch.zeros(shape, dtype=torch.float64, device=device),
        var=torch.ones(shape, dtype=torch.float64, device=device),
    )


def shifted_sums(samples: Tensor, shift: Tensor) -> Tensor:
    """Return [1 + 2 * size] float64: count, sum and sum of squares of `samples - shift`. Sums of parts can be added up.

    `samples`: N samples of shape S, [N, *S]. `shift`: [*S], equal on all ranks. `size` is the number of elements of one
    sample. The shift should be near the mean, like the running mean; otherwise the sum of squares loses precision by
    cancellation (Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance").
    """
    centred = (samples.double() - shift).reshape(len(samples), shift.numel())
    number = float(len(samples))
    count = torch.full((1,), number, dtype=torch.float64, device=samples.device)
    return torch.cat([count, centred.sum(dim=0), centred.square().sum(dim=0)])


def merge(running: Moments, sums: Tensor) -> Moments:
    """Return the moments of all values together: those of `running` and those of a batch.

    `sums`: the `shifted_sums` of the batch, with `running.mean` as the shift. If the batch is empty, return `running`.
    Chan, Golub, LeVeque 1983: M2 = M2_a + M2_b + delta^2 * n_a n_b / (n_a + n_b).
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
    """Return the moments of all elements of `values`, a tensor of one dimension.

    To get the moments of values on several ranks, sum their `shifted_sums` over the ranks and `merge` the result.
    """
    nothing = no_moments((), values.device)
    return merge(nothing, shifted_sums(values, nothing.mean))


def normalized(
    values: Tensor, moments: Moments, least_deviation: float = LEAST_DEVIATION
) -> Tensor:
    """Return N `values` [N] minus the mean in `moments`, divided by the standard deviation in `moments`.

    `moments`: scalar moments of the values on all ranks. `least_deviation`: added to the deviation.
    """
    deviation = moments.var.sqrt() + least_deviation
    return ((values - moments.mean) / deviation).to(values.dtype)


class ReturnScale:
    """Divides rewards by the running deviation of the discounted return. It keeps each row's present return.

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
        """Return [T, B] scaled rewards, clipped to +-CLIP. The deviation by which they are divided includes this batch.

        `rewards`: [T, B], of T steps and the B rows of this rank. `done`: [T, B] bool, True at the last step of an
        episode, terminated or truncated. `sum_over_ranks`: returns the sum of a tensor over all ranks. All ranks must
        call this method, including ranks without rows.
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
