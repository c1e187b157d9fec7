"""How many different plans a core predicts in a second, for a batch of 8,192 samples on 64 H100.

    python -m benchmarks.prediction_speed [--accelerators 64] [--plans 40] [--jobs grpo,reference,ppo,ahead]
    python -m benchmarks.prediction_speed --against ../other/checkout --rounds 7

The jobs train an 8B under published rates, with 512 prompts and 16 samples of each: GRPO, GRPO with a reference, PPO
with a critic and a reference, and GRPO with generation one version ahead. Scorers and critic are on the actor's
accelerators. The plans differ in the sizes of actor and rollout, and in whether both share accelerators (collocated:
all of them; hybrid: those of the smaller one; disaggregated: none). One search predicts them all, so what several plans
have in common is computed once. Seconds are processor seconds, without those of making the plans. With `--against`, the
code of another checkout predicts the same plans, in turns with this one and each time in a new process; printed are the
ratio, and the largest difference of the predicted seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.batch_jobs import batch_jobs
from rlplace.config import compose
from rlplace.contract.planning import make_plan, memory_case
from rlplace.errors import ProblemsError
from rlplace.foresight.known import find_profile
from rlplace.foresight.loads import Size
from rlplace.foresight.search import Search
from rlplace.foresight.space import Layout, Space
from rlplace.runtime.prepare import prepare_composed

_ONCE = "--once"
_HERE = Path(__file__).resolve().parents[1]
_COUNTS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 128, 256, 512)


class Round(NamedTuple):
    """Plans that were predicted one after the other. Each field has a value for each plan.

    `mode`: collocated, hybrid or disaggregated. `predicted`: predicted seconds of an iteration. `took`: processor
    seconds of the prediction.
    """

    mode: list[str]
    predicted: list[float]
    took: list[float]

    @property
    def rate(self) -> float:
        """Predictions in a processor second."""
        return len(self.took) / sum(self.took)


def layouts(space: Space, accelerators: int) -> Iterator[tuple[str, Layout]]:
    """Yield (mode, layout) pairs of many sizes.

    Rollout is beside the actor where there is room, else on the actor's accelerators.
    """
    now = space.current()
    for actor in reversed(_COUNTS):
        for rollout in reversed(_COUNTS):
            if max(actor, rollout) > accelerators or actor < 8:
                continue
            start = actor if actor + rollout <= accelerators else 0
            if start == 0 and actor != rollout != accelerators:
                continue
            mode = "disaggregated"
            if start == 0:
                mode = "collocated" if actor == rollout else "hybrid"
            # Components beside the actor use its accelerators
            sizes = {c: Size(actor, actor) for c in space.free}
            starts = dict.fromkeys(space.free, 0)
            sizes["rollout"] = Size(rollout, rollout)
            starts["rollout"] = start
            yield (
                mode,
                Layout(
                    mode=now.mode,
                    sizes={**now.sizes, **sizes},
                    starts={**now.starts, **starts},
                ),
            )


def once(words: Sequence[str], accelerators: int, plans: int) -> Round:
    """Predict up to `plans` plans of a job with one search. `words`: the job's command line."""
    (composed,) = compose.with_hydra(["--config-name", *words])
    prepared = prepare_composed(composed)
    space = Space(prepared.config, prepared.plan)
    profile = find_profile(prepared.config, prepared.plan, prepared.case)
    assert profile is not None
    search = Search(space, profile)
    found = Round([], [], [])
    for mode, layout in layouts(space, accelerators):
        if len(found.predicted) == plans:
            break
        config = space.config_of(layout)
        try:
            plan = make_plan(config, space.plan.topology)
        except ProblemsError:
            continue
        case = memory_case(plan, config)
        began = time.process_time()
        prediction = search.predict(config, plan, case, layout)
        found.took.append(time.process_time() - began)
        found.predicted.append(prediction.seconds)
        found.mode.append(mode)
    return found


def apart(folder: Path, words: Sequence[str], accelerators: int, plans: int) -> Round:
    """Return the result of `once` with the code in `folder`, from a new process."""
    command = [sys.executable, __file__, _ONCE, json.dumps(words)]
    command += ["--accelerators", str(accelerators), "--plans", str(plans)]
    # An older checkout may lack modules that this script imports
    paths = os.pathsep.join((str(folder), str(_HERE)))
    there = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        command, env=there, cwd=folder, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return Round(**found)


def rates(found: Round) -> str:
    """Return a text with the predictions in a second, of all plans and of those of each mode."""
    line = f"{len(found.took)} plans, {found.rate:.1f} predictions a second"
    each = []
    for mode in dict.fromkeys(found.mode):
        took = [s for m, s in zip(found.mode, found.took, strict=True) if m == mode]
        each.append(f"{mode} {len(took) / sum(took):.1f}")
    line += f" ({', '.join(each)}; the first took {found.took[0]:.3f} s"
    return line + f", the median {median(found.took):.3f} s)"


def compared(found: Round, other: Round) -> str:
    """Return a text that compares a round with one of another checkout."""
    pairs = zip(found.predicted, other.predicted, strict=True)
    differ = max(abs(a / b - 1) for a, b in pairs)
    ratio = found.rate / other.rate
    line = f"there {other.rate:.1f}, here {ratio:.1f} times as many"
    return f"{line}; predicted seconds differ by at most {differ:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accelerators", type=int, default=64)
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", default="grpo,reference,ppo,ahead")
    parser.add_argument("--against", type=Path, help="folder of another checkout")
    parser.add_argument(
        _ONCE,
        metavar="WORDS",
        help="print one round as JSON, for a command line given as a JSON list",
    )
    options = parser.parse_args()
    if options.once:
        words = json.loads(options.once)
        found = once(words, options.accelerators, options.plans)
        print(json.dumps(found._asdict()))
        return
    jobs = batch_jobs(options.accelerators)
    for job in options.jobs.split(","):
        rounds: list[float] = []
        ratios: list[float] = []
        for _ in range(options.rounds):
            found = apart(_HERE, jobs[job], options.accelerators, options.plans)
            rounds.append(found.rate)
            line = f"{job:<10} {rates(found)}"
            if options.against:
                folder = options.against.resolve()
                other = apart(folder, jobs[job], options.accelerators, options.plans)
                ratios.append(found.rate / other.rate)
                line += f"; {compared(found, other)}"
            print(line, flush=True)
        line = f"{job:<10} median {median(rounds):.1f} predictions a second"
        if ratios:
            line += f", {median(ratios):.1f} times as many as there"
        print(line, flush=True)


if __name__ == "__main__":
    main()
