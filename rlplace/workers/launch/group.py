"""Workers as the driver sees them: call a method on all ranks, wait for several groups at once, fail as one.

::

    group.generate(3) ──▶ Pending ──┐
    group.run(3) ───────▶ Pending ──┴─ wait_all ──▶ results by rank
                                          │
            first failure of any rank ────┘  wind down its group and those waited for with it, raise one WorkerError

    between hold() and flush() nothing is sent; then each rank gets all its calls as one message, which ends as one

    wind down (in a thread of the group's own):
        cancel all ranks, break their channels ──▶ wait for their open calls, at most `grace_s` ──▶ stop all ranks
                                                        or, where lost ranks are replaced, only those still at work
"""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlplace.codes import problem
from rlplace.comm.channel import Channel
from rlplace.comm.watchdog import report, view
from rlplace.errors import (
    ChannelBroken,
    ChannelError,
    ChannelTimeout,
    ClusterError,
    PlacementError,
    WorkerError,
    WorkerMisuse,
    WorkerTimeout,
    did_you_mean,
)
from rlplace.placement.language.slots import PlacementStrategy, Slot
from rlplace.stopwatch import CallRecord
from rlplace.units import counted, plural
from rlplace.workers.launch.exchange import exchanged
from rlplace.workers.launch.host import Done, Failure, GroupSpec, Outcome, Request
from rlplace.workers.launch.output import output_file
from rlplace.workers.messages import Mailbox
from rlplace.workers.worker import Worker

if TYPE_CHECKING:
    from rlplace.workers.facts import JobFacts
    from rlplace.workers.launch.cluster import Cluster

WAIT_S = 600.0  # deadline of a wait that names none
GRACE_S = 2.0  # time for cancelled ranks to give up before they are stopped
GIVE_UP_S = 5.0  # the same if ranks that give up are kept: restarting a rank takes about as long
CLOSE_S = 5.0  # time for ranks to close by themselves
SETTLE_S = 30.0  # longest wait for a group to wind down; its parts have shorter limits
_ASK_S = 1.0  # time for a rank to answer where it is
_WAKE_S = 0.5  # longest wait between two checks for signals
_STOPPED = Failure(what="the worker was stopped")


class Call(concurrent.futures.Future[Any]):
    """The future result of one method call on one worker: a value or a WorkerError.

    `record`: the worker's times of the call. `failed_at_s`: time of the failure. `stopped`: the call failed only
    because its worker was stopped or an earlier call failed. `work`: if the worker dies during this call, errors name
    the call `work` of the same message instead; None: they name this call. `interrupt`: called about twice a second
    while the call is waited for; an error that it raises ends the wait.
    """

    # The worker's record of the call, set once the call has succeeded
    record: CallRecord | None = None
    failed_at_s = 0.0  # monotonic clock of the driver
    stopped = False  # it failed because its worker was stopped, or a call before it in its message failed
    # The call of the same message that stands for the worker's death in errors; None: this call
    work: Call | None = None
    # Called while the call is waited for; may raise an error, which ends the wait
    interrupt: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, slot: Slot, method: str) -> None:
        super().__init__()
        self.slot = slot
        self.method = method


# Takes the outcomes of a message's calls up to the first failure, or one Failure if the worker died.
Settle = Callable[[Sequence[Outcome] | Failure], None]


