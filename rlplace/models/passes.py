"""Forward and backward passes of a simulator policy in training, on flat tensors of weights and gradients.

A training step of a small policy is limited by the number of calls into torch, not by arithmetic. Most of these calls
come from autograd, from the many parameters, and from distribution objects. So an MLP and the distributions of actions
have manual backward passes here; only other networks use autograd::

    weights, gradient    [parameters] each; a parameter is a slice of the one, its gradient the same slice of the other

Letters: N observations, O their size, K outputs (of all elements of an action), L layers of a trunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlplace.envs.contract import MultiDiscreteActions
from rlplace.models.flow import NoiseSchedule
from rlplace.models.mlp import HALF_LOG_2PI, ActorCritic, choice_logprobs, first_logits
from rlplace.models.networks import FlowPolicy, NetworkPass, NetworkPolicy, Sequences

_ATEN = torch.ops.aten


class _Activation(NamedTuple):
    """An activation function with its manual backward pass.

    `forward`: the function; it may overwrite its input. `backward`: takes the gradient of the output, the input and the
    output, and returns the gradient of the input.
    """

    forward: Callable[[Tensor], Tensor]  # may overwrite its input
    # From the gradient of the output, the input and the output to the gradient of the input
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]


# By the module in a trunk. Where the input is overwritten, the gradient follows from the output.
_ACTIVATIONS: dict[type[nn.Module], _Activation] = {
    nn.Tanh: _Activation(
        torch.tanh_,
        lambda gradients, _, output: _ATEN.tanh_backward(gradients, output),
    ),
    nn.ReLU: _Activation(
        torch.relu_,
        lambda gradients, _, output: _ATEN.threshold_backward(gradients, output, 0),
    ),
    nn.SiLU: _Activation(
        functional.silu,
        lambda gradients, given, _: _ATEN.silu_backward(gradients, given),
    ),
}


def flatten(module: nn.Module) -> Tensor:
    """Move the parameters of `module` into one new flat tensor, and return this tensor.

    Afterwards, each parameter is a slice of the flat tensor, in the order of the parameters.
    """
    flat = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(flat, module.parameters())
    return flat


def slices(flat: Tensor, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, slice of `flat`) for each parameter of `module`; the slice has the parameter's shape."""
    first = 0
    for name, parameter in module.named_parameters():
        last = first + parameter.numel()
        yield name, flat[first:last].view(parameter.shape)
        first = last


