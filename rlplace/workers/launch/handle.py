"""The driver's handle of one worker: every call of it ends."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from rlplace.errors import WorkerError
from rlplace.placement.language.slots import Slot
from rlplace.workers.launch.host import Done, Failure, Outcome


class Call(Future[Any]):
    """The result to come of one method call on one worker. Ends with a value or a WorkerError."""

    seconds = 0.0  # inside the method, on the worker's clock; known when the call has ended well
    failed_at_s = 0.0  # monotonic clock of the driver
    stopped = False  # it failed because its worker was stopped


class WorkerHandle(abc.ABC):
    """One started worker, as the driver holds it. Owns the calls that have not ended; thread-safe.

    A subclass carries calls to the worker's WorkerHost and hands each Outcome to `settle`.
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
