"""Ctrl-C, and the signals of schedulers and closed terminals: the first asks a run to end, which then saves.

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

# A closed terminal or a dropped ssh; the warnings of Slurm, submitit and Grid Engine before a time limit.
WARNINGS = frozenset({signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
_STOPPING = (signal.SIGINT, signal.SIGTERM, *sorted(WARNINGS))
# What a scheduler sends. A person who presses Ctrl-C or closes a terminal wants no other attempt.
_OF_SCHEDULERS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
_TO_ALL = WARNINGS | {signal.SIGTERM}  # what other processes of a run get, too
_OUTPUTS = (1, 2)  # descriptors of what is printed


class Stopped(BaseException):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        self.by_scheduler = number in _OF_SCHEDULERS


class Signals:
    """Turn the signals that end a program into Stopped. After a Stopped that ends it at once, further ones do nothing.

    While a run ends, every wait of it is bounded.
    """

    def __init__(self) -> None:
        self.asked: int | None = None  # the first signal
        self.at_once = False  # nothing is to be saved any more
        # Called by the handler, which interrupts anything
        self.say: Callable[[str], object] = _write_error
        self._grace_s = 0.0
        self._cut = False  # half of it was over

    def listen(self) -> None:
        """Take the signals of this process from now on; only in the main thread.

        Warnings that are ignored stay so, as `nohup` has it, and those that others handle stay theirs.
        """
        if threading.current_thread() is threading.main_thread():
            for each in _STOPPING:
                if each not in WARNINGS or _would_end(each):
                    signal.signal(each, self._stop)
            signal.signal(signal.SIGALRM, self._out_of_patience)

    @contextlib.contextmanager
    def patient(self, grace_s: float) -> Iterator[None]:
        """Let the first signal inside only ask, for half of `grace_s`; 0: it stops at once."""
        self._grace_s = grace_s
        try:
            yield
        finally:
            self._grace_s = 0.0
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def check(self) -> None:
        """Raise Stopped if a signal has asked."""
        if self.asked is not None:
            raise Stopped(self.asked)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise Stopped for what fails after it was raised: it breaks imports, which then fail in ways of their own."""
        try:
            yield
        except Exception as error:
            if self.at_once:
                self.check()
            raise error

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_closed_outputs()
        first = self.asked is None
        self.asked = self.asked or number
        if not first and number != signal.SIGINT:
            return
        if first and self._grace_s:
            text = f"\n{signal.Signals(number).name}: ends after this iteration and saves, within {self._grace_s:g} s"
            again = "again" if number == signal.SIGINT else "Ctrl-C"
            text += f"; one that takes longer than {self._grace_s / 2:g} s is dropped; {again}: ends now\n"
            self.say(text)
            signal.setitimer(signal.ITIMER_REAL, self._grace_s / 2)
            return
        self.at_once = True
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for each in _STOPPING:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(self.asked)

    def _out_of_patience(self, number: int, frame: FrameType | None) -> None:
        """Cut the iteration; then, after the other half, what is being saved."""
        self.at_once = self._cut
        self._cut = True
        if not self.at_once:
            signal.setitimer(signal.ITIMER_REAL, self._grace_s / 2)
        self.check()


class _Deferral:
    """A handler that notes each signal, for the program's own handlers to be called later."""

    def __init__(self) -> None:
        self._came: list[int] = []
        self._before = {
            each: signal.signal(each, self)
            for each in _STOPPING
            if _is_deferrable(each)
        }

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
        _write_error(
            f"\n{signal.Signals(number).name}: taken after this step of the start\n"
        )

    def deliver(self) -> None:
        """Call the program's own handlers for what came. They may raise, which ends the deferral."""
        if self._came:
            self.end()
            for each in self._before:  # it has only asked
                signal.signal(each, self)

    def end(self) -> None:
        """Put the handlers back, unless the program has others meanwhile, and deliver what came, in order."""
        for each, handler in self._before.items():
            if signal.getsignal(each) is self:
                signal.signal(each, handler)
        came = self._came
        self._came = []
        for number in came:
            signal.raise_signal(number)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defer signals inside, for calls of libraries that break where a handler raises in their middle.

    Does nothing in other threads than the main one, which never run a handler.
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
    """Have deferred signals handled now, where raising does no harm. Does nothing outside of the main thread."""
    deferral = signal.getsignal(signal.SIGINT)
    if (
        isinstance(deferral, _Deferral)
        and threading.current_thread() is threading.main_thread()
    ):
        deferral.deliver()


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Start processes that SIGTERM and warnings do not reach: a terminal and Slurm send them to all processes of a run.

    Ray does so with Ctrl-C. One that comes meanwhile reaches this process afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlast_sigterm() -> None:
    """Have SIGTERM do nothing to this process if it was started with `blocked_signals`; only in the main thread.

    Call `unblock_sigterm` in each thread that starts processes.
    """
    blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if blocked and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: None)


def unblock_sigterm() -> None:
    """Let SIGTERM reach what this thread starts: such processes are often ended by it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))


def _would_end(number: int) -> bool:
    """Return whether a signal would end this process, or is taken by Signals of an earlier run in it."""
    handler = signal.getsignal(number)
    return handler == signal.SIG_DFL or isinstance(
        getattr(handler, "__self__", None), Signals
    )


def _is_deferrable(number: int) -> bool:
    """Return whether a signal does something, by a handler that can be put back: not by one of a C library."""
    return signal.getsignal(number) not in (signal.SIG_IGN, None)


def _leave_closed_outputs() -> None:
    """Print nowhere from now on where a terminal is gone: every write to it would fail, those of saving too."""
    watched = select.poll()
    for descriptor in _OUTPUTS:
        # Errors and the end of the terminal are told in any case
        watched.register(descriptor, 0)
    for descriptor, _ in watched.poll(0):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _write_error(text: str) -> None:
    """Write to stderr; print could be what the signal has interrupted."""
    with contextlib.suppress(OSError):  # a terminal that is gone
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
