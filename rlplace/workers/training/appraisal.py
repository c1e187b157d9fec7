"""What an iteration's samples were worth, token by token: rewards, divergence from the reference, advantages, returns.

::

    env rewards + weight * scores ── normalised, clipped ──▶ reward of a sample ─┐
    log-probabilities, of the policy and of the reference ──▶ divergence ────────┼─▶ rewards of tokens ──▶ advantages
    values, of a critic or of a head on the actor's trunk ───────────────────────┘                         and returns

Letters: S samples of the iteration, M learned tokens of these, N of one sample.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlplace.algo.dynamic_sampling import carries_signal
from rlplace.algo.group_advantages import ESTIMATORS, Outcomes
from rlplace.algo.kl_control import next_kl_coef
from rlplace.algo.lm_losses import DIVERGENCES
from rlplace.algo.normalize import no_moments
from rlplace.algo.token_advantages import (
    clip_scores,
    explained_variance,
    moments_of,
    normalize_scores,
    token_gae,
    token_rewards,
    whiten,
)
from rlplace.metrics import Metric, Metrics
from rlplace.tokens import Returns, Sample
from rlplace.workers.arguments import WorkerArguments
from rlplace.workers.training.samples import Groups, Marks, TokenArray

Scored = Sequence[TokenArray]  # [N] by sample, in the order of the groups


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """What the actor's own weights say of the learned tokens before the first step."""

    old: Scored | None = None  # log-probabilities
    reference: Scored | None = None  # those without its low-rank factors
    values: Scored | None = None  # of a value head on its trunk


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Appraisal:
    """An iteration's samples, with all rewards counted, and what is known of their tokens."""

    groups: Groups
    marks: Sequence[Marks]  # by sample, in the order of the groups
    kl_coef: float
    metrics: Metrics

    def with_signal(self) -> Appraisal:
        """Without the groups whose rewards are all equal."""
        marks = iter(self.marks)
        each = [(group, [next(marks) for _ in group]) for group in self.groups]
        kept = [(group, of) for group, of in each if carries_signal([sample.reward for sample in group])]
        return dataclasses.replace(self, groups=[group for group, _ in kept], marks=[m for _, of in kept for m in of])

    def returns(self) -> list[tuple[Returns, ...]]:
        """Of each group, for a critic."""
        marks = iter(self.marks)
        return [tuple(_returns(sample, next(marks)) for sample in group) for group in self.groups]


