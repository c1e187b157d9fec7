"""Compute the advantages of an iteration's samples, token by token, from rewards, KL and values.

::

    env rewards + weight * scores ── normalised, clipped ──▶ reward of a sample ─┐
    log-probabilities, of the policy and of the reference ──▶ KL ────────────────┼─▶ rewards of tokens ──▶ advantages
    values, of a critic or of a head on the actor's trunk ───────────────────────┘                         and returns
    log-probabilities, of the policy and of the teacher ──▶ added to the advantages

Letters: S samples of the iteration, M response tokens of all S samples together.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlplace.algo.advantages import (
    ESTIMATORS,
    Outcomes,
    carries_signal,
    distillation,
    explained_variance,
    token_gae,
    token_rewards,
)
from rlplace.algo.kl import KL_ESTIMATORS, next_kl_coef
from rlplace.algo.normalize import (
    Moments,
    merge,
    moments_of,
    no_moments,
    normalized,
    shifted_sums,
)
from rlplace.algo.variants import TokenSteps
from rlplace.codes import problem
from rlplace.config.blocks.training import AlgorithmConfig
from rlplace.errors import RewardError
from rlplace.metrics import Metric, Metrics
from rlplace.tokens import Sample, Scores
from rlplace.workers.arguments import TextArguments
from rlplace.workers.training.samples import (
    BySample,
    Groups,
    Target,
    TokenArray,
    joined,
)
from rlplace.workers.training.variant import variant_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """Samples with their total rewards, and what the learner needs for each of their response tokens.

    `non_finite`: samples that were left out because of NaN or infinity, each with a text that names the numbers.
    `targets`: name of the target -> one array per sample, in the order of `groups`. `kl_coef`: weight of the KL from
    the reference. `metrics`: metrics of the samples.
    """

    groups: Groups
    # Samples left out of `groups` because of NaN or infinity, each with a text that names the numbers
    non_finite: Sequence[tuple[Sample, str]] = ()
    targets: Mapping[Target, BySample]
    kl_coef: float
    metrics: Metrics

    def learned(self, algorithm: AlgorithmConfig) -> Experience:
        """Return a copy of this experience without the samples that the algorithm does not learn from.

        With `only_with_signal`, these are the groups whose rewards are all equal, or those of the reward that
        `dynamic_sampling_by` names. With `truncated: mask`, these are the
        answers that were cut at a length limit. If the config has neither, return this experience itself.
        """
        mask_truncated = algorithm.truncated == "mask"
        only_with_signal = algorithm.only_with_signal
        if not mask_truncated and not only_with_signal:
            return self
        # One flag per sample, in the order of the groups
        kept: list[bool] = []
        groups: list[Sequence[Sample]] = []
        for group in self.groups:
            by = algorithm.dynamic_sampling_by
            rewards = [sample.signal(by) for sample in group]
            has_signal = not only_with_signal or carries_signal(rewards)
            remaining = []
            for sample in group:
                keep = has_signal and not (mask_truncated and sample.truncated)
                kept.append(keep)
                if keep:
                    remaining.append(sample)
            if remaining:
                groups.append(remaining)
        # Targets lie in the same order as the samples
        targets = {
            name: list(itertools.compress(values, kept))
            for name, values in self.targets.items()
        }
        return dataclasses.replace(self, groups=groups, targets=targets)

    def returns(self) -> list[tuple[Scores, ...]]:
        """Return what is sent to the critic: one tuple for each group, with the returns of each sample of the group.

        Samples that were left out because of non-finite numbers have NaN returns, because the critic waits for every
        sample.
        """
        # Samples with returns first, then NaN for the others
        samples = [sample for group in self.groups for sample in group]
        found = [*zip(samples, self.targets["returns"], strict=True)]
        for sample, _ in self.non_finite:
            missing = np.full(sample.response_tokens, np.nan, np.float32)
            found.append((sample, missing))
        # A group that lost a sample is whole again here
        by_group: dict[int, list[Scores]] = {}
        for sample, values in found:
            by_group.setdefault(sample.group, []).append(
                Scores(group=sample.group, sample=sample.sample, values=values)
            )
        return [tuple(scores) for scores in by_group.values()]


class AdvantageEstimator:
    """Computes the advantages of samples from rewards, KL and values. Only rank 0 of the actor uses it.

    It owns the state that lasts over iterations: the present weight of the KL, and the running moments of rewards.
    """

    def __init__(self, job: TextArguments) -> None:
        self._config = job.config
        self._rewards = job.rewards
        self._algorithm = job.config.algorithm
        self._kl_coef = self._algorithm.kl_coef
        self._reward_moments = no_moments()
        variant = variant_of(self._algorithm)
        has_advantages = variant is not None and variant.has("advantages")
        self._variant = variant if has_advantages else None

    def __call__(
        self,
        groups: Groups,
        scores: Mapping[str, BySample],
        inferred: Mapping[Target, BySample],
    ) -> Experience:
        """Return the samples with their total rewards, and the learning targets of their response tokens.

        `scores`: scoring component -> one array per sample. `inferred`: target that the actor has computed with its own
        weights -> one array per sample. Arrays are in the order of the samples in `groups`. If the config leaves out
        samples with non-finite numbers, they are removed first.
        """
        algorithm = self._algorithm
        # Total reward of each sample: the environment's and the weighted scores of reward components
        numbers = itertools.count()
        non_finite = list[tuple[Sample, str]]()
        rewarded: list[Sequence[Sample]] = []
        for group in groups:
            samples = [
                self._rewarded(sample, next(numbers), scores) for sample in group
            ]
            rewarded.append(samples)
        groups = rewarded
        if self._config.leaves_out:
            groups, non_finite, scores, inferred = without_non_finite(
                groups,
                scores,
                inferred,
            )
        targets = dict(inferred)
        outcomes = Outcomes.of(groups)
        # KL from the reference, [M]; part of the reward or of the loss, as the algorithm says
        if "reference" in scores:
            targets["reference"] = scores["reference"]
        kl, metrics = self._kl(groups, targets)
        outcomes = outcomes._replace(rewards=self._shaped(outcomes.rewards))
        penalty = kl if algorithm.kl_in == "reward" else None

        def by_sample(values: Tensor) -> BySample:
            return [part.numpy() for part in values.split(outcomes.lengths.tolist())]

        # Advantages [M]: token-wise by GAE with a value function, else one number per sample
        if algorithm.name == "ppo":
            values = _tensor(inferred.get("values") or scores["critic"])
            rewards = token_rewards(
                outcomes.rewards,
                outcomes.lengths,
                penalty,
                self._kl_coef,
            ).float()
            if self._variant is not None:
                steps = TokenSteps(rewards, values, outcomes.lengths)
                advantages, returns = self._variant.advantages_and_returns(steps)
            else:
                advantages, returns = token_gae(
                    rewards,
                    values,
                    outcomes.lengths,
                    gamma=algorithm.gamma,
                    gae_lambda=algorithm.gae_lambda,
                )
            targets["returns"] = by_sample(returns)
            if "values" in inferred:
                explained = explained_variance(values, returns)
                metrics |= {"actor/explained_variance": Metric(explained)}
        else:
            advantages = self._group_advantages(outcomes, penalty)
        if algorithm.advantages_normalized:
            advantages = normalized(advantages, moments_of(advantages))
        # After the normalisation, which would hide how far the actor is from the teacher
        if "teacher" in scores:
            taught, of_teacher = self._taught(groups, scores["teacher"], targets)
            advantages = advantages + taught
            metrics = {**metrics, **of_teacher}
        targets["advantages"] = by_sample(advantages)
        experience = Experience(
            groups=groups,
            non_finite=non_finite,
            targets=targets,
            kl_coef=self._kl_coef,
            metrics=metrics,
        )
        # The KL weight of the next iteration, from the KL per sample of this one
        count = len(outcomes.rewards)
        if kl is not None and algorithm.kl_target is not None and count:
            each = float(kl.sum()) / count
            self._kl_coef = next_kl_coef(
                self._kl_coef,
                each,
                count,
                algorithm.kl_target,
                algorithm.kl_horizon,
            )
        return experience

    def state(self) -> Tensor:
        """Return a float64 tensor [4]: the present weight of the KL, and the count, mean and variance of all rewards so
        far.
        """
        coef = torch.tensor(self._kl_coef, dtype=torch.float64)
        seen = self._reward_moments
        return torch.stack([coef, seen.count, seen.mean, seen.var])

    def take_over(self, state: Tensor) -> None:
        """Continue from `state`, a result of the method `state`, which another process may have returned."""
        coef, count, mean, var = state.unbind()
        self._kl_coef = float(coef)
        self._reward_moments = Moments(count=count, mean=mean, var=var)

    def _rewarded(
        self,
        sample: Sample,
        number: int,
        scores: Mapping[str, BySample],
    ) -> Sample:
        """Return a copy of `sample` whose reward includes the weighted scores of all reward components.

        A component whose function does not apply to the sample, as functions of TRL's form say by None, has no score.

        `number`: position of the sample among all samples. `scores`: scoring component -> one array per sample.
        """
        if not self._rewards:
            return sample
        scored = {
            name: float(scores[name][number][0])
            for name in self._rewards
            if len(scores[name][number])
        }
        weighed = sum(
            self._config.reward_of(name).weight * score
            for name, score in scored.items()
        )
        return dataclasses.replace(
            sample,
            reward=sample.reward + weighed,
            rewards={**sample.rewards, **scored},
        )

    def _shaped(self, rewards: Tensor) -> Tensor:
        """Return the rewards of all S samples, [S], normalised and clipped if the config asks for it.

        They are normalised by the moments of all rewards of the run so far, including these. Ziegler et al. 2019
        (arXiv:1909.08593) normalise once, by samples of the first policy.
        """
        if self._algorithm.normalize_rewards:
            sums = shifted_sums(rewards, self._reward_moments.mean)
            self._reward_moments = merge(self._reward_moments, sums)
            rewards = normalized(rewards, self._reward_moments)
        limit = self._algorithm.reward_clip
        if limit is None:
            return rewards
        return rewards.clamp(-limit, limit)

    def _kl(
        self,
        groups: Groups,
        known: Mapping[Target, BySample],
    ) -> tuple[Tensor | None, dict[str, Metric]]:
        """Return the KL from the reference for each of all M response tokens, [M], and its metrics; without a
        reference, None and no metrics.

        `groups`: the samples. `known`: target -> one array per sample. The policy's log-probabilities are those of the
        trainer (`old`) if they are in `known`, else those of the generation engine.
        """
        if "reference" not in known:
            return None, {}
        sampled = _sampled(groups, known)
        estimator = KL_ESTIMATORS[self._algorithm.kl_estimator]
        kl = estimator(_tensor(known["reference"]) - _tensor(sampled))
        tokens = len(kl)
        samples = len(sampled)
        total = float(kl.sum())
        by_sample = Metric(total / max(1, samples), weight=samples)
        by_token = Metric(total / max(1, tokens), weight=tokens)
        return kl, {
            "actor/kl_reference": by_sample,
            "actor/kl_reference_token": by_token,
            "actor/kl_coef": Metric(self._kl_coef),
        }

    def _taught(
        self, groups: Groups, scores: BySample, known: Mapping[Target, BySample]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return what the teacher adds to the advantages of all M response tokens, [M], and metrics of its distance.

        `groups`: the samples. `scores`: the teacher's log-probabilities, one array per sample. `known`: target -> one
        array per sample. The distance is the reverse KL, KL(actor || teacher), by the estimator k1.
        """
        teacher = self._config.teacher
        log_ratio = _tensor(scores) - _tensor(_sampled(groups, known))
        lengths = torch.tensor([len(each) for each in scores], dtype=torch.int64)
        taught = distillation(log_ratio, lengths, teacher.coef, teacher.discount)
        total = -float(log_ratio.sum())
        samples = len(lengths)
        tokens = len(log_ratio)
        return taught, {
            "actor/kl_teacher": Metric(total / max(1, samples), weight=samples),
            "actor/kl_teacher_token": Metric(total / max(1, tokens), weight=tokens),
        }

    def _group_advantages(self, outcomes: Outcomes, penalty: Tensor | None) -> Tensor:
        """Return the advantages of all M response tokens, [M], by an estimator that compares the samples of a group.

        All tokens of a sample have the same advantage.

        `outcomes`: reward, length and group of each sample. `penalty`: KL of each token, [M], whose weighted sum is
        subtracted from the sample's reward; None: subtract nothing.
        """
        if penalty is not None:
            # Sum of the KL over the tokens of each sample, [S]
            sample_of_token = torch.repeat_interleave(outcomes.lengths)
            no_kl = outcomes.rewards.new_zeros(len(outcomes.rewards))
            kl = no_kl.index_add(0, sample_of_token, penalty.double())
            rewards = outcomes.rewards - self._kl_coef * kl
            outcomes = outcomes._replace(rewards=rewards)
        estimate = ESTIMATORS[self._algorithm.name]
        if self._variant is not None:
            estimate = self._variant.advantages
        return estimate(outcomes).float().repeat_interleave(outcomes.lengths)


