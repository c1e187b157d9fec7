"""Seconds of an iteration by `algorithm.max_staleness`, on a disaggregated placement, and how old what is learned gets.

    python benchmarks/staleness.py [--iterations 12] [--generate 0.6] [--learn 0.6]

Everything runs as in a run: env, a tiny model and its engine, channels, weight sync, loop. Only that a step of the
engine and an update take a given time beside what they compute, and no processor for it, as if each had an accelerator
of its own. `steady`: every iteration generates equally long; `uneven`: every other one three times as long as the one
before it. The first iteration, in which nothing can overlap, does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlplace.config import compose
from rlplace.metrics import Metrics
from rlplace.placement import Plan
from rlplace.runtime.launched import job_spec
from rlplace.runtime.prepare import prepare_composed
from rlplace.runtime.run import run
from rlplace.workers.roles.actor import LmActor
from rlplace.workers.roles.rollout import TextRolloutWorker
from tests.tiny_lm import tiny_model

TOKENS = 32  # of an answer, about the steps of an iteration: all answers are under way at once
PACES = {"steady": (1.0, 1.0), "uneven": (0.5, 1.5)}  # of iterations in turn
JOB = (
    "cluster.launcher=inline",
    "cluster.component_placement.actor=0",
    "cluster.component_placement.env=1",
    "cluster.component_placement.rollout=2",
    "rollout.engine=transformers",
    "rollout.kv_cache_memory=4MiB",
    "algorithm.prompts=2",
    "algorithm.samples_per_prompt=8",
    f"algorithm.max_new_tokens={TOKENS}",
    "runner.eval_every=0",
    "runner.sinks=[jsonl]",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What an iteration takes, in seconds."""

    generate_s: float
    learn_s: float
    turns: tuple[float, ...]  # factors of generating, by iteration in turn

    def engines(self) -> type[TextRolloutWorker]:
        pace = self

        class SlowEngines(TextRolloutWorker):
            step_s = 0.0

            def generate(self, iteration: int) -> Metrics:
                self.step_s = (
                    pace.generate_s / TOKENS * pace.turns[iteration % len(pace.turns)]
                )
                return super().generate(iteration)

            def _step(self, tally: Any) -> None:
                time.sleep(self.step_s)
                super()._step(tally)

        return SlowEngines

    def actor(self) -> type[LmActor]:
        pace = self

        class SlowActor(LmActor):
            def _receive(self, iteration: int, part: int) -> Any:
                received = super()._receive(iteration, part)
                time.sleep(
                    pace.learn_s
                )  # it counts as waiting: overlap is then what the table leaves
                return received

        return SlowActor


def iterate(
    model: Path, folder: Path, pace: Pace, staleness: int, iterations: int
) -> list[Mapping[str, float]]:
    """Metrics by iteration."""
    asked = (
        f"algorithm.max_staleness={staleness}",
        f"runner.total_iterations={iterations}",
    )
    words = [
        "--config-name",
        "disaggregated_grpo_llm",
        "model@actor.model=tiny",
        f"actor.model.path={model}",
        *JOB,
        *asked,
    ]
    (composed,) = compose.with_hydra([*words, f"runner.output_dir={folder}"])
    prepared = prepare_composed(composed)
    config = prepared.config
    layout = prepared.plan
    assert isinstance(layout, Plan)
    job = job_spec(config, layout)
    job = dataclasses.replace(
        job, workers={**job.workers, "actor": pace.actor(), "rollout": pace.engines()}
    )
    report = prepared.view
    with contextlib.redirect_stdout(io.StringIO()):
        made = run(job, report, resolved=composed.mapping)
    return [
        json.loads(line)
        for line in (made / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument(
        "--generate",
        type=float,
        default=0.6,
        help="seconds that the engines take for an iteration",
    )
    parser.add_argument(
        "--learn", type=float, default=0.6, help="seconds that the actor takes for one"
    )
    options = parser.parse_args()
    print(
        f"generating takes {options.generate:g} s, learning {options.learn:g} s, beside what they compute"
    )
    print(
        f"{'pace':<8} {'staleness':>9} {'s/iteration':>12} {'of 0':>6} {'age':>6} {'oldest':>7} {'mixed':>6}"
    )
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model")
        for name, turns in PACES.items():
            pace = Pace(generate_s=options.generate, learn_s=options.learn, turns=turns)
            alone = 0.0
            for staleness in (0, 1, 2):
                lines = iterate(
                    model, Path(folder) / "runs", pace, staleness, options.iterations
                )[1:]
                seconds = statistics.mean(line["time/iteration_s"] for line in lines)
                alone = alone or seconds
                age, mixed = (
                    statistics.mean(line[f"actor/{n}"] for line in lines)
                    for n in ("age", "age_mixed")
                )
                oldest = max(line["actor/age_max"] for line in lines)
                row = f"{seconds:12.2f} {seconds / alone:6.0%} {age:6.2f} {oldest:7.0f} {mixed:6.0%}"
                print(f"{name:<8} {staleness:9} {row}", flush=True)


if __name__ == "__main__":
    main()
