"""A sync from accelerator to accelerator, in which all actor ranks and all takers on accelerators take part.

::

    bucket by bucket, in one order for all      owner fills ─▶ broadcast in the group ─▶ takers without an owner take
                                                                        └─▶ actor ranks share it ─▶ their consumers take

A taker on the accelerator of an actor rank is a consumer of that rank: it copies out of the rank's memory (CUDA IPC).
All other members form one group: NCCL refuses two ranks of a group on one accelerator. Each byte comes to each taker
once; no actor rank ever holds more than two buckets.

A process of an engine takes windows: it gathers some whole weights, loads its part of them, and goes on to the next.
There is no second copy, and after a sync that broke off while it loaded the engine has no weights until the next one.
Any other target rank gathers a second copy of the weights, which is handed over when it is whole, so that its old
weights stay until then.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

# Not in the public types of `torch.distributed`
from torch._C._distributed_c10d import (
    PrefixStore,
)

from rlplace.comm.channel import Channel
from rlplace.comm.weights.device_group import (
    device_group,
    mark,
    open_shared,
    share,
    within,
)
from rlplace.comm.weights.device_push import SHARED, DeviceBucket, DevicePush
from rlplace.comm.weights.rendezvous import StoreAddress, SyncRendezvous
from rlplace.comm.weights.shards import Assembly, Shard, tensors_in
from rlplace.comm.weights.version import (
    Push,
    ReceivedWeights,
    WeightReceiver,
    damaged_sync,
    failed_sync,
)
from rlplace.errors import WeightSyncError
from rlplace.placement.flow import DEVICE_BUCKET_BYTES, WINDOW_BYTES, DeviceMember
from rlplace.placement.language.slots import owner_of

# Note of an owner about a bucket in memory that the consumer has opened
_AGAIN = b"again"
_COPIED = b"copied"  # note of a consumer about a bucket
_BROKE_OFF = b"broke off"  # note of an owner in place of a bucket
_ALONE = "-"  # word of a member that is in no group now
# Between two looks at a device: a bucket takes some hundred microseconds
_LOOK_S = 0.00005


# ── members ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Member:
    """A process that takes part in device syncs, which send weights from accelerator to accelerator.

    It owns its connection to the store and its part of the process group. `name`: name of the member, such as "actor
    rank 0". `timeout_s`: deadline of the connection to the store. The process group forms in the first sync, and again
    after failures.
    """

    def __init__(self, name: str, device: torch.device, *, timeout_s: float) -> None:
        self.name = name
        self.device = device
        # What shares and what broadcasts, as reports call it.
        self.transports = (
            ("cuda_ipc", "nccl") if device.type == "cuda" else ("shared_tensor", "gloo")
        )
        self._timeout_s = timeout_s
        self._rendezvous: SyncRendezvous | None = None
        self._group: Any = None
        # The round in which the group formed
        self._formed = _ALONE
        # Component that sends, of the sync under way
        self._source = ""

    def rendezvous_at(self, store: StoreAddress) -> SyncRendezvous:
        """Return this member's end of the rendezvous; the first call connects to `store`.

        Raise RuntimeError if no process serves the store.
        """
        if self._rendezvous is None:
            self._rendezvous = SyncRendezvous(store.connect(self._timeout_s), self.name)
        return self._rendezvous

    @contextmanager
    def sync(self, sync: DevicePush, deadline_s: float) -> Iterator[SyncRendezvous]:
        """Return a context manager that joins a sync for its block, and yields this member's end of the rendezvous.

        `deadline_s`: time of the deadline by `time.monotonic()`. If the block raises, this member leaves the process
        group. The errors of `SyncRendezvous.join` pass through. A RuntimeError, for example of a collective, becomes a
        WeightSyncError that names the ranks without the version.
        """
        version = sync.push.version
        self._source = sync.delivery.source
        with ExitStack() as failed:
            failed.callback(self.leave)
            try:
                if self.device.type == "cuda":
                    # Of this thread
                    torch.cuda.set_device(self.device)
                rendezvous = self.rendezvous_at(sync.store)
                self._join(sync, rendezvous, deadline_s)
                yield rendezvous
            except RuntimeError as error:
                lacking = self.lacking(sync)
                emptied = sync.delivery.in_windows
                raise failed_sync(
                    "incomplete-weights",
                    "broke-off",
                    self.name,
                    reason=error,
                    version=version,
                    target=sync.delivery.target,
                    lacking=lacking,
                    emptied=emptied,
                ) from error
            failed.pop_all()

    def _join(
        self, sync: DevicePush, rendezvous: SyncRendezvous, deadline_s: float
    ) -> None:
        """Wait until all members of a sync have joined, and form the process group anew if a member is not in it.

        `deadline_s`: time of the deadline by `time.monotonic()`.
        """
        delivery = sync.delivery
        group = [member.name for member in delivery.group]
        takers = zip(delivery.takers, delivery.owners, strict=True)
        consumers = [taker.name for taker, owner in takers if owner is not None]
        words = rendezvous.join(
            sync.round, self._formed, [*group, *consumers], deadline_s=deadline_s
        )
        if len(group) == 1 or self.name not in group:
            return
        if self._formed == _ALONE or len(set(words[: len(group)])) > 1:
            self.leave()
            left_s = max(1.0, deadline_s - time.monotonic())

            def form() -> Any:
                # Its own: a thread that waits has its connection to itself
                store = sync.store.connect(left_s)
                return device_group(
                    PrefixStore(f"weights/group/{sync.round}", store),
                    rank=group.index(self.name),
                    size=len(group),
                    device=self.device,
                    timeout_s=left_s,
                )

            late = f"{self.name} waited until the deadline for {', '.join(group)} to form a group"
            self._group = within(deadline_s, form, late)
            self._formed = str(sync.round)

    def broadcast(self, bucket: Tensor, owner: int, deadline_s: float) -> None:
        """Broadcast the bucket of source rank `owner` in place to all other members of the group.

        Wait until the copy is complete, because other processes may read the bucket's memory. Without other members,
        only wait for work on the device. Raise RuntimeError if the copy is not complete at `deadline_s`, by
        `time.monotonic()`.
        """
        if self._group is not None:
            self._group.broadcast(bucket, root=owner).wait()
        self.synchronize(deadline_s, f"a bucket of {owner_of(self._source, owner)}")

    def synchronize(self, deadline_s: float, what: str) -> None:
        """Wait until the present work of the device's current stream is done.

        NCCL's own wait would not be enough: it only orders streams. `what`: the awaited work, for errors. `deadline_s`:
        time of the deadline by `time.monotonic()`; raise RuntimeError at the deadline.
        """
        reached = mark(self.device)
        began = time.monotonic()
        while reached is not None and not reached.query():
            if time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"{self.name} waited {time.monotonic() - began:.1f} s for {what}"
                )
            time.sleep(_LOOK_S)

    def lacking(self, sync: DevicePush) -> list[int]:
        """Return the target ranks that lack the version of `sync`, or all target ranks if the store does not answer."""
        readers = sync.delivery.readers
        rendezvous = self._rendezvous
        if rendezvous is None:
            return list(readers)
        try:
            return [
                r
                for r in readers
                if rendezvous.version_of(owner_of(sync.delivery.target, r))
                < sync.push.version
            ]
        except RuntimeError:
            return list(readers)

    def free_memory(self) -> None:
        """Give memory that torch caches after a weight sync back to CUDA, for other processes on the accelerator."""
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def leave(self) -> None:
        """Leave the process group, even during a broadcast. All members form a new group in the next sync."""
        group = self._group
        self._group = None
        self._formed = _ALONE
        if group is not None:
            # Without this, a collective that NCCL has begun would keep the device busy for ever
            group.abort()


class DeviceSender:
    """The sending end of device syncs (weight syncs from accelerator to accelerator) at one source rank.

    Rank 0 also announces each push to the readers. `channel`: the weights channel. `component`: the source component.
    `store`: where all members meet. `bucket_bytes`, `window_bytes`: the most bytes of a bucket, and of a window of
    whole tensors.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        rank: int,
        component: str = "actor",
        device: torch.device,
        store: StoreAddress,
        bucket_bytes: int = DEVICE_BUCKET_BYTES,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._store = store
        self._sizes = {"bucket_bytes": bucket_bytes, "window_bytes": window_bytes}
        self._member = Member(
            owner_of(component, rank), device, timeout_s=channel.spec.timeout_s
        )
        self._round = 0
        # As they were sent last
        self._packed: tuple[Assembly, bytes] | None = None

    def send(
        self, assembly: Assembly, push: Push, shards: Sequence[Shard]
    ) -> Counter[str]:
        """Send this rank's buckets, and share all buckets with the readers on this rank's accelerator.

        Return transport -> sent bytes, once the readers have taken all buckets. `assembly`: plan of the copy. `push`:
        version and properties of the push. `shards`: this rank's shards, by tensor. Raise WeightSyncError or
        ChannelTimeout if the sync fails; the readers then keep their earlier weights, but for those that had begun to
        load windows, which have none.
        """
        deadline_s = time.monotonic() + self._channel.spec.timeout_s
        if self._packed is None or self._packed[0] is not assembly:
            self._packed = assembly, pickle.dumps(assembly, pickle.HIGHEST_PROTOCOL)
        sync = DevicePush(
            push=push,
            round=self._round,
            packed=self._packed[1],
            store=self._store,
            **self._sizes,
        )
        self._round += 1
        for reader in sync.delivery.readers if self._rank == 0 else ():
            self._channel.put(sync, key=str(reader))
        member = self._member
        several = len(sync.delivery.group) > 1
        (by_sharing, by_broadcast), moved = member.transports, Counter[str]()
        try:
            with (
                member.sync(sync, deadline_s) as rendezvous,
                _Shares(
                    rendezvous, sync.delivery.consumers(self._rank), deadline_s
                ) as shares,
            ):
                slots = sync.slots(member.device)
                for number, bucket in enumerate(sync.buckets):
                    slot = slots[number % SHARED]
                    size = bucket.content_bytes
                    data = slot[: bucket.size_bytes]
                    if bucket.owner == self._rank:
                        bucket.fill(data, shards, checked=push.checked)
                        moved[by_broadcast] += several * size
                    member.broadcast(data, bucket.owner, deadline_s)
                    moved[by_sharing] += shares.add(slot) * size
        finally:
            member.free_memory()
        return +moved

    def close(self) -> None:
        self._member.leave()


