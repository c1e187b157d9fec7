"""Compute the advantages of an iteration's samples, token by token, from rewards, KL and values.

::

    env rewards + weight * scores ── normalised, clipped ──▶ reward of a sample ─┐
    log-probabilities, of the policy and of the reference ──▶ KL ────────────────┼─▶ rewards of tokens ──▶ advantages
    values, of a critic or of a head on the actor's trunk ───────────────────────┘                         and returns

Letters: S samples of the iteration, M response tokens of these.
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
from rlplace.config.schema import AlgorithmConfig
from rlplace.errors import RewardError
from rlplace.metrics import Metric, Metrics
from rlplace.tokens import Sample, Scores
from rlplace.workers.arguments import WorkerArguments
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
    """An iteration's samples, with all rewards counted, and the targets of their response tokens."""

    groups: Groups
    # Left out of the groups, and which number is not finite
    poisoned: Sequence[tuple[Sample, str]] = ()
    targets: Mapping[Target, BySample]
    kl_coef: float
    metrics: Metrics

    def learned(self, algorithm: AlgorithmConfig) -> Experience:
        """Leave out what the algorithm does not learn from: groups without signal, answers that were cut."""
        cut = algorithm.truncated == "mask"
        equal = algorithm.only_with_signal
        if not cut and not equal:
            return self
        signal = [
            not equal or carries_signal([sample.reward for sample in group])
            for group in self.groups
        ]
        kept = [
            keep and not (cut and sample.truncated)
            for group, keep in zip(self.groups, signal, strict=True)
            for sample in group
        ]
        each = iter(kept)
        groups = [[sample for sample in group if next(each)] for group in self.groups]
        return dataclasses.replace(
            self,
            groups=[group for group in groups if group],
            targets={
                name: list(itertools.compress(values, kept))
                for name, values in self.targets.items()
            },
        )

    def returns(self) -> list[tuple[Scores, ...]]:
        """Return them for the critic, by group; nan of what is poisoned, for which it waits too."""
        samples = [sample for group in self.groups for sample in group]
        found = [*zip(samples, self.targets["returns"], strict=True)]
        found += [
            (sample, np.full(sample.response_tokens, np.nan, np.float32))
            for sample, _ in self.poisoned
        ]
        by_group: dict[int, list[Scores]] = {}
        for sample, values in found:
            by_group.setdefault(sample.group, []).append(
                Scores(group=sample.group, sample=sample.sample, values=values)
            )
        return [tuple(scores) for scores in by_group.values()]


