"""Fast decisions of an MLP policy whose weights do not change for a while.

For a batch of a few observations, the calls into torch take longer than their arithmetic. So everything that depends on
the weights alone is computed once, and modules and distribution objects are left out. Results equal those of
`ActorCritic` and `sample` bit for bit.
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
    """Decides with the weights that `policy` has when this object is made.

    After a change of the weights, make a new object.
    """

    @torch.inference_mode()
    def __init__(self, policy: ActorCritic) -> None:
        linears = [layer for layer in policy.policy if isinstance(layer, nn.Linear)]
        self._size = linears[0].in_features
        self._outputs = linears[-1].out_features
        # None for a trunk without hidden layers
        self._activate = None
        if len(policy.policy) > 1:
            self._activate = _IN_PLACE[type(policy.policy[1])]
        self._policy = _layers(policy.policy)
        self._value = _layers(policy.value)
        # Normalisation of observations: (x - mean) * scale
        self._normalizer = policy.normalizer
        if policy.normalizer is not None:
            self._mean = policy.normalizer.mean.float()
            self._scale = torch.rsqrt(policy.normalizer.var.float() + 1e-8)
        # Terms of the normal density that do not depend on observations
        self._actions = policy.actions
        self._continuous = hasattr(policy, "log_std")
        if self._continuous:
            log_std = policy.log_std.float()
            self._std = log_std.exp()
            self._precision = torch.exp(-log_std)
            self._constant = log_std.sum() + self._outputs * HALF_LOG_2PI

    def __call__(
        self,
        observations: Tensor,
        noise: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return actions, their log-probabilities [N] and values [N] for N observations, [N, *shape of an observation].

        `noise`: for choices uniform in [0, 1), one number for each logit; for continuous actions standard normal, one
        number for each element. To be called in inference mode.
        """
        if self._normalizer is not None:
            bound = self._normalizer.CLIP
            scaled = (observations - self._mean) * self._scale
            observations = scaled.clamp_(-bound, bound)
        # Both trunks
        rows = observations.reshape(len(observations), self._size)
        outputs = self._through(self._policy, rows)
        values = self._through(self._value, rows)[:, 0]
        if not self._continuous:
            output = output_of(self._actions, outputs, values, None)
            return *sample(output, noise), values
        # Sample from the normal distribution; log-density summed over the elements
        actions = outputs + self._std * noise.reshape(outputs.shape)
        z = (actions - outputs) * self._precision
        squares = z.square_().sum(dim=-1)
        logprobs = -0.5 * squares - self._constant
        return actions.view(noise.shape), logprobs, values

    def _through(self, layers: list[tuple[Tensor, Tensor]], rows: Tensor) -> Tensor:
        """Return the K outputs of one MLP for each of N rows of numbers, [N, K].

        `layers`: (transposed weight, bias) of each linear layer.
        """
        *hidden, (weight, bias) = layers
        activate = cast("Callable[[Tensor], Tensor]", self._activate)
        for each, shift in hidden:
            before = torch.addmm(shift, rows, each)
            rows = activate(before)
        return torch.addmm(bias, rows, weight)


def _layers(trunk: nn.Sequential) -> list[tuple[Tensor, Tensor]]:
    """Return (transposed weight, bias) of each linear layer. `trunk`: linear layers and activations."""
    layers: list[tuple[Tensor, Tensor]] = []
    for layer in trunk:
        if isinstance(layer, nn.Linear):
            layers.append((layer.weight.t(), layer.bias))
    return layers
