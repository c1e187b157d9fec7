"""Whole runs beside PPO in one file and Stable-Baselines3: env steps per second on HalfCheetah, CartPole until solved.

    pip install -e '.[dev,peers]'
    python benchmarks/end_to_end.py [repetitions] [key=value ...]        keys are those of configs/halfcheetah_2core

SBX, the JAX port of Stable-Baselines3, is a row of the first table where it is installed (`pip install sbx-rl`). All
sides run the same PPO, told below, each run in a process of its own, in turns: what else the machine does meets
both. Starting is left out, and so is the first iteration, in which libraries are loaded. Stable-Baselines3 has one
torch thread; so has each of our ranks.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.one_file import train

ENVS = 8
MINIBATCH = 64
EPOCHS = 10
RATES = {
    "rate": ("HalfCheetah-v5", 256, 3e-4),
    "solved": ("CartPole-v1", 128, 1e-3),
}  # T, learning rate
ITERATIONS = 9  # of a run that is measured by its rate, the first left out
GOAL = 475.0
GIVE_UP = 400_000  # mean return of 100 episodes; env steps
ONE_FILE = "PPO in one file"
PEERS = {ONE_FILE: "torch", "Stable-Baselines3": "stable_baselines3", "SBX": "sbx"}
PLACEMENTS: Mapping[str, tuple[str, ...]] = {
    "one process": (),  # env and rollout, in threads; the actor has its own
    "two processes": (  # env and rollout overlap, two stage groups in turns
        "cluster.component_placement.env=0",
        "cluster.component_placement.rollout=1",
        "cluster.allow_resident=[actor,rollout]",
        "rollout.pipeline_stage_num=2",
    ),
    "inline": ("cluster.launcher=inline",),  # all three in threads of the driver
}
PARTS = (
    "env/sim_s",
    "env/wait_s",
    "rollout/policy_s",
    "rollout/wait_s",
    "actor/learn_s",
    "time/sync_s",
    "time/moves_s",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run. Seconds are per iteration."""

    steps_per_s: float
    rollout_s: float
    learn_s: float
    parts: Mapping[str, float]
    solved_s: float | None  # training until GOAL, the first iteration included


def ours(what: str, hidden: str, seed: int, overrides: Sequence[str]) -> Run:
    env, steps, lr = RATES[what]
    settings = [
        f"env.id={env}",
        f"env.total_num_envs={ENVS}",
        f"actor.model.hidden=[{hidden.replace('x', ',')}]",
        f"actor.optimizer.lr={lr}",
        f"algorithm.rollout_steps={steps}",
        f"algorithm.epochs={EPOCHS}",
        f"algorithm.num_minibatches={steps * ENVS // MINIBATCH}",
        f"runner.total_iterations={ITERATIONS if what == 'rate' else -(-GIVE_UP // (steps * ENVS))}",
        f"runner.stop_at_return={GOAL if what == 'solved' else 'null'}",
        f"runner.seed={seed}",
        "runner.sinks=[jsonl]",
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "rlplace.train",
            "--config-name",
            "halfcheetah_2core",
        ]
        _run([*command, f"runner.output_dir={folder}", *settings, *overrides])
        lines = [
            json.loads(line)
            for line in next(Path(folder).glob("*/*/metrics.jsonl")).open(
                encoding="utf-8"
            )
        ]
    counted = lines[1:] or lines
    mean = {
        name: statistics.fmean(line[name] for line in counted)
        for name in ("time/rollout_s", "time/learn_s", *PARTS)
    }
    return Run(
        steps_per_s=steps
        * ENVS
        * len(counted)
        / sum(line["time/iteration_s"] for line in counted),
        rollout_s=mean["time/rollout_s"],
        learn_s=mean["time/learn_s"],
        parts={name: mean[name] for name in PARTS},
        solved_s=sum(line["time/iteration_s"] for line in lines)
        if lines[-1].get("env/mean_return", 0) >= GOAL
        else None,
    )


def theirs(library: str, what: str, hidden: str, seed: int) -> Run:
    return Run(
        **json.loads(
            _run([sys.executable, __file__, "--peer", library, what, hidden, str(seed)])
        )
    )


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def peer(library: str, what: str, hidden: str, seed: int) -> dict[str, Any]:
    """The same run by one of PEERS, in this process. Its defaults are ours where nothing is said."""
    if library == ONE_FILE:
        return one_file(what, hidden, seed)
    import gymnasium
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class Clock(BaseCallback):
        """When each rollout began and ended; stops at the goal."""

        def __init__(self) -> None:
            super().__init__()
            self.marks: list[float] = []
            self.solved = False

        def _on_rollout_start(self) -> None:
            self.marks.append(time.perf_counter())
            returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
            self.solved = len(returns) == 100 and statistics.fmean(returns) >= GOAL

        def _on_rollout_end(self) -> None:
            self.marks.append(time.perf_counter())

        def _on_step(self) -> bool:
            return not self.solved

    torch.set_num_threads(1)
    name, steps, lr = RATES[what]
    env = make_vec_env(lambda: gymnasium.make(name), ENVS, seed=seed)
    model = importlib.import_module(PEERS[library]).PPO(
        "MlpPolicy",
        env,
        n_steps=steps,
        batch_size=MINIBATCH,
        n_epochs=EPOCHS,
        learning_rate=lr,
        policy_kwargs={"net_arch": [int(width) for width in hidden.split("x")]},
        seed=seed,
        device="cpu",
    )
    clock = Clock()
    model.learn(
        ITERATIONS * steps * ENVS if what == "rate" else GIVE_UP, callback=clock
    )
    marks = [*clock.marks, time.perf_counter()]
    if clock.solved:
        marks.pop()  # the step after the goal
    begins = marks[0::2]
    ends = marks[1::2]
    rollouts = [end - begin for begin, end in zip(begins, ends, strict=False)][1:]
    learns = [begin - end for begin, end in zip(begins[1:], ends, strict=False)][1:]
    return {
        "steps_per_s": steps
        * ENVS
        / (statistics.fmean(rollouts) + statistics.fmean(learns)),
        "rollout_s": statistics.fmean(rollouts),
        "learn_s": statistics.fmean(learns),
        "parts": {},
        "solved_s": begins[-1] - begins[0] if clock.solved else None,
    }


