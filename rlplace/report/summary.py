"""What a run has seen so far, and its end in numbers: return, time by stage, memory predicted against measured."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.comm.waiting import ChannelView
from rlplace.placement.memory import Measurements, MemoryLedger
from rlplace.placement.schedule import Residency
from rlplace.report.utilisation import usage_lines

RETURN_WINDOW = 100  # episodes in "the mean return"


@dataclasses.dataclass(slots=True)
class Progress:
    """Owned by `run`."""

    began: float
    start_s: float = 0.0  # until all workers were ready
    env_steps: int = 0
    iterations: int = 0
    first_return: float | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    episodes: deque[tuple[float, float]] = dataclasses.field(default_factory=deque)  # (mean return, episodes)

    def add(self, numbers: Mapping[str, float], env_steps: int) -> None:
        self.iterations += 1
        self.env_steps += env_steps
        for name, value in numbers.items():
            if name.startswith("time/") and name.endswith("_s"):
                self.seconds[name] = self.seconds.get(name, 0.0) + value
        if "env/return" in numbers:
            self.episodes.append((numbers["env/return"], numbers["env/episodes"]))
            while sum(n for _, n in self.episodes) - self.episodes[0][1] >= RETURN_WINDOW:
                self.episodes.popleft()
            if self.first_return is None:
                self.first_return = numbers["env/return"]

    @property
    def mean_return(self) -> float | None:
        """Over the last RETURN_WINDOW finished episodes, by whole iterations; None before the first has finished."""
        total = sum(n for _, n in self.episodes)
        return sum(r * n for r, n in self.episodes) / total if total else None

    def reached(self, goal: float | None) -> bool:
        enough = sum(n for _, n in self.episodes) >= RETURN_WINDOW
        return goal is not None and enough and self.mean_return is not None and self.mean_return >= goal


def summary(progress: Progress, folder: Path) -> dict[str, Any]:
    """The run in numbers; seconds are summed over iterations."""
    stages = progress.seconds
    total = stages.get("time/iteration_s", 0.0)
    return {
        "iterations": progress.iterations,
        "env_steps": progress.env_steps,
        "return_first": progress.first_return,
        "return_last": progress.mean_return,
        "wall_s": time.perf_counter() - progress.began,
        "start_s": progress.start_s,
        "train_s": total,
        "env_steps_per_s": progress.env_steps / total if total else 0.0,
        "seconds": {name.removeprefix("time/").removesuffix("_s"): value for name, value in stages.items()},
        "overhead_share": stages.get("time/overhead_s", 0.0) / total if total else 0.0,
        "folder": str(folder),
    }


def compare_memory(ledger: MemoryLedger, measured: Measurements) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes per accelerator by component and residency, `predicted` and `measured`, for what the run went through."""
    return {
        component: {
            residency.word: {"predicted": ledger.bytes(component, residency), "measured": found[residency]}
            for residency in Residency
            if residency in found
        }
        for component, found in measured.items()
    }


def waits_of(views: Mapping[str, ChannelView]) -> dict[str, dict[str, Any]]:
    """By channel: which components put and took, and for how long their ranks waited for each other, summed."""
    return {
        name: {
            "producers": _components(seen.stats.producers),
            "consumers": _components(seen.stats.consumers),
            "producer_wait_s": seen.stats.producer_wait_s,
            "consumer_wait_s": seen.stats.consumer_wait_s,
            "items": seen.stats.puts,
            "high_water_items": seen.stats.high_water_items,
            "staleness_max": seen.stats.staleness_max,
        }
        for name, seen in views.items()
    }


def _components(owners: Iterable[str]) -> list[str]:
    """The component of "env rank 2" is env."""
    return list(dict.fromkeys(owner.rpartition(" rank ")[0] or owner for owner in owners))


def summary_text(report: Mapping[str, Any]) -> str:
    def number(value: float | None) -> str:
        return "no episode finished" if value is None else f"{value:,.1f}"

    rate = report["env_steps_per_s"]
    first, last = number(report["return_first"]), number(report["return_last"])
    return "\n".join(
        [
            "",
            f"return     {first} -> {last}   (first iteration, last {RETURN_WINDOW} episodes)",
            f"env steps  {report['env_steps']:,} in {report['iterations']} iterations, {rate:,.0f} per second",
            *timing_lines(report, ("rollout", "learn", "sync", "moves")),
        ]
    )


def timing_lines(report: Mapping[str, Any], stages: Sequence[str]) -> list[str]:
    """What the end of every kind of run says: seconds, waits, memory, files."""
    seconds = report["seconds"]
    each = ", ".join(f"{stage} {seconds[stage]:.1f}" for stage in stages if stage in seconds)
    return [
        f"seconds    {report['wall_s']:.1f} in all: start {report['start_s']:.1f}, "
        f"training {report['train_s']:.1f} ({each or 'no iteration'})",
        f"overhead   {report['overhead_share']:.0%} of training was neither simulator, policy nor learning",
        *usage_lines(report.get("utilisation", {})),
        *_wait_lines(report.get("waits", {})),
        *_memory_lines(report.get("memory", {})),
        f"files      {report['folder']}",
    ]


_LEAST_WAIT_S = 0.05  # less is shown as no time at all


def _wait_lines(waits: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each channel in which somebody was waited for."""
    lines: list[str] = []
    for name, seen in waits.items():
        putting, taking = ("+".join(seen[side]) for side in ("producers", "consumers"))
        if putting and taking and max(seen["consumer_wait_s"], seen["producer_wait_s"]) >= _LEAST_WAIT_S:
            lines.append(
                f"{'waited' if not lines else '':<11}{name}: {taking} for {putting} {seen['consumer_wait_s']:.1f} s, "
                f"{putting} for {taking} {seen['producer_wait_s']:.1f} s"
            )
    if lines:
        lines[-1] += "   summed over ranks"
    return lines


def _memory_lines(memory: Mapping[str, Mapping[str, Mapping[str, int]]]) -> list[str]:
    lines: list[str] = []
    for component, rows in memory.items():
        sizes = ", ".join(
            f"{word} {_size(size['measured'])} ({_size(size['predicted'])})"
            for word, size in rows.items()
            if word != "off"
        )
        lines.append(f"{'memory' if not lines else '':<11}{component}: {sizes}")
    if lines:
        lines[-1] += "   per accelerator, measured (predicted)"
    return lines


def _size(size_bytes: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << power:
            return f"{size_bytes / (1 << power):.1f} {unit}"
    return f"{size_bytes} B"
