"""Batch renormalisation: batch normalisation whose result is that of the running statistics (Ioffe, arXiv:1702.03275).

Constants and warm-up are those of CrossQ (Bhatt et al., arXiv:1902.05605, and the code of its authors).

Letters: N samples, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MOMENTUM = 0.99  # share of the running statistics that stays
_EPSILON = 1e-3
_MOST_R = 3.0
_MOST_D = 5.0
# Passes in which it is plain batch normalisation, while the running statistics grow true
WARM_UP = 100_000


class BatchRenorm(nn.Module):
    """Normalises inputs [..., N, F] over the samples, with a scale and a shift for each feature.

    In training mode, the statistics are those of the batch, and the running statistics follow them. After the warm-up,
    the result is corrected to that of the running statistics, within bounds, and the gradient is that of the batch. In
    evaluation mode, the running statistics normalise. `leading`: the axes before the samples, such as the critics of an
    ensemble, which have statistics of their own.
    """

    mean: Tensor
    variance: Tensor
    passes: Tensor

    def __init__(self, features: int, leading: tuple[int, ...] = ()) -> None:
        super().__init__()
        shape = (*leading, 1, features)
        self.scale = nn.Parameter(torch.ones(shape))
        self.shift = nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))
        # A tensor of the same type as all others, since policies are sent as one array
        self.register_buffer("passes", torch.zeros((*leading, 1, 1)))

    def forward(self, inputs: Tensor) -> Tensor:
        mean = self.mean
        variance = self.variance
        if self.training:
            variance, mean = torch.var_mean(inputs, -2, correction=0, keepdim=True)
            corrected = self._corrected(mean, variance)
            self._follow(mean.detach(), variance.detach())
            mean, variance = corrected
        normalised = (inputs - mean) * torch.rsqrt(variance + _EPSILON)
        return normalised * self.scale + self.shift

    def _corrected(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance with which the batch is normalised to the result of the running statistics."""
        running = (self.variance + _EPSILON).sqrt()
        warm = self.passes >= WARM_UP
        r = (variance.detach() + _EPSILON).sqrt() / running
        r = r.clamp(1 / _MOST_R, _MOST_R)
        d = ((mean.detach() - self.mean) / running).clamp(-_MOST_D, _MOST_D)
        shifted = mean - d * variance.sqrt() / r
        return (
            torch.where(warm, shifted, mean),
            torch.where(warm, variance / r.square(), variance),
        )

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        self.mean.lerp_(mean, 1 - _MOMENTUM)
        self.variance.lerp_(variance, 1 - _MOMENTUM)
        self.passes += 1
