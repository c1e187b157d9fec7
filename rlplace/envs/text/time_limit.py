"""Ends a computation that takes too much processor time, such as a pattern or a library with an odd answer."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

# Seconds after which a computation is ended again that has caught its end
_AGAIN_S = 0.5


class TooLong(BaseException):
    """A computation has taken too much time. No Exception, since some libraries catch each Exception."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Within the `with` statement, raise TooLong after so many seconds of processor time.

    There is no limit outside of the main thread of a process: Python runs no signal's handler there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
