"""What a device sync sends, and in which order: windows of whole tensors, cut into buckets that all members know.

::

    actor rank 0   packs the plan of the copy once ─▶ sends it in the DevicePush of every sync
    each member    unpacks the plan once, and cuts its windows into buckets once
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from rlplace.comm.codec import unpack
from rlplace.comm.weights.rendezvous import StoreAddress
from rlplace.comm.weights.shards import Assembly, Layout, Piece, Shard, write_piece
from rlplace.comm.weights.version import Push
from rlplace.placement.flow import DeviceDelivery

SHARED = 2  # buckets that are shared at a time: one is filled while the other is copied
_ALIGNMENT = 16
_SUM_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBucket:
    """Plan of one bucket: pieces of one actor rank that are sent as one tensor of bytes.

    All members of a sync have equal plans. `owner`: the actor rank. `layout`: places of the tensors of the pieces.
    `content_bytes`: bytes of the pieces alone. `size_bytes`: bytes of the bucket, with gaps and checksum.

    ::

        │ piece │ piece │ ... │ sum │     pieces begin at multiples of 16 bytes, for any dtype
    """

    owner: int  # actor rank
    pieces: tuple[Piece, ...]
    layout: Layout = dataclasses.field(repr=False)
    content_bytes: int
    size_bytes: int

    @classmethod
    def of(cls, owner: int, pieces: tuple[Piece, ...], layout: Layout) -> DeviceBucket:
        each = [layout.count_bytes([piece]) for piece in pieces]
        size_bytes = (
            sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in each) + _SUM_BYTES
        )
        return cls(
            owner=owner,
            pieces=pieces,
            layout=layout,
            content_bytes=sum(each),
            size_bytes=size_bytes,
        )

    def fill(self, bucket: Tensor, shards: Sequence[Shard], *, checked: bool) -> None:
        """Write this rank's pieces into the tensor `bucket`, in the dtypes of the layout.

        `shards`: this rank's shards, one for each tensor of the layout. `checked`: whether the checksum is written too.
        """
        if checked:
            # The gaps count in the sum
            bucket.zero_()
        for piece, run in self.layout.runs(self.pieces, _ALIGNMENT):
            write_piece(bucket[run], shards[piece.tensor], self.owner, piece)
        if checked:
            _sum_of(bucket).copy_(_summed(bucket))

    def copy_into(self, copy: Tensor, bucket: Tensor, first: int = 0) -> None:
        """Copy the pieces from the tensor `bucket` to their positions in `copy`.

        `copy`: bytes of a whole copy of the weights, or of a part of it that begins at byte `first`.
        """
        for piece, run in self.layout.runs(self.pieces, _ALIGNMENT):
            whole = self.layout.bytes_of(piece)
            copy[whole.start - first : whole.stop - first].copy_(bucket[run])

    @staticmethod
    def is_whole(bucket: Tensor) -> bool:
        """Return whether a bucket was received without damage: its content has the checksum at its end.

        Use it only for a bucket that was filled with a checksum. Wait for the device.
        """
        return bool((_sum_of(bucket) == _summed(bucket)).item())


def _sum_of(bucket: Tensor) -> Tensor:
    return bucket[-_SUM_BYTES:].view(torch.int64)


def _summed(bucket: Tensor) -> Tensor:
    """Return the sum of a bucket's content as one 64-bit integer tensor; every flipped bit changes it."""
    return bucket[:-_SUM_BYTES].view(torch.int64).sum(dtype=torch.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Some neighbouring whole tensors, and the buckets that contain their pieces.

    `layout`: tensors and their byte positions in a copy of the window alone. `first`: index of the byte of a whole copy
    at which the window begins.
    """

    layout: Layout
    first: int
    buckets: tuple[DeviceBucket, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DevicePush:
    """Message that announces a device sync (a weight sync between accelerators) to its readers.

    It is sent over the weights channel. `push`: version and properties of the push. `round`: number of the sync.
    `packed`: the pickled plan of the copy. `bucket_bytes`, `window_bytes`: the most bytes of a bucket, and of a window
    of whole tensors. `store`: where the members meet.

    At 128 actor ranks the plan has some hundred thousand pieces. Therefore the plan is packed once, not for each reader
    and push, and each process unpacks the plan and plans its buckets once.
    """

    push: Push
    round: int
    packed: bytes  # an Assembly
    bucket_bytes: int
    window_bytes: int
    store: StoreAddress

    @property
    def assembly(self) -> Assembly:
        return _unpacked(self.packed)

    @property
    def delivery(self) -> DeviceDelivery:
        assert isinstance(self.assembly.delivery, DeviceDelivery), (
            "others are not announced like this"
        )
        return self.assembly.delivery

    @property
    def windows(self) -> tuple[Window, ...]:
        """All windows, in the order in which every member handles their buckets.

        There is one window unless a reader loads the weights window by window.
        """
        return _windows(self.packed, self.bucket_bytes, self.window_bytes)

    @property
    def buckets(self) -> Iterator[DeviceBucket]:
        """All buckets of the push, in the order in which every member handles them."""
        return itertools.chain.from_iterable(window.buckets for window in self.windows)

    def slots(self, device: torch.device) -> Sequence[Tensor]:
        """Return two slots of memory on `device`, for two consecutive buckets: bucket n begins slot n modulo 2."""
        largest = max((bucket.size_bytes for bucket in self.buckets), default=0)
        return [
            torch.empty(largest, dtype=torch.uint8, device=device)
            for _ in range(SHARED)
        ]


@functools.lru_cache(maxsize=2)
def _unpacked(packed: bytes) -> Assembly:
    assembly: Assembly = unpack(packed)
    return assembly


@functools.lru_cache(maxsize=2)
def _windows(packed: bytes, bucket_bytes: int, window_bytes: int) -> tuple[Window, ...]:
    assembly = _unpacked(packed)
    layout = assembly.layout
    first = 0
    windows = list[Window]()
    # Pieces of earlier windows, by actor rank; they are in order
    begun = [0] * len(assembly.pieces)
    for stop in _ends(assembly, window_bytes):
        cut = Layout.of(layout.tensors[first:stop])
        buckets = list[DeviceBucket]()
        for owner, held in enumerate(assembly.pieces):
            end = bisect_left(held, stop, begun[owner], key=attrgetter("tensor"))
            for pieces in layout.buckets(held[begun[owner] : end], bucket_bytes):
                buckets.append(DeviceBucket.of(owner, pieces, layout))
            begun[owner] = end
        offset = layout.offsets[first] if cut.tensors else 0
        windows.append(Window(layout=cut, first=offset, buckets=tuple(buckets)))
        first = stop
    return tuple(windows)


def _ends(assembly: Assembly, window_bytes: int) -> Iterator[int]:
    """Yield the end of each window: the number of tensors up to there.

    A window has at most `window_bytes` bytes, or the bytes of the largest tensor if that is larger. There is only one
    window unless a reader loads the weights window by window.
    """
    tensors = assembly.layout.tensors
    size = 0
    delivery = assembly.delivery
    cuts = isinstance(delivery, DeviceDelivery) and delivery.in_windows
    most = max([window_bytes, *(tensor.size_bytes for tensor in tensors)])
    for number, tensor in enumerate(tensors):
        if size and size + tensor.size_bytes > most and cuts:
            yield number
            size = 0
        size += tensor.size_bytes
    yield len(tensors)
