"""A sync of device tensors as tests run it: actor ranks, readers with and without an owner, and through the host."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlplace.comm.channel import Channel
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.weights import device_sync
from rlplace.comm.weights.device_push import DevicePush
from rlplace.comm.weights.device_sync import (
    DeviceReceiver,
    DeviceSender,
    LoadedParts,
    WindowReceiver,
    WindowTaker,
)
from rlplace.comm.weights.host_sync import CopyReceiver, WeightSender
from rlplace.comm.weights.rendezvous import StoreAddress
from rlplace.comm.weights.version import WeightReceiver
from rlplace.placement.flow import Delivery, DeviceDelivery
from tests.contract.weight_ends import (
    PATIENCE_S,
    Weights,
    assert_equal_to_the_bit,
    held_by,
)

HOST = torch.device("cpu")
_LAG_S = 0.0005


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What takes part; sizes that leave buckets of several tensors and tensors of several buckets."""

    actors: int
    hosts: tuple[int | None, ...] = ()  # of takers 0, 1, ... on accelerators
    parts: tuple[
        int, ...
    ] = ()  # by reader on accelerators, how many takers it has; (): one each
    # Whether readers with one taker gather a whole copy; else they load windows
    whole: bool = True
    on_host: tuple[int, ...] = ()  # readers through the host
    bucket_bytes: int = 999
    window_bytes: int = 2000
    verify_every: int = 0
    device: torch.device = HOST

    @property
    def deliveries(self) -> tuple[Delivery, ...]:
        found: list[Delivery] = []
        if self.hosts:
            readers = tuple(range(len(self.parts or self.hosts)))
            found.append(
                DeviceDelivery(
                    readers=readers,
                    owners=self.hosts,
                    actors=self.actors,
                    parts=self.parts,
                    whole=self.whole,
                )
            )
        if self.on_host:
            found.append(Delivery(readers=self.on_host, near=tuple(range(self.actors))))
        return tuple(found)

    @property
    def readers(self) -> tuple[int, ...]:
        return (*range(len(self.parts or self.hosts)), *self.on_host)

    def sender(
        self, channel: Channel, rank: int, point: StoreAddress, folder: Path | None
    ) -> WeightSender:
        channel = channel.named(f"actor rank {rank}")
        return WeightSender(
            channel,
            rank=rank,
            deliveries=self.deliveries,
            folder=folder,
            verify_every=self.verify_every,
            device=DeviceSender(
                channel,
                rank=rank,
                device=self.device,
                store=point,
                bucket_bytes=self.bucket_bytes,
                window_bytes=self.window_bytes,
            ),
        )

    def receiver(
        self, channel: Channel, rank: int, folder: Path | None
    ) -> WeightReceiver:
        channel = channel.named(f"rollout rank {rank}")
        if rank in self.on_host:
            return CopyReceiver(channel, rank, folder=folder)
        parts = self.parts[rank] if self.parts else 1
        if parts > 1 or not self.whole:
            engine = CutEngine(parts, self.device)
            return WindowReceiver(channel, rank, load=engine.load_from)
        return DeviceReceiver(channel, rank, device=self.device)


def serve() -> tuple[Any, StoreAddress]:
    """The store lives as long as the first is kept."""
    store = dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    return store, StoreAddress(host="127.0.0.1", port=store.port)


class CutEngine:
    """Stands for an engine that loads windows: its processes are threads, and each keeps a copy of all it sees.

    A test finds that of the first among what came along.
    """

    def __init__(self, parts: int, device: torch.device) -> None:
        self._takers: list[WindowTaker] = []
        self._threads = [ThreadPoolExecutor(1) for _ in range(parts)]
        self._device = device
        # By process, as an engine has its weights: a later sync writes over them
        self._loaded: list[Weights] = [{} for _ in range(parts)]

    def load_from(self, sync: DevicePush, rank: int, deadline_s: float) -> LoadedParts:
        if not self._takers:
            for taker in sync.delivery.takers_of(rank):
                self._takers.append(
                    WindowTaker(
                        rank, taker.part, device=self._device, timeout_s=PATIENCE_S
                    )
                )
        each = zip(self._threads, self._takers, self._loaded, strict=True)
        taken = [
            thread.submit(self._take, taker, sync, deadline_s, loaded)
            for thread, taker, loaded in each
        ]
        first, *others = [future.result() for future in taken]
        for other in others:
            assert_equal_to_the_bit(other, first)
        size = sum(spec.size_bytes for spec in sync.assembly.layout.tensors)
        moved = sum(
            (Counter({taker.transport(sync): size}) for taker in self._takers),
            Counter[str](),
        )
        return LoadedParts(transports=moved, others=first)

    def _take(
        self, taker: WindowTaker, sync: DevicePush, deadline_s: float, loaded: Weights
    ) -> Weights:
        found: list[str] = []
        for window in taker.take(sync, deadline_s):
            found += window
            self._load(window, loaded)
            window.clear()
        return {name: loaded[name] for name in found}

    @staticmethod
    def _load(window: Weights, loaded: Weights) -> None:
        for name, tensor in window.items():
            if name in loaded and loaded[name].shape == tensor.shape:
                loaded[name].copy_(tensor)
            else:
                loaded[name] = tensor.clone()


