"""Simulator policies: shapes, reproducible weights, a normaliser that travels with them, distributions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal

from rlplace.algo.normalize import shifted_sums
from rlplace.config.blocks.policies import MlpConfig
from rlplace.config.blocks.training import ActorConfig, AlgorithmConfig
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.models.mlp import (
    ActorCritic,
    ContinuousOutput,
    DiscreteOutput,
    PolicyOutput,
    logprob,
    sample,
)
from rlplace.models.policy_networks import build_policy
from rlplace.models.sharding import digest

ARM = ContinuousActions(shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0))
BUTTONS = DiscreteActions(n=3)


def policy(
    actions: ContinuousActions | DiscreteActions = ARM,
    shape: tuple[int, ...] = (4,),
    seed: int = 0,
    normalize: bool = True,
    **model: object,
) -> ActorCritic:
    actor = ActorConfig(model=MlpConfig(**{"hidden": (8, 8), **model}))
    algorithm = AlgorithmConfig(normalize_observations=normalize)
    return build_policy(
        Spaces(observation_shape=shape, actions=actions), actor, algorithm, seed
    )


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 3)])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_shapes(shape: tuple[int, ...], rows: int) -> None:
    observations = torch.randn(rows, *shape)
    output = policy(ARM, shape)(observations)
    assert isinstance(output, ContinuousOutput)
    assert (output.means.shape, output.log_std.shape, output.values.shape) == (
        (rows, 2),
        (2,),
        (rows,),
    )
    choices = policy(BUTTONS, shape)(observations)
    assert isinstance(choices, DiscreteOutput)
    assert (choices.logits.shape, choices.values.shape) == ((rows, 3), (rows,))


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(1)
    first = digest(policy().state_dict().items())
    torch.manual_seed(2)
    assert digest(policy().state_dict().items()) == first
    assert digest(policy(seed=1).state_dict().items()) != first


def test_initial_weights() -> None:
    built = policy(initial_log_std=-0.5)
    assert torch.allclose(
        built.policy[0].weight.T @ built.policy[0].weight, 2.0 * torch.eye(4), atol=1e-5
    )
    assert torch.linalg.matrix_norm(built.policy[-1].weight, 2).item() == pytest.approx(
        0.01, rel=1e-4
    )
    assert torch.linalg.matrix_norm(built.value[-1].weight, 2).item() == pytest.approx(
        1.0, rel=1e-4
    )
    assert built.state_dict()["log_std"].tolist() == [-0.5, -0.5]


@pytest.mark.parametrize(
    ("name", "at_minus_one"),
    [("tanh", math.tanh(-1.0)), ("relu", 0.0), ("silu", -0.26894142)],
)
def test_activations(name: str, at_minus_one: float) -> None:
    assert policy(activation=name).policy[1](
        torch.tensor(-1.0)
    ).item() == pytest.approx(at_minus_one)


def test_the_normaliser_travels_with_the_weights() -> None:
    built, other = policy(), policy(seed=1)
    assert built.normalizer is not None
    first = built.normalizer(torch.tensor([[0.5, -2.0, 30.0, 1.0]]))
    assert torch.allclose(
        first, torch.tensor([[0.5, -2.0, 10.0, 1.0]])
    )  # the identity, clipped
    observations = (
        torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) * 3.0 + 7.0
    )
    built.normalizer.update(shifted_sums(observations, built.normalizer.mean))
    scaled = built.normalizer(observations)
    assert torch.allclose(scaled.mean(dim=0), torch.zeros(4), atol=1e-5)
    assert torch.allclose(scaled.std(dim=0, correction=0), torch.ones(4), atol=1e-5)
    assert not list(policy(normalize=False).named_buffers())
    other.load_state_dict(built.state_dict())
    assert torch.equal(other(observations).values, built(observations).values)


def test_digest_sees_every_bit() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.bfloat16)}
    whole = digest(tensors.items())
    assert digest(reversed(tensors.items())) == whole
    assert digest({**tensors, "a": torch.tensor([0.0, -0.0])}.items()) != whole
    assert digest({**tensors, "a": torch.zeros(2, 1)}.items()) != whole


# ── distributions ─────────────────────────────────────────────────────────────────────────────────────────────────────


VALUES = torch.zeros(4)


def discrete(seed: int = 0) -> DiscreteOutput:
    return DiscreteOutput(
        torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)), VALUES
    )


def continuous(shape: tuple[int, ...] = (2, 3)) -> ContinuousOutput:
    generator = torch.Generator().manual_seed(0)
    means, log_std = (
        torch.randn(4, *shape, generator=generator),
        torch.randn(shape, generator=generator),
    )
    return ContinuousOutput(means, log_std, VALUES)


def noise_for(output: PolicyOutput) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(output, DiscreteOutput):
        return torch.rand(output.logits.shape, generator=generator)
    return torch.randn(output.means.shape, generator=generator)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_continuous_is_independent_normal(shape: tuple[int, ...]) -> None:
    output = continuous(shape)
    expected = Independent(Normal(output.means, output.log_std.exp()), len(shape))
    actions, logprobs = sample(output, noise_for(output))
    assert actions.shape == (4, *shape)
    assert torch.allclose(logprobs, expected.log_prob(actions), atol=1e-5)


@pytest.mark.parametrize(
    "output", [discrete(), continuous()], ids=["discrete", "continuous"]
)
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


def test_discrete_is_categorical() -> None:
    output, expected = discrete(), Categorical(logits=discrete().logits)
    assert torch.allclose(
        logprob(output, torch.tensor([0, 1, 2, 1])),
        expected.log_prob(torch.tensor([0, 1, 2, 1])),
    )
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, 3)
    noise = torch.rand(20_000, 3, generator=torch.Generator().manual_seed(0))
    actions, _ = sample(DiscreteOutput(logits, torch.zeros(20_000)), noise)
    assert torch.bincount(actions).div(20_000).tolist() == pytest.approx(
        [0.5, 0.3, 0.2], abs=0.015
    )


@pytest.mark.parametrize("edge", [0.0, 1.0 - 2.0**-24, 1.0])
def test_the_edges_of_the_noise_are_finite(edge: float) -> None:
    actions, logprobs = sample(discrete(), torch.full((4, 3), edge))
    assert torch.isfinite(logprobs).all()
    assert (
        actions.tolist() == discrete().logits.argmax(-1).tolist()
    )  # equal noise decides nothing
