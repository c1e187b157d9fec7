"""Policies of a network that autograd differentiates: convolutions for images, or a custom module.

A network takes observations and returns the outputs of both heads::

    forward(observations) -> outputs [N, K] and values [N]

    observations    [N, *O]; for a Dict or Tuple space a mapping from name to tensor. Numbers are float32,
                    normalised if the job normalises. Images are uint8 as the simulator gives them.
    outputs         K logits of one choice among K, or K means of a continuous action with K elements

A network with a memory takes sequences, step by step, and returns the memory after the last step. Without `begins` the
sequences have one step, and no episode begins::

    forward(observations, memory [M, S], begins [L, M] = None) -> outputs [L * M, K], values [L * M], memory [M, S]

Letters: N observations, O observation shape, K outputs, C channels, H height, W width, M sequences, L their steps, S
numbers of the memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlplace.codes import config_error
from rlplace.config.blocks.policies import CnnConfig, ModuleConfig
from rlplace.envs.contract import (
    Actions,
    ContinuousActions,
    DenoisedActions,
    Spaces,
    channels_last,
    image_size,
)
from rlplace.errors import ConfigError
from rlplace.models.custom_module import find_module, not_a_module
from rlplace.models.flow import DenoisedOutput, Velocity, noise_schedule
from rlplace.models.mlp import (
    ObservationNormalizer,
    PolicyOutput,
    initialise,
    noise_shape,
    output_of,
    output_size,
)

Observed = Tensor | Mapping[str, Tensor]
# Kernel and stride of each layer (Mnih et al. 2015, doi:10.1038/nature14236)
_NATURE = (
    (8, 4),
    (4, 2),
    (3, 1),
)
_NATURE_CHANNELS = (32, 64, 64)
_IMPALA_CHANNELS = (16, 32, 32)
# Features of all numbers that come with images
_BESIDE = 64
BRIGHTEST = 255.0


class Sequences(NamedTuple):
    """Sequences of M environments, for training a policy with memory: b steps of burn-in, then L steps to learn from.

    The burn-in brings the memory up to date with the present weights. `observations`: [b + L, M, numbers of an
    observation]. `begins`: [b + L, M], true where an episode begins with the step. `memory`: [M, size of a memory],
    before the first step. `alone`: [M], true where no earlier step exists, so that the burn-in is not used. `burn_in`:
    b. `learned`: indices of the steps to learn from among the L * M steps; None: all.
    """

    observations: Tensor  # [b + L, M, row]
    begins: Tensor  # [b + L, M] bool: an episode begins with this step
    memory: Tensor  # [M, S] float32, before the first step
    alone: Tensor  # [M] bool: no step comes before, so there is no burn-in
    burn_in: int  # b
    learned: Tensor | None  # [n] indices of the L * M steps to learn from; None: all


class NetworkPolicy(nn.Module):
    """A policy: a network, a normaliser for the numbers in its observations, and log standard deviations of continuous
    actions.

    It is always in eval mode, because probabilities in training must equal those at decision time.
    """

    # Training uses autograd
    manual_backward = False

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
        # The memory is part of an observation's row, but is not normalised
        numbers = spaces.numbers - spaces.memory
        self.normalizer: ObservationNormalizer | None = None
        if normalize and numbers:
            self.normalizer = ObservationNormalizer((numbers,))
        if isinstance(spaces.actions, ContinuousActions):
            elements = math.prod(spaces.actions.shape)
            self.log_std = nn.Parameter(torch.full((elements,), initial_log_std))
        self.eval()

    def forward(self, observations: Tensor) -> PolicyOutput:
        """Return the distributions of actions for N observations.

        `observations`: [N, *shape of an observation], or flattened to one row for each observation.
        """
        return self.decide(observations)[0]

    def decide(self, observations: Tensor) -> tuple[PolicyOutput, Tensor]:
        """Return the distributions of actions for N observations, and the memory [N, size of a memory] after them."""
        memory = self.memory(observations)
        if not len(observations):
            outputs, values = self.nothing(observations)
        elif self.remembered:
            outputs, values, memory = self.network(self.inputs(observations), memory)
        else:
            outputs, values = self.network(self.inputs(observations))
        log_std = getattr(self, "log_std", None)
        return output_of(self.actions, outputs, values, log_std), memory

    def inputs(
        self,
        observations: Tensor,
        dtype: torch.dtype = torch.float32,
    ) -> Observed:
        """Return observations in the form that the network takes.

        `dtype`: dtype of numbers; images stay uint8.
        """
        spaces = self._spaces
        rows = self._rows(observations)
        numbers = self.numbers(observations)
        if self.normalizer is not None:
            numbers = self.normalizer(numbers)
        # A row has all float32 numbers first, 4 bytes each, then the bytes of images
        number = 0
        byte = 4 * spaces.numbers
        found: dict[str, Tensor] = {}
        for entry in spaces.entries:
            if entry.dtype == "float32":
                part = numbers[:, number : number + entry.size].to(dtype)
                number = number + entry.size
            else:
                part = rows[:, byte : byte + entry.size]
                byte = byte + entry.size
            found[entry.name] = part.reshape(-1, *entry.shape)
        # The only entry of a space without names is the observation itself
        return found.get("", found)

    def remembering(self, shown: Tensor, memory: Tensor) -> Tensor:
        """Return N rows that each have the memory and then, flattened, what the simulator shows.

        `shown`: [N, *shape of what the simulator shows]. `memory`: [N, size of a memory].
        """
        return torch.cat([memory.view(shown.dtype), shown.flatten(1)], dim=1)

    def nothing(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs and values for an empty batch: tensors of length 0.

        The network is not called, because not every network accepts an empty batch.
        """
        shape = (0, output_size(self.actions))
        outputs = torch.zeros(shape, device=observations.device)
        return outputs, outputs.sum(dim=1)

    def beside(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, ...]:
        """Return what the network takes beside observations when it learns: here, the memory, if there is one.

        `actions`: what was done at the N observations, [N, elements].
        """
        if self.remembered:
            return (self.memory(observations),)
        return ()

    def numbers(self, observations: Tensor) -> Tensor:
        """Return the numbers that the simulator shows in N observations, [N, numbers] float32, not normalised.

        The normaliser computes its moments from these numbers.
        """
        return self._floats(observations)[:, self.remembered :]

    def memory(self, observations: Tensor) -> Tensor:
        """Return the memory in each of N rows, [N, size of a memory] float32.

        `observations`: rows that begin with the memory.
        """
        return self._floats(observations)[:, : self.remembered]

    def _floats(self, observations: Tensor) -> Tensor:
        """Return all float32 numbers of N rows, [N, numbers]: the memory, then the simulator's numbers."""
        rows = self._rows(observations)
        count = self._spaces.numbers
        if rows.dtype == torch.float32:
            return rows
        if not count:
            return rows[:, :0].float()
        # Reinterpret bytes as float32; the clone has aligned memory
        stored = rows[:, : 4 * count].flatten().clone()
        return stored.view(torch.float32).view(-1, count)

    def _rows(self, observations: Tensor) -> Tensor:
        """Return N observations, flattened to [N, row]."""
        # -1: a traced module then takes any number of observations
        return observations.reshape(-1, math.prod(self._spaces.observation_shape))

    def prepared(self, observations: Tensor) -> Tensor:
        """Return observations in the form that `Passes.forward` takes: unchanged, because each pass normalises them."""
        return observations


