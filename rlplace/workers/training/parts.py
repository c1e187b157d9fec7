"""An iteration of an actor in parts: where generating goes on meanwhile, a step is made of the first groups there are.

::

    samples:  ▪▪▪ ▪▪▪ ▪▪▪ ▪▪▪ ...        in the order in which they are whole
    learn:       [ step ][ step ]        of `train_batch` samples at most, rounded down to whole groups

A part is learned like an iteration of its own: its advantages are made of its own groups, and the old log-probabilities
of the ratio are those of the weights when it begins (the proximal policy of decoupled PPO, arXiv:2110.00641). `tis_cap`
corrects, by the engine's own log-probabilities, how far these are from what sampled it: up to `max_staleness` versions,
several ones for a partial rollout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlplace.config import Config
from rlplace.metrics import Metric, Metrics
from rlplace.placement.language.spec import role_of
from rlplace.workers.arguments import SCORERS

if TYPE_CHECKING:
    from rlplace.workers.training.samples import Groups
    from rlplace.workers.training.trainer import Update


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The update by one of them."""

    groups: Groups  # all that were taken, on rank 0; elsewhere none
    update: Update
    wait_s: float  # for samples
    learn_s: float


def metrics_of(parts: Sequence[Part], version: int) -> Metrics:
    """Describe a whole iteration, learned by the policy of `version`; all ranks agree on the numbers of the update."""
    from rlplace.algo.sample_metrics import sample_metrics

    learn_s, steps = sum(part.learn_s for part in parts), sum(part.update.steps for part in parts)
    stepped = [part.update for part in parts if part.update.mean is not None]
    metrics = {
        "actor/learn_s": Metric(learn_s, "max"),
        "actor/wait_s": Metric(sum(part.wait_s for part in parts), "max"),
        "actor/tokens_per_s": Metric(sum(part.update.tokens for part in parts) / learn_s, "min"),
        "actor/lr": Metric(stepped[-1].lr if stepped else 0.0),
        "actor/optimizer_steps": Metric(steps),
        "actor/rank_imbalance": Metric(max(part.update.imbalance for part in parts)),
    }
    for update in stepped:
        for name, value in (update.mean or {}).items():
            before = metrics.get(f"actor/{name}", Metric(0.0))
            metrics[f"actor/{name}"] = Metric(before.value + value * (update.steps / steps))
    sampled = sample_metrics([group for part in parts for group in part.groups], version)
    return {**sampled, **metrics, **parts[0].update.metrics}
