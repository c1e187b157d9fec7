"""Predicted beside measured seconds of an iteration, over placements that the profile was not taken on.

    python -m benchmarks.prediction [pendulum|cheetah|grpo|ppo ...] [--iterations 16] [--repeat 1] [--tries 3]

For each job the short runs of `python -m rlplace.profile` and a run of each placement below take turns, in random
order: the clock of a machine drifts by ten percent in minutes, and what was measured first would be faster or slower
throughout. Then each placement is predicted from the profile alone. Measured is the median of the iterations after the
second, and with `--repeat` the median of that over runs. A run during which other processes used more than a twelfth of
the processors is made again, up to `--tries` times; the share of the try that counts, the least disturbed one, is
printed. Printed are the error of every placement, their median and 95th percentile, and how far both orders agree
(Kendall's tau).
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.alone import Alone
from rlplace.cli.profile import distinct, runs
from rlplace.config import compose
from rlplace.errors import RlplaceError
from rlplace.foresight.measure import Measured, Variant, run, variants
from rlplace.foresight.predict import predict
from rlplace.foresight.profile import Profile
from rlplace.runtime.prepare import Prepared, prepare

PLACE = "cluster.component_placement."
PENDULUM = ("--config-name", "hybrid_ppo")  # a simulator of 6 microseconds a step
CHEETAH = (
    *PENDULUM,
    "env.id=HalfCheetah-v5",
    "env.total_num_envs=32",
    "actor.model.hidden=[256,256]",
)


class Job(NamedTuple):
    """A job, and where it is to be predicted."""

    name: str
    words: tuple[str, ...]
    placements: Mapping[str, tuple[str, ...]]


def spread(actor: str, env: str, rollout: str, *more: str) -> tuple[str, ...]:
    return (
        f"{PLACE}actor={actor}",
        f"{PLACE}env={env}",
        f"{PLACE}rollout={rollout}",
        *more,
    )


SIMULATORS = {
    "env and rollout apart": spread("0-7", "0-1", "2-3"),
    "few env ranks": spread("0-7", "0-1", "4-7"),
    "few rollout ranks": spread("0-3", "0-3", "4-5"),
    "four learn": spread("0-3", "0-1", "2-3"),
    "two learn, apart": spread("0-1", "2-3", "4-5"),
    "one each, apart": spread("0", "1", "2"),
    "two learn, shared": spread("0-1", "0", "1"),
    "one stage group": spread("0-3", "0-3", "4-7", "rollout.pipeline_stage_num=1"),
    "env alone": spread("0-1", "0-7", "0-1"),
    "one rollout": spread("0-3", "4-7", "0"),
}
# A tiny model of random weights (scripts/get_model tiny, tiny_reward), whose answers nearly all have their full length.
TINY = ("model@actor.model=tiny", "rollout.engine=transformers", "env.chat=false")
GRPO = (
    "--config-name",
    "hybrid_grpo_llm",
    *TINY,
    "runner.eval_every=0",
    "algorithm.max_new_tokens=48",
)
PPO = (
    "--config-name",
    "rlhf_tiny",
    "critic.warmup_iterations=0",
    "algorithm.max_new_tokens=32",
)
LANGUAGE = {
    "one each, apart": spread("0", "1", "2"),
    "one version ahead": spread("0", "1", "2", "algorithm.max_staleness=1"),
    "gradients while generating": spread(
        "0", "1", "2", "algorithm.accumulate_early=true"
    ),
    "two learn, apart": spread("0-1", "2", "2"),
    "two engines, one shared": spread("0-1", "0", "1-2"),
    "three engines": spread("0", "0", "0-2"),
}
SCORED = {
    "reference apart": spread(
        "0", "0", "0", f"{PLACE}reference=1", f"{PLACE}critic=0", f"{PLACE}reward=0"
    ),
    "one engine, apart": spread(
        "0", "0", "2", f"{PLACE}reference=1", f"{PLACE}critic=1", f"{PLACE}reward=1"
    ),
    "critic apart": spread("0", "0", "0-2", f"{PLACE}critic=2"),
}
JOBS = {
    "pendulum": Job("InvertedPendulum, 64x64", PENDULUM, SIMULATORS),
    "cheetah": Job(
        "HalfCheetah, 256x256",
        CHEETAH,
        {name: SIMULATORS[name] for name in [*SIMULATORS][1::2]},
    ),
    "grpo": Job("GRPO", GRPO, LANGUAGE),
    "ppo": Job("PPO, reference, reward model", PPO, SCORED),
}
DISTURBED = 1 / 12  # of the processors' time, by others


class Row(NamedTuple):
    """Seconds of an iteration."""

    name: str
    predicted: float
    measured: float
    stages: Mapping[str, tuple[float, float]]  # predicted, measured
    others: float  # share of the processors that other processes used meanwhile

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0] if __doc__ else ""
    )
    parser.add_argument("jobs", nargs="*", choices=[*JOBS, []], default=[])
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--tries", type=int, default=3)
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.jobs or JOBS:
        rows += measure(JOBS[name], options.iterations, options.repeat, options.tries)
    errors = sorted(abs(row.error) for row in rows)
    percentile = errors[min(len(errors) - 1, math.ceil(0.95 * len(errors)) - 1)]
    print(
        f"\n{len(rows)} placements: median error {errors[len(errors) // 2]:.1%}, 95th percentile {percentile:.1%}"
    )
    return 0


def timed(variant: Variant, iterations: int, tries: int) -> tuple[float, Measured]:
    """Run a variant until others leave it alone; return what others used in the least disturbed try, and that."""
    found: list[tuple[float, int, Measured]] = []
    for number in range(tries):
        with Alone() as alone:
            measured = run(variant, iterations)
        found.append((alone.others(), number, measured))
        if alone.others() < DISTURBED:
            break
    others, _, measured = min(found)
    return others, measured


def measure(job: Job, iterations: int, repeat: int, tries: int) -> list[Row]:
    """Run the variants of a job's profile and its placements, and predict these."""
    base = prepared(job.words)
    every = variants(base.mapping, base.plan.placement.topology.num_accelerators)
    known = [variant for variant in distinct(every) if runs(variant)]
    there = {
        name: prepared((*job.words, *words)) for name, words in job.placements.items()
    }
    tried = [
        *known,
        *(Variant(name=name, mapping=target.mapping) for name, target in there.items()),
    ]
    found: dict[str, list[tuple[float, Measured]]] = {}
    print(f"\n{job.name}: {len(tried)} placements run in turns", flush=True)
    for variant in random.Random(0).sample(tried * repeat, len(tried) * repeat):
        try:
            found.setdefault(variant.name, []).append(timed(variant, iterations, tries))
        except RlplaceError as error:
            print(f"{variant.name:24} failed: {str(error).splitlines()[0]}")
    profile: Profile | None = None
    known = [variant for variant in known if variant.name in found]
    for _, measured in (each for variant in known for each in found[variant.name]):
        profile = (
            measured.profile if profile is None else profile.merged(measured.profile)
        )
    assert profile is not None, "the job as it is runs"
    names = ", ".join(variant.name for variant in known)
    most = max(others for variant in known for others, _ in found[variant.name])
    print(f"profile of {len(known)} of them ({names}); others {most:.0%}\n")
    stages = "rollout, learn, sync and moves: ms (measured)"
    print(
        f"{'placement':28}{'predicted':>10}{'measured':>10}{'error':>8}{'others':>8}   {stages}",
        flush=True,
    )
    rows = [
        compared(name, there[name], profile, found[name])
        for name in there
        if name in found
    ]
    for row in rows:
        stages = "  ".join(
            f"{a * 1e3:.0f} ({b * 1e3:.0f})" for a, b in row.stages.values()
        )
        numbers = f"{row.predicted:9.3f}s{row.measured:9.3f}s{row.error:+8.1%}{row.others:8.0%}"
        print(f"{row.name:28}{numbers}   {stages}", flush=True)
    print(
        f"order: Kendall's tau {tau([(row.predicted, row.measured) for row in rows]):.2f}"
    )
    return rows


