"""Which shards a sync carries after the first; copies and sums of memory, and what changed between two versions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlplace.comm.weights.shards import Bytes, Changes, checksum, copy_tensor


def run(values: bytes) -> Bytes:
    return np.frombuffer(bytearray(values), np.uint8)


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        (torch.randn(5, 7), torch.float32),
        (torch.randn(5, 7), torch.bfloat16),
        (torch.randn(7, 5).T, torch.float32),
        (torch.randn(4, dtype=torch.complex64).conj(), torch.complex64),
        (torch.tensor(2.0), torch.float64),
        (torch.empty(0, 3), torch.float32),
    ],
)
def test_a_copy_is_equal_after_conversion(
    source: torch.Tensor, dtype: torch.dtype
) -> None:
    target = torch.full(source.shape, 9, dtype=dtype)
    copy_tensor(target, source)
    assert torch.equal(target, source.to(dtype))
    strided = torch.full((*source.shape, 2), 9, dtype=dtype)[..., 0]
    copy_tensor(strided, source)
    assert torch.equal(strided, source.to(dtype))


def test_a_tensor_without_storage_is_left_alone() -> None:
    target = torch.zeros(3)
    target.untyped_storage().resize_(0)
    copy_tensor(target[:0], torch.zeros(3)[:0])


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=4), st.data())
def test_any_flipped_bit_changes_the_sum(
    parts: list[bytes], data: st.DataObject
) -> None:
    arrays = [run(part) for part in parts]
    before = checksum(arrays)
    assert -(2**63) <= before < 2**63
    assert checksum([run(part) for part in parts]) == before
    sizes = [i for i, part in enumerate(parts) if part]
    if sizes:
        part = arrays[data.draw(st.sampled_from(sizes))]
        part[data.draw(st.integers(0, len(part) - 1))] ^= 1 << data.draw(
            st.integers(0, 7)
        )
        assert checksum(arrays) != before


def test_parts_that_change_places_change_the_sum() -> None:
    a, b = run(b"12345678"), run(b"87654321")
    assert checksum([a, b]) != checksum([b, a])


@given(
    st.binary(max_size=200),
    st.lists(st.tuples(st.integers(0, 199), st.integers(0, 255)), max_size=20),
)
def test_changes_make_the_later_version_of_the_earlier(
    before: bytes, writes: list[tuple[int, int]]
) -> None:
    old, new = run(before), run(before)
    for at, value in writes:
        if at < len(new):
            new[at] = value
    found = Changes.between(old, new, largest_share=1000.0)
    assert found is not None
    found.apply(old)
    assert np.array_equal(old, new)
    assert found.nbytes == 5 * sum(
        a != b for a, b in zip(before, new.tolist(), strict=True)
    )


def test_many_changes_are_no_saving() -> None:
    old, new = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    new[:10] = 1
    assert Changes.between(old, new, largest_share=0.49) is None
    assert Changes.between(old, new, largest_share=0.5) is not None
