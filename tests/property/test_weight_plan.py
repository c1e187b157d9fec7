"""Every byte of the weights is written exactly once, whatever the shards, ranks and nodes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rlplace.comm.weights.shards import (
    Block,
    Layout,
    Piece,
    TensorSpec,
    assemble,
    replicas,
    row_blocks,
)
from rlplace.placement.flow import Delivery


@st.composite
def tensors(draw: st.DrawFn) -> TensorSpec:
    dtype = draw(st.sampled_from(["bfloat16", "bool", "float32", "float64"]))
    return TensorSpec(
        names=("t",),
        dtype=dtype,
        shape=tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, list[Sequence[Block]], Delivery]:
    """Tensors of which each is sharded over all ranks, sharded over groups that replicate each other, or replicated."""
    groups, each = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    layout = Layout.of(draw(st.lists(tensors(), max_size=5)))
    held: list[Sequence[Block]] = []
    for spec in layout.tensors:
        how = draw(st.sampled_from(["sharded", "hybrid", "replicated"]))
        blocks = replicas(spec.elements, groups * each)
        if how != "replicated":
            blocks = (
                row_blocks(spec.shape, each) * groups
                if how == "hybrid"
                else row_blocks(spec.shape, groups * each)
            )
        held.append(blocks)
    near = draw(st.sets(st.integers(0, groups * each - 1)))
    return layout, held, Delivery(readers=(0, 1), near=tuple(sorted(near)))


@given(cases())
def test_every_byte_is_written_once_by_a_rank_that_holds_it_near_ones_first(
    case: tuple[Layout, list[Sequence[Block]], Delivery],
) -> None:
    layout, held, delivery = case
    assembly = assemble(layout, held, delivery)
    writers: list[list[int]] = [[-1] * spec.elements for spec in layout.tensors]
    for rank, pieces in enumerate(assembly.pieces):
        for tensor, start, stop in pieces:
            assert start < stop
            block = held[tensor][rank]
            assert block.start <= start
            assert stop <= block.stop
            holders = {
                r
                for r, b in enumerate(held[tensor])
                if b.start <= start and stop <= b.stop
            }
            assert rank in delivery.near or not holders & set(delivery.near)
            for element in range(start, stop):
                assert writers[tensor][element] == -1
                writers[tensor][element] = rank
    assert all(rank != -1 for elements in writers for rank in elements)
    assert set(assembly.writers) >= {rank for elements in writers for rank in elements}
    assert len(assembly.writers) >= 1


@given(st.lists(tensors(), max_size=6))
def test_tensors_do_not_overlap_and_are_aligned(specs: list[TensorSpec]) -> None:
    layout = Layout.of(specs)
    ends = 0
    for spec, offset in zip(layout.tensors, layout.offsets, strict=True):
        assert offset % 64 == 0
        assert offset >= ends
        ends = offset + spec.size_bytes
    assert layout.size_bytes >= ends


@given(cases(), st.integers(1, 2000))
def test_buckets_hold_the_pieces_in_order_and_no_more_than_they_may(
    case: tuple[Layout, list[Sequence[Block]], Delivery], bucket_bytes: int
) -> None:
    layout, held, delivery = case
    for pieces in assemble(layout, held, delivery).pieces:
        buckets = layout.buckets(pieces, bucket_bytes)
        for bucket in buckets:
            assert bucket
            alone = len(bucket) == 1 and bucket[0].stop - bucket[0].start == 1
            assert layout.count_bytes(bucket) <= bucket_bytes or alone
        assert elements([p for bucket in buckets for p in bucket]) == elements(pieces)


def elements(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    return [(p.tensor, e) for p in pieces for e in range(p.start, p.stop)]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=3), st.integers(1, 12))
def test_rows_are_cut_as_torch_cuts_chunks(shape: list[int], ranks: int) -> None:
    import torch

    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    chunks = list(whole.chunk(ranks)) if shape[0] else []
    for rank, block in enumerate(row_blocks(shape, ranks)):
        expected = chunks[rank].flatten().tolist() if rank < len(chunks) else []
        assert whole.flatten()[block.start : block.stop].tolist() == expected
