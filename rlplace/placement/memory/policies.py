"""Sizes of simulator policies: of an MLP by formulas, of any other network from a traced pass in torch."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rlplace.codes import config_error
from rlplace.config.blocks.policies import MlpConfig, PolicyConfig
from rlplace.errors import ConfigError, Problem
from rlplace.extras import install_command
from rlplace.placement.memory import formulas
from rlplace.placement.memory.families import ask
from rlplace.placement.memory.layers import Weight

_FLOAT32 = 4
_FLOAT64 = 8
_INT64 = 8
_SIZE_OF = {"float32": _FLOAT32, "uint8": 1}


@runtime_checkable
class Choices(Protocol):
    """A space of discrete actions.

    `n`: the number of choices, or a tuple with one number for each element of an action.
    """

    @property
    def n(self) -> int | tuple[int, ...]: ...


class Vector(Protocol):
    """A space of continuous actions, which are arrays of numbers."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Entry(Protocol):
    """One named part of an observation that has several parts."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


class PolicySpaces(Protocol):
    """The shapes of a simulator's observations and actions, on which the size of a policy depends."""

    @property
    def observation_shape(self) -> tuple[int, ...]: ...

    @property
    def observation_dtype(self) -> str: ...

    @property
    def parts(self) -> Sequence[Entry]: ...

    @property
    def numbers(self) -> int: ...

    @property
    def memory(self) -> int: ...

    @property
    def actions(self) -> Choices | Vector: ...


def observation_bytes(spaces: PolicySpaces) -> int:
    return math.prod(spaces.observation_shape) * _SIZE_OF[spaces.observation_dtype]


def outputs_of(actions: Choices | Vector) -> int:
    """Return the number of outputs that a policy needs for the action space `actions`."""
    if isinstance(actions, Choices):
        if isinstance(actions.n, int):
            return actions.n
        return sum(actions.n)
    return math.prod(actions.shape)


