"""Learners of SAC, TD3 and DQN find the best action of a task of one step; they save and load all that they need."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.blocks.off_policy import (
    OffPolicyActorConfig,
    OffPolicyAlgorithmConfig,
    OffPolicyBlocks,
)
from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.models.off_policy import Acting
from rlplace.workers.off_policy.learners import LEARNERS, Learner

BEST = 0.3  # continuous: the reward falls with the square of the distance from it
CHOICE = 2  # discrete: the only choice with a reward
CONTINUOUS = ContinuousActions(shape=(1,), low=(-4.0,), high=(2.0,))
DISCRETE = DiscreteActions(n=3)


def learner(name: Any, **more: Any) -> tuple[Learner, Spaces]:
    actions = DISCRETE if name == "dqn" else CONTINUOUS
    spaces = Spaces(observation_shape=(2,), actions=actions)
    blocks = OffPolicyBlocks(
        cluster=ClusterConfig(component_placement={}),
        env=SimulatorEnvConfig(id="of-one-step"),
        algorithm=OffPolicyAlgorithmConfig(
            name=name, steps_per_iteration=8, temperature=0.01, tau=0.05
        ),
        actor=OffPolicyActorConfig(hidden=(32,), lr=5e-3, critic_lr=2e-2, **more),
    )
    made = LEARNERS[name](spaces, blocks, 0, "cpu", lambda parameters: None)
    return made, spaces


def batch(name: str, random: torch.Generator) -> dict[str, Tensor]:
    """Steps of random actions, each of which ends its episode."""
    seen = torch.rand(64, 2, generator=random)
    actions = torch.rand(64, 1, generator=random) * 2 - 1
    rewards = -(actions[:, 0] - BEST).square()
    if name == "dqn":
        actions = torch.randint(3, (64,), generator=random)
        rewards = (actions == CHOICE).float()
    return {
        "observations": seen,
        "actions": actions,
        "rewards": rewards,
        "discounts": torch.zeros(64),
        "next_observations": seen,
    }


@pytest.mark.parametrize("name", ["sac", "td3", "dqn"])
def test_a_learner_finds_the_best_action(name: str) -> None:
    made, spaces = learner(name, layer_norm=name == "td3")
    random = torch.Generator().manual_seed(1)
    for _ in range(400):
        made.update(batch(name, random), random)
    acting = Acting(made.policy, spaces)
    found = acting.act(torch.rand(5, 2, generator=random).numpy())
    if name == "dqn":
        assert found.tolist() == [CHOICE] * 5
    else:
        # From [-1, 1] to the bounds of the space
        assert found[:, 0] == pytest.approx([-1.0 + 3.0 * BEST] * 5, abs=0.4)
    metrics = made.take_metrics()
    assert metrics["critic_loss"] < 1.0
    assert made.take_metrics() == {}


@pytest.mark.parametrize("name", ["sac", "td3", "dqn"])
def test_a_loaded_learner_goes_on_with_the_same_numbers(name: str) -> None:
    made, _ = learner(name)
    other, _ = learner(name)
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        made.update(batch(name, random), random)
    other.load(copy.deepcopy(made.state()))
    state = random.get_state()
    errors = made.update(batch(name, random), random)
    random.set_state(state)
    assert torch.equal(errors, other.update(batch(name, random), random))
    for mine, theirs in zip(
        made.policy.parameters(), other.policy.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_drawn_actions_stay_within_the_bounds_of_the_space() -> None:
    made, spaces = learner("sac")
    acting = Acting(made.policy, spaces, seed=3)
    drawn = acting.act(torch.zeros(500, 2).numpy(), deterministic=False)
    assert drawn.min() >= -4.0
    assert drawn.max() <= 2.0
    assert drawn.std() > 0.5
    # Gymnasium may count choices from another number than 0
    values, _ = learner("dqn")
    counted = Spaces(observation_shape=(2,), actions=DiscreteActions(n=3, first=-1))
    acting_by_value = Acting(values.policy, counted)
    seen = torch.rand(4, 2).numpy()
    assert (acting_by_value.act(seen) == acting_by_value.choose(seen) - 1).all()
    # One observation gives one action
    assert acting.act(torch.zeros(2).numpy()).shape == (1,)
