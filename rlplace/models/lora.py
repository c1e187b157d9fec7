"""LoRA, low-rank factors (Hu et al. 2021, arXiv:2106.09685): trained beside frozen weights, merged in engines.

A weight sync sends merged weights, or only the factors to engines that keep the frozen weights.

Letters: O rows of a weight, I its columns, r their rank: y = W x + (alpha / r) B A x.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlplace.codes import problem
from rlplace.errors import ConfigError, did_you_mean
from rlplace.models.sharding import generator_of

# transformers takes seconds to import, also by peft; models without factors use this module too
if TYPE_CHECKING:
    from pathlib import Path

    from peft import LoraConfig
    from transformers import PreTrainedModel

# Ends of names in a module with factors, as peft gives them
_BASE = ".base_layer.weight"
_A = ".lora_A.default.weight"
_B = ".lora_B.default.weight"
# The vision tower of a model; it gets no factors
_TOWER = "visual."
# Ends of names of factors in files
_STORED_A = ".lora_A.weight"
_STORED_B = ".lora_B.weight"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Rank, scaling and target layers of LoRA factors.

    `rank`, `alpha`: a layer's weight W becomes W + alpha / rank B A. `targets`: last parts of the names of the linear
    layers that get factors, such as "q_proj"; empty: all linear layers except the head. `key`: the config key of the
    targets, for errors. `start`: folder of an adapter of the library peft, whose factors are the initial values; None:
    the initial values are `first_values`.
    """

    rank: int
    alpha: float
    # Last names of linear layers, such as "q_proj"; empty: all layers but the head
    targets: tuple[str, ...] = ()
    # Config key of the targets, for error messages
    key: str = "actor.lora_targets"
    # Folder of an adapter with the initial values
    start: Path | None = None

    @property
    def scale(self) -> float:
        """Factor alpha / rank, by which the product of the LoRA factors B A is multiplied."""
        return self.alpha / self.rank


def add_factors(lm: PreTrainedModel, spec: LoraSpec) -> None:
    """Put LoRA factors on the meta device into `lm`, and freeze all other parameters.

    Raises ConfigError for a target that is not a linear layer, or that is the head: scores of tokens are computed from
    its weight alone.
    """
    from peft import inject_adapter_in_model

    # Linear layers outside the vision tower, and their last names
    head = lm.get_output_embeddings()
    layers = []
    for name, module in lm.named_modules():
        if isinstance(module, nn.Linear) and _TOWER not in name:
            layers.append((name, module))
    linear = {name.rpartition(".")[2] for name, layer in layers if layer is not head}
    # Every target must be one of these names
    problems = []
    for target in spec.targets:
        if target not in linear:
            near = did_you_mean(target, linear)
            error = "unknown"
            if any(name.endswith(target) and layer is head for name, layer in layers):
                error = "head"
            elif near:
                error = "misspelt"
            layers_there = ", ".join(sorted(linear))
            problems.append(
                problem(
                    "lora-target-unknown",
                    spec.key,
                    target,
                    error=error,
                    layers=layers_there,
                    near=near,
                )
            )
    if problems:
        raise ConfigError(problems)
    # Without targets: all linear layers but the head
    targets = list(spec.targets)
    if not targets:
        targets = sorted(linear)
    config = config_of(spec, targets, [name for name, _ in lm.named_modules()])
    # In a list: given `lm` itself, peft would also adapt the experts of a mixture it knows
    inject_adapter_in_model(config, nn.ModuleList([lm]), low_cpu_mem_usage=True)


def add_empty_factors(lm: PreTrainedModel, spec: LoraSpec) -> None:
    """Put LoRA factors into `lm`, on its device and in its dtype, without defined values.

    Raises ConfigError as `add_factors` does.
    """
    device = lm.device
    dtype = lm.dtype
    add_factors(lm, spec)
    with torch.no_grad():
        for module in lm.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                    setattr(module, name, nn.Parameter(empty, requires_grad=False))


