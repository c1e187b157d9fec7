"""Values go through the codec unchanged, down to the bit, whatever their dtype, shape or strides."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from rlplace.comm import codec


def test_what_fits_is_packed_in_one_and_the_rest_in_pieces() -> None:
    small, large, packer = np.arange(10), np.arange(10_000), codec.Packer(1 << 14)
    assert isinstance(packer.pack({"small": small}), bytes)
    mixed = packer.pack({"small": small, "large": large})
    assert isinstance(mixed, tuple)
    assert [b.nbytes for b in mixed[1:]] == [
        large.nbytes
    ]  # the small one stays in the header
    assert codec.unpack(mixed)["large"].tolist() == large.tolist()
    text = packer.pack("x" * 20_000)
    assert (type(text), codec.unpack(text)) == (tuple, "x" * 20_000)


def test_contiguous_arrays_are_not_copied_into_the_pieces() -> None:
    array, tensor = np.zeros(1000), torch.zeros(1000)
    header, *buffers = codec.Packer(-1).pack([array, tensor])
    array[:] = 1
    tensor[:] = 2
    assert len(header) < 1000
    back = codec.unpack([header, *map(bytearray, buffers)])
    assert (back[0].sum(), back[1].sum().item()) == (1000, 2000)


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="only dense tensors travel"):
        codec.Packer(-1).pack(torch.eye(3).to_sparse())


def test_a_value_without_tensors_does_not_import_torch() -> None:
    script = (
        "import sys, numpy as np; from rlplace.comm import codec\n"
        "codec.unpack(codec.Packer(-1).pack({'a': np.zeros(3)}))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