class _Trunk:
    """One MLP: weights and biases of its layers, and the tensors for their gradients."""

    def __init__(
        self,
        layers: nn.Sequential,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> None:
        """Make an MLP from `layers`: linear layers with activations between them.

        `weights` and `gradients`: for each linear layer in turn, the matrix and then the bias.
        """
        # None for a trunk without hidden layers
        self._activation: _Activation | None = None
        if len(layers) > 1:
            self._activation = _ACTIVATIONS[type(layers[1])]
        # Of each layer: weight, bias, and the gradients of both
        self._layers: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for at in range(0, len(weights), 2):
            weight, bias = weights[at : at + 2]
            of_weight, of_bias = gradients[at : at + 2]
            self._layers.append((weight, bias, of_weight, of_bias))
        # Of each layer: its input, and that input before the activation
        self._kept: list[tuple[Tensor, Tensor]] = []

    def forward(self, given: Tensor) -> Tensor:
        """Return the K outputs of the last layer for each of N inputs, [N, K]; `given`: [N, numbers of an input]."""
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

    def backward(self, gradients: Tensor) -> None:
        """Write the gradients of all layers.

        `gradients` [inputs, outputs]: the gradient of the loss with respect to the result of the last `forward`.
        """
        for at in range(len(self._layers) - 1, -1, -1):
            weight, _, of_weight, of_bias = self._layers[at]
            given, before = self._kept.pop()
            # Gradients of weight and bias, written in place
            torch.mm(gradients.t(), given, out=of_weight)
            torch.sum(gradients, 0, out=of_bias)
            # Gradient of the layer before; the observations need none
            if at:
                gradients = self._activation.backward(gradients @ weight, before, given)  # type: ignore[union-attr]  # as above


class _Trunks:
    """The two MLPs of an MLP policy: one for the outputs of the policy, one for the value."""

    def __init__(
        self,
        module: ActorCritic,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> None:
        def trunk(name: str, layers: nn.Sequential) -> _Trunk:
            prefix = f"{name}."
            own_weights = []
            own_gradients = []
            for parameter, weight in weights.items():
                if parameter.startswith(prefix):
                    own_weights.append(weight)
                    own_gradients.append(gradients[parameter])
            return _Trunk(layers, own_weights, own_gradients)

        self._policy = trunk("policy", module.policy)
        self._value = trunk("value", module.value)
        self._dtype = next(iter(weights.values())).dtype

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs [N, K] and values [N] float32 for N observations, with K outputs of the policy."""
        given = observations.to(self._dtype)
        outputs = self._policy.forward(given).float()
        values = self._value.forward(given)[:, 0].float()
        return outputs, values

    def backward(self, outputs: Tensor, values: Tensor) -> None:
        """Write the gradients of all weights.

        `outputs` [observations, outputs], `values` [observations]: the gradients of the loss with respect to what the
        last `forward` has returned.
        """
        of_policy = outputs.to(self._dtype)
        of_value = values.to(self._dtype)[:, None]
        self._policy.backward(of_policy)
        self._value.backward(of_value)


class Passes:
    """Forward and backward passes of a policy in training.

    The policy's weights are slices of `weights`; gradients are written to `gradient`.
    """

    def __init__(
        self,
        module: ActorCritic | NetworkPolicy,
        weights: Tensor,
        gradient: Tensor,
    ) -> None:
        """Prepare passes of the policy `module`.

        `weights`, `gradient`: flat tensors [number of parameters], in the dtype of the computation.
        """
        of = dict(slices(weights, module))
        to = dict(slices(gradient, module))
        self._network: _Trunks | NetworkPass
        if isinstance(module, ActorCritic):
            self._network = _Trunks(module, of, to)
        else:
            self._network = NetworkPass(module, of, to)
        self._actions = module.actions
        self._schedule: NoiseSchedule | None = None
        if isinstance(module, FlowPolicy):
            self._schedule = module.schedule
        self._log_std = of.get("log_std")
        self._log_std_gradient = to.get("log_std")

    def forward(
        self, observations: Tensor | Sequences, actions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return outputs [N, K] and values [N] in float32, for N observations, with K outputs of the policy.

        `observations`: the result of the policy's `prepared`, or sequences for a policy with memory. `actions`: what
        was done at the N observations, as for the method `actions`. Only a policy by flow matching reads them.
        """
        if isinstance(self._network, NetworkPass):
            return self._network.forward(observations, actions)
        assert isinstance(observations, Tensor), "an MLP has no memory"
        return self._network.forward(observations)

    def actions(self, outputs: Tensor, actions: Tensor) -> ChosenActions:
        """Return log-probabilities and entropies of given actions, with their backward pass.

        `outputs` [N, K]: the outputs of the last `forward`. `actions`: choices [N, 1] or [N, elements], numbers [N, K],
        or chains of numbers [N, (1 + steps) * elements].
        """
        if self._schedule is not None:
            return _Chains(outputs, self._schedule, actions)
        if isinstance(self._actions, MultiDiscreteActions):
            return _ManyChoices(outputs, actions, self._actions)
        if self._log_std is None:
            return _Choices(outputs, actions)
        return _Numbers(outputs, self._log_std.float(), actions)

    def backward(
        self,
        chosen: ChosenActions,
        logprob_gradients: Tensor,
        entropy_gradient: float,
        values: Tensor,
    ) -> None:
        """Write the gradient of a loss with respect to all weights.

        `chosen`: the result of `actions` for the last `forward`. `logprob_gradients` [N]: the gradients of the loss
        with respect to the log-probabilities of N actions. `entropy_gradient`: the gradient of the loss with respect to
        the entropy of each observation. `values` [N]: the gradients of the loss with respect to values.
        """
        outputs, log_std = chosen.backward(logprob_gradients, entropy_gradient)
        if self._log_std_gradient is not None:
            self._log_std_gradient.copy_(log_std)
        self._network.backward(outputs, values)


class _Choices:
    """Log-probabilities and entropies of actions that are one choice each, with the backward pass."""

    def __init__(self, logits: Tensor, actions: Tensor) -> None:
        self._logs = logits.log_softmax(dim=-1)
        self._actions = actions
        self._probabilities = self._logs.exp()
        self.logprobs = self._logs.gather(-1, self._actions)[:, 0]  # [N]
        self.entropies = -(self._probabilities * self._logs).sum(dim=-1)  # [N]
        # Entropy of the choice that each logit belongs to
        self._each = self.entropies[:, None]

    def backward(
        self,
        gradients: Tensor,
        entropy_gradient: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of the loss with respect to the logits [N actions, K options]. The second tensor is not
        used.

        `gradients` [N]: gradients of the loss with respect to log-probabilities. `entropy_gradient`: gradient of the
        loss with respect to each entropy.
        """
        # d log p_t / d z = [t] - p
        found = self._probabilities * -gradients[:, None]
        found.scatter_add_(
            -1,
            self._actions,
            gradients[:, None].expand_as(self._actions),
        )
        # dH / d z = -p (log p + H)
        if entropy_gradient != 0.0:
            found.sub_(
                self._probabilities * (self._logs + self._each),
                alpha=entropy_gradient,
            )
        return found, gradients


class _ManyChoices(_Choices):
    """Log-probabilities and entropies of actions that are several independent choices each, with the backward pass."""

    def __init__(
        self,
        logits: Tensor,
        actions: Tensor,
        space: MultiDiscreteActions,
    ) -> None:
        self._logs = choice_logprobs(logits, space)
        self._actions = actions + first_logits(space, actions.device)
        self._probabilities = self._logs.exp()
        self.logprobs = self._logs.gather(-1, self._actions).sum(dim=-1)
        # Entropy [N, elements] of each choice, then repeated for each of its logits
        terms = self._probabilities * self._logs
        sums = [part.sum(dim=-1) for part in terms.split(space.n, dim=-1)]
        each = -torch.stack(sums, dim=-1)
        self.entropies = each.sum(dim=-1)
        repeats = torch.tensor(space.n, device=each.device)
        self._each = each.repeat_interleave(repeats, dim=-1)


class _Numbers:
    """Log-densities and entropies of actions from independent normal distributions, with the backward pass.

    The standard deviations are the same for all observations.
    """

    def __init__(
        self,
        means: Tensor,
        log_std: Tensor,
        actions: Tensor,
    ) -> None:
        self._inverse = torch.exp(-log_std)
        size = log_std.numel()
        total = log_std.sum()
        self._z = (actions - means).mul_(self._inverse)
        self._squares = self._z.square()
        # Log-density [N]: -0.5 z^2 - log std - 0.5 log(2 pi), summed over the elements
        exponents = self._squares.sum(dim=-1).mul_(-0.5)
        self.logprobs = exponents.sub_(total + size * HALF_LOG_2PI)
        self.entropies = (total + size * (0.5 + HALF_LOG_2PI)).expand(len(means))  # [N]

    def backward(
        self,
        gradients: Tensor,
        entropy_gradient: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the loss with respect to the means [N actions, K elements] and to the log standard
        deviations [K].

        `gradients` [N]: gradients of the loss with respect to log-probabilities. `entropy_gradient`: gradient of the
        loss with respect to each entropy.
        """
        column = gradients[:, None]
        z = self._z
        # d log p / d log std = z^2 - 1, and d H / d log std = 1
        log_std = (self._squares - 1.0).mul_(column).sum(dim=0)
        if entropy_gradient != 0.0:
            log_std += entropy_gradient * len(gradients)
        # d log p / d mean = z / std
        return z.mul_(self._inverse).mul_(column), log_std


class _Chains:
    """Log-densities and entropies of actions that were made from noise in k steps, with the backward pass.

    The entropies do not depend on the policy.
    """

    def __init__(
        self, velocities: Tensor, schedule: NoiseSchedule, chains: Tensor
    ) -> None:
        """`velocities` [N, k * E]: those at all x but the last. `chains` [N, (1 + k) * E]."""
        steps = schedule.steps
        elements = velocities.shape[1] // steps
        self._schedule = schedule
        self._normalised = schedule.normalised(
            velocities.view(-1, steps, elements), chains.view(-1, 1 + steps, elements)
        )
        self.logprobs = schedule.logprob(self._normalised)  # [N]
        self.entropies = torch.full_like(self.logprobs, schedule.entropy(elements))

    def backward(
        self,
        gradients: Tensor,
        entropy_gradient: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of the loss with respect to the velocities [N, k * E]. The second tensor is not used.

        `gradients` [N]: gradients of the loss with respect to log-probabilities. `entropy_gradient`: has no effect.
        """
        slopes = self._schedule.velocity_slopes(self._normalised)
        return (gradients[:, None, None] * slopes).flatten(1), gradients


ChosenActions = _Choices | _Numbers | _Chains