def config_of(
    spec: LoraSpec, targets: Sequence[str], names: Iterable[str]
) -> LoraConfig:
    """Return peft's config of factors.

    `targets`: last names of the linear layers that have factors. `names`: names of all modules or weights of the model,
    which tell whether the model has a vision tower.
    """
    from peft import LoraConfig

    excluded = None
    if any(_TOWER in name for name in names):
        excluded = rf".*{_TOWER}.*"
    alpha = int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha
    return LoraConfig(
        r=spec.rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft multiplies by it, whatever it is
        target_modules=list(targets),
        lora_dropout=0.0,
        exclude_modules=excluded,
    )


def layer_of(name: str) -> str:
    """Return the name of the layer that has the LoRA factor `name`."""
    return name.removesuffix(_A).removesuffix(_B)


def is_factor(name: str) -> bool:
    """Return whether a parameter of this name is a LoRA factor."""
    return name.endswith((_A, _B))


def checkpoint_name(name: str) -> str:
    """Return the name that the parameter `name` has in checkpoints.

    A LoRA factor has the name under which the library peft stores it.
    """
    for suffix, stored in ((_BASE, ".weight"), (_A, _STORED_A), (_B, _STORED_B)):
        if name.endswith(suffix):
            return name.removesuffix(suffix) + stored
    return name.replace(".base_layer.", ".")


def factors_of(name: str) -> tuple[str, str] | None:
    """Return the names of the LoRA factors A and B of the weight `name`; None if it has no factors.

    For a weight of O rows and I columns, A is [r, I] and B [O, r], with r the rank of the factors.
    """
    base = name.removesuffix(_BASE)
    if base == name:
        return None
    return (base + _A, base + _B)


def first_values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the initial values of the LoRA factor `name`, a tensor with the shape `shape`.

    Factors B are zero, so that training starts from the unchanged model. Factors A are random; they depend on `seed`
    and `name` alone.
    """
    values = torch.zeros(shape)
    if name.endswith(_A):
        nn.init.kaiming_uniform_(
            values,
            a=math.sqrt(5),
            generator=generator_of(seed, name),
        )
    return values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The LoRA factors of one weight, on one device.

    `a` [r, I], `b` [O, r]: the factors A and B, of rank r, of a weight with O rows and I columns; `b` may have only the
    rows that a rank has. `scale`: alpha / rank, by which their product is multiplied.
    """

    a: Tensor  # [r, I]
    b: Tensor  # [O, r], or the rows that a rank has
    scale: float

    def added_to(self, weight: Tensor, device: torch.device) -> Tensor:
        """Return weight + scale * B A on `device`, as a new tensor in the dtype of `weight`.

        `weight`: has the same rows as `b`.
        """
        weight = weight.to(device)
        a = self.a.to(device).float()
        b = self.b.to(device).float()
        # Computed in float32, rounded once
        added = torch.addmm(weight.float(), b, a, alpha=self.scale)
        return added.to(weight.dtype)


def take_factors(
    tensors: Mapping[str, Tensor],
    scale: float,
) -> tuple[dict[str, Tensor], dict[str, Factors]]:
    """Return (name -> weight, for all tensors that are not factors; name of a weight -> its LoRA factors).

    `tensors`: name in files -> tensor, weights and factors together. `scale`: alpha / rank of the factors.
    """
    weights = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith((_STORED_A, _STORED_B))
    }
    factors = {}
    for name, a in tensors.items():
        if name.endswith(_STORED_A):
            layer = name.removesuffix(_STORED_A)
            b = tensors[layer + _STORED_B]
            factors[layer + ".weight"] = Factors(a=a, b=b, scale=scale)
    return weights, factors


def stored_factors(factors: Mapping[str, Factors]) -> dict[str, Tensor]:
    """Return name in files -> tensor, for the LoRA factors A and B of each weight; the opposite of `take_factors`.

    `factors`: name of a weight -> its factors.
    """
    tensors = {}
    for name, pair in factors.items():
        layer = name.removesuffix(".weight")
        tensors[layer + _STORED_A] = pair.a
        tensors[layer + _STORED_B] = pair.b
    return tensors


@contextmanager
def without_factors(module: nn.Module) -> Iterator[None]:
    """Return a context manager that disables the LoRA factors of `module`, for passes that need the frozen model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in adapted:
        # peft's `enable_adapters` would also set requires_grad, which FSDP has registered
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in adapted:
            layer._disable_adapters = False
