"""A sync from accelerator to accelerator, in which all actor ranks and all readers on accelerators take part.

::

    bucket by bucket, in one order for all      owner fills ─▶ broadcast in the group ─▶ readers without an owner take
                                                                        └─▶ actor ranks share it ─▶ their consumers take

A reader on the accelerator of an actor rank is a consumer of that rank: it copies out of the rank's memory (CUDA IPC).
All other members form one group: NCCL refuses two ranks of a group on one accelerator. Each byte comes to each reader
once; no member but a reader ever holds more than two buckets. On each reader's accelerator a second copy of the weights
grows, and is handed over when it is whole.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # `torch.distributed` has them, its types do not

from rlplace.comm.channel import Channel
from rlplace.comm.weights.device_group import device_group, mark, open_shared, share, within
from rlplace.comm.weights.shards import Assembly, Layout, Piece, Shard, tensors_in, write_piece
from rlplace.comm.weights.version import Push, ReceivedWeights, WeightReceiver, failed_sync
from rlplace.errors import ChannelTimeout, WeightSyncError
from rlplace.placement.flow import DEVICE_BUCKET_BYTES, DeviceDelivery
from rlplace.placement.language.slots import owner_of

_ALIGNMENT = 16
_SUM_BYTES = 8
_SHARED = 2  # buckets that are shared at a time: one is filled while the other is copied
_AGAIN = b"again"  # note of an owner about a bucket in memory that the consumer has opened
_COPIED = b"copied"  # note of a consumer about a bucket
_BROKE_OFF = b"broke off"  # note of an owner in place of a bucket
_ALONE = "-"  # word of a member that is in no group now
_GO = "go"
_LEAST_S = 0.001
_LOOK_S = 0.00005  # between two looks at a device: a bucket takes some hundred microseconds


# ── the store where the members meet ──────────────────────────────────────────────────────────────────────────────────
#
#   each member    here ─▶ waits for the others ─▶ verdict: the first to write it decides, "go" or which are missing
#   later          notes between members: what is shared, what has been taken, which version each has
#
# It has no password: what is read from it is parsed as text, numbers and handles of CUDA, and never unpickled.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Address of a TCPStore that a member, or a process that outlives them, serves."""

    host: str
    port: int

    def connect(self, timeout_s: float) -> Store:
        """Open a store of this member's own: a wait of one member blocks no other. RuntimeError if none listens."""
        return TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=timeout_s))


