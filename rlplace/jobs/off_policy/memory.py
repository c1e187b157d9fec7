"""What the off-policy job takes of accelerators and hosts: networks and optimizers, and the replay memory."""

from __future__ import annotations

import dataclasses
import itertools
import math

from rlplace.config.blocks.off_policy import OffPolicyConfig
from rlplace.config.open_job import DeclaredMemory
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.placement.memory.replay import replay_bytes
from rlplace.placement.plan import Plan

_FLOAT32 = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """A network: how many numbers it has, in how many tensors."""

    numbers: int
    tensors: int

    @property
    def bytes(self) -> int:
        return _FLOAT32 * self.numbers

    @property
    def trained_bytes(self) -> int:
        """Bytes of gradients and of Adam's state: two moments, and a step count for each tensor."""
        return 3 * self.bytes + _FLOAT32 * self.tensors


def with_memory(
    config: OffPolicyConfig, plan: Plan, spaces: Spaces, demonstrations: int
) -> OffPolicyConfig:
    """Return a copy of the config that declares the bytes of each component, where the user has not done so.

    `demonstrations`: number of steps in the file of demonstrations; 0 without a file.
    """
    policy = _policy_size(config, spaces)
    known = {
        "rollout": DeclaredMemory(weights=policy.bytes, full=policy.bytes),
        "actor": _actor_memory(config, spaces, policy),
    }
    if "replay" in plan.placement.components:
        replay = config.blocks.replay
        ranks = max(1, plan.placement.world_size("replay"))
        steps = replay.capacity // ranks
        size = replay_bytes(spaces, steps, prioritised=replay.prioritised)
        size += replay_bytes(spaces, -(-demonstrations // ranks), prioritised=False)
        known["replay"] = DeclaredMemory(host=size)
    components = dict(config.components)
    for name, memory in known.items():
        if components[name].memory == DeclaredMemory():
            components[name] = dataclasses.replace(components[name], memory=memory)
    return dataclasses.replace(config, components=components)


def _policy_size(config: OffPolicyConfig, spaces: Spaces) -> _Size:
    """Return the size of the network that acts."""
    hidden = config.blocks.actor.hidden
    actions = spaces.actions
    outputs = math.prod(getattr(actions, "shape", ()))
    if isinstance(actions, DiscreteActions):
        outputs = actions.n
    elif config.blocks.algorithm.name == "sac":
        # Means and log standard deviations have a layer each
        body = _layers((math.prod(spaces.observation_shape), *hidden))
        width = (math.prod(spaces.observation_shape), *hidden)[-1]
        return _Size(
            numbers=body.numbers + 2 * (width + 1) * outputs, tensors=body.tensors + 4
        )
    return _layers((math.prod(spaces.observation_shape), *hidden, outputs))


def _actor_memory(
    config: OffPolicyConfig, spaces: Spaces, policy: _Size
) -> DeclaredMemory:
    algorithm = config.blocks.algorithm
    if not isinstance(spaces.actions, ContinuousActions):
        # DQN: the network and its target
        weights = 2 * policy.bytes
        return DeclaredMemory(weights=weights, full=weights + policy.trained_bytes)
    of = config.blocks.actor
    inputs = math.prod(spaces.observation_shape) + math.prod(spaces.actions.shape)
    one = _layers((inputs, *of.hidden, 1))
    critics = _Size(numbers=of.critics * one.numbers, tensors=one.tensors)
    weights = policy.bytes + 2 * critics.bytes
    trained = policy.trained_bytes + critics.trained_bytes
    if algorithm.name == "td3":
        weights += policy.bytes
    elif algorithm.temperature == "auto":
        temperature = _Size(numbers=1, tensors=1)
        weights += temperature.bytes
        trained += temperature.trained_bytes
    return DeclaredMemory(weights=weights, full=weights + trained)


def _layers(widths: tuple[int, ...]) -> _Size:
    """Return the size of linear layers with biases."""
    numbers = sum((wide + 1) * narrow for wide, narrow in itertools.pairwise(widths))
    return _Size(numbers=numbers, tensors=2 * (len(widths) - 1))
