"""The contract of a weight sync: its messages, the weights a version hands over, and its errors.

::

    source ranks   push(8, shards)                                             each writes its own
    target ranks   with pull(8) as received:  engine.load(received.tensors, 8)

A pull hands over exactly the version asked for, whole; else it raises and the weights in use stay as they are. Engines
that load a device sync window by window are the exception: once they had begun, they have no weights then.
Under the key of a target rank the weights channel carries::

    Complete                         to every reader of a double buffer: a version is complete in it
    PushHeader, Bucket, ... Bucket   to the lead reader: the pieces of one source rank that cannot write there itself;
                                     from another node, the buckets come by a stream that the header names
    DevicePush (see device_push)     to every reader on an accelerator: the sync it takes part in
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.codes import problem
from rlplace.comm.channel import Channel
from rlplace.comm.weights.shards import Assembly, Bytes, Changes
from rlplace.errors import ChannelEmpty, ChannelTimeout, WeightSyncError
from rlplace.placement.flow import Delivery
from rlplace.placement.language.slots import owner_of
from rlplace.units import plural

if TYPE_CHECKING:
    from torch import Tensor

    from rlplace.comm.network import StreamAddress


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Version and properties of a push, which all messages of the push contain.

    `partial`: the push has only some of the weights; all other weights stay unchanged. `checked`: the messages have
    checksums, which are compared at the receivers.
    """

    version: int
    partial: bool = False  # only some of the weights; the others stay as they are
    checked: bool = False  # checksums are taken and compared


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Message to a reader: a version is complete in a double buffer of the reader's node.

    `push`: the push of this version. `buffer`: path of the double buffer's file.
    """

    push: Push
    buffer: Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PushHeader:
    """Message to the lead reader that announces the pieces of one source rank, which are sent in buckets.

    `source`: the source rank. `assembly`: plan of the copy. `bucket_bytes`: the most bytes of a bucket. `base`: the
    earlier version to which the buckets contain changes; None: they contain all bytes. `stream`: where the reader asks
    for the buckets; None: they follow as messages of the channel.
    """

    push: Push
    source: int  # rank
    assembly: Assembly
    bucket_bytes: int
    # The version to which the changes in the buckets apply; None: there are no changes
    base: int | None
    stream: StreamAddress | None = None  # that the buckets come by; None: they follow


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Message to the lead reader with pieces of one source rank, one after the other.

    `source`: the source rank. `index`: index of the bucket among those of the source rank in the push. `data`: the
    bytes of the pieces, or their changes since an earlier version. `checksum`: checksum of the bytes of the pieces,
    also if `data` has only changes.
    """

    source: int
    version: int
    index: int
    data: Bytes | Changes
    checksum: int  # of the bytes of the pieces, also if `data` has only changes

    def __str__(self) -> str:
        return f"bucket {self.index} of version {self.version} from rank {self.source}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedWeights:
    """One received version of the weights, valid until `release`.

    `tensors`: name -> tensor, on the host or the receiver's device; tied weights are under all their names. `partial`:
    these are only some of the weights; all others stay unchanged. `transports`: transport -> bytes that came by it.
    `give_back`: called by `release` with `loaded`. `loaded`: True if the processes of an engine have already loaded the
    weights; `tensors` then has only the received tensors that are not weights.

    Do not write into the tensors; copy them first. In shared memory they are pages that all readers of the node share,
    mapped without write permission. torch has no read-only tensors, so a write ends the process with SIGSEGV.

    As a context manager, it calls `release` at the end of the block. The version counts as loaded unless the block
    raises.
    """

    version: int
    # By all names, on the host or the receiver's device; a tensor that is kept keeps memory
    tensors: dict[str, Tensor]
    partial: bool  # only some of the weights; the others stay as they are
    # Bytes: by Transport on hosts; from device to device by "cuda_ipc" or "nccl"
    transports: Mapping[str, int]
    # Memory of the receiver alone is not given back
    give_back: Callable[[bool], None] = lambda loaded: None
    loaded: bool = False  # by the processes of an engine, while it came: the tensors are those that are no weights

    def release(self, *, loaded: bool = True) -> None:
        """Let later versions overwrite the memory. Idempotent. `loaded`: whether this rank has loaded this version."""
        self.give_back(loaded)

    def __enter__(self) -> ReceivedWeights:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.release(loaded=kind is None)


