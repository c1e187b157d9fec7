"""Ctrl-C, and signals of schedulers and closed terminals: the first one asks a run to end, and the run saves first.

::

    outside `patient`    signal ──▶ Stopped
    inside               signal ──▶ asked ── the run sees it between two iterations, saves and ends
                                      ├── half of the grace is over ──▶ Stopped
                                      ├── Ctrl-C ──▶ Stopped
                                      └── any other signal ──▶ nothing: schedulers send several
    inside `deferred`    signal ──▶ waits for `deliver_deferred` or the end; then all that came, as above
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

# Sent by a closed terminal or a dropped ssh; by Slurm, submitit and Grid Engine as a warning before a time limit
WARNINGS = frozenset({signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
_STOPPING = (signal.SIGINT, signal.SIGTERM, *sorted(WARNINGS))
# Signals of schedulers, after which another attempt makes sense. Ctrl-C and a closed terminal mean that none is wanted.
_OF_SCHEDULERS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
_TO_ALL = WARNINGS | {
    signal.SIGTERM
}  # signals that reach the other processes of a run, too
_OUTPUTS = (1, 2)  # descriptors of standard output and standard error


class Stopped(BaseException):
    """A signal asked the run to end.

    `exit_code`: of the program. `by_scheduler`: whether a scheduler sent the signal, which may start the run again.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        self.by_scheduler = number in _OF_SCHEDULERS


class Signals:
    """Turns the signals that end a program into Stopped; after a Stopped that ends it at once, further signals do
    nothing.

    Every wait of a run that is ending has a deadline.
    """

    def __init__(self) -> None:
        self.asked: int | None = None  # the first signal
        self.at_once = False  # whether the run ends without saving
        # Prints a message; called by the handler, which can interrupt any statement
        self.say: Callable[[str], object] = _write_error
        self._grace_s = 0.0
        self._cut = False  # whether the first half of the grace is over

    def listen(self) -> None:
        """Handle the signals of this process from now on; does nothing outside of the main thread.

        Warning signals that are ignored stay ignored, as `nohup` needs it; other programs' handlers of them stay,
        too.
        """
        if threading.current_thread() is threading.main_thread():
            for each in _STOPPING:
                if each not in WARNINGS or _would_end(each):
                    signal.signal(each, self._stop)
            signal.signal(signal.SIGALRM, self._out_of_patience)

    @contextlib.contextmanager
    def patient(self, grace_s: float) -> Iterator[None]:
        """Inside, let the first signal only ask the run to end; it is Stopped after half of `grace_s`, at once
        for 0.
        """
        self._grace_s = grace_s
        try:
            yield
        finally:
            self._grace_s = 0.0
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def check(self) -> None:
        """Raise Stopped if a signal has asked the run to end."""
        if self.asked is not None:
            raise Stopped(self.asked)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise Stopped in place of errors that follow from a Stopped, such as those of an interrupted import."""
        try:
            yield
        except Exception as error:
            if self.at_once:
                self.check()
            raise error

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, as in the drawing of the module."""
        if number == signal.SIGHUP:
            _leave_closed_outputs()
        first = self.asked is None
        self.asked = self.asked or number
        if not first and number != signal.SIGINT:
            return
        if first and self._grace_s:
            name = signal.Signals(number).name
            again = "again" if number == signal.SIGINT else "Ctrl-C"
            text = f"\n{name}: ends after this iteration and saves, within {self._grace_s:g} s"
            text += f"; one that takes longer than {self._grace_s / 2:g} s is dropped; {again}: ends now\n"
            self.say(text)
            signal.setitimer(signal.ITIMER_REAL, self._grace_s / 2)
            return
        # End at once, undisturbed by further signals
        self.at_once = True
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for each in _STOPPING:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(self.asked)

    def _out_of_patience(self, number: int, frame: FrameType | None) -> None:
        """Interrupt the iteration after the first half of the grace, and saving after the second half."""
        self.at_once = self._cut
        self._cut = True
        if not self.at_once:
            signal.setitimer(signal.ITIMER_REAL, self._grace_s / 2)
        self.check()


class _Deferral:
    """A handler that collects signals, to call the program's own handlers later."""

    def __init__(self) -> None:
        self._came: list[int] = []
        # The program's handlers, by signal
        self._before = {}
        for each in _STOPPING:
            if _is_deferrable(each):
                self._before[each] = signal.signal(each, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
        _write_error(
            f"\n{signal.Signals(number).name}: taken after this step of the start\n"
        )

    def deliver(self) -> None:
        """Call the program's own handlers for the collected signals. They may raise, which ends the deferral."""
        if self._came:
            self.end()
            # No handler raised, so the deferral goes on
            for each in self._before:
                signal.signal(each, self)

    def end(self) -> None:
        """Restore the program's handlers, unless it has set others meanwhile, and deliver the collected signals in
        order.
        """
        for each, handler in self._before.items():
            if signal.getsignal(each) is self:
                signal.signal(each, handler)
        came = self._came
        self._came = []
        for number in came:
            signal.raise_signal(number)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defer signals inside, for library calls that break if a handler raises in their middle.

    Does nothing outside of the main thread, since other threads never run a handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferral = _Deferral()
    try:
        yield
    finally:
        deferral.end()


def deliver_deferred() -> None:
    """Handle deferred signals now, at a point where an exception does no harm. Does nothing outside of the main
    thread.
    """
    deferral = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if isinstance(deferral, _Deferral) and is_main:
        deferral.deliver()


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Inside, start processes that SIGTERM and warning signals do not reach, and delay these signals for this
    process.

    A terminal and Slurm send them to all processes of a run. Ray itself shields its processes from Ctrl-C.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlast_sigterm() -> None:
    """Make SIGTERM do nothing in a process that was started with `blocked_signals`; only in the main thread.

    Threads that start processes should call `unblock_sigterm`.
    """
    blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if blocked and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: None)


def unblock_sigterm() -> None:
    """Let SIGTERM reach the processes that this thread starts: it is the usual way to end them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))


def _would_end(number: int) -> bool:
    """Whether a signal would end this process, or is handled by Signals of an earlier run in the same process."""
    handler = signal.getsignal(number)
    owner = getattr(handler, "__self__", None)
    return handler == signal.SIG_DFL or isinstance(owner, Signals)


def _is_deferrable(number: int) -> bool:
    """Whether a signal has an effect, through a handler that can be restored; handlers of C libraries cannot."""
    return signal.getsignal(number) not in (signal.SIG_IGN, None)


def _leave_closed_outputs() -> None:
    """Redirect standard output and standard error to nowhere if their terminal is gone.

    Otherwise every write would fail, also the messages of saving.
    """
    watched = select.poll()
    for descriptor in _OUTPUTS:
        # No events: errors and the end of a terminal are reported in any case
        watched.register(descriptor, 0)
    for descriptor, _ in watched.poll(0):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _write_error(text: str) -> None:
    """Write to standard error without `print`, which may be what the signal has interrupted."""
    with contextlib.suppress(OSError):  # the terminal is gone
        descriptor = sys.__stderr__.fileno() if sys.__stderr__ else 2
        os.write(descriptor, text.encode())
