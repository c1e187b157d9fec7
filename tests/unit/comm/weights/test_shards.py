"""Which shards a sync carries after the first."""

from __future__ import annotations

import pytest
import torch

from rlplace.comm.weights.shards import Shard, replicas, select


def shard(*names: str, trained: bool = True) -> Shard:
    return Shard(names=names, dtype="float32", shape=(1,), blocks=replicas(1, 1), data=torch.zeros(1), trained=trained)


SHARDS = (
    shard("embed.weight", "head.weight", trained=False),
    shard("layer.0.weight", trained=False),
    shard("layer.0.lora_A.weight"),
    shard("norm.mean"),
)


@pytest.mark.parametrize(
    ("mode", "picked"),
    [
        ("all", {"embed.weight", "layer.0.weight", "layer.0.lora_A.weight", "norm.mean"}),
        ("delta", {"embed.weight", "layer.0.weight", "layer.0.lora_A.weight", "norm.mean"}),
        ("trainable", {"layer.0.lora_A.weight", "norm.mean"}),
        ("lora", {"layer.0.lora_A.weight"}),
    ],
)
def test_a_mode_picks_its_shards(mode: str, picked: set[str]) -> None:
    assert {shard.names[0] for shard in select(mode, SHARDS)} == picked