class _Shares:
    """The buckets that an actor rank shares with its consumers, at most two at a time, in two slots of memory.

    Consumers are the takers of weights on the actor rank's accelerator.

    ::

        actor rank    shares bucket 5 ─▶ a note to each consumer     after every consumer has taken bucket 4
        consumers     read the note, copy from the owner's memory, write a note that the bucket is taken

    A context manager: at the end of the block, all consumers have taken all buckets. If the block raises, the consumers
    get a note that no more buckets come.
    """

    def __init__(
        self,
        rendezvous: SyncRendezvous,
        consumers: Sequence[DeviceMember],
        deadline_s: float,
    ) -> None:
        self._rendezvous = rendezvous
        self._consumers = [consumer.name for consumer in consumers]
        self._deadline_s = deadline_s
        self._shared: deque[int] = deque()
        self._next = 0

    def add(self, slot: Tensor) -> int:
        """Share the next bucket, which is in `slot`, with all consumers; return the number of consumers.

        Wait until all consumers have taken the bucket before. The caller may change the slot after the next `add` has
        returned. Each consumer opens the memory of a slot only once, because opening takes longer than copying a
        bucket.
        """
        # Once for each: torch counts the processes that have opened it
        for consumer in self._consumers:
            what = share(slot) if self._next < SHARED else _AGAIN
            self._rendezvous.note(_shared(self._next, consumer), what)
        if self._consumers:
            self._shared.append(self._next)
            self._next += 1
            self._take_back(SHARED - 1)
        return len(self._consumers)

    def _take_back(self, most: int) -> None:
        """Wait until at most `most` shared buckets are not taken yet.

        Raise ChannelTimeout at the deadline, with the name of a late consumer, and RuntimeError if a consumer could not
        open the memory.
        """
        while len(self._shared) > most:
            for consumer in self._consumers:
                about = _taken(self._shared[0], consumer)
                if (
                    self._rendezvous.read(about, consumer, deadline_s=self._deadline_s)
                    != _COPIED
                ):
                    raise RuntimeError(
                        f"{consumer} could not open the memory of {self._rendezvous.me}"
                    )
            self._shared.popleft()

    def __enter__(self) -> _Shares:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._take_back(0)
            return
        for consumer in self._consumers:
            self._rendezvous.note(_shared(self._next, consumer), _BROKE_OFF)


