"""Nested values with numpy and torch arrays as a small header and contiguous buffers, and back, equal to the bit.

Arrays leave through pickle protocol 5's out-of-band buffers; a torch tensor travels as its bytes, shape and dtype name,
whatever numpy knows of that dtype. torch is imported only where a tensor is met. Both sides are processes of one job:
nothing from outside is ever decoded.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor as Tensor

Buffer = bytes | bytearray | memoryview


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A value in pieces. The buffers alias the arrays of the value wherever those were contiguous on the host."""

    header: bytes
    buffers: tuple[memoryview, ...]  # contiguous, format "B", in the order the header names them

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(b.nbytes for b in self.buffers)


def encode(value: Any) -> Encoded:
    """The value in pieces; contiguous host arrays are not copied. TypeError for a sparse or quantized tensor."""
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> None:
        buffers.append(buffer.raw())

    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=keep).dump(value)
    return Encoded(header=stream.getvalue(), buffers=tuple(buffers))


def decode(header: bytes, buffers: Sequence[Buffer]) -> Any:
    """The value again. Its arrays alias `buffers` and are writable exactly where these are."""
    return pickle.loads(header, buffers=buffers)


def dumps(value: Any) -> bytes:
    """Everything in one piece: a copy, cheaper than pieces for small values."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def loads(data: Buffer) -> Any:
    """The value of `dumps`; its arrays are the caller's own and writable."""
    return pickle.loads(data)


def size_bytes(value: Any) -> int:
    """Bytes of the arrays, tensors, texts and scalars in `value`; containers themselves count nothing."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (bytes, bytearray, memoryview, str)):
        return len(value)
    if isinstance(value, (bool, int, float, complex)) or value is None:
        return 8
    if isinstance(value, Mapping):
        return sum(size_bytes(k) + size_bytes(v) for k, v in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return sum(map(size_bytes, value))
    if dataclasses.is_dataclass(value):
        return sum(size_bytes(getattr(value, f)) for f in value.__dataclass_fields__)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    return sys.getsizeof(value)


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The elements of a dense tensor as flat bytes on the host; aliases a contiguous host tensor."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"only dense tensors travel, got layout {tensor.layout}, dtype {tensor.dtype}")
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy()


def tensor_from_bytes(data: Buffer, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The host tensor of `tensor_bytes`; aliases `data`, which must be writable."""
    torch = importlib.import_module("torch")
    kind = getattr(torch, dtype)
    if memoryview(data).nbytes == 0:
        return torch.empty(tuple(shape), dtype=kind)
    return torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(tuple(shape))


def dtype_name(tensor: torch.Tensor) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


class _Pickler(pickle.Pickler):
    """Adds what protocol 5 lacks: strided numpy views out of band, and torch tensors."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray:
            if obj.flags.forc or obj.dtype.hasobject:
                return NotImplemented
            return np.ascontiguousarray(obj).__reduce_ex__(5)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            data = pickle.PickleBuffer(tensor_bytes(obj).data)
            return _restore_tensor, (data, dtype_name(obj), tuple(obj.shape))
        return NotImplemented


def _restore_tensor(data: Buffer, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Decoded read-only bytes are copied: torch has no read-only tensors."""
    return tensor_from_bytes(bytearray(data) if memoryview(data).readonly else data, dtype, shape)