class FlowPolicy(NetworkPolicy):
    """A policy that makes continuous actions from noise, by flow matching.

    Its network has two ways to be called::

        decide(observations) -> velocity(x [N, E], step) -> [N, E], and values [N]
        forward(observations, chains [N, (1 + k) * E]) -> velocities at all x but the last [N, k * E], and values [N]

    Letters: N observations, k steps, E elements of an action or of a chunk of actions.
    """

    def __init__(
        self, spaces: Spaces, network: nn.Module, *, normalize: bool, noise_level: float
    ) -> None:
        super().__init__(spaces, network, normalize=normalize, initial_log_std=0.0)
        assert isinstance(spaces.actions, DenoisedActions)
        self._shape = spaces.actions.shape
        self.schedule = noise_schedule(self._shape[0] - 1, noise_level)

    def decide(self, observations: Tensor) -> tuple[DenoisedOutput, Tensor]:
        """Return velocities and values for N observations, and a memory without elements."""
        velocity: Velocity = _no_velocity
        _, values = self.nothing(observations)
        if len(observations):
            network: Any = self.network
            velocity, values = network.decide(self.inputs(observations))
        output = DenoisedOutput(velocity, self.schedule, values, self._shape)
        return output, self.memory(observations)

    def beside(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, ...]:
        return (actions,)


def _no_velocity(points: Tensor, step: int) -> Tensor:
    """Return the velocities for an empty batch of points."""
    return points


