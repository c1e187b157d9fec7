"""Ctrl-C and SIGTERM: the first asks a run to end, which then has a while to save; the second ends it at once.

::

    outside `patient`    signal ──▶ Stopped
    inside               signal ──▶ asked ── the run sees it between two iterations, saves and ends
                                      ├── half of the grace is over ──▶ Stopped
                                      └── another signal ──▶ Stopped
    inside `deferred`    signal ──▶ waits for `deliver_deferred` or the end; then all that came, as above
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Signals:
    """Turn SIGINT and SIGTERM into Stopped. Once it was raised for a second signal, more do nothing.

    While a run ends, every wait of it is bounded.
    """

    def __init__(self) -> None:
        self.asked: int | None = None  # the first signal
        self.at_once = False  # nothing is to be saved any more
        self.say: Callable[[str], object] = _write_error  # called by the handler, which interrupts anything
        self._grace_s = 0.0
        self._cut = False  # half of it was over

    def listen(self) -> None:
        """Take the signals of this process from now on; only in the main thread."""
        if threading.current_thread() is threading.main_thread():
            for each in _STOPPING:
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
        first, self.asked = self.asked is None, self.asked or number
        if first and self._grace_s:
            text = f"\n{signal.Signals(number).name}: ends after this iteration and saves, within {self._grace_s:g} s"
            text += f"; one that takes longer than {self._grace_s / 2:g} s is dropped; again: ends now\n"
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
        self.at_once, self._cut = self._cut, True
        if not self.at_once:
            signal.setitimer(signal.ITIMER_REAL, self._grace_s / 2)
        self.check()


class _Deferral:
    """A handler that notes each signal, for the program's own handlers to be called later."""

    def __init__(self) -> None:
        self._came: list[int] = []
        self._before = {each: signal.signal(each, self) for each in _STOPPING}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
        _write_error(f"\n{signal.Signals(number).name}: taken after this step of the start\n")

    def deliver(self) -> None:
        """Call the program's own handlers for what came. They may raise, which ends the deferral."""
        if self._came:
            self.end()
            for each in _STOPPING:  # it has only asked
                signal.signal(each, self)

    def end(self) -> None:
        """Put the handlers back, unless the program has others meanwhile, and deliver what came, in order."""
        for each, handler in self._before.items():
            if signal.getsignal(each) is self:
                signal.signal(each, handler)
        came, self._came = self._came, []
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
    if isinstance(deferral, _Deferral) and threading.current_thread() is threading.main_thread():
        deferral.deliver()


def _write_error(text: str) -> None:
    """Write to stderr; print could be what the signal has interrupted."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
