"""PPO of a simulator policy over ranks: from each rank's rows of an iteration to an update that is equal on all
ranks.

Letters: T steps, B rows (environments) of this rank (possibly none), N = T * B samples, O observation shape, A action
shape, K truncations.

The order within an iteration keeps it on-policy. All forward passes use the observation statistics under which the
samples were drawn, so the first minibatch has ratio one. The statistics take in the iteration's observations after
its last step, and reach the rollout ranks together with the weights. Few collectives are needed: one for the reward
statistics; one for the statistics of advantages, returns and observations; and one per minibatch, for gradient,
losses and KL in one tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from rlplace.algo.advantages import gae
from rlplace.algo.losses import PPO_MEANS, Clip, StepSamples, ppo_slopes
from rlplace.algo.minibatches import Rows, iteration_generator, minibatches
from rlplace.algo.normalize import (
    Moments,
    ReturnScale,
    merge,
    no_moments,
    normalized,
    shifted_sums,
)
from rlplace.algo.variants import Steps, ppo_slopes_by_variant
from rlplace.codes import problem
from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.envs.action_bounds import WIDEST
from rlplace.envs.contract import ContinuousActions
from rlplace.metrics import KL_STOP, MISMATCH, MISMATCH_MAX, Metric, Metrics
from rlplace.models.mlp import HALF_LOG_2PI
from rlplace.models.networks import NetworkPolicy, Sequences
from rlplace.models.passes import Passes
from rlplace.stopwatch import Stopwatch
from rlplace.trajectory import Array, Trajectory
from rlplace.workers.training.optimizer import Numbers, Trainer, Update, mean_of
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.sequences import SequenceSamples
from rlplace.workers.training.trained_model import TrainedPolicy
from rlplace.workers.training.variant import variant_of

_AT_ONCE = 1024  # last observations per forward pass
# Iterations after which clipped values should be able to reach the returns
_MOST_ITERATIONS = 50.0
# Share of the samples in which a number of the observations may be clipped
_MOST_CLIPPED = 0.5
# About so many samples of an iteration are compared with it
_ROWS_COMPARED = 512
# Iterations whose samples make statistics that change slowly
_FEWEST_ITERATIONS = 10
# Standard deviation of actions, in halves of the range between their bounds
_MOST_DEVIATIONS = 5.0
# Log of a deviation in halves of the range that no policy reaches by learning
_DIVERGED = 50.0
# Mean difference of log-probabilities that rounding does not reach in float32
_MOST_APART = 0.01


class PolicyLearner:
    """PPO of a simulator policy, on one rank. `learn` is a collective.

    Owns the statistics by which rewards are scaled. It uses the policy and the trainer, but does not own them.
    """

    def __init__(
        self,
        config: SimulatorJobConfig,
        rows: Rows,
        policy: TrainedPolicy,
        trainer: Trainer,
        ranks: Ranks,
    ) -> None:
        algorithm = self._algorithm = config.algorithm
        self._rows = rows
        self._seed = config.runner.seed
        self._device = policy.device
        self._policy = policy
        self._trainer = trainer
        self._ranks = ranks
        self._clip = Clip(low=algorithm.clip_ratio_low, high=algorithm.clip_high)
        self._return_scale = ReturnScale(rows.count, algorithm.gamma, policy.device)
        self._variant = variant_of(algorithm)
        # The variant's own loss, which autograd differentiates
        differentiates = self._variant is not None and self._variant.differentiates
        self._custom_loss = self._variant if differentiates else None
        actor = config.actor
        self._network: str = getattr(actor.policy, "name", actor.policy.kind)
        self._rounds = actor.compute != "fp32"

    def learn(self, trajectory: Trajectory, iteration: int) -> Update:
        """Learn from all samples of `iteration`, in all epochs, and return the result of the optimizer steps. A
        collective.

        `trajectory`: all steps of this rank's rows, and of no other rows.
        """
        # Advantages and returns of this rank's samples
        watch = Stopwatch()
        samples = self._samples(trajectory)
        watch.lap("estimate", len(samples.actions))
        # Samples with NaN reward do not count; None: all samples of all ranks count
        sound = torch.from_numpy(~np.isnan(trajectory.rewards)).flatten()
        moments, observation_sums = self._statistics(samples, sound)
        all_sound = int(moments.count) == self._rows.steps * self._rows.total
        sound_of_all = None if all_sound else self._sound_of_all(sound)
        clipped = self._clipped_notes(samples.observations)
        # Normalise advantages over all ranks, and observations by the statistics of the rollout
        if self._algorithm.advantages_normalized:
            of_advantages = Moments(
                count=moments.count,
                mean=moments.mean[0],
                var=moments.var[0],
            )
            samples = samples._replace(
                advantages=normalized(samples.advantages, of_advantages, 1e-8)
            )
        samples = samples._replace(
            observations=self._policy.module.prepared(samples.observations)
        )
        lr = self._trainer.learning_rate(iteration)
        watch.lap("exchange", self._ranks.world_size)
        # Steps on minibatches; a manual backward pass needs no autograd
        samples = samples._replace(
            observations=_rows(samples.observations), actions=_rows(samples.actions)
        )
        sound_here = None if all_sound else sound
        sequences = self._sequences(samples, trajectory, sound_here)
        manual_backward = self._policy.module.manual_backward
        without_autograd = manual_backward and self._custom_loss is None
        with torch.inference_mode(without_autograd):
            steps, stopped, mismatch = self._steps(
                samples,
                sequences,
                sound_of_all,
                iteration,
                lr,
                watch,
            )
        # The statistics change after the last step only
        self._policy.drop_gathered()
        if self._policy.module.normalizer is not None:
            self._policy.module.normalizer.update(observation_sums)
        mean = mean_of(steps)
        _, returns, errors = moments.var.tolist()
        notes = [*clipped, *self._clip_notes(abs(float(moments.mean[2])))]
        if mean is not None:
            notes += self._deviation_notes(mean["entropy"])
        metrics = {KL_STOP: Metric(float(stopped), notes=tuple(notes)), **mismatch}
        # 1: a perfect critic; 0: a critic that predicts only the mean
        if returns > 0.0:
            metrics["actor/explained_variance"] = Metric(1.0 - errors / returns)
        return Update(
            mean=mean,
            # The step at which the KL stopped the iteration was evaluated, but not made
            steps=len(steps) - int(stopped),
            skipped=self._trainer.take_skipped(),
            lr=lr,
            metrics=metrics,
        )

    def state(self) -> dict[str, Tensor]:
        """Return the statistics by which rewards are scaled, of all rows of all ranks, in new tensors. A collective.

        `return_scale.returns`: discounted return of each row so far, [all rows] float64. `return_scale.moments`: [3],
        count, mean and variance of these returns.
        """
        rows = self._rows
        scale = self._return_scale
        returns = torch.zeros(rows.total, dtype=torch.float64, device=self._device)
        returns[rows.first : rows.first + rows.count] = scale.returns
        moments = torch.stack(
            [scale.moments.count, scale.moments.mean, scale.moments.var]
        )
        return {
            "return_scale.returns": self._ranks.sum(returns),
            "return_scale.moments": moments,
        }

    def take_over(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`, a result of the method `state`.

        The rows may have been distributed over other ranks when `state` was saved.
        """
        count, mean, var = state["return_scale.moments"].unbind()
        self._return_scale.moments = Moments(count=count, mean=mean, var=var)
        first = self._rows.first
        count_here = self._rows.count
        self._return_scale.returns = state["return_scale.returns"][
            first : first + count_here
        ].clone()

    def _samples(self, trajectory: Trajectory) -> StepSamples:
        """Return this rank's samples with their returns and advantages. The advantages are not normalised yet.

        If the config asks for it, the rewards are scaled first.
        """
        terminated = self._tensor(trajectory.terminated)
        truncated = self._tensor(trajectory.truncated)
        rewards = self._tensor(trajectory.rewards)
        values = self._tensor(trajectory.values)
        # NaN rewards count as zero in the statistics
        non_finite = rewards.isnan()
        if self._algorithm.normalize_rewards:
            rewards = rewards.masked_fill(non_finite, 0.0)
            rewards = self._return_scale(
                rewards,
                terminated | truncated,
                self._ranks.sum,
            )
        # A step with NaN reward ends its episode. Its value replaces its reward, so that the step before bootstraps
        # from the expected return.
        rewards = torch.where(non_finite, values, rewards)
        # Values of the observations after the last step, and of those at truncations
        beyond = np.concatenate(
            [trajectory.last_observations, trajectory.final_observations]
        )
        with torch.no_grad():
            pieces = self._tensor(beyond).split(_AT_ONCE)
            beyond_values = torch.cat(
                [self._policy.module(piece).values for piece in pieces]
            )
        known = Steps(
            rewards=rewards,
            values=values,
            last_values=beyond_values[: trajectory.rows],
            final_values=beyond_values[trajectory.rows :],
            terminated=terminated,
            truncated=truncated,
        )
        if self._variant is not None and self._variant.has("advantages"):
            advantages, returns = self._variant.advantages_and_returns(known)
        else:
            gamma = self._algorithm.gamma
            gae_lambda = self._algorithm.gae_lambda
            advantages, returns = gae(
                **known._asdict(),
                gamma=gamma,
                gae_lambda=gae_lambda,
            )
        return StepSamples(
            # [T, B, ...] becomes [N, ...]
            observations=self._tensor(trajectory.observations).flatten(0, 1),
            actions=self._tensor(trajectory.actions).flatten(0, 1),
            logprobs=self._tensor(trajectory.logprobs).flatten(),
            values=values.flatten(),
            advantages=advantages.flatten(),
            returns=returns.flatten(),
        )

    def _statistics(
        self,
        samples: StepSamples,
        sound: Tensor,
    ) -> tuple[Moments, Tensor]:
        """Return the moments [3] of advantages, returns and value errors, and the sums for the observation statistics.

        Both are over the sound samples of all ranks. The sums are empty if the policy does not normalise observations.
        A collective.

        `sound`: [samples of this rank] bool on the host, true for samples whose reward is not NaN.
        """
        if not bool(sound.all()):
            samples = samples.pick(sound.nonzero().flatten().to(self._device))
        columns = torch.stack(
            [samples.advantages, samples.returns, samples.returns - samples.values],
            dim=-1,
        )
        # One sum over ranks for both statistics
        nothing = no_moments((3,), self._device)
        parts = [shifted_sums(columns, nothing.mean)]
        if self._policy.module.normalizer is not None:
            numbers = self._policy.module.numbers(samples.observations)
            parts.append(shifted_sums(numbers, self._policy.module.normalizer.mean))
        sums = self._ranks.sum(torch.cat(parts))
        cut = len(parts[0])
        return merge(nothing, sums[:cut]), sums[cut:]

    def _sound_of_all(self, sound: Tensor) -> Tensor:
        """Return for each sample of all ranks whether its reward is not NaN, [steps * all rows] bool on the host. A
        collective.

        `sound`: the same for the samples of this rank alone, bool.
        """
        rows = self._rows
        found = torch.zeros(rows.steps, rows.total, device=self._device)
        found[:, rows.first : rows.first + rows.count] = sound.view(
            rows.steps, rows.count
        ).to(found)
        return self._ranks.sum(found.flatten()).cpu().bool()

    def _sequences(
        self,
        samples: StepSamples,
        trajectory: Trajectory,
        sound: Tensor | None,
    ) -> SequenceSamples | None:
        """Return an object that cuts this rank's samples into sequences, for a policy with memory; None for any other
        policy.

        `sound`: which of this rank's samples are learned from, as a flat bool tensor; None: all.
        """
        policy = self._policy.module
        algorithm = self._algorithm
        if not (isinstance(policy, NetworkPolicy) and policy.remembered):
            return None
        length = algorithm.unrolled
        burn_in = algorithm.burn_in
        sound = None if sound is None else sound.to(self._device)
        return SequenceSamples(
            policy,
            samples,
            trajectory,
            length=length,
            burn_in=burn_in,
            sound=sound,
        )

    def _steps(
        self,
        samples: StepSamples,
        sequences: SequenceSamples | None,
        sound: Tensor | None,
        iteration: int,
        lr: float,
        watch: Stopwatch,
    ) -> tuple[list[Numbers], bool, Metrics]:
        """Make the optimizer steps on the minibatches of all epochs. A collective.

        Return the metrics (name -> mean) of each evaluated minibatch, whether the KL ended the iteration early, and how
        far the log-probabilities of actor and rollout are apart in the first minibatch. The KL ends the iteration if
        that of a minibatch is above `target_kl`; this minibatch is evaluated, but its step is not made.

        `sequences`: for a policy with memory, else None. `sound`: which samples of all ranks are learned from, [steps *
        all rows] bool on the host; None: all. `lr`: learning rate. `watch`: measures the seconds of each part of the
        work.
        """
        steps: list[Numbers] = []
        mismatch: Metrics | None = None
        target = self._algorithm.target_kl
        generator = iteration_generator(self._seed, iteration)
        # A custom variant adds metrics; their names come from a call without samples
        names: tuple[str, ...] = PPO_MEANS
        if self._custom_loss is not None:
            no_samples = torch.empty(0, dtype=torch.int64, device=self._device)
            nothing = samples.pick(no_samples)
            names += tuple(self._custom_loss.metrics(nothing.logprobs, nothing))
        passes = self._policy.passes(len(names))
        for _ in range(self._algorithm.epochs):
            for given, mine, count in self._minibatches(
                samples,
                sequences,
                sound,
                generator,
            ):
                shares, logprobs = self._differentiate(passes, given, mine, count)
                # No step was made yet: the weights are those that the rollout had
                if mismatch is None:
                    mismatch = self._mismatch(logprobs, mine.logprobs)
                self._policy.synchronize()
                watch.lap("minibatch", len(mine.actions))
                numbers = self._trainer.sum_over_ranks(names, shares, iteration)
                watch.lap("exchange", self._ranks.world_size)
                # None: a number was not finite, so the step is skipped
                if numbers is None:
                    continue
                steps.append(numbers)
                if target is not None and numbers["approx_kl"] > target:
                    return steps, True, mismatch
                self._trainer.step(numbers["grad_norm"], lr)
                self._policy.synchronize()
                watch.lap("step")
        return steps, False, mismatch or {}

    def _clipped_notes(self, observations: Tensor) -> list[str]:
        """Return a note if a number of the observations is mostly clipped by the policy's normalisation; else none.

        The policy then sees a constant. Statistics of another environment, of which the policy was taken over, do that:
        they change slowly. Statistics of a few iterations soon follow, and are not told of. `observations`: [N, *O], as
        the simulator gave them.
        """
        module = self._policy.module
        normalizer = module.normalizer
        fewest = _FEWEST_ITERATIONS * self._rows.steps * self._rows.total
        if normalizer is None or float(normalizer.count) < fewest:
            return []
        # A rank may have no rows
        if not len(observations):
            return []
        # Some rows of all steps tell it, at a small cost
        apart = max(1, len(observations) // _ROWS_COMPARED)
        compared = module.numbers(observations[::apart])
        scaled = normalizer(compared).abs()
        counts = (scaled >= normalizer.CLIP).sum(dim=0).flatten()
        most, place = counts.max(dim=0)
        share = int(most) / len(compared)
        if share <= _MOST_CLIPPED:
            return []
        found = problem(
            "observations-clipped",
            "algorithm.normalize_observations",
            place=int(place),
            share=f"{share:.0%}",
            most=f"{normalizer.CLIP:g}",
        )
        return [found.remark()]

    def _deviation_notes(self, entropy: float) -> list[str]:
        """Return a note if the policy draws its actions so far apart that most are clipped to a bound; else none.

        `entropy`: mean entropy of an action, which is that of independent normal distributions if it is continuous.
        """
        actions = self._policy.module.actions
        if not isinstance(actions, ContinuousActions):
            return []
        halves = [
            (high - low) / 2
            for low, high in zip(actions.low, actions.high, strict=True)
        ]
        if not all(0 < half < WIDEST for half in halves):
            return []
        # Geometric means over the elements: entropy = log deviation + log(2 pi e) / 2
        log_deviation = entropy / len(halves) - HALF_LOG_2PI - 0.5
        log_half = sum(map(math.log, halves)) / len(halves)
        # A policy that has diverged has no number here
        if not math.log(_MOST_DEVIATIONS) < log_deviation - log_half < _DIVERGED:
            return []
        deviation = math.exp(log_deviation)
        half = math.exp(log_half)
        share = 1.0 - math.erf(half / deviation / math.sqrt(2.0))
        found = problem(
            "actions-clipped",
            "algorithm.entropy_coef",
            deviation=f"{deviation:.3g}",
            half=f"{half:.3g}",
            share=f"{share:.0%}",
        )
        return [found.remark()]

    def _clip_notes(self, gap: float) -> tuple[str, ...]:
        """Return a note if `value_clip` keeps values far from the returns; else none.

        `gap`: size of the mean of returns minus values; chance alone makes none. The clipped loss of a value has no
        gradient once the value has moved by `value_clip` towards its return, so an iteration closes no larger gap.
        """
        clip = self._algorithm.value_clip
        if clip is None or not gap > _MOST_ITERATIONS * clip:
            return ()
        found = problem(
            "value-clip",
            "algorithm.value_clip",
            clip=clip,
            gap=f"{gap:.3g}",
            iterations=f"{gap / clip:,.0f}",
        )
        return (found.remark(),)

    def _mismatch(self, logprobs: Tensor, decided: Tensor) -> Metrics:
        """Return as metrics how far the log-probabilities of N actions are apart in actor and rollout.

        With the same weights, only rounding makes a difference. If the difference is larger, and the computation is in
        float32, the metric has a note that says so: the policy ratio is then wrong in each update. N may be 0.

        `logprobs` [N]: by the actor. `decided` [N]: by the rollout, when it drew the actions.
        """
        count = len(logprobs)
        mean = 0.0
        most = 0.0
        if count:
            apart = (logprobs - decided).abs().double()
            mean, most = torch.stack([apart.mean(), apart.max()]).tolist()
        notes: tuple[str, ...] = ()
        if mean > _MOST_APART and not self._rounds:
            found = problem(
                "policies-differ",
                "actor.model",
                error="network",
                network=self._network,
                difference=f"{mean:.3g}",
            )
            notes = (found.remark(),)
        return {
            MISMATCH: Metric(mean, weight=count, notes=notes),
            MISMATCH_MAX: Metric(most, "max", weight=count),
        }

    def _minibatches(
        self,
        samples: StepSamples,
        sequences: SequenceSamples | None,
        sound: Tensor | None,
        generator: torch.Generator,
    ) -> Iterator[tuple[Tensor | Sequences, StepSamples, int]]:
        """Yield for each minibatch of one epoch: the input of the forward pass, this rank's samples, and the number of
        samples over all ranks.

        `sequences`: for a policy with memory, else None. `sound`: which samples of all ranks are learned from, on the
        host; None: all. `generator`: draws the order of the samples.
        """
        number = self._algorithm.num_minibatches
        if sequences is not None:
            for picked, count in minibatches(
                self._rows,
                number,
                generator,
                sound,
                self._algorithm.unrolled,
            ):
                yield *sequences.pick(picked), count
            return
        # Single steps: reorder all samples once per epoch, then yield slices
        picks, counts = zip(
            *minibatches(self._rows, number, generator, sound), strict=True
        )
        order = torch.cat(picks).to(self._device)
        sizes = [len(part) for part in picks]
        columns = (column.split(sizes) for column in samples.pick(order))
        parts = map(StepSamples._make, zip(*columns, strict=True))
        for mine, count in zip(parts, counts, strict=True):
            yield mine.observations, mine, count

    def _differentiate(
        self,
        passes: Passes,
        given: Tensor | Sequences,
        mine: StepSamples,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        """Run forward and backward pass of a minibatch on this rank.

        Return what its samples add to the means of the step, and their log-probabilities [samples].

        `passes`: forward and backward pass of the policy. `given`: input of the forward pass. `mine`: samples of this
        rank; may be empty, but the pass must run all the same, because of the collectives. `count`: samples of the
        minibatch over all ranks.
        """
        algorithm = self._algorithm
        outputs, values = passes.forward(given, mine.actions)
        chosen = passes.actions(outputs, mine.actions)
        # Gradients of the loss by log-probabilities and values
        differentiate = ppo_slopes
        if self._custom_loss is not None:
            differentiate = functools.partial(ppo_slopes_by_variant, self._custom_loss)
        gradients = differentiate(
            chosen.logprobs,
            values,
            chosen.entropies,
            mine,
            self._clip,
            value_clip=algorithm.value_clip,
            value_coef=algorithm.value_coef,
            count=count,
        )
        # Through the network, with the gradient of the entropy bonus
        entropy_gradient = -algorithm.entropy_coef / count
        passes.backward(chosen, gradients.logprobs, entropy_gradient, gradients.values)
        return gradients.shares, chosen.logprobs

    def _tensor(self, array: Array) -> Tensor:
        # A copy: an array from a channel may be read-only
        return torch.tensor(array, device=self._device)


def _rows(tensor: Tensor) -> Tensor:
    """Return `tensor` with each sample flattened: [samples, *shape] becomes [samples, elements]."""
    return tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))
