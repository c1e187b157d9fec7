"""PPO over ranks: from each rank's rows of an iteration to the update that all ranks make together.

Letters: T steps, B rows of this rank (possibly none), N = T * B samples, O observation shape, A action shape, K
truncations.

One iteration stays on-policy in this order: every forward pass sees the observation statistics that the samples were
drawn under, so the ratio of the first minibatch is one; the statistics take in the iteration after its last step, and
reach the rollout ranks with the weights. What is shared over ranks is summed in few collectives: one for the reward
statistics, one for the statistics of advantages, returns and observations together, and per minibatch one for losses,
divergence and gradient norm beside FSDP's own two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlplace.algo.advantages import gae
from rlplace.algo.losses import ppo_terms
from rlplace.algo.minibatches import Minibatch, Rows, iteration_generator, minibatches
from rlplace.algo.normalize import Moments, ReturnScale, merge, no_moments, shifted_sums
from rlplace.config import Config
from rlplace.envs.spaces import DiscreteActions, Spaces
from rlplace.models.distributions import entropy, logprob
from rlplace.trajectory import Array, Trajectory
from rlplace.workers.refusals import diverged
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.trained_policy import TrainedPolicy


class Samples(NamedTuple):
    """This rank's samples of an iteration, step by step."""

    observations: Tensor  # [N, *O]
    actions: Tensor  # [N, *A]
    logprobs: Tensor  # [N]
    values: Tensor  # [N]
    advantages: Tensor  # [N]
    returns: Tensor  # [N]

    def pick(self, indices: Tensor) -> Samples:
        return Samples(*(tensor.index_select(0, indices) for tensor in self))


class Step(NamedTuple):
    """What one minibatch was like, over all ranks; the same numbers on each of them."""

    policy_loss: float
    value_loss: float
    entropy: float
    approx_kl: float
    clip_fraction: float
    grad_norm: float  # before clipping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one iteration's updates were like; the same numbers on every rank."""

    mean: Step  # over the minibatches evaluated
    steps: int  # optimizer steps made
    stopped: bool  # by target_kl
    lr: float
    explained_variance: float | None  # None when all returns are equal


