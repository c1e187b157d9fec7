"""A policy in training that is sharded over the ranks by FSDP."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlplace.comm.weights.shards import Block, Shard, replicas, row_blocks
from rlplace.config import OptimizerConfig
from rlplace.config.roles import Dtype
from rlplace.models.mlp import ActorCritic
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.trained_policy import TrainedPolicy


class ShardedPolicy(TrainedPolicy):
    """Holds one shard of each parameter, gradient and optimizer state. Each forward and backward is a collective."""

    def __init__(self, module: ActorCritic, optimizer: OptimizerConfig, compute: Dtype, ranks: Ranks) -> None:
        """Shards `module`, which must already be on the ranks' device and equal on all of them."""
        policy = MixedPrecisionPolicy()
        if compute == "bf16":
            # Inputs stay float32: observations are normalised first and rounded after that, inside the module.
            self._computes_in = "bfloat16"
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        # One group for the whole module: for a small policy the number of collectives is what costs.
        fully_shard(module, mesh=ranks.mesh, reshard_after_forward=False, mp_policy=policy)
        self._fsdp = cast(FSDPModule, module)
        self._world_size = ranks.world_size
        ranks.carry(self._fsdp)
        super().__init__(module, optimizer)  # takes the shards: FSDP puts others in their place while gathered

    def drop_gathered(self) -> None:
        self._fsdp.reshard()
        super().drop_gathered()

    def shards(self) -> tuple[Shard, ...]:
        self._fsdp.reshard()
        return super().shards()

    def export(self, *, keep: bool) -> dict[str, Tensor]:
        self._fsdp.unshard()
        full = super().export(keep=keep)
        self._fsdp.reshard()
        return full

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _blocks(self, tensor: Tensor) -> tuple[Block, ...]:
        if isinstance(tensor, DTensor):
            return row_blocks(tensor.shape, self._world_size)
        return replicas(tensor.numel(), self._world_size)

    @torch.no_grad()
    def _full(self, tensor: Tensor) -> Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
