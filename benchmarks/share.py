"""Two runs that use the same accelerators in turns, against one after the other, on emulated work.

    python benchmarks/share.py [--iterations 20] [--scale 1.0] [--launcher inline] [--repeat 2] [--output runs/share]

A run has the stages `rollout` on accelerators 4-7 and `learn` on 0-3; the work is sleeping. Each component takes more
than half of an accelerator's memory, so one run's component has to leave before the other run's comes.

Three pairs of runs: stages of equal length; rollout twice as long as learn; and both stages of both runs on all
accelerators, where no stage leaves anything idle. For each pair, in turns: run A alone, run B alone, `rlplace share A
B`. Printed are the seconds of an iteration alone; the seconds of an iteration in turns, while both runs work, measured
and predicted; and the gain: work of both runs in some time, divided by their work in this time one after the other. The
prediction comes from the profiles of the runs alone and the rule of the arbiter.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rlplace import Job, Stage, Worker, full

ROOT = Path(__file__).resolve().parent.parent
SCALE = "RLPLACE_BENCHMARK_SCALE"
CONFIG = """
job: benchmarks.share:JOB
cluster:
  launcher: {launcher}
  accelerators_per_node: 8
  accelerator: {{kind: emulated}}
  shared: true
  component_placement: {{actor: {actor}, rollout: {rollout}}}
actor: {{enable_offload: true, memory: {{full: 9GiB}}, seconds: {learn}, times: {times}}}
rollout: {{enable_offload: true, memory: {{full: 9GiB}}, seconds: {generate}}}
runner: {{total_iterations: {iterations}, output_dir: {output}, sinks: [jsonl]}}
checkpoint: {{every: 0}}
"""
# Name -> places of actor and rollout, seconds of rollout and learn
PAIRS = {
    "equal": ("0-3", "4-7", 0.5, 0.5),
    "long rollout": ("0-3", "4-7", 0.8, 0.4),
    "all accelerators": ("0-7", "0-7", 0.5, 0.5),
}


class Sleeps(Worker):
    def work(self) -> None:
        time.sleep(float(self.config["seconds"]) * float(os.environ[SCALE]))


class Rollout(Sleeps):
    def generate(self) -> None:
        self.work()


class Learner(Sleeps):
    def learn(self) -> None:
        self.work()
        if self.rank == 0:
            with open(self.config["times"], "a", encoding="utf-8") as file:
                file.write(f"{time.time()}\n")


JOB = Job(
    name="share",
    components={"actor": Learner, "rollout": Rollout},
    stages=[
        Stage("rollout", full("rollout").calls("generate")),
        Stage("learn", full("actor").calls("learn")),
    ],
)


class Run:
    """One of the two runs of a pair. `times`: file with the end of each of its iterations."""

    def __init__(self, options: argparse.Namespace, name: str, pair: str) -> None:
        actor, rollout, generate_s, learn_s = PAIRS[pair]
        self.name = name
        self.file = options.output / f"{name}.yaml"
        self.times = options.output / f"{name}.times"
        self._output = options.output
        text = CONFIG.format(
            launcher=options.launcher,
            actor=actor,
            rollout=rollout,
            generate=generate_s,
            learn=learn_s,
            iterations=options.iterations,
            output=options.output,
            times=self.times.resolve(),
        )
        self.file.write_text(text, encoding="utf-8")

    def ends(self) -> list[float]:
        """Return the end of each iteration, in seconds, and forget them."""
        lines = self.times.read_text(encoding="utf-8").splitlines()
        self.times.unlink()
        return [float(line) for line in lines]

    def profile(self) -> str:
        """Return the folder of the run's newest run."""
        folders = (self._output / self.name).glob("*/profile.json")
        return str(max(folders, key=os.path.getmtime).parent)


def command(*words: str) -> str:
    """Run a command of rlplace, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def between(ends: list[float], first_s: float, last_s: float) -> float:
    """Return the seconds of an iteration, from the iterations that end between two times."""
    inside = [end for end in ends if first_s <= end <= last_s]
    return (inside[-1] - inside[0]) / (len(inside) - 1)


def measured(options: argparse.Namespace, pair: str) -> None:
    runs = [Run(options, name, pair) for name in ("a", "b")]
    alone: dict[str, list[float]] = {"a": [], "b": []}
    together: dict[str, list[float]] = {"a": [], "b": []}
    predicted = ""
    for _ in range(options.repeat):
        for run in runs:
            command("rlplace.train", str(run.file))
            ends = run.ends()
            # The first iteration differs: all components come to their places
            alone[run.name].append(between(ends, ends[0], ends[-1]))
        words = []
        for run in runs:
            words += [str(run.file), f"profile={run.profile()}"]
        predicted = command("rlplace.share", *words, "--plan")
        command("rlplace.share", *words)
        both = {run.name: run.ends() for run in runs}
        # While both runs work
        first_s = max(ends[0] for ends in both.values())
        last_s = min(ends[-1] for ends in both.values())
        for name, ends in both.items():
            together[name].append(between(ends, first_s, last_s))
    gain = 0.0
    print(f"{pair}: {options.iterations} iterations, {options.launcher}")
    for run in runs:
        alone_s = statistics.median(alone[run.name])
        in_turns_s = statistics.median(together[run.name])
        gain += alone_s / in_turns_s
        row = re.search(rf"[AB] +{run.name} +([\d.]+) s +([\d.]+) s", predicted)
        assert row is not None, predicted
        print(
            f"  {run.name}   alone {alone_s:.3f} s (profile {float(row[1]):.3f})   "
            f"in turns {in_turns_s:.3f} s (predicted {float(row[2]):.3f})"
        )
    foreseen = re.search(r"do ([\d.]+) times the work", predicted)
    assert foreseen is not None, predicted
    print(f"  gain {gain:.2f} (predicted {foreseen[1]})\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--scale", default="1.0", help="of all seconds of work")
    parser.add_argument("--launcher", choices=("inline", "ray"), default="inline")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--only", choices=tuple(PAIRS))
    parser.add_argument("--output", type=Path, default=Path("runs/share"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    os.environ[SCALE] = options.scale
    for pair in PAIRS:
        if options.only in (None, pair):
            measured(options, pair)


if __name__ == "__main__":
    main()
