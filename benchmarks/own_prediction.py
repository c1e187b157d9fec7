"""Predict jobs of one's own whose author wrote no costs: measured under one placement, predicted under others.

    python benchmarks/own_prediction.py             workers as threads of one process
    python benchmarks/own_prediction.py ray         a process for each
    python benchmarks/own_prediction.py ray computing
    python benchmarks/own_prediction.py ray exchange

Workers sleep instead of working, so that a machine with few processors holds them all; or they compute. `env` and
`rollout` talk in every step, `score` does the same on each rank, `learn` divides its work. With `exchange`, the ranks
of `learn` also average a gradient after each of many short updates. Prints predicted and measured seconds of an
iteration and of its stages, the range that the prediction gives, and the median of the errors of iterations.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rlplace
from rlplace import Channel, Job, Stage, Worker, full
from rlplace.cli import own_job
from rlplace.foresight.predict import predict
from rlplace.foresight.profile import Profile, read_profile
from rlplace.foresight.show import interval

LAUNCHER = "ray" if "ray" in sys.argv else "inline"
COMPUTING = "computing" in sys.argv
EXCHANGE = "exchange" in sys.argv
UPDATES = 32
STEPS = 8
ITERATIONS = 7
ENV_S = 0.32  # of all ranks, in an iteration
ANSWER_S = 0.16
SCORE_S = 0.05
LEARN_S = 0.24
MEASURED = {"actor": "0-1", "env": "2-3", "rollout": "4", "scorer": "5"}
OTHERS = (
    {"actor": "0-3", "env": "4-5", "rollout": "6", "scorer": "7"},
    {"actor": "0", "env": "1-4", "rollout": "5", "scorer": "6-7"},
    {"actor": "0-1", "env": "2-3", "rollout": "4-5", "scorer": "6"},
    {"actor": "0-1", "env": "2-5", "rollout": "6-7", "scorer": "0-1"},
    {"actor": "0", "env": "1", "rollout": "2", "scorer": "3"},
    {"actor": "0-3", "env": "0-3", "rollout": "4-7", "scorer": "4-7"},
)


def work(seconds: float) -> None:
    """Sleep, or compute for as many seconds of a processor."""
    if not COMPUTING:
        time.sleep(seconds)
        return
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


class Env(Worker):
    """Steps, asks and waits for the answer."""

    def play(self, iteration: int) -> None:
        for _ in range(STEPS):
            work(ENV_S / STEPS / self.world_size)
            self.channel("asks").put(self.rank)
            self.channel("answers").get(key=str(self.rank))


class Policy(Worker):
    """Answers what is asked; a larger share of what is asked takes longer."""

    def answer(self, iteration: int) -> None:
        envs = self.world_size_of("env")
        for _ in range(STEPS * envs // self.world_size):
            rank = self.channel("asks").get()
            work(ANSWER_S / STEPS / envs)
            self.channel("answers").put(0, key=str(rank))


class Scorer(Worker):
    """Does the same on each rank."""

    def score(self, iteration: int) -> None:
        work(SCORE_S)


class Learner(Worker):
    """Divides its work among its ranks."""

    needs_own_process = EXCHANGE

    def setup(self) -> None:
        if EXCHANGE:
            self.process_group()

    def learn(self, iteration: int) -> None:
        if not EXCHANGE:
            work(LEARN_S / self.world_size)
            return
        # Each update takes as long on any rank, and then all ranks wait for each other.
        import torch

        gradient = torch.zeros(1000)
        for _ in range(UPDATES):
            work(LEARN_S / 4 / UPDATES)
            torch.distributed.all_reduce(gradient)


JOB = Job(
    name="sleepers",
    components={"actor": Learner, "env": Env, "rollout": Policy, "scorer": Scorer},
    stages=[
        Stage("play", full("env").calls("play"), full("rollout").calls("answer")),
        Stage("score", full("scorer").calls("score", scales="constant")),
        Stage("train", full("actor").calls("learn")),
    ],
    channels=[
        Channel("asks", "env", "rollout"),
        Channel("answers", "rollout", "env", by_rank=True),
    ],
)


def config(placement: dict[str, str], folder: str) -> dict[str, Any]:
    return {
        "cluster": {
            "launcher": LAUNCHER,
            "accelerators_per_node": 8,
            "accelerator": {"kind": "emulated"},
            "component_placement": placement,
            "allow_resident": ["actor", "env", "rollout", "scorer"],
        },
        "runner": {
            "total_iterations": ITERATIONS,
            "output_dir": folder,
            "sinks": ["jsonl"],
        },
    }


def measure(placement: dict[str, str]) -> tuple[Profile, dict[str, float]]:
    """Run a placement; return its profile and the median seconds of an iteration and its stages."""
    with tempfile.TemporaryDirectory() as folder:
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            code = rlplace.run(JOB, config(placement, folder), [])
        if code:
            sys.exit(told.getvalue())
        (file,) = Path(folder).glob("*/*/profile.json")
        profile = read_profile(file.read_text(encoding="utf-8"), file=str(file))
        summary = json.loads((file.parent / "summary.json").read_text(encoding="utf-8"))
        seconds = summary["predicted"]["seconds"]
        return profile, {name: row["measured"] for name, row in seconds.items()}


def main() -> None:
    profile, _ = measure(MEASURED)
    errors = []
    inside = 0
    print("predicted (measured) seconds, from a run under", MEASURED)
    for placement in OTHERS:
        found = own_job.plan(JOB, config(placement, "runs"))
        prediction = predict(found.config, found.plan, found.case, profile, ranged=True)
        numbers = prediction.numbers
        _, measured = measure(placement)
        told = [
            f"{name} {numbers[f'time/{name}_s']:.3f} ({measured[name]:.3f})"
            for name in ("iteration", "play", "score", "train")
        ]
        error = numbers["time/iteration_s"] / measured["iteration"] - 1.0
        errors.append(abs(error))
        low, high = interval(prediction)
        inside += low <= measured["iteration"] <= high
        told.append(f"{low:.3f} to {high:.3f}")
        print(f"{error:+6.1%}  {', '.join(told)}   {placement}")
    print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    print(f"{inside} of {len(OTHERS)} within what scaling with ranks may make of it")


if __name__ == "__main__":
    main()
