"""A model in training: a language model sharded by FSDP2, a simulator policy whole on every rank.

Its gradients, what an optimizer steps, weights to send and to save. Parameters of a language model with LoRA factors
have two names: that of the module, and that of the checkpoint, which has no factors.
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
from rlplace.config.schema import Dtype
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


class TrainedModel(abc.ABC):
    """Holds this rank's part of weights and gradients."""

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
        """`tensors`: parameters and buffers, tied ones under each name; those called `kept` are not sent or saved.

        `compute`: the dtype of parameters in the forward pass. `lora_scale`: of factors, where there are any.
        """
        # FSDP puts other tensors into the module while it has gathered them: these are the rank's own.
        self._tensors = dict(tensors)
        self._module = module
        self._ranks = ranks
        self._compute = compute
        self._kept = kept
        self._lora_scale = lora_scale
        self.device = torch.device(ranks.mesh.device_type)

    def settle(self) -> None:
        """Wait until the accelerator has done what it was given; on a host it has."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @abc.abstractmethod
    def trained_shards(self) -> list[Tensor]:
        """Return what an optimizer steps: plain tensors, alive as long as the model."""

    @abc.abstractmethod
    def by_name(self, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """Return what belongs to each of `trained_shards` by name of the parameter, placed as that is."""

    @abc.abstractmethod
    def sum_shares(self, shares: Tensor) -> Tensor:
        """Return [k + 1]: the sum over ranks of `shares` [k], then the norm of the gradient of all. A collective."""

    @abc.abstractmethod
    def gradients(self) -> list[Tensor]:
        """Return the gradients of all ranks, in the order of `trained_shards`; to be read after `sum_shares`."""

    @abc.abstractmethod
    def own_gradients(self) -> list[Tensor]:
        """Return what of the gradients this rank has in its own hands: to find the one whose are not finite."""

    @abc.abstractmethod
    def end_step(self) -> None:
        """Make ready for the next forward pass, after a step that is made or skipped."""

    @abc.abstractmethod
    def drop_gathered(self) -> None:
        """Free what computing has needed: gathered parameters and all gradients."""

    # ── the weights ──────────────────────────────────────────────────────────────────────────────────────────────────

    def shards(self, mode: str = "all", *, again: bool = False) -> tuple[Shard, ...]:
        """Return this rank's weights and buffers, to be sent in the dtype of the forward pass; valid until a step.

        `mode`: of `actor.sync`. By `lora`, factors stand beside the frozen weights, else they are merged with them.
        `again`: every receiver has had all, so only what the mode carries from then on: by `trainable` no frozen
        parameter, by `lora` the factors alone. Tensors are not copied, unless they are merged or cut by columns: then
        in new memory, a collective.
        """
        merging = mode != "lora"
        return tuple(
            self._shard(
                names, tensor, self._merged(names[0], tensor, own) if merging else None
            )
            for names, tensor in self._named()
            if not (merging and is_factor(names[0]))
            and not (again and self._stays(mode, names[0], tensor))
        )

    def leaves_out(self, mode: str) -> bool:
        """Return whether syncs of this mode leave something out once every receiver has had all."""
        return any(
            self._stays(mode, name, tensor) for (name, *_), tensor in self._named()
        )

    @staticmethod
    def _stays(mode: str, name: str, tensor: Tensor) -> bool:
        """Return whether a sync of this mode never changes it."""
        if mode == "lora":
            return not is_factor(name)
        frozen = (
            isinstance(tensor, nn.Parameter)
            and not tensor.requires_grad
            and factors_of(name) is None
        )
        return mode == "trainable" and frozen

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield one weight after the other, gathered and merged, in the optimizer's dtype; tied ones once.

        A collective: all ranks take all of them.
        """
        for (name, *_), tensor in self._named():
            if not is_factor(name):
                with_factors = self._merged(name, tensor, whole)
                yield (
                    checkpoint_name(name),
                    whole(tensor) if with_factors is None else with_factors,
                )
                del with_factors

    def save(self, path: Path, rank: int) -> None:
        """Save the whole weights; rank 0 replaces `path` once everything is on the disk. A collective.

        Raises OutputError; then `path` is what it was before.
        """
        weights = self.whole_weights()
        try:
            if rank == 0:
                self._write(path, weights)
        finally:
            # The other ranks gather them all, also where they cannot be written
            deque(weights, maxlen=0)

    @abc.abstractmethod
    def _write(self, path: Path, weights: Iterator[tuple[str, Tensor]]) -> None: ...

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """Return what changes without being trained."""
        return [
            (name, tensor)
            for name, tensor in self._tensors.items()
            if not isinstance(tensor, nn.Parameter)
        ]

    def weight_tensors(self) -> list[Tensor]:
        return [*map(own, self._tensors.values()), *self._module.buffers()]

    def _named(self) -> list[tuple[list[str], Tensor]]:
        """Return each tensor once, with all its names: no receiver may keep a stale copy under another name."""
        names: dict[Tensor, list[str]] = {}
        for name, tensor in self._tensors.items():
            if name not in self._kept:
                names.setdefault(tensor, []).append(name)
        return [(tied, tensor) for tensor, tied in names.items()]

    def _shard(
        self, names: Sequence[str], tensor: Tensor, data: Tensor | None = None
    ) -> Shard:
        """`data`: this rank's part, if it is not that of `tensor` itself."""
        parameter = isinstance(tensor, nn.Parameter)
        part, placements = by_rows(tensor, own(tensor) if data is None else data)
        return Shard(
            names=tuple(map(checkpoint_name, names)),
            dtype=dtype_name(
                torch.empty(0, dtype=self._compute if parameter else tensor.dtype)
            ),
            shape=tuple(tensor.shape),
            blocks=self._blocks(tensor, placements),
            data=part,
        )

    def _blocks(
        self, tensor: Tensor, placements: Sequence[Placement]
    ) -> tuple[Block, ...]:
        """Return the elements that each rank has of a tensor, placed in whole rows."""
        ranks = self._ranks
        width = math.prod(tensor.shape[1:])
        if not isinstance(tensor, DTensor):
            return replicas(tensor.numel(), ranks.world_size)
        places = (
            divmod(rank, ranks.tensor_parallel) for rank in range(ranks.world_size)
        )
        rows = [
            part_at(tensor, {SHARD: copy, TENSOR: within}, placements)[0]
            for copy, within in places
        ]
        return tuple(Block(part.start * width, part.stop * width) for part in rows)

    @torch.no_grad()
    def _merged(
        self, name: str, weight: Tensor, part: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        """Return `part` of the weight with its factors, own rows or the whole; None where it has no factors."""
        factors = factors_of(name)
        if factors is None:
            return None
        a, b = (self._tensors[factor] for factor in factors)
        return Factors(
            a=whole(a) if part is whole else all_rows(a),
            b=part(b),
            scale=self._lora_scale,
        ).added_to(part(weight), weight.device)


class TrainedPolicy(TrainedModel):
    """A simulator policy. Every rank has all of it: its parameters are slices of one float32 tensor.

    A step is one exchange of gradient and numbers in one tensor, after which all ranks make the same step.
    """

    def __init__(self, module: PolicyNetwork, compute: Dtype, ranks: Ranks) -> None:
        """`module`: on the ranks' device already and equal on all of them."""
        self.module, self._flat = module, flatten(module)
        tensors = (*module.named_parameters(), *module.named_buffers())
        super().__init__(module, ranks, tensors=tensors, compute=DTYPES[compute])
        # Between stages
        self._bucket = self._summed = self._rounded = self._rounded_gradient = (
            torch.empty(0)
        )

    def passes(self, numbers: int) -> Passes:
        """Make room for a gradient and so many `numbers` beside it, until `drop_gathered`; return what fills it."""
        size = self._flat.numel()
        device = self.device
        # The last: the norm, after the exchange
        self._bucket = torch.zeros(size + numbers + 1, device=device)
        if self._compute == torch.float32:
            return Passes(self.module, self._flat, self._bucket[:size])
        self._rounded, self._rounded_gradient = (
            torch.empty(size, dtype=self._compute, device=device) for _ in "wg"
        )
        self.end_step()
        return Passes(self.module, self._rounded, self._rounded_gradient)

    def trained_shards(self) -> list[Tensor]:
        return [self._flat]

    def by_name(self, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        (flat,) = tensors
        return list(slices(flat, self.module))

    def sum_shares(self, shares: Tensor) -> Tensor:
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
        # That of several ranks is another, and no longer needed
        self._summed = self._bucket
        if len(self._rounded):
            self._rounded.copy_(self._flat)

    def drop_gathered(self) -> None:
        self._bucket = self._summed = self._rounded = self._rounded_gradient = (
            torch.empty(0)
        )

    def _write(self, path: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        write_file(path, weights)


class TrainedLm(TrainedModel):
    """A language model: the actor's, with or without a value head, or a critic's.

    Each rank has its shard of every parameter and gradient. `module(...)` and its backward pass are collectives.
    """

    def __init__(
        self, spec: LmSpec, ranks: Ranks, kind: type[PackedLm] | None = None
    ) -> None:
        """`kind`: of the module; without it, a CausalLm."""
        from rlplace.models.causal_lm import CausalLm, build

        self.spec, self.module = (
            spec,
            build(kind or CausalLm, spec, ranks.mesh, ranks.context),
        )
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
        self._trained = list(
            dict.fromkeys(t for t in self._tensors.values() if t.requires_grad)
        )
        counts = [is_cut(parameter) or not ranks.within for parameter in self._trained]
        # In the norm of all gradients
        self._counts = torch.tensor(counts, dtype=torch.float64, device=self.device)
        self._in_parts = [
            at for at, parameter in enumerate(self._trained) if not is_cut(parameter)
        ]
        # Of the gradients of 16-bit parameters over micro-batches, in float32
        self._sums: dict[Tensor, Tensor] = {}
        for parameter in self._trained:
            if parameter.dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(self._add_gradient)

    def trained_shards(self) -> list[Tensor]:
        return [own(parameter) for parameter in self._trained]

    def by_name(self, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        # The first of a tied one
        names = {tensor: name for name, tensor in reversed(self._tensors.items())}
        return [
            (names[of], like(of, tensor))
            for of, tensor in zip(self._trained, tensors, strict=True)
        ]

    @torch.no_grad()
    def sum_shares(self, shares: Tensor) -> Tensor:
        gradients = self.gradients()
        parallel = self.module.parallel
        if parallel is not None and (parts := [gradients[at] for at in self._in_parts]):
            summed = parallel.reduce_(torch.cat([part.flatten() for part in parts]))
            for part, whole_of in zip(
                parts, summed.split([part.numel() for part in parts]), strict=True
            ):
                part.copy_(whole_of.view_as(part))
        squared = (
            torch.stack(torch._foreach_norm(gradients)).double().square() * self._counts
        ).sum(dim=0)
        total = self._ranks.sum(torch.cat([shares * self._ranks.counts, squared[None]]))
        total[-1].sqrt_()
        return total

    def gradients(self) -> list[Tensor]:
        gradients = (
            self._sums.get(parameter, parameter.grad) for parameter in self._trained
        )
        return [own(cast(Tensor, gradient)) for gradient in gradients]

    def own_gradients(self) -> list[Tensor]:
        return self.gradients()

    def _add_gradient(self, parameter: Tensor) -> None:
        """Take over this micro-batch's gradient: FSDP would add it up in the dtype of the parameter."""
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

    def _write(self, path: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        write_model(path, self.spec.folder, weights, config=self.module.saved_config())
