"""Decisions of a simulator policy whose weights stay as they are for a while, in as few operations as possible.

A batch of a few observations takes about as long as the framework's calls for it, whatever it computes. Therefore all
that does not depend on observations is computed once for the weights, and modules and distributions are left out. The
results are those of `ActorCritic` and `sample`, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlplace.models.mlp import HALF_LOG_2PI, ActorCritic, output_of, sample

_IN_PLACE: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.Tanh: torch.tanh_,
    nn.ReLU: torch.relu_,
    nn.SiLU: lambda inputs: functional.silu(inputs, inplace=True),
}


class MlpDecisions:
    """Decides by the weights that `policy` has now; make another one when they have changed."""

    @torch.inference_mode()
    def __init__(self, policy: ActorCritic) -> None:
        linears = [layer for layer in policy.policy if isinstance(layer, nn.Linear)]
        self._size = linears[0].in_features
        self._outputs = linears[-1].out_features
        self._activate = (
            _IN_PLACE[type(policy.policy[1])] if len(policy.policy) > 1 else None
        )
        self._policy, self._value = _layers(policy.policy), _layers(policy.value)
        self._normalizer = policy.normalizer
        if policy.normalizer is not None:
            self._mean = policy.normalizer.mean.float()
            self._scale = torch.rsqrt(policy.normalizer.var.float() + 1e-8)
        self._actions, self._continuous = policy.actions, hasattr(policy, "log_std")
        if self._continuous:
            log_std = policy.log_std.float()
            self._std, self._precision = log_std.exp(), torch.exp(-log_std)
            self._constant = log_std.sum() + self._outputs * HALF_LOG_2PI

    def __call__(
        self, observations: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return actions, log-probabilities and values; call it in inference mode."""
        if self._normalizer is not None:
            bound = self._normalizer.CLIP
            observations = ((observations - self._mean) * self._scale).clamp_(
                -bound, bound
            )
        rows = observations.reshape(len(observations), self._size)
        outputs = self._through(self._policy, rows)
        values = self._through(self._value, rows)[:, 0]
        if not self._continuous:
            return *sample(
                output_of(self._actions, outputs, values, None), noise
            ), values
        actions = outputs + self._std * noise.reshape(outputs.shape)
        squares = ((actions - outputs) * self._precision).square_().sum(dim=-1)
        return actions.view(noise.shape), -0.5 * squares - self._constant, values

    def _through(self, layers: list[tuple[Tensor, Tensor]], rows: Tensor) -> Tensor:
        *hidden, (weight, bias) = layers
        for each, shift in hidden:
            rows = cast("Callable[[Tensor], Tensor]", self._activate)(
                torch.addmm(shift, rows, each)
            )
        return torch.addmm(bias, rows, weight)


def _layers(trunk: nn.Sequential) -> list[tuple[Tensor, Tensor]]:
    return [
        (layer.weight.t(), layer.bias)
        for layer in trunk
        if isinstance(layer, nn.Linear)
    ]
