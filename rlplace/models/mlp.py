"""MLP policies of simulators: an actor-critic of two trunks; and the distributions of actions of all policies.

The observation normaliser is part of the module, so weight sync carries it. Sampling is a pure function of noise that
the caller draws for each environment row: a row gets the same action however rows are spread over ranks.

Letters: N observations, O observation shape, A action shape, n choices, K outputs of the policy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlplace.algo.normalize import Moments, merge, no_moments
from rlplace.config.blocks.policies import MlpConfig
from rlplace.envs.contract import (
    Actions,
    ContinuousActions,
    DenoisedActions,
    DiscreteActions,
    MultiDiscreteActions,
    Spaces,
)
from rlplace.models.flow import DenoisedOutput

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}
HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class DiscreteOutput(NamedTuple):
    """Output of a policy with discrete actions: for each of N observations, a categorical distribution over n actions,
    and the value of the observation.

    `logits`: [N, n] float32. `values`: [N] float32.
    """

    logits: Tensor  # [N, n] float32
    values: Tensor  # [N] float32


class ContinuousOutput(NamedTuple):
    """Output of a policy with continuous actions: for each of N observations, normal distributions of the elements of
    an action, and the value of the observation.

    The elements are independent, and the standard deviation does not depend on the observation. `means`: [N, *shape of
    an action]. `log_std`: [*shape of an action], log of the standard deviations. `values`: [N]. All are float32.
    """

    means: Tensor  # [N, *A] float32
    log_std: Tensor  # [*A] float32
    values: Tensor  # [N] float32


class MultiDiscreteOutput(NamedTuple):
    """Output of a policy whose actions are several independent choices: for each of N observations, the distribution of
    each choice, and the value of the observation.

    `logits` [N, all choices] float32: the logits of the first choice, then the logits of the second choice, and so on.
    `actions`: the number of options of each choice. `values`: [N] float32.
    """

    logits: Tensor  # [N, sum of n] float32
    actions: MultiDiscreteActions
    values: Tensor  # [N] float32


PolicyOutput = DiscreteOutput | MultiDiscreteOutput | ContinuousOutput | DenoisedOutput


class ObservationNormalizer(nn.Module):
    """Normalises observations by their running mean and variance, and clips them to 10 standard deviations.

    `count`, `mean`, `var`: the running moments, kept as buffers, which only `update` changes.
    """

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
        """The running moments of the observations."""
        return Moments(count=self.count, mean=self.mean, var=self.var)

    def forward(self, observations: Tensor) -> Tensor:
        """Return normalised observations, as float32, in the shape of `observations`."""
        scale = torch.rsqrt(self.var.float() + 1e-8)
        scaled = (observations - self.mean.float()) * scale
        return scaled.clamp(-self.CLIP, self.CLIP)

    @torch.no_grad()
    def update(self, sums: Tensor) -> None:
        """Merge a batch of observations into the running moments.

        `sums`: sums over the batch as `algo.normalize.shifted_sums` makes them, shifted by `mean` and summed over all
        ranks.
        """
        merged = merge(self.moments, sums)
        self.count.copy_(merged.count)
        self.mean.copy_(merged.mean)
        self.var.copy_(merged.var)


class ActorCritic(nn.Module):
    """Two separate MLPs, for policy and value.

    The policy is categorical, or normal with one learned standard deviation for each element of an action. `normalize`:
    whether observations are normalised.
    """

    # Training computes its backward pass without autograd: see `models.passes`
    manual_backward = True
    # Numbers of a memory
    remembered = 0

    def __init__(
        self,
        spaces: Spaces,
        config: MlpConfig,
        normalize: bool,
    ) -> None:
        super().__init__()
        self.normalizer: ObservationNormalizer | None = None
        if normalize:
            self.normalizer = ObservationNormalizer(spaces.observation_shape)
        self._size = math.prod(spaces.observation_shape)
        self.actions = spaces.actions
        # Both trunks have the same hidden layers
        outputs = math.prod(noise_shape(spaces.actions))
        activation = ACTIVATIONS[config.activation]
        self.policy = _trunk(self._size, config.hidden, outputs, activation)
        self.value = _trunk(self._size, config.hidden, 1, activation)
        if isinstance(spaces.actions, ContinuousActions):
            self.log_std = nn.Parameter(torch.full((outputs,), config.initial_log_std))

    def forward(self, observations: Tensor) -> PolicyOutput:
        """Return the distributions of actions and the values for N observations, [N, *shape of an observation]."""
        if self.normalizer is not None:
            observations = self.normalizer(observations)
        # -1: a traced module then takes any number of observations
        flat = observations.reshape(-1, self._size)
        return output_of(
            self.actions,
            self.policy(flat),
            self.value(flat)[:, 0],
            getattr(self, "log_std", None),
        )

    def numbers(self, observations: Tensor) -> Tensor:
        """Return the part of the observations from which the normaliser computes its moments: here, all of them."""
        return observations

    def prepared(self, observations: Tensor) -> Tensor:
        """Return observations in the form that `Passes.forward` takes: normalised, if this policy normalises.

        `observations`: N observations, [N, *shape of an observation].
        """
        if self.normalizer is None:
            return observations
        return self.normalizer(observations)


def _trunk(
    inputs: int,
    hidden: tuple[int, ...],
    outputs: int,
    activation: type[nn.Module],
) -> nn.Sequential:
    """Return an MLP: linear layers of the `hidden` widths with activations, and a linear output layer.

    `inputs`, `outputs`: the widths of the first input and the last output.
    """
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
    """Initialise `linears` with orthogonal weights of gain sqrt(2), the last with gain `head_gain`, and zero biases.

    Andrychowicz et al. 2021, arXiv:2006.05990, section 3.2: a small last policy layer matters most.
    """
    for layer in linears:
        gain = head_gain if layer is linears[-1] else math.sqrt(2.0)
        nn.init.orthogonal_(layer.weight, gain, generator)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


# ── action distributions ─────────────────────────────────────────────────────────────────────────────────────────────


def noise_shape(actions: Actions) -> tuple[int, ...]:
    """Return the shape of the random numbers from which `sample` draws one action.

    The numbers are uniform in [0, 1) for choices, and standard normal for continuous actions.
    """
    if isinstance(actions, MultiDiscreteActions):
        return (sum(actions.n),)
    if isinstance(actions, DiscreteActions):
        return (actions.n,)
    return actions.shape


def output_size(actions: Actions) -> int:
    """Return the number of outputs of a network that decides on actions: K."""
    if isinstance(actions, DenoisedActions):
        # A velocity for each step of a chain: none for the first noise
        return math.prod(actions.shape) - math.prod(actions.taken.shape)
    return math.prod(noise_shape(actions))


def output_of(
    actions: Actions,
    outputs: Tensor,
    values: Tensor,
    log_std: Tensor | None,
) -> PolicyOutput:
    """Return the distributions of actions and the values that a network's outputs describe.

    `outputs`: K numbers for each of N observations, [N, K]. `values`: [N]. `log_std` [K]: log of the standard
    deviations; needed for continuous actions only.
    """
    if isinstance(actions, DiscreteActions):
        return DiscreteOutput(outputs, values)
    if isinstance(actions, MultiDiscreteActions):
        return MultiDiscreteOutput(outputs, actions, values)
    assert isinstance(actions, ContinuousActions), "chains have their own output"
    assert log_std is not None, "continuous actions have a deviation"
    return ContinuousOutput(
        outputs.view(-1, *actions.shape),
        log_std.view(actions.shape),
        values,
    )


def sample(output: PolicyOutput, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return actions for N observations and their log-probabilities, [N] float32.

    Discrete actions are int64, [N] or [N, *shape of an action]; continuous actions are float32, [N, *shape of an
    action]. `output`: the distributions to draw from. `noise`: for choices [N, all logits], uniform in [0, 1); for
    continuous actions in the shape of the actions, standard normal. Choices are drawn by the Gumbel-max trick: the
    argmax of logits plus Gumbel noise is a draw from the softmax (Maddison et al. 2014, arXiv:1411.0030). Actions made
    from noise are chains, which hold the noise and the result of each step.
    """
    if isinstance(output, DenoisedOutput):
        return output.sample(noise)
    if isinstance(output, DiscreteOutput | MultiDiscreteOutput):
        # Away from 0 and 1, where the logarithms are infinite
        smallest = torch.finfo(torch.float32).tiny
        largest = 1.0 - 2.0**-24
        uniform = noise.clamp(smallest, largest)
        gumbel = -torch.log(-torch.log(uniform))
        perturbed = output._replace(logits=output.logits + gumbel)
        actions = mode(perturbed)
    else:
        std = output.log_std.exp()
        actions = output.means + std * noise
    return actions, logprob(output, actions)


