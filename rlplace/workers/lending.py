"""In-process calls between two workers: one lends an object while it waits, the other uses it in its own thread.

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

from rlplace.codes import problem
from rlplace.errors import ChannelTimeout

_TICK_S = 0.1  # interval at which a waiting worker checks for cancellation


class Lent(Exception):
    """Error of a borrower whose lent object has failed. Its `__cause__` is the original error, which the lender
    raises.
    """


class _Place:
    """The lending state of one process: workers of a process can lend one object at a time."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        # Lent and not yet taken
        self.thing: Any = None
        # Set when the lent object is returned
        self.returned: threading.Event | None = None
        # Error of the lent object
        self.failure: BaseException | None = None


class Lending:
    """Lets a worker lend an object to another worker of the same process, for calls in the borrower's thread."""

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
        """Lend `thing` to another worker of the process, and return when that worker has given it back.

        `process`: name of the process. `owner`: name of the lending worker in errors. `timeout_s`: the most seconds
        until a worker borrows `thing`; the borrower may keep it for any time. `check`: called during the wait for a
        borrower; if it raises an error, the wait ends. Raise the error that `thing` has raised in the borrower's
        thread. Raise ChannelTimeout if no worker borrows `thing` in time.
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
                    # From here on no worker can take it.
                    place.thing = None
                    raise
        # The borrower returns it even if it fails or is cancelled.
        returned.wait()
        if place.failure is not None:
            raise place.failure

    @contextlib.contextmanager
    def borrow(
        self, process: str, *, owner: str, timeout_s: float, check: Callable[[], None]
    ) -> Iterator[Any]:
        """Return a context manager that borrows the object that another worker of the process lends, during its `with`
        block.

        `process`: name of the process. `owner`: name of the borrowing worker in errors. `timeout_s`: the most seconds
        until an object is lent. `check`: called during the wait; if it raises an error, the wait ends. If the block
        raises `Lent`, the lender raises the cause of `Lent`. Raise ChannelTimeout if nothing is lent in time.
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
    """Wait until the state of `place` changes, at most `_TICK_S` seconds. The caller calls this repeatedly.

    `owner`, `process`: names for the error's text. `until`: the deadline, in seconds of `time.monotonic()`.
    `timeout_s`: the whole time until the deadline, for the error's text. `check`: called first; it may raise an error.
    Raise ChannelTimeout if the deadline has passed.
    """
    check()
    if time.monotonic() >= until:
        raise ChannelTimeout(
            problem(
                "channel-timeout",
                owner,
                error="lending",
                timeout_s=timeout_s,
                process=process,
            )
        )
    place.changed.wait(_TICK_S)
