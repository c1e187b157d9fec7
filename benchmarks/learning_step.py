"""One optimizer step of a small policy, beside the same PPO as a single file writes it, in turns in one process.

    python benchmarks/learning_step.py [--hidden 64x64 256x256x256] [--repeat 7]

Both learn an iteration of made-up HalfCheetah samples (8 environments, 256 steps, 10 epochs of minibatches of 64), from
rewards to weights: estimates, statistics and gathers are in it. Printed are milliseconds for each minibatch, medians,
and the median of the ratios of neighbouring turns, which other work on the machine meets alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.one_file import OneFile, Samples
from rlplace.algo.minibatches import Rows
from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.config.read import read_config
from rlplace.envs.contract import ContinuousActions, Spaces
from rlplace.models.policy_networks import build_policy
from rlplace.trajectory import Trajectory
from rlplace.workers.training.optimizer import Trainer
from rlplace.workers.training.policy_learner import PolicyLearner
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.trained_model import TrainedPolicy
from tests.worker_ranks import context_of, listen, rendezvous_at

OBSERVED = 17
ACTIONS = 6
ENVS = 8
STEPS = 256
EPOCHS = 10
MINIBATCH = 64
MINIBATCHES = ENVS * STEPS // MINIBATCH


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", nargs="+", default=["64x64", "256x256x256"])
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    print("| MLP | one file ms | ours ms | ratio |\n|---|---|---|---|")
    for hidden in options.hidden:
        widths = [int(width) for width in hidden.split("x")]
        sides = one_file(widths), ours(widths)
        for side in sides:
            side()  # the first warms up
        turns = [[timed(side) for side in sides] for _ in range(options.repeat)]
        theirs, own = (statistics.median(turn[at] for turn in turns) for at in (0, 1))
        print(
            f"| {hidden} | {theirs:.2f} | {own:.2f} | {statistics.median(a / b for a, b in turns):.2f} |",
            flush=True,
        )


def timed(side: Callable[[], object]) -> float:
    """Return milliseconds for each minibatch."""
    began = time.perf_counter()
    side()
    return (time.perf_counter() - began) / (EPOCHS * MINIBATCHES) * 1e3


def config_of(widths: Sequence[int]) -> SimulatorJobConfig:
    config = read_config(
        {
            "cluster": {"component_placement": {}},
            "env": {"id": "HalfCheetah-v5", "total_num_envs": ENVS},
            "actor": {"model": {"hidden": list(widths)}},
            "algorithm": {
                "rollout_steps": STEPS,
                "epochs": EPOCHS,
                "num_minibatches": MINIBATCHES,
                "normalize_observations": False,
            },
            "runner": {"total_iterations": 100},
        }
    )
    assert isinstance(config, SimulatorJobConfig)
    return config


def made_up() -> Trajectory:
    normal = np.random.default_rng(0).standard_normal
    return Trajectory(
        first_row=0,
        env_rank=0,
        version_min=0,
        version_max=0,
        observations=normal((STEPS, ENVS, OBSERVED), np.float32),
        actions=normal((STEPS, ENVS, ACTIONS), np.float32),
        logprobs=-np.abs(normal((STEPS, ENVS), np.float32)) - 7.0,
        values=normal((STEPS, ENVS), np.float32),
        rewards=normal((STEPS, ENVS), np.float32),
        terminated=np.zeros((STEPS, ENVS), bool),
        truncated=np.zeros((STEPS, ENVS), bool),
        last_observations=normal((ENVS, OBSERVED), np.float32),
        final_observations=np.zeros((0, OBSERVED), np.float32),
    )


def ours(widths: Sequence[int]) -> Callable[[], object]:
    config = config_of(widths)
    iteration = made_up()
    actions = ContinuousActions(
        shape=(ACTIONS,), low=(-1.0,) * ACTIONS, high=(1.0,) * ACTIONS
    )
    ranks = Ranks(
        context_of("actor", 0, 1, rendezvous_at(listen()), {}), timeout_s=60.0
    )  # sets one thread
    module = build_policy(
        Spaces(observation_shape=(OBSERVED,), actions=actions),
        config.actor,
        config.algorithm,
        0,
    )
    policy = TrainedPolicy(module, "fp32", ranks)
    trainer = Trainer(
        policy, config.actor.optimizer, ranks, iterations=100, component="actor"
    )
    learner = PolicyLearner(
        config,
        Rows(steps=STEPS, total=ENVS, first=0, count=ENVS),
        policy,
        trainer,
        ranks,
    )
    return lambda: learner.learn(iteration, 0)


def one_file(widths: Sequence[int]) -> Callable[[], object]:
    data = made_up()
    learner = OneFile(OBSERVED, ACTIONS, widths)
    done = data.terminated | data.truncated
    columns = (
        data.observations,
        data.actions,
        data.logprobs,
        data.values,
        data.rewards,
        done,
    )
    samples = Samples(*map(torch.from_numpy, columns))
    last = torch.from_numpy(data.last_observations)
    return lambda: learner.learn(samples, last, EPOCHS, MINIBATCH)


if __name__ == "__main__":
    main()
