"""Tensor parallelism: the ranks of one copy each compute some heads and some of the feed-forward width of every layer.

Shoeybi et al. 2019, arXiv:1909.08053, section 3; between these regions each rank has some of the T tokens (sequence
parallelism, Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2)::

    norms, residuals     ──▶ q k v, gate up: rows of the weight ──▶ heads, width of this rank ──▶ o, down: columns ──▶
    [T / ranks, E]   gathered [T, E]                                              summed and scattered [T / ranks, E]

Backwards, gathering is summing and scattering, and the other way round. So each rank has a part of the gradients of all
that is whole on every rank: norms, a value head, half of the low-rank factors; what is cut has its own. Embedding and
head are cut by rows of the vocabulary.

A weight that is cut is a DTensor; a module computes with the rank's own part of it, so that FSDP, which gathers over
the other copies, and checkpoints know where it lies. Which weights are cut is what transformers says of the family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from rlplace.models.sharding import all_gather

# Of transformers: the dimension of [out, in] that is cut
_CUT = {
    "colwise": 0,
    "rowwise": 1,
}
# The embedding is cut anyway
_WHOLE = {
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorParallel:
    """The ranks of this copy."""

    mesh: DeviceMesh

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    def gather(self, states: Tensor) -> Tensor:
        """Return [.., T, E] of [.., T / ranks, E], for each to compute its own part with: gradients are summed."""
        return cast(Tensor, _Gather.apply(states, self.group))

    def alike(self, values: Tensor) -> Tensor:
        """Return `values` that every rank computed alike from gathered states: each has an equal part of gradients."""
        return cast(Tensor, _Alike.apply(values, self.mesh.size()))

    def reduce_(
        self, values: Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """Reduce over the ranks, in place."""
        dist.all_reduce(values, how, group=self.group)
        return values

    def first_row(self, part: Tensor) -> int:
        """Return which row of the whole is the first of a rank's `part`."""
        return self.mesh.get_local_rank() * len(part)


def local(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight while it computes; gradients pass."""
    if isinstance(weight, DTensor):
        return weight.to_local()
    return weight


def cut(lm: PreTrainedModel, mesh: DeviceMesh) -> TensorParallel:
    """Cut a model on the meta device over the ranks of `mesh`, factors included. Raises ValueError where it cannot."""
    styles = {
        f"{lm.base_model_prefix}.{name}": style
        for name, style in (lm.config.base_model_tp_plan or {}).items()
    }
    unknown = sorted(
        {
            style
            for style in styles.values()
            if style not in _CUT and style not in _WHOLE
        }
    )
    if unknown or not styles:
        raise ValueError(
            f"its layers are cut by {', '.join(unknown)}"
            if unknown
            else "it says of no layer how"
        )
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one
    regions = dict[str, nn.Module]()
    found = TensorParallel(mesh)
    for name, module in list(lm.named_modules()):
        dim = next(
            (
                _CUT.get(style)
                for pattern, style in styles.items()
                if fnmatchcase(name, pattern)
            ),
            None,
        )
        if dim is None:
            continue
        if dim == 1:  # the last of a region
            regions[name.rpartition(".")[0]] = lm.get_submodule(name.rpartition(".")[0])
            module.register_forward_hook(
                lambda _, __, states: _Scatter.apply(states, mesh.get_group())
            )
        for own, linear in module.named_modules():
            factor = own.partition(".")[0]
            if isinstance(linear, nn.Linear) and (dim, factor) not in (
                (0, "lora_A"),
                (1, "lora_B"),
            ):
                if dim == 1 and linear.bias is not None:
                    raise ValueError(
                        f"{name} has a bias, which would be added by every rank"
                    )
                _cut_rows_or_columns(linear, dim, mesh, made)
    for region in regions.values():
        region.register_forward_pre_hook(_entering(found), with_kwargs=True)
    _cut_vocabulary(lm, mesh, made)
    return found


def _cut_rows_or_columns(
    module: nn.Module,
    dim: int,
    mesh: DeviceMesh,
    made: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Make each parameter of a layer a DTensor, and have the layer compute with this rank's part."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter not in made:
            if parameter.shape[dim] % mesh.size():
                raise ValueError(
                    f"{parameter.shape[dim]} rows or columns do not divide into {mesh.size()}"
                )
            part = distribute_tensor(
                parameter.detach(), mesh, [Shard(dim)], src_data_rank=None
            )
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
    parts = {name: local(p) for name, p in kept.items() if p is not None}
    # Tensors for a while.
    module._parameters.update(parts)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(kept)


def _cut_vocabulary(
    lm: PreTrainedModel, mesh: DeviceMesh, made: dict[nn.Parameter, nn.Parameter]
) -> None:
    embedding = lm.get_input_embeddings()
    head = lm.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding), "as all models that are trained"
    _cut_rows_or_columns(embedding, 0, mesh, made)
    # It scores tokens by its weight alone: see packed.token_scores
    if head is not None:
        _cut_rows_or_columns(head, 0, mesh, made)
    own_rows = embedding.forward
    rows = embedding.num_embeddings // mesh.size()
    first = mesh.get_local_rank() * rows
    padding = embedding.padding_idx
    if padding is not None:
        embedding.padding_idx = (
            padding - first if first <= padding < first + rows else None
        )

    def forward(tokens: Tensor) -> Tensor:
        ours = (tokens >= first) & (tokens < first + rows)
        found = own_rows(torch.where(ours, tokens - first, 0))
        return cast(
            Tensor, _Scatter.apply(found * ours.unsqueeze(-1), mesh.get_group())
        )

    embedding.forward = forward  # type: ignore[assignment,method-assign]  # hooks and the class stay


def _entering(parallel: TensorParallel) -> Any:
    def hook(
        _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (parallel.gather(args[0]), *args[1:]), named
        return args, named | {"hidden_states": parallel.gather(named["hidden_states"])}

    return hook


def _gathered(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    tokens, width = states.shape[-2:]
    found = states.new_empty(*states.shape[:-2], tokens * group.size(), width)
    all_gather(found.view(-1, width), states.contiguous().view(-1, width), group=group)
    return found


def _scattered(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    tokens, width = states.shape[-2:]
    found = states.new_empty(*states.shape[:-2], tokens // group.size(), width)
    sent = states.contiguous().view(group.size(), -1, width)
    if states.is_cuda:
        # As in `all_gather`
        reduce = (
            getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        )
        reduce(found.view(-1, width), sent.flatten(0, 1), group=group)
    else:  # gloo would reduce a copy of everything, around a ring
        parts = torch.empty_like(sent)
        dist.all_to_all_single(parts, sent, group=group)
        torch.sum(parts, dim=0, out=found.view(-1, width))
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(states, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.group), None


class _Alike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None