class Appraiser:
    """Owned by rank 0 of the actor. Owns what is carried on: the weight of the divergence, the scores' moments."""

    def __init__(self, job: WorkerArguments) -> None:
        self._config, self._rewards = job.config, job.rewards
        self._algorithm = job.config.algorithm
        self._kl_coef = self._algorithm.kl_coef
        self._seen = no_moments()

    def appraise(self, groups: Groups, scores: Mapping[str, Scored], own: Inferred) -> Appraisal:
        """`scores`: by component, of all that judge."""
        groups = [[self._rewarded(sample, number, scores) for sample, number in group] for group in _numbered(groups)]
        outcomes = Outcomes.of(groups)
        divergence, metrics = self._divergence(groups, scores.get("reference", own.reference), own.old)
        outcomes = outcomes._replace(rewards=self._shaped(outcomes.rewards))
        if self._algorithm.name == "ppo":
            values = own.values or scores["critic"]
            advantages, returns = self._token_advantages(outcomes, _joined(values), divergence)
            if own.values is not None:
                metrics |= {"actor/explained_variance": Metric(explained_variance(_joined(values), returns))}
        else:
            advantages, returns = self._group_advantages(outcomes, divergence), None
        if self._algorithm.advantages_normalized:
            advantages = whiten(advantages, moments_of(advantages))
        kl_coef = self._kl_coef
        self._adapt(divergence, len(outcomes.rewards))
        marks = _marks(outcomes.lengths, advantages, returns, scores.get("reference", own.reference), own)
        return Appraisal(groups=groups, marks=marks, kl_coef=kl_coef, metrics=metrics)

    def _rewarded(self, sample: Sample, number: int, scores: Mapping[str, Scored]) -> Sample:
        """With what reward components say beside what the environment said."""
        if not self._rewards:
            return sample
        said = {name: float(scores[name][number][0]) for name in self._rewards}
        weighed = sum(self._config.reward_of(name).weight * score for name, score in said.items())
        return dataclasses.replace(sample, reward=sample.reward + weighed, rewards={**sample.rewards, **said})

    def _shaped(self, rewards: Tensor) -> Tensor:
        """[S] as they are learned from."""
        if self._algorithm.normalize_rewards:
            rewards, self._seen = normalize_scores(rewards, self._seen)
        return clip_scores(rewards, self._algorithm.reward_clip)

    def _divergence(
        self, groups: Groups, reference: Scored | None, old: Scored | None
    ) -> tuple[Tensor | None, dict[str, Metric]]:
        """[M] from the reference, of the policy that sampled: as the trainer has it, else as the engine had it."""
        if reference is None:
            return None, {}
        sampled = [s.logprobs[s.mask] for group in groups for s in group] if old is None else old
        divergence = DIVERGENCES[self._algorithm.kl_estimator](_joined(sampled), _joined(reference))
        tokens, samples = len(divergence), len(sampled)
        metrics = {
            "actor/kl_reference": Metric(float(divergence.sum()) / max(1, samples), weight=samples),  # by sample
            "actor/kl_reference_token": Metric(float(divergence.sum()) / max(1, tokens), weight=tokens),
            "actor/kl_coef": Metric(self._kl_coef),
        }
        return divergence, metrics

    def _token_advantages(self, outcomes: Outcomes, values: Tensor, divergence: Tensor | None) -> tuple[Tensor, Tensor]:
        """[M] advantages and returns, by the values of each token's state."""
        algorithm = self._algorithm
        rewards = token_rewards(outcomes.rewards, outcomes.lengths, self._penalty(divergence), self._kl_coef)
        return token_gae(
            rewards=rewards.float(),
            values=values,
            lengths=outcomes.lengths,
            gamma=algorithm.gamma,
            gae_lambda=algorithm.gae_lambda,
        )

    def _group_advantages(self, outcomes: Outcomes, divergence: Tensor | None) -> Tensor:
        """[M] each sample's at all of its tokens, its divergence counted as part of its reward."""
        penalty = self._penalty(divergence)
        if penalty is not None:
            sample = torch.repeat_interleave(outcomes.lengths)
            lost = outcomes.rewards.new_zeros(len(outcomes.rewards)).index_add(0, sample, penalty.double())
            outcomes = outcomes._replace(rewards=outcomes.rewards - self._kl_coef * lost)
        return ESTIMATORS[self._algorithm.name](outcomes).float().repeat_interleave(outcomes.lengths)

    def _penalty(self, divergence: Tensor | None) -> Tensor | None:
        return divergence if self._algorithm.kl_in == "reward" else None

    def _adapt(self, divergence: Tensor | None, samples: int) -> None:
        target = self._algorithm.kl_target
        if divergence is not None and target is not None and samples:
            mean = float(divergence.sum()) / samples
            horizon = self._algorithm.kl_horizon
            self._kl_coef = next_kl_coef(
                self._kl_coef, divergence=mean, target=target, horizon=horizon, samples=samples
            )


def _numbered(groups: Groups) -> list[list[tuple[Sample, int]]]:
    """Each sample with its number in the order of all."""
    numbers = itertools.count()
    return [[(sample, next(numbers)) for sample in group] for group in groups]


def _joined(parts: Scored) -> Tensor:
    """[M]"""
    return torch.tensor(np.concatenate([np.zeros(0, np.float32), *parts]))


def _marks(
    lengths: Tensor, advantages: Tensor, returns: Tensor | None, reference: Scored | None, own: Inferred
) -> list[Marks]:
    def split(values: Tensor | None) -> Scored | None:
        return None if values is None else [part.numpy() for part in values.split(lengths.tolist())]

    fields = {
        "advantages": split(advantages),
        "returns": split(returns),
        "reference": reference,
        "old": own.old,
        "values": own.values,
    }
    return [
        Marks(**{name: values[i] for name, values in fields.items() if values is not None}) for i in range(len(lengths))
    ]


def _returns(sample: Sample, marks: Marks) -> Returns:
    assert marks.returns is not None, "only a critic asks"
    return Returns(group=sample.group, sample=sample.sample, returns=marks.returns)
