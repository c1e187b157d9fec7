"""A run that chooses its placements, against fixed placements, on emulated work whose generation grows threefold.

    python benchmarks/pilot.py [--iterations 160] [--scale 1.0] [--launcher inline] [--output runs/pilot]

Three components work at once, their ranks share the work, and the work is sleeping: `rollout` generates, `actor`
learns and `scorer` scores. Each takes more than half of an accelerator's memory, so that no two fit on the same of 8
accelerators. The work of generation is even for two fifths of the run, grows threefold over one fifth, and is even
again.

Printed are the seconds of all iterations, with the changes, for: each fixed placement that no other one dominates;
the best schedule, which is known afterwards: in each iteration the fastest of the fixed placements, without a cost of
changes; and `cluster.elastic: on`, which begins with the placement that is the best one at the start. For work that
does not change: the same placement with `off` and with `on`, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rlplace
from rlplace import Job, Stage, Worker, full
from rlplace.json_text import parsed_object, read_object

GENERATE_S = 1.0  # seconds of one accelerator, in the first iterations
LEARN_S = 2.0
SCORE_S = 0.8
ITERATIONS = "RLPLACE_BENCHMARK_ITERATIONS"
SCALE = "RLPLACE_BENCHMARK_SCALE"
STEADY = "RLPLACE_BENCHMARK_STEADY"
PLACEMENTS = (
    {"actor": "0-3", "rollout": "4-5", "scorer": "6-7"},
    {"rollout": "0-3", "actor": "4-5", "scorer": "6-7"},
    {"scorer": "0-3", "actor": "4-5", "rollout": "6-7"},
)


def grown(iteration: int) -> float:
    """The work of generation in an iteration, as a multiple of that in the first one."""
    if STEADY in os.environ:
        return 1.0
    done = iteration / int(os.environ[ITERATIONS])
    return 1.0 + 2.0 * min(1.0, max(0.0, (done - 0.4) / 0.2))


class Shared(Worker):
    """A rank that works for its share of a component's seconds."""

    def work(self, seconds: float) -> None:
        time.sleep(seconds * float(os.environ[SCALE]) / self.world_size)


class Rollout(Shared):
    def generate(self, iteration: int) -> None:
        self.work(GENERATE_S * grown(iteration))


class Learner(Shared):
    def learn(self, iteration: int) -> None:
        self.work(LEARN_S)


class Scorer(Shared):
    def score(self, iteration: int) -> None:
        self.work(SCORE_S)


JOB = Job(
    name="pilot",
    components={"actor": Learner, "rollout": Rollout, "scorer": Scorer},
    stages=[
        Stage(
            "work",
            full("rollout").calls("generate"),
            full("actor").calls("learn"),
            full("scorer").calls("score"),
        )
    ],
)


def config(options: argparse.Namespace, placement: dict[str, str], mode: str) -> Any:
    memory = {"memory": {"full": "9GiB"}}
    return {
        "cluster": {
            "launcher": options.launcher,
            "accelerators_per_node": 8,
            "accelerator": {"kind": "emulated"},
            "component_placement": placement,
            "elastic": {"mode": mode, "every": options.every},
        },
        "runner": {
            "total_iterations": options.iterations,
            "output_dir": str(options.output),
            "sinks": ["jsonl"],
        },
        "checkpoint": {"every": 0},
        **dict.fromkeys(placement, memory),
    }


