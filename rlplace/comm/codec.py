"""Nested values with numpy and torch arrays as a small header and contiguous buffers, and back, bit-equal.

Arrays leave through the out-of-band buffers of pickle protocol 5. A torch tensor travels as its bytes, shape and
dtype name, so that numpy need not know its dtype. torch is imported only when a tensor occurs. Both sides are
processes of one job: data from outside is never decoded.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlplace.comm.unsent import not_sent

if TYPE_CHECKING:
    import torch

Buffer = Any  # an object with the buffer protocol: bytes, bytearray, memoryview, an array of bytes
# A header, and the buffers behind it in the order in which the header names them
Pieces = tuple[Buffer, ...]
# A value in one piece, or in several pieces, which alias the value's contiguous arrays on the host
Packed = bytes | Pieces


def unpack(packed: Packed | list[Buffer]) -> Any:
    """Return the value that was packed into `packed`.

    The arrays in the value share memory with the buffers of `packed`, which must be writable.
    """
    if isinstance(packed, bytes):
        return pickle.loads(packed)
    return pickle.loads(packed[0], buffers=packed[1:])


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the elements of a dense tensor as a flat array of bytes on the host.

    For a contiguous tensor on the host, the array shares the tensor's memory; for any other tensor, the array is a
    copy. Raise TypeError for a sparse or quantized tensor.
    """
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(
            f"only dense tensors travel, got layout {tensor.layout}, dtype {tensor.dtype}"
        )
    # Conjugation and negation are lazy views in torch
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # `reshape` keeps strides of dimensions of size 1, which `view` refuses
    flat = dense.as_strided((dense.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


def tensor_from_bytes(data: Buffer, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Return the host tensor with the given bytes, dtype name and shape: the inverse of `tensor_bytes`.

    The tensor shares the memory of `data`, which must be writable.
    """
    import torch

    kind = getattr(torch, dtype)
    # `frombuffer` refuses empty data
    if memoryview(data).nbytes == 0:
        return torch.empty(tuple(shape), dtype=kind)
    return torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(tuple(shape))


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype without the module: "bfloat16" for torch.bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


def _reduce_array(array: Any) -> Any:
    """Return the function and the arguments by which pickle rebuilds a numpy array, with the data out of band.

    The rebuilt array is writable. This takes half the time of numpy's own reduction, and also sends strided views out
    of band.
    """
    dtype = array.dtype
    # Objects, and dtypes that a buffer does not describe
    if dtype.hasobject or not dtype.itemsize:
        return array.__reduce_ex__(5)
    if dtype.kind not in "biufc":
        return np.ndarray, (array.shape, dtype, bytearray(array.tobytes()))
    # A dense copy, if need be
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
    """Return the function and the arguments by which pickle rebuilds a tensor, with the bytes out of band."""
    data: Any = tensor_bytes(tensor)
    return tensor_from_bytes, (
        pickle.PickleBuffer(data),
        dtype_name(tensor),
        tuple(tensor.shape),
    )


class _Reducers(dict[type, Callable[[Any], Any]]):
    """Dispatch table of pickle: exact type of an object -> function that reduces an object of this type.

    Subclasses of torch.Tensor are included once torch is imported.
    """

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        torch = sys.modules.get("torch")
        if torch is not None and issubclass(kind, torch.Tensor):
            return _reduce_tensor
        # KeyError: pickle asks the object itself
        return copyreg.dispatch_table[kind]


class _Stream(NamedTuple):
    """Minimal file for pickle: only the method `write`."""

    write: Callable[[bytes], object]


class Packer(pickle.Pickler):
    """Pickler that packs one value after the other into a header and large buffers.

    `inline_bytes`: the most bytes of small buffers that go into the header. Pickle protocol 5 sends contiguous arrays
    out of band; this class also sends strided numpy views and torch tensors out of band. Reuse a packer, because making
    one takes as long as packing a small value.
    """

    __slots__ = ("_buffers", "_chunks", "_inline_bytes", "_room")
    dispatch_table = _Reducers({np.ndarray: _reduce_array})

    def __init__(self, inline_bytes: int) -> None:
        self._inline_bytes = inline_bytes
        # Of the value in progress
        self._room = inline_bytes
        self._chunks: list[bytes] = []
        self._buffers: list[memoryview] = []
        super().__init__(
            _Stream(self._chunks.append),
            5,
            buffer_callback=self._stays_inside,
        )

    def pack(self, value: Any) -> Packed:
        """Return the packed value: one `bytes` if this has at most `inline_bytes`, else a header and large buffers.

        The buffers share memory with the value's contiguous arrays. Raise TypeError for a sparse or quantized tensor.
        The packer cannot be used after an error.
        """
        chunks = self._chunks
        self.dump(value)
        # The memo refers to the value's objects
        self.clear_memo()
        # pickle may write the header in several chunks
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
        """Return whether a buffer goes into the header. If not, add the buffer to the pieces of the value."""
        raw = buffer.raw()
        if raw.nbytes <= self._room:
            self._room -= raw.nbytes
            return True
        self._buffers.append(raw)
        return False


class Packers:
    """Thread-safe pool of packers. `inline_bytes`: the most bytes of small buffers that go into the header."""

    def __init__(self, inline_bytes: int) -> None:
        self._inline_bytes = inline_bytes
        self._idle: list[Packer] = []

    def pack(self, value: Any) -> Packed:
        """Return the packed value: one `bytes` if the value is small, else a header and its large buffers.

        The buffers share memory with the value's contiguous arrays. Raise NotSent if the value cannot be sent.
        """
        try:
            packer = self._idle.pop()
        except IndexError:
            packer = Packer(self._inline_bytes)
        try:
            packed = packer.pack(value)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise not_sent(value, "item", error, self._packed_anew) from error
        self._idle.append(packer)
        return packed

    def _packed_anew(self, value: Any) -> Packed:
        return Packer(self._inline_bytes).pack(value)