class PPOLearner:
    """Owns the reward statistics; borrows the policy. `learn` is a collective."""

    def __init__(
        self, config: Config, rows: Rows, policy: TrainedPolicy, ranks: Ranks, device: torch.device, owner: str
    ) -> None:
        self._config, self._algorithm = config, config.algorithm
        self._rows, self._policy, self._ranks, self._device = rows, policy, ranks, device
        self._owner = owner  # in errors
        self._return_scale = ReturnScale(rows.count, config.algorithm.gamma, device)

    def learn(self, trajectory: Trajectory, iteration: int) -> Update:
        """All epochs over one iteration's samples; `trajectory` holds exactly this rank's rows."""
        lr = learning_rate(self._config, iteration)
        self._policy.set_lr(lr)
        samples = self._samples(trajectory)
        spread, observation_sums = self._statistics(samples)
        if self._algorithm.advantages_normalized:
            deviation = torch.sqrt(spread.var[0]) + 1e-8
            samples = samples._replace(advantages=((samples.advantages - spread.mean[0]) / deviation).float())
        steps, stopped = self._passes(samples, iteration)
        self._policy.drop_gathered()
        if self._policy.module.normalizer is not None:
            self._policy.module.normalizer.update(observation_sums)
        evaluated = len(steps)
        return Update(
            mean=Step(*(sum(numbers) / evaluated for numbers in zip(*steps, strict=True))),
            steps=evaluated - stopped,
            stopped=stopped,
            lr=lr,
            explained_variance=_explained_variance(spread),
        )

    def _samples(self, trajectory: Trajectory) -> Samples:
        """Rewards scaled, cuts bootstrapped, advantages estimated; nothing normalised over the batch yet."""
        terminated, truncated = self._tensor(trajectory.terminated), self._tensor(trajectory.truncated)
        rewards, values = self._tensor(trajectory.rewards), self._tensor(trajectory.values)
        if self._algorithm.normalize_rewards:
            rewards = self._return_scale(rewards, terminated | truncated, self._ranks.sum)
        beyond = np.concatenate([trajectory.last_observations, trajectory.final_observations])
        with torch.no_grad():
            beyond_values = self._policy.module(self._tensor(beyond)).values
        advantages, returns = gae(
            rewards=rewards,
            values=values,
            last_values=beyond_values[: trajectory.rows],
            final_values=beyond_values[trajectory.rows :],
            terminated=terminated,
            truncated=truncated,
            gamma=self._algorithm.gamma,
            gae_lambda=self._algorithm.gae_lambda,
        )
        return Samples(
            observations=self._tensor(trajectory.observations).flatten(0, 1),
            actions=self._tensor(trajectory.actions).flatten(0, 1),
            logprobs=self._tensor(trajectory.logprobs).flatten(),
            values=values.flatten(),
            advantages=advantages.flatten(),
            returns=returns.flatten(),
        )

    def _statistics(self, samples: Samples) -> tuple[Moments, Tensor]:
        """Moments [3] of advantages, returns and value errors over all ranks; the normaliser's sums, if any."""
        columns = torch.stack([samples.advantages, samples.returns, samples.returns - samples.values], dim=-1)
        nothing = no_moments((3,), self._device)
        parts = [shifted_sums(columns, nothing.mean)]
        if self._policy.module.normalizer is not None:
            parts.append(shifted_sums(samples.observations, self._policy.module.normalizer.mean))
        sums = self._ranks.sum(torch.cat(parts))
        cut = len(parts[0])
        return merge(nothing, sums[:cut]), sums[cut:]

    def _passes(self, samples: Samples, iteration: int) -> tuple[list[Step], bool]:
        """The minibatches evaluated, and whether the last of them was too far off to be stepped on."""
        steps: list[Step] = []
        target = self._algorithm.target_kl
        for minibatch in self._minibatches(iteration):
            step = self._differentiate(samples, minibatch)
            steps.append(step)
            if not math.isfinite(sum(step)):
                raise diverged(self._owner, step._asdict(), iteration=iteration)
            if target is not None and step.approx_kl > target:
                return steps, True
            self._policy.step(step.grad_norm, self._config.actor.optimizer.max_grad_norm)
        return steps, False

    def _minibatches(self, iteration: int) -> Iterator[Minibatch]:
        generator = iteration_generator(self._config.runner.seed, iteration)
        for _ in range(self._algorithm.epochs):
            yield from minibatches(self._rows, self._algorithm.num_minibatches, generator)

    def _differentiate(self, samples: Samples, minibatch: Minibatch) -> Step:
        """Forward and backward, also on a rank that holds no sample of the minibatch: the others wait for it."""
        mine = samples.pick(minibatch.indices.to(self._device))
        output = self._policy.module(mine.observations)
        terms = ppo_terms(
            logprobs=logprob(output, mine.actions),
            values=output.values,
            entropies=entropy(output),
            old_logprobs=mine.logprobs,
            old_values=mine.values,
            advantages=mine.advantages,
            returns=mine.returns,
            clip_low=self._algorithm.clip_ratio_low,
            clip_high=self._algorithm.clip_high,
            value_clip=self._algorithm.value_clip,
        )
        terms.loss(self._algorithm.value_coef, self._algorithm.entropy_coef, minibatch.count).backward()
        return self._over_ranks(terms.shares(minibatch.count))

    def _over_ranks(self, shares: Tensor) -> Step:
        mine = torch.cat([shares, self._policy.squared_gradient()])
        *means, squared_norm = self._ranks.sum(mine).tolist()
        return Step._make([*means, math.sqrt(squared_norm)])

    def _tensor(self, array: Array) -> Tensor:
        return torch.tensor(array, device=self._device)  # copies: what came through a channel may be read-only


def no_rows(spaces: Spaces, steps: int, version: int) -> Trajectory:
    """What a rank learns from that got no environments: it only takes part in the collectives."""
    discrete = isinstance(spaces.actions, DiscreteActions)
    action_shape = () if isinstance(spaces.actions, DiscreteActions) else spaces.actions.shape
    numbers = np.zeros((steps, 0), np.float32)
    flags = np.zeros((steps, 0), np.bool_)
    observations = np.zeros((steps, 0, *spaces.observation_shape), np.float32)
    return Trajectory(
        first_row=0,
        env_rank=0,
        version_min=version,
        version_max=version,
        observations=observations,
        actions=np.zeros((steps, 0, *action_shape), np.int64 if discrete else np.float32),
        logprobs=numbers,
        values=numbers,
        rewards=numbers,
        terminated=flags,
        truncated=flags,
        last_observations=observations[0],
        final_observations=observations[0],
    )


def learning_rate(config: Config, iteration: int) -> float:
    """The rate of iteration 0, 1, ...; the others reach 0 with the iteration after the last."""
    optimizer = config.actor.optimizer
    if optimizer.schedule == "constant":
        return optimizer.lr
    progress = iteration / config.runner.total_iterations
    left = {"linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return optimizer.lr * max(0.0, left[optimizer.schedule])


def _explained_variance(spread: Moments) -> float | None:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 one that knows nothing but the mean."""
    _, returns, errors = spread.var.tolist()
    return 1.0 - errors / returns if returns > 0.0 else None