def mode(output: PolicyOutput) -> Tensor:
    """Return the most probable action of each of the N distributions in `output`.

    Discrete actions are int64, [N] or [N, *shape of an action]; continuous actions are float32, [N, *shape of an
    action]. An action made from noise is the result of the flow without further noise, from the most probable first
    noise; it is the action alone, without its chain.
    """
    if isinstance(output, MultiDiscreteOutput):
        chosen = []
        for part in output.logits.split(output.actions.n, dim=-1):
            chosen.append(part.argmax(dim=-1))
        return torch.stack(chosen, dim=-1).view(-1, *output.actions.shape)
    if isinstance(output, DiscreteOutput):
        return output.logits.argmax(dim=-1)
    if isinstance(output, DenoisedOutput):
        return output.greedy()
    return output.means


def logprob(output: PolicyOutput, actions: Tensor) -> Tensor:
    """Return the log-probability of each of N `actions`, [N]; the log-density if actions are continuous.

    `output`: the distributions. Log-probabilities are summed over the elements of an action.
    """
    if isinstance(output, DiscreteOutput):
        index = actions.unsqueeze(-1)
        logprobs = output.logits.log_softmax(dim=-1)
        return logprobs.gather(-1, index).squeeze(-1)
    if isinstance(output, MultiDiscreteOutput):
        firsts = first_logits(output.actions, actions.device)
        index = actions.flatten(1) + firsts
        logprobs = choice_logprobs(output.logits, output.actions)
        return logprobs.gather(-1, index).sum(dim=-1)
    if isinstance(output, DenoisedOutput):
        return output.logprob(actions)
    # Normal density: -0.5 z^2 - log std - 0.5 log(2 pi) for each element
    z = (actions - output.means) * torch.exp(-output.log_std)
    size = output.log_std.numel()
    squares = z.square().reshape(len(z), size).sum(dim=-1)
    constant = output.log_std.sum() + size * HALF_LOG_2PI
    return -0.5 * squares - constant


def choice_logprobs(logits: Tensor, actions: MultiDiscreteActions) -> Tensor:
    """Return the log-probability of every option of every choice, in the shape of `logits`.

    `logits` [observations, all options]: options of the first choice, then of the second choice, and so on.
    Probabilities of the options of one choice sum to 1.
    """
    normalised = []
    for part in logits.split(actions.n, dim=-1):
        normalised.append(part.log_softmax(dim=-1))
    return torch.cat(normalised, dim=-1)


def first_logits(actions: MultiDiscreteActions, device: torch.device) -> Tensor:
    """Return, for each element of an action, the index of its first logit, as int64 on `device`."""
    return torch.tensor([0, *itertools.accumulate(actions.n)][:-1], device=device)
