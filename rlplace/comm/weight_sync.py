"""Weights from actor ranks to rollout ranks: the WeightSync contract, and its reference over a channel on the host.

::

    actor rank    push(8, tensors) ─▶ header(8, names, dtypes, shapes, buckets) ─▶ bucket 0, crc ─▶ ... bucket n-1, crc
    rollout rank  pull(8) ◀── all of it, verified ── only then handed over; any failure leaves the old version in use

The tensors' bytes, in the header's order, are one stream that buckets of `bucket_bytes` cut wherever they end.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.comm.channel import Channel
from rlplace.comm.codec import dtype_name, tensor_bytes, tensor_from_bytes
from rlplace.errors import ChannelTimeout, Problem, WeightSyncError

if TYPE_CHECKING:
    from rlplace.comm.codec import Tensor

Bytes = NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncReport:
    """What one push or pull moved. A push to several targets counts what it sent to all of them."""

    version: int
    tensors: int
    buckets: int
    size_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        return self.size_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedWeights:
    """One whole version; the tensors are on the host and the receiver's own."""

    version: int
    tensors: dict[str, Tensor]
    report: WeightSyncReport


class PendingPush(Protocol):
    """A push under way."""

    def wait(self, timeout_s: float | None = None) -> WeightSyncReport:
        """Blocks until everything has been sent; raises what the sending raised, ChannelTimeout at the deadline."""
        ...


class WeightSender(Protocol):
    def push(self, version: int, named_tensors: Mapping[str, Tensor]) -> PendingPush:
        """Starts sending. The tensors must not change until the push has been waited for."""
        ...


class WeightReceiver(Protocol):
    def pull(self, version: int, *, timeout_s: float | None = None) -> ReceivedWeights:
        """Blocks until exactly `version` is here, whole and verified; else raises WeightSyncError or as the channel."""
        ...


# ── what travels ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    name: str
    dtype: str  # torch's name of it, "bfloat16"
    shape: tuple[int, ...]
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PushHeader:
    """Announces a push; `buckets` messages follow."""

    source: str
    version: int
    entries: tuple[TensorEntry, ...]
    buckets: int

    @property
    def size_bytes(self) -> int:
        return sum(e.size_bytes for e in self.entries)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    source: str
    version: int
    index: int
    data: Bytes
    crc32: int


