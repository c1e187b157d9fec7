"""Learners of SAC, CrossQ, TD3 and DQN find the best action of a task of one step; they save and load all they need."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.blocks.off_policy import (
    OffPolicyActorConfig,
    OffPolicyAlgorithmConfig,
    OffPolicyBlocks,
)
from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.models.off_policy import Acting, ActingProgram
from rlplace.placement.memory.off_policy import (
    NetworkSize,
    critics_size,
    policy_size,
)
from rlplace.workers.off_policy.learners import LEARNERS, Learner

BEST = 0.3  # continuous: the reward falls with the square of the distance from it
CHOICE = 2  # discrete: the only choice with a reward
CONTINUOUS = ContinuousActions(shape=(1,), low=(-4.0,), high=(2.0,))
DISCRETE = DiscreteActions(n=3)


def learner(name: Any, temperature: Any = 0.01, **more: Any) -> tuple[Learner, Spaces]:
    actions = DISCRETE if name == "dqn" else CONTINUOUS
    spaces = Spaces(observation_shape=(2,), actions=actions)
    blocks = OffPolicyBlocks(
        cluster=ClusterConfig(component_placement={}),
        env=SimulatorEnvConfig(id="of-one-step"),
        algorithm=OffPolicyAlgorithmConfig(
            name=name,
            steps_per_iteration=8,
            temperature=temperature,
            tau=0.05,
            advantage_weight=10.0,
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


@pytest.mark.parametrize("name", ["sac", "crossq", "td3", "td3_bc", "iql", "dqn"])
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


@pytest.mark.parametrize("name", ["sac", "crossq", "td3", "td3_bc", "iql", "dqn"])
def test_a_loaded_learner_goes_on_with_the_same_numbers(name: str) -> None:
    """Whatever the loading one has learned before: networks, targets, temperature, Adam's states, statistics."""
    made, _ = learner(name, "auto")
    other, _ = learner(name, "auto")
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        made.update(batch(name, random), random)
    for _ in range(4):
        other.update(batch(name, random), random)
    before = tensors(other.state())
    for place, tensor in tensors(made.state()).items():
        assert not torch.equal(tensor, before[place]), f"{place} would compare nothing"
    other.load(copy.deepcopy(made.state()))
    for _ in range(4):
        given = batch(name, random)
        state = random.get_state()
        errors = made.update(given, random)
        random.set_state(state)
        assert torch.equal(errors, other.update(given, random))
    assert other.updates == made.updates == 7
    found = tensors(other.state())
    for place, tensor in tensors(made.state()).items():
        assert torch.equal(tensor, found[place]), place


def test_metrics_of_an_iteration_that_was_broken_off_are_not_counted_again() -> None:
    made, _ = learner("iql")
    random = torch.Generator().manual_seed(1)
    state = copy.deepcopy(made.state())
    given = batch("iql", random)
    made.update(given, random)
    once = made.take_metrics()
    made.update(given, random)
    made.load(state)
    made.update(given, random)
    assert made.take_metrics() == once


def tensors(value: Any, place: str = "") -> dict[str, Tensor]:
    """Return the tensors in a state of nested mappings and lists, by their places."""
    if isinstance(value, Tensor):
        return {place: value}
    parts: Any = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    found: dict[str, Tensor] = {}
    for name, part in parts:
        found |= tensors(part, f"{place}/{name}")
    return found


def test_a_state_has_all_that_a_learner_learns() -> None:
    adam = {"policy", "critics"}
    expected = {
        "sac": ({"targets", "temperature"}, {"temperature"}),
        "crossq": ({"temperature"}, {"temperature"}),
        "td3": ({"targets", "target_policy"}, set()),
        "td3_bc": ({"targets", "target_policy"}, set()),
        "iql": ({"targets", "state_value"}, {"state_value"}),
    }
    for name, (modules, optimizers) in expected.items():
        state = learner(name, "auto")[0].state()
        assert state["modules"].keys() == {"policy", "critics"} | modules, name
        assert state["optimizers"].keys() == adam | optimizers, name
    state = learner("dqn")[0].state()
    assert state["modules"].keys() == {"policy", "target"}
    assert state["optimizers"].keys() == {"policy"}


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
    # And so does the program that is exported
    program = ActingProgram(values.policy, counted)
    assert (program(torch.from_numpy(seen)).numpy() == acting_by_value.act(seen)).all()
    # One observation gives one action
    assert acting.act(torch.zeros(2).numpy()).shape == (1,)


