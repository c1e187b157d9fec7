"""Values go through the codec unchanged, down to the bit, whatever their dtype, shape or strides."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlplace.comm import codec
from rlplace.trajectory import Observation


def in_pieces(value: Any) -> Any:
    header, *buffers = codec.pack(value, -1)
    return codec.unpack([header, *map(bytearray, buffers)])


def in_one(value: Any) -> Any:
    packed = codec.pack(value, 1 << 30)
    assert isinstance(packed, bytes)
    return codec.unpack(packed)


both = pytest.mark.parametrize("through", [in_pieces, in_one])


@both
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(12).reshape(3, 4).T,
        np.arange(24).reshape(2, 3, 4)[:, ::2, 1:],
        np.array([True, False]),
        np.array(7, np.int64),
        np.empty((0, 3), np.float64),
        np.array([1 + 2j], np.complex64),
        np.array(["a", None], object),
        np.array([np.nan, -0.0, np.inf], np.float16),
    ],
    ids=lambda a: f"{a.dtype}{list(a.shape)}",
)
def test_numpy_arrays(through: Callable[[Any], Any], array: np.ndarray) -> None:
    back = through({"x": [array]})["x"][0]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable


@both
@pytest.mark.parametrize(
    "tensor",
    [
        torch.linspace(-1, 1, 7, dtype=torch.bfloat16),
        torch.tensor([float("nan"), -0.0], dtype=torch.float32),
        torch.tensor([True, False]),
        torch.tensor(3, dtype=torch.int64),
        torch.empty(0, 4),
        torch.empty(8)[:0:2],
        torch.arange(4)[::4],
        torch.arange(12).reshape(3, 4).T,
        torch.ones(3, dtype=torch.complex64).conj() * 1j,
        torch.arange(8, dtype=torch.float32).to(torch.float8_e4m3fn),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}",
)
def test_torch_tensors(through: Callable[[Any], Any], tensor: torch.Tensor) -> None:
    back = through((tensor, "beside"))[0]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert codec.tensor_bytes(back).tobytes() == codec.tensor_bytes(tensor).tobytes()


@both
def test_nested_values_keep_their_structure(through: Callable[[Any], Any]) -> None:
    observation = Observation(env_rank=1, stage_group=0, step=3, first_row=8, observations=np.eye(4, dtype=np.float32))
    back = through([{"a": (observation, None)}, {"b": {1, 2}}])
    assert back[1] == {"b": {1, 2}}
    got = back[0]["a"][0]
    assert (got.env_rank, got.step, got.first_row, back[0]["a"][1]) == (1, 3, 8, None)
    np.testing.assert_array_equal(got.observations, observation.observations)


def test_what_fits_is_packed_in_one_and_the_rest_in_pieces() -> None:
    small, large = np.arange(10), np.arange(10_000)
    alone = codec.pack({"small": small}, 1 << 14)
    assert isinstance(alone, bytes)
    assert codec.unpack(alone)["small"].tolist() == small.tolist()
    mixed = codec.pack({"small": small, "large": large}, 1 << 14)
    assert isinstance(mixed, tuple)
    assert [b.nbytes for b in mixed[1:]] == [large.nbytes]  # the small one stays in the header
    assert codec.unpack(mixed)["large"].tolist() == large.tolist()
    text = codec.pack("x" * 20_000, 1 << 14)
    assert isinstance(text, tuple)
    assert codec.unpack(text) == "x" * 20_000


@both
def test_what_arrives_is_writable_though_the_source_was_not(through: Callable[[Any], Any]) -> None:
    fixed = np.arange(3)
    fixed.flags.writeable = False
    back = through([fixed, np.broadcast_to(np.float32(2), (2, 2))])
    back[0][:] = 5
    back[1][0, 0] = 5
    assert back[0].tolist() == [5, 5, 5]
    assert back[1].tolist() == [[5, 2], [2, 2]]


def test_contiguous_arrays_are_not_copied_into_the_pieces() -> None:
    array, tensor = np.zeros(1000), torch.zeros(1000)
    header, *buffers = codec.pack([array, tensor], -1)
    array[:] = 1
    tensor[:] = 2
    assert len(header) < 1000
    back = codec.unpack([header, *map(bytearray, buffers)])
    assert (back[0].sum(), back[1].sum().item()) == (1000, 2000)


def test_decoding_read_only_buffers_gives_a_tensor_of_its_own() -> None:
    header, *buffers = codec.pack(torch.arange(3), -1)
    back = codec.unpack([header, *map(bytes, buffers)])
    back += 1
    assert back.tolist() == [1, 2, 3]


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="only dense tensors travel"):
        codec.pack(torch.eye(3).to_sparse(), -1)


def test_a_list_that_contains_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    back = in_one(loop)
    assert back[0] is back


def test_a_value_without_tensors_does_not_import_torch() -> None:
    script = (
        "import sys, numpy as np; from rlplace.comm import codec\n"
        "codec.unpack(codec.pack({'a': np.zeros(3)}, -1))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
