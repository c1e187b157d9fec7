"""Tensor parallelism: the ranks of one copy each compute some heads and some of the feed-forward width of every layer.

Shoeybi et al. 2019, arXiv:1909.08053, section 3. States enter a region of a layer and leave it equal on all ranks::

    states [T, E] ──▶ q k v, gate up: rows of the weight ──▶ heads, width of this rank ──▶ o, down: columns ──▶ summed
                  ◀── gradients are summed                                                 gradients pass ◀──

What a region has beside cut weights, such as norms of heads or half of the low-rank factors, is whole on every rank,
and each has a part of its gradient: `summed` names it. Embedding and head are cut by rows of the vocabulary.

A weight that is cut is a DTensor; a module computes with the rank's own part of it, so that FSDP, which gathers over
the other copies, and checkpoints know where it lies. Which weights are cut is what transformers says of the family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

_CUT = {"colwise": 0, "rowwise": 1}  # of transformers: the dimension of [out, in] that is cut
_WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise"}  # the embedding is cut anyway


@dataclasses.dataclass(frozen=True, slots=True)
class TensorParallel:
    """The ranks of this copy, and what they have to add up."""

    mesh: DeviceMesh
    summed: frozenset[str]  # parameters that are whole on each rank, which has a part of their gradients

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    def spread(self, states: Tensor) -> Tensor:
        """Return what every rank has alike, for each to compute its own part with: gradients are summed."""
        return cast(Tensor, _Spread.apply(states, self.group))

    def reduce_(self, values: Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over the ranks, in place."""
        dist.all_reduce(values, how, group=self.group)
        return values

    def first_row(self, part: Tensor) -> int:
        """Return which row of the whole is the first of a rank's `part`."""
        return self.mesh.get_local_rank() * len(part)


def local(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight while it computes; gradients pass."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def cut(lm: PreTrainedModel, mesh: DeviceMesh) -> TensorParallel:
    """Cut a model on the meta device over the ranks of `mesh`, factors included. Raises ValueError where it cannot."""
    styles = {f"{lm.base_model_prefix}.{name}": style for name, style in (lm.config.base_model_tp_plan or {}).items()}
    unknown = sorted({style for style in styles.values() if style not in _CUT and style not in _WHOLE})
    if unknown or not styles:
        raise ValueError(f"its layers are cut by {', '.join(unknown)}" if unknown else "it says of no layer how")
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one
    regions = dict[str, nn.Module]()
    for name, module in list(lm.named_modules()):
        dim = next((_CUT.get(style) for pattern, style in styles.items() if fnmatchcase(name, pattern)), None)
        if dim is None:
            continue
        if dim == 1:  # the last of a region
            regions[name.rpartition(".")[0]] = lm.get_submodule(name.rpartition(".")[0])
            module.register_forward_hook(lambda _, __, states: _Sum.apply(states, mesh.get_group()))
        for own, linear in module.named_modules():
            factor = own.partition(".")[0]
            if isinstance(linear, nn.Linear) and (dim, factor) not in ((0, "lora_A"), (1, "lora_B")):
                if dim == 1 and linear.bias is not None:
                    raise ValueError(f"{name} has a bias, which would be added by every rank")
                _cut_rows_or_columns(linear, dim, mesh, made)
    found = TensorParallel(mesh, frozenset(_left_whole(lm, regions)))
    for region in regions.values():
        region.register_forward_pre_hook(_entering(found), with_kwargs=True)
    _cut_vocabulary(lm, mesh, made)
    return found


def _left_whole(lm: PreTrainedModel, regions: Mapping[str, nn.Module]) -> Iterator[str]:
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        inside = any(name.startswith(f"{region}.") for region in regions)
        if inside and not isinstance(parameter, DTensor):
            yield name


def _cut_rows_or_columns(module: nn.Module, dim: int, mesh: DeviceMesh, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Make each parameter of a layer a DTensor, and have the layer compute with this rank's part."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter not in made:
            if parameter.shape[dim] % mesh.size():
                raise ValueError(f"{parameter.shape[dim]} rows or columns do not divide into {mesh.size()}")
            part = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
            made[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        module._parameters[name] = made[parameter]
    whole = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _own_parts(module):
            return whole(*args, **kwargs)

    module.forward = forward  # hooks and the class stay


@contextmanager
def _own_parts(module: nn.Module) -> Iterator[None]:
    kept = dict(module._parameters)
    module._parameters.update({name: local(p) for name, p in kept.items() if p is not None})  # type: ignore[misc]
    try:
        yield
    finally:
        module._parameters.update(kept)


def _cut_vocabulary(lm: PreTrainedModel, mesh: DeviceMesh, made: dict[nn.Parameter, nn.Parameter]) -> None:
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding), "as all models that are trained"
    _cut_rows_or_columns(embedding, 0, mesh, made)
    if head is not None:  # it scores tokens by its weight alone: see packed.token_scores
        _cut_rows_or_columns(head, 0, mesh, made)
    own_rows, rows = embedding.forward, embedding.num_embeddings // mesh.size()
    first = mesh.get_local_rank() * rows
    padding = embedding.padding_idx
    if padding is not None:
        embedding.padding_idx = padding - first if first <= padding < first + rows else None

    def forward(tokens: Tensor) -> Tensor:
        ours = (tokens >= first) & (tokens < first + rows)
        found = own_rows(torch.where(ours, tokens - first, 0))
        return cast(Tensor, _Sum.apply(found * ours.unsqueeze(-1), mesh.get_group()))

    embedding.forward = forward  # type: ignore[assignment,method-assign]


def _entering(parallel: TensorParallel) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (parallel.spread(args[0]), *args[1:]), named
        return args, named | {"hidden_states": parallel.spread(named["hidden_states"])}

    return hook


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)  # another may read what came
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        assert parts.is_contiguous(), "of a linear layer or an embedding"
        dist.all_reduce(parts, group=group)
        ctx.mark_dirty(parts)
        return parts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