def _shared(bucket: int, consumer: str) -> str:
    return f"bucket {bucket} for {consumer}"


def _taken(bucket: int, consumer: str) -> str:
    return f"bucket {bucket} taken by {consumer}"


class _Taking:
    """Takes all buckets of a sync in order, for one taker.

    `owner`: the actor rank on the taker's accelerator, which shares its memory with the taker; None if there is no such
    rank and the taker receives the broadcast. `damaged`: the actor rank of a damaged bucket, or None. After a damaged
    bucket, the other buckets are taken nevertheless, because other members wait for this taker.
    """

    def __init__(
        self,
        member: Member,
        sync: DevicePush,
        owner: int | None,
        rendezvous: SyncRendezvous,
        deadline_s: float,
    ) -> None:
        self._member = member
        self._sync = sync
        self._rendezvous = rendezvous
        self._deadline_s = deadline_s
        self._source = sync.delivery.source
        self._owner = None if owner is None else owner_of(self._source, owner)
        # Of the owner, once they are opened; else its own
        self._slots: list[Tensor] = []
        self._number = 0
        self._all = sum(1 for _ in sync.buckets)
        # The actor rank whose bucket it was
        self.damaged: int | None = None

    def take(self, bucket: DeviceBucket, copy: Tensor, first: int = 0) -> None:
        """Wait for the next bucket, and copy its pieces to their positions in `copy`.

        `copy`: bytes of a whole copy of the weights, or of a part of it that begins at byte `first`.
        """
        member = self._member
        number = self._number
        slots = self._slots
        if self._owner is None:
            slots[:] = slots or self._sync.slots(member.device)
        else:
            self._open(self._owner)
        data = slots[number % SHARED][: bucket.size_bytes]
        if self._owner is None:
            member.broadcast(data, bucket.owner, self._deadline_s)
        bucket.copy_into(copy, data, first)
        member.synchronize(
            self._deadline_s,
            f"a bucket of {owner_of(self._source, bucket.owner)}",
        )
        if self._sync.push.checked and not bucket.is_whole(data):
            self.damaged = bucket.owner
        self._number += 1
        if self._owner is not None:
            # The owner is about to give its memory back
            if self._number == self._all:
                del data
                slots.clear()
            # From here the owner overwrites it
            self._rendezvous.note(_taken(number, member.name), _COPIED)

    def _open(self, owner: str) -> None:
        """Wait for the note on the next bucket of `owner`; open the bucket's slot of memory unless it is open already.

        Raise RuntimeError if the owner has broken off or its note is damaged, WeightSyncError if this process does not
        see the owner's accelerator.
        """
        rendezvous = self._rendezvous
        number = self._number
        note = rendezvous.read(
            _shared(number, rendezvous.me), owner, deadline_s=self._deadline_s
        )
        if note == _BROKE_OFF:
            raise RuntimeError(f"{owner} could not go on")
        if note == _AGAIN and len(self._slots) == SHARED:
            return
        try:
            self._slots.append(open_shared(note))
        except (KeyError, OSError, TypeError, ValueError, WeightSyncError) as error:
            rendezvous.note(_taken(number, rendezvous.me), b"not opened")
            if isinstance(error, WeightSyncError):
                raise
            raise RuntimeError(
                f"the note of {owner} about its memory is damaged: {error!r}"
            ) from error


