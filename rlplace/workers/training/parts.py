"""An iteration of an actor in parts, and its metrics: a step is made of the first groups while generating goes on.

::

    samples:  ▪▪▪ ▪▪▪ ▪▪▪ ▪▪▪ ...        in the order in which they are whole
    learn:       [ step ][ step ]        of `train_batch` samples at most, rounded down to whole groups

A part is learned like an iteration of its own: its advantages are made of its own groups, and the old log-probabilities
of the ratio are those of the weights when it begins (the proximal policy of decoupled PPO, arXiv:2110.00641). `tis_cap`
corrects, by the engine's own log-probabilities, how far these are from what sampled it: up to `max_staleness` versions,
several ones for a partial rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlplace.config.schema import Config
from rlplace.metrics import Metric, Metrics
from rlplace.placement.language.spec import role_of
from rlplace.tokens import Sample
from rlplace.workers.arguments import SCORERS

if TYPE_CHECKING:
    from rlplace.workers.training.optimizer import Update


def parts_of(config: Config) -> tuple[int, ...]:
    """Return the groups of each part in order; a single part where something is asked of all samples first."""
    algorithm = config.algorithm
    assert algorithm.prompts is not None, "checked before a run"
    scored = any(role_of(c) in SCORERS for c in config.placed) or config.reference.share_actor or config.critic.on_actor
    if not algorithm.max_staleness or algorithm.train_batch is None or algorithm.epochs > 1 or scored:
        return (algorithm.prompts,)
    each = max(1, algorithm.train_batch // algorithm.samples_per_prompt)
    whole, rest = divmod(algorithm.prompts, each)
    return (each,) * whole + ((rest,) if rest else ())


def metrics_of(
    groups: Sequence[Sequence[Sample]], updates: Sequence[Update], version: int, *, learn_s: float
) -> Metrics:
    """Describe a whole iteration, learned by the policy of `version`; all ranks agree on the numbers of the updates.

    `groups`: all that were taken, on rank 0; elsewhere none.
    """
    steps, stepped = sum(update.steps for update in updates), [update for update in updates if update.mean is not None]
    metrics = {
        "actor/tokens_per_s": Metric(sum(update.tokens for update in updates) / learn_s, "min"),
        "actor/lr": Metric(stepped[-1].lr if stepped else 0.0),
        "actor/optimizer_steps": Metric(steps),
        "actor/rank_imbalance": Metric(max(update.imbalance for update in updates)),
    }
    for update in stepped:
        for name, value in (update.mean or {}).items():
            before = metrics.get(f"actor/{name}", Metric(0.0))
            metrics[f"actor/{name}"] = Metric(before.value + value * (update.steps / steps))
    return {**sample_metrics(groups, version), **metrics, **updates[0].metrics}


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
