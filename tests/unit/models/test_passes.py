"""Passes by hand: weights that are slices of one tensor, and the gradient that autograd finds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal

from rlplace.config.blocks.policies import MlpConfig
from rlplace.config.blocks.training import ActorConfig, AlgorithmConfig
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.models.mlp import ActorCritic, DiscreteOutput
from rlplace.models.passes import Passes, flatten, slices
from rlplace.models.policy_networks import build_policy

ARM = ContinuousActions(shape=(2, 3), low=(-1.0,) * 6, high=(1.0,) * 6)
BUTTONS = DiscreteActions(n=3)


def policy(
    actions: ContinuousActions | DiscreteActions, **model: object
) -> ActorCritic:
    algorithm = AlgorithmConfig(normalize_observations=False)
    actor = ActorConfig(model=MlpConfig(**{"hidden": (8, 6), **model}))
    built = build_policy(
        Spaces(observation_shape=(4,), actions=actions), actor, algorithm, seed=0
    )
    for parameter in built.parameters():  # away from what initialisation makes zero
        parameter.data += 0.1 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(1)
        )
    return built


def by_autograd(
    module: ActorCritic,
    observations: Tensor,
    actions: Tensor,
    slopes: tuple[Tensor, float, Tensor],
):
    """Log-probabilities, entropies, and the gradient of a loss with these slopes."""
    output = module(observations)
    if isinstance(output, DiscreteOutput):
        chosen = Categorical(logits=output.logits, validate_args=False)
        logprobs, entropies = chosen.log_prob(actions[:, 0]), chosen.entropy()
    else:
        normal = Normal(output.means.flatten(1), output.log_std.exp().flatten())
        logprobs, entropies = normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)
    of_logprobs, of_entropy, of_values = slopes
    loss = (
        (of_logprobs * logprobs).sum()
        + of_entropy * entropies.sum()
        + (of_values * output.values).sum()
    )
    gradient = torch.autograd.grad(loss, list(module.parameters()))
    return (
        logprobs.detach(),
        entropies.detach(),
        torch.cat([each.flatten() for each in gradient]),
    )


@pytest.mark.parametrize(
    ("actions", "model"),
    [
        (ARM, {}),
        (BUTTONS, {}),
        (ARM, {"activation": "relu"}),
        (BUTTONS, {"activation": "silu"}),
        (BUTTONS, {"hidden": ()}),
        (ARM, {"hidden": (5,)}),
    ],
)
@pytest.mark.parametrize(("rows", "of_entropy"), [(7, -0.2), (1, 0.0), (0, -0.2)])
def test_the_gradient_is_that_of_autograd(
    actions: ContinuousActions | DiscreteActions,
    model: dict[str, object],
    rows: int,
    of_entropy: float,
) -> None:
    module, generator = policy(actions, **model), torch.Generator().manual_seed(2)
    observations = torch.randn(rows, 4, generator=generator)
    taken = (
        torch.randint(3, (rows, 1))
        if actions is BUTTONS
        else torch.randn(rows, 6, generator=generator)
    )
    slopes = (
        torch.randn(rows, generator=generator),
        of_entropy,
        torch.randn(rows, generator=generator),
    )
    logprobs, entropies, expected = by_autograd(module, observations, taken, slopes)
    flat = flatten(module)
    gradient = torch.full_like(flat, torch.nan)  # whatever was there is overwritten
    passes = Passes(module, flat, gradient)
    with torch.inference_mode():
        for _ in range(2):
            outputs, values = passes.forward(observations, taken)
            chosen = passes.actions(outputs, taken)
            passes.backward(chosen, *slopes)
    torch.testing.assert_close(values, module(observations).values)
    torch.testing.assert_close(chosen.logprobs, logprobs)
    torch.testing.assert_close(chosen.entropies, entropies)
    torch.testing.assert_close(gradient, expected)


def test_parameters_are_slices_of_one_tensor() -> None:
    module = policy(ARM)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    flat = flatten(module)
    assert len(flat) == sum(parameter.numel() for parameter in module.parameters())
    for name, part in slices(flat, module):
        assert torch.equal(part, before[name])
    flat.mul_(2.0)
    assert all(
        torch.equal(tensor, 2.0 * before[name])
        for name, tensor in module.state_dict().items()
    )


@pytest.mark.parametrize("actions", [ARM, BUTTONS])
def test_with_rounded_weights_the_gradient_is_nearly_that_of_autograd(
    actions: ContinuousActions | DiscreteActions,
) -> None:
    module, generator = policy(actions), torch.Generator().manual_seed(2)
    observations = torch.randn(64, 4, generator=generator)
    taken = (
        torch.randint(3, (64, 1))
        if actions is BUTTONS
        else torch.randn(64, 6, generator=generator)
    )
    slopes = (
        torch.randn(64, generator=generator),
        -0.2,
        torch.randn(64, generator=generator),
    )
    _, _, expected = by_autograd(module, observations, taken, slopes)
    rounded = flatten(module).bfloat16()
    gradient = torch.full_like(rounded, torch.nan)
    passes = Passes(module, rounded, gradient)
    with torch.inference_mode():
        outputs, _ = passes.forward(observations, taken)
        passes.backward(passes.actions(outputs, taken), *slopes)
    assert (gradient.float() - expected).norm() < 0.03 * expected.norm()
