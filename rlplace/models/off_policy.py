"""Networks of off-policy algorithms: policies of SAC and TD3, their critics, and the values of DQN.

Policies put out elements of [-1, 1]; `Acting` scales them to the bounds of the action space.

Letters: N observations, O numbers of an observation, A elements of an action, n choices, E critics.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from rlplace.algo.off_policy import squashed_gaussian
from rlplace.config.blocks.off_policy import OffPolicyActorConfig, OffPolicyName
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.models import BUILDING
from rlplace.models.mlp import ACTIVATIONS


class SquashedGaussian(nn.Module):
    """SAC's policy: means and log standard deviations of an action before tanh, [N, A] each."""

    def __init__(self, numbers: int, elements: int, of: OffPolicyActorConfig) -> None:
        super().__init__()
        self.body = layers([numbers, *of.hidden], of.activation, ends=True)
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


class ChoiceValues(nn.Module):
    """DQN's network: the value of each choice, [N, n]."""

    def __init__(self, numbers: int, choices: int, of: OffPolicyActorConfig) -> None:
        super().__init__()
        self.body = layers([numbers, *of.hidden, choices], of.activation)

    def forward(self, observations: Tensor) -> Tensor:
        values: Tensor = self.body(observations)
        return values


class Critics(nn.Module):
    """E critics of observations and actions, computed at once: `forward` returns their values, [E, N]."""

    def __init__(self, numbers: int, elements: int, of: OffPolicyActorConfig) -> None:
        super().__init__()
        widths = [numbers + elements, *of.hidden, 1]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for wide, narrow in itertools.pairwise(widths):
            # As torch initialises a Linear
            most = 1 / math.sqrt(wide)
            shape = (of.critics, wide, narrow)
            self.weights.append(nn.Parameter(torch.empty(shape).uniform_(-most, most)))
            bias = torch.empty(of.critics, 1, narrow).uniform_(-most, most)
            self.biases.append(nn.Parameter(bias))
        self._between = ACTIVATIONS[of.activation]()
        self._normalised = of.layer_norm

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        inputs = torch.cat([observations, actions], -1)
        hidden = inputs.expand(len(self.weights[0]), *inputs.shape)
        last = len(self.weights) - 1
        for number, (weight, bias) in enumerate(
            zip(self.weights, self.biases, strict=True)
        ):
            hidden = torch.baddbmm(bias, hidden, weight)
            if number < last:
                if self._normalised:
                    hidden = nn.functional.layer_norm(hidden, hidden.shape[-1:])
                hidden = self._between(hidden)
        return hidden.squeeze(-1)


def layers(widths: Sequence[int], activation: str, *, ends: bool = False) -> nn.Module:
    """Return linear layers of these widths, with activations between them; with `ends`, also after the last layer."""
    made: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        made += [nn.Linear(wide, narrow), ACTIVATIONS[activation]()]
    if made and not ends:
        made.pop()
    return nn.Sequential(*made)


def new_policy(
    spaces: Spaces, name: OffPolicyName, of: OffPolicyActorConfig, seed: int
) -> nn.Module:
    """Return the network that acts. Equal arguments give equal weights in every process."""
    numbers = math.prod(spaces.observation_shape)
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(spaces.actions, DiscreteActions):
            return ChoiceValues(numbers, spaces.actions.n, of)
        elements = math.prod(spaces.actions.shape)
        if name == "td3":
            return Deterministic(numbers, elements, of)
        return SquashedGaussian(numbers, elements, of)


def new_critics(spaces: Spaces, of: OffPolicyActorConfig, seed: int) -> Critics:
    """Return the critics of SAC and TD3. Equal arguments give equal weights in every process."""
    assert isinstance(spaces.actions, ContinuousActions), "dqn has no critics"
    numbers = math.prod(spaces.observation_shape)
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        return Critics(numbers, math.prod(spaces.actions.shape), of)


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
        no memory.
        """
        actions = self.choose(observations, deterministic)
        if isinstance(self.spaces.actions, DiscreteActions):
            return actions + self.spaces.actions.first
        return actions

    def choose(
        self, observations: ArrayLike, deterministic: bool = True
    ) -> NDArray[Any]:
        """Return the same actions as `act`, but with choices counted from 0, as simulators of a run do."""
        shown = np.asarray(observations, np.float32)
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