class SyncRendezvous:
    """One member's end; used by one thread."""

    def __init__(self, store: Store, me: str) -> None:
        self.me = me
        self.store: Any = PrefixStore("weights", store)  # its types know no bytes
        self._round = -1
        self._notes: list[list[str]] = [[], [], []]  # keys of this round, the one before, the one before that

    def join(self, round: int, word: str, members: Sequence[str], *, deadline_s: float) -> list[str]:
        """Return the words of all members, in their order, once all are here.

        Raises ChannelTimeout with the members that did not come, WeightSyncError with the reason of another member;
        then no member goes on.
        """
        began = time.monotonic()
        self._enter(round)
        self.note(f"here/{self.me}", word.encode())
        keys = [self._key(f"here/{member}") for member in members]
        absent = ""
        if not self._come(keys, deadline_s):
            absent = ", ".join(m for m in members if not self.store.check([self._key(f"here/{m}")]))
        verdict = self._decide(f"{absent} did not come" if absent else _GO)
        if absent and verdict != _GO:
            raise ChannelTimeout.about(
                "channel-timeout",
                "weights",
                f"{self.me} waited {time.monotonic() - began:.1f} s for {absent} to take part in the sync",
                why="device tensors go to all ranks at once, so no rank went on; the weights in use are unchanged",
                fix="find out why they stopped, or raise the deadline if they are really this slow",
            )
        if verdict != _GO:
            raise failed_sync("incomplete-weights", self.me, f"the sync did not take place: {verdict}")
        return [found.decode() for found in self.store.multi_get(keys)]

    def refuse(self, round: int, why: str) -> None:
        """Keep the round from going on, unless it does already."""
        self._enter(round)
        self._decide(f"{self.me} {why}")
        self.note(f"here/{self.me}", b"")  # after the verdict: no member needs to wait for this one

    def note(self, about: str, what: bytes) -> None:
        key = self._key(about)
        self._notes[0].append(key)
        self.store.set(key, what)

    def read(self, about: str, source: str, *, deadline_s: float) -> bytes:
        """Wait for the note of `source`; ChannelTimeout names it."""
        began, key = time.monotonic(), self._key(about)
        if not self._come([key], deadline_s):
            what = f"{self.me} waited {time.monotonic() - began:.1f} s for {source}: {about}"
            why = f"{source} stopped or died in the middle of a sync; the weights in use are unchanged"
            raise ChannelTimeout.about("channel-timeout", "weights", what, why=why)
        found: bytes = self.store.get(key)
        return found

    def version_of(self, member: str) -> int:
        """Return the newest version that a member has; -1 before the first."""
        key = f"has/{member}"
        return int(self.store.get(key)) if self.store.check([key]) else -1

    def set_version(self, version: int) -> None:
        self.store.set(f"has/{self.me}", str(version))

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enter(self, round: int) -> None:
        if round != self._round:
            self._round = round
            for key in self._notes.pop():
                self.store.delete_key(key)
            self._notes.insert(0, [])

    def _key(self, about: str) -> str:
        return f"{self._round}/{about}"

    def _decide(self, verdict: str) -> str:
        key = self._key("verdict")
        self._notes[0].append(key)
        found: bytes = self.store.compare_set(key, "", verdict)
        return found.decode()

    def _come(self, keys: list[str], deadline_s: float) -> bool:
        """Wait for all of them; False at the deadline."""
        left = timedelta(seconds=max(_LEAST_S, deadline_s - time.monotonic()))
        try:
            self.store.wait(keys, left)
        except dist.DistStoreError:
            return False
        return True


# ── buckets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBucket:
    """Pieces of one actor rank as one tensor; all members know what is in it.

    ::

        │ piece │ piece │ ... │ sum │     pieces begin at multiples of 16 bytes, for any dtype
    """

    owner: int  # actor rank
    pieces: tuple[Piece, ...]
    layout: Layout = dataclasses.field(repr=False)

    @property
    def size_bytes(self) -> int:
        each = (self.layout.count_bytes([piece]) for piece in self.pieces)
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in each) + _SUM_BYTES

    def fill(self, bucket: Tensor, shards: Sequence[Shard], *, checked: bool) -> None:
        """Write this rank's pieces, in the types they travel in, and their sum."""
        if checked:
            bucket.zero_()  # the gaps count in the sum
        for piece, run in self.layout.runs(self.pieces, _ALIGNMENT):
            write_piece(bucket[run], shards[piece.tensor], self.owner, piece)
        if checked:
            _sum_of(bucket).copy_(_summed(bucket))

    def copy_into(self, copy: Tensor, bucket: Tensor) -> None:
        """Put the pieces where they lie in a whole copy."""
        for piece, run in self.layout.runs(self.pieces, _ALIGNMENT):
            copy[self.layout.bytes_of(piece)].copy_(bucket[run])

    @staticmethod
    def is_whole(bucket: Tensor) -> bool:
        """Compare the sum of a checked bucket. Waits for the device."""
        return bool((_sum_of(bucket) == _summed(bucket)).item())


def _sum_of(bucket: Tensor) -> Tensor:
    return bucket[-_SUM_BYTES:].view(torch.int64)


