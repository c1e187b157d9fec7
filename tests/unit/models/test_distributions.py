"""Distributions against torch's own, and sampling as a pure function of noise."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal

from rlplace.envs.contract import ContinuousActions, DiscreteActions
from rlplace.models.distributions import (
    ContinuousOutput,
    DiscreteOutput,
    PolicyOutput,
    entropy,
    logprob,
    noise_shape,
    sample,
)

VALUES = torch.zeros(4)


def discrete(seed: int = 0) -> DiscreteOutput:
    return DiscreteOutput(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)), VALUES)


def continuous(shape: tuple[int, ...] = (2, 3)) -> ContinuousOutput:
    generator = torch.Generator().manual_seed(0)
    means, log_std = torch.randn(4, *shape, generator=generator), torch.randn(shape, generator=generator)
    return ContinuousOutput(means, log_std, VALUES)


def noise_for(output: PolicyOutput) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(output, DiscreteOutput):
        return torch.rand(output.logits.shape, generator=generator)
    return torch.randn(output.means.shape, generator=generator)


def test_discrete_is_categorical() -> None:
    output, expected = discrete(), Categorical(logits=discrete().logits)
    actions = torch.tensor([0, 1, 2, 1])
    assert torch.allclose(logprob(output, actions), expected.log_prob(actions))
    assert torch.allclose(entropy(output), expected.entropy())


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_continuous_is_independent_normal(shape: tuple[int, ...]) -> None:
    output = continuous(shape)
    expected = Independent(Normal(output.means, output.log_std.exp()), len(shape))
    actions, logprobs = sample(output, noise_for(output))
    assert actions.shape == (4, *shape)
    assert torch.allclose(logprobs, expected.log_prob(actions), atol=1e-5)
    assert torch.allclose(entropy(output), expected.entropy())


@pytest.mark.parametrize("output", [discrete(), continuous()], ids=["discrete", "continuous"])
def test_a_row_does_not_depend_on_the_others(output: PolicyOutput) -> None:
    noise = noise_for(output)
    actions, logprobs = sample(output, noise)
    if isinstance(output, DiscreteOutput):
        one: PolicyOutput = DiscreteOutput(output.logits[2:3], output.values[2:3])
    else:
        one = ContinuousOutput(output.means[2:3], output.log_std, output.values[2:3])
    alone, its_logprob = sample(one, noise[2:3])
    assert torch.equal(alone[0], actions[2])
    assert torch.equal(its_logprob[0], logprobs[2])
    assert torch.equal(logprob(output, actions), logprobs)


def test_discrete_sampling_follows_the_softmax() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, 3)
    noise = torch.rand(20_000, 3, generator=torch.Generator().manual_seed(0))
    actions, _ = sample(DiscreteOutput(logits, torch.zeros(20_000)), noise)
    assert torch.bincount(actions).div(20_000).tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.015)


@pytest.mark.parametrize("edge", [0.0, 1.0 - 2.0**-24, 1.0])
def test_the_edges_of_the_noise_are_finite(edge: float) -> None:
    noise = torch.full((4, 3), edge)
    actions, logprobs = sample(discrete(), noise)
    assert torch.isfinite(logprobs).all()
    assert actions.tolist() == discrete().logits.argmax(-1).tolist()  # equal noise decides nothing


def test_noise_shapes() -> None:
    assert noise_shape(DiscreteActions(n=5)) == (5,)
    assert noise_shape(ContinuousActions(shape=(2, 3), low=(0.0,) * 6, high=(1.0,) * 6)) == (2, 3)
