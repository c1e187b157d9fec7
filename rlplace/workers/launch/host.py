"""The worker's side of a call: create the workers of a process, run their methods, convert errors into values."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.comm.channel import Channel
from rlplace.comm.watchdog import report, view
from rlplace.errors import ChannelTimeout, RlplaceError
from rlplace.placement.language.slots import Slot
from rlplace.stopwatch import CallRecord, Recorder
from rlplace.workers.facts import JobFacts
from rlplace.workers.launch.construction import construct
from rlplace.workers.launch.devices import Device, cuda_out_of_memory
from rlplace.workers.launch.exchange import exchanged
from rlplace.workers.lending import Lending
from rlplace.workers.messages import Mailbox
from rlplace.workers.worker import Rendezvous, Worker, WorkerContext

if TYPE_CHECKING:
    from rlplace.comm.address import ChannelAddress, Place


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """All that is needed to create the workers of a group.

    `slots`: by rank. `channels`: channels that the workers may use, by name. `output`: folder for what the workers
    print; None: the output of their processes. `facts`: numbers of ranks and weight syncs of the job. `mailboxes`:
    those of all groups that were launched so far.
    """

    name: str
    worker: type[Worker]
    config: Any
    slots: tuple[Slot, ...]  # by rank
    channels: Mapping[str, Channel]
    # Folder for what the ranks print; None: the output of their processes
    output: Path | None = None
    facts: JobFacts | None = None
    mailboxes: tuple[Mailbox, ...] = ()  # of the groups launched so far


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """The outcome of a method that has returned `value`.

    `record`: times of the call; None if `close` was called on a host without a worker.
    """

    value: Any
    record: CallRecord | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The outcome of a method that has raised an error, or whose process has died.

    `what`: the error as a text. `traceback`: the traceback as a text; None if the process has died. `cause`: the error
    object; None if there is none, or if the failure was pickled and the error object cannot be unpickled.
    """

    what: str
    traceback: str | None = None
    cause: BaseException | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure for an error. Frames of this module at the beginning of the traceback are left out."""
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        lines = traceback.format_exception(type(error), error, frames)
        text = (
            str(error)
            if isinstance(error, RlplaceError)
            else f"{type(error).__name__}: {error}"
        )
        return cls(what=text, traceback="".join(lines), cause=error)

    def __reduce__(self) -> tuple[Any, ...]:
        return _revived, (self.what, self.traceback, self._pickled(pickle.dumps))

    def _pickled(self, dumps: Callable[[Any], bytes]) -> bytes:
        """Return the pickled `cause`, or the pickled None if every copy of the cause would fail to unpickle.

        `dumps`: the pickling function. First the exception itself is pickled; if unpickling fails, its class and
        attributes.
        """
        for way in (lambda cause: cause, _by_attributes):
            try:
                data = dumps(way(self.cause))
                pickle.loads(data)
            except Exception:  # noqa: BLE001 -- runs an arbitrary class's __reduce__ and constructor; the text is kept
                continue
            return data
        return pickle.dumps(None)

    def carried(self, dumps: Callable[[Any], bytes]) -> Failure:
        """Return an equal failure whose cause is already pickled with `dumps`, to be sent to the driver.

        `dumps`: a pickling function that supports more classes than `pickle.dumps`.
        """
        return _Carried(
            what=self.what, traceback=self.traceback, data=self._pickled(dumps)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Carried(Failure):
    """A Failure with an already pickled cause, on its way to the driver. `data`: the pickled cause."""

    data: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return _revived, (self.what, self.traceback, self.data)


class _ByAttributes:
    """Wrapper that pickles an exception as its class and attributes.

    Unpickling restores the exception without a call of its constructor, whose arguments are unknown.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        return _remade, (type(error), error.args, dict(vars(error)))


def _by_attributes(error: BaseException | None) -> object:
    return None if error is None else _ByAttributes(error)


def _remade(
    kind: type[BaseException], args: tuple[Any, ...], attributes: Mapping[str, Any]
) -> BaseException:
    error: BaseException = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


def _revived(what: str, text: str | None, cause: bytes) -> Failure:
    try:
        error = pickle.loads(cause)
    except Exception:  # noqa: BLE001 -- the class may not exist on this side; the text is kept anyway
        error = None
    return Failure(what=what, traceback=text, cause=error)


