"""Rules of model families that cannot be trained, and of weight formats that workers cannot read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlplace.checks.rule import Found, Rule
from rlplace.config.blocks.language_model import FrozenConfig
from rlplace.config.blocks.training import TrainedConfig
from rlplace.jobs.language_model.rules.case import PlannedJob
from rlplace.models.families import why_not_trained


def _models(case: PlannedJob) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield, for each component with a model of its own, the config key of the model and the model's config.json."""
    for component in case.plan.placement.components:
        block = case.config.block_of(component)
        if not isinstance(block, (TrainedConfig, FrozenConfig)):
            continue
        if isinstance(block.model, Mapping):
            yield f"{case.config.key_of(component)}.model", block.model


def _family_without_a_run(case: PlannedJob) -> Iterator[Found]:
    """Yield findings about models of families that can be planned but not trained."""
    for key, model in _models(case):
        reason = why_not_trained(model, case.config.algorithm.longest)
        if reason is None:
            continue
        family = str(model.get("model_type"))
        yield Found(
            key=key,
            got=f"model_type: {family}",
            error="family",
            facts={"family": family, "reason": reason},
        )


def _quantised(case: PlannedJob) -> Iterator[Found]:
    """Yield findings about models with quantised weights, which no worker can read."""
    for key, model in _models(case):
        quantised = model.get("quantization_config")
        if isinstance(quantised, Mapping):
            method = quantised.get("quant_method")
            yield Found(
                key=key, got=str(method), error="quantised", facts={"method": method}
            )


RULES: tuple[Rule[PlannedJob], ...] = (
    Rule(code="plan-only", facts=_family_without_a_run),
    Rule(code="plan-only", facts=_quantised),
)
