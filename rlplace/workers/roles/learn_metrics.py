"""What is reported of an iteration of a language model: its updates and the samples that it learned from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlplace.metrics import Metric, Metrics
from rlplace.tokens import Sample

if TYPE_CHECKING:  # the driver imports this module too: torch waits for setup
    from rlplace.workers.training.optimizer import Update


def update_metrics(component: str, updates: Sequence[Update], *, learn_s: float) -> Metrics:
    """Describe the updates of an iteration. All ranks agree on the numbers; tokens are of all ranks together."""
    steps, stepped = sum(update.steps for update in updates), [update for update in updates if update.mean is not None]
    metrics = {
        f"{component}/tokens_per_s": Metric(sum(update.tokens for update in updates) / learn_s, "min"),
        f"{component}/lr": Metric(stepped[-1].lr if stepped else 0.0),
        f"{component}/optimizer_steps": Metric(steps),
        f"{component}/rank_imbalance": Metric(max(update.imbalance for update in updates)),
        **skipped_metric(component, updates),
    }
    for update in stepped:
        for name, value in (update.mean or {}).items():
            before = metrics.get(f"{component}/{name}", Metric(0.0))
            metrics[f"{component}/{name}"] = Metric(before.value + value * (update.steps / steps))
    return {**metrics, **updates[0].metrics}  # the latter by the weights that the iteration began with


def skipped_metric(component: str, updates: Sequence[Update]) -> Metrics:
    """Count optimizer steps that were not finite, in an iteration that has some."""
    skipped = tuple(note for update in updates for note in update.skipped)
    return {f"{component}/skipped_steps": Metric(len(skipped), notes=skipped)} if skipped else {}


def sample_metrics(groups: Sequence[Sequence[Sample]], version: int) -> Metrics:
    """Describe groups that the policy of `version` is about to learn from, one rank's or all: both reduce alike."""
    from rlplace.algo.advantages import carries_signal

    samples = [sample for group in groups for sample in group]
    if not samples:
        return {}
    lengths, responses = [s.weight for s in samples], [s.response_tokens for s in samples]
    ages = [version - s.versions[s.mask] for s in samples]  # versions from sampling a token to this; 0 is on-policy
    rewards = [s.reward for s in samples]
    named = sorted({name for sample in samples for name in sample.rewards})
    return {
        "actor/groups": Metric(len(groups), "sum"),
        "actor/groups_with_signal": _mean([carries_signal([s.reward for s in group]) for group in groups]),
        "actor/reward": _mean(rewards),
        "actor/reward_min": Metric(min(rewards), "min"),
        "actor/reward_max": Metric(max(rewards), "max"),
        "actor/samples": Metric(len(samples), "sum"),
        **{f"actor/reward/{name}": _mean([s.rewards[name] for s in samples if name in s.rewards]) for name in named},
        "actor/tokens": Metric(sum(lengths), "sum"),
        "actor/tokens_learned": Metric(sum(responses), "sum"),
        "actor/length": _mean(lengths),
        "actor/length_max": Metric(max(lengths), "max"),
        "actor/length_learned": _mean(responses),
        "actor/length_learned_max": Metric(max(responses), "max"),
        "actor/turns": _mean([s.turns for s in samples]),
        "actor/truncated_share": _mean([s.truncated for s in samples]),
        "actor/age": Metric(sum(int(a.sum()) for a in ages) / max(1, sum(responses)), weight=sum(responses)),
        "actor/age_max": Metric(max((int(a.max()) for a in ages if len(a)), default=0), "max"),
        "actor/age_mixed": _mean([len(a) > 0 and int(a.min()) < int(a.max()) for a in ages]),
    }


def _mean(values: Sequence[float]) -> Metric:
    return Metric(sum(values) / len(values), weight=len(values))
