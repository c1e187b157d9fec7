"""Simulator policies: an actor-critic of two MLP trunks, and its action distributions.

The observation normaliser is inside, so that weight sync carries it. Sampling is a pure function of noise that the
caller draws per environment row, so that the same row gets the same action however rows are spread over ranks.

Letters: N observations, O observation shape, A action shape, n choices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlplace.algo.normalize import Moments, merge, no_moments
from rlplace.config.policies import MlpConfig
from rlplace.envs.contract import (
    Actions,
    ContinuousActions,
    DiscreteActions,
    MultiDiscreteActions,
    Spaces,
)

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}
HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class DiscreteOutput(NamedTuple):
    logits: Tensor  # [N, n] float32
    values: Tensor  # [N] float32


class ContinuousOutput(NamedTuple):
    """Independent normal distributions; the deviation does not depend on the observation."""

    means: Tensor  # [N, *A] float32
    log_std: Tensor  # [*A] float32
    values: Tensor  # [N] float32


class MultiDiscreteOutput(NamedTuple):
    """Independent choices; the logits of each follow those of the one before."""

    logits: Tensor  # [N, sum of n] float32
    actions: MultiDiscreteActions
    values: Tensor  # [N] float32


PolicyOutput = DiscreteOutput | MultiDiscreteOutput | ContinuousOutput


class ObservationNormalizer(nn.Module):
    """Zero mean, unit variance by running moments; the moments are buffers and change only in `update`."""

    CLIP = 10.0
    count: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        nothing = no_moments(shape)
        self.register_buffer("count", nothing.count)
        self.register_buffer("mean", nothing.mean)
        self.register_buffer("var", nothing.var)

    @property
    def moments(self) -> Moments:
        return Moments(count=self.count, mean=self.mean, var=self.var)

    def forward(self, observations: Tensor) -> Tensor:
        scaled = (observations - self.mean.float()) * torch.rsqrt(
            self.var.float() + 1e-8
        )
        return scaled.clamp(-self.CLIP, self.CLIP)

    @torch.no_grad()
    def update(self, sums: Tensor) -> None:
        """Merge a batch, given as `algo.normalize.shifted_sums` over all ranks, shifted by `mean`."""
        merged = merge(self.moments, sums)
        self.count.copy_(merged.count)
        self.mean.copy_(merged.mean)
        self.var.copy_(merged.var)


class ActorCritic(nn.Module):
    """Two trunks, for policy and value; a categorical policy, or a normal one with a learned deviation per element."""

    by_hand = True  # its passes in training
    remembered = 0  # numbers of a memory

    def __init__(self, spaces: Spaces, config: MlpConfig, normalize: bool) -> None:
        super().__init__()
        self.normalizer = (
            ObservationNormalizer(spaces.observation_shape) if normalize else None
        )
        self._size = math.prod(spaces.observation_shape)
        self.actions = spaces.actions
        outputs = math.prod(noise_shape(spaces.actions))
        self.policy = _trunk(
            self._size, config.hidden, outputs, ACTIVATIONS[config.activation]
        )
        self.value = _trunk(
            self._size, config.hidden, 1, ACTIVATIONS[config.activation]
        )
        if isinstance(spaces.actions, ContinuousActions):
            self.log_std = nn.Parameter(torch.full((outputs,), config.initial_log_std))

    def forward(self, observations: Tensor) -> PolicyOutput:
        if self.normalizer is not None:
            observations = self.normalizer(observations)
        flat = observations.reshape(-1, self._size)  # of any N also once it is traced
        return output_of(
            self.actions,
            self.policy(flat),
            self.value(flat)[:, 0],
            getattr(self, "log_std", None),
        )

    def numbers(self, observations: Tensor) -> Tensor:
        """Return what the normaliser counts."""
        return observations

    def prepared(self, observations: Tensor) -> Tensor:
        """Return the observations [N, *O] as `Passes` take them, for a whole iteration."""
        if self.normalizer is None:
            return observations
        return self.normalizer(observations)


def _trunk(
    inputs: int, hidden: tuple[int, ...], outputs: int, activation: type[nn.Module]
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), activation()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def initialise(
    linears: Sequence[nn.Linear | nn.Conv2d],
    head_gain: float,
    generator: torch.Generator,
) -> None:
    """Make orthogonal weights with gain sqrt(2), and `head_gain` in the last layer; zero biases.

    Andrychowicz et al. 2021, arXiv:2006.05990, section 3.2: a small last policy layer matters most.
    """
    for layer in linears:
        nn.init.orthogonal_(
            layer.weight,
            head_gain if layer is linears[-1] else math.sqrt(2.0),
            generator,
        )
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


# ── action distributions ─────────────────────────────────────────────────────────────────────────────────────────────


def noise_shape(actions: Actions) -> tuple[int, ...]:
    """Return the shape of one observation's noise: uniform in [0, 1) for choices, else standard normal."""
    if isinstance(actions, MultiDiscreteActions):
        return (sum(actions.n),)
    if isinstance(actions, DiscreteActions):
        return (actions.n,)
    return actions.shape


