"""Describe the policy of a simulator job: its weights, and what a forward pass over one sample saves.

The planner imports no torch. It runs this in a process of its own, `python -m rlplace.models.describe_policy`. Standard
input has model and spaces as JSON; standard output has the answer, which `placement.memory.policies` reads.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from rlplace.codes import config_error
from rlplace.config.blocks.policies import (
    CnnConfig,
    MlpConfig,
    ModuleConfig,
    TransformerConfig,
    VlaConfig,
)
from rlplace.config.blocks.training import ActorConfig, AlgorithmConfig
from rlplace.envs import contract
from rlplace.errors import ConfigError
from rlplace.models.mlp import output_size
from rlplace.models.networks import NetworkPolicy
from rlplace.models.policy_networks import build_policy

# Samples of the pass that is traced
_SAMPLES = 4
_KINDS = (
    contract.DiscreteActions,
    contract.MultiDiscreteActions,
    contract.ContinuousActions,
    contract.DenoisedActions,
)
# Fields of a problem that the planner gets back
_TOLD = ("code", "key", "what", "got", "why", "fix")
_MODELS = {
    kind.__name__: kind
    for kind in (CnnConfig, MlpConfig, ModuleConfig, TransformerConfig, VlaConfig)
}
_ACTIONS = {kind.__name__: kind for kind in _KINDS}


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        results = made if isinstance(made, tuple) else (made,)
        for each in results:
            if isinstance(each, Tensor) and not func.is_view:
                self.numbers = max(self.numbers, each.numel())
        return made


def describe(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a policy for the planner, ready for JSON.

    "weights": name and shape of each parameter. "buffers": bytes of buffers. "saved": elements per sample that autograd
    saves. "largest": elements per sample of the largest tensor. `asked`: the model, the spaces, and whether
    observations are normalised. Raises ConfigError if the network does not exist, or if it does not return what a
    policy needs.
    """
    # Build the policy as training does
    spaces = _spaces(asked["spaces"])
    model = _made(_MODELS[asked["model"]["class"]], asked["model"])
    algorithm = AlgorithmConfig(normalize_observations=asked["normalize"])
    policy = build_policy(spaces, ActorConfig(model=model), algorithm, seed=0)
    assert isinstance(policy, NetworkPolicy), model
    # Trace a small batch, and round up to one sample
    saved, largest = _traced(policy, spaces)
    return {
        "weights": [
            [name, list(parameter.shape)]
            for name, parameter in policy.named_parameters()
        ],
        "buffers": sum(buffer.nbytes for buffer in policy.buffers()),
        "saved": -(-saved // _SAMPLES),
        "largest": -(-largest // _SAMPLES),
    }


def _traced(policy: NetworkPolicy, spaces: contract.Spaces) -> tuple[int, int]:
    """Return (elements that autograd saves in a forward pass, elements of the largest tensor in the pass).

    The pass has `_SAMPLES` samples.
    """
    # Parameters are saved too, but counted elsewhere
    kept: dict[int, Tensor] = {
        parameter.untyped_storage()._cdata: parameter
        for parameter in policy.parameters()
    }
    own = set(kept)

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    # A pass over zeros; a policy with memory also gets memory and episode begins
    zeros = torch.zeros(
        (_SAMPLES, *spaces.observation_shape),
        dtype=getattr(torch, spaces.observation_dtype),
    )
    beside: tuple[Tensor, ...] = ()
    if spaces.memory:
        begins = torch.zeros(_SAMPLES, 1, dtype=torch.bool)
        beside = (torch.zeros(1, spaces.memory), begins)
    elif isinstance(spaces.actions, contract.DenoisedActions):
        chains = torch.zeros(_SAMPLES, math.prod(spaces.actions.shape))
        beside = policy.beside(zeros, chains)
    with saved_tensors_hooks(pack, lambda tensor: tensor), _Largest() as seen:
        returned = policy.network(policy.inputs(zeros), *beside)
    _check(returned, output_size(spaces.actions), spaces.memory)
    # Elements of 4 bytes, each storage once
    saved_bytes = 0
    for at, tensor in kept.items():
        if at not in own:
            saved_bytes += tensor.untyped_storage().nbytes()
    return saved_bytes // 4, seen.numbers


def _check(returned: object, outputs: int, remembered: int) -> None:
    """Raise ConfigError unless a network returns what a policy needs.

    `returned`: what the network has returned. `outputs`: number of outputs, which describe the distribution of an
    action. `remembered`: number of elements of the memory; 0: the policy has no memory.
    """
    # Shapes: outputs, values and, with memory, the memory
    pair = returned if isinstance(returned, Sequence) else (returned,)
    shapes: list[tuple[int, ...] | str] = []
    for each in pair:
        if isinstance(each, Tensor):
            shapes.append(tuple(each.shape))
        else:
            shapes.append(type(each).__name__)
    expected: list[tuple[int, ...]] = [(_SAMPLES, outputs), (_SAMPLES,)]
    if remembered:
        expected.append((1, remembered))
    if shapes != expected:
        error = "returns"
        if remembered:
            error = "returns-with-memory"
        raise config_error(
            "bad-network",
            "actor.model",
            str(shapes),
            error=error,
            outputs=outputs,
            samples=_SAMPLES,
            remembered=remembered,
        )
    # Outputs and values must have gradients
    for name, each in zip(("outputs", "values"), pair, strict=False):
        if not each.requires_grad:
            raise config_error(
                "bad-network",
                "actor.model",
                f"{name}.requires_grad is False",
                error="constant",
                name=name,
            )


def _spaces(plain: Mapping[str, Any]) -> contract.Spaces:
    """Return the spaces of the simulator, made from `plain`, the JSON values that the planner sent."""
    actions = _made(_ACTIONS[plain["actions"]["class"]], plain["actions"])
    parts = [_made(contract.Part, part) for part in plain["parts"]]
    spaces: contract.Spaces = _made(
        contract.Spaces,
        {**plain, "actions": actions, "parts": parts},
    )
    return spaces


def _made(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Return an object of class `kind` with these fields; JSON lists become tuples."""
    arguments = {}
    for name, value in fields.items():
        if name != "class":
            arguments[name] = tuple(value) if isinstance(value, list) else value
    return kind(**arguments)


def main() -> None:
    """Read the argument of `describe` from standard input, as JSON; write its result, or the problem found, to standard
    output.
    """
    try:
        answer = describe(json.load(sys.stdin))
    except ConfigError as error:
        (found,) = error.problems
        answer = {
            "error": found.what,
            "problem": {name: getattr(found, name) for name in _TOLD},
        }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
