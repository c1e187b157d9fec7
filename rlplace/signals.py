"""Signals that end a run: from Ctrl-C, schedulers and closed terminals. After the first signal, the run saves.

::

    outside `patient`    signal ──▶ Stopped
    inside               signal ──▶ asked ── the run sees it between two iterations, saves and ends
                                      ├── half of the grace is over ──▶ Stopped
                                      ├── Ctrl-C ──▶ Stopped
                                      └── any other signal ──▶ nothing: schedulers send several
    inside `deferred`    signal ──▶ waits for `deliver_deferred` or the end of the block, then is handled as above
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
# Signals of schedulers, after which another attempt makes sense. After Ctrl-C or a closed terminal, none is wanted.
_OF_SCHEDULERS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
_TO_ALL = WARNINGS | {
    signal.SIGTERM
}  # signals that reach the other processes of a run, too
_OUTPUTS = (1, 2)  # descriptors of standard output and standard error


class Stopped(BaseException):
    """Raised if a signal has asked the run to end.

    `number`: number of the signal. `exit_code`: exit code for the program, 128 plus this number. `by_scheduler`:
    whether schedulers send such a signal; a scheduler may start the run again.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.exit_code = 128 + number
        self.by_scheduler = number in _OF_SCHEDULERS


class Signals:
    """Turns signals that end a program into the exception Stopped.

    When Stopped is raised in a signal handler, the run ends without saving, and further signals have no effect. The run
    is certain to end, since all its waits have deadlines then.
    """

    def __init__(self) -> None:
        self.asked: int | None = None  # the first signal
        self.at_once = False  # whether the run ends without saving
        # Prints a message; called by the handler, which can interrupt any statement
        self.say: Callable[[str], object] = _write_error
        self._grace_s = 0.0
        self._cut = False  # whether the first half of the grace is over

    def listen(self) -> None:
        """Handle the signals of this process from now on. Outside of the main thread, do nothing.

        A warning signal (SIGHUP, SIGUSR1, SIGUSR2) is handled only if it would end the process. So a signal that is
        ignored, as with `nohup`, stays ignored, and a handler that other code has set stays in place.
        """
        if threading.current_thread() is threading.main_thread():
            for each in _STOPPING:
                if each not in WARNINGS or _would_end(each):
                    signal.signal(each, self._stop)
            signal.signal(signal.SIGALRM, self._out_of_patience)

    @contextlib.contextmanager
    def patient(self, grace_s: float) -> Iterator[None]:
        """Context manager in which the first signal only asks the run to finish its iteration, save, and end.

        `grace_s`: seconds from the signal to the end of the run. After half of these seconds, Stopped is raised to end
        the iteration; after all of them, Stopped is raised to end the saving. 0: the first signal raises Stopped
        immediately.
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
        """Context manager that replaces errors by Stopped, once a signal has ended the run without saving.

        The exception Stopped can cause other errors, for example when it interrupts an import. The user then sees
        Stopped instead of these errors.
        """
        try:
            yield
        except Exception as error:
            if self.at_once:
                self.check()
            raise error

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal `number`: ask the run to end, or raise Stopped. The module's docstring shows the cases."""
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
        """Handle the alarm at half of the grace period and at its end, by raising Stopped.

        At half of the period, Stopped ends the iteration, and the run saves. At the end, Stopped ends the saving.
        """
        self.at_once = self._cut
        self._cut = True
        if not self.at_once:
            signal.setitimer(signal.ITIMER_REAL, self._grace_s / 2)
        self.check()


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Context manager that restores the signal handlers of this process at its end, for a run in another program.

    Outside of the main thread it does nothing, since no run sets handlers there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.getsignal(each) for each in (*_STOPPING, signal.SIGALRM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            # None: a handler that was not set by Python
            if handler is not None:
                signal.signal(each, handler)


class _Deferral:
    """A signal handler that collects signals. Later it restores the previous handlers and calls them."""

    def __init__(self) -> None:
        self._came: list[int] = []
        # The program's handlers, by signal
        self._before = {}
        # The end of the grace is a signal too.
        for each in (*_STOPPING, signal.SIGALRM):
            if _is_deferrable(each):
                self._before[each] = signal.signal(each, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
        if number != signal.SIGALRM:
            _write_error(f"\n{signal.Signals(number).name}: taken after this step\n")

    def deliver(self) -> None:
        """Call the previous handlers for the collected signals, then go on collecting.

        If a handler raises an exception, collecting ends.
        """
        if self._came:
            self.end()
            # No handler raised, so the deferral goes on
            for each in self._before:
                signal.signal(each, self)

    def end(self) -> None:
        """Restore the previous handlers, and call them for the collected signals, in order.

        A handler that other code has set since then is kept.
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
    """Context manager that delays signals: they are collected, and handled at the end of the `with` block.

    Use it for library calls that break if a signal handler raises an exception during the call. Outside of the main
    thread it does nothing, since only the main thread runs signal handlers.
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
    """Within a `with deferred()` block, handle the signals that were collected so far.

    Call this function where an exception of a signal handler does no harm. Outside of the main thread, or without
    such a block, it does nothing.
    """
    deferral = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if isinstance(deferral, _Deferral) and is_main:
        deferral.deliver()


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Context manager that blocks SIGTERM and warning signals in this thread and in processes that are started in it.

    In this thread, a blocked signal is delivered after the `with` block. Started processes keep the signals blocked,
    since a terminal and Slurm send them to all processes of a run. Ray itself shields its processes from Ctrl-C.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlast_sigterm() -> None:
    """Make SIGTERM have no effect in this process, if it was started within `blocked_signals`.

    Outside of the main thread, do nothing. Threads that start processes should call `unblock_sigterm`.
    """
    blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if blocked and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: None)


def unblock_sigterm() -> None:
    """Unblock SIGTERM in this thread, so that SIGTERM can end the processes that this thread starts."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))


def _would_end(number: int) -> bool:
    """Return whether the signal `number` would end this process.

    True if the signal has its default action, or is handled by a `Signals` object of an earlier run.
    """
    handler = signal.getsignal(number)
    owner = getattr(handler, "__self__", None)
    return handler == signal.SIG_DFL or isinstance(owner, Signals)


def _is_deferrable(number: int) -> bool:
    """Return whether the signal `number` can be collected and handled later.

    False if the signal is ignored, or if its handler was not set by Python and so could not be restored.
    """
    return signal.getsignal(number) not in (signal.SIG_IGN, None)


def _leave_closed_outputs() -> None:
    """Redirect standard output and standard error to the null device if their terminal or reader is gone.

    Otherwise, every later write would fail, such as the messages about saving.
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
    """Write `text` to standard error without `print`, for signal handlers, which may interrupt a `print`."""
    with contextlib.suppress(OSError):  # the terminal is gone
        descriptor = sys.__stderr__.fileno() if sys.__stderr__ else 2
        os.write(descriptor, text.encode())
