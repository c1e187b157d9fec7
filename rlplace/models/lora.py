"""LoRA, low-rank factors (Hu et al. 2021, arXiv:2106.09685): trained beside the frozen weights, merged in engines.

A sync sends either merged weights, or the factors alone to engines that keep the frozen weights.

Letters: O rows of a weight, I its columns, r their rank: y = W x + (alpha / r) B A x.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlplace.errors import ConfigError, Problem, did_you_mean
from rlplace.models.sharding import generator_of

if TYPE_CHECKING:  # transformers, which peft imports too, takes seconds, and models without factors pass here
    from transformers import PreTrainedModel

_BASE = ".base_layer.weight"
_A = ".lora_A.default.weight"
_B = ".lora_B.default.weight"  # as peft names them
_TOWER = "visual."  # of a model that sees; its weights are as frozen as the others
_STORED_A = ".lora_A.weight"
_STORED_B = ".lora_B.weight"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    rank: int
    alpha: float
    # Last names of linear layers, "q_proj"; empty: all but the head
    targets: tuple[str, ...] = ()
    key: str = "actor.lora_targets"  # that names them, for errors

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def add_factors(lm: PreTrainedModel, spec: LoraSpec) -> None:
    """Put factors without memory into `lm`; nothing else of it is trained afterwards."""
    from peft import LoraConfig, inject_adapter_in_model

    head = lm.get_output_embeddings()
    layers = [
        (n, module)
        for n, module in lm.named_modules()
        if isinstance(module, nn.Linear) and _TOWER not in n
    ]
    linear = {name.rpartition(".")[2] for name, _ in layers}
    problems = []
    for target in spec.targets:
        if target not in linear:
            near = did_you_mean(target, linear)
            what = "the model has no linear layer of this name"
            why = f"its linear layers are {', '.join(sorted(linear))}"
            fix = (
                f"lora_targets: [{near}]"
                if near
                else "lora_targets: []        (all linear layers but the head)"
            )
            problems.append(
                Problem(
                    code="lora-target-unknown",
                    key=spec.key,
                    what=what,
                    got=target,
                    why=why,
                    fix=fix,
                )
            )
    if problems:
        raise ConfigError(problems)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]  # peft multiplies by it, whatever it is
        target_modules=list(spec.targets)
        or sorted({n.rpartition(".")[2] for n, layer in layers if layer is not head}),
        lora_dropout=0.0,
        exclude_modules=rf".*{_TOWER}.*"
        if any(_TOWER in name for name, _ in lm.named_modules())
        else None,
    )
    # Not `lm` itself: of a mixture of experts that peft knows, it would put factors beside the experts too.
    inject_adapter_in_model(config, nn.ModuleList([lm]), low_cpu_mem_usage=True)


def is_factor(name: str) -> bool:
    return name.endswith((_A, _B))


def checkpoint_name(name: str) -> str:
    """Return the name of a parameter in a checkpoint without factors; of a factor, as peft stores it."""
    for suffix, stored in ((_BASE, ".weight"), (_A, _STORED_A), (_B, _STORED_B)):
        if name.endswith(suffix):
            return name.removesuffix(suffix) + stored
    return name.replace(".base_layer.", ".")


def factors_of(name: str) -> tuple[str, str] | None:
    """Return the names of A [r, I] and B [O, r] of the weight `name`; None where it has none."""
    base = name.removesuffix(_BASE)
    if base == name:
        return None
    return (base + _A, base + _B)


def first_values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return zero for B, so that training starts from the model as it is, and A by seed and name alone."""
    values = torch.zeros(shape)
    if name.endswith(_A):
        nn.init.kaiming_uniform_(
            values, a=math.sqrt(5), generator=generator_of(seed, name)
        )
    return values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    a: Tensor  # [r, I]
    b: Tensor  # [O, r], or some of its rows
    scale: float

    def added_to(self, weight: Tensor, device: torch.device) -> Tensor:
        """Return `weight`, with the rows that `b` has, and them on `device`: in new memory, in its dtype."""
        weight, a, b = (tensor.to(device) for tensor in (weight, self.a, self.b))
        return torch.addmm(weight.float(), b.float(), a.float(), alpha=self.scale).to(
            weight.dtype
        )


def take_factors(
    tensors: Mapping[str, Tensor], scale: float
) -> tuple[dict[str, Tensor], dict[str, Factors]]:
    """Split tensors into those that are no factors, and the factors by the name of their weight."""
    weights = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith((_STORED_A, _STORED_B))
    }
    layers = [
        name.removesuffix(_STORED_A) for name in tensors if name.endswith(_STORED_A)
    ]
    factors = {
        layer + ".weight": Factors(
            a=tensors[layer + _STORED_A], b=tensors[layer + _STORED_B], scale=scale
        )
        for layer in layers
    }
    return weights, factors


@contextmanager
def without_factors(module: nn.Module) -> Iterator[None]:
    """Switch the factors off until the end of the block, for passes that learn nothing."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in adapted:
        layer._disable_adapters = True  # `enable_adapters` would also touch requires_grad, which FSDP has registered
    try:
        yield
    finally:
        for layer in adapted:
            layer._disable_adapters = False
