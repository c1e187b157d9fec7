"""Rules of the models that a job on language models trains: the actor and the critic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule, at_key, broken
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.config.blocks.training import TrainedConfig
from rlplace.errors import Problem
from rlplace.jobs.language_model.rules.case import PlacedTextJob
from rlplace.models.folders import existing_folder
from rlplace.models.heads import value_head_problem

# Share of the first weights in the average of the weights, above which the average is hardly trained
_FIRST_WEIGHTS = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A component that trains a model, with its config block."""

    component: str
    block: TrainedConfig


def problems(config: LanguageModelJobConfig) -> Iterator[Problem]:
    """Yield the problems of the actor's settings, and the problems of the critic if one is placed."""
    yield from broken(RULES, TrainedModel(component="actor", block=config.actor))
    if "critic" in config.placed:
        yield from critic_problems(config)


def critic_problems(config: LanguageModelJobConfig) -> Iterator[Problem]:
    """Yield the problems of a placed critic: of its settings, its vocabulary, and its value head.

    `config`: a config in which the model blocks hold the content of each model's config.json.
    """
    yield from broken(RULES, TrainedModel(component="critic", block=config.critic))
    yield from broken(CRITIC, config)
    folder = existing_folder(config.critic.model)
    if folder is None:
        return
    head = value_head_problem(folder, "critic.model.path")
    if head is not None:
        yield head


def _rounded_away(case: TrainedModel) -> Iterator[Found]:
    """Yield a finding if trained bf16 weights have no float32 copies: rounding would lose small optimizer steps.

    Frozen weights, beside which LoRA factors are trained, do not count.
    """
    optimizer = case.block.optimizer
    kept = optimizer.kind == "adamw_master" or optimizer.on_host
    if case.block.trained_dtype != "bf16" or kept:
        return
    remedy = "weights: fp32"
    if optimizer.kind == "adamw":
        remedy = "optimizer.kind: adamw_master"
    yield Found(
        key=f"{case.component}.weights",
        got=f"weights: {case.block.weights}, optimizer.kind: {optimizer.kind}",
        facts={"component": case.component, "remedy": remedy},
    )


def _nothing_to_offload(case: TrainedModel) -> Iterator[Found]:
    """Yield findings about `activation_offload` without `checkpointing`: there are no activations to offload."""
    if case.block.activation_offload and not case.block.checkpointing:
        yield Found(
            key=f"{case.component}.activation_offload",
            got="activation_offload: true, checkpointing: false",
            error="activations",
            facts={"component": case.component},
        )


def _float16(case: TrainedModel) -> Iterator[Found]:
    """Yield findings about the dtype float16, which would need loss scaling."""
    dtypes = {"weights": case.block.weights, "compute": case.block.compute}
    for field, dtype in dtypes.items():
        if dtype not in ("fp32", "bf16"):
            yield Found(
                key=f"{case.component}.{field}",
                got=f"{field}: {dtype}",
                error="float16",
                facts={"field": field},
            )


def _other_zero_stage(case: TrainedModel) -> Iterator[Found]:
    """Yield a finding if the ZeRO stage is not 2 or 3."""
    stage = case.block.zero_stage
    if stage not in (2, 3):
        yield Found(
            key=f"{case.component}.zero_stage",
            got=f"zero_stage: {stage}",
            error="zero_stage",
        )


def _fewer_tokens(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if the critic's vocabulary is smaller than the actor's."""
    actor = (config.model or {}).get("vocab_size")
    critic = (config.critic.model or {}).get("vocab_size")
    if isinstance(actor, int) and isinstance(critic, int) and critic < actor:
        got = f"vocab_size: {critic}, and the actor's is {actor}"
        yield Found(key="critic.model", got=got)


def _no_factors(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if the sync sends LoRA factors only, but the actor has no LoRA factors."""
    actor = config.actor
    if actor.sync.factors_apart and actor.lora_rank is None:
        yield Found(key="actor.sync.mode", got=f"mode: {actor.sync.mode}")


def _unused_alpha(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding for each trained component with a LoRA alpha of its own, but without LoRA factors."""
    blocks = {"actor": case.config.actor, "critic": case.config.critic}
    for component, block in blocks.items():
        usual = type(block)().lora_alpha
        placed = component in case.config.placed
        if placed and block.lora_rank is None and block.lora_alpha != usual:
            yield Found(
                key=f"{component}.lora_alpha",
                got=f"lora_alpha: {block.lora_alpha:g}",
                facts={"component": component},
            )


def _optimizer_steps(config: LanguageModelJobConfig) -> int | None:
    """Return about how many optimizer steps a trained model makes in the run; None if the config has no prompts."""
    algorithm = config.algorithm
    if algorithm.prompts is None:
        return None
    samples = algorithm.prompts * algorithm.samples_per_prompt
    batches = max(1, round(samples / (algorithm.train_batch or samples)))
    return config.runner.total_iterations * algorithm.epochs * batches


def _too_late(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding for each setting that comes into effect after the end of the run, or hardly before it."""
    config = case.config
    steps = _optimizer_steps(config)
    if not config.runs or steps is None:
        return
    iterations = config.runner.total_iterations
    warmup = config.critic.warmup_iterations
    if "critic" in config.placed and warmup >= iterations:
        key = "critic.warmup_iterations"
        yield at_key(key, warmup, "critic-warmup", iterations=iterations, above=warmup)
    every = config.reference.refresh_every
    if "reference" in config.placed and every > iterations:
        yield at_key("reference.refresh_every", every, "refresh", iterations=iterations)
    blocks = {"actor": config.actor, "critic": config.critic}
    for component, block in blocks.items():
        rising = block.optimizer.warmup_steps
        if component in config.placed and rising >= steps:
            key = f"{component}.optimizer.warmup_steps"
            share = f"{steps / rising:.0%}"
            yield at_key(key, rising, "rate-warmup", steps=steps, share=share)
    decay = config.actor.ema_decay
    if decay is not None and decay**steps > _FIRST_WEIGHTS:
        share = f"{decay**steps:.0%}"
        fitting = f"{1 - 5 / max(steps, 10):.3g}"
        key = "actor.ema_decay"
        yield at_key(key, decay, "average", steps=steps, share=share, fitting=fitting)


RULES: tuple[Rule[TrainedModel], ...] = (
    Rule(code="rounded-away", facts=_rounded_away),
    Rule(code="nothing-to-offload", facts=_nothing_to_offload),
    Rule(code="plan-only", facts=_float16),
    Rule(code="plan-only", facts=_other_zero_stage),
)
CRITIC: tuple[Rule[LanguageModelJobConfig], ...] = (
    Rule(code="critic-vocabulary", facts=_fewer_tokens),
)
SYNC: tuple[Rule[LanguageModelJobConfig], ...] = (
    Rule(code="no-factors", facts=_no_factors),
)
WARNINGS: tuple[Rule[PlacedTextJob], ...] = (
    Rule(code="unused-lora-alpha", facts=_unused_alpha),
    Rule(code="too-late-in-run", facts=_too_late),
)
