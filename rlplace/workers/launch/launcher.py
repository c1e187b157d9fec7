"""The Launcher contract: slots become workers that can be called, and the calls of a worker always end."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from rlplace.comm.address import ChannelAddress
from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.errors import WorkerError
from rlplace.placement.channels import ChannelHome
from rlplace.placement.language.slots import Slot
from rlplace.placement.machines.topology import Topology
from rlplace.workers.launch.devices import Device, MemoryAccount
from rlplace.workers.launch.host import Birth, Done, Outcome
from rlplace.workers.worker import Worker


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """One worker group to be started."""

    name: str
    worker: type[Worker]
    config: Any
    slots: tuple[Slot, ...]  # by rank
    channels: Mapping[str, Channel]
    seed: int

    def birth(
        self,
        slot: Slot,
        device: Device,
        channels: Mapping[str, Channel | ChannelAddress] | None = None,
        folder: Path | None = None,
    ) -> Birth:
        """`channels`: how the slot's process reaches those of the order; None: it can use their ends as they are."""
        return Birth(
            worker=self.worker,
            config=self.config,
            slot=slot,
            world_size=len(self.slots),
            device=device,
            channels=self.channels if channels is None else channels,
            seed=self.seed,
            folder=folder,
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

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
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

    def channel(self, spec: ChannelSpec, homes: Sequence[ChannelHome]) -> Channel:
        """The driver's end of a new channel that lives in `homes`; without any, on the driver's node."""
        ...

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


class Call(Future[Any]):
    """The result to come of one call."""

    seconds = 0.0  # inside the method, on the worker's clock; known when the call has ended well


class OpenCalls:
    """The calls of one worker that have not ended. Thread-safe; each is ended once, by whoever takes it first."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._open: dict[Future[Any], str] = {}  # with the method
        self._ended: str | None = None
        self._lock = threading.Lock()

    def begin(self, method: str) -> Call:
        """A future for a new call; it has failed already when the worker has ended."""
        future = Call()
        with self._lock:
            ended = self._ended
            if ended is None:
                self._open[future] = method
        if ended is not None:
            future.set_exception(failed(self._slot, method, ended))
        return future

    def settle(self, future: Call, outcome: Outcome) -> None:
        method = self._take(future)
        if method is None:
            return
        if isinstance(outcome, Done):
            future.seconds = outcome.seconds
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
