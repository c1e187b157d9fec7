"""How fast and how near a search gets on clusters of 8, 64 and 1,024 accelerators.

    python -m benchmarks.search_scale [--seconds 60] [--accelerators 8,64,1024] [--jobs batch,ahead,scored]

Simulators have three components, language models (text) five that use accelerators, under a made-up profile. `batch` is
GRPO of an 8B on H100 under published rates, with 8,192 samples, and 32,768 on 1,024 accelerators. `ahead` generates it
one version ahead of learning. `scored` is PPO with the same samples, with a critic and a reference. Seconds are of one
processor. Those of all predictions are told beside those of the whole search; a search that is out of time ends with
the prediction that it is at.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from benchmarks.batch_jobs import batch_jobs
from rlplace.config import compose
from rlplace.config.schema import Config
from rlplace.foresight.known import find_profile
from rlplace.foresight.predict import Prediction
from rlplace.foresight.profile import Curve, Point, Profile
from rlplace.foresight.search import Answer, Search
from rlplace.foresight.space import Layout, Space
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan
from rlplace.runtime.prepare import prepare_composed

# Part of a cost's name -> (size, seconds) of laps: a line from a fixed cost on.
_COSTS: Sequence[tuple[str, Sequence[tuple[float, float]]]] = (
    ("minibatch", ((1, 4e-4), (4096, 6e-3))),
    ("micro_batch", ((1, 1e-3), (4096, 8e-2))),
    ("score", ((1, 5e-4), (4096, 3e-2))),
    ("infer/infer", ((1, 5e-4), (4096, 3e-2))),
    ("prefill", ((1, 1e-3), (512, 1e-2))),
    ("decode", ((1, 5e-3), (64, 1e-2))),
    ("policy", ((1, 2e-4), (64, 4e-4))),
    ("sim", ((1, 1e-4), (64, 1.3e-3))),
    ("exchange", ((1, 5e-5), (1024, 1e-3))),
    ("_call", ((0, 2e-5),)),
    ("", ((0, 1e-4),)),
)
_METHODS = (
    *(f"move_{to}/rest" for to in ("off", "weights", "full")),
    *("push_weights/rest", "pull_weights/rest", "compute_advantages/rest"),
    *(f"run/{part}" for part in ("sim", "reward", "wait", "put", "rest")),
    *(
        f"infer/{part}"
        for part in ("infer", "score", "exchange", "infer_wait", "wait", "rest")
    ),
    *(
        f"learn/{part}"
        for part in (
            "minibatch",
            "micro_batch",
            "estimate",
            "exchange",
            "wait",
            "step",
            "rest",
        )
    ),
    *(
        f"generate/{part}"
        for part in ("policy", "prefill", "decode", "wait", "put", "rest", "update")
    ),
)


def made_up(components: Sequence[str]) -> Profile:
    """Return a profile of hosts with 64 processors."""
    names = [f"{c}.{method}" for c in components for method in _METHODS]
    names += [f"{c}/ray_call" for c in (*components, "driver")]
    costs = {}
    for name in names:
        points = next(points for part, points in _COSTS if part in name)
        costs[name] = Curve(
            points=tuple(
                Point(size=x, laps=1, cpu_s=s, least_cpu_s=s, blocked_s=0)
                for x, s in points
            )
        )
    lengths = {
        "env.prompt_tokens": (20.0, 40.0, 60.0),
        "rollout.answer_tokens": (20.0, 40.0, 80.0, 120.0),
    }
    return Profile(
        machine={"cores": 64}, versions={}, subjects={}, costs=costs, samples=lengths
    )


class TimedSearch(Search):
    """A search that counts the seconds of its predictions."""

    predicting_s = 0.0

    def predict(
        self, config: Config, plan: Plan, case: MemoryCase, layout: Layout
    ) -> Prediction:
        began = time.process_time()
        try:
            return super().predict(config, plan, case, layout)
        finally:
            self.predicting_s += time.process_time() - began


def searched(words: Sequence[str], seconds: float) -> tuple[Answer, float, float]:
    """Search a job; return the answer, the seconds, and those of them that predictions took."""
    (composed,) = compose.with_hydra(["--config-name", *words])
    job = prepare_composed(composed)
    space = Space(job.config, job.plan)
    profile = find_profile(job.config, job.plan, job.case)
    if profile is None:
        profile = made_up(job.plan.placement.components)
    search = TimedSearch(space, profile)
    began = time.process_time()
    answer = search.run(keep=1, over=lambda: time.process_time() - began > seconds)
    return answer, time.process_time() - began, search.predicting_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each search")
    parser.add_argument("--accelerators", default="8,64,1024")
    parser.add_argument("--jobs", default="simulators,text,batch,ahead,scored")
    options = parser.parse_args()
    row = "{:<12} {:>12} {:>9} {:>12} {:>9} {:>9} {:>9} {:>8}"
    print(
        row.format(
            "job",
            "accelerators",
            "seconds",
            "predicting",
            "branches",
            "predicted",
            "best s",
            "gap",
        )
    )
    for count in map(int, options.accelerators.split(",")):
        nodes = (
            f"cluster.num_nodes={max(1, count // 8)}",
            "cluster.accelerators_per_node=8",
        )
        batches = batch_jobs(count)
        cases = {
            "simulators": (
                "hybrid_ppo",
                f"env.total_num_envs={max(128, 4 * count)}",
                "algorithm.rollout_steps=8",
                *nodes,
            ),
            "text": (
                "rlhf_tiny",
                "runner.eval_every=0",
                f"algorithm.prompts={max(8, count)}",
                "cluster.component_placement.env=cpu",
                *nodes,
            ),
            "batch": batches["grpo"],
            "ahead": batches["ahead"],
            "scored": batches["ppo"],
        }
        for name in options.jobs.split(","):
            words = cases[name]
            answer, seconds, predicting = searched(words, options.seconds)
            best = answer.best.seconds if answer.best else float("nan")
            counts = answer.counts
            gap = "proven" if answer.proven else f"{answer.gap:.1%}"
            numbers = (
                f"{seconds:.1f}",
                f"{predicting:.1f}",
                counts["branches"],
                counts["predicted"],
            )
            print(row.format(name, count, *numbers, f"{best:.3f}", gap), flush=True)


if __name__ == "__main__":
    main()
