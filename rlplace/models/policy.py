"""Trained simulator policies for use outside of a run: `rlplace.load_policy`.

Letters: N observations, O observation shape, A action shape.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rlplace.codes import config_error
from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.envs.contract import (
    ContinuousActions,
    DiscreteActions,
    MultiDiscreteActions,
    Spaces,
)
from rlplace.envs.registry import spaces_of_job
from rlplace.models.exported import ExportedPolicy
from rlplace.models.flow import DenoisedOutput
from rlplace.models.given_observations import given_observations
from rlplace.models.mlp import PolicyOutput, mode, noise_shape, sample
from rlplace.models.networks import NetworkPolicy
from rlplace.models.policy_networks import PolicyNetwork, build_policy
from rlplace.models.saved_state import policy_tensors
from rlplace.trained import Trained


class Policy(ExportedPolicy):
    """A trained policy on the CPU. It takes observations as the simulator gives them, and normalises as in training.

    A policy with a memory keeps the memory of each row of a batch from one `act` to the next.

    `spaces`: shapes and dtypes of observations and actions of the simulator on which the policy was trained. `network`:
    the module inside, whose `forward` takes N observations, [N, *shape of an observation]. `low`, `high`: bounds of the
    elements of a continuous action. `first`: the first choice of each element of a discrete action, as the simulator
    counts it.
    """

    low: Tensor
    high: Tensor
    first: Tensor

    def __init__(
        self,
        network: PolicyNetwork,
        spaces: Spaces,
        config: SimulatorJobConfig,
        *,
        seed: int,
    ) -> None:
        super().__init__()
        self.network = network
        self.spaces = spaces.shown
        self.remembered = network.remembered
        self.config = config
        self._memory = torch.zeros((0, network.remembered))
        self._generator = torch.Generator().manual_seed(seed)
        # Bounds of continuous actions
        taken = spaces.taken_actions
        self._bounded = isinstance(taken, ContinuousActions)
        if isinstance(taken, ContinuousActions):
            low = torch.tensor(taken.low).view(taken.shape)
            high = torch.tensor(taken.high).view(taken.shape)
            self.register_buffer("low", low)
            self.register_buffer("high", high)
        # The network counts choices from 0
        first = _first_choices(spaces)
        self._shifted = first is not None
        if first is not None:
            self.register_buffer("first", first)

    def forward(self, observations: Tensor) -> Tensor:
        """Return the most probable actions for N observations, as the simulator takes them.

        Continuous actions are clamped to the bounds of their space. `observations`: [N, *shape of an observation].
        """
        return self._as_shown(self._within(mode(self.network(observations))))

    @torch.inference_mode()
    def act(
        self,
        observations: ArrayLike,
        deterministic: bool = True,
        begins: ArrayLike | None = None,
    ) -> NDArray[Any]:
        """Return an action for one observation, or N actions for a batch of N observations.

        An observation has the shape `spaces.observation_shape`. Actions are what the simulator takes: those of a
        discrete space are int64 and begin at the space's `start`; those of a continuous space are float32 and within
        the bounds of the space. A batch of N observations gives actions with N as their first dimension.

        `deterministic`: return the most probable actions; if False, sample actions, as in training. `begins`: whether
        an episode begins with the observation, as one bool or N bools; a policy with memory then forgets the memory of
        this row. None: all rows continue their episodes, unless the number of rows has changed.

        Raises ValueError for observations of another shape, for values that are not numbers or not finite, and for
        floating-point numbers if the policy was trained on bytes.
        """
        found = self.choose(observations, deterministic, begins)
        if self._shifted:
            return found + self.first.numpy()
        return found

    @torch.inference_mode()
    def choose(
        self,
        observations: ArrayLike,
        deterministic: bool = True,
        begins: ArrayLike | None = None,
    ) -> NDArray[Any]:
        """Return actions as `act` does, but those of a discrete space counted from 0, as simulators of a run take them.

        `observations`, `deterministic`, `begins`: as for `act`. Raises ValueError as `act` does.
        """
        given = given_observations(observations, self.spaces)
        shape = self.spaces.observation_shape
        batch = torch.tensor(given).reshape(-1, *shape)
        # Decide, with or without a memory of earlier steps
        remembered = self.network.remembered
        output = self._decided(batch, begins) if remembered else self.network(batch)
        actions = self._within(mode(output)) if deterministic else self._drawn(output)
        found: NDArray[Any] = actions.numpy()
        if given.ndim > len(shape):
            return found
        return found[0]

    def _decided(self, batch: Tensor, begins: ArrayLike | None) -> PolicyOutput:
        """Return the network's output for a batch, given the memory of each row, and keep the new memory.

        `begins`: whether an episode begins with the observation, as one bool or a bool for each row; the memory of this
        row is then emptied. None: all rows continue their episodes.
        """
        network = self.network
        assert isinstance(network, NetworkPolicy), "no other has a memory"
        # Another number of rows: nothing is remembered
        if len(self._memory) != len(batch):
            self._memory = torch.zeros((len(batch), network.remembered))
        elif begins is not None:
            empty = torch.from_numpy(
                np.broadcast_to(np.asarray(begins, bool), len(batch)).copy()
            )
            self._memory = self._memory.masked_fill(empty[:, None], 0.0)
        output, self._memory = network.decide(network.remembering(batch, self._memory))
        return output

    def _drawn(self, output: PolicyOutput) -> Tensor:
        """Return actions sampled from the distributions in `output`."""
        size = (len(output.values), *noise_shape(self.spaces.actions))
        draw = torch.randn if self._bounded else torch.rand
        noise = draw(size, generator=self._generator)
        actions, _ = sample(output, noise)
        if isinstance(output, DenoisedOutput):
            # The simulator takes the last of each chain
            actions = actions[:, -1]
        return self._within(actions)

    def _as_shown(self, actions: Tensor) -> Tensor:
        """Return actions with the choices of a discrete space as the simulator counts them."""
        if self._shifted:
            return actions + self.first
        return actions

    def _within(self, actions: Tensor) -> Tensor:
        """Return actions, clamped to the bounds if the action space is continuous."""
        if self._bounded:
            return torch.clamp(actions, self.low, self.high)
        return actions


def _first_choices(spaces: Spaces) -> Tensor | None:
    """Return the first choice of each element of an action, in the action's shape; None if all are 0."""
    actions = spaces.actions
    if isinstance(actions, DiscreteActions) and actions.first:
        return torch.tensor(actions.first)
    if isinstance(actions, MultiDiscreteActions) and actions.first:
        return torch.tensor(actions.first).view(actions.shape)
    return None


