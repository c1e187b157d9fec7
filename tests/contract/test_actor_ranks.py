"""The same seed and data give the same update for 1, 2 and 8 actor ranks, and as plain single-process PPO."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal

from rlplace.algo.minibatches import iteration_generator
from rlplace.errors import ChannelBroken, ClusterError
from rlplace.models.mlp import ActorCritic, DiscreteOutput, PolicyOutput, logprob
from rlplace.models.policy_networks import build_policy
from rlplace.trajectory import Trajectory
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.shared_sum import SharedSum
from rlplace.workers.worker import Rendezvous
from tests.actor_ranks import (
    THREE_CHOICES,
    TWO_JOINTS,
    Outcome,
    Scenario,
    iteration,
    run_ranks,
)
from tests.worker_ranks import context_of, in_processes, listen, rendezvous_at

SPLITS = {1: (12,), 2: (5, 7), 8: (0, 1, 2, 3, 0, 5, 1, 0)}

CONTINUOUS = Scenario(
    split=SPLITS[1],
    actions=TWO_JOINTS,
    algorithm={"normalize_rewards": True, "value_clip": 0.2, "entropy_coef": 0.01},
    actor={"optimizer": {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.3}},
)
DISCRETE = Scenario(
    split=SPLITS[1],
    actions=THREE_CHOICES,
    algorithm={
        "target_kl": 2e-3,
        "num_minibatches": 5,
        "normalize_observations": False,
    },
    actor={"optimizer": {"lr": 1e-2, "schedule": "linear"}},
)
SCENARIOS = {"continuous": CONTINUOUS, "discrete": DISCRETE}


EIGHT = (
    pytest.param("continuous", 8, marks=pytest.mark.slow),
    pytest.param("discrete", 8),
)


@functools.cache
def outcomes(name: str, world_size: int) -> list[Outcome]:
    return run_ranks(dataclasses.replace(SCENARIOS[name], split=SPLITS[world_size]))


def numbers(rank: Outcome) -> list[dict[str, float]]:
    """What all ranks and all world sizes must agree on."""
    own = {"actor/wait_s", "actor/learn_s", "actor/samples"}
    return [
        {k: m.value for k, m in metrics.items() if k not in own}
        for metrics in rank.metrics
    ]


@pytest.mark.parametrize(
    ("name", "world_size"), [*itertools.product(SCENARIOS, (1, 2)), *EIGHT]
)
def test_ranks_make_the_update_of_plain_ppo(name: str, world_size: int) -> None:
    expected_weights, expected_steps = plain_ppo(SCENARIOS[name])
    ranks = outcomes(name, world_size)
    assert [
        metrics["actor/optimizer_steps"].value for metrics in ranks[0].metrics
    ] == expected_steps
    for key, expected in expected_weights.items():
        np.testing.assert_allclose(
            ranks[0].weights[key], expected, rtol=2e-4, atol=2e-6, err_msg=key
        )


@pytest.mark.parametrize(
    ("name", "world_size"), [*((name, 2) for name in SCENARIOS), *EIGHT]
)
def test_all_ranks_agree_to_the_bit(name: str, world_size: int) -> None:
    ranks = outcomes(name, world_size)
    assert len({rank.weights_digest for rank in ranks}) == 1
    assert all(numbers(rank) == numbers(ranks[0]) for rank in ranks)
    assert sum(rank.metrics[0]["actor/samples"].value for rank in ranks) == 12 * 8
    for found, alone in zip(
        numbers(ranks[0]), numbers(outcomes(name, 1)[0]), strict=True
    ):
        assert found == pytest.approx(alone, rel=1e-3, abs=1e-6)


def test_the_scenarios_reach_what_they_are_for() -> None:
    continuous, discrete = outcomes("continuous", 1)[0], outcomes("discrete", 1)[0]
    assert all(m["actor/grad_norm"].value > 0.3 for m in continuous.metrics)  # clipped
    assert continuous.metrics[-1]["actor/clip_fraction"].value > 0.0
    assert any(m["actor/kl_stop"].value for m in discrete.metrics)
    assert all(m["actor/optimizer_steps"].value >= 1 for m in discrete.metrics)


@pytest.mark.parametrize("world_size", [1, 2])
def test_offloading_between_stages_changes_no_bit(world_size: int) -> None:
    scenario = dataclasses.replace(CONTINUOUS, split=SPLITS[world_size], offload=True)
    assert (
        run_ranks(scenario)[0].state_digest
        == outcomes("continuous", world_size)[0].state_digest
    )


SIZES = (5, 100_001, 2_000_001)  # which three ranks do not divide


def _sums(shared: bool, rank: int, rendezvous: Rendezvous, folder: Path) -> list[Any]:
    ranks = Ranks(
        context_of("actor", rank, 3, rendezvous, {}, folder=folder if shared else None),
        timeout_s=60.0,
    )
    found = [
        ranks.sum(torch.arange(float(size)) / 3 + rank).numpy()
        for size in SIZES
        for _ in range(3)
    ]
    found.append(ranks.sum(torch.full((2,), 1e-9 + rank, dtype=torch.float64)).numpy())
    ranks.close()
    assert not list(folder.glob("sums*"))
    return found


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "messages"])
def test_a_sum_is_the_same_on_all_ranks_whatever_its_size(shared: bool) -> None:
    first, *others = in_processes(_sums, shared, 3)
    for found in others:
        assert all(map(np.array_equal, found, first))
    for found, size in zip(
        first, [size for size in SIZES for _ in range(3)], strict=False
    ):
        np.testing.assert_allclose(found, np.arange(size) + 3.0, rtol=1e-6)
    assert first[-1].tolist() == pytest.approx([3.0 + 3e-9] * 2, rel=1e-12)


def test_ranks_that_never_join_are_named_by_the_deadline() -> None:
    """NCCL waits for them without one; gloo says only that a key of its own is not there."""
    meet = dataclasses.replace(rendezvous_at(listen()), timeout_s=0.05)
    with pytest.raises(ClusterError, match="actor ranks 1, 2") as caught:
        Ranks(context_of("actor", 0, 3, meet, {}), timeout_s=60.0)
    assert caught.value.problem.code == "ranks-absent"


def test_a_rank_that_waits_to_join_is_cancelled() -> None:
    context = context_of("actor", 0, 2, rendezvous_at(listen()), {})
    context.cancelled.set()
    with pytest.raises(ChannelBroken, match="waiting for the other ranks"):
        Ranks(context, timeout_s=60.0)


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    SharedSum.create(tmp_path / "sums", 2)
    alone = SharedSum(tmp_path / "sums", 0, 2, timeout_s=0.01)
    with pytest.raises(TimeoutError, match=r"ranks \[1\]"):
        alone.sum(torch.ones(3))


def plain_ppo(scenario: Scenario) -> tuple[dict[str, np.ndarray], list[int]]:
    """PPO as a textbook has it: one process, whole batches, statistics of everything seen. Weights and steps made."""
    config = scenario.config
    optimizer_config = config.actor.optimizer
    policy = build_policy(
        scenario.spaces, config.actor, config.algorithm, config.runner.seed
    )
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=optimizer_config.lr,
        eps=optimizer_config.eps,
        weight_decay=optimizer_config.weight_decay,
    )
    seen_observations: list[np.ndarray] = []
    seen_returns: list[float] = []
    carried = [0.0] * sum(scenario.split)
    steps_made = []
    for index in range(scenario.iterations):
        if optimizer_config.schedule == "linear":
            optimizer.param_groups[0]["lr"] = optimizer_config.lr * (
                1.0 - index / 4
            )  # four iterations in all
        batch = iteration(scenario, policy, index)
        rewards = batch.rewards.astype(np.float64)
        if config.algorithm.normalize_rewards:
            rewards = scaled_rewards(
                batch, config.algorithm.gamma, seen_returns, carried
            )
        advantages, returns = plain_gae(
            policy, batch, rewards, config.algorithm.gamma, config.algorithm.gae_lambda
        )
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        steps_made.append(
            plain_epochs(scenario, policy, optimizer, batch, advantages, returns, index)
        )
        seen_observations.append(batch.observations.reshape(-1, 5).astype(np.float64))
        if policy.normalizer is not None:
            everything = np.concatenate(seen_observations)
            policy.normalizer.count.fill_(len(everything))
            policy.normalizer.mean.copy_(torch.tensor(everything.mean(axis=0)))
            policy.normalizer.var.copy_(torch.tensor(everything.var(axis=0)))
    return {
        name: tensor.numpy() for name, tensor in policy.state_dict().items()
    }, steps_made


def scaled_rewards(
    batch: Trajectory, gamma: float, seen: list[float], carried: list[float]
) -> np.ndarray:
    for t, row in np.ndindex(*batch.rewards.shape):
        carried[row] = gamma * carried[row] + float(batch.rewards[t, row])
        seen.append(carried[row])
        if batch.terminated[t, row] or batch.truncated[t, row]:
            carried[row] = 0.0
    return np.clip(batch.rewards / np.sqrt(np.var(seen) + 1e-8), -10.0, 10.0)


@torch.no_grad()
def plain_gae(
    policy: ActorCritic,
    batch: Trajectory,
    rewards: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> tuple[np.ndarray, np.ndarray]:
    finals = iter(policy(torch.tensor(batch.final_observations)).values.tolist())
    final_of = {(t, row): next(finals) for t, row in np.argwhere(batch.truncated)}
    last = policy(torch.tensor(batch.last_observations)).values.tolist()
    advantages = np.zeros_like(rewards)
    for row in range(batch.rows):
        following, next_value = 0.0, last[row]
        for t in reversed(range(batch.steps)):
            if batch.terminated[t, row]:
                following, next_value = 0.0, 0.0
            if batch.truncated[t, row]:
                following, next_value = 0.0, final_of[t, row]
            delta = rewards[t, row] + gamma * next_value - batch.values[t, row]
            following = advantages[t, row] = delta + gamma * gae_lambda * following
            next_value = float(batch.values[t, row])
    return advantages, advantages + batch.values


def entropy_of(output: PolicyOutput) -> torch.Tensor:
    """Return the mean over observations, in nats."""
    if isinstance(output, DiscreteOutput):
        return Categorical(logits=output.logits).entropy().mean()
    return Normal(output.means, output.log_std.exp()).entropy().sum(dim=-1).mean()


def plain_epochs(
    scenario: Scenario,
    policy: ActorCritic,
    optimizer: torch.optim.Optimizer,
    batch: Trajectory,
    advantages: np.ndarray,
    returns: np.ndarray,
    index: int,
) -> int:
    rules, made = scenario.config.algorithm, 0
    generator = iteration_generator(scenario.config.runner.seed, index)
    columns = [
        batch.observations,
        batch.actions,
        batch.logprobs,
        batch.values,
        advantages,
        returns,
    ]
    flat = [
        torch.tensor(c.reshape(-1, *c.shape[2:])).to(
            torch.int64 if c.dtype == np.int64 else torch.float32
        )
        for c in columns
    ]
    for _ in range(rules.epochs):
        for part in torch.randperm(batch.weight, generator=generator).tensor_split(
            rules.num_minibatches
        ):
            observations, actions, old_logprobs, old_values, advantage, target = (
                c[part] for c in flat
            )
            output = policy(observations)
            difference = logprob(output, actions) - old_logprobs
            ratio = difference.exp()
            if (
                rules.target_kl is not None
                and (ratio - 1.0 - difference).mean() > rules.target_kl
            ):
                return made
            surrogate = torch.min(
                ratio * advantage,
                ratio.clamp(1 - rules.clip_ratio_low, 1 + rules.clip_high) * advantage,
            )
            squared = (output.values - target) ** 2
            if rules.value_clip is not None:
                moved = (output.values - old_values).clamp(
                    -rules.value_clip, rules.value_clip
                )
                squared = torch.max(squared, (old_values + moved - target) ** 2)
            loss = -surrogate.mean() + rules.value_coef * 0.5 * squared.mean()
            loss = loss - rules.entropy_coef * entropy_of(output)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(
                policy.parameters(), scenario.config.actor.optimizer.max_grad_norm
            )
            optimizer.step()
            made += 1
    return made
