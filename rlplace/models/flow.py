"""Actions by flow matching: the noise steps of Flow-SDE, which give an action made from noise a probability.

A network predicts a velocity v(x, t). The flow leads from noise at t = 1 to an action at t = 0 (Lipman et al. 2022,
arXiv:2210.02747; with this direction of t in pi0, arXiv:2410.24164). A policy gradient needs the probability of an
action, which the deterministic flow does not give in closed form. So each of k steps adds noise, as in Flow-SDE of
pi_RL (Chen et al. 2025, arXiv:2510.25889; Liu et al. 2025, Flow-GRPO, arXiv:2505.05470)::

    x_0 ~ N(0, 1) ──▶ x_1 ~ N(mean of step 0, deviation of step 0) ──▶ ... ──▶ x_k, the action

    mean        x - d v - s^2 d / (2 t) * (x + (1 - t) v)        d = 1 / k, t = 1 - step / k
    deviation   s sqrt(d)                                        s = noise level * sqrt(t / (1 - t)), at t = 1 that of
                                                                 the next step

The drift makes up for the noise: with many steps, x has the distribution of the deterministic flow at each t. The
log-probability of a chain is the sum over its k steps. That of the first noise is left out, because it does not depend
on the policy.

Letters: N observations, k steps, E elements of an action, or of a chunk of actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


# From x [N, E] and the number of the step to velocities [N, E] float32
Velocity = Callable[[Tensor, int], Tensor]


class NoiseSchedule(NamedTuple):
    """The k steps of Flow-SDE: x of the next step is `kept` * x + `moved` * v + `deviations` * noise.

    `kept`, `moved`, `deviations`: [k] float32, on the host. `greedy_moved`: the factor of v without noise,
    where x is kept whole.
    """

    kept: Tensor
    moved: Tensor
    deviations: Tensor
    greedy_moved: float

    @property
    def steps(self) -> int:
        """The number of steps k."""
        return len(self.kept)

    def entropy(self, elements: int) -> float:
        """Return the entropy of the noise of all steps. It does not depend on the policy. `elements`: E."""
        each = self.deviations.double().log() + 0.5 + _HALF_LOG_2PI
        return elements * float(each.sum())

    def logprob(self, normalised: Tensor) -> Tensor:
        """Return the log-density of N chains, [N].

        `normalised` [N, k, E]: how far x of each next step is from its mean, in standard deviations.
        """
        elements = normalised.shape[-1]
        each = self.deviations.double().log() + _HALF_LOG_2PI
        constant = elements * float(each.sum())
        return -0.5 * normalised.square().sum(dim=(1, 2)) - constant

    def normalised(self, velocities: Tensor, chain: Tensor) -> Tensor:
        """Return how far each x of N chains is from its mean, in standard deviations, [N, k, E].

        `velocities` [N, k, E]: those at all x but the last. `chain` [N, 1 + k, E]: x of each step.
        """
        kept, moved, deviations = self._columns(chain)
        means = kept * chain[:, :-1] + moved * velocities
        return (chain[:, 1:] - means) / deviations

    def velocity_slopes(self, normalised: Tensor) -> Tensor:
        """Return the gradient of each chain's log-density with respect to the velocities, [N, k, E].

        `normalised` [N, k, E]: the result of the method of that name.
        """
        _, moved, deviations = self._columns(normalised)
        return normalised * (moved / deviations)

    def _columns(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `kept`, `moved` and `deviations`, each [k, 1], on the device of `like`."""
        device = like.device
        kept = self.kept.to(device)[:, None]
        moved = self.moved.to(device)[:, None]
        deviations = self.deviations.to(device)[:, None]
        return kept, moved, deviations


class DenoisedOutput(NamedTuple):
    """Output of a policy by flow matching: for each of N observations, its velocities and its value.

    `velocity`: takes x [N, E] and the number of the step, and returns velocities [N, E] float32. `values`: [N] float32.
    `shape`: shape of a chain, [1 + k, *shape of an action].
    """

    velocity: Velocity
    schedule: NoiseSchedule
    values: Tensor
    shape: tuple[int, ...]

    def sample(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return N chains [N, 1 + k, *shape of an action] and their log-densities [N].

        `noise`: standard normal, in the shape of the chains; the first of a chain is x of step 0.
        """
        schedule = self.schedule
        drawn = noise.flatten(2)
        x = drawn[:, 0]
        points = [x]
        velocities = []
        for step in range(schedule.steps):
            velocity = self.velocity(x, step)
            mean = (
                float(schedule.kept[step]) * x + float(schedule.moved[step]) * velocity
            )
            x = mean + float(schedule.deviations[step]) * drawn[:, 1 + step]
            velocities.append(velocity)
            points.append(x)
        chain = torch.stack(points, dim=1)
        normalised = schedule.normalised(torch.stack(velocities, dim=1), chain)
        return chain.view(-1, *self.shape), schedule.logprob(normalised)

    def logprob(self, chains: Tensor) -> Tensor:
        """Return the log-densities of N chains, [N]. `chains`: [N, 1 + k, *shape of an action]."""
        chain = chains.flatten(2)
        velocities = [
            self.velocity(chain[:, step], step) for step in range(self.schedule.steps)
        ]
        normalised = self.schedule.normalised(torch.stack(velocities, dim=1), chain)
        return self.schedule.logprob(normalised)

    def greedy(self) -> Tensor:
        """Return N actions [N, *shape of an action]: the flow without noise, from the most probable x of step 0."""
        elements = math.prod(self.shape[1:])
        x = self.values.new_zeros(len(self.values), elements)
        for step in range(self.schedule.steps):
            x = x + self.schedule.greedy_moved * self.velocity(x, step)
        return x.view(-1, *self.shape[1:])


def step_times(steps: int) -> list[float]:
    """Return the time t of each of `steps` steps."""
    return [1.0 - step / steps for step in range(steps)]


def noise_schedule(steps: int, noise_level: float) -> NoiseSchedule:
    """Return the steps of Flow-SDE. `steps`: k. `noise_level`: above 0; the deviations are proportional to it."""
    each = 1.0 / steps
    kept = []
    moved = []
    deviations = []
    for step, time in enumerate(step_times(steps)):
        # At t = 1 the formula is infinite: use the t of the next step in the denominator
        other = time if step else 1.0 - each
        variance = noise_level**2 * time / (1.0 - other)
        drift = variance * each / (2.0 * time)
        kept.append(1.0 - drift)
        moved.append(-each - drift * (1.0 - time))
        deviations.append(math.sqrt(variance * each))
    return NoiseSchedule(
        kept=torch.tensor(kept),
        moved=torch.tensor(moved),
        deviations=torch.tensor(deviations),
        greedy_moved=-each,
    )
