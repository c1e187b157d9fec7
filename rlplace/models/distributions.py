"""Action distributions of simulator policies: sample, log-probability, entropy.

Letters: N observations, n choices, A action shape. Sampling is a pure function of noise that the caller draws per
environment row, so that the same row gets the same action however rows are spread over ranks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlplace.envs.contract import ContinuousActions, DiscreteActions

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


# Named tuples, not dataclasses: FSDP finds the tensors to hook for the backward pass by walking tuples and dicts.
class DiscreteOutput(NamedTuple):
    """A categorical distribution over n choices."""

    logits: Tensor  # [N, n] float32
    values: Tensor  # [N] float32


class ContinuousOutput(NamedTuple):
    """Independent normal distributions; the deviation does not depend on the observation."""

    means: Tensor  # [N, *A] float32
    log_std: Tensor  # [*A] float32
    values: Tensor  # [N] float32


PolicyOutput = DiscreteOutput | ContinuousOutput


def noise_shape(actions: DiscreteActions | ContinuousActions) -> tuple[int, ...]:
    """Return the shape of one observation's noise: uniform in [0, 1) for discrete actions, else standard normal."""
    return (actions.n,) if isinstance(actions, DiscreteActions) else actions.shape


def sample(output: PolicyOutput, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return actions ([N] int64, or [N, *A] float32) and their log-probabilities ([N] float32).

    `noise` is [N, n] uniform in [0, 1) for discrete actions (the Gumbel-max trick: argmax of logits plus Gumbel noise
    is a draw from the softmax; Maddison et al. 2014, arXiv:1411.0030) and [N, *A] standard normal for continuous ones.
    """
    if isinstance(output, DiscreteOutput):
        uniform = noise.clamp(torch.finfo(torch.float32).tiny, 1.0 - 2.0**-24)
        actions = (output.logits - torch.log(-torch.log(uniform))).argmax(dim=-1)
    else:
        actions = output.means + output.log_std.exp() * noise
    return actions, logprob(output, actions)


def logprob(output: PolicyOutput, actions: Tensor) -> Tensor:
    """Return [N] log-probability (discrete) or log-density summed over the action's elements (continuous)."""
    if isinstance(output, DiscreteOutput):
        return output.logits.log_softmax(dim=-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    z = (actions - output.means) * torch.exp(-output.log_std)
    size = output.log_std.numel()
    squares = z.square().reshape(len(z), size).sum(dim=-1)
    return -0.5 * squares - (output.log_std.sum() + size * _HALF_LOG_2PI)


def entropy(output: PolicyOutput) -> Tensor:
    """Return [N] entropy in nats (differential for continuous actions)."""
    if isinstance(output, DiscreteOutput):
        log_p = output.logits.log_softmax(dim=-1)
        return -(log_p.exp() * log_p).sum(dim=-1)
    total = output.log_std.sum() + output.log_std.numel() * (0.5 + _HALF_LOG_2PI)
    return total.expand(output.values.shape)