class AdvantageEstimator:
    """Used by rank 0 of the actor. Owns what is carried over iterations: the KL weight, the moments of scores."""

    def __init__(self, job: WorkerArguments) -> None:
        self._config = job.config
        self._rewards = job.rewards
        self._algorithm = job.config.algorithm
        self._kl_coef = self._algorithm.kl_coef
        self._seen = no_moments()
        variant = variant_of(self._algorithm)
        self._variant = variant if variant and variant.has("advantages") else None

    def __call__(
        self,
        groups: Groups,
        scores: Mapping[str, BySample],
        inferred: Mapping[Target, BySample],
    ) -> Experience:
        """`scores`: by component, of all that score samples. `inferred`: by the actor's own weights.

        Where poison is skipped, samples with numbers that are not finite are left out, as if never drawn.
        """
        algorithm = self._algorithm
        numbers = itertools.count()
        poisoned = list[tuple[Sample, str]]()
        groups = [
            [self._rewarded(sample, next(numbers), scores) for sample in group]
            for group in groups
        ]
        if self._config.leaves_out:
            groups, poisoned, scores, inferred = without_poison(
                groups, scores, inferred
            )
        targets = dict(inferred)
        outcomes = Outcomes.of(groups)
        if "reference" in scores:
            targets["reference"] = scores["reference"]
        kl, metrics = self._kl(groups, targets)
        outcomes = outcomes._replace(rewards=self._shaped(outcomes.rewards))
        penalty = kl if algorithm.kl_in == "reward" else None

        def by_sample(values: Tensor) -> BySample:
            return [part.numpy() for part in values.split(outcomes.lengths.tolist())]

        if algorithm.name == "ppo":
            values = _tensor(inferred.get("values") or scores["critic"])
            rewards = token_rewards(
                outcomes.rewards, outcomes.lengths, penalty, self._kl_coef
            ).float()
            if self._variant is not None:
                advantages, returns = self._variant.advantages_and_returns(
                    TokenSteps(rewards, values, outcomes.lengths)
                )
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
                metrics |= {
                    "actor/explained_variance": Metric(
                        explained_variance(values, returns)
                    )
                }
        else:
            advantages = self._group_advantages(outcomes, penalty)
        if algorithm.advantages_normalized:
            advantages = normalized(advantages, moments_of(advantages))
        targets["advantages"] = by_sample(advantages)
        experience = Experience(
            groups=groups,
            poisoned=poisoned,
            targets=targets,
            kl_coef=self._kl_coef,
            metrics=metrics,
        )
        samples = len(outcomes.rewards)
        if kl is not None and algorithm.kl_target is not None and samples:
            each = float(kl.sum()) / samples
            self._kl_coef = next_kl_coef(
                self._kl_coef, each, samples, algorithm.kl_target, algorithm.kl_horizon
            )
        return experience

    def state(self) -> Tensor:
        """Return [4] float64, what it carries over iterations."""
        coef = torch.tensor(self._kl_coef, dtype=torch.float64)
        seen = self._seen
        return torch.stack([coef, seen.count, seen.mean, seen.var])

    def take_over(self, state: Tensor) -> None:
        """Carry what another's `state` had."""
        coef, count, mean, var = state.unbind()
        self._kl_coef = float(coef)
        self._seen = Moments(count=count, mean=mean, var=var)

    def _rewarded(
        self, sample: Sample, number: int, scores: Mapping[str, BySample]
    ) -> Sample:
        """Add the scores of reward components to the environment's reward."""
        if not self._rewards:
            return sample
        scored = {name: float(scores[name][number][0]) for name in self._rewards}
        weighed = sum(
            self._config.reward_of(name).weight * score
            for name, score in scored.items()
        )
        return dataclasses.replace(
            sample, reward=sample.reward + weighed, rewards={**sample.rewards, **scored}
        )

    def _shaped(self, rewards: Tensor) -> Tensor:
        """Return [S] rewards, normalised by all ever seen (these included) and clipped where the algorithm asks for it.

        Ziegler et al. 2019 (arXiv:1909.08593) normalise once, by samples of the first policy.
        """
        if self._algorithm.normalize_rewards:
            self._seen = merge(self._seen, shifted_sums(rewards, self._seen.mean))
            rewards = normalized(rewards, self._seen)
        limit = self._algorithm.reward_clip
        if limit is None:
            return rewards
        return rewards.clamp(-limit, limit)

    def _kl(
        self, groups: Groups, known: Mapping[Target, BySample]
    ) -> tuple[Tensor | None, dict[str, Metric]]:
        """Return [M] from the reference, by the trainer's log-probabilities if it inferred, else by the engine's."""
        if "reference" not in known:
            return None, {}
        sampled = known.get("old") or [
            s.logprobs[s.mask] for group in groups for s in group
        ]
        kl = KL_ESTIMATORS[self._algorithm.kl_estimator](
            _tensor(known["reference"]) - _tensor(sampled)
        )
        tokens = len(kl)
        samples = len(sampled)
        return kl, {
            "actor/kl_reference": Metric(
                float(kl.sum()) / max(1, samples), weight=samples
            ),  # by sample
            "actor/kl_reference_token": Metric(
                float(kl.sum()) / max(1, tokens), weight=tokens
            ),
            "actor/kl_coef": Metric(self._kl_coef),
        }

    def _group_advantages(self, outcomes: Outcomes, penalty: Tensor | None) -> Tensor:
        """Return [M] each sample's at all of its tokens, its KL counted as part of its reward."""
        if penalty is not None:
            sample = torch.repeat_interleave(outcomes.lengths)
            lost = outcomes.rewards.new_zeros(len(outcomes.rewards)).index_add(
                0, sample, penalty.double()
            )
            outcomes = outcomes._replace(
                rewards=outcomes.rewards - self._kl_coef * lost
            )
        estimate = (
            ESTIMATORS[self._algorithm.name]
            if self._variant is None
            else self._variant.advantages
        )
        return estimate(outcomes).float().repeat_interleave(outcomes.lengths)


def without_poison(
    groups: Groups, scores: Mapping[str, BySample], inferred: Mapping[Target, BySample]
) -> tuple[
    Groups, list[tuple[Sample, str]], Mapping[str, BySample], Mapping[Target, BySample]
]:
    """Return groups of the samples whose numbers are finite, the others with what is not, what is known of the former.

    Raises RewardError where none is left.
    """
    samples = [sample for group in groups for sample in group]
    known = dict[str, BySample]([*scores.items(), *inferred.items()])
    wrong = [
        _not_finite(sample, {name: parts[i] for name, parts in known.items()})
        for i, sample in enumerate(samples)
    ]
    sound = [not found for found in wrong]
    if not any(sound):
        raise RewardError.about(
            "all-poisoned",
            "actor rank 0",
            f"none of the {len(samples)} samples that are to be learned has finite numbers",
            got=f"rewards {[sample.reward for sample in samples[:8]]}",
            why="faults.on_poison and on_error leave them out, and to go on would be to learn nothing, for ever",
            fix="look at what the log says of each sample that was skipped",
        )
    kept = iter(sound)
    left = [[sample for sample in group if next(kept)] for group in groups]

    def of_kept(parts: BySample) -> BySample:
        return [*itertools.compress(parts, sound)]

    return (
        [group for group in left if group],
        [
            (sample, found)
            for sample, found in zip(samples, wrong, strict=True)
            if found
        ],
        {name: of_kept(parts) for name, parts in scores.items()},
        {name: of_kept(parts) for name, parts in inferred.items()},
    )


def _not_finite(sample: Sample, known: Mapping[str, TokenArray]) -> str:
    """Say which numbers of a sample are not finite, `known` ones by who gave them; nothing where all are."""
    rewards = [
        f"{name} {value}"
        for name, value in sample.rewards.items()
        if not math.isfinite(value)
    ]
    engine = (
        []
        if np.isfinite(sample.logprobs).all()
        else ["log-probabilities of the engine"]
    )
    others = (
        name
        for name, values in known.items()
        if name not in sample.rewards and not np.isfinite(values).all()
    )
    found = [*(f"reward {one}" for one in rewards), *engine, *others]
    return ", ".join(found) or ("reward nan" if sample.poisoned else "")


def _tensor(parts: BySample) -> Tensor:
    return torch.tensor(joined(parts))
