"""Measure how long a worker is at each part of its work, and report it as metrics."""

from __future__ import annotations

import time

from rlplace.metrics import Metric, Metrics


class Stopwatch:
    """Owns the seconds of one call by part. It runs from the start; a lap counts what passed since the lap before."""

    def __init__(self, *parts: str) -> None:
        """`parts` are reported even if no lap counts for them."""
        self.seconds = dict.fromkeys(parts, 0.0)
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now

    def metrics(self, component: str) -> Metrics:
        """Return `<component>/<part>_s`, of which the longest of all ranks counts."""
        return {f"{component}/{part}_s": Metric(seconds, "max") for part, seconds in self.seconds.items()}
