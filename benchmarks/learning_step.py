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
from torch import Tensor, nn
from torch.distributions import Normal

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlplace.algo.minibatches import Rows
from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.envs.contract import ContinuousActions, Spaces
from rlplace.models.policy_networks import build_policy
from rlplace.trajectory import Trajectory
from rlplace.workers.training.optimizer import Trainer
from rlplace.workers.training.policy_learner import PolicyLearner
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.trained_model import TrainedPolicy
from tests.worker_ranks import context_of, listen, rendezvous_at

OBSERVED, ACTIONS, ENVS, STEPS, EPOCHS, MINIBATCH = 17, 6, 8, 256, 10, 64
MINIBATCHES = ENVS * STEPS // MINIBATCH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        print(f"| {hidden} | {theirs:.2f} | {own:.2f} | {statistics.median(a / b for a, b in turns):.2f} |", flush=True)


def timed(side: Callable[[], object]) -> float:
    """Return milliseconds for each minibatch."""
    began = time.perf_counter()
    side()
    return (time.perf_counter() - began) / (EPOCHS * MINIBATCHES) * 1e3


def config_of(widths: Sequence[int]) -> Config:
    return read_config(
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
    config, iteration = config_of(widths), made_up()
    actions = ContinuousActions(shape=(ACTIONS,), low=(-1.0,) * ACTIONS, high=(1.0,) * ACTIONS)
    ranks = Ranks(context_of("actor", 0, 1, rendezvous_at(listen()), {}), timeout_s=60.0)  # sets one thread
    module = build_policy(Spaces(observation_shape=(OBSERVED,), actions=actions), config.actor, config.algorithm, 0)
    policy = TrainedPolicy(module, "fp32", ranks)
    trainer = Trainer(policy, config.actor.optimizer, ranks, iterations=100, component="actor")
    learner = PolicyLearner(config, Rows(steps=STEPS, total=ENVS, first=0, count=ENVS), policy, trainer, ranks)
    return lambda: learner.learn(iteration, 0)


# ── the same in one file ─────────────────────────────────────────────────────────────────────────────────────────────


def one_file(widths: Sequence[int]) -> Callable[[], None]:
    """PPO as single files on continuous actions have it: autograd, an object for distributions, Adam over tensors."""

    def trunk(outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for inputs, width in zip((OBSERVED, *widths), widths, strict=False):
            layers += [nn.Linear(inputs, width), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))

    rules, data = config_of(widths).algorithm, made_up()
    mean, critic, log_std = trunk(ACTIONS), trunk(1), nn.Parameter(torch.zeros(1, ACTIONS))
    parameters = [*mean.parameters(), *critic.parameters(), log_std]
    optimizer = torch.optim.Adam(parameters, lr=3e-4, eps=1e-5)
    columns = (data.observations, data.actions, data.logprobs, data.values)
    observations, actions, logprobs, values = (torch.from_numpy(column).flatten(0, 1) for column in columns)

    def estimates() -> Tensor:
        with torch.no_grad():
            following, next_values = torch.zeros(ENVS), critic(torch.from_numpy(data.last_observations))[:, 0]
            rewards, old, found = (
                torch.from_numpy(data.rewards),
                torch.from_numpy(data.values),
                torch.zeros(STEPS, ENVS),
            )
            done = torch.from_numpy(data.terminated | data.truncated)
            for t in reversed(range(STEPS)):
                going = 1.0 - done[t].float()
                delta = rewards[t] + rules.gamma * next_values * going - old[t]
                following = found[t] = delta + rules.gamma * rules.gae_lambda * going * following
                next_values = old[t]
        return found.flatten()

    def learn() -> None:
        advantages = estimates()
        returns = advantages + values
        for _ in range(EPOCHS):
            for picks in torch.randperm(len(returns)).split(MINIBATCH):
                means = mean(observations[picks])
                normal = Normal(means, log_std.expand_as(means).exp())
                log_ratio = normal.log_prob(actions[picks]).sum(1) - logprobs[picks]
                ratio = log_ratio.exp()
                with torch.no_grad():
                    ((ratio - 1.0) - log_ratio).mean()  # what is reported: KL, share of clipped samples
                    ((ratio - 1.0).abs() > rules.clip_ratio_low).float().mean().item()
                chosen = advantages[picks]
                chosen = (chosen - chosen.mean()) / (chosen.std() + 1e-8)
                near = ratio.clamp(1.0 - rules.clip_ratio_low, 1.0 + rules.clip_high)
                policy_loss = torch.max(-chosen * ratio, -chosen * near).mean()
                value_loss = 0.5 * (critic(observations[picks]).view(-1) - returns[picks]).square().mean()
                entropy = normal.entropy().sum(1).mean()
                loss = policy_loss - rules.entropy_coef * entropy + rules.value_coef * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()

    return learn


if __name__ == "__main__":
    main()