def output_of(
    actions: Actions, outputs: Tensor, values: Tensor, log_std: Tensor | None
) -> PolicyOutput:
    """Return the distribution over `actions` that outputs [N, K] of a network, and log deviations [K], are of."""
    if isinstance(actions, DiscreteActions):
        return DiscreteOutput(outputs, values)
    if isinstance(actions, MultiDiscreteActions):
        return MultiDiscreteOutput(outputs, actions, values)
    assert log_std is not None, "continuous actions have a deviation"
    return ContinuousOutput(
        outputs.view(-1, *actions.shape), log_std.view(actions.shape), values
    )


def sample(output: PolicyOutput, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return actions ([N] or [N, *A] int64, or [N, *A] float32) and their log-probabilities ([N] float32).

    `noise` is [N, n] uniform in [0, 1) for choices (the Gumbel-max trick: argmax of logits plus Gumbel noise
    is a draw from the softmax; Maddison et al. 2014, arXiv:1411.0030) and [N, *A] standard normal for continuous ones.
    """
    if isinstance(output, DiscreteOutput | MultiDiscreteOutput):
        uniform = noise.clamp(torch.finfo(torch.float32).tiny, 1.0 - 2.0**-24)
        actions = mode(
            output._replace(logits=output.logits - torch.log(-torch.log(uniform)))
        )
    else:
        actions = output.means + output.log_std.exp() * noise
    return actions, logprob(output, actions)


def mode(output: PolicyOutput) -> Tensor:
    """Return the likeliest actions: [N] or [N, *A] int64, or [N, *A] float32."""
    if isinstance(output, MultiDiscreteOutput):
        chosen = [
            part.argmax(dim=-1)
            for part in output.logits.split(output.actions.n, dim=-1)
        ]
        return torch.stack(chosen, dim=-1).view(-1, *output.actions.shape)
    if isinstance(output, DiscreteOutput):
        return output.logits.argmax(dim=-1)
    return output.means


def logprob(output: PolicyOutput, actions: Tensor) -> Tensor:
    """Return [N] log-probability (discrete) or log-density summed over the action's elements (continuous)."""
    if isinstance(output, DiscreteOutput):
        return (
            output.logits.log_softmax(dim=-1)
            .gather(-1, actions.unsqueeze(-1))
            .squeeze(-1)
        )
    if isinstance(output, MultiDiscreteOutput):
        index = actions.flatten(1) + first_logits(output.actions, actions.device)
        return log_shares(output.logits, output.actions).gather(-1, index).sum(dim=-1)
    z = (actions - output.means) * torch.exp(-output.log_std)
    size = output.log_std.numel()
    squares = z.square().reshape(len(z), size).sum(dim=-1)
    return -0.5 * squares - (output.log_std.sum() + size * HALF_LOG_2PI)


def log_shares(logits: Tensor, actions: MultiDiscreteActions) -> Tensor:
    """Return [N, sum of n] log-probabilities of what each element of the action may be."""
    return torch.cat(
        [part.log_softmax(dim=-1) for part in logits.split(actions.n, dim=-1)], dim=-1
    )


def first_logits(actions: MultiDiscreteActions, device: torch.device) -> Tensor:
    """Return [elements] where the logits of each element begin."""
    return torch.tensor([0, *itertools.accumulate(actions.n)][:-1], device=device)