def action_bytes(actions: Choices | Vector) -> int:
    if isinstance(actions, Choices):
        return _INT64 * (1 if isinstance(actions.n, int) else len(actions.n))
    return _FLOAT32 * math.prod(actions.shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyShape:
    """The sizes of a policy with float32 parameters. This class itself describes an MLP.

    `buffer_bytes`: bytes of the float64 statistics with which observations are normalised. `widths`: layer widths of
    the policy trunk: observation, hidden layers, outputs. `kept_each`: tensors that a hidden layer keeps for its
    backward pass.
    """

    weights: tuple[Weight, ...]
    buffer_bytes: int
    # Layer widths of the policy trunk: observation, hidden layers, outputs.
    widths: tuple[int, ...] = ()
    kept_each: int = 1  # tensors that a hidden layer keeps for its backward pass

    @property
    def normalized(self) -> bool:
        return self.buffer_bytes > 0

    @property
    def parameters_bytes(self) -> int:
        return _FLOAT32 * sum(w.elements for w in self.weights)

    @property
    def weights_bytes(self) -> int:
        """The bytes of the whole policy, as the actor sends it and as rollout uses it."""
        return self.parameters_bytes + self.buffer_bytes

    @property
    def normalizer_bytes(self) -> int:
        """The float32 bytes of the mean, scale and variance of observations; 0 without a normaliser."""
        if self.widths:
            return 3 * _FLOAT32 * self.widths[0] * self.normalized
        return 0

    def samples_bytes(self, samples: int) -> int:
        """Return the bytes of `samples` samples in the form in which learning uses them."""
        return formulas.policy_samples(self.widths, samples)

    def statistics_bytes(self, samples: int) -> int:
        """Return the temporary bytes for computing mean and variance of `samples` samples."""
        return formulas.policy_statistics(self.widths, samples, self.normalized)

    def pass_bytes(self, samples: int, compute: int) -> int:
        """Return the bytes of a forward and backward pass over `samples` samples. `compute`: bytes per number."""
        return formulas.policy_pass(self.widths, samples, compute, self.kept_each)

    def answer_bytes(self, rows: int) -> int:
        """Return the bytes that it takes to compute actions for `rows` environments in one call."""
        return formulas.policy_answer(self.widths, rows, self.normalized)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape(PolicyShape):
    """The sizes of a policy network that torch has traced. The workspace of convolutions is not counted.

    `numbers`: count of float32 numbers in an observation. `outputs`: outputs of the network. `saved`: numbers that a
    pass over one sample saves for its backward pass; 0: not known. `largest`: count of numbers in the largest tensor,
    per sample.
    """

    observation_bytes: int
    numbers: int  # float32 numbers in an observation
    outputs: int
    saved: int  # numbers that a pass over one sample saves for its backward pass; 0: not known
    largest: int  # numbers of its largest tensor, per sample

    @property
    def normalizer_bytes(self) -> int:
        # Mean and scale are computed within each pass.
        return 0

    def samples_bytes(self, samples: int) -> int:
        return samples * (self.observation_bytes + _FLOAT32 * (self.outputs + 4))

    def statistics_bytes(self, samples: int) -> int:
        return formulas.policy_statistics(
            (self.numbers, self.outputs), samples, self.normalized
        )

    def pass_bytes(self, samples: int, compute: int) -> int:
        """Return the bytes of a forward and backward pass over `samples` samples.

        Counted are the saved tensors, and two gradients as large as the largest tensor. `compute`: bytes per number.
        """
        terms = _FLOAT32 * (4 * self.outputs + 10)
        return samples * (
            terms + compute * (self.saved + 2 * self.largest + 2 * self.numbers)
        )

    def answer_bytes(self, rows: int) -> int:
        return (
            rows * _FLOAT32 * (3 * self.largest + 2 * self.numbers + 6 * self.outputs)
        )


def policy_shape(
    model: PolicyConfig, spaces: PolicySpaces, *, normalize_observations: bool
) -> PolicyShape:
    """Return the sizes of the policy that a config declares.

    An MLP has two trunks, policy and value, and a log standard deviation for each element of a continuous action. Any
    other network is traced by `models.describe_policy` in a subprocess, which needs torch. Raises ConfigError if torch
    is missing, or if a custom module is missing or does not do what a policy needs.
    """
    if not isinstance(model, MlpConfig) or model.remembered:
        return _traced(model, spaces, normalize_observations)
    actions = spaces.actions
    size = math.prod(spaces.observation_shape)
    outputs = outputs_of(actions)
    weights: list[Weight] = []
    for name, end in (("policy", outputs), ("value", 1)):
        for at, (inputs, width) in enumerate(
            itertools.pairwise((size, *model.hidden, end))
        ):
            # Layers have even numbers, since odd ones are activations.
            weights.append(
                Weight(name=f"{name}.{2 * at}.weight", shape=(width, inputs))
            )
            weights.append(Weight(name=f"{name}.{2 * at}.bias", shape=(width,)))
    if not isinstance(actions, Choices):
        weights.append(Weight(name="log_std", shape=(outputs,)))
    buffers = _FLOAT64 * (1 + 2 * size) if normalize_observations else 0
    widths = (size, *model.hidden, outputs)
    kept = 2 if model.activation == "silu" else 1
    return PolicyShape(
        weights=tuple(weights), buffer_bytes=buffers, widths=widths, kept_each=kept
    )


def _traced(model: PolicyConfig, spaces: PolicySpaces, normalize: bool) -> PolicyShape:
    if importlib.util.find_spec("torch") is None:
        raise config_error(
            "missing-library",
            "actor.model.kind",
            model.kind,
            error="torch",
            command=install_command("run"),
        )
    asked = {"model": _plain(model), "spaces": _plain(spaces), "normalize": normalize}
    found = _found(json.dumps(asked, sort_keys=True, default=str))
    if "problem" in found:
        # Its texts were made in the subprocess
        raise ConfigError([Problem(**found["problem"])])
    if "error" in found:
        raise config_error(
            "bad-network",
            "actor.model",
            getattr(model, "name", model.kind),
            error="raised",
            reason=found["error"],
        )
    return NetworkShape(
        weights=tuple(
            Weight(name=name, shape=tuple(shape)) for name, shape in found["weights"]
        ),
        buffer_bytes=found["buffers"],
        observation_bytes=observation_bytes(spaces),
        numbers=spaces.numbers,
        outputs=outputs_of(spaces.actions),
        saved=found["saved"],
        largest=found["largest"],
    )


def _plain(block: Any) -> Mapping[str, Any]:
    """Return the class name and the fields of a config block as plain values, nested blocks included."""
    kind = {"class": type(block).__name__}
    return kind | {
        f.name: _value(getattr(block, f.name)) for f in dataclasses.fields(block)
    }


def _value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _plain(value)
    if isinstance(value, tuple):
        return [_value(each) for each in value]
    return value


@functools.lru_cache(maxsize=64)
def _found(asked: str) -> Mapping[str, Any]:
    return ask("rlplace.models.describe_policy", asked)
