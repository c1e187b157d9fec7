"""The optimizer: AdamW over a rank's shards on the accelerator or the host, the learning-rate schedule, the average."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlplace.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps_made: int, progress: float) -> float:
    """Return the rate of the next step; `progress` is the share of iterations that are over."""
    warmth = min(1.0, (steps_made + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    left = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return config.lr * warmth * max(0.0, left[config.schedule])


class Adam:
    """Step the shards in place. Owns the moments, which are made at once so that their size is known."""

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
        """Return the state by shard, in their order, not copied."""
        return [dict(self._adam.state[parameter]) for parameter in self._stepped]

    def tensors(self) -> list[Tensor]:
        """Return what it holds on the accelerator beside the shards."""
        return [value for state in self.state() for value in state.values()]

    @property
    def host_bytes(self) -> int:
        """Bytes it holds on the host."""
        return 0

    def _masters(self) -> list[Tensor]:
        return [shard.detach() for shard in self._shards]

    def _write_back(self) -> None:
        """Do nothing: the shards are what was stepped."""


class MasterAdam(Adam):
    """Step copies in float32 on the accelerator and round them to the shards."""

    def state(self) -> list[dict[str, Tensor]]:
        return [s | {"master": p.detach()} for s, p in zip(super().state(), self._stepped, strict=True)]

    def _masters(self) -> list[Tensor]:
        return [shard.detach().to(torch.float32, copy=True) for shard in self._shards]

    def _write_back(self) -> None:
        for shard, master in zip(self._shards, self._stepped, strict=True):
            shard.copy_(master, non_blocking=True)


class HostAdam(MasterAdam):
    """Keep moments and float32 copies on the host and step them there: the accelerator holds only the shards."""

    def tensors(self) -> list[Tensor]:
        return []

    @property
    def host_bytes(self) -> int:
        return sum(value.nbytes for value in super().tensors())

    def _masters(self) -> list[Tensor]:
        pinned = any(shard.is_cuda for shard in self._shards)
        masters = [shard.detach().to("cpu", torch.float32, copy=True) for shard in self._shards]
        return [master.pin_memory() for master in masters] if pinned else masters


class MovingAverage:
    """Average the weights over steps: a = decay * a + (1 - decay) * w (Polyak and Juditsky 1992, exponential weights).

    Owns this rank's part of it: float32, on the host.
    """

    def __init__(self, shards: Sequence[Tensor], decay: float) -> None:
        """`shards`: what is trained, on the accelerator now; they stay the same tensors."""
        self._shards, self._decay = tuple(shards), decay
        self._averages = [shard.detach().to("cpu", torch.float32, copy=True) for shard in self._shards]

    @property
    def host_bytes(self) -> int:
        return sum(average.nbytes for average in self._averages)

    @torch.no_grad()
    def update(self) -> None:
        """Call this after each step."""
        for average, shard in zip(self._averages, self._shards, strict=True):
            average.lerp_(shard.to("cpu", torch.float32), 1.0 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the shards by the averages until the end of the block."""
        kept = [shard.detach().to("cpu", copy=True) for shard in self._shards]
        try:
            self._write(self._averages)
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for shard, value in zip(self._shards, values, strict=True):
            shard.copy_(value)
