"""PPO as a single file on continuous actions has it: autograd, an object for distributions, Adam over tensors.

It is what `learning_step.py` and `end_to_end.py` compare with; CleanRL's file of that name (Huang et al. 2022,
arXiv:2111.08819) is of this form.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal

GAMMA = 0.99
GAE_LAMBDA = 0.95
CLIP = 0.2
ENTROPY = 0.0
VALUE = 0.5
NORM = 0.5


class Samples(NamedTuple):
    """Of an iteration: [T, B] or [T, B, ...], float32; of `done` bool."""

    observations: Tensor
    actions: Tensor
    logprobs: Tensor
    values: Tensor
    rewards: Tensor
    done: Tensor


class OneFile:
    """Policy, critic and optimizer."""

    def __init__(self, observed: int, actions: int, widths: Sequence[int]) -> None:
        def trunk(outputs: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for inputs, width in zip((observed, *widths), widths, strict=False):
                layers += [nn.Linear(inputs, width), nn.Tanh()]
            return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))

        self.mean, self.critic, self.log_std = (
            trunk(actions),
            trunk(1),
            nn.Parameter(torch.zeros(1, actions)),
        )
        self._parameters = [
            *self.mean.parameters(),
            *self.critic.parameters(),
            self.log_std,
        ]
        self._optimizer = torch.optim.Adam(self._parameters, lr=3e-4, eps=1e-5)

    @torch.no_grad()
    def act(self, observations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return actions [B, A], their log-probabilities and the values [B]."""
        normal = self._policy(observations)
        actions = normal.sample()
        return actions, normal.log_prob(actions).sum(1), self.critic(observations)[:, 0]

    def learn(
        self, samples: Samples, last: Tensor, epochs: int, minibatch: int
    ) -> None:
        """Update by an iteration; `last`: what was seen after it, [B, O]."""
        advantages = self._estimates(samples, last)
        observations, actions, logprobs, values = (
            column.flatten(0, 1) for column in samples[:4]
        )
        returns = advantages + values
        for _ in range(epochs):
            for picks in torch.randperm(len(returns)).split(minibatch):
                normal = self._policy(observations[picks])
                log_ratio = normal.log_prob(actions[picks]).sum(1) - logprobs[picks]
                ratio = log_ratio.exp()
                with torch.no_grad():
                    (
                        (ratio - 1.0) - log_ratio
                    ).mean()  # what is reported: KL, share of clipped samples
                    ((ratio - 1.0).abs() > CLIP).float().mean().item()
                chosen = advantages[picks]
                chosen = (chosen - chosen.mean()) / (chosen.std() + 1e-8)
                policy_loss = torch.max(
                    -chosen * ratio, -chosen * ratio.clamp(1.0 - CLIP, 1.0 + CLIP)
                ).mean()
                value_loss = (
                    0.5
                    * (self.critic(observations[picks]).view(-1) - returns[picks])
                    .square()
                    .mean()
                )
                loss = (
                    policy_loss
                    - ENTROPY * normal.entropy().sum(1).mean()
                    + VALUE * value_loss
                )
                self._optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self._parameters, NORM)
                self._optimizer.step()

    def _policy(self, observations: Tensor) -> Normal:
        means = self.mean(observations)
        return Normal(means, self.log_std.expand_as(means).exp())

    @torch.no_grad()
    def _estimates(self, samples: Samples, last: Tensor) -> Tensor:
        """Return the advantages, [T * B]."""
        following = torch.zeros(len(last))
        next_values = self.critic(last)[:, 0]
        found = torch.zeros_like(samples.values)
        for t in reversed(range(len(found))):
            going = 1.0 - samples.done[t].float()
            delta = samples.rewards[t] + GAMMA * next_values * going - samples.values[t]
            following = found[t] = delta + GAMMA * GAE_LAMBDA * going * following
            next_values = samples.values[t]
        return found.flatten()


def train(
    name: str,
    *,
    envs: int,
    steps: int,
    iterations: int,
    epochs: int,
    minibatch: int,
    widths: Sequence[int],
    seed: int,
) -> list[tuple[float, float]]:
    """Train on a Gymnasium id with continuous actions. Return the seconds of rollout and of learning, by iteration."""
    import gymnasium
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    torch.manual_seed(seed)
    vector: Any = SyncVectorEnv(
        [lambda: gymnasium.make(name)] * envs, autoreset_mode=AutoresetMode.SAME_STEP
    )
    (observed,), (actions,) = (
        vector.single_observation_space.shape,
        vector.single_action_space.shape,
    )
    bounds = vector.single_action_space.low, vector.single_action_space.high
    learner = OneFile(observed, actions, widths)
    seen = _tensor(vector.reset(seed=seed)[0])
    seconds = []
    for _ in range(iterations):
        began = time.perf_counter()
        rows = []
        for _ in range(steps):
            chosen, logprobs, values = learner.act(seen)
            following, rewards, terminated, truncated, _ = vector.step(
                np.clip(chosen.numpy(), *bounds)
            )
            rows.append(
                (
                    seen,
                    chosen,
                    logprobs,
                    values,
                    _tensor(rewards),
                    torch.from_numpy(terminated | truncated),
                )
            )
            seen = _tensor(following)
        samples = Samples(*map(torch.stack, zip(*rows, strict=True)))
        rolled = time.perf_counter()
        learner.learn(samples, seen, epochs, minibatch)
        seconds.append((rolled - began, time.perf_counter() - rolled))
    return seconds


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.asarray(array, np.float32))
