"""Tensors by name: what is sent of them once, how those that came differ, and how they are filled in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlplace.comm.weights.named import absent, fill, misfits, shards_of, tensors_of


def test_tied_tensors_are_one_shard_however_they_are_named() -> None:
    first = nn.Linear(3, 4)
    second = nn.Linear(3, 4)
    second.weight = first.weight
    model = nn.ModuleDict({"a": first, "b": second})
    for tensors in (tensors_of(model), model.state_dict()):
        names = [shard.names for shard in shards_of(tensors, rank=0, ranks=1)]
        assert names == [("a.bias",), ("a.weight", "b.weight"), ("b.bias",)]


def test_views_of_one_memory_that_differ_are_not_tied() -> None:
    table = torch.arange(6.0)
    tensors = {"all": table, "head": table[:3], "tail": table[3:], "row": table[None]}
    assert len(shards_of(tensors, rank=0, ranks=1)) == 4


def test_each_of_several_ranks_has_all_of_a_plain_tensor() -> None:
    tensors = {"b": torch.randn(2, 3), "a": torch.randn(5, dtype=torch.bfloat16)}
    by_rank = [shards_of(tensors, rank=rank, ranks=2) for rank in range(2)]
    for shards in by_rank:
        assert [shard.spec for shard in shards] == [s.spec for s in by_rank[0]]
        assert [shard.blocks for shard in shards] == [((0, 5),) * 2, ((0, 6),) * 2]
        assert [shard.dtype for shard in shards] == ["bfloat16", "float32"]


def test_buffers_that_a_checkpoint_has_are_weights() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert sorted(tensors_of(module)) == [
        "bias",
        "num_batches_tracked",
        "running_mean",
        "running_var",
        "weight",
    ]


def test_tensors_without_memory_are_found() -> None:
    offloaded = torch.zeros(3)
    offloaded.untyped_storage().resize_(0)
    meta = torch.empty(2, device="meta")
    tensors = {"here": torch.zeros(1), "empty": torch.empty(0, 2)}
    assert absent({**tensors, "offloaded": offloaded, "meta": meta}) == [
        "offloaded",
        "meta",
    ]


def test_what_is_filled_keeps_its_memory_its_dtype_and_its_views() -> None:
    own = {
        "turned": torch.zeros(3, 2, dtype=torch.bfloat16).T,
        "parameter": nn.Parameter(torch.zeros(4)),
        "scalar": torch.tensor(0),
    }
    view = own["parameter"].detach()[1:]
    where = {name: tensor.data_ptr() for name, tensor in own.items()}
    came = {
        "turned": torch.randn(2, 3),
        "parameter": torch.randn(4),
        "scalar": torch.tensor(7),
    }
    assert misfits(came, own) == ((), ())
    fill(own, came)
    for name, tensor in own.items():
        assert torch.equal(tensor.detach(), came[name].to(tensor.dtype)), name
        assert tensor.data_ptr() == where[name]
    assert torch.equal(view, came["parameter"][1:])


def test_a_backward_pass_through_weights_that_were_filled_meanwhile_is_refused() -> (
    None
):
    weight = nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    fill({"weight": weight}, {"weight": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_of_inference_mode_can_be_filled() -> None:
    with torch.inference_mode():
        own = {"weight": torch.zeros(3)}
    fill(own, {"weight": torch.ones(3)})
    assert own["weight"].tolist() == [1.0, 1.0, 1.0]


def test_other_names_and_shapes_are_told_with_the_nearest_name() -> None:
    own = {"layer.weight": torch.zeros(2, 3), "layer.bias": torch.zeros(2)}
    came = {"layer.wieght": torch.zeros(2, 3), "layer.bias": torch.zeros(3)}
    found = misfits(came, own)
    assert found.names == (
        "layer.weight did not come (layer.wieght did)",
        "layer.wieght came, and is not expected",
    )
    assert found.shapes == ("layer.bias came as [3], expected [2]",)


def test_a_long_list_is_cut() -> None:
    own = {f"layer.{number}": torch.zeros(1) for number in range(9)}
    found = misfits({"other": torch.zeros(1)}, own)
    assert found.names[4:] == (
        "layer.4 did not come",
        "4 more",
        "other came, and is not expected",
    )


def test_one_name_of_tied_weights_is_enough_on_either_side() -> None:
    table = torch.zeros(4)
    tied = {"embed": table, "head": table}
    assert misfits({"embed": torch.ones(4)}, tied) == ((), ())
    assert misfits(tied, {"head": torch.ones(4)}) == ((), ())
    assert misfits({"embed": torch.ones(4)}, {"head": table}).names != ()
