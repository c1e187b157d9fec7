"""Ctrl-C and SIGTERM: the first asks a run to end, which then has a while to save; the second ends it at once.

::

    outside `patient`    signal ──▶ Stopped
    inside               signal ──▶ asked ── the run sees it between two iterations, saves and ends
                                      ├── half of the grace is over ──▶ Stopped
                                      └── another signal ──▶ Stopped
    inside `held`        signal ──▶ waits for `let_in` or the end, then as above
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


class _Holding:
    """A handler that keeps signals."""

    def __init__(self) -> None:
        self._came: list[int] = []
        self._before = {each: signal.signal(each, self) for each in _STOPPING}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)

    def let_in(self) -> None:
        """Have the program's own handlers called for what came. They may raise."""
        came, self._came = self._came, []
        if came:
            self.end()
            signal.raise_signal(came[0])
            for each in _STOPPING:  # it has only asked
                signal.signal(each, self)

    def end(self) -> None:
        """Put the handlers back, unless the program has others meanwhile."""
        for each, handler in self._before.items():
            if signal.getsignal(each) is self:
                signal.signal(each, handler)
        for number in self._came[:1]:
            signal.raise_signal(number)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Have signals wait inside, for calls of libraries that break where a handler raises in their middle.

    Does nothing in other threads than the main one, which never run a handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    holding = _Holding()
    try:
        yield
    finally:
        holding.end()


def let_in() -> None:
    """Have signals that wait handled now, where raising does no harm."""
    holding = signal.getsignal(signal.SIGINT)
    if isinstance(holding, _Holding):
        holding.let_in()


def _write_error(text: str) -> None:
    """Write to stderr; print could be what the signal has interrupted."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
