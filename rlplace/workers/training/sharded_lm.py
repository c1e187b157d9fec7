"""A language model in training, sharded over the ranks by FSDP: gradients, a step, what the engines are sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlplace.comm.codec import dtype_name
from rlplace.comm.weights.shards import Shard, row_blocks
from rlplace.models.causal_lm import DTYPES, LmSpec, PackedLm, build
from rlplace.models.lora import checkpoint_name, factors_of, is_factor, merged
from rlplace.workers.training.optimizer import Adam
from rlplace.workers.training.ranks import Ranks


class ShardedLm:
    """Holds one shard of each parameter and gradient; `module(...)` and its backward pass are collectives.

    Parameters have two names: that of the module, and that of the checkpoint, which knows nothing of factors.
    """

    def __init__(self, spec: LmSpec, ranks: Ranks, build: Callable[[LmSpec, DeviceMesh], PackedLm] = build) -> None:
        self.spec = spec
        self.module = build(spec, ranks.mesh)
        self._fsdp = cast(FSDPModule, self.module)
        self._world_size = ranks.world_size
        self.device = torch.device(ranks.mesh.device_type)
        for sharded in self.module.groups:
            ranks.carry(cast(FSDPModule, sharded))
        self._parameters = dict(self.module.named_tensors())
        self.trained = {name: p for name, p in self.module.lm.named_parameters() if p.requires_grad}

    def trained_shards(self) -> list[Tensor]:
        """What an optimizer steps: this rank's rows of each trained parameter, alive as long as the model."""
        return [_own(parameter) for parameter in self.trained.values()]

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def reduce_gradients(self, last: bool) -> None:
        """Of the coming backward passes only the `last` one of a step sums gradients over ranks."""
        self._fsdp.set_requires_gradient_sync(last)
        self._fsdp.set_is_last_backward(last)

    @torch.no_grad()
    def squared_gradient(self) -> Tensor:
        """[1] float64, this rank's share of the squared global gradient norm."""
        return torch.stack(torch._foreach_norm(self._gradients())).double().square().sum(dim=0, keepdim=True)

    @torch.no_grad()
    def step(self, optimizer: Adam, lr: float, gradient_norm: float, max_norm: float) -> None:
        """Gradients clipped to the global norm `max_norm` (Pascanu et al. 2013, algorithm 1), then dropped."""
        gradients = self._gradients()
        if gradient_norm > max_norm:
            torch._foreach_mul_(gradients, max_norm / gradient_norm)
        optimizer.step(gradients, lr)
        self.drop_gathered()

    def drop_gathered(self) -> None:
        """Frees gathered parameters and all gradients."""
        for sharded in self.module.groups:
            cast(FSDPModule, sharded).reshard()
        self.module.zero_grad(set_to_none=True)

    def _gradients(self) -> list[Tensor]:
        return [_own(cast(Tensor, parameter.grad)) for parameter in self.trained.values()]

    # ── the weights ──────────────────────────────────────────────────────────────────────────────────────────────────

    def shards(self) -> tuple[Shard, ...]:
        """What this rank holds of the weights, as the checkpoint names them and as the forward pass has them.

        Not copied: valid until the next step. Factors are merged, in memory of their own; with them it is a
        collective.
        """
        return tuple(
            self._shard(names, p, factors_of(names[0])) for names, p in self._named() if not is_factor(names[0])
        )

    def shards_apart(self) -> tuple[Shard, ...]:
        """The same with the factors beside the frozen weights, nothing copied."""
        return tuple(self._shard(names, parameter, None) for names, parameter in self._named())

    def _named(self) -> Iterable[tuple[list[str], Tensor]]:
        """Each parameter of the checkpoint once, with all its names."""
        names: dict[Tensor, list[str]] = {}
        for name, parameter in self._parameters.items():
            if name not in self.module.kept:
                names.setdefault(parameter, []).append(name)
        return [(tied, parameter) for parameter, tied in names.items()]

    def _shard(self, names: list[str], parameter: Tensor, factors: tuple[str, str] | None) -> Shard:
        data = _own(parameter) if factors is None else self._merged(parameter, *factors)
        return Shard(
            names=tuple(map(checkpoint_name, names)),
            dtype=dtype_name(torch.empty(0, dtype=DTYPES[self.spec.compute])),
            shape=tuple(parameter.shape),
            blocks=row_blocks(parameter.shape, self._world_size),
            data=data,
            trained=parameter.requires_grad or factors is not None,
        )

    @torch.no_grad()
    def _merged(self, weight: Tensor, a: str, b: str) -> Tensor:
        assert self.spec.lora is not None, "only LoRA makes factors"
        return merged(_own(weight), whole(self._parameters[a]), _own(self._parameters[b]), self.spec.lora.scale)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """One weight after the other, gathered, in the optimizer's type and factors merged; tied ones once.

        A collective: all ranks take all of them.
        """
        for name, parameter in self.module.lm.named_parameters():
            if is_factor(name) or name in self.module.kept:
                continue
            factors, full = factors_of(name), whole(parameter)
            if factors is not None and self.spec.lora is not None:
                a, b = (whole(self._parameters[of]) for of in factors)
                full = merged(full, a, b, self.spec.lora.scale)
            yield checkpoint_name(name), full

    def weight_tensors(self) -> list[Tensor]:
        """This rank's parameters and buffers."""
        return [*map(_own, self._parameters.values()), *self.module.buffers()]

    # ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def gathered_bytes(self) -> int:
        """Of whole weights that a rank has at once in a pass: all, or two blocks and what belongs to no block."""
        blocks = [_size(block.parameters()) for block in self.module.blocks]
        rest = _size(self.module.parameters()) - sum(blocks)
        at_once = sum(sorted(blocks)[-2:]) if self.spec.gather_again else sum(blocks)
        return (rest + at_once) * DTYPES[self.spec.compute].itemsize

    @property
    def gradient_bytes(self) -> int:
        """Of whole gradients, which a rank keeps until the last micro-batch of a step; in float32."""
        return _size(self.trained.values()) * torch.float32.itemsize


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of it. A collective where it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _own(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _size(parameters: Iterable[Tensor]) -> int:
    return sum(math.prod(p.shape) for p in parameters)