class DeviceEnd(WeightReceiver):
    """Base class of the receivers of device syncs (weight syncs from accelerator to accelerator) at one target rank."""

    def __init__(
        self,
        channel: Channel,
        rank: int,
        *,
        component: str = "rollout",
        device: torch.device,
    ) -> None:
        super().__init__(channel, rank, component=component)
        self._member = Member(self._owner, device, timeout_s=channel.spec.timeout_s)

    def close(self) -> None:
        self._member.leave()

    def _announcement(self, version: int, deadline_s: float) -> DevicePush:
        while True:
            sync = self._next(deadline_s)
            if not isinstance(sync, DevicePush):
                raise self._unexpected("a push of device tensors", sync)
            arrived = sync.push.version
            if arrived == version:
                return sync
            self._refuse(sync, f"asked for version {version}, not {arrived}")
            if arrived > self._given_up:
                raise self._other_version(arrived, version)

    def _refuse(self, sync: DevicePush, why: str) -> None:
        absent = [taker.name for taker in sync.delivery.takers_of(self._rank)]
        self._member.rendezvous_at(sync.store).refuse(sync.round, why, absent)

    def _has(self, sync: DevicePush) -> None:
        self._member.rendezvous_at(sync.store).set_version(sync.push.version)


class DeviceReceiver(DeviceEnd):
    """Receiver of device syncs at a target rank with one accelerator, for any holder of weights.

    The accelerator gets a whole copy of the weights, in addition to the weights in use.
    """

    def _receive(self, version: int, deadline_s: float) -> ReceivedWeights:
        sync = self._announcement(version, deadline_s)
        member = self._member
        layout = sync.assembly.layout
        delivery = sync.delivery
        (taker,) = delivery.takers_of(self._rank)
        owner = delivery.owner(taker)
        with member.sync(sync, deadline_s) as rendezvous:
            taking = _Taking(member, sync, owner, rendezvous, deadline_s)
            copy = torch.empty(
                layout.size_bytes, dtype=torch.uint8, device=member.device
            )
            for bucket in sync.buckets:
                taking.take(bucket, copy)
        if taking.damaged is not None:
            raise self._damaged(delivery, version, taking.damaged, member.lacking(sync))
        tensors: dict[str, Any] = tensors_in(copy, layout)

        def give_back(loaded: bool) -> None:
            # The memory goes with them
            tensors.clear()
            if loaded:
                self._has(sync)
            member.free_memory()

        return ReceivedWeights(
            version=version,
            tensors=tensors,
            partial=sync.push.partial,
            transports={
                member.transports[owner is None]: sum(
                    spec.size_bytes for spec in layout.tensors
                )
            },
            give_back=give_back,
        )


