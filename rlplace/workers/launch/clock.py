"""The clock that the driver uses to measure time and to wait for calls.

The default is the machine's clock; a simulation passes a logical clock instead.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from typing import Any

from rlplace.workers.launch.group import Call, Pending, wait_all, wait_until


class Clock:
    """Real time of this machine; waits block for as long as they last."""

    def now(self) -> float:
        """Return seconds from an arbitrary start; only differences are meaningful."""
        return time.perf_counter()

    def epoch(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def wait_all(self, pending: Sequence[Pending], timeout_s: float) -> list[list[Any]]:
        """Wait for several calls, as `group.wait_all` does."""
        return wait_all(pending, timeout_s)

    def wait_first(self, calls: Sequence[Call], timeout_s: float) -> bool:
        """Return True once any of `calls` has ended, False if none ended within `timeout_s`."""
        wait_until(calls, timeout_s, concurrent.futures.FIRST_COMPLETED)
        return any(call.done() for call in calls)


CLOCK = Clock()
