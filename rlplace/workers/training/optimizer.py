"""AdamW over this rank's shards: in place, or on copies in float32 that may lie on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlplace.config import OptimizerConfig


class Adam:
    """Steps the shards themselves. Owns the moments, which are made at once so that their size is known."""

    def __init__(self, shards: Sequence[Tensor], config: OptimizerConfig) -> None:
        """`shards`: what is trained, plain tensors that stay where they are; each may be empty."""
        self._shards = tuple(shards)
        self._stepped = [nn.Parameter(tensor) for tensor in self._masters()]
        self._adam = torch.optim.AdamW(
            self._stepped,
            lr=0.0,  # set before each step
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for parameter in self._stepped:
            parameter.grad = torch.zeros_like(parameter)
        self._adam.step()  # at rate 0: neither gradient nor decay move anything
        for state in self._adam.state.values():
            state["step"].zero_()
        self._adam.zero_grad()

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        """`gradients` in the order of the shards; they may be changed."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        for parameter, gradient in zip(self._stepped, gradients, strict=True):
            parameter.grad = gradient.to(device=parameter.device, dtype=parameter.dtype)
        self._adam.step()
        self._adam.zero_grad()
        self._write_back()

    def state(self) -> list[dict[str, Tensor]]:
        """By shard, in their order; not copied."""
        return [dict(self._adam.state[parameter]) for parameter in self._stepped]

    def tensors(self) -> list[Tensor]:
        """What it holds on the accelerator beside the shards."""
        return [value for state in self.state() for value in state.values()]

    @property
    def host_bytes(self) -> int:
        """What it holds on the host."""
        return 0

    def _masters(self) -> list[Tensor]:
        return [shard.detach() for shard in self._shards]

    def _write_back(self) -> None:
        """The shards are what was stepped."""


class MasterAdam(Adam):
    """Steps copies in float32 on the accelerator and rounds them to the shards."""

    def state(self) -> list[dict[str, Tensor]]:
        return [s | {"master": p.detach()} for s, p in zip(super().state(), self._stepped, strict=True)]

    def _masters(self) -> list[Tensor]:
        return [shard.detach().to(torch.float32, copy=True) for shard in self._shards]

    def _write_back(self) -> None:
        for shard, master in zip(self._shards, self._stepped, strict=True):
            shard.copy_(master, non_blocking=True)


class HostAdam(MasterAdam):
    """Moments and copies live on the host and are stepped there: the accelerator holds only the shards."""

    def tensors(self) -> list[Tensor]:
        return []

    @property
    def host_bytes(self) -> int:
        return sum(value.nbytes for value in super().tensors())

    def _masters(self) -> list[Tensor]:
        pinned = any(shard.is_cuda for shard in self._shards)
        masters = [shard.detach().to("cpu", torch.float32, copy=True) for shard in self._shards]
        return [master.pin_memory() for master in masters] if pinned else masters
