"""A model in training, sharded by FSDP2 or whole on a single rank: gradients, weights to send and to save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlplace.comm.codec import dtype_name
from rlplace.comm.weights.shards import Shard, replicas, row_blocks
from rlplace.models.causal_lm import DTYPES, Dtype, LmSpec, PackedLm, build
from rlplace.models.checkpoint import CheckpointWriter, write_file
from rlplace.models.lora import checkpoint_name, factors_of, is_factor, merged
from rlplace.models.mlp import ActorCritic
from rlplace.models.sharding import elements, own, whole
from rlplace.workers.training.ranks import Ranks


class TrainedModel:
    """Holds this rank's shard of each parameter and gradient. `module(...)` and its backward pass are collectives."""

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks,
        *,
        tensors: Iterable[tuple[str, Tensor]],
        groups: Sequence[nn.Module],
        compute: torch.dtype | None,
    ) -> None:
        """`tensors`: parameters and buffers to send and save, tied ones under each name; gathered by FSDP or not.

        `groups`: what FSDP gathers at once; none where one rank has the whole model. `compute`: the dtype of parameters
        in the forward pass; None: their own.
        """
        self._fsdp_groups = [cast(FSDPModule, group) for group in groups]
        for group in self._fsdp_groups:
            ranks.carry(group)
        # FSDP puts other tensors into the module while it has gathered them: these are the rank's own.
        self._tensors = dict(tensors)
        self._module, self._world_size, self._compute = module, ranks.world_size, compute
        self._trained = list(dict.fromkeys(t for t in self._tensors.values() if t.requires_grad))

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def trained_shards(self) -> list[Tensor]:
        """Return what an optimizer steps: this rank's part of each trained parameter, alive as long as the model."""
        return [own(parameter) for parameter in self._trained]

    @torch.no_grad()
    def squared_gradient(self) -> Tensor:
        """Return [1] float64, this rank's share of the squared global gradient norm."""
        return torch.stack(torch._foreach_norm(self.gradients())).double().square().sum(dim=0, keepdim=True)

    def gradients(self) -> list[Tensor]:
        """Return this rank's part of each gradient, in the order of `trained_shards`."""
        return [own(cast(Tensor, parameter.grad)) for parameter in self._trained]

    def drop_gathered(self) -> None:
        """Free gathered parameters and all gradients."""
        for group in self._fsdp_groups:
            group.reshard()
        for parameter in self._trained:
            parameter.grad = None

    # ── the weights ──────────────────────────────────────────────────────────────────────────────────────────────────

    def shards(self) -> tuple[Shard, ...]:
        """Return what this rank holds of the weights and buffers, to be sent in the dtype of the forward pass.

        Not copied: valid until the next step.
        """
        return tuple(self._shard(names, tensor) for names, tensor in self._named())

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield one weight after the other, gathered, in the optimizer's dtype; tied ones once.

        A collective: all ranks take all of them.
        """
        for names, tensor in self._named():
            yield names[0], whole(tensor)

    def save(self, path: Path, rank: int) -> None:
        """Save the whole weights; rank 0 replaces `path` once everything is on the disk. A collective.

        Raises OutputError; then `path` is what it was before.
        """
        raise NotImplementedError

    def weight_tensors(self) -> list[Tensor]:
        """Return this rank's parameters and buffers."""
        return [*map(own, self._tensors.values()), *self._module.buffers()]

    def _named(self) -> list[tuple[list[str], Tensor]]:
        """Return each tensor once, with all its names: no receiver may keep a stale copy under another name."""
        names: dict[Tensor, list[str]] = {}
        for name, tensor in self._tensors.items():
            names.setdefault(tensor, []).append(name)
        return [(tied, tensor) for tensor, tied in names.items()]

    def _shard(self, names: Sequence[str], tensor: Tensor, data: Tensor | None = None) -> Shard:
        """`data`: this rank's part, if it is not that of `tensor` itself."""
        parameter, sharded = isinstance(tensor, nn.Parameter), isinstance(tensor, DTensor)
        dtype = self._compute if parameter and self._compute is not None else tensor.dtype
        return Shard(
            names=tuple(names),
            dtype=dtype_name(torch.empty(0, dtype=dtype)),
            shape=tuple(tensor.shape),
            blocks=row_blocks(tensor.shape, self._world_size)
            if sharded
            else replicas(tensor.numel(), self._world_size),
            data=own(tensor) if data is None else data,
            trained=tensor.requires_grad or not parameter or data is not None,
        )

    # ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def gathered_bytes(self) -> int:
        """Bytes of whole weights that a rank has at once in a pass."""
        return elements(self._module.parameters()) * torch.float32.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of whole gradients, which a rank keeps until the last micro-batch of a step; in float32."""
        return elements(self._trained) * torch.float32.itemsize


class TrainedPolicy(TrainedModel):
    """A simulator policy, with its observation normaliser."""

    def __init__(self, module: ActorCritic, compute: Dtype, ranks: Ranks) -> None:
        """`module`: on the ranks' device already and equal on all of them; FSDP shards it unless there is no need."""
        groups: list[nn.Module] = []
        if ranks.world_size > 1 or compute != "fp32":  # else there is nothing to shard or to cast
            policy = MixedPrecisionPolicy()
            if compute != "fp32":
                # Inputs stay float32: observations are normalised first and rounded after that, inside the module.
                policy = MixedPrecisionPolicy(
                    param_dtype=DTYPES[compute], reduce_dtype=torch.float32, cast_forward_inputs=False
                )
            # One group for the whole module: for a small policy the number of collectives is what costs.
            fully_shard(module, mesh=ranks.mesh, reshard_after_forward=False, mp_policy=policy)
            groups.append(module)
        self.module = module
        super().__init__(
            module,
            ranks,
            tensors=(*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)),
            groups=groups,
            compute=DTYPES[compute],
        )

    def save(self, path: Path, rank: int) -> None:
        """Save one safetensors file."""
        tensors = dict(self.whole_weights())
        if rank == 0:
            write_file(path, tensors)


