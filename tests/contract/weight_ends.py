"""What tests of every weight sync have in common: shards as FSDP holds them, and equality to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from rlplace.comm.codec import dtype_name, tensor_bytes
from rlplace.comm.weights.shards import Shard, replicas, row_blocks

PATIENCE_S = 60.0
Weights = dict[str, torch.Tensor]


def shards_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Shard, ...]:
    """Make shards of tensors that one rank holds alone; names of one tensor object are tied."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return tuple(
        Shard(
            names=tuple(tied),
            dtype=dtype_name(tensors[tied[0]]),
            shape=tuple(tensors[tied[0]].shape),
            blocks=replicas(tensors[tied[0]].numel(), 1),
            data=tensors[tied[0]],
        )
        for tied in names.values()
    )


def held_by(rank: int, ranks: int, tensors: Weights) -> tuple[Shard, ...]:
    """As FSDP has it: what has rows is split, a scalar is everywhere."""
    shards = []
    for whole in shards_of(tensors):
        count = whole.data.numel()
        blocks = (
            row_blocks(whole.shape, ranks) if whole.shape else replicas(count, ranks)
        )
        mine = whole.data.detach().reshape(-1)[blocks[rank].start : blocks[rank].stop]
        shards.append(dataclasses.replace(whole, blocks=blocks, data=mine))
    return tuple(shards)


def assert_equal_to_the_bit(
    received: Mapping[str, torch.Tensor], sent: Weights
) -> None:
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        got = received[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert tensor_bytes(got.clone()).tobytes() == tensor_bytes(tensor).tobytes(), (
            name
        )