class NetworkPass:
    """Forward and backward passes of a network by autograd.

    The network's weights are slices of one flat tensor; gradients are written to slices of another flat tensor.
    """

    def __init__(
        self,
        policy: NetworkPolicy,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> None:
        """Prepare passes of `policy`.

        `weights`: name of a parameter -> its weights. `gradients`: name of a parameter -> tensor for its gradient. All
        are in the dtype of the computation.
        """
        self._policy = policy
        # Leaves of autograd that share memory with the weights
        prefix = "network."
        self._leaves = {
            name.removeprefix(prefix): weight.detach().requires_grad_()
            for name, weight in weights.items()
            if name.startswith(prefix)
        }
        self._gradients = {name: gradients[prefix + name] for name in self._leaves}
        self._found: tuple[Tensor, ...] = ()

    def forward(
        self, observations: Tensor | Sequences, actions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return outputs [N, K] and values [N] in float32, for N observations or for the N learned steps of sequences.

        K is the number of outputs for one observation. `actions`: what was done, [N, elements].
        """
        self._found = ()
        given = observations
        if isinstance(given, Sequences):
            given = given.begins.t()
        # Not every network accepts an empty batch
        if not len(given):
            return self._policy.nothing(given)
        if isinstance(observations, Sequences):
            self._found = self._unrolled(observations)
        else:
            beside = self._policy.beside(observations, actions)
            with torch.enable_grad():
                self._found = self._call(observations, *beside)[:2]
        outputs, values = (each.detach().float() for each in self._found)
        return outputs, values

    def _unrolled(self, given: Sequences) -> tuple[Tensor, Tensor]:
        """Return outputs and values of the learned steps of sequences.

        Gradients flow through the learned steps only, not through the steps of burn-in.
        """

        def run(steps: slice, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            outputs, values, after = self._call(
                given.observations[steps].flatten(0, 1),
                memory,
                given.begins[steps],
            )
            return outputs, values, after

        # Burn-in: bring the stored memory up to date with the present weights
        memory = given.memory
        if given.burn_in:
            with torch.no_grad():
                burned = run(slice(given.burn_in), memory)[2]
            memory = torch.where(given.alone[:, None], memory, burned.float())
        # All learned steps in one call, then those that are selected
        with torch.enable_grad():
            outputs, values, _ = run(slice(given.burn_in, None), memory)
            if given.learned is not None:
                outputs = outputs[given.learned]
                values = values[given.learned]
        return outputs, values

    def _call(self, observations: Tensor, *beside: Tensor) -> tuple[Tensor, ...]:
        """Call the network with the flat weights, in their dtype, and return what it returns.

        `observations`: N observations, [N, *shape of an observation]. `beside`: the result of the policy's `beside`
        and, for sequences, the mask of steps with which episodes begin.
        """
        dtype = next(iter(self._leaves.values())).dtype
        given = (self._policy.inputs(observations, dtype), *beside)
        found: tuple[Tensor, ...] = torch.func.functional_call(
            self._policy.network,
            self._leaves,
            given,
        )
        return found

    def backward(self, outputs: Tensor, values: Tensor) -> None:
        """Write the gradients of all parameters.

        `outputs`, `values`: the gradients of the loss with respect to what the last `forward` has returned. A parameter
        that affects no output gets a gradient of zero.
        """
        # Autograd adds to these tensors
        for name, leaf in self._leaves.items():
            leaf.grad = self._gradients[name].zero_()
        if self._found:
            gradients = []
            for gradient, found in zip((outputs, values), self._found, strict=True):
                gradients.append(gradient.to(found.dtype))
            torch.autograd.backward(self._found, gradients)
        self._found = ()


# ── networks ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class ImageEncoder(nn.Module):
    """A network that computes F features [N, F] of N observations with images.

    Each image goes through convolutions, and all other numbers of an observation go through one layer; the results are
    joined and go through more layers. An image of height H and width W with C channels is [H, W], [H, W, C] or [C, H,
    W], or a stack of images in time, whose frames become channels.
    """

    def __init__(self, spaces: Spaces, config: CnnConfig) -> None:
        super().__init__()
        self._entries = spaces.entries
        self._images = spaces.images
        shapes = [entry.shape for entry in spaces.images]
        # Convolutions for each image
        self.images = nn.ModuleList(
            _convolutions(config, image_size(shape)) for shape in shapes
        )
        # One layer for all numbers
        numbers = sum(
            entry.size for entry in spaces.entries if entry not in spaces.images
        )
        self.numbers = nn.Linear(numbers, _BESIDE) if numbers else None
        # Features of the convolutions, found without computing
        with torch.device("meta"):
            joined = 0
            for shape in shapes:
                size = image_size(shape)
                convolutions = _convolutions(config, size)
                joined += convolutions(torch.empty(1, *size)).numel()
        if numbers:
            joined += _BESIDE
        # Layers over all features together
        widths = [joined, *config.hidden]
        layers = []
        for inputs, outputs in itertools.pairwise(widths):
            layers.append(nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU()))
        self.joint = nn.Sequential(*layers)
        self.features = widths[-1]

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise all weights."""
        weighted = [m for m in self.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        initialise(weighted, math.sqrt(2.0), generator)

    def forward(self, observations: Observed) -> Tensor:
        """Return F features for each of N observations, [N, F]."""
        by_name = entries_of(observations)
        features = []
        numbers = []
        images = iter(self.images)
        dtype = next(self.parameters()).dtype
        for entry in self._entries:
            given = by_name[entry.name]
            if entry in self._images:
                pixels = scaled_pixels(given, dtype)
                features.append(next(images)(as_channels_first(pixels)))
            else:
                numbers.append(given.flatten(1).to(dtype))
        if self.numbers is not None:
            features.append(torch.relu(self.numbers(torch.cat(numbers, dim=1))))
        joined: Tensor = self.joint(torch.cat(features, dim=1))
        return joined


class ImageNetwork(ImageEncoder):
    """An image encoder with the heads of policy and value."""

    def __init__(self, spaces: Spaces, config: CnnConfig) -> None:
        super().__init__(spaces, config)
        self.policy, self.value = heads(self.features, spaces.actions)

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise all weights, with a small policy head."""
        super().initialise(generator)
        initialise([self.policy], 0.01, generator)
        initialise([self.value], 1.0, generator)

    def forward(self, observations: Observed) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # more than features
        """Return outputs [N, K] and values [N] for N observations, with K outputs of the policy."""
        joined = super().forward(observations)
        outputs = self.policy(joined)
        values = self.value(joined)[:, 0]
        return outputs, values


def heads(features: int, actions: Actions) -> tuple[nn.Linear, nn.Linear]:
    """Return the linear layers for the outputs of the policy and for the value.

    `features`: the number of features that each layer takes.
    """
    outputs = math.prod(noise_shape(actions))
    policy = nn.Linear(features, outputs)
    value = nn.Linear(features, 1)
    return policy, value


def entries_of(observations: Observed) -> Mapping[str, Tensor]:
    """Return name -> tensor, for each entry of the observations. If they are a single tensor, its name is ""."""
    if isinstance(observations, Tensor):
        return {"": observations}
    return observations


def scaled_pixels(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Return images as `dtype`; bytes 0 to 255 become numbers 0 to 1."""
    pixels = images.to(dtype)
    if images.dtype == torch.uint8:
        return pixels / BRIGHTEST
    return pixels


def as_channels_first(images: Tensor) -> Tensor:
    """Return N images as [N, C, H, W], with C channels, height H and width W.

    Takes [N, H, W], [N, H, W, C], [N, C, H, W], or a stack of T frames [N, T, H, W, C], whose T * C channels are
    joined.
    """
    if images.dim() == 3:
        return images.unsqueeze(1)
    if channels_last(images.shape[-3:]):
        images = images.movedim(-1, -3)
    return images.flatten(1, -3)


class _Residual(nn.Module):
    """Residual block: the input plus the output of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        each: list[nn.Module] = []
        for _ in range(2):
            each += [nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)]
        self.added = nn.Sequential(*each)

    def forward(self, given: Tensor) -> Tensor:
        added: Tensor = self.added(given)
        return given + added


def _convolutions(config: CnnConfig, image: tuple[int, int, int]) -> nn.Sequential:
    """Return the convolutions for N images [N, C, H, W], with F features [N, F] as their result.

    `image`: channels C, height H and width W. Kinds in the config: "nature" has three layers (Mnih et al. 2015).
    "impala" has stages of a convolution, pooling to half the size and two residual blocks (Espeholt et al. 2018,
    arXiv:1802.01561, figure 3).
    """
    layers: list[nn.Module] = []
    channels = image[0]
    # A layer: number of channels, kernel, stride
    if config.network == "nature":
        for width, (kernel, stride) in zip(
            config.channels or _NATURE_CHANNELS,
            _NATURE,
            strict=True,
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


def custom_network(spaces: Spaces, config: ModuleConfig) -> nn.Module:
    """Return the user's module, made by calling its class with `spaces` and the keyword arguments in the config.

    Raises ConfigError if the class does not exist, takes other arguments, or has a frozen parameter.
    """
    kind = find_module(config)
    misfit = not_a_module(kind, config.name)
    if misfit is not None:
        raise ConfigError([misfit])
    # The class gets the spaces first
    try:
        module: nn.Module = kind(spaces, **config.kwargs)
    except TypeError as error:
        raise config_error(
            "bad-module-kwargs",
            "actor.model.kwargs",
            ", ".join(f"{k}: {v}" for k, v in config.kwargs.items()),
            error="raised",
            name=config.name,
            reason=str(error),
        ) from error
    # A policy has no frozen parameters
    frozen = None
    for name, parameter in module.named_parameters():
        if frozen is None and not parameter.requires_grad:
            frozen = name
    if frozen is not None:
        got = f"{config.name}: {frozen}"
        raise config_error("bad-network", "actor.model", got, error="frozen")
    return module
