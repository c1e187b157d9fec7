"""Rules of the engines that generate answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from rlplace.checks.rule import Found, Rule
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.config.blocks.training import AlgorithmConfig
from rlplace.config.model_folder import text_keys
from rlplace.jobs.language_model.rules.case import PlannedJob
from rlplace.jobs.language_model.rules.experts import has_experts
from rlplace.jobs.language_model.rules.positions import beyond_positions
from rlplace.models.families import VISION_FAMILIES
from rlplace.placement.memory.demands import vllm_lora_rank


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model, the engine that generates with it, and the algorithm with its limits of prompt and answer lengths.

    `model`: the content of the model's config.json. `engine`: the engine's name.
    """

    model: Mapping[str, object]
    engine: str
    algorithm: AlgorithmConfig
    accelerators_per_engine: int

    @classmethod
    def of(cls, case: PlannedJob) -> ServedModel:
        """Return the actor's model and its engine. The engine has the accelerators of the largest rollout rank."""
        segments = case.plan.placement.spec("rollout").segments
        sizes = [segment.accelerators_per_rank for segment in segments]
        return cls(
            model=text_keys(case.model),
            engine=case.config.rollout.engine,
            algorithm=case.config.algorithm,
            accelerators_per_engine=max(sizes, default=1),
        )


def _factors_not_merged(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding if the engine cannot apply LoRA factors beside its weights (sync mode "adapter")."""
    config = case.config
    rank = config.actor.lora_rank
    if config.actor.sync.mode != "adapter" or rank is None:
        return
    engine = config.rollout.engine
    family = case.model.get("model_type")
    error = None
    if engine not in ("transformers", "vllm"):
        error = "adapter-engine"
    elif engine == "vllm" and vllm_lora_rank(rank) is None:
        error = "adapter-rank"
    elif family in VISION_FAMILIES:
        error = "adapter-family"
    elif engine == "vllm" and has_experts(case.model):
        error = "adapter-family-vllm"
    if error is not None:
        yield Found(
            key="actor.sync.mode",
            got="mode: adapter",
            error=error,
            facts={"engine": engine, "rank": rank, "family": family},
        )


PLANNED: tuple[Rule[PlannedJob], ...] = (
    Rule(code="plan-only", facts=_factors_not_merged),
)

# ── rules of the model ───────────────────────────────────────────────────────────────────────────────────────────────


def _window_below_context(case: ServedModel) -> Iterator[Found]:
    """Yield a finding if the model's sliding attention window is shorter than the longest prompt plus answer."""
    window = None
    if case.model.get("use_sliding_window", True):
        window = case.model.get("sliding_window")
    context = case.algorithm.longest
    if isinstance(window, int) and window < context:
        yield Found(
            key="rollout.engine",
            got=case.engine,
            facts={"window": window, "context": context},
        )


def _uneven_heads(case: ServedModel) -> Iterator[Found]:
    """Yield a finding if the attention heads cannot be divided evenly over the accelerators of an engine."""
    heads = case.model.get("num_attention_heads")
    size = case.accelerators_per_engine
    if not isinstance(heads, int) or heads % size == 0:
        return
    fitting = max(n for n in range(1, size + 1) if heads % n == 0)
    yield Found(
        key="cluster.component_placement.rollout",
        got=f"{size} accelerators for each rank",
        error="engine",
        facts={
            "heads": heads,
            "size": size,
            "fitting": fitting,
            "last": fitting - 1,
        },
    )


def _beyond_positions(case: ServedModel) -> Iterator[Found]:
    yield from beyond_positions("rollout", case.model, case.algorithm)


def _keeps_every_token(case: ServedModel) -> bool:
    return case.engine == "transformers"


OF_MODEL: tuple[Rule[ServedModel], ...] = (
    Rule(
        code="attention-not-full",
        applies=_keeps_every_token,
        facts=_window_below_context,
    ),
    Rule(code="tensor-parallel-heads", facts=_uneven_heads),
    Rule(code="context-too-long", facts=_beyond_positions),
)

# ── rules of the config ──────────────────────────────────────────────────────────────────────────────────────────────


def _other_cache_dtype(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if the dtype of the KV cache differs from `rollout.dtype`. For vLLM, fp8 is allowed as well."""
    rollout = config.rollout
    fp8_of_vllm = rollout.cache == "fp8" and rollout.engine == "vllm"
    if rollout.cache == rollout.dtype or fp8_of_vllm:
        return
    error = "computed"
    if rollout.cache == "fp8":
        error = "fp8"
    yield Found(
        key="rollout.cache_dtype",
        got=f"cache_dtype: {rollout.cache}",
        error=error,
        facts={
            "engine": rollout.engine,
            "cache": rollout.cache,
            "dtype": rollout.dtype,
        },
    )


def _workspace_of_ours(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if `rollout.workspace_memory` is set for an engine of rlplace. The plan knows its workspace."""
    rollout = config.rollout
    if rollout.workspace_memory is not None:
        yield Found(
            key="rollout.workspace_memory",
            got=f"workspace_memory: {rollout.workspace_memory}",
            error="workspace_memory",
            facts={"engine": rollout.engine},
        )


def _arguments_of_another(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if `rollout.engine_args` is set for the engine "transformers", which takes no arguments."""
    rollout = config.rollout
    if rollout.engine_args and rollout.engine == "transformers":
        yield Found(
            key="rollout.engine_args",
            got=", ".join(rollout.engine_args),
            error="transformers",
        )


def _is_ours(config: LanguageModelJobConfig) -> bool:
    return not config.rollout.own


RULES: tuple[Rule[LanguageModelJobConfig], ...] = (
    Rule(code="cache-dtype", applies=_is_ours, facts=_other_cache_dtype),
    Rule(code="wrong-kind", applies=_is_ours, facts=_workspace_of_ours),
    Rule(code="engine-args", facts=_arguments_of_another),
)
