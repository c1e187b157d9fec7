"""The MLP policy: shapes, reproducible weights, and a normaliser that travels with them."""

from __future__ import annotations

import math

import pytest
import torch

from rlplace.algo.normalize import shifted_sums
from rlplace.config import ActorConfig, AlgorithmConfig, MlpConfig
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.models.digest import digest
from rlplace.models.distributions import ContinuousOutput, DiscreteOutput
from rlplace.models.mlp import ActorCritic, ObservationNormalizer, build_policy

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
    return build_policy(Spaces(observation_shape=shape, actions=actions), actor, algorithm, seed)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 3)])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_shapes(shape: tuple[int, ...], rows: int) -> None:
    observations = torch.randn(rows, *shape)
    output = policy(ARM, shape)(observations)
    assert isinstance(output, ContinuousOutput)
    assert (output.means.shape, output.log_std.shape, output.values.shape) == ((rows, 2), (2,), (rows,))
    choices = policy(BUTTONS, shape)(observations)
    assert isinstance(choices, DiscreteOutput)
    assert (choices.logits.shape, choices.values.shape) == ((rows, 3), (rows,))


def test_scalar_actions() -> None:
    output = policy(ContinuousActions(shape=(), low=(-1.0,), high=(1.0,)))(torch.zeros(3, 4))
    assert (output.means.shape, output.log_std.shape) == ((3,), ())


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(1)
    first = digest(policy().state_dict())
    torch.manual_seed(2)
    assert digest(policy().state_dict()) == first
    assert digest(policy(seed=1).state_dict()) != first


def test_initial_weights() -> None:
    built = policy(initial_log_std=-0.5)
    assert torch.allclose(built.policy[0].weight.T @ built.policy[0].weight, 2.0 * torch.eye(4), atol=1e-5)
    assert torch.linalg.matrix_norm(built.policy[-1].weight, 2).item() == pytest.approx(0.01, rel=1e-4)
    assert torch.linalg.matrix_norm(built.value[-1].weight, 2).item() == pytest.approx(1.0, rel=1e-4)
    assert built.state_dict()["log_std"].tolist() == [-0.5, -0.5]


@pytest.mark.parametrize(("name", "at_minus_one"), [("tanh", math.tanh(-1.0)), ("relu", 0.0), ("silu", -0.26894142)])
def test_activations(name: str, at_minus_one: float) -> None:
    assert policy(activation=name).policy[1](torch.tensor(-1.0)).item() == pytest.approx(at_minus_one)


def test_trunks_share_nothing() -> None:
    built = policy()
    built(torch.randn(2, 4)).values.sum().backward()
    assert all(p.grad is None for p in built.policy.parameters())
    assert all(p.grad is not None for p in built.value.parameters())


def test_the_normaliser_is_the_identity_at_first() -> None:
    normalizer = ObservationNormalizer((3,))
    observations = torch.tensor([[0.5, -2.0, 30.0]])
    assert torch.allclose(normalizer(observations), torch.tensor([[0.5, -2.0, 10.0]]))


def test_the_normaliser_travels_with_the_weights() -> None:
    built, other = policy(), policy(seed=1)
    assert built.normalizer is not None
    observations = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) * 3.0 + 7.0
    built.normalizer.update(shifted_sums(observations, built.normalizer.mean))
    scaled = built.normalizer(observations)
    assert torch.allclose(scaled.mean(dim=0), torch.zeros(4), atol=1e-5)
    assert torch.allclose(scaled.std(dim=0, correction=0), torch.ones(4), atol=1e-5)
    other.load_state_dict(built.state_dict())
    assert torch.equal(other(observations).values, built(observations).values)


def test_without_normaliser_nothing_is_kept() -> None:
    assert not [name for name, _ in policy(normalize=False).named_buffers()]


def test_digest_sees_every_bit() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.bfloat16)}
    whole = digest(tensors)
    assert digest(dict(reversed(tensors.items()))) == whole
    assert digest({**tensors, "a": torch.tensor([0.0, -0.0])}) != whole
    assert digest({**tensors, "a": torch.zeros(2, 1)}) != whole
