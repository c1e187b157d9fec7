"""Nested values with numpy and torch arrays as a small header and contiguous buffers, and back, equal to the bit.

Arrays leave through pickle protocol 5's out-of-band buffers; a torch tensor travels as its bytes, shape and dtype name,
whatever numpy knows of that dtype. torch is imported only where a tensor is met. Both sides are processes of one job:
nothing from outside is ever decoded.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

Buffer = Any  # whatever has the buffer protocol: bytes, bytearray, memoryview, an array of bytes
# A header, and the buffers behind it in the order in which the header names them
Pieces = tuple[Buffer, ...]
# A value in one piece, or in several, which alias its contiguous arrays on the host
Packed = bytes | Pieces


def unpack(packed: Packed | list[Buffer]) -> Any:
    """The value again. Its arrays alias the pieces, which must be writable, and keep these very objects alive."""
    if isinstance(packed, bytes):
        return pickle.loads(packed)
    return pickle.loads(packed[0], buffers=packed[1:])


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The elements of a dense tensor as flat bytes on the host; aliases a contiguous host tensor."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(
            f"only dense tensors travel, got layout {tensor.layout}, dtype {tensor.dtype}"
        )
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Reshape keeps a stride that does not matter, and view refuses it
    flat = dense.as_strided((dense.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


def tensor_from_bytes(data: Buffer, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The host tensor of `tensor_bytes`; aliases `data`, which must be writable."""
    import torch

    kind = getattr(torch, dtype)
    if memoryview(data).nbytes == 0:
        return torch.empty(tuple(shape), dtype=kind)
    return torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(tuple(shape))


def dtype_name(tensor: torch.Tensor) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


def _reduce_array(array: Any) -> Any:
    """Half the time of numpy's own way, and strided views out of band as well. What arrives is writable."""
    dtype = array.dtype
    if dtype.hasobject or not dtype.itemsize:
        return array.__reduce_ex__(5)
    if dtype.kind not in "biufc":
        return np.ndarray, (array.shape, dtype, bytearray(array.tobytes()))
    if not (array.flags.forc and array.flags.writeable):
        array = np.array(array, order="A")
    if array.flags.c_contiguous:
        return np.ndarray, (array.shape, dtype.str, pickle.PickleBuffer(array))
    return np.ndarray, (
        array.shape,
        dtype.str,
        pickle.PickleBuffer(array),
        0,
        None,
        "F",
    )


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    data: Any = tensor_bytes(tensor)
    return tensor_from_bytes, (
        pickle.PickleBuffer(data),
        dtype_name(tensor),
        tuple(tensor.shape),
    )


class _Reducers(dict[type, Callable[[Any], Any]]):
    """How types are taken apart, by exact type; tensors of any class count once torch is there."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        torch = sys.modules.get("torch")
        if torch is not None and issubclass(kind, torch.Tensor):
            return _reduce_tensor
        return copyreg.dispatch_table[kind]  # KeyError: as the object itself says


class _Stream(NamedTuple):
    write: Callable[[bytes], object]


class Packer(pickle.Pickler):
    """Packs one value at a time, for one room; what it needs is made once, which takes as long as a small value.

    Adds what protocol 5 lacks: strided numpy views out of band, and torch tensors.
    """

    __slots__ = ("_buffers", "_chunks", "_inline_bytes", "_room")
    dispatch_table = _Reducers({np.ndarray: _reduce_array})

    def __init__(self, inline_bytes: int) -> None:
        self._inline_bytes = self._room = inline_bytes
        self._chunks: list[bytes] = []
        self._buffers: list[memoryview] = []
        super().__init__(
            _Stream(self._chunks.append), 5, buffer_callback=self._stays_inside
        )

    def pack(self, value: Any) -> Packed:
        """The value in one piece if that takes at most the room, else in pieces with the small buffers in the header.

        TypeError for a sparse or quantized tensor; the packer is of no further use after an error.
        """
        chunks = self._chunks
        self.dump(value)
        self.clear_memo()  # it refers to all that was packed
        header = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        if not self._buffers and self._room == self._inline_bytes >= len(header):
            return header
        buffers = self._buffers
        self._buffers = []
        self._room = self._inline_bytes
        if buffers or len(header) > self._inline_bytes:
            return (header, *buffers)
        return header

    def _stays_inside(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes <= self._room:
            self._room -= raw.nbytes
            return True
        self._buffers.append(raw)
        return False


class Packers:
    """Thread-safe packers for one room."""

    def __init__(self, inline_bytes: int) -> None:
        self._inline_bytes = inline_bytes
        self._idle: list[Packer] = []

    def pack(self, value: Any) -> Packed:
        try:
            packer = self._idle.pop()
        except IndexError:
            packer = Packer(self._inline_bytes)
        packed = packer.pack(value)
        self._idle.append(packer)
        return packed
