"""The Launcher contract: slots become workers that can be called; InlineLauncher makes them threads of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.comm.local import LocalChannel
from rlplace.errors import ClusterError, Problem, WorkerError
from rlplace.placement.slots import Slot
from rlplace.placement.topology import Topology
from rlplace.workers.devices import Account, CudaDevice, Device, EmulatedDevice, MemoryAccount
from rlplace.workers.host import Birth, Done, Outcome, WorkerHost
from rlplace.workers.worker import Rendezvous, Worker


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """One worker group to be started."""

    name: str
    worker: type[Worker]
    config: Any
    slots: tuple[Slot, ...]  # by rank
    channels: Mapping[str, Channel]
    seed: int

    def birth(self, slot: Slot, device: Device) -> Birth:
        return Birth(
            worker=self.worker,
            config=self.config,
            slot=slot,
            world_size=len(self.slots),
            device=device,
            channels=self.channels,
            seed=self.seed,
        )


@dataclasses.dataclass(slots=True)
class StartReport:
    """Where the start went, in seconds per phase, in order. Owned by the cluster."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def __str__(self) -> str:
        return f"{self.total_s:.1f} s (" + ", ".join(f"{n} {s:.1f}" for n, s in self.seconds.items()) + ")"


class WorkerHandle(Protocol):
    """One started worker, as the driver holds it."""

    @property
    def slot(self) -> Slot: ...

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Calls run one after the other in the order given. The future fails with WorkerError only; it always ends once
        the worker has died or was stopped."""
        ...

    def close(self) -> Future[Any]:
        """Like a call of the worker's `close`, after which every call fails."""
        ...

    def where(self) -> Future[str]:
        """What the worker is doing right now; answered beside a running call."""
        ...

    def cancel(self) -> None:
        """Tells the worker to give up. Does not wait."""
        ...

    def stop(self) -> None:
        """Ends the worker now, whatever it is doing, and fails its calls. Does not wait; idempotent."""
        ...


class Launcher(Protocol):
    """Starts what a plan says. Owns the processes, the channels and the accounts of one cluster."""

    def start(self, report: StartReport) -> None:
        """Reaches the machines. Raises ClusterError. Idempotent."""
        ...

    def reserve(self, slots: Sequence[Slot], report: StartReport) -> None:
        """Takes what `slots` use and keeps it until `close`; called once.

        Blocks until it is free. Raises ClusterError, which says what is missing and where.
        """
        ...

    def launch(self, orders: Sequence[GroupOrder], report: StartReport) -> dict[str, tuple[WorkerHandle, ...]]:
        """Workers of all groups, started together and verified to sit where they should; by name, then rank.

        Their constructors may still be running: one that raises fails the first call. Raises ClusterError, also for a
        slot outside of what is reserved.
        """
        ...

    def channel(self, spec: ChannelSpec) -> Channel: ...

    def forget(self, owner: str) -> None:
        """Releases what a worker that ended held on its accelerators."""
        ...

    def describe(self) -> str: ...

    def close(self) -> None:
        """Idempotent and bounded in time; nothing that was started here is left."""
        ...


def failed(slot: Slot, method: str, what: str, *, trace: str | None = None, cause: Any = None) -> WorkerError:
    error = WorkerError(
        component=slot.component,
        rank=slot.rank,
        node=slot.node,
        accelerators=slot.accelerators,
        method=method,
        what=what,
        remote_traceback=trace,
        cause=cause,
    )
    error.__cause__ = cause
    return error


