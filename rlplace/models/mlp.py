"""An actor-critic of two separate MLP trunks, with the observation normaliser inside so that weight sync carries it.

Letters: N observations, O observation shape, A action shape, n choices.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from rlplace.algo.normalize import Moments, merge, no_moments
from rlplace.config import ActorConfig, AlgorithmConfig, MlpConfig
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.models.distributions import ContinuousOutput, DiscreteOutput

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}


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
        scaled = (observations - self.mean.float()) * torch.rsqrt(self.var.float() + 1e-8)
        return scaled.clamp(-self.CLIP, self.CLIP)

    @torch.no_grad()
    def update(self, sums: Tensor) -> None:
        """Merge a batch, given as `algo.normalize.shifted_sums` over all ranks, shifted by `mean`."""
        merged = merge(self.moments, sums)
        self.count.copy_(merged.count)
        self.mean.copy_(merged.mean)
        self.var.copy_(merged.var)


class ActorCritic(nn.Module):
    """Base of the MLP policies: trunks, value head, normaliser; a subclass turns features into a distribution."""

    def __init__(self, observation_shape: tuple[int, ...], outputs: int, config: MlpConfig, normalize: bool) -> None:
        super().__init__()
        self.normalizer = ObservationNormalizer(observation_shape) if normalize else None
        self._size = math.prod(observation_shape)
        self.policy = _trunk(self._size, config.hidden, outputs, _ACTIVATIONS[config.activation])
        self.value = _trunk(self._size, config.hidden, 1, _ACTIVATIONS[config.activation])

    def features(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return [N, outputs] and [N] as float32; not views, which FSDP cannot hook safely."""
        if self.normalizer is not None:
            observations = self.normalizer(observations)
        flat = observations.reshape(len(observations), self._size).to(cast(nn.Linear, self.policy[0]).weight.dtype)
        return self.policy(flat).float(), self.value(flat).float().sum(dim=-1)


class DiscretePolicy(ActorCritic):
    """A categorical policy."""

    def __init__(self, spaces: Spaces, actions: DiscreteActions, config: MlpConfig, normalize: bool) -> None:
        super().__init__(spaces.observation_shape, actions.n, config, normalize)

    def forward(self, observations: Tensor) -> DiscreteOutput:
        logits, values = self.features(observations)
        return DiscreteOutput(logits, values)


class ContinuousPolicy(ActorCritic):
    """A diagonal normal policy with one learned log deviation per action element."""

    def __init__(self, spaces: Spaces, actions: ContinuousActions, config: MlpConfig, normalize: bool) -> None:
        super().__init__(spaces.observation_shape, math.prod(actions.shape), config, normalize)
        self.action_shape = actions.shape
        # One dimension, not the action's shape: FSDP cannot shard a scalar.
        self.log_std = nn.Parameter(torch.full((math.prod(actions.shape),), config.initial_log_std))

    def forward(self, observations: Tensor) -> ContinuousOutput:
        means, values = self.features(observations)
        if len(self.action_shape) != 1:
            means = means.view(len(means), *self.action_shape).clone()
        return ContinuousOutput(means, self.log_std.float().view(self.action_shape).clone(), values)


def build_policy(spaces: Spaces, actor: ActorConfig, algorithm: AlgorithmConfig, seed: int) -> ActorCritic:
    """Build the policy of a job on the host, in float32. The same arguments give the same weights in every process.

    Orthogonal initialisation with gain sqrt(2) in the trunks, 0.01 at the policy head and 1 at the value head
    (Andrychowicz et al. 2021, arXiv:2006.05990, section 3.2: a small last policy layer matters most).
    """
    policy: ActorCritic
    if isinstance(spaces.actions, DiscreteActions):
        policy = DiscretePolicy(spaces, spaces.actions, actor.mlp, algorithm.normalize_observations)
    else:
        policy = ContinuousPolicy(spaces, spaces.actions, actor.mlp, algorithm.normalize_observations)
    generator = torch.Generator().manual_seed(seed)
    _initialise(policy.policy, 0.01, generator)
    _initialise(policy.value, 1.0, generator)
    return policy


def _trunk(inputs: int, hidden: tuple[int, ...], outputs: int, activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), activation()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def _initialise(trunk: nn.Sequential, head_gain: float, generator: torch.Generator) -> None:
    linears = [layer for layer in trunk if isinstance(layer, nn.Linear)]
    for linear in linears:
        nn.init.orthogonal_(linear.weight, head_gain if linear is linears[-1] else math.sqrt(2.0), generator)
        nn.init.zeros_(linear.bias)
