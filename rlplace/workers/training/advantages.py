"""Compute the advantages of an iteration's samples, token by token, from rewards, KL and values.

::

    env rewards + weight * scores ── normalised, clipped ──▶ reward of a sample ─┐
    log-probabilities, of the policy and of the reference ──▶ KL ────────────────┼─▶ rewards of tokens ──▶ advantages
    values, of a critic or of a head on the actor's trunk ───────────────────────┘                         and returns

Letters: S samples of the iteration, M response tokens of these, N of one sample.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlplace.algo.gae import explained_variance, token_gae, token_rewards
from rlplace.algo.group_advantages import ESTIMATORS, Outcomes, carries_signal
from rlplace.algo.kl import KL_ESTIMATORS, next_kl_coef
from rlplace.algo.normalize import moments_of, no_moments, normalize_scores, normalized
from rlplace.metrics import Metric, Metrics
from rlplace.tokens import Returns, Sample
from rlplace.workers.arguments import WorkerArguments
from rlplace.workers.training.samples import BySample, Groups, Targets, joined


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """Numbers of the response tokens by the actor's own weights before the first step."""

    old: BySample | None = None  # log-probabilities
    reference: BySample | None = None  # those without its low-rank factors
    values: BySample | None = None  # of a value head on its trunk


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """An iteration's samples, with all rewards counted, and the targets of their response tokens."""

    groups: Groups
    targets: Sequence[Targets]  # by sample, in the order of the groups
    kl_coef: float
    metrics: Metrics

    def with_signal(self) -> Experience:
        """Leave out the groups whose rewards are all equal."""
        kept = [(group, of) for group, of in self._by_group() if carries_signal([sample.reward for sample in group])]
        return dataclasses.replace(
            self, groups=[group for group, _ in kept], targets=[target for _, of in kept for target in of]
        )

    def returns(self) -> list[tuple[Returns, ...]]:
        """Return those of each group, for a critic."""
        return [
            tuple(_returns(sample, target) for sample, target in zip(group, of, strict=True))
            for group, of in self._by_group()
        ]

    def _by_group(self) -> list[tuple[Sequence[Sample], list[Targets]]]:
        targets = iter(self.targets)
        return [(group, [next(targets) for _ in group]) for group in self.groups]


