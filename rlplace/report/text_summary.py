"""What a run with text tasks has seen so far, and its end in numbers: rewards, accuracy, tokens, time by stage."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlplace.report.summary import timing_lines

REWARD, ACCURACY = "actor/reward", "eval/reward"
_COUNTED = {"samples": "actor/samples", "tokens_generated": "rollout/tokens", "tokens_learned": "actor/tokens_learned"}


@dataclasses.dataclass(slots=True)
class TextProgress:
    """Owned by the run."""

    began: float
    start_s: float = 0.0  # until all workers were ready
    iterations: int = 0
    rewards: list[float] = dataclasses.field(default_factory=list)  # mean of each iteration
    evaluations: dict[int, float] = dataclasses.field(default_factory=dict)  # policy version -> mean reward
    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, numbers: Mapping[str, float]) -> None:
        """The numbers of one iteration."""
        self.iterations += 1
        if REWARD in numbers:
            self.rewards.append(numbers[REWARD])
        for name, metric in _COUNTED.items():
            self.counts[name] = self.counts.get(name, 0.0) + numbers.get(metric, 0.0)
        self.add_evaluation(numbers, iteration=self.iterations - 1)

    def add_evaluation(self, numbers: Mapping[str, float], *, iteration: int) -> None:
        """What was seen before `iteration`, and the seconds of it all."""
        if ACCURACY in numbers:
            self.evaluations[iteration] = numbers[ACCURACY]
        for name, value in numbers.items():
            if name.startswith("time/") and name.endswith("_s"):
                self.seconds[name] = self.seconds.get(name, 0.0) + value

    def reached(self, goal: float | None) -> bool:
        return goal is not None and bool(self.rewards) and self.rewards[-1] >= goal


def text_summary(progress: TextProgress, folder: Path) -> dict[str, Any]:
    """The run in numbers; seconds are summed over iterations."""
    stages = progress.seconds
    total = stages.get("time/iteration_s", 0.0)
    ends = [progress.evaluations[i] for i in sorted(progress.evaluations)]
    return {
        "iterations": progress.iterations,
        "reward_first": progress.rewards[0] if progress.rewards else None,
        "reward_last": progress.rewards[-1] if progress.rewards else None,
        "eval_first": ends[0] if ends else None,
        "eval_last": ends[-1] if ends else None,
        "evaluations": {str(i): value for i, value in sorted(progress.evaluations.items())},
        **{name: int(value) for name, value in progress.counts.items()},
        "wall_s": time.perf_counter() - progress.began,
        "start_s": progress.start_s,
        "train_s": total,
        "seconds": {name.removeprefix("time/").removesuffix("_s"): value for name, value in stages.items()},
        "overhead_share": stages.get("time/overhead_s", 0.0) / total if total else 0.0,
        "folder": str(folder),
    }


def text_summary_text(report: Mapping[str, Any]) -> str:
    def number(value: float | None) -> str:
        return "none" if value is None else f"{value:,.3f}"

    seconds = report["seconds"]
    generated, learned = report.get("tokens_generated", 0), report.get("tokens_learned", 0)
    lines = [
        "",
        f"reward     {number(report['reward_first'])} -> {number(report['reward_last'])}   (first, last iteration)",
    ]
    asked = list(report["evaluations"].items())
    if asked:
        ends = [*asked[:1], *asked[1:][-1:]]
        told, when = " -> ".join(number(value) for _, value in ends), " and ".join(at for at, _ in ends)
        lines.append(f"held out   {told}   (mean reward of greedy answers, after {when} iterations)")
    lines.append(
        f"tokens     {generated:,} generated, {_rate(generated, seconds.get('rollout'))}; "
        f"{learned:,} learned, {_rate(learned, seconds.get('learn'))}; {report['iterations']} iterations"
    )
    return "\n".join([*lines, *timing_lines(report, ("rollout", "infer", "learn", "sync", "moves", "evaluate"))])


def _rate(tokens: int, seconds: float | None) -> str:
    return f"{tokens / seconds:,.0f} per second" if seconds else "none per second"
