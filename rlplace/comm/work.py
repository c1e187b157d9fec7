"""Puts and gets in the background: a caller begins them now, and waits for their results later.

::

    work = channel.get_async(key="1")      begins; tried at once, then in a thread of its lane
    ...                                    the caller computes
    item = work.wait()                     or, in an `async def`:  item = await work
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable
from concurrent.futures import Future
from typing import Any

from rlplace.errors import ChannelEmpty, ChannelFull

_Begun = tuple[Future[Any], Callable[[], Any]]


class Work:
    """A call that runs in the background.

    `wait()` and `await` return the result of the call or raise its error, and may be used any number of times. The call
    has a deadline of its own. A cancelled `await` does not end the call; a later `wait()` still returns its result.
    """

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> Any:
        return self._future.result()

    def __await__(self) -> Generator[Any, None, Any]:
        # Here: most processes need none of it
        import asyncio

        return asyncio.wrap_future(self._future).__await__()


class Lanes:
    """Runs calls in the background.

    Calls of the same lane run one after the other, in the order of `begin`. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Of lanes at work
        self._waiting: dict[Hashable, deque[_Begun]] = {}

    def begin(
        self,
        lane: Hashable,
        call: Callable[[], Any],
        at_once: Callable[[], Any] | None = None,
    ) -> Work:
        """Begin `call` in the background, and return the running call.

        `lane`: identifies the calls that run one after the other. `at_once`: does the same as `call` without waiting,
        and raises ChannelEmpty or ChannelFull if it would have to wait; tried first if the lane is free.
        """
        future: Future[Any] = Future()
        # From here on nothing cancels it
        future.set_running_or_notify_cancel()
        with self._lock:
            if lane in self._waiting:
                self._waiting[lane].append((future, call))
                return Work(future)
            self._waiting[lane] = deque()
        if at_once is None or not _settled(future, at_once):
            self._start(lane, future, call)
        else:
            self._next(lane)
        return Work(future)

    def _start(
        self,
        lane: Hashable,
        future: Future[Any],
        call: Callable[[], Any],
    ) -> None:
        def run() -> None:
            _settle(future, call)
            self._next(lane)

        threading.Thread(target=run, name=f"lane {lane}", daemon=True).start()

    def _next(self, lane: Hashable) -> None:
        """Start the next call of a lane, or free the lane if no call waits."""
        with self._lock:
            if not self._waiting[lane]:
                del self._waiting[lane]
                return
            future, call = self._waiting[lane].popleft()
        self._start(lane, future, call)


def _settled(future: Future[Any], at_once: Callable[[], Any]) -> bool:
    """Run `at_once`, and set the result or the error of `future` to what it returns or raises; then return True.

    If `at_once` raises ChannelEmpty or ChannelFull, because the call would have to wait, return False and leave
    `future` open.
    """
    try:
        result = at_once()
    except (ChannelEmpty, ChannelFull):
        return False
    except BaseException as error:  # noqa: BLE001 -- it is raised where the work is waited for
        future.set_exception(error)
        return True
    future.set_result(result)
    return True


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 -- it is raised where the work is waited for
        future.set_exception(error)