def of_several_steps(number: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(number)
    found = batch("sac", random)
    found["discounts"] = 0.9 * (torch.rand(64, generator=random) > 0.3)
    found["next_observations"] = torch.rand(64, 2, generator=random)
    return found


def log_density(actions: Tensor, means: Tensor, log_std: Tensor) -> Tensor:
    """Return the log-density of a normal distribution of one element, [N]."""
    gaps = (actions - means)[:, 0] / log_std.exp()
    return -0.5 * gaps.square() - log_std - 0.5 * math.log(2 * math.pi)


def test_updates_of_iql_are_those_of_its_paper() -> None:
    """With the order of its authors: values of states, then the policy, then values of actions."""
    made, _ = learner("iql")
    policy, critics, targets, state = (
        copy.deepcopy(made.modules[name])
        for name in ("policy", "critics", "targets", "state_value")
    )
    of_policy = torch.optim.Adam(policy.parameters(), lr=5e-3)
    of_critics = torch.optim.Adam(critics.parameters(), lr=2e-2)
    of_state = torch.optim.Adam(state.parameters(), lr=2e-2)
    for number in range(3):
        of = of_several_steps(number)
        made.update(of, torch.Generator())
        seen, taken = of["observations"], of["actions"]
        least = targets(seen, taken).min(0).values.detach()
        # Equation 5
        gaps = least - state(seen)
        loss = torch.zeros(())
        for gap in gaps:
            loss = loss + abs(0.7 - float(gap < 0)) * gap**2 / len(gaps)
        of_state.zero_grad()
        loss.backward()
        of_state.step()
        # Equation 7
        counts = (10.0 * (least - state(seen).detach())).exp().clamp(max=100.0)
        density = log_density(taken, policy(seen), policy.log_std[0])
        of_policy.zero_grad()
        (-(counts * density).mean()).backward()
        of_policy.step()
        # Equation 6
        after = state(of["next_observations"]).detach()
        goals = of["rewards"] + of["discounts"] * after
        of_critics.zero_grad()
        (0.5 * (critics(seen, taken) - goals).square()).mean(-1).sum().backward()
        of_critics.step()
        with torch.no_grad():
            for target, source in zip(
                targets.parameters(), critics.parameters(), strict=True
            ):
                target.copy_(0.95 * target + 0.05 * source)
    ours = ("policy", "critics", "targets", "state_value")
    theirs = (policy, critics, targets, state)
    for name, module in zip(ours, theirs, strict=True):
        for mine, expected in zip(
            made.modules[name].parameters(), module.parameters(), strict=True
        ):
            torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4)


def test_the_policy_of_td3_bc_weighs_values_by_their_size() -> None:
    """Equation 5 of arXiv:2106.06860, whose weight divides by the mean size of the values."""
    made, _ = learner("td3_bc")
    policy = copy.deepcopy(made.policy)
    of_policy = torch.optim.Adam(policy.parameters(), lr=5e-3)
    made.update(of_several_steps(0), torch.Generator().manual_seed(0))
    of = of_several_steps(1)
    made.update(of, torch.Generator().manual_seed(1))
    # The policy is updated after the second update of the critics
    chosen = policy(of["observations"])
    values = made.modules["critics"](of["observations"], chosen)[0]
    weight = 2.5 / values.abs().mean().item()
    loss = (chosen - of["actions"]).square().mean() - weight * values.mean()
    of_policy.zero_grad()
    loss.backward()
    of_policy.step()
    for mine, expected in zip(
        made.policy.parameters(), policy.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-5)


def size(module: nn.Module) -> NetworkSize:
    parameters = list(module.parameters())
    return NetworkSize(
        numbers=sum(parameter.numel() for parameter in parameters),
        tensors=len(parameters),
        buffers=sum(buffer.numel() for buffer in module.buffers()),
    )


@pytest.mark.parametrize("name", ["sac", "crossq", "td3", "td3_bc", "iql", "dqn"])
def test_the_planner_knows_the_sizes_of_the_networks(name: str) -> None:
    made, _ = learner(name)
    outputs = 3 if name == "dqn" else 1
    assert policy_size(name, 2, (32,), outputs) == size(made.policy)
    if name != "dqn":
        assert critics_size(name, 3, (32,), 2) == size(made.modules["critics"])