def _summed(bucket: Tensor) -> Tensor:
    """Sum to 64 bits, which every flipped bit changes."""
    return bucket[:-_SUM_BYTES].view(torch.int64).sum(dtype=torch.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DevicePush:
    """Announces a device sync to its readers, over the weights channel."""

    push: Push
    round: int
    assembly: Assembly
    bucket_bytes: int
    store: StoreAddress

    @property
    def delivery(self) -> DeviceDelivery:
        assert isinstance(self.assembly.delivery, DeviceDelivery), "others are not announced like this"
        return self.assembly.delivery

    def buckets(self) -> Iterator[DeviceBucket]:
        """Yield all buckets of the push, in the order in which every member handles them."""
        layout = self.assembly.layout
        for owner, own in enumerate(self.assembly.pieces):
            for pieces in layout.buckets(own, self.bucket_bytes):
                yield DeviceBucket(owner=owner, pieces=pieces, layout=layout)

    def slots(self, device: torch.device) -> Sequence[Tensor]:
        """Make memory for any two neighbouring buckets: bucket n lies at the beginning of slot n modulo 2."""
        largest = max((bucket.size_bytes for bucket in self.buckets()), default=0)
        return [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(_SHARED)]


# ── members ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Member:
    """Owns a member's ends of the rendezvous and of the group; the group forms in the first sync and after failures."""

    def __init__(self, name: str, device: torch.device, *, timeout_s: float) -> None:
        self.name = name
        self.device = device
        # What shares and what broadcasts, as reports call it.
        self.transports = ("cuda_ipc", "nccl") if device.type == "cuda" else ("shared_tensor", "gloo")
        self._timeout_s = timeout_s
        self._rendezvous: SyncRendezvous | None = None
        self._group: Any = None
        self._formed = _ALONE  # the round in which the group formed

    def rendezvous_at(self, store: StoreAddress) -> SyncRendezvous:
        """Return this member's end, at the one store of the job. RuntimeError if no process serves it."""
        if self._rendezvous is None:
            self._rendezvous = SyncRendezvous(store.connect(self._timeout_s), self.name)
        return self._rendezvous

    @contextmanager
    def sync(self, sync: DevicePush, deadline_s: float) -> Iterator[SyncRendezvous]:
        """Join a sync for the time of the block. A sync that fails in it ends the group at this member.

        Raises as SyncRendezvous.join; RuntimeError of the collectives becomes WeightSyncError, with the ranks that lack
        the version.
        """
        version = sync.push.version
        with ExitStack() as failed:
            failed.callback(self.leave)
            try:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)  # of this thread
                rendezvous = self.rendezvous_at(sync.store)
                self._join(sync, rendezvous, deadline_s)
                yield rendezvous
            except RuntimeError as error:
                what, lacking = f"version {version} broke off: {error}", self.lacking(sync)
                raise failed_sync("incomplete-weights", self.name, what, version=version, lacking=lacking) from error
            failed.pop_all()

    def _join(self, sync: DevicePush, rendezvous: SyncRendezvous, deadline_s: float) -> None:
        """Return when all members are here and those of the group are in it."""
        delivery = sync.delivery
        group = [owner_of(*member) for member in delivery.group]
        consumers = [owner_of("rollout", r) for r in delivery.readers if delivery.owner(r) is not None]
        words = rendezvous.join(sync.round, self._formed, [*group, *consumers], deadline_s=deadline_s)
        if len(group) == 1 or self.name not in group:
            return
        if self._formed == _ALONE or len(set(words[: len(group)])) > 1:
            self.leave()
            left_s = max(1.0, deadline_s - time.monotonic())

            def form() -> Any:
                store = sync.store.connect(left_s)  # its own: a thread that waits has its connection to itself
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
        """Send the bucket of actor rank `owner` into all others', in place; does nothing where it is alone.

        The bucket is whole afterwards. RuntimeError where it is not at the deadline.
        """
        if self._group is not None:
            self._group.broadcast(bucket, root=owner).wait()
            self.synchronize(deadline_s, f"a bucket of {owner_of('actor', owner)}")

    def synchronize(self, deadline_s: float, what: str) -> None:
        """Wait for what the current stream has to do: NCCL's own wait only orders streams. RuntimeError when late."""
        reached, began = mark(self.device), time.monotonic()
        while reached is not None and not reached.query():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.name} waited {time.monotonic() - began:.1f} s for {what}")
            time.sleep(_LOOK_S)

    def lacking(self, sync: DevicePush) -> list[int]:
        """List the rollout ranks without this version; all readers where the store does not answer."""
        readers, rendezvous = sync.delivery.readers, self._rendezvous
        if rendezvous is None:
            return list(readers)
        try:
            return [r for r in readers if rendezvous.version_of(owner_of("rollout", r)) < sync.push.version]
        except RuntimeError:
            return list(readers)

    def free_memory(self) -> None:
        """Give cached memory back: buckets and copies are large and rare, and others on the accelerator need room."""
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def leave(self) -> None:
        """Leave the group, also in the middle of a broadcast: the next sync forms a new one, at every member."""
        group, self._group = self._group, None
        self._formed = _ALONE
        if group is not None:
            group.abort()  # or what NCCL has begun would keep the device at work for ever


