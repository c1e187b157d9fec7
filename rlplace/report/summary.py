"""A run in numbers: score, counts, seconds by stage, waits, memory predicted against measured."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import textwrap
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.comm.channel import ChannelStats
from rlplace.placement.language.slots import component_of
from rlplace.placement.memory.ledger import Measurements, MemoryLedger
from rlplace.placement.schedule import Residency
from rlplace.report.utilisation import usage_rows
from rlplace.units import show_bytes

HELD_OUT = "eval/reward"
_KEPT = (
    "start_s",
    "steps",
    "iterations",
    "first_return",
    "counts",
    "seconds",
    "evaluations",
    "skipped",
    "named",
)  # of a Progress
_SKIPPED = (
    "/poisoned",
    "/skipped_steps",
)  # ends of metrics that count what faults.on_poison: skip left out
_NAMED = 100  # things that were skipped and are named, the first of a run
_LEAST_WAIT_S = 0.05  # less is shown as no time at all


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The metrics that a kind of run is summed up by."""

    score: str  # metric of an iteration's mean return
    episodes: str | None = (
        None  # metric with the number of episodes behind it; None: an iteration is one episode
    )
    window: int = 1  # episodes behind the mean return, rounded up to whole iterations
    steps: str  # what the steps of a run are, as summary.json calls them
    counts: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # key of summary.json -> metric to be summed