def policy_of(trained: Trained, *, seed: int, key: str) -> Policy:
    """Return a trained simulator policy, ready to act.

    `trained`: the config and the weights that were found. The simulator is made once, to find out its spaces. `seed`:
    seed of sampled actions. `key`: the argument or config key that errors name. Raises ConfigError for damaged weights,
    or for weights of a policy for another simulator.
    """
    config: SimulatorJobConfig = trained.config
    spaces = spaces_of_job(config)
    network = build_policy(spaces, config.actor, config.algorithm, config.runner.seed)
    # The weights must be those of a policy for the simulator as it is now
    expected = network.state_dict()
    found = {}
    for name, tensor in weights_of(trained, key).items():
        found[name] = shaped(tensor, expected.get(name))
    there = {name: tuple(tensor.shape) for name, tensor in found.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    odd = []
    for name in sorted(there.keys() | wanted.keys()):
        if there.get(name) != wanted.get(name):
            odd.append(name)
    if odd:
        raise config_error(
            "other-state",
            key,
            str(trained.weights),
            error="policy",
            name=odd[0],
            stored=there.get(odd[0], "missing"),
            wanted=wanted.get(odd[0], "missing"),
            simulator=config.env.id,
        )
    network.load_state_dict(found)
    network.requires_grad_(False).eval()
    return Policy(network, spaces, config, seed=seed).eval()


def weights_of(trained: Trained, key: str) -> dict[str, Tensor]:
    """Return name -> weight, read from a checkpoint or an exported file.

    `key`: the argument or config key that errors name. Raises ConfigError if the weights cannot be read.
    """
    if trained.checkpoint is not None:
        return dict(policy_tensors(trained.weights))
    try:
        return load_file(trained.weights)
    except (SafetensorError, OSError) as error:
        raise config_error(
            "checkpoint-damaged",
            key,
            str(trained.weights),
            error="exported",
            reason=str(error),
        ) from error


def shaped(stored: Tensor, expected: Tensor | None) -> Tensor:
    """Return `stored`, or its single number without a dimension if `expected` has no dimension.

    Checkpoints store a single number as a vector of length 1. `expected`: the module's tensor; None if the module has
    no such tensor.
    """
    single = expected is not None and not expected.dim() and stored.shape == (1,)
    if single:
        return stored.view([])
    return stored