class WorkerHandle(abc.ABC):
    """The driver's handle of one started worker. None of its methods waits for the worker."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    @abc.abstractmethod
    def send(self, settle: Settle, requests: Sequence[Request]) -> None:
        """Send `requests` to the worker, which runs their methods in order, after the methods that were sent before.

        `settle`: called with the list of outcomes when the worker has answered, or with a Failure if the worker has
        died.
        """

    @abc.abstractmethod
    def where(self) -> concurrent.futures.Future[str]:
        """Ask the worker what it does. Return a future text: the running method and its source lines, or "" if no
        method runs.

        The worker answers while the method still runs.
        """

    @abc.abstractmethod
    def cancel(self) -> None:
        """Ask the worker to end its running method early, with an error."""

    @abc.abstractmethod
    def proceed(self) -> concurrent.futures.Future[None]:
        """Tell the worker that `cancel` no longer holds, so that it runs methods again.

        Return a future that is done when the worker has been told.
        """

    def meet(self, mailboxes: Sequence[Mailbox]) -> concurrent.futures.Future[None]:
        """Give the worker the mailboxes of launched groups, so that it can send messages to these groups.

        Return a future that is done when the worker has been told.
        """
        told: concurrent.futures.Future[None] = concurrent.futures.Future()
        told.set_result(None)
        return told

    def part(self, group: str, why: str) -> None:  # noqa: B027 -- a worker without messages ignores it
        """Tell the worker, even while a method runs, that the group `group` has ended. `why`: the reason, for
        errors.
        """

    @abc.abstractmethod
    def end(self) -> None:
        """Stop the worker at once, and release its memory on its accelerators. A second call does nothing."""


def failed(
    slot: Slot, method: str, failure: Failure, output: Path | None
) -> WorkerError:
    """Return the WorkerError for a call of `method` that has failed at the rank of `slot`.

    `output`: folder with the output files of workers; None if there are none.
    """
    file = output_file(output, slot)
    error = WorkerError(
        component=slot.component,
        rank=slot.rank,
        node=slot.node,
        accelerators=slot.accelerators,
        method=method,
        what=failure.what,
        remote_traceback=failure.traceback,
        cause=failure.cause,
        output=None if file is None else str(file),
    )
    error.__cause__ = failure.cause
    return error


class Pending:
    """The future results of one method that was called on several ranks of a group.

    `wait` may be called several times, and returns the same results each time.
    """

    def __init__(self, group: WorkerGroup, calls: Sequence[Call]) -> None:
        self.group = group
        # In the order in which the ranks were named
        self.calls = calls

    def done(self) -> bool:
        return all(call.done() for call in self.calls)

    def failed(self) -> bool:
        """Return whether one of the calls has failed."""
        return any(call.done() and call.exception() for call in self.calls)

    def seconds(self) -> list[float]:
        """Return how many seconds each rank spent in the method, by the rank's own clock, in the order of the results
        of `wait`.

        Valid when all calls have ended. The value is 0 for a rank whose time is unknown.
        """
        return [call.record.seconds if call.record else 0.0 for call in self.calls]

    def wait(self, timeout_s: float = WAIT_S) -> list[Any]:
        """Wait until all ranks have ended the method, at most `timeout_s` seconds, and return one result per rank.

        Raise WorkerError if a rank fails, WorkerTimeout at the deadline. After a WorkerTimeout, `wait` may be called
        again.
        """
        return wait_all([self], timeout_s)[0]

    def fail_late(self, failure: Failure) -> None:
        """Let each call that has no result yet fail with `failure`, as if its worker had died."""
        with self.group._lock:
            for call in self.calls:
                if not call.done():
                    self.group.fail(call, failure)


def wait_all(pending: Sequence[Pending], timeout_s: float = WAIT_S) -> list[list[Any]]:
    """Wait until all calls in `pending` have ended. Return one list of results for each element of `pending`, in rank
    order.

    If a call fails, cancel the groups of all these calls, and raise the failure that most likely caused all others.
    Later calls of these groups raise the same error. Raise WorkerTimeout after `timeout_s` seconds, without cancelling.
    """
    calls = [call for p in pending for call in p.calls]
    wait_until(calls, timeout_s, concurrent.futures.FIRST_EXCEPTION)
    done = [call for call in calls if call.done()]
    if any(call.exception() is not None for call in done):
        raise _fail_together(list(dict.fromkeys(p.group for p in pending)), calls)
    if len(done) < len(calls):
        raise deadline_passed(pending, timeout_s)
    return [[call.result() for call in p.calls] for p in pending]


def wait_until(calls: Sequence[Call], timeout_s: float, until: str) -> None:
    """Wait for calls, at most `timeout_s` seconds, like `concurrent.futures.wait`.

    `until`: FIRST_COMPLETED, FIRST_EXCEPTION or ALL_COMPLETED of `concurrent.futures`; any of them also ends the wait
    at the first exception. The wait wakes at short intervals, because the main thread handles signals only when it is
    awake; then it also calls `interrupt` of the calls, and raises the error that this raises.
    """
    end = time.monotonic() + timeout_s
    while True:
        left_s = end - time.monotonic()
        done, others = concurrent.futures.wait(calls, min(left_s, _WAKE_S), until)
        if (
            not others
            or left_s <= _WAKE_S
            or (done and until == concurrent.futures.FIRST_COMPLETED)
        ):
            return
        if any(call.exception() is not None for call in done):
            return
        for interrupt in dict.fromkeys(call.interrupt for call in calls):
            interrupt()


def _fail_together(
    groups: Sequence[WorkerGroup], calls: Sequence[Call]
) -> BaseException:
    """Cancel all groups and wait until they have ended. Return the failure that most likely caused all others.

    Later calls of these groups raise this failure. `calls`: the calls that were waited for; at least one of them has
    failed.
    """
    # Asked before the calls are given up: what the others did when a worker waited in vain
    at_work = ""
    if any(_waited_in_vain(call) for call in calls):
        at_work = "; ".join(_places(_others_at_work(groups, calls)))
    for group in groups:
        group.cancel("a worker group it was waited for with failed")
    for group in groups:
        group.wait_wound_down()
    failed = [call for call in calls if call.done() and call.exception() is not None]
    first = _blamed(
        [*failed, *(call for group in groups for call in group.failed_calls)]
    )
    # The groups were closed during the wait.
    if first is None:
        return failed[0].exception() or AssertionError(
            "a call that failed has an exception"
        )
    if at_work and isinstance(first.cause, ChannelTimeout):
        what = f"{first.what}\n  meanwhile at work: {at_work}"
        first = dataclasses.replace(first, what=what)
        first.__cause__ = first.cause
    for group in groups:
        if not group._closed:
            group.failure = first
    return first


def _others_at_work(
    groups: Iterable[WorkerGroup], calls: Sequence[Call]
) -> list[WorkerHandle]:
    """Return the workers of `groups` that run one of `calls`, without those of which a call has failed."""
    failed = {call.slot for call in calls if call.done() and call.exception()}
    running = {call.slot for call in _running(calls)} - failed
    by_name = {group.name: group for group in groups}
    places = sorted((slot.component, slot.rank) for slot in running)
    return [by_name[component].handles[rank] for component, rank in places]


def _waited_in_vain(call: Call) -> bool:
    """Return whether a call has failed because a wait in a channel passed its deadline."""
    if not call.done():
        return False
    error = call.exception()
    return isinstance(error, WorkerError) and isinstance(error.cause, ChannelTimeout)


def _blamed(calls: Iterable[Call]) -> WorkerError | None:
    """Return the failure that most likely caused all others; None if all failed calls failed only because their workers
    were stopped.

    This is the earliest death of a worker; if no worker died, the earliest error that is not a broken channel; if there
    is none, the earliest broken channel.
    """
    found: list[tuple[int, float, WorkerError]] = []
    for call in calls:
        error = call.exception()
        if isinstance(error, WorkerError) and not call.stopped:
            died = error.cause is None and error.remote_traceback is None
            found.append(
                (
                    0 if died else 2 if isinstance(error.cause, ChannelBroken) else 1,
                    call.failed_at_s,
                    error,
                )
            )
    if found:
        return min(found, key=lambda entry: entry[:2])[2]
    return None


def gave_up(error: BaseException | None) -> bool:
    """Return whether `error` only says that a worker stopped waiting on a channel. Such a worker needs no restart."""
    return isinstance(error, WorkerError) and isinstance(
        error.cause, (ChannelBroken, ChannelTimeout)
    )


def first_failure_s(groups: Iterable[WorkerGroup]) -> float:
    """Return the time at which the first call of `groups` failed; if no call has failed, the present time.

    Times are in seconds of `time.monotonic()`.
    """
    return min(
        [
            time.monotonic(),
            *(call.failed_at_s for group in groups for call in group.failed_calls),
        ]
    )


def deadline_passed(pending: Sequence[Pending], timeout_s: float) -> WorkerTimeout:
    """Return the error for a wait for `pending` that has reached its deadline of `timeout_s` seconds.

    The error names the ranks that still work, their source lines, and the channels on which they wait. Asking the ranks
    takes about a second if they do not answer.
    """
    late: dict[Pending, list[int]] = {}
    running = _running(call for p in pending for call in p.calls)
    for p in pending:
        if ranks := [call.slot.rank for call in p.calls if call in running]:
            late[p] = ranks
    working = [
        f"{p.group.name} {plural(len(ranks), 'rank')} {','.join(map(str, sorted(ranks)))} in {p.calls[0].method}"
        for p, ranks in late.items()
    ]
    lines = _places(p.group.handles[r] for p, ranks in late.items() for r in ranks)
    waits = report(
        view(
            {name: channel for p in late for name, channel in p.group.channels.items()}
        )
    )
    blamed = next(iter(late))
    if waits:
        lines.append(waits)
    late_call = problem(
        "worker-deadline",
        f"{blamed.group.name}.{blamed.calls[0].method}",
        "still working: " + "; ".join(working),
        timeout_s=timeout_s,
        places="\n".join(lines),
    )
    return WorkerTimeout(late_call)


def _running(calls: Iterable[Call]) -> set[Call]:
    """Return the running call of each worker; its later calls have not begun."""
    first = dict[Slot, Call]()
    left = dict.fromkeys(call for call in calls if not call.done())
    for call in left:
        first.setdefault(call.slot, call.work if call.work in left else call)
    return set(first.values())


def _places(handles: Iterable[WorkerHandle]) -> list[str]:
    """Return lines that say in which method, and at which source lines, workers are. Takes `_ASK_S` at most."""
    asked = {handle: handle.where() for handle in handles}
    concurrent.futures.wait(asked.values(), _ASK_S)
    places: dict[str, list[str]] = {}
    for handle, answer in asked.items():
        place = "does not answer"
        if answer.done() and answer.exception() is None:
            place = answer.result() or "has not begun"
        places.setdefault(place, []).append(handle.slot.owner)
    return [f"{', '.join(owners)}: {place}" for place, owners in places.items()]


class WorkerGroup:
    """All ranks of a component.

    Each public method of the worker class can be called on the group: `group.method(args)` starts the method on all
    ranks and returns a Pending. A group ends by `close`. It also ends after a failure: running calls are cancelled, and
    the ranks are stopped. Thread-safe.

    `outlast`: what the other ranks do after a failure of one rank. "stop": they stop, as described above. "give up":
    they cancel their call. "end the call": they finish their call, if it does not need the failed rank. In the last two
    cases the ranks stay, and take calls again after `go_on`. `in_vain`: returns True if waiting for running calls is
    useless. `on_end`: called with the reason when the group ends.
    """

    outlast: Literal["stop", "give up", "end the call"] = "stop"
    patience_s = WAIT_S  # how long a running call may take to end
    _call_class: type[Call] = Call  # class of its calls
    # Returns True if waiting for running calls is useless.
    in_vain: Callable[[], bool] = staticmethod(lambda: False)
    # Called about twice a second while calls of the group are waited for; an error that it raises ends the wait.
    interrupt: Callable[[], None] = staticmethod(lambda: None)
    # Called with the reason when the group takes no more messages (closed or failed). Must not block.
    on_end: Callable[[str], None] = staticmethod(lambda why: None)

    def __init__(
        self, spec: GroupSpec, handles: Sequence[WorkerHandle], grace_s: float = GRACE_S
    ) -> None:
        self.name = spec.name
        self.worker = spec.worker
        # Channels that break with the group: those of its launch, and those that a call passed.
        self.channels: dict[str, Channel] = dict(spec.channels)
        self.output = spec.output
        # Raised by every later call
        self.failure: WorkerError | None = None
        # Failed calls, recorded until the group is closed
        self.failed_calls: list[Call] = []
        # Calls of ranks that did not give up in time
        self.late_calls: list[Call] = []
        self.handles = tuple(handles)
        self.grace_s = grace_s
        # Open calls, in the order in which they were sent
        self._open: dict[Call, None] = {}
        # Held calls by rank; None unless `hold` is active. Only the holding thread uses it.
        self._held: dict[int, list[tuple[Call, Request]]] | None = None
        # Guards the attributes below and the open calls above.
        self._lock = threading.RLock()
        self._winding_down: threading.Thread | None = None
        self._closed = self._stopped = False

    @property
    def world_size(self) -> int:
        return len(self.handles)

    @property
    def closed(self) -> bool:
        """Whether the group takes no more calls, because it was closed or a failure has ended its calls."""
        return self._closed or self._winding_down is not None

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(handle.slot for handle in self.handles)

    @property
    def accelerators(self) -> set[int]:
        """Global numbers of the accelerators that the ranks use in `setup`; empty if the class says that `setup` uses
        none.
        """
        return self.used_by(range(self.world_size))

    def used_by(self, ranks: Iterable[int]) -> set[int]:
        slots = [
            self.handles[rank].slot for rank in ranks if self.worker.uses_accelerators
        ]
        return {number for slot in slots for number in slot.accelerators}

    # ── calling ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def __getattr__(self, method: str) -> Callable[..., Pending]:
        return self._caller(method, range(self.world_size))

    def execute_on(self, *ranks: int | Iterable[int]) -> Ranks:
        """Return a selection of the group's ranks, on which methods can be called.

        Example: `group.execute_on(0, 2).method(...)`. `ranks`: numbers, or iterables of numbers. Raise PlacementError
        if a rank does not exist or no rank is named.
        """
        chosen = [
            r for item in ranks for r in ([item] if isinstance(item, int) else item)
        ]
        wrong = [r for r in chosen if not 0 <= r < self.world_size]
        if wrong or not chosen:
            error = "none"
            if wrong:
                error = "beyond"
            missing = problem(
                "no-such-rank",
                self.name,
                f"execute_on({', '.join(map(str, chosen))})",
                error=error,
                ranks=counted(self.world_size, "rank"),
                last=self.world_size - 1,
                rank=wrong[0] if wrong else None,
            )
            raise PlacementError([missing])
        return Ranks(self, tuple(dict.fromkeys(chosen)))

    def _caller(self, method: str, ranks: Sequence[int]) -> Callable[..., Pending]:
        """Return a function that starts the worker class's method `method` on `ranks` and returns a Pending.

        Raise AttributeError if the class has no public method of this name.
        """
        if method.startswith("_") or not inspect.isfunction(
            getattr(self.worker, method, None)
        ):
            known = [
                n
                for n, _ in inspect.getmembers(self.worker, inspect.isfunction)
                if not n.startswith("_")
            ]
            near = did_you_mean(method, known)
            hint = f"did you mean {near!r}?" if near else "it has " + ", ".join(known)
            raise AttributeError(
                f"{self.worker.__name__} has no method {method!r}; {hint}"
            )
        return functools.partial(self._call, method, ranks)

    def _call(
        self, method: str, ranks: Sequence[int], *args: Any, **kwargs: Any
    ) -> Pending:
        if self.failure is not None:
            raise self.failure
        if self._closed:
            raise ClusterError(problem("group-closed", self.name, method=method))
        exchanged((args, kwargs), (Channel,), self._keep_channel)
        return Pending(self, self._send(ranks, method, args, kwargs))

    def _keep_channel(self, channel: Channel) -> Channel:
        """Register a channel that was an argument of a call, so that the channel breaks when the group fails; return
        the channel.
        """
        with self._lock:
            self.channels = {**self.channels, channel.spec.name: channel}
        return channel

    def _send(
        self,
        ranks: Sequence[int],
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Call]:
        """Start a method on `ranks`, and return one Call per rank. If `hold` is active, `flush` starts the method
        later.

        Each rank runs its methods one after the other, in the order in which they were sent.
        """
        calls = [self._call_class(self.handles[rank].slot, method) for rank in ranks]
        for call in calls:
            call.interrupt = self.interrupt
        made = {
            rank: (call, (method, args, kwargs or {}))
            for rank, call in zip(ranks, calls, strict=True)
        }
        if self._held is None:
            self._start({rank: [one] for rank, one in made.items()})
        else:
            for rank, one in made.items():
                self._held.setdefault(rank, []).append(one)
        return calls

    def hold(self) -> None:
        """Collect all further calls instead of sending them, until `flush` or `drop`. A second call changes nothing."""
        self._held = {} if self._held is None else self._held

    def flush(self) -> None:
        """Send the calls that were collected since `hold`, all calls of a rank as one message, and send later calls at
        once again.

        The results of a message arrive together. If a call fails, the later calls of its message do not run. If a call
        cannot be pickled, raise the error of pickling and discard all collected calls.
        """
        held = self._held
        self._held = None
        self._start(held or {})

    def drop(self) -> None:
        """Discard the calls that were collected since `hold`, and send later calls at once again."""
        self._held = None

    def _start(self, messages: Mapping[int, Sequence[tuple[Call, Request]]]) -> None:
        """Send one message to each rank. `messages`: rank -> the calls of its message, each with its request."""
        calls = {
            rank: [call for call, _ in message] for rank, message in messages.items()
        }
        for sent in calls.values():
            work = next((call for call in sent if call.method != "move"), sent[0])
            for call in sent:
                call.work = None if call is work else work
        with self._lock:
            self._open.update(dict.fromkeys(itertools.chain(*calls.values())))
            # An earlier failure that no caller has awaited yet
            stopped = self._stopped or self._winding_down is not None
        try:
            for rank, message in messages.items():
                if stopped:
                    self._answered(calls[rank], ())
                else:
                    answered = functools.partial(self._answered, calls[rank])
                    self.handles[rank].send(
                        answered, [request for _, request in message]
                    )
        except BaseException:  # an argument that cannot be pickled: no call was sent
            with self._lock:
                for call in itertools.chain(*calls.values()):
                    self._open.pop(call, None)
            raise

    def _answered(
        self, calls: Sequence[Call], answer: Sequence[Outcome] | Failure
    ) -> None:
        """End all calls of a message.

        `answer`: the outcomes of the calls up to the first failure, or one Failure if the worker has died. Calls
        without an outcome did not run: they end as stopped. After a death, only the call that was running gets the
        Failure.
        """
        if isinstance(answer, Failure):
            self._settle(calls[0].work or calls[0], answer)
            answer = ()
        for at, call in enumerate(calls):
            self._settle(call, answer[at] if at < len(answer) else _STOPPED)

    def _settle(self, call: Call, outcome: Outcome) -> None:
        """End a call with its outcome. If the call has ended already, do nothing.

        Runs in the thread that has received the outcome, so it must not block. If a worker dies, this is called for
        each of its open calls, in any order. The first of these calls then ends the running call too, with the same
        Failure.
        """
        with self._lock:
            if call not in self._open:
                return
            died = (
                isinstance(outcome, Failure)
                and outcome is not _STOPPED
                and outcome.traceback is None
            )
            if died:
                first = next(other for other in self._open if other.slot == call.slot)
                if (at := first.work or first) is not call:
                    self._settle(at, outcome)
            del self._open[call]
            counts = (
                not isinstance(outcome, Done)
                and outcome is not _STOPPED
                and not self._closed
            )
            if counts:
                self.failed_calls.append(call)
        if isinstance(outcome, Done):
            call.record = outcome.record
            call.set_result(outcome.value)
            return
        error = failed(call.slot, call.method, outcome, self.output)
        call.failed_at_s = time.monotonic()
        call.stopped = outcome is _STOPPED
        call.set_exception(error)
        if counts:
            self.cancel(str(error).partition("\n")[0])

    # ── failing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def at_work(self) -> bool:
        return bool(self._open)

    def busy(self) -> dict[int, Call]:
        """Return the running call of each rank that runs a method, by rank.

        Ranks that are in `setup` are left out. Return an empty mapping for a closed group.
        """
        with self._lock:
            left = [] if self.closed else list(self._open)
        setting_up = {call.slot.rank for call in left if call.method == "setup"}
        return {
            call.slot.rank: call.work or call
            for call in reversed(left)
            if call.slot.rank not in setting_up
        }

    def fail(self, call: Call, failure: Failure) -> None:
        """End a call with `failure`, as if the call's worker had died. Do nothing if the call has ended already."""
        self._settle(call, failure)

    def cancel(self, why: str, patience_s: float | None = None) -> None:
        """Start a thread that ends the group after a failure: it cancels running calls, waits for their end, and stops
        the ranks.

        If the group outlasts failures, the ranks are not stopped. A second call does nothing.

        `why`: the reason, for errors. `patience_s`: in a group with `outlast` "end the call", the most seconds in which
        running calls may end before they are cancelled; None: the group's attribute `patience_s`.
        """
        with self._lock:
            if self.closed:
                return
            name = f"{self.name} winds down"
            self._winding_down = threading.Thread(
                target=self._wind_down, args=(why, patience_s), name=name, daemon=True
            )
            self._winding_down.start()
        self.on_end(why)

    def _wind_down(self, why: str, patience_s: float | None) -> None:
        stop = self.outlast == "stop"
        try:
            if self.outlast == "end the call":
                self._let_end(self.patience_s if patience_s is None else patience_s)
            self._give_up(why)
            concurrent.futures.wait(self._left(), self.grace_s)
            if self.failure is None:
                self.failure = _blamed(tuple(self.failed_calls))
        finally:
            if stop:
                self._stop()
            else:
                self.late_calls = self._left()
                for call in self.late_calls:
                    self._settle(call, _STOPPED)

    def _let_end(self, patience_s: float) -> None:
        """Wait until all running calls have ended, at most `patience_s` seconds.

        Return earlier if a call has failed, or if `in_vain` says that waiting is useless.
        """
        until = time.monotonic() + patience_s
        while (
            not (self.failed_calls or self.in_vain())
            and (left := self._left())
            and time.monotonic() < until
        ):
            concurrent.futures.wait(
                left, min(_ASK_S, patience_s), concurrent.futures.FIRST_EXCEPTION
            )

    def _left(self) -> list[Call]:
        with self._lock:
            return list(self._open)

    def lost(self) -> dict[int, Call]:
        """Return the ranks that must be restarted after a failure, each with its failed call.

        A rank is lost if its call did not end in time, or failed with an error other than a broken or late channel.
        Valid after `wait_wound_down`.
        """
        ended = [call for call in self.failed_calls if not gave_up(call.exception())]
        return {call.slot.rank: call for call in (*self.late_calls, *ended)}

    def go_on(self, handles: Mapping[int, WorkerHandle]) -> None:
        """Take calls again after a failure, in a group that outlasts failures.

        `handles`: rank -> handle of the restarted worker, for each rank that was lost.
        """
        self.handles = tuple(
            handles.get(rank, handle) for rank, handle in enumerate(self.handles)
        )
        concurrent.futures.wait(
            [handle.proceed() for handle in self.handles], _ASK_S * 5
        )
        self.failure = None
        self.failed_calls = []
        self.late_calls = []
        self._winding_down = None

    def _give_up(self, why: str) -> None:
        for handle in self.handles:
            handle.cancel()
        for channel in self.channels.values():
            # The node that held the channel is gone, so the channel is broken already.
            with contextlib.suppress(ChannelError):
                channel.break_(why)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            left = tuple(self._open)
        for call in left:
            self._settle(call, _STOPPED)
        for handle in self.handles:
            handle.end()

    def wait_wound_down(self) -> None:
        """Wait until the thread that `cancel` has started is done. Log a warning if this takes too long."""
        if self._winding_down is not None:
            longest_s = SETTLE_S + (
                self.patience_s if self.outlast == "end the call" else 0.0
            )
            self._winding_down.join(longest_s)
            if self._winding_down.is_alive():
                logging.getLogger("rlplace").warning(
                    "%s: its ranks did not stop within %g s", self.name, longest_s
                )

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self, grace_s: float = CLOSE_S) -> None:
        """Cancel running calls, call `close` on all ranks, and end the ranks. A second call does nothing.

        `grace_s`: the most seconds for `close` on the ranks.
        """
        close_all([self], grace_s)

    def _begin_close(self) -> list[Call]:
        """Start the method `close` on all ranks, and return its calls.

        Return an empty list if the group is closed already or has failed.
        """
        with self._lock:
            ended = self.closed
            # A failure from here on is a consequence of closing.
            self._closed = True
            busy = bool(self._open)
        if ended:
            self.wait_wound_down()
            return []
        self.on_end(f"{self.name} was closed")
        if busy:
            self._give_up(f"{self.name} was closed")
        self.drop()
        return self._send(range(self.world_size), "close")

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def close_all(groups: Sequence[WorkerGroup], grace_s: float = CLOSE_S) -> None:
    """Close several groups at the same time. An error in a worker's `close` is logged, not raised.

    `grace_s`: the most seconds for `close` on all ranks of all groups; then the ranks are stopped.
    """
    closing = {group: group._begin_close() for group in groups}
    done, _ = concurrent.futures.wait(
        [call for calls in closing.values() for call in calls], grace_s
    )
    for error in (call.exception() for call in done):
        if error is not None:
            logging.getLogger("rlplace").warning("while closing: %s", error)
    for group, calls in closing.items():
        if calls:
            group._stop()


