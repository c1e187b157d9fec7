"""Passes of a simulator policy in training, over one tensor of weights and one of slopes.

A step of a small policy is bound by the calls it makes, not by their arithmetic; autograd, a tensor for each parameter
and objects for distributions are most of these calls. Therefore an MLP goes forward and backward by hand, and so do
actions; only other networks are left to autograd::

    weights, gradient    [parameters] each; a parameter is a slice of the one, its slope the same slice of the other

Letters: N observations, O their size, K outputs (of all elements of an action), L layers of a trunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlplace.envs.contract import MultiDiscreteActions
from rlplace.models.mlp import HALF_LOG_2PI, ActorCritic, first_logits, log_shares
from rlplace.models.networks import NetworkPass, NetworkPolicy, Sequences

_ATEN = torch.ops.aten


class _Activation(NamedTuple):
    forward: Callable[[Tensor], Tensor]  # may overwrite what it is given
    # Of the slopes behind it, its input and its output
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]


# By the module that stands in a trunk. Where the input is overwritten, the slope follows from the output.
_ACTIVATIONS: dict[type[nn.Module], _Activation] = {
    nn.Tanh: _Activation(
        torch.tanh_, lambda slopes, _, output: _ATEN.tanh_backward(slopes, output)
    ),
    nn.ReLU: _Activation(
        torch.relu_,
        lambda slopes, _, output: _ATEN.threshold_backward(slopes, output, 0),
    ),
    nn.SiLU: _Activation(
        functional.silu, lambda slopes, given, _: _ATEN.silu_backward(slopes, given)
    ),
}


def flatten(module: nn.Module) -> Tensor:
    """Make the parameters of `module` slices of one new tensor, in their order, and return it."""
    flat = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(flat, module.parameters())
    return flat


def slices(flat: Tensor, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the slice of `flat` that belongs to each parameter, in its shape, by its name."""
    named = list(module.named_parameters())
    parts = flat.split([parameter.numel() for _, parameter in named])
    for (name, parameter), part in zip(named, parts, strict=True):
        yield name, part.view(parameter.shape)


class _Trunk:
    """One MLP: its layers' weights and biases, and where their slopes go."""

    def __init__(
        self, layers: nn.Sequential, weights: Sequence[Tensor], slopes: Sequence[Tensor]
    ) -> None:
        """`weights`, `slopes`: of each layer in turn, the matrix before the bias."""
        self._activation = _ACTIVATIONS[type(layers[1])] if len(layers) > 1 else None
        self._layers = list(
            zip(weights[0::2], weights[1::2], slopes[0::2], slopes[1::2], strict=True)
        )
        # What each layer was given, and that before its activation
        self._kept: list[tuple[Tensor, Tensor]] = []

    def forward(self, given: Tensor) -> Tensor:
        before = given
        kept = self._kept
        last = len(self._layers) - 1
        kept.clear()
        for at, (weight, bias, _, _) in enumerate(self._layers):
            kept.append((given, before))
            before = functional.linear(given, weight, bias)
            if at < last:
                given = self._activation.forward(before)  # type: ignore[union-attr]  # between layers there is one
        return before

    def backward(self, slopes: Tensor) -> None:
        """`slopes`: of what `forward` returned."""
        for at in range(len(self._layers) - 1, -1, -1):
            weight, _, of_weight, of_bias = self._layers[at]
            given, before = self._kept.pop()
            torch.mm(slopes.t(), given, out=of_weight)
            torch.sum(slopes, 0, out=of_bias)
            if at:
                slopes = self._activation.backward(slopes @ weight, before, given)  # type: ignore[union-attr]  # as above


class _Trunks:
    """Both trunks of an MLP."""

    def __init__(
        self,
        module: ActorCritic,
        weights: Mapping[str, Tensor],
        slopes: Mapping[str, Tensor],
    ) -> None:
        def trunk(name: str, layers: nn.Sequential) -> _Trunk:
            own = (
                [t for n, t in tensors.items() if n.startswith(f"{name}.")]
                for tensors in (weights, slopes)
            )
            return _Trunk(layers, *own)

        self._policy, self._value = (
            trunk("policy", module.policy),
            trunk("value", module.value),
        )
        self._dtype = next(iter(weights.values())).dtype

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        given = observations.to(self._dtype)
        return self._policy.forward(given).float(), self._value.forward(given)[
            :, 0
        ].float()

    def backward(self, outputs: Tensor, values: Tensor) -> None:
        self._policy.backward(outputs.to(self._dtype))
        self._value.backward(values.to(self._dtype)[:, None])