# ── to an engine, window by window ────────────────────────────────────────────────────────────────────────────────────
#
#   rollout rank   announcement ─▶ engine.load_from: in each of its processes ─▶ all have loaded it
#   each process   joins the sync ─▶ window by window: gathers it on its accelerator, loads its part


class WindowTaker:
    """Receiver of device syncs at one process of an engine, which loads the weights window by window.

    `rank`: the rollout rank of the engine. `part`: number of the process in the engine; None: the engine has one
    process. `device`: the process's accelerator. `timeout_s`: deadline of the connection to the store.
    """

    def __init__(
        self, rank: int, part: int | None, *, device: torch.device, timeout_s: float
    ) -> None:
        self._me = DeviceMember("rollout", rank, part)
        self._member = Member(self._me.name, device, timeout_s=timeout_s)

    def take(self, sync: DevicePush, deadline_s: float) -> Iterator[dict[str, Tensor]]:
        """Yield name -> tensor on the device for all weights, in several dictionaries of some whole tensors each.

        The memory of a yielded dictionary is free once its tensors are dropped. After a damaged bucket, take the other
        buckets but yield no more weights. `deadline_s`: time of the deadline by `time.monotonic()`. Raise
        WeightSyncError or ChannelTimeout if the sync fails.
        """
        member = self._member
        owner = sync.delivery.owner(self._me)
        try:
            with member.sync(sync, deadline_s) as rendezvous:
                taking = _Taking(member, sync, owner, rendezvous, deadline_s)
                for window in sync.windows:
                    gathered = torch.empty(
                        window.layout.size_bytes,
                        dtype=torch.uint8,
                        device=member.device,
                    )
                    for bucket in window.buckets:
                        taking.take(bucket, gathered, window.first)
                    if taking.damaged is None:
                        yield tensors_in(gathered, window.layout)
                    # Its memory is free before that of the next window is taken
                    del gathered
            if taking.damaged is not None:
                raise damaged_sync(
                    member.name,
                    sync.delivery,
                    sync.push.version,
                    taking.damaged,
                    member.lacking(sync),
                    emptied=True,
                )
        finally:
            member.free_memory()

    def not_loaded(self, sync: DevicePush, error: Exception) -> WeightSyncError:
        """Return the error for weights that have arrived undamaged and that this process could not load.

        `sync`: the sync by which the weights have arrived. `error`: the error of loading.
        """
        version = sync.push.version
        lacking = self._member.lacking(sync)
        return failed_sync(
            "incomplete-weights",
            "load-failed",
            self._member.name,
            reason=f"{type(error).__name__}: {error}",
            version=version,
            target=sync.delivery.target,
            lacking=lacking,
            emptied=True,
        )

    def close(self) -> None:
        self._member.leave()

    def transport(self, sync: DevicePush) -> str:
        return self._member.transports[sync.delivery.owner(self._me) is None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedParts:
    """Result of loading a sync into the processes of an engine, window by window.

    `transports`: transport -> bytes that came by it, summed over all processes of the engine. `others`: name ->
    received tensor, for the received tensors that are not weights.
    """

    transports: Mapping[str, int]
    others: dict[str, Tensor]


# Arguments: the sync, the rollout rank, the deadline by `time.monotonic()`; see VllmEngine, TransformersEngine
LoadFrom = Callable[[DevicePush, int, float], LoadedParts]


class WindowReceiver(DeviceEnd):
    """Receiver of device syncs at a target rank whose engine loads the weights window by window.

    `load`: makes all processes of the engine take the weights of a sync and load them.
    """

    def __init__(
        self,
        channel: Channel,
        rank: int,
        *,
        component: str = "rollout",
        load: LoadFrom,
    ) -> None:
        # This end itself takes no weights
        here = torch.device("cpu")
        super().__init__(channel, rank, component=component, device=here)
        self._load = load

    def _receive(self, version: int, deadline_s: float) -> ReceivedWeights:
        sync = self._announcement(version, deadline_s)
        try:
            loaded = self._load(sync, self._rank, deadline_s)
        except Exception:
            # Has no effect if the sync has begun
            self._refuse(sync, "could not begin")
            raise
        self._has(sync)
        return ReceivedWeights(
            version=version,
            tensors=loaded.others,
            partial=False,
            transports=loaded.transports,
            loaded=True,
        )
