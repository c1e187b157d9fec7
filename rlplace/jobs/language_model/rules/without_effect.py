"""Warnings of settings that are set to other values than by default, and that this algorithm does not use."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule, at_key
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.config.blocks.training import AlgorithmConfig, OptimizerConfig
from rlplace.config.fields import default_of, fields_of
from rlplace.config.yaml_text import show
from rlplace.jobs.language_model.rules.case import PlacedTextJob


def _unused(config: LanguageModelJobConfig) -> Iterator[tuple[str, str]]:
    """Yield (key of `algorithm`, name of the error) for each key that this config does not use."""
    algorithm = config.algorithm
    # A variant of the user's may use what it likes
    own = algorithm.variant.name is not None
    if algorithm.name != "ppo" and not own:
        for key in ("gamma", "gae_lambda", "value_clip"):
            yield key, "no-values"
    if not config.critic.on_actor:
        yield "value_coef", "no-head"
    if algorithm.kl_coef == 0 and algorithm.kl_target is None:
        yield "kl_in", "no-kl"
        # A reference measures the KL by it, also without a penalty
        if "reference" not in config.placed:
            yield "kl_estimator", "no-kl"
    if algorithm.kl_target is None:
        yield "kl_horizon", "constant-kl"
    if not algorithm.only_with_signal:
        yield "refills", "no-dynamic-sampling"


def _without_effect(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding for each key of `algorithm` with another value than by default that has no effect."""
    fields = fields_of(AlgorithmConfig, "language_model")
    for name, error in _unused(case.config):
        usual = default_of(fields[name][0], "language_model")
        value = getattr(case.config.algorithm, name)
        if value != usual:
            yield at_key(
                f"algorithm.{name}", value, error, name=name, usual=show(usual)
            )


def _rate_that_never_falls(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding for each trained component with a last learning rate, and a rate that stays as it is."""
    config = case.config
    usual = OptimizerConfig().min_lr_ratio
    blocks = {"actor": config.actor, "critic": config.critic}
    for component, block in blocks.items():
        optimizer = block.optimizer
        is_set = optimizer.min_lr_ratio != usual and optimizer.schedule == "constant"
        if component in config.placed and is_set:
            key = f"{component}.optimizer.min_lr_ratio"
            value = optimizer.min_lr_ratio
            yield at_key(key, value, "constant-rate", component=component)


RULES: tuple[Rule[PlacedTextJob], ...] = (
    Rule(code="unused-setting", facts=_without_effect),
    Rule(code="unused-setting", facts=_rate_that_never_falls),
)
