"""Seconds of an iteration with and without `cluster.lend: {actor: rollout}`, in turns, and predicted beside measured.

    python benchmarks/lend.py [--turns 3] [--iterations 6] [--generate 4] [--learn 1] [--move 0.1] [--staleness 0]

Everything runs as in a run: env, a tiny model and its engines, channels, weight sync, moves, loop. Only that a step of
an engine, an update, and a move of the actor take a given time beside what they compute, and no processor for it, as if
each had an accelerator of its own. A step takes longer the more answers are in flight, so a second engine helps.

There are one actor, one engine of its own, and one engine on the actor's accelerator. The profile is that of a run of
each kind before the turns, which does not count; measured is the median over all iterations but the first two of a run.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlplace.config import compose
from rlplace.foresight.predict import predict
from rlplace.foresight.profile import Profile, read_profile
from rlplace.placement.schedule import Residency
from rlplace.runtime.launched import job_spec
from rlplace.runtime.prepare import Prepared, prepare_composed
from rlplace.runtime.run import run
from rlplace.workers.roles.actor import LmActor
from rlplace.workers.roles.rollout import TextRolloutWorker
from rlplace.workers.worker import MoveReport
from tests.tiny_lm import tiny_model

TOKENS = 12  # of an answer, about the steps of an iteration: all answers are under way at once
ANSWERS = 16
BASE = 0.1  # share of the time of a step that does not depend on the answers in flight
LEND = "cluster.lend={actor: rollout}"
KINDS = {"without lending": (), "with lending": (LEND,)}
JOB = (
    "cluster.launcher=inline",
    "cluster.component_placement.actor=0",
    "cluster.component_placement.env=1",
    "cluster.component_placement.rollout=2",
    "rollout.engine=transformers",
    "rollout.kv_cache_memory=4MiB",
    "algorithm.prompts=4",
    f"algorithm.samples_per_prompt={ANSWERS // 4}",
    f"algorithm.max_new_tokens={TOKENS}",
    "runner.eval_every=0",
    "runner.sinks=[jsonl]",
    "checkpoint.every=0",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What the parts of an iteration take, in seconds. `generate_s`: of one engine with all answers."""

    generate_s: float
    learn_s: float
    move_s: float

    def engines(self) -> type[TextRolloutWorker]:
        pace = self

        class SlowEngines(TextRolloutWorker):
            def _step(self, counts: Any) -> None:
                share = BASE + (1.0 - BASE) * self.engine.in_flight / ANSWERS
                time.sleep(pace.generate_s / TOKENS * share)
                super()._step(counts)

        return SlowEngines

    def actor(self) -> type[LmActor]:
        pace = self

        class SlowActor(LmActor):
            def move(self, to: Residency) -> MoveReport:
                time.sleep(pace.move_s)
                return super().move(to)

            def setup(self) -> None:
                super().setup()
                trainer = self._learner._trainer
                step = trainer.step

                def slow_step(*arguments: Any) -> None:
                    time.sleep(pace.learn_s)
                    step(*arguments)

                vars(trainer)["step"] = slow_step

        return SlowActor


def prepared(model: Path, options: argparse.Namespace, *more: str) -> tuple[Any, Any]:
    """Return the composed config of one kind of run, and the prepared job."""
    words = [
        "--config-name",
        "disaggregated_grpo_llm",
        "model@actor.model=tiny",
        f"actor.model.path={model}",
        *JOB,
        f"runner.total_iterations={options.iterations}",
        f"algorithm.max_staleness={options.staleness}",
        *more,
    ]
    (composed,) = compose.with_hydra(words)
    return composed, prepare_composed(composed)


def iterate(composed: Any, job: Prepared, pace: Pace) -> tuple[list[float], Profile]:
    """Return the seconds of each iteration of a run but its first two, and the profile of the run."""
    spec = job_spec(job.config, job.plan)
    slow = {"actor": pace.actor(), "rollout": pace.engines()}
    spec = dataclasses.replace(spec, workers={**spec.workers, **slow})
    with contextlib.redirect_stdout(io.StringIO()):
        folder = run(spec, job.view, resolved=composed.mapping)
    seconds = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        numbers = json.loads(line)
        if "time/iteration_s" in numbers:
            seconds.append(numbers["time/iteration_s"])
    file = folder / "profile.json"
    return seconds[2:], read_profile(file.read_text(encoding="utf-8"), file=str(file))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument(
        "--generate", type=float, default=4.0, help="seconds of one engine, alone"
    )
    parser.add_argument("--learn", type=float, default=1.0, help="seconds of an update")
    parser.add_argument(
        "--move", type=float, default=0.1, help="seconds of a move of the actor"
    )
    parser.add_argument("--staleness", type=int, default=0, choices=(0, 1))
    options = parser.parse_args()
    pace = Pace(generate_s=options.generate, learn_s=options.learn, move_s=options.move)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        tiny_model(model)
        output = f"runner.output_dir={folder}/runs"
        jobs = {
            name: prepared(model, options, output, *more)
            for name, more in KINDS.items()
        }
        measured: dict[str, list[float]] = {name: [] for name in KINDS}
        profile: Profile | None = None
        for turn in range(options.turns + 1):
            for name, (composed, job) in jobs.items():
                seconds, seen = iterate(composed, job, pace)
                if turn:
                    measured[name] += seconds
                else:
                    profile = seen if profile is None else profile.merged(seen)
        assert profile is not None, "there is one run of each kind before the turns"
        show(jobs, measured, profile)


def show(jobs: Any, measured: dict[str, list[float]], profile: Profile) -> None:
    print("| run | measured s | predicted s | error |")
    print("|---|---|---|---|")
    for name, (_, job) in jobs.items():
        median_s = statistics.median(measured[name])
        predicted_s = predict(job.config, job.plan, job.case, profile).seconds
        error = predicted_s / median_s - 1.0
        print(f"| {name} | {median_s:.3f} | {predicted_s:.3f} | {error:+.1%} |")
    without_s, with_s = (statistics.median(measured[name]) for name in KINDS)
    print(f"\nlending takes {with_s / without_s - 1.0:+.1%}")


if __name__ == "__main__":
    main()