class OpenCalls:
    """The calls of one worker that have not ended. Thread-safe; each is ended once, by whoever takes it first."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._open: dict[Future[Any], str] = {}  # with the method
        self._ended: str | None = None
        self._lock = threading.Lock()

    def begin(self, method: str) -> Future[Any]:
        """A future for a new call; it has failed already when the worker has ended."""
        future: Future[Any] = Future()
        with self._lock:
            ended = self._ended
            if ended is None:
                self._open[future] = method
        if ended is not None:
            future.set_exception(failed(self._slot, method, ended))
        return future

    def settle(self, future: Future[Any], outcome: Outcome) -> None:
        method = self._take(future)
        if method is None:
            return
        if isinstance(outcome, Done):
            future.set_result(outcome.value)
        else:
            future.set_exception(failed(self._slot, method, outcome.what, trace=outcome.traceback, cause=outcome.cause))

    def fail(self, future: Future[Any], what: str) -> None:
        """The call ended without an outcome: its process died."""
        method = self._take(future)
        if method is not None:
            future.set_exception(failed(self._slot, method, what))

    def end(self, what: str) -> bool:
        """Fails all calls, and those to come. Whether this was the first time."""
        with self._lock:
            if self._ended is not None:
                return False
            self._ended = what
            left, self._open = self._open, {}
        for future, method in left.items():
            future.set_exception(failed(self._slot, method, what))
        return True

    def _take(self, future: Future[Any]) -> str | None:
        with self._lock:
            return self._open.pop(future, None)


def memory_account(topology: Topology) -> MemoryAccount:
    return MemoryAccount([node.memory_bytes for node in topology.nodes for _ in range(node.accelerators)])


def open_rendezvous(host: str) -> socket.socket:
    """A listening socket on a free port of `host`. Rank 0 keeps it open, so no other process can take the port."""
    return socket.create_server((host, 0), backlog=1024)


class InlineLauncher:
    """One thread per worker in this process.

    Cancelling is cooperative: a worker that neither looks at `context.cancelled` nor waits on a channel goes on until
    its method returns, but nobody waits for it.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._account: Account = memory_account(topology)
        self._channels: list[Channel] = []
        self._handles: list[InlineWorker] = []

    def start(self, report: StartReport) -> None:
        """Nothing: this process runs already."""

    def reserve(self, slots: Sequence[Slot], report: StartReport) -> None:
        """Nothing: threads are always free."""

    def launch(self, orders: Sequence[GroupOrder], report: StartReport) -> dict[str, tuple[WorkerHandle, ...]]:
        _check_single(orders)
        with report.phase("workers"):
            return {order.name: tuple(self._make(order, slot) for slot in order.slots) for order in orders}

    def _make(self, order: GroupOrder, slot: Slot) -> InlineWorker:
        device: Device
        if self._topology.nodes[slot.node].kind == "cuda":
            device = CudaDevice(slot.local_accelerators[0] if slot.local_accelerators else 0)
        else:
            device = EmulatedDevice(self._account, slot)
        rendezvous = Rendezvous(host="127.0.0.1", port=0)
        if order.worker.needs_own_process:
            door = open_rendezvous("127.0.0.1")
            rendezvous = Rendezvous(host="127.0.0.1", port=door.getsockname()[1], listen_fd=door.detach())
        handle = InlineWorker(order.birth(slot, device), rendezvous)
        self._handles.append(handle)
        return handle

    def channel(self, spec: ChannelSpec) -> Channel:
        channel = LocalChannel(spec)
        self._channels.append(channel)
        return channel

    def forget(self, owner: str) -> None:
        self._account.release_all(owner)

    def describe(self) -> str:
        return f"threads of process {os.getpid()}"

    def close(self) -> None:
        for channel in self._channels:
            channel.break_("the cluster was closed")
        for handle in self._handles:
            handle.stop()
        self._channels.clear()
        self._handles.clear()


def _check_single(orders: Sequence[GroupOrder]) -> None:
    crowded = [o for o in orders if o.worker.needs_own_process and len(o.slots) > 1]
    if crowded:
        names = " and ".join(f"{o.name} ({len(o.slots)} ranks)" for o in crowded)
        raise ClusterError(
            Problem(
                code="inline-needs-one-rank",
                key="cluster.launcher",
                what=f"{names} cannot run as threads of one process",
                got="inline",
                why="a process can join only one process group, so each of these ranks needs a process of its own",
                fix=f"cluster.launcher=ray     (or one accelerator: cluster.component_placement.{crowded[0].name}=0)",
            )
        )


class InlineWorker:
    """A WorkerHandle whose worker is a thread with a mailbox."""

    def __init__(self, birth: Birth, rendezvous: Rendezvous) -> None:
        self._slot = birth.slot
        self._host = WorkerHost()
        self._calls = OpenCalls(birth.slot)
        self._mailbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._mailbox.put(lambda: self._host.build(birth, rendezvous))
        name = f"{birth.slot.component} rank {birth.slot.rank}"
        threading.Thread(target=self._work, name=name, daemon=True).start()

    @property
    def slot(self) -> Slot:
        return self._slot

    def _work(self) -> None:
        while (task := self._mailbox.get()) is not None:
            task()

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Future[Any]:
        return self._submit(method, lambda: self._host.call(method, args, kwargs))

    def close(self) -> Future[Any]:
        return self._submit("close", self._host.close)

    def _submit(self, method: str, work: Callable[[], Outcome]) -> Future[Any]:
        future = self._calls.begin(method)
        if not future.done():
            self._mailbox.put(lambda: self._calls.settle(future, work()))
        return future

    def where(self) -> Future[str]:
        future: Future[str] = Future()
        future.set_result(self._host.where())
        return future

    def cancel(self) -> None:
        self._host.cancel()

    def stop(self) -> None:
        self._host.cancel()
        if self._calls.end("the worker was stopped"):
            self._mailbox.put(self._host.close)  # once it gives up
            self._mailbox.put(None)
