"""How the driver tells the time and waits for calls: by the clock of its machine, or by another that a caller has."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from typing import Any

from rlplace.workers.launch.group import Call, Pending, wait_all, wait_until


class Clock:
    """The machine's clock, and waits that take the time they take."""

    def now(self) -> float:
        """Return seconds, of which differences count."""
        return time.perf_counter()

    def epoch(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def wait_all(self, pending: Sequence[Pending], timeout_s: float) -> list[list[Any]]:
        """Do as `group.wait_all`."""
        return wait_all(pending, timeout_s)

    def wait_first(self, calls: Sequence[Call], timeout_s: float) -> bool:
        """Return once any of `calls` has ended, False after `timeout_s` without."""
        wait_until(calls, timeout_s, concurrent.futures.FIRST_COMPLETED)
        return any(call.done() for call in calls)


CLOCK = Clock()
