"""A policy sharded over the ranks by FSDP, with its optimizer: a step, the full weights on request, what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlplace.config import OptimizerConfig
from rlplace.models.mlp import ActorCritic
from rlplace.workers.ranks import Ranks


class ShardedPolicy:
    """Owns the parameter shards, gradients and optimizer state of this rank. Ask for outputs through `module(...)`."""

    def __init__(
        self, module: ActorCritic, optimizer: OptimizerConfig, precision: Literal["fp32", "bf16"], ranks: Ranks
    ) -> None:
        """Shards `module`, which must already be on the ranks' device and equal on all of them."""
        policy = MixedPrecisionPolicy()
        if precision == "bf16":
            # Inputs stay float32: observations are normalised first and rounded after that, inside the module.
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        # One group for the whole module: for a small policy the number of collectives is what costs.
        fully_shard(module, mesh=ranks.mesh, reshard_after_forward=False, mp_policy=policy)
        self.module = module
        self._shards = tuple(module.parameters())  # FSDP puts others in their place while the weights are gathered
        self._fsdp = cast(FSDPModule, module)
        ranks.carry(self._fsdp)
        self._optimizer = torch.optim.AdamW(
            self._shards,
            lr=0.0,  # the learner sets it for each iteration
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self._make_optimizer_state()

    def _make_optimizer_state(self) -> None:
        """Adam makes its state in the first step; made here, its size is known before the first move."""
        for shard in self._shards:
            shard.grad = torch.zeros_like(shard)
        self._optimizer.step()  # at rate 0: neither gradient nor decay move anything
        for state in self._optimizer.state.values():
            state["step"].zero_()
        self.drop_gathered()

    def set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def squared_gradient(self) -> Tensor:
        """[1] float64, this rank's share of the squared global gradient norm."""
        return torch.nn.utils.get_total_norm(self._gradients()).double().square().reshape(1)

    def step(self, gradient_norm: float, max_norm: float) -> None:
        """One optimizer step, gradients clipped to the global norm `max_norm` (Pascanu et al. 2013, algorithm 1).

        Not `clip_grad_norm_`: on sharded gradients that is several collectives of its own, while the norm can share one
        with the other numbers of a step.
        """
        if gradient_norm > max_norm:
            torch._foreach_mul_(self._gradients(), max_norm / gradient_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def drop_gathered(self) -> None:
        """Frees gathered parameters and gradients; only the shards and the optimizer state stay."""
        self._fsdp.reshard()
        self._optimizer.zero_grad(set_to_none=True)

    def export(self, *, keep: bool) -> dict[str, Tensor]:
        """The full weights and buffers as the forward pass uses them, copied; {} where `keep` is false. A collective.

        In bf16 the parameters are rounded to what the learner computes with, so that sampling uses the same.
        """
        self._fsdp.unshard()
        full = {name: tensor.detach().clone() for name, tensor in self._named_tensors()} if keep else {}
        self._fsdp.reshard()
        return {name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for name, tensor in full.items()}

    def master_weights(self) -> dict[str, Tensor]:
        """The full weights and buffers in the optimizer's precision, in memory of their own. A collective."""
        return {name: _full(tensor) for name, tensor in self._named_tensors()}

    def optimizer_state(self) -> dict[str, Tensor]:
        """The full optimizer state, named by parameter. A collective."""
        return {
            f"{name}/{key}": _full(value)
            for name, parameter in self.module.named_parameters()
            for key, value in self._optimizer.state[parameter].items()
        }

    def weight_tensors(self) -> list[Tensor]:
        """This rank's shards and buffers: what residency `weights` holds."""
        return [_local(tensor) for _, tensor in self._named_tensors()]

    def optimizer_tensors(self) -> list[Tensor]:
        """This rank's optimizer state: what residency `full` adds."""
        return [_local(value) for state in self._optimizer.state.values() for value in state.values()]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all parameters of the job in this rank's memory, while a pass or an export needs them whole."""
        return sum(shard.numel() * shard.element_size() for shard in self._shards)

    def _gradients(self) -> list[Tensor]:
        return [_local(cast(Tensor, shard.grad)) for shard in self._shards]

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        # Tied weights appear under each of their names: who loads them must not be left with a stale one.
        yield from self.module.named_parameters(remove_duplicate=False)
        yield from self.module.named_buffers(remove_duplicate=False)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