class Grown(TorchDispatchMode):
    """Watches the tensors that this thread makes in the block: the most bytes that they had together."""

    most = 0

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Memory that comes by the arguments was counted before, or is of others
        given = {StorageWeakRef(t.untyped_storage()) for t in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if StorageWeakRef(storage) not in given and not tensor.is_meta:
                self._made[StorageWeakRef(storage)] = storage.nbytes()
        self.most = max(self.most, self.live)
        return made

    @property
    def live(self) -> int:
        """Bytes of the tensors that are still there."""
        found = {ref: size for ref, size in self._made.items() if not ref.expired()}
        self._made = found
        return sum(found.values())


def _tensors(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class Ends:
    """All ranks of a mixture in this process, each with a thread of its own."""

    def __init__(
        self, mixture: Mixture, channel: Channel, point: StoreAddress, folder: Path
    ) -> None:
        self.mixture = mixture
        self.senders = [
            mixture.sender(channel, rank, point, folder)
            for rank in range(mixture.actors)
        ]
        self.receivers = {
            rank: mixture.receiver(channel, rank, folder) for rank in mixture.readers
        }
        self._pulling = {rank: ThreadPoolExecutor(1) for rank in mixture.readers}
        self._pushing = [ThreadPoolExecutor(1) for _ in self.senders]

    def push(self, version: int, tensors: Weights) -> list[Future[dict[str, int]]]:
        return [
            thread.submit(
                sender.push, version, held_by(rank, self.mixture.actors, tensors)
            )
            for rank, (sender, thread) in enumerate(
                zip(self.senders, self._pushing, strict=True)
            )
        ]

    def pull(
        self,
        version: int,
        load: Callable[[Mapping[str, torch.Tensor]], Any],
        ranks: Sequence[int] | None = None,
    ) -> dict[int, Future[Any]]:
        """`load` of each rank's tensors while they are valid."""
        return {
            rank: self._pulling[rank].submit(self._pull, rank, version, load)
            for rank in (self.mixture.readers if ranks is None else ranks)
        }

    def _pull(
        self, rank: int, version: int, load: Callable[[Mapping[str, torch.Tensor]], Any]
    ) -> Any:
        with self.receivers[rank].pull(version) as received:
            return load(received.tensors), dict(received.transports)

    def close(self) -> None:
        for thread in (*self._pushing, *self._pulling.values()):
            thread.shutdown()
        for end in (*self.senders, *self.receivers.values()):
            end.close()


@contextmanager
def ends_of(mixture: Mixture, channel: Channel, folder: Path) -> Iterator[Ends]:
    store, point = serve()
    ends = Ends(mixture, channel, point, folder)
    try:
        yield ends
    finally:
        ends.close()
        del store


class Stream:
    """What a thread has given a GPU to do; done in order, later. A mark in it is reached when all before it is done."""

    def __init__(self) -> None:
        self._given: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1)

    def give(self, work: Callable[[], object], lag_s: float) -> Future[None]:
        """Work that raises RuntimeError never ends, as that of NCCL where a member has gone."""
        done: Future[None] = Future()
        self._given.append(done)

        def carry_out() -> None:
            time.sleep(lag_s)
            with suppress(RuntimeError, InvalidStateError):
                work()
                done.set_result(None)

        self._thread.submit(carry_out)
        return done

    def mark(self) -> Marked:
        return Marked(tuple(self._given))

    def drop(self) -> None:
        """End what is under way, and go on behind it."""
        self._thread.shutdown(wait=False)
        self._thread = ThreadPoolExecutor(1)


@dataclasses.dataclass(frozen=True, slots=True)
class Marked:
    before: tuple[Future[None], ...]

    def query(self) -> bool:
        return all(work.done() for work in self.before)


class Lagging:
    """A group as NCCL's is: a broadcast is only begun, its `wait` orders streams, and one that fails never ends."""

    def __init__(self, group: Any, stream: Stream) -> None:
        self._group, self._stream = group, stream
        self._works: list[Future[None]] = []

    def broadcast(self, bucket: torch.Tensor, root: int) -> Lagging:
        self._works.append(
            self._stream.give(
                lambda: self._group.broadcast(bucket, root=root).wait(), _LAG_S
            )
        )
        return self

    def wait(self) -> None:
        """Return at once."""

    def abort(self) -> None:
        self._group.abort()
        for work in self._works:
            if not work.done():
                work.set_exception(RuntimeError("aborted"))
        self._stream.drop()


@contextmanager
def lagging() -> Iterator[None]:
    """Have all that a GPU would do done later, on hosts: buckets are written and copied, and groups are Lagging ones.

    An owner lags more than its consumers: what it lends before it is written is read before, too.
    """
    streams, within = threading.local(), device_sync.within
    fill, copy_into = device_sync.DeviceBucket.fill, device_sync.DeviceBucket.copy_into

    def stream() -> Stream:
        if not hasattr(streams, "own"):
            streams.own = Stream()
        own: Stream = streams.own
        return own

    def join(deadline_s: float, work: Callable[[], Any], late: str) -> Lagging:
        return Lagging(within(deadline_s, work, late), stream())

    def later(work: Callable[..., None], lag_s: float) -> Callable[..., None]:
        def give(*given: Any, **named: Any) -> None:
            stream().give(lambda: work(*given, **named), lag_s)

        return give

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(device_sync, "within", join)
        patched.setattr(device_sync, "mark", lambda device: stream().mark())
        patched.setattr(device_sync.DeviceBucket, "fill", later(fill, 5 * _LAG_S))
        patched.setattr(device_sync.DeviceBucket, "copy_into", later(copy_into, _LAG_S))
        yield


def gpu_consumer(mixture: Mixture, folder: Path, version: int) -> tuple[Weights, str]:
    """Pulls once as reader 0 of a process of its own: the tensors on the host, and where they were."""
    receiver = mixture.receiver(
        SharedChannel.attach(folder / "weights.channel"), 0, folder
    )
    with receiver.pull(version) as received:
        loaded = {name: tensor.cpu() for name, tensor in received.tensors.items()}
        kinds = {tensor.device.type for tensor in received.tensors.values()}
    receiver.close()
    return loaded, kinds.pop()