class DeviceSender:
    """Takes part for actor rank `rank`; rank 0 announces the push. All members reach `store`."""

    def __init__(
        self,
        channel: Channel,
        *,
        rank: int,
        device: torch.device,
        store: StoreAddress,
        bucket_bytes: int = DEVICE_BUCKET_BYTES,
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._store = store
        self._bucket_bytes = bucket_bytes
        self._member = Member(owner_of("actor", rank), device, timeout_s=channel.spec.timeout_s)
        self._round = 0

    def send(self, assembly: Assembly, push: Push, shards: Sequence[Shard]) -> Counter[str]:
        """Send this rank's buckets and pass on all others. Returns bytes by transport.

        Blocks until the readers have taken them. Raises WeightSyncError or ChannelTimeout, and then the readers have
        what they had.
        """
        deadline_s = time.monotonic() + self._channel.spec.timeout_s
        sync = DevicePush(
            push=push, round=self._round, assembly=assembly, bucket_bytes=self._bucket_bytes, store=self._store
        )
        self._round += 1
        for reader in sync.delivery.readers if self._rank == 0 else ():
            self._channel.put(sync, key=str(reader))
        member, several = self._member, len(sync.delivery.group) > 1
        (by_sharing, by_broadcast), moved = member.transports, Counter[str]()
        try:
            with (
                member.sync(sync, deadline_s) as rendezvous,
                _Shares(rendezvous, sync.delivery.consumers(self._rank), deadline_s) as shares,
            ):
                slots = sync.slots(member.device)
                for number, bucket in enumerate(sync.buckets()):
                    slot, size = slots[number % _SHARED], assembly.layout.count_bytes(bucket.pieces)
                    data = slot[: bucket.size_bytes]
                    if bucket.owner == self._rank:
                        bucket.fill(data, shards, checked=push.checked)
                        moved[by_broadcast] += several * size
                    member.broadcast(data, bucket.owner, deadline_s)
                    moved[by_sharing] += shares.add(slot) * size
                member.synchronize(deadline_s, "its own buckets")
        finally:
            member.free_memory()
        return +moved

    def close(self) -> None:
        self._member.leave()


class _Shares:
    """The buckets that an actor rank shares with its consumers, at most two at a time, in two slots of memory.

    ::

        actor rank    shares bucket 5 ─▶ a note to each consumer     after every consumer has taken bucket 4
        consumers     read the note, copy from the owner's memory, note that it is taken

    At the end of the block every consumer has taken every bucket, or finds a note that there are no more.
    """

    def __init__(self, rendezvous: SyncRendezvous, consumers: Sequence[int], deadline_s: float) -> None:
        self._rendezvous = rendezvous
        self._consumers = [owner_of("rollout", consumer) for consumer in consumers]
        self._deadline_s = deadline_s
        self._shared: deque[int] = deque()
        self._next = 0

    def add(self, slot: Tensor) -> int:
        """Share the bucket in `slot`, which is not to be changed before the one after the next is added.

        Return the number of consumers. Each opens a slot once: to open memory takes longer than to copy a bucket.
        """
        for consumer in self._consumers:  # once for each: torch counts the processes that have opened it
            what = share(slot) if self._next < _SHARED else _AGAIN
            self._rendezvous.note(_shared(self._next, consumer), what)
        if self._consumers:
            self._shared.append(self._next)
            self._next += 1
            self._take_back(_SHARED - 1)
        return len(self._consumers)

    def _take_back(self, most: int) -> None:
        """Wait until at most so many are shared. ChannelTimeout names a consumer that has not taken one."""
        while len(self._shared) > most:
            for consumer in self._consumers:
                about = _taken(self._shared[0], consumer)
                if self._rendezvous.read(about, consumer, deadline_s=self._deadline_s) != _COPIED:
                    raise RuntimeError(f"{consumer} could not open the memory of {self._rendezvous.me}")
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


class DeviceReceiver(WeightReceiver):
    """Pulls onto `device`."""

    def __init__(self, channel: Channel, rank: int, *, device: torch.device) -> None:
        super().__init__(channel, rank)
        self._member = Member(self._owner, device, timeout_s=channel.spec.timeout_s)

    def close(self) -> None:
        self._member.leave()

    def _receive(self, version: int, deadline_s: float) -> ReceivedWeights:
        sync, member = self._announcement(version, deadline_s), self._member
        layout, owner, damaged = sync.assembly.layout, sync.delivery.owner(self._rank), None
        slots: list[Tensor] = []  # of the owner, once they are opened; else its own
        with member.sync(sync, deadline_s) as rendezvous:
            copy = torch.empty(layout.size_bytes, dtype=torch.uint8, device=member.device)
            buckets = [*sync.buckets()]
            for number, bucket in enumerate(buckets):
                if owner is None:
                    slots = slots or [*sync.slots(member.device)]
                    data = slots[number % _SHARED][: bucket.size_bytes]
                    member.broadcast(data, bucket.owner, deadline_s)
                else:
                    self._open(rendezvous, number, owner_of("actor", owner), deadline_s, slots)
                    data = slots[number % _SHARED][: bucket.size_bytes]
                bucket.copy_into(copy, data)
                member.synchronize(deadline_s, f"a bucket of {owner_of('actor', bucket.owner)}")
                if sync.push.checked and not bucket.is_whole(data):
                    damaged = bucket.owner  # the rest is taken even so: others wait for this rank
                if owner is not None:
                    if number == len(buckets) - 1:  # the owner is about to give its memory back
                        del data
                        slots.clear()
                    rendezvous.note(_taken(number, member.name), _COPIED)  # from here the owner overwrites it
        if damaged is not None:
            raise self._damaged(version, damaged, member.lacking(sync))
        tensors: dict[str, Any] = tensors_in(copy, layout)

        def give_back(loaded: bool) -> None:
            tensors.clear()  # the memory goes with them
            if loaded:
                member.rendezvous_at(sync.store).set_version(version)
            member.free_memory()

        return ReceivedWeights(
            version=version,
            tensors=tensors,
            partial=sync.push.partial,
            transports={member.transports[owner is None]: sum(spec.size_bytes for spec in layout.tensors)},
            give_back=give_back,
        )

    def _announcement(self, version: int, deadline_s: float) -> DevicePush:
        while True:
            sync = self._next(deadline_s)
            if not isinstance(sync, DevicePush):
                raise self._unexpected("a push of device tensors", sync)
            arrived = sync.push.version
            if arrived == version:
                return sync
            self._member.rendezvous_at(sync.store).refuse(sync.round, f"asked for version {version}, not {arrived}")
            if arrived > self._given_up:
                raise self._other_version(arrived, version)

    def _open(
        self, rendezvous: SyncRendezvous, number: int, owner: str, deadline_s: float, slots: list[Tensor]
    ) -> None:
        """Wait for the next bucket; open the slot in the owner's memory that it lies in, the first time.

        Raises RuntimeError if there are no more, WeightSyncError.
        """
        note = rendezvous.read(_shared(number, rendezvous.me), owner, deadline_s=deadline_s)
        if note == _BROKE_OFF:
            raise RuntimeError(f"{owner} could not go on")
        if note == _AGAIN and len(slots) == _SHARED:
            return
        try:
            slots.append(open_shared(note))
        except (KeyError, OSError, TypeError, ValueError, WeightSyncError) as error:
            rendezvous.note(_taken(number, rendezvous.me), b"not opened")
            if isinstance(error, WeightSyncError):
                raise
            raise RuntimeError(f"the note of {owner} about its memory is damaged: {error!r}") from error
