"""A worker group as the driver sees it: call a method on all ranks, wait for several groups at once, fail as one.

::

    group.generate(3) ──▶ Pending ──┐
    group.run(3) ───────▶ Pending ──┴─ wait_all ──▶ results by rank
                                          │
            first failure of any rank ────┘  cancel its group and those waited for with it, break their channels,
                                             stop whoever does not react, raise the failure as one WorkerError
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlplace.comm.channel import Channel
from rlplace.errors import ChannelBroken, ChannelError, ClusterError, PlacementError, Problem, WorkerError, did_you_mean
from rlplace.placement.language.slots import PlacementStrategy, Slot
from rlplace.workers.launch import deadlines
from rlplace.workers.launch.launcher import Call, WorkerHandle
from rlplace.workers.worker import Worker

if TYPE_CHECKING:
    from rlplace.workers.launch.cluster import Cluster

WAIT_S = 600.0  # deadline of a wait that names none
GRACE_S = 2.0  # how long cancelled ranks may take to give up before they are stopped
CLOSE_S = 5.0  # how long ranks may take to close by themselves


class Pending:
    """The results to come of one call on several ranks. Waiting twice gives the same."""

    def __init__(self, group: WorkerGroup, method: str, calls: Mapping[int, Call]) -> None:
        self.group = group
        self.method = method
        self.calls = calls  # by rank, in the order the ranks were named

    def done(self) -> bool:
        return all(call.done() for call in self.calls.values())

    def seconds(self) -> list[float]:
        """What each rank spent inside the method, by its own clock, in the order of `wait`; once all have ended."""
        return [call.seconds for call in self.calls.values()]

    def wait(self, timeout_s: float = WAIT_S) -> list[Any]:
        """One result per rank, in rank order. Raises WorkerError; WorkerTimeout, after which one may wait again."""
        return wait_all([self], timeout_s)[0]


def wait_all(pending: Sequence[Pending], timeout_s: float = WAIT_S) -> list[list[Any]]:
    """The results of all, in order. The first failure fails them together: their groups are cancelled, it is raised.

    A group that failed raises the same error from then on. Raises WorkerTimeout when the deadline passes; nothing is
    cancelled then.
    """
    calls = [call for p in pending for call in p.calls.values()]
    done, waiting = concurrent.futures.wait(calls, timeout_s, concurrent.futures.FIRST_EXCEPTION)
    failed = [call for call in done if call.exception() is not None]
    if failed:
        raise _fail_together(pending, failed)
    if waiting:
        raise deadlines.passed(pending, timeout_s)
    return [[call.result() for call in p.calls.values()] for p in pending]


def _fail_together(pending: Sequence[Pending], failed: Sequence[concurrent.futures.Future[Any]]) -> BaseException:
    groups = list(dict.fromkeys(p.group for p in pending))
    for p in pending:
        for call in p.calls.values():
            if call in failed:
                p.group.ended(call)  # the future tells us before it tells the group
    for group in groups:
        group.cancel("a worker group it was waited for with failed")
    for group in groups:
        group.wait_settled()
    failures = [f for group in groups for f in group.failures.values()]
    if not failures:  # the groups were closed while we waited
        return failed[0].exception() or AssertionError("a call that failed has an exception")
    first = min(failures, key=_blame).error
    for group in groups:
        group.failure = first
    return first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    at_s: float  # monotonic clock
    error: WorkerError


def _blame(failed: _Failed) -> tuple[int, float]:
    """Smaller is likelier the root: a death explains its peers' errors, a broken channel is explained by others'."""
    error = failed.error
    died = error.cause is None and error.remote_traceback is None
    rank = 0 if died else 2 if isinstance(error.cause, ChannelBroken) else 1
    return rank, failed.at_s


class WorkerGroup:
    """All ranks of a component. Any public method of the worker class can be called on it; owns the group's failure."""

    def __init__(
        self,
        *,
        name: str,
        worker: type[Worker],
        handles: Sequence[WorkerHandle],
        channels: Mapping[str, Channel],
        forget: Callable[[str], None],
        grace_s: float = GRACE_S,
    ) -> None:
        self.name = name
        self.worker = worker
        self.channels = channels
        self.failure: WorkerError | None = None  # what every later call raises
        self.failures: dict[concurrent.futures.Future[Any], _Failed] = {}  # before the ranks were stopped
        self.handles = tuple(handles)
        self._forget = forget
        self._grace_s = grace_s
        self._open: set[concurrent.futures.Future[Any]] = set()
        self._lock = threading.Lock()
        self._cancelled = False
        self._stopped = False
        self._closed = False
        self._settled = threading.Event()

    @property
    def world_size(self) -> int:
        return len(self.handles)

    @property
    def closed(self) -> bool:
        """Whether its ranks have ended, by `close` or by a failure."""
        return self._closed or self._cancelled

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(handle.slot for handle in self.handles)

    def __getattr__(self, method: str) -> Callable[..., Pending]:
        return self._bound(method, range(self.world_size))

    def execute_on(self, *ranks: int | Iterable[int]) -> Ranks:
        """Only some ranks: `group.execute_on(0, 2).method(...)` or `group.execute_on([0, 2])`."""
        chosen = [r for item in ranks for r in ([item] if isinstance(item, int) else item)]
        wrong = [r for r in chosen if not 0 <= r < self.world_size]
        if wrong or not chosen:
            raise PlacementError([_no_such_rank(self.name, self.world_size, chosen, wrong)])
        return Ranks(self, tuple(dict.fromkeys(chosen)))

    def _bound(self, method: str, ranks: Sequence[int]) -> Callable[..., Pending]:
        if method.startswith("_") or not inspect.isfunction(getattr(self.worker, method, None)):
            raise _no_such_method(self.worker, method)

        def call(*args: Any, **kwargs: Any) -> Pending:
            return self._call(method, ranks, args, kwargs)

        return call

    def _call(self, method: str, ranks: Sequence[int], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Pending:
        if self.failure is not None:
            raise self.failure
        if self._closed or self._cancelled:
            raise _closed(self.name, method)
        calls = {rank: self.handles[rank].call(method, args, kwargs) for rank in ranks}
        with self._lock:
            self._open.update(calls.values())
        for call in calls.values():
            call.add_done_callback(self.ended)
        return Pending(self, method, calls)

    # ── failing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def ended(self, call: concurrent.futures.Future[Any]) -> None:
        """Takes note of how a call ended, once. Runs in whichever thread ended it, so it must not wait."""
        error = call.exception()
        with self._lock:
            self._open.discard(call)
            if not isinstance(error, WorkerError) or self._stopped or call in self.failures:
                return
            self.failures[call] = _Failed(at_s=time.monotonic(), error=error)
        self.cancel(str(error).partition("\n")[0])

    def cancel(self, why: str) -> None:
        """Winds the group down in the background: cancel, break its channels, wait a little, stop. Idempotent."""
        with self._lock:
            if self._cancelled or self._closed:
                return
            self._cancelled = True
        threading.Thread(target=self._wind_down, args=(why,), name=f"{self.name} winds down", daemon=True).start()

    def _wind_down(self, why: str) -> None:
        self._give_up(why)
        with self._lock:
            left = set(self._open)
        concurrent.futures.wait(left, self._grace_s)
        with self._lock:
            self._stopped = True
            if self.failure is None and self.failures:
                self.failure = min(self.failures.values(), key=_blame).error
        self._stop()

    def _give_up(self, why: str) -> None:
        for handle in self.handles:
            handle.cancel()
        for channel in self.channels.values():
            with contextlib.suppress(ChannelError):  # gone with the node that held it: as broken as can be
                channel.break_(why)

    def _stop(self) -> None:
        for handle in self.handles:
            handle.stop()
            self._forget(f"{self.name} rank {handle.slot.rank}")
        self._settled.set()

    def wait_settled(self) -> None:
        """Until a cancelled group's ranks are stopped."""
        if not self._settled.wait(deadlines.SETTLE_S):
            logging.getLogger("rlplace").warning(
                "%s: the ranks did not stop within %g s", self.name, deadlines.SETTLE_S
            )

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self, grace_s: float = CLOSE_S) -> None:
        """Closes and ends all ranks; running calls are cancelled. Idempotent."""
        close_all([self], grace_s)

    def _begin_close(self) -> list[concurrent.futures.Future[Any]]:
        with self._lock:
            if self._closed:
                return []
            self._closed = True
            cancelled, busy = self._cancelled, bool(self._open)
            self._stopped = True  # what fails from here on fails because of the end
        if cancelled:
            self.wait_settled()
            return []
        if busy:
            self._give_up(f"{self.name} was closed")
        return [handle.close() for handle in self.handles]

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "failed" if self.failure else "closed" if self._closed else "ready"
        return f"WorkerGroup({self.name}, {self.world_size} x {self.worker.__name__}, {state})"