class TrainedLm(TrainedModel):
    """A language model: the actor's, with or without a value head, or a critic's.

    Parameters have two names: that of the module, and that of the checkpoint, which has no LoRA factors.
    """

    def __init__(self, spec: LmSpec, ranks: Ranks, build: Callable[[LmSpec, DeviceMesh], PackedLm] = build) -> None:
        self.spec, self.module = spec, build(spec, ranks.mesh)
        self.device = torch.device(ranks.mesh.device_type)
        super().__init__(
            self.module,
            ranks,
            tensors=self.module.named_tensors(),
            groups=self.module.groups,
            compute=DTYPES[spec.compute],
        )

    def reduce_gradients(self, last: bool) -> None:
        """Sum gradients over ranks in the `last` backward pass of a step only."""
        root = cast(FSDPModule, self.module)
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)

    def shards(self) -> tuple[Shard, ...]:
        """Return the weights as the checkpoint names them, factors merged in memory of their own: then a collective."""
        kept = ((names, p, factors_of(names[0])) for names, p in self._named() if not is_factor(names[0]))
        return tuple(
            self._shard(names, p) if factors is None else self._shard(names, p, self._merged(p, *factors))
            for names, p, factors in kept
        )

    def unmerged_shards(self) -> tuple[Shard, ...]:
        """Return the factors beside the frozen weights, nothing copied."""
        return super().shards()

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights as the checkpoint names them, factors merged."""
        for (name, *_), parameter in self._named():
            if is_factor(name):
                continue
            factors, full = factors_of(name), whole(parameter)
            if factors is not None and self.spec.lora is not None:
                a, b = (whole(self._tensors[of]) for of in factors)
                full = merged(full, a, b, self.spec.lora.scale)
            yield checkpoint_name(name), full

    def save(self, path: Path, rank: int) -> None:
        """Save a Hugging Face folder, factors merged."""
        writer = CheckpointWriter(path, self.spec.folder, config=self.module.saved_config()) if rank == 0 else None
        for name, tensor in self.whole_weights():
            if writer is not None:
                writer.add(name, tensor)
        if writer is not None:
            writer.finish()

    def _named(self) -> list[tuple[list[str], Tensor]]:
        return [(names, tensor) for names, tensor in super()._named() if names[0] not in self.module.kept]

    def _shard(self, names: Sequence[str], tensor: Tensor, data: Tensor | None = None) -> Shard:
        return super()._shard(list(map(checkpoint_name, names)), tensor, data)

    @torch.no_grad()
    def _merged(self, weight: Tensor, a: str, b: str) -> Tensor:
        assert self.spec.lora is not None, "only LoRA makes factors"
        return merged(own(weight), whole(self._tensors[a]), own(self._tensors[b]), self.spec.lora.scale)

    @property
    def gathered_bytes(self) -> int:
        """All weights, or those of two blocks and of what belongs to no block."""
        blocks = [elements(block.parameters()) for block in self.module.blocks]
        rest = elements(self.module.parameters()) - sum(blocks)
        at_once = sum(sorted(blocks)[-2:]) if self.spec.gather_again else sum(blocks)
        return (rest + at_once) * DTYPES[self.spec.compute].itemsize
