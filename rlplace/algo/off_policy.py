"""Targets and losses of off-policy algorithms: SAC, TD3, DQN, TD3+BC and IQL. Pure functions of tensors.

Actions of SAC and TD3 are elements of [-1, 1]; the caller scales them to the bounds of the action space.

Letters: N samples, E critics of an ensemble, A elements of an action, n choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# Bounds of the log standard deviation (Haarnoja et al., arXiv:1812.05905, as in their code)
LOG_STD_LEAST = -20.0
LOG_STD_MOST = 2.0
# Most that an action counts in IQL's policy, as in the code of its authors
_MOST_COUNT = 100.0
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_LOG_2 = math.log(2.0)


class Drawn(NamedTuple):
    """Actions drawn from a squashed Gaussian, and the log of their density.

    `actions`: [N, A], each element in [-1, 1]. `logprobs`: [N], with respect to these actions.
    """

    actions: Tensor
    logprobs: Tensor


class CriticLoss(NamedTuple):
    """The loss of critics, and the absolute error of each sample.

    `loss`: a number. `errors`: [N], mean over the critics, without gradient.
    """

    loss: Tensor
    errors: Tensor


# ── actions ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def squashed_gaussian(means: Tensor, log_std: Tensor, noise: Tensor) -> Drawn:
    """Return tanh of Gaussian samples, and the log-density of the result.

    `means`, `log_std`: [N, A], of the Gaussian before tanh. `noise`: [N, A], standard normal numbers. The change of
    variables subtracts log(1 - tanh(u)^2), here in a form that is exact for large |u|: 2 (log 2 - u - softplus(-2u)).
    """
    log_std = log_std.clamp(LOG_STD_LEAST, LOG_STD_MOST)
    before = means + log_std.exp() * noise
    density = -0.5 * noise.square() - log_std - _HALF_LOG_2PI
    slope = 2.0 * (_LOG_2 - before - functional.softplus(-2.0 * before))
    return Drawn(before.tanh(), (density - slope).sum(-1))


def smoothed(actions: Tensor, noise: Tensor, *, std: float, clip: float) -> Tensor:
    """Return target actions with clipped noise: TD3's target policy smoothing (Fujimoto et al., arXiv:1802.09477).

    `actions`, `noise`: [N, A]; the noise is standard normal. The result stays within [-1, 1].
    """
    added = (noise * std).clamp(-clip, clip)
    return (actions + added).clamp(-1.0, 1.0)


# ── targets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def sac_targets(
    rewards: Tensor,
    discounts: Tensor,
    next_values: Tensor,
    next_logprobs: Tensor,
    temperature: Tensor | float,
) -> Tensor:
    """Return the targets of SAC's critics, [N]: reward plus the discounted soft value of the next state.

    `rewards`: [N], sums of n discounted rewards. `discounts`: [N], the discount after these n steps; 0 where the
    episode has terminated. `next_values`: [E, N], of the target critics for an action of the present policy.
    `next_logprobs`: [N], of that action.
    """
    soft = next_values.min(0).values - temperature * next_logprobs
    return rewards + discounts * soft


def td3_targets(rewards: Tensor, discounts: Tensor, next_values: Tensor) -> Tensor:
    """Return the targets of TD3's critics, [N]. The arguments are those of `sac_targets`."""
    return rewards + discounts * next_values.min(0).values


def dqn_targets(
    rewards: Tensor,
    discounts: Tensor,
    next_target_values: Tensor,
    next_online_values: Tensor | None = None,
) -> Tensor:
    """Return the targets of DQN, [N]. With `next_online_values`, those of double DQN (arXiv:1509.06461).

    `next_target_values`, `next_online_values`: [N, n], of the target network and of the trained network.
    """
    chosen_by = next_target_values
    if next_online_values is not None:
        chosen_by = next_online_values
    best = chosen_by.argmax(-1, keepdim=True)
    return rewards + discounts * next_target_values.gather(-1, best).squeeze(-1)


# ── losses ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def critic_loss(
    values: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    huber: bool = False,
) -> CriticLoss:
    """Return the loss of an ensemble of critics: half the mean squared error, summed over the critics.

    `values`: [E, N]. `targets`: [N]. `weights`: [N], weights of the samples in the mean, which correct for prioritised
    sampling; None: all 1. `huber`: take the Huber loss with threshold 1 instead of half the square, as DQN does.
    """
    gaps = values - targets
    if huber:
        each = functional.smooth_l1_loss(
            values, targets.expand_as(values), reduction="none"
        )
    else:
        each = 0.5 * gaps.square()
    if weights is not None:
        each = each * weights
    return CriticLoss(each.mean(-1).sum(), gaps.detach().abs().mean(0))


def sac_policy_loss(
    values: Tensor, logprobs: Tensor, temperature: Tensor | float
) -> Tensor:
    """Return the loss of SAC's policy.

    `values`: [E, N], of the critics for actions that the policy has drawn. `logprobs`: [N], of these actions.
    """
    return (temperature * logprobs - values.min(0).values).mean()


def td3_bc_policy_loss(
    values: Tensor, chosen: Tensor, taken: Tensor, weight: float
) -> Tensor:
    """Return the loss of TD3+BC's policy (Fujimoto and Gu, arXiv:2106.06860).

    The mean value, divided by its mean size, counts `weight` times as much as the squared distance to recorded actions.

    `values`: [N], of the actions `chosen` by the policy, [N, A]. `taken`: [N, A], the recorded actions.
    """
    scale = weight / values.detach().abs().mean()
    return functional.mse_loss(chosen, taken) - scale * values.mean()


def expectile_loss(gaps: Tensor, expectile: float) -> Tensor:
    """Return the squared error of an expectile, whose minimum is between mean and maximum if `expectile` is above 0.5.

    `gaps`: [N], targets minus estimates (Kostrikov et al., arXiv:2110.06169, equation 5).
    """
    shares = torch.where(gaps > 0, expectile, 1.0 - expectile)
    return (shares * gaps.square()).mean()


def weighted_likelihood_loss(
    logprobs: Tensor, advantages: Tensor, weight: float
) -> Tensor:
    """Return the loss of IQL's policy: recorded actions count by the exponential of their advantages, up to 100.

    `logprobs`: [N], of the recorded actions. `advantages`: [N], without gradient. `weight`: the inverse temperature
    (Kostrikov et al., arXiv:2110.06169, equation 7).
    """
    counts = (weight * advantages).exp().clamp(max=_MOST_COUNT)
    return -(counts * logprobs).mean()


def temperature_loss(
    log_temperature: Tensor, logprobs: Tensor, target_entropy: float
) -> Tensor:
    """Return the loss of SAC's temperature, whose gradient raises it while the entropy is below `target_entropy`."""
    return -(log_temperature * (logprobs.detach() + target_entropy)).mean()


@torch.no_grad()
def soft_update(
    targets: Iterable[Tensor], sources: Iterable[Tensor], tau: float
) -> None:
    """Move each target tensor towards its source, in place: target + tau (source - target). With tau 1, copy it."""
    torch._foreach_lerp_(list(targets), list(sources), tau)
