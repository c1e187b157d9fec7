"""The clock that the driver uses to measure time and to wait for calls.

The default is the machine's clock; a simulation passes a logical clock instead.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from typing import Any

from rlplace.workers.launch.group import Pending, wait_all, wait_until


class Clock:
    """The machine's clock. Its waits take real time."""

    def now(self) -> float:
        """Return the seconds since an arbitrary start; only differences of two results are meaningful."""
        return time.perf_counter()

    def epoch(self) -> float:
        """Return the seconds since 1970-01-01 00:00 UTC."""
        return time.time()

    def wait_all(self, pending: Sequence[Pending], timeout_s: float) -> list[list[Any]]:
        """Wait until all calls in `pending` have ended. Return one list of results for each element of `pending`, in
        rank order.

        Raise WorkerError if a call fails, WorkerTimeout after `timeout_s` seconds.
        """
        return wait_all(pending, timeout_s)

    def wait_any(self, pending: Sequence[Pending], timeout_s: float) -> bool:
        """Wait until all calls of one of `pending` have ended, or until a call has failed.

        Return False if that does not happen within `timeout_s` seconds, else True.
        """
        end_s = self.now() + timeout_s
        while not any(each.done() or each.failed() for each in pending):
            left_s = end_s - self.now()
            if left_s <= 0:
                return False
            calls = [call for each in pending for call in each.calls]
            left = [call for call in calls if not call.done()]
            wait_until(left, left_s, concurrent.futures.FIRST_COMPLETED)
        return True


CLOCK = Clock()