class Passes:
    """Forward and backward passes of a policy whose weights are slices of `weights`; slopes go into `gradient`."""

    def __init__(
        self, module: ActorCritic | NetworkPolicy, weights: Tensor, gradient: Tensor
    ) -> None:
        """Both are [parameters], of the dtype that is computed in."""
        of = dict(slices(weights, module))
        to = dict(slices(gradient, module))
        self._network: _Trunks | NetworkPass
        if isinstance(module, ActorCritic):
            self._network = _Trunks(module, of, to)
        else:
            self._network = NetworkPass(module, of, to)
        self._actions = module.actions
        self._log_std, self._log_std_slopes = of.get("log_std"), to.get("log_std")

    def forward(self, observations: Tensor | Sequences) -> tuple[Tensor, Tensor]:
        """Return outputs [N, K] and values [N] in float32, of `prepared` observations [N, O], or of sequences."""
        if isinstance(self._network, NetworkPass):
            return self._network.forward(observations)
        assert isinstance(observations, Tensor), "an MLP has no memory"
        return self._network.forward(observations)

    def actions(self, outputs: Tensor, actions: Tensor) -> ChosenActions:
        """Return what the policy says of actions taken: [N, 1] or [N, elements] choices, or [N, K] numbers."""
        if isinstance(self._actions, MultiDiscreteActions):
            return _ManyChoices(outputs, actions, self._actions)
        if self._log_std is None:
            return _Choices(outputs, actions)
        return _Numbers(outputs, self._log_std.float(), actions)

    def backward(
        self,
        chosen: ChosenActions,
        logprob_slopes: Tensor,
        entropy_slope: float,
        values: Tensor,
    ) -> None:
        """Write the gradient: of a loss with slopes [N] by log-probability and by value, and one by each entropy."""
        outputs, log_std = chosen.backward(logprob_slopes, entropy_slope)
        if self._log_std_slopes is not None:
            self._log_std_slopes.copy_(log_std)
        self._network.backward(outputs, values)


class _Choices:
    """Actions of a categorical policy."""

    def __init__(self, logits: Tensor, actions: Tensor) -> None:
        self._logs = logits.log_softmax(dim=-1)
        self._actions = actions
        self._shares = self._logs.exp()
        self.logprobs = self._logs.gather(-1, self._actions)[:, 0]  # [N]
        self.entropies = -(self._shares * self._logs).sum(dim=-1)  # [N]
        self._each = self.entropies[:, None]  # of the choice that a logit is of

    def backward(self, slopes: Tensor, entropy_slope: float) -> tuple[Tensor, Tensor]:
        """Return slopes of the logits, and nothing."""
        found = self._shares * -slopes[:, None]
        found.scatter_add_(-1, self._actions, slopes[:, None].expand_as(self._actions))
        if entropy_slope != 0.0:
            found.sub_(self._shares * (self._logs + self._each), alpha=entropy_slope)
        return found, slopes


class _ManyChoices(_Choices):
    """Actions of which each element is a choice."""

    def __init__(
        self, logits: Tensor, actions: Tensor, space: MultiDiscreteActions
    ) -> None:
        self._logs, self._actions = (
            log_shares(logits, space),
            actions + first_logits(space, actions.device),
        )
        self._shares = self._logs.exp()
        self.logprobs = self._logs.gather(-1, self._actions).sum(dim=-1)
        parts = (self._shares * self._logs).split(space.n, dim=-1)
        each = -torch.stack([part.sum(dim=-1) for part in parts], dim=-1)
        self.entropies = each.sum(dim=-1)
        self._each = each.repeat_interleave(
            torch.tensor(space.n, device=each.device), dim=-1
        )


class _Numbers:
    """Actions of independent normal distributions, whose deviations are the same for all observations."""

    def __init__(self, means: Tensor, log_std: Tensor, actions: Tensor) -> None:
        self._inverse, size, total = torch.exp(-log_std), log_std.numel(), log_std.sum()
        self._z = (actions - means).mul_(self._inverse)
        self._squares = self._z.square()
        # [N]
        self.logprobs = (
            self._squares.sum(dim=-1).mul_(-0.5).sub_(total + size * HALF_LOG_2PI)
        )
        self.entropies = (total + size * (0.5 + HALF_LOG_2PI)).expand(len(means))  # [N]

    def backward(self, slopes: Tensor, entropy_slope: float) -> tuple[Tensor, Tensor]:
        """Return slopes of the means and of the log deviations."""
        column = slopes[:, None]
        z = self._z
        log_std = (self._squares - 1.0).mul_(column).sum(dim=0)
        if entropy_slope != 0.0:
            log_std += entropy_slope * len(slopes)
        return z.mul_(self._inverse).mul_(column), log_std


ChosenActions = _Choices | _Numbers
