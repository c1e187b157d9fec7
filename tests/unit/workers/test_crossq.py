"""CrossQ's update, against one that is written out for each critic from the paper (arXiv:1902.05605)."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.blocks.off_policy import (
    OffPolicyActorConfig,
    OffPolicyAlgorithmConfig,
    OffPolicyBlocks,
)
from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.envs.contract import ContinuousActions, Spaces
from rlplace.workers.off_policy.learners import LEARNERS, Learner

NUMBERS = 3
ELEMENTS = 2
SAMPLES = 16
LR = 1e-2
TEMPERATURE = 0.3


def learner(*, delay: int) -> Learner:
    actions = ContinuousActions(
        shape=(ELEMENTS,), low=(-1.0,) * ELEMENTS, high=(1.0,) * ELEMENTS
    )
    spaces = Spaces(observation_shape=(NUMBERS,), actions=actions)
    blocks = OffPolicyBlocks(
        cluster=ClusterConfig(component_placement={}),
        env=SimulatorEnvConfig(id="none"),
        algorithm=OffPolicyAlgorithmConfig(
            name="crossq",
            steps_per_iteration=8,
            temperature=TEMPERATURE,
            policy_delay=delay,
        ),
        actor=OffPolicyActorConfig(
            hidden=(8, 8), critic_hidden=(12, 12), lr=LR, beta1=0.5
        ),
    )
    return LEARNERS["crossq"](spaces, blocks, 0, "cpu", lambda parameters: None)


def batch(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "observations": 3 + torch.randn(SAMPLES, NUMBERS, generator=random),
        "actions": torch.rand(SAMPLES, ELEMENTS, generator=random) * 2 - 1,
        "rewards": torch.randn(SAMPLES, generator=random),
        "discounts": 0.99 * (torch.rand(SAMPLES, generator=random) > 0.2),
        "next_observations": 4 + torch.randn(SAMPLES, NUMBERS, generator=random),
    }


class Norms:
    """Running statistics of batch normalisation layers, one after the other."""

    def __init__(self, widths: list[int]) -> None:
        self.means = [torch.zeros(width) for width in widths]
        self.variances = [torch.ones(width) for width in widths]

    def __call__(self, at: int, inputs: Tensor, *, training: bool) -> Tensor:
        if not training:
            return (inputs - self.means[at]) / (self.variances[at] + 1e-3).sqrt()
        mean = inputs.mean(0)
        variance = (inputs - mean).square().mean(0)
        self.means[at] = 0.99 * self.means[at] + 0.01 * mean.detach()
        self.variances[at] = 0.99 * self.variances[at] + 0.01 * variance.detach()
        return (inputs - mean) / (variance + 1e-3).sqrt()


class Reference:
    """The networks of a learner as lists of tensors, and the update of the paper."""

    def __init__(self, of: Learner) -> None:
        critics: Any = of.modules["critics"]
        self.critics = []
        for number in range(2):
            weights = [w[number].detach().clone() for w in critics.weights]
            biases = [b[number, 0].detach().clone() for b in critics.biases]
            scales = [n.scale[number, 0].detach().clone() for n in critics.renormalised]
            shifts = [n.shift[number, 0].detach().clone() for n in critics.renormalised]
            self.critics.append((weights, biases, scales, shifts))
        self.norms = [Norms([NUMBERS + ELEMENTS, 12, 12]) for _ in range(2)]
        self.policy = copy.deepcopy(of.policy)
        learned = [t for parts in self.critics for part in parts for t in part]
        for tensor in learned:
            tensor.requires_grad_(True)
        self.of_critics = torch.optim.Adam(learned, lr=LR, betas=(0.5, 0.999))
        self.of_policy = torch.optim.Adam(
            self.policy.parameters(), lr=LR, betas=(0.5, 0.999)
        )

    def values(self, seen: Tensor, actions: Tensor, *, training: bool) -> list[Tensor]:
        found = []
        for number in (0, 1):
            weights, biases, scales, shifts = self.critics[number]
            hidden = torch.cat([seen, actions], -1)
            for layer in range(3):
                hidden = self.norms[number](layer, hidden, training=training)
                hidden = hidden * scales[layer] + shifts[layer]
                hidden = hidden @ weights[layer] + biases[layer]
                if layer < 2:
                    hidden = hidden.relu()
            found.append(hidden[:, 0])
        return found

    def draw(self, seen: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        means, log_std = self.policy(seen)
        noise = torch.empty(means.shape).normal_(generator=random)
        before = means + log_std.exp() * noise
        slopes = 2 * (math.log(2) - before - nn.functional.softplus(-2 * before))
        density = Normal(means, log_std.exp()).log_prob(before)
        return before.tanh(), (density - slopes).sum(-1)

    def update(
        self, of: dict[str, Tensor], random: torch.Generator, *, improves: bool
    ) -> None:
        with torch.no_grad():
            actions, logprobs = self.draw(of["next_observations"], random)
        values = self.values(
            torch.cat([of["observations"], of["next_observations"]]),
            torch.cat([of["actions"], actions]),
            training=True,
        )
        after = torch.minimum(values[0][SAMPLES:], values[1][SAMPLES:]).detach()
        targets = of["rewards"] + of["discounts"] * (after - TEMPERATURE * logprobs)
        loss = sum(0.5 * (v[:SAMPLES] - targets).square().mean() for v in values)
        assert isinstance(loss, Tensor)
        self.of_critics.zero_grad()
        loss.backward()
        self.of_critics.step()
        if not improves:
            return
        self.policy.train()
        actions, logprobs = self.draw(of["observations"], random)
        self.policy.eval()
        least = torch.minimum(*self.values(of["observations"], actions, training=False))
        self.of_policy.zero_grad()
        (TEMPERATURE * logprobs - least).mean().backward()
        self.of_policy.step()


def test_updates_are_those_of_the_paper() -> None:
    made = learner(delay=2)
    reference = Reference(made)
    random = torch.Generator().manual_seed(5)
    same = torch.Generator().manual_seed(5)
    for number in range(6):
        made.update(batch(number), random)
        reference.update(batch(number), same, improves=number % 2 == 1)
    critics: Any = made.modules["critics"]
    for number in (0, 1):
        weights, biases, scales, shifts = reference.critics[number]
        for layer in range(3):
            norm = critics.renormalised[layer]
            pairs = [
                (critics.weights[layer][number], weights[layer]),
                (critics.biases[layer][number, 0], biases[layer]),
                (norm.scale[number, 0], scales[layer]),
                (norm.shift[number, 0], shifts[layer]),
                (norm.mean[number, 0], reference.norms[number].means[layer]),
                (norm.variance[number, 0], reference.norms[number].variances[layer]),
            ]
            for mine, theirs in pairs:
                torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=2e-3)
    for mine, theirs in zip(
        made.policy.state_dict().values(),
        reference.policy.state_dict().values(),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=2e-3)


def test_there_are_no_target_networks() -> None:
    assert set(learner(delay=3).modules) == {"policy", "critics"}
