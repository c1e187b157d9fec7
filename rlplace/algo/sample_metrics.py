"""Metrics of the samples that are trained on: rewards, lengths and ages, taken where they are learned from."""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.algo.group_advantages import carries_signal
from rlplace.metrics import Metric, Metrics
from rlplace.tokens import Sample


def sample_metrics(groups: Sequence[Sequence[Sample]], version: int) -> Metrics:
    """Describe groups that the policy of `version` is about to learn from, one rank's or all: both reduce alike."""
    samples = [sample for group in groups for sample in group]
    if not samples:
        return {}
    return _groups(groups) | _rewards(samples) | _lengths(samples) | _ages(samples, version)


def _groups(groups: Sequence[Sequence[Sample]]) -> dict[str, Metric]:
    return {
        "actor/groups": Metric(len(groups), "sum"),
        "actor/groups_with_signal": _mean([carries_signal([s.reward for s in group]) for group in groups]),
    }


def _rewards(samples: Sequence[Sample]) -> dict[str, Metric]:
    metrics = {
        "actor/reward": _mean([s.reward for s in samples]),
        "actor/reward_min": Metric(min(s.reward for s in samples), "min"),
        "actor/reward_max": Metric(max(s.reward for s in samples), "max"),
        "actor/samples": Metric(len(samples), "sum"),
    }
    names = {name for sample in samples for name in sample.rewards}
    for name in sorted(names):
        metrics[f"actor/reward/{name}"] = _mean([s.rewards[name] for s in samples if name in s.rewards])
    return metrics


def _lengths(samples: Sequence[Sample]) -> dict[str, Metric]:
    responses = [s.response_tokens for s in samples]
    return {
        "actor/tokens": Metric(sum(s.weight for s in samples), "sum"),
        "actor/tokens_learned": Metric(sum(responses), "sum"),
        "actor/length": _mean([s.weight for s in samples]),
        "actor/length_max": Metric(max(s.weight for s in samples), "max"),
        "actor/length_learned": _mean(responses),
        "actor/length_learned_max": Metric(max(responses), "max"),
        "actor/turns": _mean([s.turns for s in samples]),
        "actor/truncated_share": _mean([s.truncated for s in samples]),
    }


def _ages(samples: Sequence[Sample], version: int) -> dict[str, Metric]:
    """Count the versions between the policy that sampled a token and the one that learns from it; 0 is on-policy."""
    ages = [version - s.versions[s.mask] for s in samples]
    tokens = sum(len(age) for age in ages)
    return {
        "actor/age": Metric(sum(int(age.sum()) for age in ages) / max(1, tokens), weight=tokens),
        "actor/age_max": Metric(max((int(age.max()) for age in ages if len(age)), default=0), "max"),
        "actor/age_mixed": _mean([len(age) > 0 and int(age.min()) < int(age.max()) for age in ages]),
    }


def _mean(values: Sequence[float]) -> Metric:
    return Metric(sum(values) / len(values), weight=len(values))
