"""Networks of off-policy algorithms: policies of SAC, CrossQ and TD3, their critics, and the values of DQN.

Policies put out elements of [-1, 1]; `Acting` scales them to the bounds of the action space.

Letters: N observations, O numbers of an observation, A elements of an action, n choices, E critics.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from rlplace.algo.off_policy import squashed_gaussian
from rlplace.config.blocks.off_policy import OffPolicyActorConfig, OffPolicyName
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.models import BUILDING
from rlplace.models.batch_renorm import BatchRenorm
from rlplace.models.exported import ExportedPolicy
from rlplace.models.given_observations import given_observations
from rlplace.models.mlp import ACTIVATIONS


class SquashedGaussian(nn.Module):
    """SAC's policy: means and log standard deviations of an action before tanh, [N, A] each.

    `renorm`: whether observations and hidden layers are batch-renormalised, as CrossQ does.
    """

    def __init__(
        self,
        numbers: int,
        elements: int,
        of: OffPolicyActorConfig,
        *,
        renorm: bool = False,
    ) -> None:
        super().__init__()
        widths = [numbers, *of.hidden]
        self.body = layers(widths, of.activation, ends=True, renorm=renorm)
        width = (numbers, *of.hidden)[-1]
        self.means = nn.Linear(width, elements)
        self.log_std = nn.Linear(width, elements)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(observations)
        return self.means(hidden), self.log_std(hidden)


class Deterministic(nn.Module):
    """TD3's policy: the action itself, [N, A]."""

    def __init__(self, numbers: int, elements: int, of: OffPolicyActorConfig) -> None:
        super().__init__()
        self.body = layers([numbers, *of.hidden, elements], of.activation)

    def forward(self, observations: Tensor) -> Tensor:
        action: Tensor = self.body(observations).tanh()
        return action


class GaussianAround(Deterministic):
    """IQL's policy: its mean action, [N, A], which acts; and a log standard deviation of each element, for learning."""

    def __init__(self, numbers: int, elements: int, of: OffPolicyActorConfig) -> None:
        super().__init__(numbers, elements, of)
        self.log_std = nn.Parameter(torch.zeros(elements))


class StateValue(nn.Module):
    """IQL's value of a state, [N]."""

    def __init__(self, numbers: int, of: OffPolicyActorConfig) -> None:
        super().__init__()
        self.body = layers([numbers, *of.widths_of_critics, 1], of.activation)

    def forward(self, observations: Tensor) -> Tensor:
        values: Tensor = self.body(observations)
        return values.squeeze(-1)


class ChoiceValues(nn.Module):
    """DQN's network: the value of each choice, [N, n]."""

    def __init__(self, numbers: int, choices: int, of: OffPolicyActorConfig) -> None:
        super().__init__()
        self.body = layers([numbers, *of.hidden, choices], of.activation)

    def forward(self, observations: Tensor) -> Tensor:
        values: Tensor = self.body(observations)
        return values


class Critics(nn.Module):
    """E critics of observations and actions, computed at once: `forward` returns their values, [E, N].

    `renorm`: whether inputs and hidden layers are batch-renormalised, as CrossQ does.
    """

    def __init__(
        self,
        numbers: int,
        elements: int,
        of: OffPolicyActorConfig,
        *,
        renorm: bool = False,
    ) -> None:
        super().__init__()
        widths = [numbers + elements, *of.widths_of_critics, 1]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for wide, narrow in itertools.pairwise(widths):
            # As torch initialises a Linear
            most = 1 / math.sqrt(wide)
            shape = (of.critics, wide, narrow)
            self.weights.append(nn.Parameter(torch.empty(shape).uniform_(-most, most)))
            bias = torch.empty(of.critics, 1, narrow).uniform_(-most, most)
            self.biases.append(nn.Parameter(bias))
        self.renormalised = nn.ModuleList()
        if renorm:
            self.renormalised.extend(BatchRenorm(w, (of.critics,)) for w in widths[:-1])
        self._between = ACTIVATIONS[of.activation]()
        self._normalised = of.layer_norm

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        inputs = torch.cat([observations, actions], -1)
        hidden = inputs.expand(len(self.weights[0]), *inputs.shape)
        last = len(self.weights) - 1
        for number, (weight, bias) in enumerate(
            zip(self.weights, self.biases, strict=True)
        ):
            if self.renormalised:
                hidden = self.renormalised[number](hidden)
            hidden = torch.baddbmm(bias, hidden, weight)
            if number < last:
                if self._normalised:
                    hidden = nn.functional.layer_norm(hidden, hidden.shape[-1:])
                hidden = self._between(hidden)
        return hidden.squeeze(-1)


