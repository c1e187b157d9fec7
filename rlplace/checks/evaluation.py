"""Rules of evaluations during training, which hold for every job that comes with rlplace."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule, at_key
from rlplace.config.schema import Config


def _goal_without_evaluation(config: Config) -> Iterator[Found]:
    """Yield a finding for each key that ends a run by its evaluations, in a run that has none."""
    runner = config.runner
    if runner.eval_every:
        return
    if runner.stop_at_eval is not None:
        yield at_key("runner.stop_at_eval", runner.stop_at_eval, "no-evaluation")
    if runner.eval_patience:
        yield at_key("runner.eval_patience", runner.eval_patience, "no-evaluation")


RULES: tuple[Rule[Config], ...] = (
    Rule(code="evaluation-of-no-use", facts=_goal_without_evaluation),
)