class AdvantageEstimator:
    """Used by rank 0 of the actor. Owns what is carried over iterations: the KL weight, the moments of scores."""

    def __init__(self, job: WorkerArguments) -> None:
        self._config, self._rewards = job.config, job.rewards
        self._algorithm = job.config.algorithm
        self._kl_coef = self._algorithm.kl_coef
        self._seen = no_moments()

    def __call__(self, groups: Groups, scores: Mapping[str, BySample], own: Inferred) -> Experience:
        """`scores`: by component, of all that score samples."""
        algorithm, numbers = self._algorithm, itertools.count()
        groups = [[self._rewarded(sample, next(numbers), scores) for sample in group] for group in groups]
        outcomes, reference = Outcomes.of(groups), scores.get("reference", own.reference)
        kl, metrics = self._kl(groups, reference, own.old)
        outcomes = outcomes._replace(rewards=self._shaped(outcomes.rewards))
        penalty, returns = kl if algorithm.kl_in == "reward" else None, None
        if algorithm.name == "ppo":
            values = _tensor(own.values or scores["critic"])
            advantages, returns = token_gae(
                rewards=token_rewards(outcomes.rewards, outcomes.lengths, penalty, self._kl_coef).float(),
                values=values,
                lengths=outcomes.lengths,
                gamma=algorithm.gamma,
                gae_lambda=algorithm.gae_lambda,
            )
            if own.values is not None:
                metrics |= {"actor/explained_variance": Metric(explained_variance(values, returns))}
        else:
            advantages = self._group_advantages(outcomes, penalty)
        if algorithm.advantages_normalized:
            advantages = normalized(advantages, moments_of(advantages))
        kl_coef = self._kl_coef
        self._adapt(kl, len(outcomes.rewards))
        targets = _targets(outcomes.lengths, advantages, returns, reference, own)
        return Experience(groups=groups, targets=targets, kl_coef=kl_coef, metrics=metrics)

    def _rewarded(self, sample: Sample, number: int, scores: Mapping[str, BySample]) -> Sample:
        """Add the scores of reward components to the environment's reward."""
        if not self._rewards:
            return sample
        scored = {name: float(scores[name][number][0]) for name in self._rewards}
        weighed = sum(self._config.reward_of(name).weight * score for name, score in scored.items())
        return dataclasses.replace(sample, reward=sample.reward + weighed, rewards={**sample.rewards, **scored})

    def _shaped(self, rewards: Tensor) -> Tensor:
        """Return [S] rewards as they are learned from: normalised and clipped where the algorithm asks for it."""
        if self._algorithm.normalize_rewards:
            rewards, self._seen = normalize_scores(rewards, self._seen)
        limit = self._algorithm.reward_clip
        return rewards if limit is None else rewards.clamp(-limit, limit)

    def _kl(
        self, groups: Groups, reference: BySample | None, old: BySample | None
    ) -> tuple[Tensor | None, dict[str, Metric]]:
        """Return [M] from the reference, by the trainer's log-probabilities if it inferred, else by the engine's."""
        if reference is None:
            return None, {}
        sampled = [s.logprobs[s.mask] for group in groups for s in group] if old is None else old
        kl = KL_ESTIMATORS[self._algorithm.kl_estimator](_tensor(reference) - _tensor(sampled))
        tokens, samples = len(kl), len(sampled)
        metrics = {
            "actor/kl_reference": Metric(float(kl.sum()) / max(1, samples), weight=samples),  # by sample
            "actor/kl_reference_token": Metric(float(kl.sum()) / max(1, tokens), weight=tokens),
            "actor/kl_coef": Metric(self._kl_coef),
        }
        return kl, metrics

    def _group_advantages(self, outcomes: Outcomes, penalty: Tensor | None) -> Tensor:
        """Return [M] each sample's at all of its tokens, its KL counted as part of its reward."""
        if penalty is not None:
            sample = torch.repeat_interleave(outcomes.lengths)
            lost = outcomes.rewards.new_zeros(len(outcomes.rewards)).index_add(0, sample, penalty.double())
            outcomes = outcomes._replace(rewards=outcomes.rewards - self._kl_coef * lost)
        return ESTIMATORS[self._algorithm.name](outcomes).float().repeat_interleave(outcomes.lengths)

    def _adapt(self, kl: Tensor | None, samples: int) -> None:
        target, horizon = self._algorithm.kl_target, self._algorithm.kl_horizon
        if kl is not None and target is not None and samples:
            mean = float(kl.sum()) / samples
            self._kl_coef = next_kl_coef(self._kl_coef, kl=mean, target=target, horizon=horizon, samples=samples)


def _tensor(parts: BySample) -> Tensor:
    """Return [M]."""
    return torch.tensor(joined(parts))


def _targets(
    lengths: Tensor, advantages: Tensor, returns: Tensor | None, reference: BySample | None, own: Inferred
) -> list[Targets]:
    def split(values: Tensor | None) -> BySample | None:
        return None if values is None else [part.numpy() for part in values.split(lengths.tolist())]

    fields = {
        "advantages": split(advantages),
        "returns": split(returns),
        "reference": reference,
        "old": own.old,
        "values": own.values,
    }
    return [
        Targets(**{name: values[i] for name, values in fields.items() if values is not None})
        for i in range(len(lengths))
    ]


def _returns(sample: Sample, targets: Targets) -> Returns:
    assert targets.returns is not None, "only a critic asks"
    return Returns(group=sample.group, sample=sample.sample, returns=targets.returns)
