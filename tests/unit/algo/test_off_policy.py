"""Targets and losses of SAC, TD3 and DQN, against torch's distributions, integrals and plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from rlplace.algo.off_policy import (
    critic_loss,
    dqn_targets,
    sac_policy_loss,
    sac_targets,
    smoothed,
    soft_update,
    squashed_gaussian,
    td3_targets,
    temperature_loss,
)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def test_a_squashed_action_has_the_density_of_the_transformed_normal() -> None:
    means, log_std, noise = numbers(50, 3), 0.3 * numbers(50, 3, seed=1), numbers(50, 3)
    drawn = squashed_gaussian(means, log_std, noise)
    normal = Normal(means, log_std.exp())
    plain = TransformedDistribution(normal, [TanhTransform(cache_size=1)])
    expected = plain.log_prob(drawn.actions).sum(-1)
    torch.testing.assert_close(drawn.logprobs, expected, atol=1e-5, rtol=1e-5)


def test_the_density_of_squashed_actions_integrates_to_one() -> None:
    noise = torch.linspace(-9, 9, 200_001, dtype=torch.float64)[:, None]
    means = torch.full_like(noise, 0.7)
    drawn = squashed_gaussian(means, torch.full_like(noise, -0.2), noise)
    area = torch.trapezoid(drawn.logprobs.exp(), drawn.actions.squeeze(-1))
    assert float(area) == pytest.approx(1.0, abs=1e-6)


def test_an_action_far_beyond_the_bounds_has_a_finite_density_and_gradient() -> None:
    means = torch.tensor([[40.0, -40.0]], requires_grad=True)
    drawn = squashed_gaussian(means, torch.zeros(1, 2), torch.zeros(1, 2))
    drawn.logprobs.sum().backward()
    assert torch.isfinite(drawn.logprobs).all()
    assert means.grad is not None
    assert torch.isfinite(means.grad).all()
    assert float(drawn.actions.detach().abs().max()) <= 1.0


def test_targets_are_those_of_a_loop_over_the_samples() -> None:
    rewards, discounts = numbers(6), numbers(6, seed=1).abs()
    discounts[2] = 0.0  # a terminated episode has no next state
    values, logprobs = numbers(3, 6, seed=2), numbers(6, seed=3)
    soft = sac_targets(rewards, discounts, values, logprobs, 0.2)
    hard = td3_targets(rewards, discounts, values)
    for i in range(6):
        least = min(float(values[e, i]) for e in range(3))
        value = least - 0.2 * float(logprobs[i])
        assert float(soft[i]) == pytest.approx(
            float(rewards[i]) + float(discounts[i]) * value
        )
        assert float(hard[i]) == pytest.approx(
            float(rewards[i]) + float(discounts[i]) * least
        )
    assert soft[2] == hard[2] == rewards[2]


@pytest.mark.parametrize("double", [False, True])
def test_dqn_targets_are_those_of_a_loop_over_the_choices(double: bool) -> None:
    rewards, discounts = numbers(5), numbers(5, seed=1).abs()
    target, online = numbers(5, 4, seed=2), numbers(5, 4, seed=3)
    found = dqn_targets(rewards, discounts, target, online if double else None)
    for i in range(5):
        choosing = (online if double else target)[i].tolist()
        best = choosing.index(max(choosing))
        expected = float(rewards[i] + discounts[i] * target[i, best])
        assert float(found[i]) == pytest.approx(expected)


def test_the_critics_loss_is_half_the_weighted_mean_square() -> None:
    values, targets, weights = numbers(2, 7), numbers(7, seed=1), numbers(7).abs()
    loss, errors = critic_loss(values, targets, weights)
    expected = 0.0
    for e in range(2):
        for i in range(7):
            gap = float(values[e, i] - targets[i])
            expected += 0.5 * float(weights[i]) * gap * gap / 7
    assert float(loss) == pytest.approx(expected)
    assert float(errors[3]) == pytest.approx(
        (abs(float(values[0, 3] - targets[3])) + abs(float(values[1, 3] - targets[3])))
        / 2
    )
    huber, _ = critic_loss(torch.tensor([[3.0]]), torch.tensor([0.0]), huber=True)
    assert float(huber) == pytest.approx(2.5)


def test_the_policy_loss_takes_the_least_critic() -> None:
    values, logprobs = numbers(2, 4), numbers(4, seed=1)
    expected = 0.0
    for i in range(4):
        expected += (0.3 * float(logprobs[i]) - float(values[:, i].min())) / 4
    assert float(sac_policy_loss(values, logprobs, 0.3)) == pytest.approx(expected)


@pytest.mark.parametrize(("entropy", "direction"), [(-3.0, 1), (1.0, -1)])
def test_the_temperature_rises_while_the_entropy_is_too_low(
    entropy: float, direction: int
) -> None:
    log_temperature = torch.zeros((), requires_grad=True)
    logprobs = torch.full((8,), -entropy)
    temperature_loss(log_temperature, logprobs, target_entropy=-1.0).backward()
    assert log_temperature.grad is not None
    # Gradient descent moves against the gradient
    assert math.copysign(1, -float(log_temperature.grad)) == direction


def test_smoothed_actions_stay_within_clip_and_bounds() -> None:
    actions = torch.tensor([[0.0, 0.95, -0.95]])
    found = smoothed(actions, torch.tensor([[9.0, 9.0, -0.1]]), std=0.2, clip=0.5)
    torch.testing.assert_close(found, torch.tensor([[0.5, 1.0, -0.97]]))


def test_a_soft_update_moves_by_tau_and_with_tau_1_copies() -> None:
    target, source = torch.zeros(3), torch.ones(3)
    soft_update([target], [source], 0.25)
    assert target.tolist() == [0.25] * 3
    soft_update([target], [source], 1.0)
    assert torch.equal(target, source)
