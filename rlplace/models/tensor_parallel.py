"""Tensor parallelism: each rank of a replica computes some heads and some of the feed-forward width of every layer.

Shoeybi et al. 2019, arXiv:1909.08053, section 3. Between these regions each rank has some of the T tokens (sequence
parallelism, Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2)::

    norms, residuals     ──▶ q k v, gate up: rows of the weight ──▶ heads, width of this rank ──▶ o, down: columns ──▶
    [T / ranks, E]   gathered [T, E]                                              summed and scattered [T / ranks, E]

In the backward pass, gathering becomes summing and scattering, and the reverse. So for weights that are whole on every
rank (norms, a value head, half of the LoRA factors) each rank has a part of the gradient; for weights that are split it
has the gradient of its own part. Embedding and head are split by rows of the vocabulary.

A weight that is split is a DTensor. A module computes with the rank's own part of it; FSDP, which gathers over the
other replicas, and checkpoints see from the DTensor where the part lies. Which weights are split is what transformers
declares for the family.
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

from rlplace.models.sharding import all_gather

# Styles of transformers, and the dimension of [out, in] that they split
_CUT = {
    "colwise": 0,
    "rowwise": 1,
}
# Styles that leave a weight whole; the embedding is split here in any case
_WHOLE = {
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorParallel:
    """The ranks that together compute one replica of the model, each with a part of the weights. `mesh`: the ranks."""

    mesh: DeviceMesh

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks."""
        return self.mesh.get_group()

    def gather(self, states: Tensor) -> Tensor:
        """Return the states of all T tokens [.., T, E], gathered from the states [.., T / ranks, E] of each rank; E is
        the size of a state.

        A collective. Each rank then computes a different part of the layer from the result. In the backward pass,
        gradients are summed.
        """
        return cast(Tensor, _Gather.apply(states, self.group))

    def alike(self, values: Tensor) -> Tensor:
        """Return `values` unchanged. All ranks must have computed equal values, from gathered states.

        In the backward pass, the gradient is divided by the number of ranks, because gradients are summed over ranks
        later.
        """
        return cast(Tensor, _Alike.apply(values, self.mesh.size()))

    def reduce_(
        self,
        values: Tensor,
        how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> Tensor:
        """Reduce `values` over the ranks, in place, and return `values`. A collective. `how`: the operation."""
        dist.all_reduce(values, how, group=self.group)
        return values

    def first_row(self, part: Tensor) -> int:
        """Return the index, in the whole weight, of the first row of this rank's `part`."""
        return self.mesh.get_local_rank() * len(part)


def local(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight as a plain tensor. Gradients flow through it to the weight."""
    if isinstance(weight, DTensor):
        return weight.to_local()
    return weight


def cut(lm: PreTrainedModel, mesh: DeviceMesh) -> TensorParallel:
    """Split the weights of a model on the meta device over the ranks of `mesh`, and return these ranks.

    LoRA factors are split, too.

    Raises ValueError if transformers declares no split or an unknown split for the model's family, or if a size is not
    divisible by the number of ranks.
    """
    # What transformers declares: pattern of module names -> style
    styles = {
        f"{lm.base_model_prefix}.{name}": style
        for name, style in (lm.config.base_model_tp_plan or {}).items()
    }
    unknown = sorted(set(styles.values()) - _CUT.keys() - _WHOLE)
    if unknown:
        raise ValueError(f"its layers are cut by {', '.join(unknown)}")
    if not styles:
        raise ValueError("it says of no layer how")
    # Tied parameters stay one
    made: dict[nn.Parameter, nn.Parameter] = {}
    # Attention and feed-forward modules, whose inputs are gathered
    regions = dict[str, nn.Module]()
    found = TensorParallel(mesh)
    for name, module in list(lm.named_modules()):
        dim = _split_dimension(name, styles)
        if dim is None:
            continue
        # The last layer of a region: sum the parts of all ranks, and scatter by tokens
        if dim == 1:
            region = name.rpartition(".")[0]
            regions[region] = lm.get_submodule(region)
            module.register_forward_hook(
                lambda _, __, states: _Scatter.apply(states, mesh.get_group())
            )
        # Split the layer and the LoRA factor that has its dimension; the other factor
        # stays whole
        for own, linear in module.named_modules():
            factor = own.partition(".")[0]
            whole_factor = (dim, factor) in ((0, "lora_A"), (1, "lora_B"))
            if isinstance(linear, nn.Linear) and not whole_factor:
                if dim == 1 and linear.bias is not None:
                    raise ValueError(
                        f"{name} has a bias, which would be added by every rank"
                    )
                _cut_rows_or_columns(linear, dim, mesh, made)
    # The first layers of a region get the tokens of all ranks
    for region in regions.values():
        region.register_forward_pre_hook(_entering(found), with_kwargs=True)
    _cut_vocabulary(lm, mesh, made)
    return found


def _split_dimension(name: str, styles: Mapping[str, str]) -> int | None:
    """Return the dimension of a weight [out, in] along which the linear layer `name` is split; None if it stays whole.

    `styles`: pattern of module names -> style of the split, as transformers declares it.
    """
    for pattern, style in styles.items():
        if fnmatchcase(name, pattern):
            return _CUT.get(style)
    return None


def _cut_rows_or_columns(
    module: nn.Module,
    dim: int,
    mesh: DeviceMesh,
    made: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Make each parameter of a layer a DTensor split along `dim`, and let the layer compute with this rank's part.

    `mesh`: the ranks. `made`: parameter that is already split -> its DTensor; a tied parameter gets the same DTensor
    everywhere. Raises ValueError if the dimension is not divisible by the number of ranks.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter not in made:
            if parameter.shape[dim] % mesh.size():
                raise ValueError(
                    f"{parameter.shape[dim]} rows or columns do not divide into {mesh.size()}"
                )
            part = distribute_tensor(
                parameter.detach(),
                mesh,
                [Shard(dim)],
                src_data_rank=None,
            )
            made[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        module._parameters[name] = made[parameter]
    whole = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _own_parts(module):
            return whole(*args, **kwargs)

    # On the module itself, so that hooks and the class stay as they are
    module.forward = forward


@contextmanager
def _own_parts(module: nn.Module) -> Iterator[None]:
    """Return a context manager in which the module's parameters are plain tensors: this rank's parts."""
    kept = dict(module._parameters)
    parts = {name: local(p) for name, p in kept.items() if p is not None}
    # Tensors instead of parameters until the end of the block
    module._parameters.update(parts)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(kept)


def _cut_vocabulary(
    lm: PreTrainedModel,
    mesh: DeviceMesh,
    made: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Split embedding and head by rows of the vocabulary.

    `made`: parameter that is already split -> its DTensor; a tied parameter gets the same DTensor everywhere.
    """
    embedding = lm.get_input_embeddings()
    head = lm.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding), "as all models that are trained"
    _cut_rows_or_columns(embedding, 0, mesh, made)
    # Scores read the head's weight alone: see packed.token_scores
    if head is not None:
        _cut_rows_or_columns(head, 0, mesh, made)
    own_rows = embedding.forward
    rows = embedding.num_embeddings // mesh.size()
    first = mesh.get_local_rank() * rows
    padding = embedding.padding_idx
    # The padding token has an index only on the rank that has its row
    if padding is not None:
        here = first <= padding < first + rows
        embedding.padding_idx = padding - first if here else None

    def forward(tokens: Tensor) -> Tensor:
        # Rows of other ranks are zero here; the sum over ranks is the embedding
        last = first + rows
        ours = (tokens >= first) & (tokens < last)
        found = own_rows(torch.where(ours, tokens - first, 0))
        embedded = found * ours.unsqueeze(-1)
        return cast(Tensor, _Scatter.apply(embedded, mesh.get_group()))

    embedding.forward = forward  # type: ignore[assignment,method-assign]  # hooks and the class stay


def _entering(parallel: TensorParallel) -> Any:
    """Return a forward pre-hook that gathers the states of all ranks before a module gets them as its input."""

    def hook(
        _: nn.Module,
        args: tuple[Any, ...],
        named: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            states = parallel.gather(args[0])
            return (states, *args[1:]), named
        states = parallel.gather(named["hidden_states"])
        return args, named | {"hidden_states": states}

    return hook


def _gathered(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the states of all ranks' tokens, [.., all tokens, E]. `states` [.., tokens, E]: those of this rank, each
    of size E.
    """
    tokens, width = states.shape[-2:]
    batch = states.shape[:-2]
    found = states.new_empty(*batch, tokens * group.size(), width)
    sent = states.contiguous().view(-1, width)
    all_gather(found.view(-1, width), sent, group=group)
    return found


def _scattered(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `states` over all ranks, but only for this rank's tokens.

    `states` [.., tokens of all ranks, size of a state]: this rank's summands.
    """
    tokens, width = states.shape[-2:]
    batch = states.shape[:-2]
    found = states.new_empty(*batch, tokens // group.size(), width)
    sent = states.contiguous().view(group.size(), -1, width)
    if states.is_cuda:
        # Torch before 2.13 has it under another name
        reduce = (
            getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        )
        reduce(found.view(-1, width), sent.flatten(0, 1), group=group)
    else:
        # gloo would reduce a copy of everything around a ring: exchange and sum instead
        parts = torch.empty_like(sent)
        dist.all_to_all_single(parts, sent, group=group)
        torch.sum(parts, dim=0, out=found.view(-1, width))
    return found


class _Gather(torch.autograd.Function):
    """Gathers the states of all ranks along the tokens; in the backward pass, gradients are summed and scattered."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(states, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    """Sums states over ranks and scatters them along the tokens; in the backward pass, gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.group), None


class _Alike(torch.autograd.Function):
    """Returns values that are equal on all ranks; in the backward pass, divides the gradient by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None
