"""A model in training: a language model sharded by FSDP2, or a simulator policy that is whole on every rank.

Provides the gradients, the tensors that an optimizer steps, and the weights to send and to save. Parameters of a
model with LoRA factors have two names: the name in the module, and the name in the checkpoint, which has no factors.
"""

from __future__ import annotations

import abc
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from rlplace.comm.codec import dtype_name
from rlplace.comm.weights.shards import Block, Shard, replicas
from rlplace.config.fields import Dtype
from rlplace.models.checkpoint import write_file, write_model
from rlplace.models.lora import Factors, checkpoint_name, factors_of, is_factor
from rlplace.models.passes import Passes, flatten, slices
from rlplace.models.policy_networks import PolicyNetwork
from rlplace.models.sharding import (
    DTYPES,
    SHARD,
    TENSOR,
    all_rows,
    by_rows,
    is_cut,
    like,
    own,
    part_at,
    whole,
)
from rlplace.workers.training.ranks import Ranks

# Importing transformers takes seconds, which policies of simulators do without
if TYPE_CHECKING:
    from rlplace.models.causal_lm import LmSpec, PackedLm
    from rlplace.models.lora import LoraSpec


# Modes of a weight sync that send LoRA factors beside the frozen weights
_FACTORS_APART = ("lora", "adapter")