# ── sending ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class ChannelWeightSender:
    """Pushes to the rollout ranks `targets`, each under its own key of `channel`; without targets a push is nothing.

    Holds one bucket at a time, in a thread of its own; a push waits there for the one before.
    """

    def __init__(
        self, channel: Channel, *, targets: Sequence[int], source: str = "actor", bucket_bytes: int = 16 << 20
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        self._channel = channel
        self._targets = tuple(targets)
        self._source = source
        self._bucket_bytes = bucket_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{source}-push")

    def push(self, version: int, named_tensors: Mapping[str, Tensor]) -> PendingPush:
        return _Push(version, self._thread.submit(self.send, version, dict(named_tensors)))

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> WeightSyncReport:
        """Sends in the calling thread."""
        start = time.perf_counter()
        if not self._targets:
            return WeightSyncReport(version=version, tensors=0, buckets=0, size_bytes=0, seconds=0.0)
        entries = tuple(
            TensorEntry(name=n, dtype=dtype_name(t), shape=tuple(t.shape), size_bytes=t.numel() * t.element_size())
            for n, t in tensors.items()
        )
        total = sum(e.size_bytes for e in entries)
        buckets = -(-total // self._bucket_bytes)
        self._send_all(PushHeader(source=self._source, version=version, entries=entries, buckets=buckets))
        for index, data in enumerate(self._cut(tensors, total)):
            self._send_all(
                Bucket(source=self._source, version=version, index=index, data=data, crc32=zlib.crc32(data.data))
            )
        count = len(self._targets)
        return WeightSyncReport(
            version=version,
            tensors=len(entries),
            buckets=buckets * count,
            size_bytes=total * count,
            seconds=time.perf_counter() - start,
        )

    def _send_all(self, message: PushHeader | Bucket) -> None:
        for target in self._targets:
            self._channel.put(message, key=str(target))

    def _cut(self, tensors: Mapping[str, Tensor], total: int) -> Iterator[Bytes]:
        """The stream of all bytes in new arrays of `bucket_bytes`, the last one shorter."""
        bucket, used = np.empty(min(self._bucket_bytes, total), np.uint8), 0
        for tensor in tensors.values():
            data = tensor_bytes(tensor)
            while len(data):
                piece = data[: len(bucket) - used]
                bucket[used : used + len(piece)] = piece
                used, data, total = used + len(piece), data[len(piece) :], total - len(piece)
                if used == len(bucket):
                    yield bucket
                    bucket, used = np.empty(min(self._bucket_bytes, total), np.uint8), 0


class _Push:
    """A push in the sender's thread."""

    def __init__(self, version: int, sending: Future[WeightSyncReport]) -> None:
        self._version = version
        self._sending = sending

    def wait(self, timeout_s: float | None = None) -> WeightSyncReport:
        done, _ = concurrent.futures.wait([self._sending], timeout_s)
        if not done:
            raise ChannelTimeout(
                Problem(
                    code="channel-timeout",
                    key=f"weights version {self._version}",
                    what=f"the push was not finished after {timeout_s} s",
                    why="the rollout ranks have not taken all buckets",
                )
            )
        return self._sending.result()


# ── receiving ────────────────────────────────────────────────────────────────────────────────────────────────────────


class ChannelWeightReceiver:
    """Pulls what was pushed for rollout rank `rank`. Holds one version while it receives it."""

    def __init__(self, channel: Channel, rank: int) -> None:
        self._channel = channel
        self._key = str(rank)
        self._unfinished: tuple[str, int] | None = None  # the push whose buckets may still come after a failed pull

    def pull(self, version: int, *, timeout_s: float | None = None) -> ReceivedWeights:
        start = time.perf_counter()
        deadline_s = time.monotonic() + (self._channel.spec.timeout_s if timeout_s is None else timeout_s)
        header = self._header(deadline_s)
        self._unfinished = (header.source, header.version)
        received = [self._next(deadline_s) for _ in range(header.buckets)]
        self._unfinished = None
        if header.version != version:
            raise self._refuse(
                "version-mismatch",
                f"version {header.version} arrived, version {version} was asked for",
                "the push is late or the driver's version is ahead" if header.version < version else None,
            )
        tensors = _joined(header.entries, self._verified(header, received))
        report = WeightSyncReport(
            version=version,
            tensors=len(tensors),
            buckets=header.buckets,
            size_bytes=header.size_bytes,
            seconds=time.perf_counter() - start,
        )
        return ReceivedWeights(version=version, tensors=tensors, report=report)

    def _header(self, deadline_s: float) -> PushHeader:
        while True:
            message = self._next(deadline_s)
            if isinstance(message, PushHeader):
                return message
            if not isinstance(message, Bucket) or (message.source, message.version) != self._unfinished:
                raise self._refuse("incomplete-weights", f"expected the start of a push, got {_describe(message)}")

    def _verified(self, header: PushHeader, received: Sequence[Any]) -> list[Bytes]:
        """The stream of all bytes in its buckets, once each is the right one and undamaged."""
        for index, bucket in enumerate(received):
            if not isinstance(bucket, Bucket) or (bucket.source, bucket.index) != (header.source, index):
                what = f"expected bucket {index} of {header.buckets} from {header.source}, got {_describe(bucket)}"
                raise self._refuse("incomplete-weights", what)
            if bucket.version != header.version:
                what = f"bucket {index} is of version {bucket.version} in a push of version {header.version}"
                raise self._refuse("version-mismatch", what)
            found = zlib.crc32(bucket.data.data)
            if found != bucket.crc32:
                what = f"bucket {index} of version {header.version} is damaged"
                raise self._refuse("checksum-mismatch", what, f"crc32 {found:08x}, sent as {bucket.crc32:08x}")
        size_bytes = sum(len(b.data) for b in received)
        if size_bytes != header.size_bytes:
            what = f"version {header.version} has {size_bytes} of {header.size_bytes} bytes"
            raise self._refuse("incomplete-weights", what)
        return [b.data for b in received]

    def _next(self, deadline_s: float) -> Any:
        return self._channel.get(key=self._key, timeout_s=max(0.0, deadline_s - time.monotonic()))

    def _refuse(self, code: str, what: str, why: str | None = None) -> WeightSyncError:
        still = "the weights in use are unchanged"
        return WeightSyncError(
            Problem(code=code, key=f"rollout rank {self._key}", what=what, why=f"{why}; {still}" if why else still)
        )


def _joined(entries: Sequence[TensorEntry], buckets: Sequence[Bytes]) -> dict[str, Tensor]:
    """The tensors of the stream, each in memory of its own."""
    tensors: dict[str, Tensor] = {}
    rest, following = np.empty(0, np.uint8), iter(buckets)
    for entry in entries:
        data, filled = np.empty(entry.size_bytes, np.uint8), 0
        while filled < len(data):
            if not len(rest):
                rest = next(following)
            piece = rest[: len(data) - filled]
            data[filled : filled + len(piece)] = piece
            filled, rest = filled + len(piece), rest[len(piece) :]
        tensors[entry.name] = tensor_from_bytes(data.data, entry.dtype, entry.shape)
    return tensors


def _describe(message: object) -> str:
    if isinstance(message, PushHeader):
        return f"the start of version {message.version} from {message.source}"
    if isinstance(message, Bucket):
        return f"bucket {message.index} of version {message.version} from {message.source}"
    return f"a {type(message).__name__}"
