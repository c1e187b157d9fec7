"""The Launcher contract: slots become workers that can be called, and every call of a worker ends."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.errors import WorkerError
from rlplace.placement.channels import ChannelLocation
from rlplace.placement.language.slots import Slot
from rlplace.workers.launch.host import Done, Failure, GroupSpec, Outcome


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

    def __str__(self) -> str:
        return (
            f"{sum(self.seconds.values()):.1f} s (" + ", ".join(f"{n} {s:.1f}" for n, s in self.seconds.items()) + ")"
        )


class Call(Future[Any]):
    """The result to come of one method call on one worker. Ends with a value or a WorkerError."""

    seconds = 0.0  # inside the method, on the worker's clock; known when the call has ended well
    failed_at_s = 0.0  # monotonic clock of the driver
    stopped = False  # it failed because its worker was stopped


class WorkerHandle(abc.ABC):
    """One started worker, as the driver holds it. Owns the calls that have not ended; thread-safe.

    A launcher's own subclass carries calls to the worker's WorkerHost and hands each Outcome to `settle`.
    """

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self._open: dict[Call, str] = {}  # with the method
        self._stopped = False
        self._lock = threading.Lock()

    def call(self, method: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Call:
        """Start a method. Calls run one after the other in the order given; after `close` every call fails."""
        call = Call()
        with self._lock:
            self._open[call] = method
            stopped = self._stopped
        if stopped:
            self.settle(call, _STOPPED)
        else:
            self._send(call, method, args, kwargs or {})
        return call

    def settle(self, call: Call, outcome: Outcome) -> None:
        """End a call. Only the first outcome counts."""
        with self._lock:
            method = self._open.pop(call, None)
        if method is None:
            return
        if isinstance(outcome, Done):
            call.seconds = outcome.seconds
            call.set_result(outcome.value)
            return
        call.failed_at_s, call.stopped = time.monotonic(), outcome is _STOPPED
        call.set_exception(failed(self.slot, method, outcome))

    def stop(self) -> None:
        """End the worker now, whatever it is doing, and fail its calls. Does not wait; idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            left = list(self._open)
        for call in left:
            self.settle(call, _STOPPED)
        self._end()

    @abc.abstractmethod
    def cancel(self) -> None:
        """Ask the worker to give up. Does not wait."""

    @abc.abstractmethod
    def where(self) -> Future[str]:
        """Ask what the worker is doing right now; answered beside a running call."""

    @abc.abstractmethod
    def _send(self, call: Call, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Carry the call to the worker. It is settled when the worker has answered or died."""

    @abc.abstractmethod
    def _end(self) -> None:
        """End the worker. Does not wait."""


_STOPPED = Failure(what="the worker was stopped")


def failed(slot: Slot, method: str, failure: Failure) -> WorkerError:
    error = WorkerError(
        component=slot.component,
        rank=slot.rank,
        node=slot.node,
        accelerators=slot.accelerators,
        method=method,
        what=failure.what,
        remote_traceback=failure.traceback,
        cause=failure.cause,
    )
    error.__cause__ = failure.cause
    return error


class Launcher(Protocol):
    """Starts the workers of a plan. Owns the processes, the channels and the accounts of one cluster."""

    def start(self, report: StartReport) -> None:
        """Reach the machines. Raises ClusterError. Idempotent."""
        ...

    def reserve(self, slots: Sequence[Slot], report: StartReport) -> None:
        """Take what `slots` use and keep it until `close`; called once.

        Blocks until it is free. Raises ClusterError, which names what is missing and where.
        """
        ...

    def launch(self, specs: Sequence[GroupSpec], report: StartReport) -> dict[str, tuple[WorkerHandle, ...]]:
        """Start the workers of all groups together and verify that they are where they should be; by name, then rank.

        Their constructors may still be running: one that raises fails the first call. Raises ClusterError, also for a
        slot outside of what is reserved.
        """
        ...

    def channel(self, spec: ChannelSpec, locations: Sequence[ChannelLocation]) -> Channel:
        """Make a channel that lives in `locations`; without any, on the driver's node. Returns the driver's end."""
        ...

    def forget(self, owner: str) -> None:
        """Release what a worker that ended held on its accelerators."""
        ...

    def describe(self) -> str: ...

    def close(self) -> None:
        """End everything that was started here. Idempotent and bounded in time."""
        ...
