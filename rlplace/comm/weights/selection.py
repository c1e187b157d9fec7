"""Which of the weights a sync carries once every receiver has had all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Protocol

from rlplace.comm.weights.sync import Shard


class Selection(Protocol):
    def picks(self, shard: Shard) -> bool: ...


@dataclasses.dataclass(frozen=True, slots=True)
class AllWeights:
    def picks(self, shard: Shard) -> bool:
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class TrainedWeights:
    """What training changes: not the frozen parameters."""

    def picks(self, shard: Shard) -> bool:
        return shard.trained


@dataclasses.dataclass(frozen=True, slots=True)
class NamedWeights:
    """What one of the patterns fits, such as the adapters of LoRA (Hu et al. 2021, arXiv:2106.09685)."""

    patterns: tuple[str, ...] = ("*lora_*",)

    def picks(self, shard: Shard) -> bool:
        return any(fnmatchcase(name, pattern) for name in shard.names for pattern in self.patterns)


def select(selection: Selection, shards: Iterable[Shard]) -> tuple[Shard, ...]:
    return tuple(shard for shard in shards if selection.picks(shard))