SIMULATED = Measures(
    score="env/return", episodes="env/episodes", window=100, steps="env_steps"
)
TEXT = Measures(
    score="actor/reward",
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
    episodes: deque[tuple[float, float]] = dataclasses.field(
        default_factory=deque
    )  # (mean return, episodes)
    evaluations: dict[int, float] = dataclasses.field(
        default_factory=dict
    )  # policy version -> mean reward
    skipped: dict[str, int] = dataclasses.field(
        default_factory=dict
    )  # metric -> things
    named: list[dict[str, Any]] = dataclasses.field(
        default_factory=list
    )  # the first of these, as summary.json has them
    earlier_s: float = (
        0.0  # wall time of the commands whose checkpoint this one goes on with
    )

    @property
    def wall_s(self) -> float:
        return self.earlier_s + time.perf_counter() - self.began

    def state(self) -> dict[str, Any]:
        """Return what a later command needs to go on, as JSON has it."""
        kept = {name: copy.copy(getattr(self, name)) for name in _KEPT}
        return kept | {
            "episodes": [list(pair) for pair in self.episodes],
            "earlier_s": self.wall_s,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        for name in _KEPT:
            setattr(self, name, copy.copy(state.get(name, getattr(self, name))))
        self.evaluations = {
            int(version): value for version, value in self.evaluations.items()
        }
        self.episodes = deque(
            (score, episodes) for score, episodes in state["episodes"]
        )
        self.earlier_s = state["earlier_s"]

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Return to what `state` returned in this run; its clock goes on."""
        earlier_s = self.earlier_s
        self.resume(state)
        self.earlier_s = earlier_s

    @property
    def train_s(self) -> float:
        return self.seconds.get("time/iteration_s", 0.0)

    def add(self, numbers: Mapping[str, float], steps: int) -> None:
        """Count one iteration of `steps` env steps or answers."""
        self.steps += steps
        self.add_evaluation(numbers, version=self.iterations)
        self.iterations += 1
        for name, metric in self.measures.counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + numbers.get(metric, 0.0)
        if (score := numbers.get(self.measures.score)) is None:
            return
        self.episodes.append(
            (
                score,
                1.0
                if self.measures.episodes is None
                else numbers[self.measures.episodes],
            )
        )
        while (
            sum(n for _, n in self.episodes) - self.episodes[0][1]
            >= self.measures.window
        ):
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

    def add_skipped(
        self,
        numbers: Mapping[str, float],
        notes: Mapping[str, Sequence[str]],
        *,
        iteration: int,
    ) -> None:
        """Count what an iteration left out because it was not finite; `notes` name it, by metric."""
        for name in (name for name in numbers if name.endswith(_SKIPPED)):
            self.skipped[name] = self.skipped.get(name, 0) + int(numbers[name])
            named = [
                {"iteration": iteration, "metric": name, "what": note}
                for note in notes.get(name, ())
            ]
            self.named += named[: _NAMED - len(self.named)]

    @property
    def mean_return(self) -> float | None:
        """Mean over the last finished episodes of the window; None before the first has finished."""
        total = sum(n for _, n in self.episodes)
        if total:
            return sum(r * n for r, n in self.episodes) / total
        return None

    @property
    def score(self) -> float | None:
        """What checkpoints are compared by: the last reward of held-out prompts, if any, else the mean return."""
        if self.evaluations:
            return self.evaluations[max(self.evaluations)]
        return self.mean_return

    def reached(self, goal: float | None) -> bool:
        """Whether a full window of episodes has a mean return of `goal` or more."""
        full = sum(n for _, n in self.episodes) >= self.measures.window
        return (
            goal is not None
            and full
            and self.mean_return is not None
            and self.mean_return >= goal
        )


def summary(progress: Progress, folder: Path) -> dict[str, Any]:
    """Return the run in numbers, as summary.json has them; seconds are summed over iterations."""
    stages = progress.seconds
    steps = progress.measures.steps
    total = progress.train_s
    evaluations = {
        str(version): value for version, value in sorted(progress.evaluations.items())
    }
    ends: Sequence[float | None] = [*evaluations.values()] or [None]
    held_out = {
        "eval_first": ends[0],
        "eval_last": ends[-1],
        "evaluations": evaluations,
    }
    return {
        "iterations": progress.iterations,
        steps: progress.steps,
        "return_first": progress.first_return,
        "return_last": progress.mean_return,
        **(held_out if progress.measures.episodes is None else {}),
        **{name: int(value) for name, value in progress.counts.items()},
        "wall_s": progress.wall_s,
        "start_s": progress.start_s,
        "train_s": total,
        f"{steps}_per_s": progress.steps / total if total else 0.0,
        "seconds": {
            name.removeprefix("time/").removesuffix("_s"): value
            for name, value in stages.items()
        },
        "skipped": {"counts": progress.skipped, "events": progress.named},
        "overhead_share": stages.get("time/overhead_s", 0.0) / total if total else 0.0,
        "folder": str(folder),
    }


def compare_memory(
    ledger: MemoryLedger, measured: Measurements
) -> dict[str, dict[str, dict[str, int]]]:
    """Return bytes per accelerator by component and residency, predicted and measured, of the states the run was in."""
    return {
        component: {
            residency.word: {
                "predicted": ledger.bytes(component, residency),
                "measured": found[residency],
            }
            for residency in Residency
            if residency in found
        }
        for component, found in measured.items()
    }


def waits_of(views: Mapping[str, ChannelStats]) -> dict[str, dict[str, Any]]:
    """Return by channel which components put and took, and the summed seconds that their ranks waited."""
    return {
        name: {
            "producers": list(
                dict.fromkeys(component_of(owner) or owner for owner in seen.producers)
            ),
            "consumers": list(
                dict.fromkeys(component_of(owner) or owner for owner in seen.consumers)
            ),
            "producer_wait_s": seen.producer_wait_s,
            "consumer_wait_s": seen.consumer_wait_s,
            "items": seen.puts,
            "bytes": seen.bytes,
            "high_water_items": seen.high_water_items,
            "staleness_max": seen.staleness_max,
        }
        for name, seen in views.items()
    }


_OVERHEAD = (
    "simulator, policy nor learning, of the slowest rank or of all on their cores"
)


def summary_text(report: Mapping[str, Any]) -> str:
    """Render what `summary` returned, with the run's `memory`, `waits` and `utilisation`, for the console.

    Lines that name a file are whole.
    """
    seconds = report["seconds"]
    stages = ("rollout", "infer", "learn", "sync", "moves", "evaluate")
    each = ", ".join(
        f"{stage} {seconds[stage]:.1f}" for stage in stages if stage in seconds
    )
    parts = f"start {report['start_s']:.1f}, training {report['train_s']:.1f} ({each or 'no iteration'})"
    rows = [
        *(_simulated_rows(report) if SIMULATED.steps in report else _text_rows(report)),
        ("seconds", f"{report['wall_s']:.1f} in all: {parts}"),
        (
            "overhead",
            f"{report['overhead_share']:.0%} of training was neither {_OVERHEAD}",
        ),
        *_predicted_rows(report.get("predicted", {})),
        *usage_rows(report.get("utilisation", {})),
        *_fault_rows(report.get("faults", {})),
        *_skipped_rows(report.get("skipped", {})),
        *_wait_rows(report.get("waits", {})),
        *_memory_rows(report.get("memory", {})),
    ]
    lines = [fitted(f"{head:<11}{text}", 11) for head, text in rows]
    files = (*_checkpoint_rows(report), ("files", report["folder"]))
    return "\n".join(["", *lines, *(f"{head:<11}{text}" for head, text in files)])


def fitted(line: str, indent: int = 2) -> str:
    """Break a line at spaces for the terminal, or a pipe of 80 columns; parts behind the first are indented."""
    parts = textwrap.TextWrapper(
        width=max(shutil.get_terminal_size().columns, 2 * indent),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return parts.fill(line)


def _checkpoint_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if checkpoint := report.get("checkpoint"):
        yield "checkpoint", str(checkpoint)
        yield "", f"saving took {report['save_s']:.1f} s; resume=auto goes on with it"


def _simulated_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    ends = (report["return_first"], report["return_last"])
    returns = " -> ".join(
        "no episode finished" if value is None else f"{value:,.1f}" for value in ends
    )
    yield "return", f"{returns}   (first iteration, last {SIMULATED.window} episodes)"
    steps = f"{report['env_steps']:,}"
    rate = f"{report['env_steps_per_s']:,.0f} per second"
    yield "env steps", f"{steps} in {report['iterations']} iterations, {rate}"


def _text_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    def number(value: float | None) -> str:
        if value is None:
            return "none"
        return f"{value:,.3f}"

    def rate(tokens: int, stage: str) -> str:
        seconds = report["seconds"].get(stage)
        if seconds:
            return f"{tokens / seconds:,.0f} per second"
        return "none per second"

    yield (
        "reward",
        f"{number(report['return_first'])} -> {number(report['return_last'])}   (first, last iteration)",
    )
    if evaluations := list(report["evaluations"].items()):
        ends = dict([evaluations[0], evaluations[-1]])
        values = " -> ".join(map(number, ends.values()))
        versions = " and ".join(ends)
        yield (
            "held out",
            f"{values}   (mean reward of the answers, after {versions} iterations)",
        )
    generated = report.get("tokens_generated", 0)
    learned = report.get("tokens_learned", 0)
    texts = f"{generated:,} generated, {rate(generated, 'rollout')}; {learned:,} learned, {rate(learned, 'learn')}"
    yield "tokens", f"{texts}; {report['iterations']} iterations"


def _predicted_rows(predicted: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if seconds := predicted.get("seconds"):
        each = ", ".join(
            f"{stage} {row['predicted']:.3g} ({row['measured']:.3g})"
            for stage, row in seconds.items()
        )
        yield "predicted", each
        yield (
            "",
            f"seconds of an iteration, predicted (measured, median), from {predicted['from']}",
        )


def _fault_rows(faults: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if events := faults.get("events"):
        counted = Counter(name for event in events for name in event["replaced"])
        replaced = (
            ", ".join(f"{name} ({times})" for name, times in sorted(counted.items()))
            or "none"
        )
        lost = f"recovery {faults['recovery_s']:.1f} s, done again {faults['redone_s']:.1f} s"
        yield "faults", f"{len(events)}; workers replaced: {replaced}; {lost}"
        yield (
            "",
            f"{faults['effective_share']:.0%} of the time since all were ready went into work that counted",
        )


def _skipped_rows(skipped: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if counts := skipped.get("counts"):
        each = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
        yield "skipped", f"{each}   (not finite; summary.json names the first {_NAMED})"


def _wait_rows(waits: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return a row for each channel in which ranks waited noticeably."""
    texts: list[str] = []
    for name, seen in waits.items():
        putting, taking = ("+".join(seen[side]) for side in ("producers", "consumers"))
        taken_s = seen["consumer_wait_s"]
        put_s = seen["producer_wait_s"]
        if putting and taking and max(taken_s, put_s) >= _LEAST_WAIT_S:
            texts.append(
                f"{name}: {taking} for {putting} {taken_s:.1f} s, {putting} for {taking} {put_s:.1f} s"
            )
    return _headed("waited", texts, "summed over ranks")


def _memory_rows(
    memory: Mapping[str, Mapping[str, Mapping[str, int]]],
) -> list[tuple[str, str]]:
    def sizes(states: Mapping[str, Mapping[str, int]]) -> str:
        shown = (
            (word, show_bytes(of["measured"]), show_bytes(of["predicted"]))
            for word, of in states.items()
        )
        return ", ".join(
            f"{word} {measured} ({predicted})"
            for word, measured, predicted in shown
            if word != "off"
        )

    texts = [f"{component}: {sizes(states)}" for component, states in memory.items()]
    return _headed("memory", texts, "per accelerator, measured (predicted)")


def _headed(head: str, texts: Sequence[str], note: str) -> list[tuple[str, str]]:
    """Head the first text, and end the last with a note."""
    ends = [*[""] * (len(texts) - 1), f"   {note}"]
    return [
        ("" if at else head, text + end)
        for at, (text, end) in enumerate(zip(texts, ends, strict=False))
    ]