Outcome = Done | Failure
Request = tuple[str, tuple[Any, ...], Mapping[str, Any]]  # a method and its arguments


class WorkerHost:
    """Creates one worker and runs its methods, on the worker's side.

    The worker's thread calls `build` and `run`; any other thread may call `cancel` and `where`.
    """

    def __init__(self, *, shows_failures: bool = False) -> None:
        """Create a host without a worker; `build` creates the worker.

        `shows_failures`: whether tracebacks of failures are also written to standard error.
        """
        self._shows_failures = shows_failures
        self._worker: Worker | None = None
        self._context: WorkerContext | None = None
        # Why there is no worker; returned by every call
        self._failure: Failure | None = None
        # Thread and method of the running call
        self._running: tuple[int, str] | None = None
        self._cancelled = threading.Event()
        # The worker's ends of its channels, by name
        self._channels: dict[str, Channel] = {}
        self._place: Place | None = None
        # Types that stand for a channel in arguments
        self._kinds: tuple[type, ...] = (Channel,)

    def build(
        self,
        spec: GroupSpec,
        slot: Slot,
        device: Device,
        rendezvous: Rendezvous,
        folder: Path | None = None,
        lending: Lending | None = None,
        place: Place | None = None,
    ) -> None:
        """Create the worker. If this fails, nothing is raised: every later call returns the error as a Failure.

        `spec`: spec of the worker's group. `slot`: slot of the worker. `device`: the worker's accelerators.
        `rendezvous`: address where the group's ranks meet. `folder`: job folder in shared memory; None if all workers
        are threads. `lending`: object for calls between the workers of this process. `place`: location of this process,
        from which it connects to channel addresses; None if channels are passed as objects.
        """
        try:
            if place is not None:
                from rlplace.comm.address import ChannelAddress

                self._place = place
                self._kinds = (Channel, ChannelAddress)
            self._channels |= {
                name: end.named(slot.owner) for name, end in spec.channels.items()
            }
            self._context = WorkerContext(
                slot=slot,
                world_size=len(spec.slots),
                device=device,
                rendezvous=rendezvous,
                channels=self._channels,
                folder=folder,
                lending=lending or Lending(),
                cancelled=self._cancelled,
                facts=spec.facts,
            )
            # Free what an earlier worker of the same name left, which may have run on another machine than the
            # driver's.
            device.worker_ended()
            self.meet(spec.mailboxes)
            if spec.worker.with_tools:
                _show_log(self._context.log)
            self._worker = construct(spec.worker, spec.config, self._context)
        except BaseException as error:  # noqa: BLE001 -- the boundary of the process: it travels as a value
            self.refuse(error)

    def refuse(self, error: BaseException) -> None:
        """Make every later call return `error` as a Failure. Used instead of `build` if the worker cannot be
        created.
        """
        self._failure = self._failed(error)

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Run the methods of `requests` in order, and return their outcomes.

        Stop after the first failure, or if `cancel` was called; the list then has fewer outcomes than `requests`.
        """
        outcomes: list[Outcome] = []
        for method, args, kwargs in requests:
            if outcomes and (
                isinstance(outcomes[-1], Failure) or self._cancelled.is_set()
            ):
                break
            outcomes.append(self.call(method, args, kwargs))
        return outcomes

    def call(
        self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Outcome:
        """Run `method(*args, **kwargs)` of the worker, and return its outcome. An error is returned as a Failure.

        The method `close` also removes the worker, so that all later calls fail.
        """
        worker = self._worker
        context = self._context
        if method == "close":
            if worker is None:
                return Done(None)
            self._worker, self._failure = (
                None,
                Failure.of(RuntimeError("the worker is closed")),
            )
        elif self._failure is not None:
            return self._failure
        assert worker is not None, f"{method} was called before build"
        assert context is not None, "a worker has a context"
        self._running = (threading.get_ident(), method)
        recorder = Recorder(method)
        try:
            args, kwargs = self._received(args), self._received(dict(kwargs))
            worker._begin_call()
            with recorder:
                value = getattr(worker, method)(*args, **kwargs)
                if inspect.iscoroutine(value):
                    value = _ended(value)
            if method == "setup":
                worker._require_weights()
            elif method == "leave_plan":
                self._leave_channels()
            worker._end_call(method, value)
            return Done(value, recorder.record())
        except ChannelTimeout as late:
            # The channels are described before the failure breaks them.
            late.add_note(report(view(context.channels)) or "no other end waits")
            return self._failed(late)
        except BaseException as error:  # noqa: BLE001 -- the boundary of the process: it travels as a value
            full = cuda_out_of_memory(error, context.slot)
            return self._failed(
                error if full is None else full.with_traceback(error.__traceback__)
            )
        finally:
            if method == "close":
                context.opened.close()
            self._running = None

    # ── channels and messages ────────────────────────────────────────────────────────────────────────────────────────

    def _received(self, arguments: Any) -> Any:
        """Return the arguments of a call. Each channel or channel address in them is replaced by the worker's own
        channel end.
        """
        return exchanged(arguments, self._kinds, self._own_end)

    def _own_end(self, handed: Channel | ChannelAddress) -> Channel:
        """Return the worker's own end of the channel `handed`, and register this end under the channel's name."""
        assert self._context is not None, "a worker has a context"
        name = handed.spec.name
        known = self._channels.get(name)
        if known is not None and known.spec == handed.spec:
            return known
        end = self._end_of(handed)
        self._channels[name] = end
        return end

    def _leave_channels(self) -> None:
        """Forget the worker's channel ends, and release what they use. Only for a process with one worker."""
        self._channels.clear()
        if self._place is not None:
            self._place.ends.close()

    def _end_of(self, handed: Channel | ChannelAddress) -> Channel:
        assert self._context is not None, "a worker has a context"
        if not isinstance(handed, Channel):
            assert self._place is not None, "addresses come to a place"
            handed = handed.connect(self._place)
        return handed.named(self._context.owner)

    def meet(self, mailboxes: Sequence[Mailbox]) -> None:
        """Register the mailboxes of launched groups, so that the worker can send messages to these groups."""
        if self._context is not None:
            ends = exchanged(tuple(mailboxes), self._kinds, self._end_of)
            self._context.messages.meet(ends)

    def part(self, group: str, why: str) -> None:
        """Record that the group `group` has ended. `why`: the reason, for errors when the worker waits for its
        messages.
        """
        if self._context is not None:
            self._context.messages.part(group, why)

    def _failed(self, error: BaseException) -> Failure:
        failure = Failure.of(error)
        if self._shows_failures:
            sys.stderr.write(failure.traceback or failure.what)
        return failure

    def cancel(self) -> None:
        self._cancelled.set()

    def proceed(self) -> None:
        """Undo `cancel`, so that later methods run."""
        self._cancelled.clear()

    def where(self) -> str:
        """Return the running method and its source lines as a text, or "" if no method runs.

        Example: `generate, at rollout.py:83 in generate`.
        """
        if (running := self._running) is None:
            return ""
        frame = sys._current_frames().get(running[0])
        lines: list[str] = []
        while frame is not None and frame.f_code.co_filename != __file__:
            code = frame.f_code
            if not code.co_filename.startswith(os.path.dirname(threading.__file__)):
                lines.append(
                    f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
                )
            frame = frame.f_back
        # The worker's own line and the line that it called
        outermost = lines[-1:] + lines[-2:-1]
        if lines:
            return f"{running[1]}, at " + ", ".join(outermost)
        return running[1]


def _ended(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run `coroutine` in a new event loop until it ends, and return its result."""
    # Imported here: most processes do not need it.
    import asyncio

    return asyncio.run(coroutine)


def _show_log(log: logging.Logger) -> None:
    """Make the worker's logger write to standard error from level INFO on.

    Do nothing if this process has configured logging already.
    """
    if log.handlers or logging.getLogger().handlers:
        return
    lines = _ToStandardError()
    lines.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    log.propagate = False


class _ToStandardError(logging.Handler):
    """A log handler that looks up `sys.stderr` at each line. In a worker's thread, this stream is the worker's output
    file.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 -- as every handler of logging: a line that cannot be written fails nothing
            self.handleError(record)
