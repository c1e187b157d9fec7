"""Which weights a selection picks."""

from __future__ import annotations

import pytest
import torch

from rlplace.comm.weights.plan import replicas
from rlplace.comm.weights.selection import AllWeights, NamedWeights, Selection, TrainedWeights, select
from rlplace.comm.weights.sync import Shard


def shard(*names: str, trained: bool = True) -> Shard:
    return Shard(names=names, dtype="float32", shape=(1,), blocks=replicas(1, 1), data=torch.zeros(1), trained=trained)


SHARDS = (
    shard("embed.weight", "head.weight", trained=False),
    shard("layer.0.weight", trained=False),
    shard("layer.0.lora_A.weight"),
    shard("norm.mean"),
)


@pytest.mark.parametrize(
    ("selection", "picked"),
    [
        (AllWeights(), {"embed.weight", "layer.0.weight", "layer.0.lora_A.weight", "norm.mean"}),
        (TrainedWeights(), {"layer.0.lora_A.weight", "norm.mean"}),
        (NamedWeights(), {"layer.0.lora_A.weight"}),
        (NamedWeights(("head.*",)), {"embed.weight"}),  # tied: one name is enough
        (NamedWeights(("LAYER.*",)), set()),
    ],
)
def test_what_is_picked(selection: Selection, picked: set[str]) -> None:
    assert {shard.names[0] for shard in select(selection, SHARDS)} == picked
