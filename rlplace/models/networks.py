"""Policies of a network that autograd differentiates: convolutions for images, or a module of the user's own.

A network takes observations and returns what the heads of a policy do::

    forward(observations) -> outputs [N, K] and values [N]

    observations    [N, *O], or of a Dict or Tuple a tensor for each entry by name: numbers float32 and normalised where
                    the job normalises, images uint8 as the simulator shows them
    outputs         K logits of a choice among K, or K means of a continuous action of K elements

One with a memory is given sequences, step by step, and returns what it remembers after them; without `begins` they are
of one step, and no episode begins::

    forward(observations, memory [M, S], begins [L, M] = None) -> outputs [L * M, K], values [L * M], memory [M, S]

Letters: N observations, O observation shape, K outputs, C channels, H height, W width, M sequences, L their steps, S
numbers of the memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlplace.config.policies import CnnConfig, ModuleConfig
from rlplace.envs.contract import (
    Actions,
    ContinuousActions,
    Spaces,
    channels_last,
    image_size,
)
from rlplace.errors import ConfigError
from rlplace.models.mlp import (
    ObservationNormalizer,
    PolicyOutput,
    initialise,
    noise_shape,
    output_of,
)
from rlplace.models.own_module import find_module, not_a_module

Observed = Tensor | Mapping[str, Tensor]
# Kernel and stride of each layer (Mnih et al. 2015, doi:10.1038/nature14236)
_NATURE = (
    (8, 4),
    (4, 2),
    (3, 1),
)
_NATURE_CHANNELS = (32, 64, 64)
_IMPALA_CHANNELS = (16, 32, 32)
_BESIDE = 64  # features of the numbers beside images
BRIGHTEST = 255.0


class Sequences(NamedTuple):
    """Neighbouring steps of M environments, from which a policy with memory learns; before them b steps of burn-in."""

    observations: Tensor  # [b + L, M, row]
    begins: Tensor  # [b + L, M] bool, an episode begins with this step
    memory: Tensor  # [M, S] float32 before the first step
    alone: Tensor  # [M] bool, there are no steps before it: nothing to burn in
    burn_in: int
    learned: Tensor | None  # [n] which of the L * M steps are learned from; None: all


class NetworkPolicy(nn.Module):
    """A network, the normaliser of the numbers in its observations, and the deviation of continuous actions.

    It is always in eval mode: what was decided and what is learned from it must have the same probabilities.
    """

    by_hand = False

    def __init__(
        self,
        spaces: Spaces,
        network: nn.Module,
        *,
        normalize: bool,
        initial_log_std: float,
    ) -> None:
        super().__init__()
        self._spaces = spaces
        self.actions = spaces.actions
        self.network = network
        self.remembered = spaces.memory
        numbers = spaces.numbers - spaces.memory
        self.normalizer = (
            ObservationNormalizer((numbers,)) if normalize and numbers else None
        )
        if isinstance(spaces.actions, ContinuousActions):
            self.log_std = nn.Parameter(
                torch.full((math.prod(spaces.actions.shape),), initial_log_std)
            )
        self.eval()

    def forward(self, observations: Tensor) -> PolicyOutput:
        """Decide on [N, *O], or rows of as many elements."""
        return self.decide(observations)[0]

    def decide(self, observations: Tensor) -> tuple[PolicyOutput, Tensor]:
        """Decide as `forward`; return also [N, S] what is remembered from then on."""
        memory = self.memory(observations)
        if not len(observations):
            outputs, values = self.nothing(observations)
        elif self.remembered:
            outputs, values, memory = self.network(self.inputs(observations), memory)
        else:
            outputs, values = self.network(self.inputs(observations))
        return output_of(
            self.actions, outputs, values, getattr(self, "log_std", None)
        ), memory

    def inputs(
        self, observations: Tensor, dtype: torch.dtype = torch.float32
    ) -> Observed:
        """Return what the network takes; `dtype`: of numbers, images stay uint8."""
        spaces = self._spaces
        number = 0
        rows = self._rows(observations)
        byte = 4 * spaces.numbers
        numbers = self.numbers(observations)
        if self.normalizer is not None:
            numbers = self.normalizer(numbers)
        found: dict[str, Tensor] = {}
        for entry in spaces.entries:
            if entry.dtype == "float32":
                part = numbers[:, number : number + entry.size].to(dtype)
                number = number + entry.size
            else:
                part = rows[:, byte : byte + entry.size]
                byte = byte + entry.size
            found[entry.name] = part.reshape(-1, *entry.shape)
        return found.get("", found)

    def remembering(self, shown: Tensor, memory: Tensor) -> Tensor:
        """Return [N, row] what the simulator shows, with the memory [N, S] before it."""
        return torch.cat([memory.view(shown.dtype), shown.flatten(1)], dim=1)

    def nothing(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and values of no observation, which not every network takes."""
        outputs = torch.zeros(
            (0, math.prod(noise_shape(self.actions))), device=observations.device
        )
        return outputs, outputs.sum(dim=1)

    def numbers(self, observations: Tensor) -> Tensor:
        """Return [N, numbers] float32 that the simulator shows, not normalised: what the normaliser counts."""
        return self._floats(observations)[:, self.remembered :]

    def memory(self, observations: Tensor) -> Tensor:
        """Return [N, S] float32 what is remembered of each row."""
        return self._floats(observations)[:, : self.remembered]

    def _floats(self, observations: Tensor) -> Tensor:
        """Return [N, numbers] all float32 numbers of the observations."""
        rows = self._rows(observations)
        count = self._spaces.numbers
        if rows.dtype == torch.float32:
            return rows
        if not count:
            return rows[:, :0].float()
        # Clone: aligned
        return (
            rows[:, : 4 * count].flatten().clone().view(torch.float32).view(-1, count)
        )

    def _rows(self, observations: Tensor) -> Tensor:
        # Of any N also once it is traced
        return observations.reshape(-1, math.prod(self._spaces.observation_shape))

    def prepared(self, observations: Tensor) -> Tensor:
        """Return the observations as `Passes` take them: as they are, since each pass normalises its own."""
        return observations


