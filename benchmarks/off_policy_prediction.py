"""Predict off-policy jobs: each is profiled with one rank of each component, and predicted and measured with more.

    python benchmarks/off_policy_prediction.py                   td3, dqn, td3_bc and iql
    python benchmarks/off_policy_prediction.py sac --turns 5

Compares seconds of a processor, of the slowest component of an iteration: these do not depend on other programs of the
machine as much as the seconds of a clock do. A turn is a run of each number of ranks, one after the other. Prints the
medians over the turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import rlplace
from rlplace.foresight.model import model_of
from rlplace.foresight.profile import Profile, read_profile

ITERATIONS = 6
# Steps of an iteration, each with an update
STEPS = 96
ALGORITHMS = ("td3", "dqn", "td3_bc", "iql")
RANKS = (1, 2, 4)
CALLS = {"actor": "learn", "rollout": "act", "replay": "serve"}


def recorded(folder: Path) -> Path:
    """Write random steps of Pendulum-v1 for the offline algorithms; return their file."""
    env = gymnasium.make("Pendulum-v1")
    env.action_space.seed(0)
    shown, _ = env.reset(seed=0)
    steps: dict[str, list[Any]] = defaultdict(list)
    for _ in range(2000):
        action = env.action_space.sample()
        after, reward, terminated, truncated, _ = env.step(action)
        steps["observations"].append(shown)
        steps["actions"].append(action)
        steps["rewards"].append(reward)
        steps["terminated"].append(terminated)
        steps["truncated"].append(truncated)
        steps["next_observations"].append(after)
        shown = after
        if truncated:
            shown, _ = env.reset()
    file = folder / "steps.npz"
    arrays = {name: np.array(values) for name, values in steps.items()}
    np.savez(file, allow_pickle=False, **arrays)
    return file


def words(algorithm: str, steps: Path, ranks: int) -> tuple[str, list[str]]:
    """Return the name of a config, and overrides that train an algorithm with some ranks of each component."""
    config = algorithm
    accelerators = f"0-{ranks - 1}" if ranks > 1 else "0"
    places = "cluster.component_placement"
    own = [
        f"algorithm.steps_per_iteration={STEPS}",
        "algorithm.learning_starts=0",
        "algorithm.updates_per_step=1.0",
        "algorithm.sync_every=8",
        "env.total_num_envs=4",
        "replay.capacity=10000",
        "cluster.accelerators_per_node=4",
        "cluster.accelerator.kind=emulated",
        "cluster.allow_resident=[actor,rollout]",
        f"{places}.actor={accelerators}",
        f"{places}.rollout={accelerators}",
        f"{places}.replay={{node_group: node, placement: '0:{accelerators}'}}",
        f"runner.total_iterations={ITERATIONS}",
        "runner.sinks=[jsonl]",
        "checkpoint.every=0",
    ]
    if algorithm in ("td3_bc", "iql"):
        config = "td3"
        own += [f"algorithm.name={algorithm}", f"+replay.demonstrations={steps}"]
    return config, own


def measure(algorithm: str, steps: Path, ranks: int, folder: Path) -> Profile:
    """Run a training in `folder`; return its profile."""
    config, asked = words(algorithm, steps, ranks)
    command = [sys.executable, "-m", "rlplace.train", "--config-name", config, *asked]
    command.append(f"runner.output_dir={folder}")
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        command, env=variables, capture_output=True, text=True, check=False
    )
    if found.returncode:
        sys.exit(found.stdout + found.stderr)
    (file,) = folder.glob("*/*/profile.json")
    return read_profile(file.read_text(encoding="utf-8"), file=str(file))


def of_processors(
    algorithm: str, steps: Path, profile: Profile, ranks: int
) -> dict[str, float]:
    """Return component -> seconds of a processor that each of its ranks spends in an iteration, by a profile."""
    config = rlplace.plan(*words(algorithm, steps, ranks)).config
    costs = model_of(config).costs(config, profile)
    return {
        component: costs.of(f"{component}.{method}/seconds", 1.0 / ranks).cpu_s
        for component, method in CALLS.items()
    }


def compare(algorithm: str, turns: int) -> list[float]:
    """Print predicted and measured seconds with more ranks than one; return the relative errors."""
    predicted: dict[int, list[float]] = defaultdict(list)
    measured: dict[int, list[float]] = defaultdict(list)
    for turn in range(turns):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            steps = recorded(folder)
            profiles = {}
            for ranks in RANKS:
                profiles[ranks] = measure(algorithm, steps, ranks, folder / str(ranks))
            for ranks in RANKS[1:]:
                told = of_processors(algorithm, steps, profiles[1], ranks)
                found = of_processors(algorithm, steps, profiles[ranks], ranks)
                predicted[ranks].append(max(told.values()))
                measured[ranks].append(max(found.values()))
                print(f"  turn {turn + 1}: {ranks} ranks: {told} {found}", flush=True)
    errors = []
    for ranks, seconds in measured.items():
        told_s = statistics.median(predicted[ranks])
        found_s = statistics.median(seconds)
        errors.append(abs(told_s / found_s - 1.0))
        text = f"{told_s:.3f} s predicted, {found_s:.3f} s measured, {errors[-1]:.1%}"
        print(f"{algorithm}: {ranks} ranks: {text}", flush=True)
    return errors


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("algorithms", nargs="*", default=ALGORITHMS)
    reader.add_argument("--turns", type=int, default=3)
    given = reader.parse_args()
    for algorithm in given.algorithms:
        errors = compare(algorithm, given.turns)
        print(f"{algorithm}: median error {statistics.median(errors):.1%}", flush=True)


if __name__ == "__main__":
    main()
