"""How two workers of one process call each other: one lends an object while it waits, the other uses it in its thread.

::

    rollout   lend(decide) ─── waits ─────────────────────────────▶ goes on
    env            borrow() ──▶ decide, step, decide, step ... ──▶ returned
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from rlplace.errors import ChannelTimeout

_TICK_S = 0.1  # who waits looks this often whether it is cancelled


class Lent(Exception):
    """Raised from its cause where the lent object failed: the failure is that of the worker which lent it."""


class _Place:
    """What is lent in one process."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        # Lent, and not taken yet
        self.thing: Any = None
        # Of what is lent
        self.returned: threading.Event | None = None
        # Of the lent object
        self.failure: BaseException | None = None


class Lending:
    """The places of the processes that a launcher has here, by name."""

    def __init__(self) -> None:
        self._places: defaultdict[str, _Place] = defaultdict(_Place)
        self._lock = threading.Lock()

    def _place(self, process: str) -> _Place:
        with self._lock:
            return self._places[process]

    def lend(
        self,
        process: str,
        thing: object,
        *,
        owner: str,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        """Lend `thing` once; return when it was taken and given back. Once taken, it is waited for without a deadline.

        Raises what the object raised in the other thread; what `check` raises; ChannelTimeout if none takes it in time.
        """
        place = self._place(process)
        until = time.monotonic() + timeout_s
        returned = threading.Event()
        with place.changed:
            place.thing = thing
            place.returned = returned
            place.failure = None
            place.changed.notify_all()
            while place.thing is not None:
                try:
                    _wait(place, owner, process, until, timeout_s, check)
                except BaseException:
                    # Nobody can take it any more
                    place.thing = None
                    raise
        # Who has taken it gives it back also where it fails or is cancelled
        returned.wait()
        if place.failure is not None:
            raise place.failure

    @contextlib.contextmanager
    def borrow(
        self, process: str, *, owner: str, timeout_s: float, check: Callable[[], None]
    ) -> Iterator[Any]:
        """Take what is lent, and give it back in the end. `Lent` raised inside fails the lender with its cause.

        Raises what `check` raises, and ChannelTimeout if nothing is lent in time.
        """
        place = self._place(process)
        until = time.monotonic() + timeout_s
        with place.changed:
            while place.thing is None:
                _wait(place, owner, process, until, timeout_s, check)
            thing, returned, place.thing = place.thing, place.returned, None
            place.changed.notify_all()
        assert returned is not None, "it was set with the object"
        try:
            yield thing
        except Lent as lent:
            place.failure = lent.__cause__
            raise
        finally:
            returned.set()


def _wait(
    place: _Place,
    owner: str,
    process: str,
    until: float,
    timeout_s: float,
    check: Callable[[], None],
) -> None:
    """Sleep for a tick, or until something changes."""
    check()
    if time.monotonic() >= until:
        raise ChannelTimeout.about(
            "channel-timeout",
            owner,
            f"waited {timeout_s:.1f} s for the other worker of process {process}",
            why="both are called in the same stage and meet at its start; the other has not come",
            fix="runner.channel_timeout_s=<more>, if it is really this slow",
        )
    place.changed.wait(_TICK_S)
