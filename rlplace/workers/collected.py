"""Metrics of a custom worker: what it times, counts and returns, collected until the loop takes them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from rlplace.codes import problem
from rlplace.errors import WorkerMisuse
from rlplace.metrics import Metric
from rlplace.stopwatch import Stopwatch
from rlplace.units import clipped

OTHER = "other"  # the part of a call that no timer covers
_REDUCTIONS = ("mean", "sum", "max", "min")


class Collected:
    """Collects the metrics of one worker until `take` returns them.

    A timer in the thread of a method call also appears as a part of the call in the run's timeline.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, Metric] = {}
        # Stopwatches of the running call: outer timers first
        self._watches: list[Stopwatch] = []
        self._depth = 0
        self._thread = 0

    def begin_call(self) -> None:
        """Begin to record the parts of a method call. The thread that runs the method must call this."""
        self._watches = []
        self._depth = 0
        self._thread = threading.get_ident()

    def take(self) -> dict[str, Metric]:
        """Return the metrics that were collected since the last `take`."""
        with self._lock:
            taken = self._metrics
            self._metrics = {}
        return taken

    @contextlib.contextmanager
    def timer(self, component: str, name: str) -> Iterator[None]:
        """Return a context manager that adds the seconds of its `with` block to the metric `<component>/<name>_s`.

        The run reports the maximum of this metric over ranks.
        """
        watch = self._enter() if threading.get_ident() == self._thread else None
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            if watch is not None:
                watch.lap(name)
                self._depth -= 1
            with self._lock:
                key = f"{component}/{name}_s"
                before = self._metrics.get(key, Metric(0.0, "max"))
                self._metrics[key] = Metric(before.value + seconds, "max")

    def _enter(self) -> Stopwatch:
        """Return the stopwatch for a timer that begins now. Timers may be nested, and each nesting level has a
        stopwatch.

        The time since the end of the last timer of this level goes to the part `OTHER` (work outside of timers).
        """
        if self._depth == len(self._watches):
            self._watches.append(Stopwatch())
        watch = self._watches[self._depth]
        watch.lap(OTHER)
        self._depth += 1
        return watch

    def add(
        self,
        owner: str,
        component: str,
        name: str,
        value: Any,
        reduce: str,
        weight: Any,
    ) -> None:
        """Add a number to a metric.

        `owner`: name of the worker in errors. `name`: name of the metric; without `/`, the name is
        `<component>/<name>`. `reduce`: mean, sum, max or min. `weight`: weight of the number in a mean. Raise
        WorkerMisuse if `reduce` is none of these words, if `value` or `weight` is not a number, or if the metric's
        earlier numbers had another reduction.
        """
        if reduce not in _REDUCTIONS:
            wrong = problem(
                "bad-metric",
                owner,
                repr(reduce),
                error="reduction",
                name=name,
                reduction=reduce,
            )
            raise WorkerMisuse(wrong)
        try:
            number = Metric(float(value), reduce, float(weight))  # type: ignore[arg-type]  # checked above
        except (TypeError, ValueError) as error:
            got = f"{type(value).__name__}: {clipped(str(value), 60)}"
            wrong = problem("bad-metric", owner, got, error="no-number", name=name)
            raise WorkerMisuse(wrong) from error
        self._merge(owner, name if "/" in name else f"{component}/{name}", number)

    def add_result(self, owner: str, component: str, result: Any) -> None:
        """Add the named numbers in a method's result to the metrics.

        If `result` is a mapping, its values that are numbers, Metrics or tensors of one number are added under
        `<component>/<name>`, or under a name that contains a `/` as it is. Other values, and any other result, are
        ignored. `owner`: name of the worker in errors.
        """
        if not isinstance(result, Mapping):
            return
        for name, value in result.items():
            metric = metric_of(value)
            if isinstance(name, str) and metric is not None:
                full = name if "/" in name else f"{component}/{name}"
                self._merge(owner, full, metric)

    def _merge(self, owner: str, name: str, metric: Metric) -> None:
        with self._lock:
            before = self._metrics.get(name)
            if before is None:
                self._metrics[name] = metric
                return
            if before.reduce != metric.reduce:
                wrong = problem(
                    "bad-metric",
                    owner,
                    f"{before.reduce} and {metric.reduce}",
                    error="two-ways",
                    name=name,
                    before=before.reduce,
                )
                raise WorkerMisuse(wrong)
            self._metrics[name] = _merged(before, metric)


def _merged(a: Metric, b: Metric) -> Metric:
    """Return one metric for two metrics of the same rank, name and reduction."""
    weight = a.weight + b.weight
    if a.reduce == "mean" and weight > 0:
        value = (a.value * a.weight + b.value * b.weight) / weight
    elif a.reduce == "sum":
        value = a.value + b.value
    elif a.reduce == "min":
        value = min(a.value, b.value)
    else:
        value = max(a.value, b.value)
    return dataclasses.replace(b, value=value, weight=weight)


def metric_of(value: Any) -> Metric | None:
    """Return `value` as a metric if it is a Metric, a number, or a tensor or array without dimensions; else None."""
    if isinstance(value, Metric):
        return value
    if isinstance(value, Real):
        return Metric(float(value))
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        number = item()
        if isinstance(number, Real):
            return Metric(float(number))
    return None
