"""A run in numbers: score, counts, seconds by stage, waits, memory predicted against measured."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlplace.comm.watchdog import ChannelView
from rlplace.placement.language.slots import component_of
from rlplace.placement.memory.ledger import Measurements, MemoryLedger
from rlplace.placement.schedule import Residency
from rlplace.report.utilisation import usage_lines
from rlplace.units import show_bytes

HELD_OUT = "eval/reward"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The metrics that a kind of run is summed up by."""

    score: str  # metric of an iteration's mean return
    episodes: str | None  # metric with the number of episodes behind it; None: an iteration counts as one episode
    window: int  # episodes behind the mean return, rounded up to whole iterations
    steps: str  # what the steps of a run are, as summary.json calls them
    counts: Mapping[str, str]  # key of summary.json -> metric that is summed over iterations


SIMULATED = Measures(score="env/return", episodes="env/episodes", window=100, steps="env_steps", counts={})
TEXT = Measures(
    score="actor/reward",
    episodes=None,
    window=1,
    steps="answers",
    counts={
        "samples": "actor/samples",
        "tokens_generated": "rollout/tokens",
        "tokens_learned": "actor/tokens_learned",
    },
)


@dataclasses.dataclass(slots=True)
class Progress:
    """Sums of the metrics of a run. Owned by its driver."""

    measures: Measures
    began: float  # time.perf_counter() when the command began to run
    start_s: float = 0.0  # until all workers were ready
    steps: int = 0
    iterations: int = 0
    first_return: float | None = None
    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    episodes: deque[tuple[float, float]] = dataclasses.field(default_factory=deque)  # (mean return, episodes)
    evaluations: dict[int, float] = dataclasses.field(default_factory=dict)  # policy version -> mean reward

    def add(self, numbers: Mapping[str, float], steps: int) -> None:
        """Count one iteration of `steps` env steps or answers."""
        self.steps += steps
        self.add_evaluation(numbers, version=self.iterations)
        self.iterations += 1
        for name, metric in self.measures.counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + numbers.get(metric, 0.0)
        if (score := numbers.get(self.measures.score)) is None:
            return
        self.episodes.append((score, 1.0 if self.measures.episodes is None else numbers[self.measures.episodes]))
        while sum(n for _, n in self.episodes) - self.episodes[0][1] >= self.measures.window:
            self.episodes.popleft()
        if self.first_return is None:
            self.first_return = score

    def add_evaluation(self, numbers: Mapping[str, float], *, version: int) -> None:
        """Keep the mean reward of held-out prompts under `version`, if there is one, and the seconds of all stages."""
        if HELD_OUT in numbers:
            self.evaluations[version] = numbers[HELD_OUT]
        for name, value in numbers.items():
            if name.startswith("time/") and name.endswith("_s"):
                self.seconds[name] = self.seconds.get(name, 0.0) + value

    @property
    def mean_return(self) -> float | None:
        """Mean over the last finished episodes of the window; None before the first has finished."""
        total = sum(n for _, n in self.episodes)
        return sum(r * n for r, n in self.episodes) / total if total else None

    def reached(self, goal: float | None) -> bool:
        """Whether a full window of episodes has a mean return of `goal` or more."""
        full = sum(n for _, n in self.episodes) >= self.measures.window
        return goal is not None and full and self.mean_return is not None and self.mean_return >= goal


def summary(progress: Progress, folder: Path) -> dict[str, Any]:
    """Return the run in numbers, as summary.json has them; seconds are summed over iterations."""
    stages = progress.seconds
    total = stages.get("time/iteration_s", 0.0)
    evaluations = dict(sorted(progress.evaluations.items()))
    ends = list(evaluations.values())
    held_out = {
        "eval_first": ends[0] if ends else None,
        "eval_last": ends[-1] if ends else None,
        "evaluations": {str(version): value for version, value in evaluations.items()},
    }
    steps = progress.measures.steps
    return {
        "iterations": progress.iterations,
        steps: progress.steps,
        "return_first": progress.first_return,
        "return_last": progress.mean_return,
        **(held_out if progress.measures.episodes is None else {}),
        **{name: int(value) for name, value in progress.counts.items()},
        "wall_s": time.perf_counter() - progress.began,
        "start_s": progress.start_s,
        "train_s": total,
        f"{steps}_per_s": progress.steps / total if total else 0.0,
        "seconds": {name.removeprefix("time/").removesuffix("_s"): value for name, value in stages.items()},
        "overhead_share": stages.get("time/overhead_s", 0.0) / total if total else 0.0,
        "folder": str(folder),
    }


