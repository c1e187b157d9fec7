"""Signals that end a run: Ctrl-C, and those of schedulers and closed terminals. After the first one, the run saves.

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
# Signals of schedulers, after which another attempt makes sense. After Ctrl-C or a closed terminal, none is wanted.
_OF_SCHEDULERS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
_TO_ALL = WARNINGS | {
    signal.SIGTERM
}  # signals that reach the other processes of a run, too
_OUTPUTS = (1, 2)  # descriptors of standard output and standard error


class Stopped(BaseException):
    """A signal asked the run to end.

    `exit_code`: exit code of the program, 128 plus the number of the signal. `by_scheduler`: whether the signal is one
    that schedulers send; a scheduler may start the run again.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        self.by_scheduler = number in _OF_SCHEDULERS


class Signals:
    """Turns signals that end a program into the exception Stopped.

    After Stopped was raised to end the run without saving, further signals have no effect. The run still ends, since
    all its waits then have deadlines.
    """

    def __init__(self) -> None:
        self.asked: int | None = None  # the first signal
        self.at_once = False  # whether the run ends without saving
        # Prints a message; called by the handler, which can interrupt any statement
        self.say: Callable[[str], object] = _write_error
        self._grace_s = 0.0
        self._cut = False  # whether the first half of the grace is over

    def listen(self) -> None:
        """Handle the signals of this process from now on. Does nothing outside of the main thread.

        Warning signals (SIGHUP, SIGUSR1, SIGUSR2) are handled only if they would end the process. So a signal that is
        ignored, as with `nohup`, stays ignored, and handlers of other programs stay.
        """
        if threading.current_thread() is threading.main_thread():
            for each in _STOPPING:
                if each not in WARNINGS or _would_end(each):
                    signal.signal(each, self._stop)
            signal.signal(signal.SIGALRM, self._out_of_patience)

    @contextlib.contextmanager
    def patient(self, grace_s: float) -> Iterator[None]:
        """Within the context, let the first signal only ask the run to end after its iteration and to save.

        `grace_s`: seconds from the signal in which the run has to end. After half of these seconds, Stopped is raised
        to end the iteration; after all of them, to end the saving. 0: the first signal raises Stopped at once.
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
        """Within the context, if a signal has ended the run without saving, raise Stopped in place of any other error.

        The exception Stopped can cause such errors, for example when it interrupts an import.
        """
        try:
            yield
        except Exception as error:
            if self.at_once:
                self.check()
            raise error

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal `number`, as the drawing in the module's docstring shows."""
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
        """End the iteration by Stopped after the first half of the grace, and the saving after the second half."""
        self.at_once = self._cut
        self._cut = True
        if not self.at_once:
            signal.setitimer(signal.ITIMER_REAL, self._grace_s / 2)
        self.check()


class _Deferral:
    """A signal handler that collects signals, and calls the program's own handlers for them later."""

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
        """Call the program's own handlers for the collected signals. If a handler raises, stop collecting signals."""
        if self._came:
            self.end()
            # No handler raised, so the deferral goes on
            for each in self._before:
                signal.signal(each, self)

    def end(self) -> None:
        """Restore the program's own handlers, and call them for the collected signals, in order.

        A handler that the program has set meanwhile is kept.
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
    """Within the context, collect signals; at its end, handle the collected signals.

    For calls of libraries that break if a signal handler raises during the call. Does nothing outside of the main
    thread, since other threads never run a signal handler.
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
    """Handle the collected signals now, within the context `deferred`. Call it where an exception does no harm.

    Does nothing outside of the main thread.
    """
    deferral = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if isinstance(deferral, _Deferral) and is_main:
        deferral.deliver()


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Within the context, keep SIGTERM and warning signals from started processes, and delay them for this process.

    A terminal and Slurm send these signals to all processes of a run. Ray itself shields its processes from Ctrl-C.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlast_sigterm() -> None:
    """Make SIGTERM have no effect in a process that was started within `blocked_signals`; only in the main thread.

    Threads that start processes should call `unblock_sigterm`.
    """
    blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if blocked and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: None)


def unblock_sigterm() -> None:
    """Let SIGTERM reach the processes that this thread starts, since SIGTERM is the usual way to end a process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))


def _would_end(number: int) -> bool:
    """Return whether the signal `number` would end this process, by default or by a `Signals` of an earlier run."""
    handler = signal.getsignal(number)
    owner = getattr(handler, "__self__", None)
    return handler == signal.SIG_DFL or isinstance(owner, Signals)


def _is_deferrable(number: int) -> bool:
    """Return whether the signal `number` has an effect and a handler that can be restored; a handler in C cannot."""
    return signal.getsignal(number) not in (signal.SIG_IGN, None)


def _leave_closed_outputs() -> None:
    """Redirect standard output and standard error to the null device if their terminal is gone.

    Without this, every write would fail, including the messages about saving.
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
    """Write `text` to standard error without `print`: the signal may have interrupted a `print`."""
    with contextlib.suppress(OSError):  # the terminal is gone
        descriptor = sys.__stderr__.fileno() if sys.__stderr__ else 2
        os.write(descriptor, text.encode())