class TrainedModel(abc.ABC):
    """A model in training: this rank's part of its weights and gradients."""

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks,
        *,
        tensors: Iterable[tuple[str, Tensor]],
        compute: torch.dtype,
        kept: frozenset[str] = frozenset(),
        lora_scale: float = 0.0,
    ) -> None:
        """Keep the model's tensors.

        `tensors`: name -> parameter or buffer; a tied tensor occurs under each of its names. `compute`: dtype of the
        parameters in the forward pass. `kept`: names of tensors that are neither sent to the engine nor saved.
        `lora_scale`: scale of the LoRA factors, if there are any.
        """
        # These stay this rank's own tensors; FSDP puts gathered ones into the module during a pass
        self._tensors = dict(tensors)
        self._module = module
        self._ranks = ranks
        self._compute = compute
        self._kept = kept
        self._lora_scale = lora_scale
        self.device = torch.device(ranks.mesh.device_type)

    def synchronize(self) -> None:
        """Wait until the accelerator has finished its queued work. On the host, return at once."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @abc.abstractmethod
    def trained_shards(self) -> list[Tensor]:
        """Return this rank's part of each trained parameter, as plain tensors, which the optimizer changes in place.

        The model never replaces these tensor objects.
        """

    @abc.abstractmethod
    def by_name(self, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """Return each of `tensors` with the name of its parameter, sharded like the parameter.

        `tensors`: one for each result of `trained_shards`, in the same order and with the same shapes.
        """

    @abc.abstractmethod
    def sum_shares(self, shares: Tensor) -> Tensor:
        """Return a tensor [k + 1]: the sum of `shares` [k] over ranks, and the norm of the whole gradient. A
        collective.

        `shares`: this rank's part of each of k numbers, such as the loss.
        """

    @abc.abstractmethod
    def gradients(self) -> list[Tensor]:
        """Return the gradients, summed over all ranks, in the order of `trained_shards`. Call `sum_shares` before."""

    @abc.abstractmethod
    def own_gradients(self) -> list[Tensor]:
        """Return this rank's own gradients, by which a rank with non-finite gradients can be found."""

    @abc.abstractmethod
    def end_step(self) -> None:
        """Prepare the next forward pass. Called after each optimizer step, also after a step that was skipped."""

    @abc.abstractmethod
    def drop_gathered(self) -> None:
        """Free the memory that only a step needs: parameters gathered from other ranks, and all gradients."""

    # ── the weights ──────────────────────────────────────────────────────────────────────────────────────────────────

    def shards(self, mode: str = "all", *, again: bool = False) -> tuple[Shard, ...]:
        """Return this rank's part of weights and buffers to be sent to the engine, in the dtype of the forward pass.

        The tensors are valid until the next optimizer step.

        `mode`: `actor.sync.mode`. With `lora` and `adapter`, the frozen weights and the LoRA factors are sent as
        separate tensors; with any other mode, the factors are merged into the weights. `again`: whether every receiver
        has received all tensors before. If true, tensors that never change are left out: frozen parameters with
        `trainable`, all tensors but the factors with `lora` and `adapter`.

        Merged or column-sharded tensors are copied; for these, the call is a collective. Other tensors are not copied.
        """
        merging = mode not in _FACTORS_APART
        shards: list[Shard] = []
        for names, tensor in self._named():
            name = names[0]
            # Merged factors are part of their weight
            if merging and is_factor(name):
                continue
            if again and self._stays(mode, name, tensor):
                continue
            merged = self._merged(name, tensor, own) if merging else None
            shards.append(self._shard(names, tensor, merged))
        return tuple(shards)

    def leaves_out(self, mode: str) -> bool:
        """Return whether `shards(mode, again=True)` leaves out any tensor."""
        return any(
            self._stays(mode, name, tensor) for (name, *_), tensor in self._named()
        )

    @staticmethod
    def _stays(mode: str, name: str, tensor: Tensor) -> bool:
        """Return whether training never changes what is sent of the tensor `name`, so that it needs to be sent only
        once.

        `mode`: `actor.sync.mode`.
        """
        if mode in _FACTORS_APART:
            return not is_factor(name)
        frozen = (
            isinstance(tensor, nn.Parameter)
            and not tensor.requires_grad
            and factors_of(name) is None
        )
        return mode == "trainable" and frozen

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights as pairs (name in the checkpoint, whole tensor), in the optimizer's dtype. A collective.

        Shards are gathered, LoRA factors are merged into their weights, and a tied weight is yielded once. All ranks
        must iterate to the end.
        """
        for (name, *_), tensor in self._named():
            if is_factor(name):
                continue
            weight = self._merged(name, tensor, whole)
            if weight is None:
                weight = whole(tensor)
            yield checkpoint_name(name), weight
            # Only one gathered weight at a time
            del weight

    def save(self, path: Path, rank: int) -> None:
        """Save the whole weights as `path`. Rank 0 replaces an earlier `path` once everything is on disk. A collective.

        `rank`: number of this rank. Raises OutputError; `path` is then unchanged.
        """
        weights = self.whole_weights()
        try:
            if rank == 0:
                self._write(path, weights)
        finally:
            # The other ranks join each gather, also if rank 0 could not write
            deque(weights, maxlen=0)

    @abc.abstractmethod
    def _write(self, path: Path, weights: Iterator[tuple[str, Tensor]]) -> None: ...

    def write_beside(self, folder: Path) -> list[str]:
        """Write what other programs read of a saved state, and return the names of the files, relative to `folder`.

        `folder`: folder of the saved state, with the files of all ranks. One rank calls this. The base class writes
        nothing. Raises OutputError.
        """
        return []

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffers with their names. Buffers change without being trained, such as running statistics."""
        return [
            (name, tensor)
            for name, tensor in self._tensors.items()
            if not isinstance(tensor, nn.Parameter)
        ]

    def weight_tensors(self) -> list[Tensor]:
        """Return this rank's part of all weights and buffers, to offload them and to count their bytes."""
        return [*map(own, self._tensors.values()), *self._module.buffers()]

    def _named(self) -> list[tuple[list[str], Tensor]]:
        """Return each tensor once, with all its names. A tied tensor has several names, and receivers must update all
        of them.
        """
        names: dict[Tensor, list[str]] = {}
        for name, tensor in self._tensors.items():
            if name not in self._kept:
                names.setdefault(tensor, []).append(name)
        return [(tied, tensor) for tensor, tied in names.items()]

    def _shard(
        self,
        names: Sequence[str],
        tensor: Tensor,
        data: Tensor | None = None,
    ) -> Shard:
        """Return this rank's part of `tensor` in the form in which it is sent.

        `names`: all names of the tensor. `data`: this rank's part with LoRA factors merged; None: the part of `tensor`
        itself.
        """
        # Buffers keep their dtype
        is_parameter = isinstance(tensor, nn.Parameter)
        dtype = self._compute if is_parameter else tensor.dtype
        part, placements = by_rows(tensor, own(tensor) if data is None else data)
        return Shard(
            names=tuple(map(checkpoint_name, names)),
            dtype=dtype_name(torch.empty(0, dtype=dtype)),
            shape=tuple(tensor.shape),
            blocks=self._blocks(tensor, placements),
            data=part,
        )

    def _blocks(
        self,
        tensor: Tensor,
        placements: Sequence[Placement],
    ) -> tuple[Block, ...]:
        """Return for each rank the range of elements that it has of a tensor that is sharded by rows, in rank order.

        `placements`: how the tensor is sharded over each dimension of the mesh.
        """
        ranks = self._ranks
        if not isinstance(tensor, DTensor):
            return replicas(tensor.numel(), ranks.world_size)
        width = math.prod(tensor.shape[1:])
        blocks: list[Block] = []
        for rank in range(ranks.world_size):
            shard, tp_rank = divmod(rank, ranks.tensor_parallel)
            rows = part_at(tensor, {SHARD: shard, TENSOR: tp_rank}, placements)[0]
            blocks.append(Block(rows.start * width, rows.stop * width))
        return tuple(blocks)

    @torch.no_grad()
    def _merged(
        self,
        name: str,
        weight: Tensor,
        part: Callable[[Tensor], Tensor],
    ) -> Tensor | None:
        """Return a weight with its LoRA factors added; None if it has no factors.

        `name`: name of the weight. `part`: `own` to return this rank's rows of the weight, `whole` to return the whole
        weight.
        """
        factors = factors_of(name)
        if factors is None:
            return None
        a, b = (self._tensors[factor] for factor in factors)
        # A row of the product needs all of `a` and the same row of `b`
        whole_a = whole(a) if part is whole else all_rows(a)
        merged = Factors(a=whole_a, b=part(b), scale=self._lora_scale)
        return merged.added_to(part(weight), weight.device)