def check_methods(worker: type[Worker]) -> None:
    """Raise WorkerMisuse if a public method of `worker` has a name that WorkerGroup uses for itself."""
    taken = set(dir(WorkerGroup)) - set(dir(Worker))
    for kind in worker.__mro__:
        if kind is Worker:
            return
        for name in vars(kind):
            if name in taken and not name.startswith("_"):
                raise WorkerMisuse(
                    problem("worker-method", f"{kind.__qualname__}.{name}", name=name)
                )


class Ranks:
    """Some ranks of a group. Each public method of the worker class can be called on them, as on the whole group."""

    def __init__(self, group: WorkerGroup, ranks: tuple[int, ...]) -> None:
        self._group = group
        self._ranks = ranks

    @property
    def accelerators(self) -> set[int]:
        return self._group.used_by(self._ranks)

    def __getattr__(self, method: str) -> Callable[..., Pending]:
        return self._group._caller(method, self._ranks)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupBuilder:
    """A worker class with its config, from which `launch` starts a group.

    `facts`: numbers of ranks and weight syncs of the job; None outside of a job. `kind`: class of the group that
    `launch` returns.
    """

    worker: type[Worker]
    config: Any = None
    facts: JobFacts | None = None
    kind: type[WorkerGroup] = WorkerGroup  # class of the group to make

    def launch(
        self,
        cluster: Cluster,
        *,
        name: str,
        placement_strategy: PlacementStrategy,
        channels: Mapping[str, Channel] | None = None,
    ) -> WorkerGroup:
        """Start one process per slot, and return the group when all workers are set up.

        `name`: name of the group, which is also the name of its component. `placement_strategy`: computes the slots.
        `channels`: the channels that the workers may use, by name; None: all channels that the cluster has made so far.
        These channels break when the group fails. Raise the errors of `Cluster.launch_all`, which name the group.
        """
        # Later groups are not known yet, so everything is reserved.
        cluster.reserve()
        used = cluster.channels if channels is None else channels
        launch = {name: (self, placement_strategy, used)}
        return cluster.launch_all(launch)[name]
