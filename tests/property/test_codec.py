"""Whatever arrays, tensors and containers are nested in each other come out of the codec equal, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlplace.comm import codec
from rlplace.trajectory import Observation

DTYPES = st.one_of(
    hnp.scalar_dtypes(),
    hnp.unicode_string_dtypes(max_len=3),
    hnp.byte_string_dtypes(max_len=3),
    st.just(np.dtype([("position", "<f4", (3,)), ("label", "U2"), ("at", "M8[ns]")])),
)
TORCH = st.sampled_from(
    [
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int64,
        torch.complex64, torch.float8_e5m2,
    ]
)  # fmt: skip
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NOISE = np.random.default_rng(0).bytes(
    64 * 64
)  # any bits, NaNs and all; drawn ones would mostly be zeros


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Of any layout: as made, Fortran, strided, reversed, broadcast, read-only."""
    dtype, shape = draw(DTYPES), draw(SHAPES)
    noise = NOISE[: 64 * dtype.itemsize]
    if dtype.kind == "U" or dtype.names:  # not any bytes are text
        noise = bytes(len(noise))
    array = np.ndarray(shape, dtype, bytearray(noise)).copy()
    change = draw(
        st.sampled_from(
            [
                "none",
                "fortran",
                "transposed",
                "strided",
                "reversed",
                "broadcast",
                "read-only",
            ]
        )
    )
    if change == "fortran":
        array = np.asfortranarray(array).reshape(shape)
    elif change == "transposed":
        array = array.T
    elif change == "strided" and shape:
        array = array[..., ::2]
    elif change == "reversed" and shape:
        array = array[::-1]
    elif change == "broadcast":
        array = np.broadcast_to(array, (2, *shape))
    elif change == "read-only":
        array.flags.writeable = False
    return array


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(TORCH), draw(SHAPES)
    noise = bytes(b & 1 for b in NOISE) if dtype is torch.bool else NOISE
    count = int(np.prod(shape))
    tensor = torch.frombuffer(bytearray(noise), dtype=dtype)[:count].reshape(shape)
    change = draw(
        st.sampled_from(["none", "transposed", "strided", "expanded", "parameter"])
    )
    if change == "transposed" and len(shape) > 1:
        tensor = tensor.transpose(0, 1)
    elif change == "strided" and shape:
        tensor = tensor[..., ::2]
    elif change == "expanded":
        tensor = tensor.expand(2, *tensor.shape)
    elif change == "parameter":
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    return tensor


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=50),
)
VALUES = st.recursive(
    st.one_of(SCALARS, arrays(), tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=6,
)


def same(one: Any, two: Any) -> None:
    """Equal down to the bits; strides may differ. What arrived is writable."""
    assert type(one) is type(two) or isinstance(one, torch.nn.Parameter)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert one.dtype == object or one.tobytes() == two.tobytes()
        assert two.flags.writeable
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert codec.tensor_bytes(one).tobytes() == codec.tensor_bytes(two).tobytes()
    elif isinstance(one, dict):
        assert list(one) == list(two)
        for key in one:
            same(one[key], two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for left, right in zip(one, two, strict=True):
            same(left, right)
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            same(getattr(one, field.name), getattr(two, field.name))
    else:
        assert one == two or one != one


def check(value: Any, inline_bytes: int) -> None:
    packed = codec.Packer(inline_bytes).pack(value)
    if isinstance(packed, bytes):
        assert len(packed) <= inline_bytes
        same(value, codec.unpack(packed))
    else:
        assert packed[1:] or len(packed[0]) > inline_bytes
        same(
            value,
            codec.unpack(
                [np.frombuffer(bytearray(piece), np.uint8) for piece in packed]
            ),
        )


@given(VALUES, st.sampled_from([-1, 0, 100, 1 << 14, 1 << 30]))
def test_nested_values(value: Any, inline_bytes: int) -> None:
    check(value, inline_bytes)


SPECIAL = [
    np.array(["a", None], object),
    np.array([1 + 2j], np.complex64),
    np.arange(24).reshape(2, 3, 4)[:, ::2, 1:],
    torch.empty(8)[:0:2],
    torch.arange(4)[::4],
    torch.ones(3, dtype=torch.complex64).conj() * 1j,
    torch.arange(8, dtype=torch.float32).to(torch.float8_e4m3fn),
    {
        "b": {1, 2},
        "c": (
            Observation(
                env_rank=1, stage_group=0, step=3, first_row=8, observations=np.eye(4)
            ),
            None,
        ),
    },
]


@pytest.mark.parametrize("value", SPECIAL, ids=str)
@pytest.mark.parametrize("inline_bytes", [-1, 1 << 30])
def test_values_of_other_kinds(value: Any, inline_bytes: int) -> None:
    check({"x": [value]}, inline_bytes)