def run(
    options: argparse.Namespace, placement: dict[str, str], mode: str = "off"
) -> tuple[list[float], dict[str, Any]]:
    """Train; return the seconds of each iteration, with the change before it, and the run's summary."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = rlplace.run(JOB, config(options, placement, mode), [])
    if code:
        sys.exit(told.getvalue())
    newest = max(options.output.glob("*/*/summary.json"), key=os.path.getmtime)
    lines = (newest.parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    numbers = [parsed_object(line) for line in lines]
    seconds = [n["time/iteration_s"] + n.get("time/change_s", 0.0) for n in numbers]
    return seconds, read_object(newest, "--output")


def show(name: str, seconds: Sequence[float], best_s: float) -> None:
    third = len(seconds) // 3
    parts = [statistics.fmean(seconds[:third]), statistics.fmean(seconds[-third:])]
    whole = sum(seconds)
    print(
        f"{name:46}{whole:9.1f}{whole / best_s:9.3f}{parts[0]:11.3f}{parts[1]:11.3f}",
        flush=True,
    )


def name_of(placement: dict[str, str]) -> str:
    return ", ".join(f"{c} {place}" for c, place in sorted(placement.items()))


def growing(options: argparse.Namespace) -> None:
    os.environ.pop(STEADY, None)
    fixed = [run(options, placement)[0] for placement in PLACEMENTS]
    on, summary = run(options, PLACEMENTS[0], "on")
    schedule = [min(each) for each in zip(*fixed, strict=True)]
    best_s = sum(schedule)
    print(
        f"generation grows threefold, {options.iterations} iterations, {options.launcher}\n\n"
        f"{'':46}{'seconds':>9}{'of best':>9}{'first 1/3':>11}{'last 1/3':>11}"
    )
    for placement, seconds in zip(PLACEMENTS, fixed, strict=True):
        show(name_of(placement), seconds, best_s)
    show("the best schedule, known afterwards", schedule, best_s)
    show("cluster.elastic: on", on, best_s)
    least = min(sum(each) for each in fixed)
    print(
        f"\non: {sum(on) / best_s - 1.0:+.1%} of the best schedule, "
        f"{least / sum(on):.2f} times as fast as the best fixed placement "
        f"(the best schedule: {least / best_s:.2f} times)"
    )
    for event in summary["elastic"]["events"]:
        print(f"  after {event['iteration']}: {event['decision']}: {event['why']}")
    elastic = summary["elastic"]
    print(f"  {elastic['searches']} searches, {elastic['search_s']:.1f} s\n")


def steady(options: argparse.Namespace) -> None:
    os.environ[STEADY] = "1"
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    changes = 0
    searches = 0
    searching_s = 0.0
    driver_s = 0.0
    for turn in range(options.repeat):
        # In turns, and each of them first as often as the other
        for mode in ("off", "on") if turn % 2 == 0 else ("on", "off"):
            took, summary = run(options, PLACEMENTS[0], mode)
            seconds[mode].append(sum(took))
            changes += len(summary.get("changes", ()))
            if mode == "on":
                searches += summary["elastic"]["searches"]
                searching_s += summary["elastic"]["search_cpu_s"]
                driver_s += summary["elastic"]["driver_s"]
    off_s, on_s = (statistics.median(seconds[mode]) for mode in ("off", "on"))
    print(
        f"work that does not change, {options.repeat} runs each: off {off_s:.2f} s, on {on_s:.2f} s, "
        f"{on_s / off_s - 1.0:+.2%}; {searches} searches, {changes} changes"
    )
    whole_s = sum(seconds["on"])
    print(
        f"  of the seconds of on: {searching_s / whole_s:.2%} processor seconds of searches (nice 19), "
        f"{driver_s / whole_s:.3%} of the driver"
    )
    for mode, each in seconds.items():
        print(f"  {mode}: {', '.join(f'{one:.2f}' for one in each)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=160)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--scale", default="1.0", help="of all seconds of work")
    parser.add_argument("--launcher", choices=("inline", "ray"), default="inline")
    parser.add_argument("--repeat", type=int, default=3, help="runs of steady work")
    parser.add_argument("--only", choices=("growing", "steady"))
    parser.add_argument("--output", type=Path, default=Path("runs/pilot"))
    options = parser.parse_args()
    os.environ[SCALE] = options.scale
    os.environ[ITERATIONS] = str(options.iterations)
    if options.only != "steady":
        growing(options)
    if options.only != "growing":
        steady(options)


if __name__ == "__main__":
    main()