class NetworkPass:
    """Forward and backward passes of a network by autograd, over slices of one tensor of weights and one of slopes."""

    def __init__(
        self,
        policy: NetworkPolicy,
        weights: Mapping[str, Tensor],
        slopes: Mapping[str, Tensor],
    ) -> None:
        """Both by name of the policy's parameter; of the dtype that is computed in."""
        self._policy = policy
        prefix = "network."
        self._leaves = {
            name.removeprefix(prefix): weight.detach().requires_grad_()
            for name, weight in weights.items()
            if name.startswith(prefix)
        }
        self._slopes = {name: slopes[prefix + name] for name in self._leaves}
        self._found: tuple[Tensor, ...] = ()

    def forward(self, observations: Tensor | Sequences) -> tuple[Tensor, Tensor]:
        """Return outputs and values of the observations, or of the steps of sequences that are learned from."""
        self._found = ()
        given = (
            observations.begins.t()
            if isinstance(observations, Sequences)
            else observations
        )
        if not len(given):
            return self._policy.nothing(given)
        if isinstance(observations, Sequences):
            self._found = self._unrolled(observations)
        else:
            memory = (
                [self._policy.memory(observations)] if self._policy.remembered else []
            )
            with torch.enable_grad():
                self._found = self._call(observations, *memory)[:2]
        outputs, values = (each.detach().float() for each in self._found)
        return outputs, values

    def _unrolled(self, given: Sequences) -> tuple[Tensor, Tensor]:
        def run(steps: slice, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            outputs, values, after = self._call(
                given.observations[steps].flatten(0, 1), memory, given.begins[steps]
            )
            return outputs, values, after

        memory = given.memory
        if given.burn_in:
            with torch.no_grad():
                burned = run(slice(given.burn_in), memory)[2]
            memory = torch.where(given.alone[:, None], memory, burned.float())
        with torch.enable_grad():
            outputs, values, _ = run(slice(given.burn_in, None), memory)
            if given.learned is not None:
                outputs = outputs[given.learned]
                values = values[given.learned]
        return outputs, values

    def _call(self, observations: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        dtype = next(iter(self._leaves.values())).dtype
        given = (self._policy.inputs(observations, dtype), *memory)
        found: tuple[Tensor, ...] = torch.func.functional_call(
            self._policy.network, self._leaves, given
        )
        return found

    def backward(self, outputs: Tensor, values: Tensor) -> None:
        """Write the slopes of all parameters, from those of what `forward` returned; what no output uses has none."""
        for name, leaf in self._leaves.items():
            leaf.grad = self._slopes[name].zero_()
        if self._found:
            slopes = [
                s.to(f.dtype)
                for s, f in zip((outputs, values), self._found, strict=True)
            ]
            torch.autograd.backward(self._found, slopes)
        self._found = ()


# ── networks ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class ImageEncoder(nn.Module):
    """Convolutions for each image, a layer for the numbers beside them; all features [N, F] together, then layers.

    An image is [H, W], [H, W, C] or [C, H, W], or a stack of these in time, whose frames become channels.
    """

    def __init__(self, spaces: Spaces, config: CnnConfig) -> None:
        super().__init__()
        self._entries = spaces.entries
        self._images = spaces.images
        shapes = [entry.shape for entry in spaces.images]
        self.images = nn.ModuleList(
            _convolutions(config, image_size(shape)) for shape in shapes
        )
        numbers = sum(
            entry.size for entry in spaces.entries if entry not in spaces.images
        )
        self.numbers = nn.Linear(numbers, _BESIDE) if numbers else None
        with torch.device("meta"):
            sizes = [
                _convolutions(config, at)(torch.empty(1, *at)).numel()
                for at in map(image_size, shapes)
            ]
        widths = [sum(sizes) + (_BESIDE if numbers else 0), *config.hidden]
        layers = [
            nn.Sequential(nn.Linear(*pair), nn.ReLU())
            for pair in itertools.pairwise(widths)
        ]
        self.joint = nn.Sequential(*layers)
        self.features = widths[-1]

    def initialise(self, generator: torch.Generator) -> None:
        """Make the first weights."""
        weighted = [m for m in self.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        initialise(weighted, math.sqrt(2.0), generator)

    def forward(self, observations: Observed) -> Tensor:
        by_name = (
            {"": observations} if isinstance(observations, Tensor) else observations
        )
        features = []
        numbers = []
        images = iter(self.images)
        dtype = next(self.parameters()).dtype
        for entry in self._entries:
            given = by_name[entry.name]
            if entry in self._images:
                scaled = (
                    given.to(dtype) / BRIGHTEST
                    if given.dtype == torch.uint8
                    else given.to(dtype)
                )
                features.append(next(images)(as_channels_first(scaled)))
            else:
                numbers.append(given.flatten(1).to(dtype))
        if self.numbers is not None:
            features.append(torch.relu(self.numbers(torch.cat(numbers, dim=1))))
        joined: Tensor = self.joint(torch.cat(features, dim=1))
        return joined


class ImageNetwork(ImageEncoder):
    """An encoder of images, and both heads."""

    def __init__(self, spaces: Spaces, config: CnnConfig) -> None:
        super().__init__(spaces, config)
        self.policy, self.value = heads(self.features, spaces.actions)

    def initialise(self, generator: torch.Generator) -> None:
        super().initialise(generator)
        initialise([self.policy], 0.01, generator)
        initialise([self.value], 1.0, generator)

    def forward(self, observations: Observed) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # more than features
        joined = super().forward(observations)
        return self.policy(joined), self.value(joined)[:, 0]


def heads(features: int, actions: Actions) -> tuple[nn.Linear, nn.Linear]:
    """Make the heads of a policy and its value."""
    return nn.Linear(features, math.prod(noise_shape(actions))), nn.Linear(features, 1)


def as_channels_first(images: Tensor) -> Tensor:
    """Return [N, C, H, W] of [N, H, W], [N, H, W, C], [N, C, H, W] or a stack [N, T, H, W, C]; T x C are channels."""
    if images.dim() == 3:
        return images.unsqueeze(1)
    if channels_last(images.shape[-3:]):
        images = images.movedim(-1, -3)
    return images.flatten(1, -3)


class _Residual(nn.Module):
    """Two convolutions that are added to what they are given."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        each = [
            m
            for _ in range(2)
            for m in (nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))
        ]
        self.added = nn.Sequential(*each)

    def forward(self, given: Tensor) -> Tensor:
        added: Tensor = self.added(given)
        return given + added


def _convolutions(config: CnnConfig, image: tuple[int, int, int]) -> nn.Sequential:
    """Return a network from [N, C, H, W] to features [N, F].

    nature: three layers of Mnih et al. 2015. impala: stages of Espeholt et al. 2018 (arXiv:1802.01561, figure 3), each
    half as large as the one before.
    """
    layers: list[nn.Module] = []
    channels = image[0]
    if config.network == "nature":
        for width, (kernel, stride) in zip(
            config.channels or _NATURE_CHANNELS, _NATURE, strict=True
        ):
            layers += [nn.Conv2d(channels, width, kernel, stride), nn.ReLU()]
            channels = width
    else:
        for width in config.channels or _IMPALA_CHANNELS:
            layers += [
                nn.Conv2d(channels, width, 3, padding=1),
                nn.MaxPool2d(3, 2, padding=1),
            ]
            layers += [_Residual(width), _Residual(width)]
            channels = width
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.Flatten())


def own_network(spaces: Spaces, config: ModuleConfig) -> nn.Module:
    """Make the user's module: `Class(spaces, **kwargs)`. Raises ConfigError where there is none, it takes
    other arguments, or one of its parameters is frozen.
    """
    kind = find_module(config)
    if (problem := not_a_module(kind, config.name)) is not None:
        raise ConfigError([problem])
    try:
        module: nn.Module = kind(spaces, **config.kwargs)
    except TypeError as error:
        what = "the module does not take these arguments"
        got = ", ".join(f"{k}: {v}" for k, v in config.kwargs.items())
        why = f"{config.name}: {error}; it gets rlplace.envs.contract.Spaces first"
        raise ConfigError.of(
            "bad-module-kwargs", "actor.model.kwargs", what, got, why, "kwargs: {}"
        ) from error
    frozen = next(
        (
            name
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad
        ),
        None,
    )
    if frozen is not None:
        what = "a parameter is frozen (requires_grad=False)"
        why = "all parameters of a policy are trained"
        fix = "keep what is not trained as a buffer: self.register_buffer(name, tensor)"
        raise ConfigError.of(
            "bad-network", "actor.model", what, f"{config.name}: {frozen}", why, fix
        )
    return module
