"""Rules of vision-language models: settings with which such a model can be planned but not run."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule
from rlplace.config.blocks.language_model import FrozenConfig, RewardConfig
from rlplace.jobs.language_model.rules.case import PlannedJob
from rlplace.models.families import VISION_FAMILIES


def _family(case: PlannedJob) -> object:
    return case.model.get("model_type")


def _sees(case: PlannedJob) -> bool:
    return _family(case) in VISION_FAMILIES


def _engine_without_images(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding if the rollout engine is not transformers.

    For answers about images, only this engine was compared with the actor.
    """
    engine = case.config.rollout.engine
    if engine == "transformers":
        return
    error = "images-of-engine"
    if engine == "vllm":
        error = "images-of-vllm"
    yield Found(
        key="rollout.engine",
        got=f"model_type: {_family(case)}",
        error=error,
        facts={"engine": engine},
    )


def _sync_of_changes(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding if the weight sync sends only the weights that have changed (mode "delta")."""
    if case.config.actor.sync.mode == "delta":
        yield Found(key="actor.sync.mode", got="mode: delta", error="delta-of-images")


def _critic_of_images(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding if the job has a critic, either as a component or as a value head on the actor."""
    key = "critic"
    if case.config.critic.on_actor:
        key = "critic.on_actor"
    elif "critic" not in case.plan.placement.components:
        return
    yield Found(key=key, got=f"model_type: {_family(case)}", error="critic-of-images")


def _divided(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding for each component with a model that several ranks share by tensor or context parallelism."""
    for spec in case.specs:
        if spec.parallel.ranks > 1:
            yield Found(key=spec.key, got=spec.text, error="divided-images")


def _scorer_of_another_family(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding for a reference if its model is of a different family than the actor's model."""
    for component in case.plan.placement.components:
        block = case.config.block_of(component)
        if not isinstance(block, FrozenConfig) or isinstance(block, RewardConfig):
            continue
        if block.model is None or block.model.get("model_type") == _family(case):
            continue
        yield Found(
            key=f"{component}.model",
            got=f"model_type: {_family(case)}",
            error="another-family",
            facts={
                "component": component,
                "other": block.model.get("model_type"),
                "family": _family(case),
            },
        )


def _reward_model(case: PlannedJob) -> Iterator[Found]:
    """Yield findings about reward models, which cannot see the images of the prompts."""
    for component in case.plan.placement.components:
        block = case.config.block_of(component)
        if isinstance(block, RewardConfig) and block.kind == "model":
            yield Found(
                key=case.config.key_of(component),
                got=f"model_type: {_family(case)}",
                error="reward-of-images",
            )


RULES: tuple[Rule[PlannedJob], ...] = (
    Rule(code="plan-only", applies=_sees, facts=_engine_without_images),
    Rule(code="plan-only", applies=_sees, facts=_sync_of_changes),
    Rule(code="plan-only", applies=_sees, facts=_critic_of_images),
    Rule(code="plan-only", applies=_sees, facts=_divided),
    Rule(code="plan-only", applies=_sees, facts=_scorer_of_another_family),
    Rule(code="plan-only", applies=_sees, facts=_reward_model),
)