def prepared(words: Sequence[str]) -> Prepared:
    (composed,) = compose.with_hydra(words)
    return prepare(composed.mapping, name=composed.name, sources=composed.sources)


def compared(
    name: str, job: Prepared, profile: Profile, found: Sequence[tuple[float, Measured]]
) -> Row:
    numbers = predict(job.config, job.plan, job.case, profile).numbers

    def both(*stages: str) -> tuple[float, float]:
        measured = [
            sum(each.seconds[s]["measured"] for s in stages if s in each.seconds)
            for _, each in found
        ]
        return sum(
            numbers.get(f"time/{stage}_s", 0.0) for stage in stages
        ), statistics.median(measured)

    stages = {
        "rollout": both("rollout"),
        "learn": both("infer", "learn"),
        "sync": both("sync", "moves"),
    }
    return Row(name, *both("iteration"), stages, max(others for others, _ in found))


def tau(pairs: Iterable[tuple[float, float]]) -> float:
    """Return Kendall's tau of two orders without ties: 1 for equal, -1 for opposite ones."""
    signs = [
        math.copysign(1.0, (a[0] - b[0]) * (a[1] - b[1]))
        for a, b in itertools.combinations(pairs, 2)
        if a[1] != b[1]
    ]
    if signs:
        return sum(signs) / len(signs)
    return 1.0


if __name__ == "__main__":
    sys.exit(main())