def compare_memory(ledger: MemoryLedger, measured: Measurements) -> dict[str, dict[str, dict[str, int]]]:
    """Return bytes per accelerator by component and residency, predicted and measured, of the states the run was in."""
    return {
        component: {
            residency.word: {"predicted": ledger.bytes(component, residency), "measured": found[residency]}
            for residency in Residency
            if residency in found
        }
        for component, found in measured.items()
    }


def waits_of(views: Mapping[str, ChannelView]) -> dict[str, dict[str, Any]]:
    """Return by channel which components put and took, and the summed seconds that their ranks waited."""
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
    """Return the components of owners such as "env rank 2"."""
    return list(dict.fromkeys(component_of(owner) or owner for owner in owners))


def summary_text(report: Mapping[str, Any]) -> str:
    """Render what `summary` returned, with the run's `memory`, `waits` and `utilisation`, for the console."""
    seconds = report["seconds"]
    stages = ("rollout", "infer", "learn", "sync", "moves", "evaluate")
    each = ", ".join(f"{stage} {seconds[stage]:.1f}" for stage in stages if stage in seconds)
    return "\n".join(
        [
            "",
            *(_simulated_lines(report) if SIMULATED.steps in report else _text_lines(report)),
            f"seconds    {report['wall_s']:.1f} in all: start {report['start_s']:.1f}, "
            f"training {report['train_s']:.1f} ({each or 'no iteration'})",
            f"overhead   {report['overhead_share']:.0%} of training was neither simulator, policy nor learning",
            *usage_lines(report.get("utilisation", {})),
            *_wait_lines(report.get("waits", {})),
            *_memory_lines(report.get("memory", {})),
            f"files      {report['folder']}",
        ]
    )


def _simulated_lines(report: Mapping[str, Any]) -> list[str]:
    first, last = (
        "no episode finished" if value is None else f"{value:,.1f}"
        for value in (report["return_first"], report["return_last"])
    )
    return [
        f"return     {first} -> {last}   (first iteration, last {SIMULATED.window} episodes)",
        f"env steps  {report['env_steps']:,} in {report['iterations']} iterations, "
        f"{report['env_steps_per_s']:,.0f} per second",
    ]


def _text_lines(report: Mapping[str, Any]) -> list[str]:
    def number(value: float | None) -> str:
        return "none" if value is None else f"{value:,.3f}"

    def rate(tokens: int, stage: str) -> str:
        seconds = report["seconds"].get(stage)
        return f"{tokens / seconds:,.0f} per second" if seconds else "none per second"

    generated, learned = report.get("tokens_generated", 0), report.get("tokens_learned", 0)
    lines = [
        f"reward     {number(report['return_first'])} -> {number(report['return_last'])}   (first, last iteration)",
    ]
    if evaluations := list(report["evaluations"].items()):
        ends = [*evaluations[:1], *evaluations[1:][-1:]]
        values, versions = " -> ".join(number(value) for _, value in ends), " and ".join(at for at, _ in ends)
        lines.append(f"held out   {values}   (mean reward of greedy answers, after {versions} iterations)")
    lines.append(
        f"tokens     {generated:,} generated, {rate(generated, 'rollout')}; "
        f"{learned:,} learned, {rate(learned, 'learn')}; {report['iterations']} iterations"
    )
    return lines


_LEAST_WAIT_S = 0.05  # less is shown as no time at all


def _wait_lines(waits: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each channel in which ranks waited noticeably."""
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
            f"{word} {show_bytes(size['measured'])} ({show_bytes(size['predicted'])})"
            for word, size in rows.items()
            if word != "off"
        )
        lines.append(f"{'memory' if not lines else '':<11}{component}: {sizes}")
    if lines:
        lines[-1] += "   per accelerator, measured (predicted)"
    return lines
