"""An average of the weights over the steps of a run, which forgets slowly: it is saved beside the policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class MovingAverage:
    """a = decay * a + (1 - decay) * w after each step (Polyak and Juditsky 1992, with exponential weights).

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
        """To be called after each step."""
        for average, shard in zip(self._averages, self._shards, strict=True):
            average.lerp_(shard.to("cpu", torch.float32), 1.0 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The shards are the averages until the end of the block."""
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