def close_all(groups: Sequence[WorkerGroup], grace_s: float = CLOSE_S) -> None:
    """Closes several groups at once; they share one grace. A `close` that raises is logged, not raised."""
    closing = {group: group._begin_close() for group in groups}
    done, _ = concurrent.futures.wait([call for calls in closing.values() for call in calls], grace_s)
    for error in (call.exception() for call in done):
        if error is not None:
            logging.getLogger("rlplace").warning("while closing: %s", error)
    for group, calls in closing.items():
        if calls:
            group._stop()


class Ranks:
    """Some ranks of a group, to call methods on."""

    def __init__(self, group: WorkerGroup, ranks: tuple[int, ...]) -> None:
        self._group = group
        self._ranks = ranks

    def __getattr__(self, method: str) -> Callable[..., Pending]:
        return self._group._bound(method, self._ranks)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupBuilder:
    """A worker class and its config, on the way to a group."""

    worker: type[Worker]
    config: Any = None

    def launch(
        self,
        cluster: Cluster,
        *,
        name: str,
        placement_strategy: PlacementStrategy,
        channels: Mapping[str, Channel] | None = None,
        seed: int = 0,
        timeout_s: float | None = None,
    ) -> WorkerGroup:
        """Starts one process per slot and returns when all are set up. `name` is the component in errors.

        `cluster.launch_all` starts several groups at once; it says what is raised.
        """
        cluster.reserve()  # which groups will follow is not known
        launch = {name: (self, placement_strategy, channels or {})}
        return cluster.launch_all(launch, seed=seed, timeout_s=timeout_s)[name]


def _no_such_method(worker: type[Worker], method: str) -> AttributeError:
    known = [n for n, _ in inspect.getmembers(worker, inspect.isfunction) if not n.startswith("_")]
    near = did_you_mean(method, known)
    hint = f"did you mean {near!r}?" if near else "it has " + ", ".join(known)
    return AttributeError(f"{worker.__name__} has no method {method!r}; {hint}")


def _no_such_rank(name: str, world_size: int, chosen: Sequence[int], wrong: Sequence[int]) -> Problem:
    return Problem(
        code="no-such-rank",
        key=name,
        what=f"rank {wrong[0]} does not exist" if wrong else "no rank is named",
        got=f"execute_on({', '.join(map(str, chosen))})",
        why=f"the group has {world_size} rank{'s' if world_size > 1 else ''}, 0-{world_size - 1}",
        fix=f"execute_on({world_size - 1})",
    )


def _closed(name: str, method: str) -> ClusterError:
    return ClusterError(
        Problem(
            code="group-closed",
            key=name,
            what=f"{method} was called on a group that is closed",
            why="its workers have ended",
            fix="launch the group again",
        )
    )