class TrainedPolicy(TrainedModel):
    """A policy for simulators that is being trained.

    Every rank has the whole policy, whose parameters are slices of one float32 tensor. The ranks sum gradient and
    metrics in one tensor, and then all make the same step.
    """

    def __init__(
        self,
        module: PolicyNetwork,
        compute: Dtype,
        ranks: Ranks,
    ) -> None:
        """Flatten the policy's parameters into one tensor.

        `module`: the policy, on the ranks' device, with equal weights on all ranks. `compute`: dtype of the forward
        pass.
        """
        self.module = module
        self._flat = flatten(module)
        tensors = (*module.named_parameters(), *module.named_buffers())
        super().__init__(module, ranks, tensors=tensors, compute=DTYPES[compute])
        self.drop_gathered()

    def passes(self, numbers: int) -> Passes:
        """Allocate the gradient, with room for metrics behind it, and return the forward and backward pass that fill
        it.

        `numbers`: number of metrics. `drop_gathered` frees the memory.
        """
        size = self._flat.numel()
        device = self.device
        # [gradient, numbers, norm]; the norm is filled after the exchange
        self._bucket = torch.zeros(size + numbers + 1, device=device)
        if self._compute == torch.float32:
            return Passes(self.module, self._flat, self._bucket[:size])
        # In a 16-bit dtype the passes use rounded weights, and their gradient is rounded too
        self._rounded = torch.empty(size, dtype=self._compute, device=device)
        self._rounded_gradient = torch.empty(size, dtype=self._compute, device=device)
        self.end_step()
        return Passes(self.module, self._rounded, self._rounded_gradient)

    def trained_shards(self) -> list[Tensor]:
        return [self._flat]

    def by_name(self, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        (flat,) = tensors
        return list(slices(flat, self.module))

    def sum_shares(self, shares: Tensor) -> Tensor:
        # [gradient, numbers] in one sum over ranks; then the norm of the summed gradient
        size = self._flat.numel()
        if len(self._rounded_gradient):
            self._bucket[:size].copy_(self._rounded_gradient)
        self._bucket[size:-1].copy_(shares)
        self._summed = self._ranks.sum(self._bucket)
        torch.linalg.vector_norm(self._summed[:size], out=self._summed[-1])
        return self._summed[size:]

    def gradients(self) -> list[Tensor]:
        return [self._summed[: self._flat.numel()]]

    def own_gradients(self) -> list[Tensor]:
        return [self._bucket[: self._flat.numel()]]

    def end_step(self) -> None:
        # A sum over ranks is a tensor of its own, which is no longer needed
        self._summed = self._bucket
        if len(self._rounded):
            self._rounded.copy_(self._flat)

    def drop_gathered(self) -> None:
        self._bucket = torch.empty(0)
        self._summed = torch.empty(0)
        self._rounded = torch.empty(0)
        self._rounded_gradient = torch.empty(0)

    def _write(self, path: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        write_file(path, weights)


class TrainedLm(TrainedModel):
    """A language model in training: an actor with or without a value head, or a critic.

    Each rank has its shard of every parameter and gradient. A forward pass, `module(...)`, and its backward pass are
    collectives.
    """

    def __init__(
        self,
        spec: LmSpec,
        ranks: Ranks,
        kind: type[PackedLm] | None = None,
    ) -> None:
        """Build the model and shard it over the ranks.

        `spec`: description of the model. `kind`: class of the module; None: CausalLm.
        """
        from rlplace.models.causal_lm import CausalLm, build

        # The module, its shards, and the collectives that FSDP uses for them
        self.spec = spec
        self.module = build(kind or CausalLm, spec, ranks.mesh, ranks.context)
        self._fsdp_groups = [cast(FSDPModule, group) for group in self.module.groups]
        for group in self._fsdp_groups:
            ranks.carry(group)
        super().__init__(
            self.module,
            ranks,
            tensors=self.module.named_tensors(),
            compute=DTYPES[spec.compute],
            kept=self.module.kept,
            lora_scale=spec.lora.scale if spec.lora else 0.0,
        )
        # Trained parameters, tied ones once
        self._trained = list(
            dict.fromkeys(t for t in self._tensors.values() if t.requires_grad)
        )
        # A parameter that tensor-parallel ranks have whole counts once in the gradient norm
        counts = [is_cut(parameter) or not ranks.tp_rank for parameter in self._trained]
        self._counts = torch.tensor(counts, dtype=torch.float64, device=self.device)
        # Such parameters have a partial gradient on each tensor-parallel rank
        self._in_parts = [
            at for at, parameter in enumerate(self._trained) if not is_cut(parameter)
        ]
        # Gradients of 16-bit parameters are accumulated over micro-batches in float32
        self._sums: dict[Tensor, Tensor] = {}
        for parameter in self._trained:
            if parameter.dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(self._add_gradient)

    def trained_shards(self) -> list[Tensor]:
        return [own(parameter) for parameter in self._trained]

    def by_name(self, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        # A tied tensor gets the first of its names
        names = {tensor: name for name, tensor in reversed(self._tensors.items())}
        return [
            (names[of], like(of, tensor))
            for of, tensor in zip(self._trained, tensors, strict=True)
        ]

    @torch.no_grad()
    def sum_shares(self, shares: Tensor) -> Tensor:
        gradients = self.gradients()
        parallel = self.module.parallel
        # Complete the partial gradients of tensor-parallel ranks, in one exchange
        if parallel is not None and self._in_parts:
            parts = [gradients[at] for at in self._in_parts]
            summed = parallel.reduce_(torch.cat([part.flatten() for part in parts]))
            sizes = [part.numel() for part in parts]
            for part, whole_of in zip(parts, summed.split(sizes), strict=True):
                part.copy_(whole_of.view_as(part))
        # Squared norm of this rank's gradients; then metrics and norm in one sum over ranks
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        squared = (norms.square() * self._counts).sum(dim=0)
        if not self._ranks.is_primary:
            shares = torch.zeros_like(shares)
        total = self._ranks.sum(torch.cat([shares, squared[None]]))
        total[-1].sqrt_()
        return total

    def gradients(self) -> list[Tensor]:
        gradients = (
            self._sums.get(parameter, parameter.grad) for parameter in self._trained
        )
        return [own(cast(Tensor, gradient)) for gradient in gradients]

    def own_gradients(self) -> list[Tensor]:
        return self.gradients()

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass has made gradients that no step has used yet."""
        return bool(self._sums) or self._trained[0].grad is not None

    def copy_gradients(self) -> list[Tensor]:
        """Return a copy on the host of this rank's part of each gradient, for `restore_gradients`."""
        return [gradient.to("cpu", copy=True) for gradient in self.gradients()]

    def restore_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Continue with the gradients that `copy_gradients` has returned; later backward passes add to them."""
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            here = gradient.to(self.device)
            if parameter.dtype == torch.float32:
                parameter.grad = like(parameter, here)
            else:
                self._sums[parameter] = here

    def _add_gradient(self, parameter: Tensor) -> None:
        """Add the parameter's gradient of a micro-batch to the float32 sum of its gradients, and drop the gradient.

        FSDP would add gradients up in the dtype of the parameter, which loses bits.
        """
        gradient = own(cast(Tensor, parameter.grad))
        parameter.grad = None
        if parameter in self._sums:
            self._sums[parameter] += gradient
        else:
            self._sums[parameter] = gradient.float()

    def end_step(self) -> None:
        self.drop_gathered()

    def drop_gathered(self) -> None:
        for group in self._fsdp_groups:
            group.reshard()
        self._sums.clear()
        for parameter in self._trained:
            parameter.grad = None

    def save(self, path: Path, rank: int) -> None:
        """Save the whole model as the folder `path`, and LoRA factors as `path` with `_adapter` appended. A collective.

        `rank`: number of this rank. Raises OutputError.
        """
        lora = self._exported_lora
        if lora is None:
            super().save(path, rank)
            return
        factors = (
            (name, whole(tensor).float())
            for (name, *_), tensor in self._named()
            if is_factor(name)
        )
        try:
            super().save(path, rank)
            if rank == 0:
                from rlplace.models.adapters import write_adapter

                beside = path.with_name(f"{path.name}_adapter")
                write_adapter(beside, self.spec.folder, lora, factors)
        finally:
            # The other ranks join each gather, also if rank 0 could not write
            deque(factors, maxlen=0)

    def write_beside(self, folder: Path) -> list[str]:
        lora = self._exported_lora
        if lora is None:
            return []
        from rlplace.models.adapters import write_saved_adapter

        out = folder / "adapter"
        write_saved_adapter(folder, out, self.spec.folder, lora)
        return sorted(f"{out.name}/{file.name}" for file in out.iterdir())

    @property
    def _exported_lora(self) -> LoraSpec | None:
        """The LoRA factors that are also saved as an adapter: those of a causal language model; None: no factors."""
        from rlplace.models.causal_lm import CausalLm

        if isinstance(self.module, CausalLm):
            return self.spec.lora
        return None

    def _write(self, path: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        config = self.module.saved_config()
        write_model(path, self.spec.folder, weights, config=config, chat=self.spec.chat)
