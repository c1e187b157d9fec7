"""What the off-policy job takes of accelerators and hosts: networks and optimizers, and the replay memory."""

from __future__ import annotations

import dataclasses
import math

from rlplace.config.blocks.off_policy import OffPolicyConfig
from rlplace.config.open_job import DeclaredMemory
from rlplace.envs.contract import ContinuousActions, Spaces
from rlplace.placement.memory.off_policy import (
    NetworkSize,
    critics_size,
    layers,
    policy_size,
)
from rlplace.placement.memory.policies import outputs_of
from rlplace.placement.memory.replay import replay_bytes
from rlplace.placement.plan import Plan


def with_memory(config: OffPolicyConfig, plan: Plan, spaces: Spaces) -> OffPolicyConfig:
    """Return a copy of the config that declares the bytes of each component, where the user has not done so."""
    inputs = math.prod(spaces.observation_shape)
    outputs = outputs_of(spaces.actions)
    name = config.blocks.algorithm.name
    policy = policy_size(name, inputs, config.blocks.actor.hidden, outputs)
    known = {
        "rollout": DeclaredMemory(weights=policy.bytes, full=policy.bytes),
        "actor": _actor_memory(config, spaces, policy),
    }
    if "replay" in plan.placement.components:
        replay = config.blocks.replay
        ranks = max(1, plan.placement.world_size("replay"))
        steps = config.blocks.kept_steps // ranks
        size = replay_bytes(spaces, steps, prioritised=replay.prioritised)
        if replay.demonstrations is not None:
            # Imported here: a plan without demonstrations needs no NumPy
            from rlplace.envs.recorded import steps_in

            each = -(-steps_in(replay.demonstrations) // ranks)
            size += replay_bytes(spaces, each, prioritised=False)
        known["replay"] = DeclaredMemory(host=size)
    components = dict(config.components)
    for component, memory in known.items():
        if components[component].memory == DeclaredMemory():
            block = components[component]
            components[component] = dataclasses.replace(block, memory=memory)
    return dataclasses.replace(config, components=components)


def _actor_memory(
    config: OffPolicyConfig, spaces: Spaces, policy: NetworkSize
) -> DeclaredMemory:
    """Return the bytes of all networks of the actor, and of what it learns them with."""
    algorithm = config.blocks.algorithm
    name = algorithm.name
    of = config.blocks.actor
    hidden = of.widths_of_critics
    inputs = math.prod(spaces.observation_shape)
    # Networks that learn, and target networks
    learned = [policy]
    targets = []
    if isinstance(spaces.actions, ContinuousActions):
        seen = inputs + outputs_of(spaces.actions)
        critics = critics_size(name, seen, hidden, of.critics)
        learned.append(critics)
        if name != "crossq":
            targets.append(critics)
    if name in ("td3", "td3_bc", "dqn"):
        targets.append(policy)
    if name == "iql":
        learned.append(layers((inputs, *hidden, 1)))
    if algorithm.draws and algorithm.temperature == "auto":
        learned.append(NetworkSize(numbers=1, tensors=1))
    weights = sum(size.bytes for size in [*learned, *targets])
    trained = sum(size.trained_bytes for size in learned)
    return DeclaredMemory(weights=weights, full=weights + trained)