def _sampled(groups: Groups, known: Mapping[Target, BySample]) -> BySample:
    """Return the policy's log-probabilities of the response tokens, one array per sample.

    They are the trainer's (`old`) if they are in `known`, else those of the generation engine.
    """
    computed = known.get("old")
    if computed:
        return computed
    return [sample.logprobs[sample.mask] for group in groups for sample in group]


def without_non_finite(
    groups: Groups,
    scores: Mapping[str, BySample],
    inferred: Mapping[Target, BySample],
) -> tuple[
    Groups, list[tuple[Sample, str]], Mapping[str, BySample], Mapping[Target, BySample]
]:
    """Separate the samples that have NaN or infinity in their rewards, log-probabilities, scores or inferred values.

    Return four values: the groups of the finite samples; the separated samples, each with a text that names its
    non-finite numbers; and `scores` and `inferred` of the finite samples only. Raises RewardError (`all-poisoned`) if
    no sample is finite.

    `scores`, `inferred`: name -> one array per sample.
    """
    samples = [sample for group in groups for sample in group]
    known = dict[str, BySample]([*scores.items(), *inferred.items()])
    # A text for each sample; empty where all its numbers are finite
    faults: list[str] = []
    for i, sample in enumerate(samples):
        of_sample = {name: parts[i] for name, parts in known.items()}
        faults.append(_not_finite(sample, of_sample))
    sound = [not fault for fault in faults]
    if not any(sound):
        raise RewardError(
            problem(
                "all-poisoned",
                "actor rank 0",
                f"rewards {[sample.reward for sample in samples[:8]]}",
                count=len(samples),
            )
        )
    # Regroup the finite samples; a group without any is left out
    kept = iter(sound)
    finite: list[Sequence[Sample]] = []
    for group in groups:
        remaining = [sample for sample in group if next(kept)]
        if remaining:
            finite.append(remaining)
    non_finite = [
        (sample, fault) for sample, fault in zip(samples, faults, strict=True) if fault
    ]

    def of_finite(parts: BySample) -> BySample:
        return [*itertools.compress(parts, sound)]

    return (
        finite,
        non_finite,
        {name: of_finite(parts) for name, parts in scores.items()},
        {name: of_finite(parts) for name, parts in inferred.items()},
    )


def _not_finite(sample: Sample, known: Mapping[str, TokenArray]) -> str:
    """Return a text that names the non-finite numbers of a sample; empty if all its numbers are finite.

    `known`: scoring component or target -> array of this sample.
    """
    found: list[str] = []
    for name, value in sample.rewards.items():
        if not math.isfinite(value):
            found.append(f"reward {name} {value}")
    if not np.isfinite(sample.logprobs).all():
        found.append("log-probabilities of the engine")
    for name, values in known.items():
        # A reward component is named by its reward already
        if name not in sample.rewards and not np.isfinite(values).all():
            found.append(name)
    if found:
        return ", ".join(found)
    # The reward itself became NaN in the environment
    return "reward nan" if sample.poisoned else ""


def _tensor(parts: BySample) -> Tensor:
    return torch.tensor(joined(parts))