def one_file(what: str, hidden: str, seed: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    (name, steps, _), widths = RATES[what], [int(width) for width in hidden.split("x")]
    sizes = {
        "envs": ENVS,
        "steps": steps,
        "iterations": ITERATIONS,
        "epochs": EPOCHS,
        "minibatch": MINIBATCH,
    }
    counted = train(name, widths=widths, seed=seed, **sizes)[1:]
    rollout_s, learn_s = (
        statistics.fmean(each[at] for each in counted) for at in (0, 1)
    )
    rate = steps * ENVS / (rollout_s + learn_s)
    return {
        "steps_per_s": rate,
        "rollout_s": rollout_s,
        "learn_s": learn_s,
        "parts": {},
        "solved_s": None,
    }


def best(runs: Sequence[Run]) -> Run:
    return max(runs, key=lambda run: run.steps_per_s)


def compare_rates(hidden: str, repetitions: int, overrides: Sequence[str]) -> None:
    sides: dict[str, Callable[[int], Run]] = {
        library: partial(theirs, library, "rate", hidden)
        for library, module in PEERS.items()
        if importlib.util.find_spec(module)
    }
    for name, placement in PLACEMENTS.items():
        sides[name] = partial(ours, "rate", hidden, overrides=[*placement, *overrides])
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for seed in range(repetitions):
        for name, side in sides.items():
            runs[name].append(side(seed))
    print(
        f"\nHalfCheetah-v5, {ENVS} envs, MLP {hidden}: env steps/s of {repetitions} runs, seconds of the best"
    )
    print(f"Ratios: of the median to that of {ONE_FILE}, and of Stable-Baselines3")
    print(
        f"{'':26}{'best':>7}{'median':>8}{'ratios':>14}   rollout  learn   "
        + "  ".join(p.split("/")[1] for p in PARTS)
    )
    medians = {
        name: statistics.median(run.steps_per_s for run in of_side)
        for name, of_side in runs.items()
    }
    for name, of_side in runs.items():
        top = best(of_side)
        median = medians[name]
        ratios = "".join(
            f"{median / medians[peer]:7.2f}" for peer in (ONE_FILE, "Stable-Baselines3")
        )
        parts = "  ".join(
            f"{top.parts[p]:{len(p.split('/')[1])}.3f}" for p in PARTS if p in top.parts
        )
        print(
            f"{name:26}{top.steps_per_s:7,.0f}{median:8,.0f}{ratios}"
            f"   {top.rollout_s:7.3f}{top.learn_s:7.3f}   {parts}",
            flush=True,
        )


def compare_solved(repetitions: int, overrides: Sequence[str]) -> None:
    print(
        f"\nCartPole-v1, {ENVS} envs, MLP 64x64: seconds of training until the mean of 100 episodes is {GOAL:.0f}"
    )
    print(
        f"{'seed':>5}{'Stable-Baselines3':>20}"
        + "".join(f"{name:>28}" for name in PLACEMENTS)
    )
    for seed in range(repetitions):
        found = [theirs("Stable-Baselines3", "solved", "64x64", seed)]
        found += [
            ours("solved", "64x64", seed, [*extra, *overrides])
            for extra in PLACEMENTS.values()
        ]
        cells = [
            f"{run.solved_s:.1f}" if run.solved_s is not None else "not solved"
            for run in found
        ]
        print(
            f"{seed:5}{cells[0]:>20}" + "".join(f"{cell:>28}" for cell in cells[1:]),
            flush=True,
        )


def main(repetitions: str = "3", *overrides: str) -> None:
    print(
        f"PPO: {MINIBATCH} samples a minibatch, {EPOCHS} epochs, observations and rewards as they come; "
        "iterations of 256 (HalfCheetah) and 128 (CartPole) vector steps"
    )
    for hidden in ("64x64", "256x256x256"):
        compare_rates(hidden, int(repetitions), overrides)
    compare_solved(int(repetitions), overrides)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        library, what, hidden, seed = sys.argv[2:]
        print(json.dumps(peer(library, what, hidden, int(seed))))
    else:
        main(*sys.argv[1:])