def layers(
    widths: Sequence[int], activation: str, *, ends: bool = False, renorm: bool = False
) -> nn.Module:
    """Return linear layers of these widths, with activations between them; with `ends`, also after the last layer.

    `renorm`: batch-renormalise the inputs of each layer, and with `ends` also the outputs.
    """
    made: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        if renorm:
            made.append(BatchRenorm(wide))
        made += [nn.Linear(wide, narrow), ACTIVATIONS[activation]()]
    if made and not ends:
        made.pop()
    if ends and renorm:
        made.append(BatchRenorm(widths[-1]))
    return nn.Sequential(*made)


def new_policy(
    spaces: Spaces, name: OffPolicyName, of: OffPolicyActorConfig, seed: int
) -> nn.Module:
    """Return the network that acts, in evaluation mode. Equal arguments give equal weights in every process."""
    numbers = math.prod(spaces.observation_shape)
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(spaces.actions, DiscreteActions):
            return ChoiceValues(numbers, spaces.actions.n, of)
        elements = math.prod(spaces.actions.shape)
        if name in ("sac", "crossq"):
            renorm = name == "crossq"
            return SquashedGaussian(numbers, elements, of, renorm=renorm).eval()
        if name == "iql":
            return GaussianAround(numbers, elements, of)
        return Deterministic(numbers, elements, of)


def new_state_value(spaces: Spaces, of: OffPolicyActorConfig, seed: int) -> StateValue:
    """Return IQL's network of states. Equal arguments give equal weights in every process."""
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 2)
        return StateValue(math.prod(spaces.observation_shape), of)


def new_critics(
    spaces: Spaces, name: OffPolicyName, of: OffPolicyActorConfig, seed: int
) -> Critics:
    """Return the critics, in evaluation mode. Equal arguments give equal weights in every process."""
    assert isinstance(spaces.actions, ContinuousActions), "dqn has no critics"
    numbers = math.prod(spaces.observation_shape)
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        elements = math.prod(spaces.actions.shape)
        return Critics(numbers, elements, of, renorm=name == "crossq").eval()