class WeightReceiver(abc.ABC):
    """The receiving end of a weight sync at one target rank. Used by one thread.

    `channel`: the weights channel. `rank`: the target rank. `component`: name of the target component.
    """

    def __init__(
        self, channel: Channel, rank: int, *, component: str = "rollout"
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._component = component
        self._owner = owner_of(component, rank)
        # Messages taken before their turn
        self._backlog: collections.deque[Any] = collections.deque()
        # Newest version whose pull failed: what is left of it may still arrive
        self._given_up = -1

    def announced(self) -> bool:
        """Return whether a message has arrived that no pull has handled yet, such as the beginning of a new version."""
        if not self._backlog:
            with contextlib.suppress(ChannelEmpty):
                self._backlog.append(self._channel.get_nowait(key=str(self._rank)))
        return bool(self._backlog)

    def pull(self, version: int, *, timeout_s: float | None = None) -> ReceivedWeights:
        """Wait until exactly `version` has arrived completely, and return its weights.

        `timeout_s`: None means the channel's deadline. Raise WeightSyncError if another version arrives, or if
        `version` is damaged or incomplete. The errors of the channel pass through.
        """
        deadline_s = time.monotonic() + (
            self._channel.spec.timeout_s if timeout_s is None else timeout_s
        )
        try:
            return self._receive(version, deadline_s)
        except (ChannelTimeout, WeightSyncError):
            self._given_up = max(self._given_up, version)
            raise

    def begin_again(self) -> None:
        """Drop all messages that have arrived, so that earlier versions can arrive again.

        Call this after the channel was emptied.
        """
        self._backlog.clear()
        self._given_up = -1

    @abc.abstractmethod
    def _receive(self, version: int, deadline_s: float) -> ReceivedWeights: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    def _next(self, deadline_s: float) -> Any:
        if self._backlog:
            return self._backlog.popleft()
        return self._channel.get(
            key=str(self._rank), timeout_s=max(0.0, deadline_s - time.monotonic())
        )

    def _other_version(self, arrived: int, asked: int) -> WeightSyncError:
        error = "newer"
        if arrived < asked:
            error = "older"
        return failed_sync(
            "version-mismatch", error, self._owner, arrived=arrived, asked=asked
        )

    def _unexpected(self, expected: str, got: object) -> WeightSyncError:
        shown = f"a {type(got).__name__}"
        if isinstance(got, Bucket):
            shown = str(got)
        return failed_sync(
            "incomplete-weights",
            "unexpected",
            self._owner,
            expected=expected,
            shown=shown,
        )

    def _damaged(
        self, delivery: Delivery, version: int, writer: int, lacking: Sequence[int]
    ) -> WeightSyncError:
        return damaged_sync(self._owner, delivery, version, writer, lacking)


def failed_sync(
    code: str,
    error: str,
    key: str,
    *,
    version: int = -1,
    target: str = "",
    lacking: Sequence[int] = (),
    emptied: bool = False,
    **facts: Any,
) -> WeightSyncError:
    """Return the error for a failed weight sync.

    `code`: the error code. `error`: name of one of the texts of this code. `key`: name of the worker at which the sync
    has failed. `lacking`: ranks of the component `target` that do not have `version`. `emptied`: whether there are
    engines that load the weights as they come; those that had begun then have no weights until the next sync.
    `facts`: further values for the text.
    """
    without = (
        f"without version {version} now: {ranks(target, lacking)}" if lacking else None
    )
    left = "the weights in use are unchanged"
    if emptied:
        left = (
            "an engine that had begun to load has no weights until the next sync, those "
            "of all others are unchanged"
        )
    after = "; ".join(text for text in (without, left) if text)
    failed = problem(code, key, error=error, version=version, after=after, **facts)
    return WeightSyncError(failed)


def damaged_sync(
    key: str,
    delivery: Delivery,
    version: int,
    writer: int,
    lacking: Sequence[int],
    *,
    emptied: bool = False,
) -> WeightSyncError:
    return failed_sync(
        "checksum-mismatch",
        "",
        key,
        writer=owner_of(delivery.source, writer),
        version=version,
        target=delivery.target,
        lacking=lacking,
        emptied=emptied,
    )


def versions_only_go_up(
    source: str, writer: int, version: int, newest: int
) -> WeightSyncError:
    return failed_sync(
        "version-mismatch",
        "downwards",
        owner_of(source, writer),
        version=version,
        newest=newest,
    )


def not_here(
    delivery: Delivery,
    reader: int,
    version: int,
    late: Sequence[int],
    lacking: Sequence[int],
    *,
    why: str | None = None,
) -> WeightSyncError:
    """Return the error for a version that is not complete in the copy of a target rank.

    `delivery`: the planned copy. `reader`: the target rank. `late`: source ranks that have not written the version;
    empty if a later version has replaced it. `lacking`: target ranks that have not loaded the version. `why`: why the
    source ranks are gone; None: they are not gone.
    """
    error = "replaced"
    if why is not None:
        error = "writer-gone"
    elif late:
        error = "not-written"
    return failed_sync(
        "incomplete-weights",
        error,
        owner_of(delivery.target, reader),
        writers=ranks(delivery.source, late),
        reason=why,
        version=version,
        target=delivery.target,
        lacking=lacking,
    )


def ranks(component: str, numbers: Sequence[int]) -> str:
    """Return a text that names some ranks of a component, such as "actor ranks 0, 3"."""
    return f"{component} {plural(len(numbers), 'rank')} {', '.join(map(str, numbers))}"