def sent_tensors(policy: nn.Module) -> list[Tensor]:
    """Return the tensors that another copy of a policy needs: parameters, and statistics of its inputs."""
    return [*policy.parameters(), *policy.buffers()]


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """Return the numbers of tensors, one tensor after the other, as one axis."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@torch.no_grad()
def set_numbers(tensors: Sequence[Tensor], numbers: Tensor) -> None:
    """Set the numbers of tensors, in place, to those of `numbers`, as `joined` has them."""
    parts = numbers.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


class Acting:
    """A policy that acts. Observations and actions are in the form of the simulator.

    `spaces`: those of the simulator. `network`: one of the policies above; its current weights are used.
    """

    def __init__(
        self, network: nn.Module, spaces: Spaces, device: str = "cpu", seed: int = 0
    ) -> None:
        self.network = network
        self.spaces = spaces
        self._device = device
        self._random = np.random.default_rng(seed)
        if isinstance(spaces.actions, ContinuousActions):
            shape = spaces.actions.shape
            self._low = np.array(spaces.actions.low, np.float32).reshape(shape)
            self._high = np.array(spaces.actions.high, np.float32).reshape(shape)

    def act(
        self,
        observations: ArrayLike,
        deterministic: bool = True,
        begins: ArrayLike | None = None,
    ) -> NDArray[Any]:
        """Return an action for one observation, or N actions for N observations, in the form of the simulator.

        Choices are counted from the `start` of the action space; elements are within its bounds.

        `deterministic`: True: the action with the highest probability or value. False: SAC draws an action; TD3 and DQN
        do the same as for True, because only their training adds noise. `begins`: not used, because the policy has
        no memory. Raises ValueError for observations of another shape, and for values that are not finite numbers.
        """
        actions = self.choose(observations, deterministic)
        if isinstance(self.spaces.actions, DiscreteActions):
            return actions + self.spaces.actions.first
        return actions

    def choose(
        self,
        observations: ArrayLike,
        deterministic: bool = True,
        begins: ArrayLike | None = None,
    ) -> NDArray[Any]:
        """Return the same actions as `act`, but with choices counted from 0, as simulators of a run do.

        Raises ValueError as `act` does.
        """
        shown = given_observations(observations, self.spaces)
        single = shown.ndim == len(self.spaces.observation_shape)
        batch = shown[None] if single else shown
        noise = None
        if not deterministic and isinstance(self.network, SquashedGaussian):
            assert isinstance(self.spaces.actions, ContinuousActions)
            size = (len(batch), *self.spaces.actions.shape)
            noise = self._random.standard_normal(size, np.float32)
        actions = self.scaled(self.decide(batch, noise))
        if single:
            found: NDArray[Any] = actions[0]
            return found
        return actions

    @torch.no_grad()
    def decide(
        self, observations: NDArray[Any], noise: NDArray[np.float32] | None = None
    ) -> NDArray[Any]:
        """Return the network's actions: choices [N], or elements of [-1, 1] of the shape of an action.

        `noise`: [N, *A], standard normal numbers with which SAC's policy draws; None: the mean, after tanh.
        """
        rows = torch.from_numpy(observations.reshape(len(observations), -1))
        outputs = self.network(rows.to(self._device))
        if isinstance(self.spaces.actions, DiscreteActions):
            choices: NDArray[Any] = outputs.argmax(-1).cpu().numpy()
            return choices
        assert isinstance(self.spaces.actions, ContinuousActions)
        if isinstance(outputs, tuple):
            means, log_std = outputs
            outputs = means.tanh()
            if noise is not None:
                drawn = torch.from_numpy(noise.reshape(len(noise), -1))
                drawn = drawn.to(self._device)
                outputs = squashed_gaussian(means, log_std, drawn).actions
        found: NDArray[Any] = outputs.cpu().numpy()
        return found.reshape(len(observations), *self.spaces.actions.shape)

    def scaled(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return actions in the form of the simulator: elements of [-1, 1] are scaled to the bounds of the space."""
        if isinstance(self.spaces.actions, DiscreteActions):
            return actions
        middle = (self._high + self._low) / 2
        scaled: NDArray[Any] = middle + (self._high - self._low) / 2 * actions
        return scaled.clip(self._low, self._high)


class ActingProgram(ExportedPolicy):
    """The best actions of a policy for N observations, as the simulator takes them, without NumPy."""

    low: Tensor
    high: Tensor

    def __init__(self, network: nn.Module, spaces: Spaces) -> None:
        super().__init__()
        self.network = network
        self.spaces = spaces
        actions = spaces.actions
        if isinstance(actions, ContinuousActions):
            for name in ("low", "high"):
                bounds = torch.tensor(getattr(actions, name)).view(actions.shape)
                self.register_buffer(name, bounds)

    def forward(self, observations: Tensor) -> Tensor:
        actions = self.spaces.actions
        outputs = self.network(observations.flatten(1))
        if isinstance(actions, DiscreteActions):
            choices: Tensor = outputs.argmax(-1) + actions.first
            return choices
        assert isinstance(actions, ContinuousActions)
        if isinstance(outputs, tuple):
            outputs = outputs[0].tanh()
        best = outputs.unflatten(-1, actions.shape)
        scaled: Tensor = (self.high + self.low) / 2 + (self.high - self.low) / 2 * best
        return scaled.clamp(self.low, self.high)
