"""The config of a job that trains a language model: what it is planned from, and what it runs by.

`algorithm.name` decides that a config is read as one: `rlhf`, with a critic, a reference or a reward beside the actor,
is for planning; all others are run by an actor, generation engines and a text task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from rlplace.config import ClusterConfig, SyncConfig, knob
from rlplace.errors import ConfigError, Source
from rlplace.structure import Reader

PLANNED = "rlhf"  # what is planned only
RUN = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo")

_MODEL = "keys of its config.json; null: the same as the job's"

Mean = Literal["token", "sequence", "constant"]  # of algo.lm_losses.MEANS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdamConfig:
    """How the weights that are trained are updated."""

    lr: float = knob("learning rate after the warm-up", 1e-6, above=0)
    schedule: Literal["constant", "linear", "cosine"] = knob("the others fall to 0 at the end of the run", "constant")
    warmup_steps: int = knob("optimizer steps over which the rate rises from 0", 0, minimum=0)
    beta1: float = knob("Adam's first-moment decay", 0.9, minimum=0, below=1)
    beta2: float = knob("Adam's second-moment decay", 0.999, minimum=0, below=1)
    eps: float = knob("Adam's denominator floor", 1e-8, above=0)
    weight_decay: float = knob("decoupled weight decay", 0.0, minimum=0)
    max_grad_norm: float = knob("clip the global gradient norm here", 1.0, above=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedConfig:
    """A model that learns: the actor, a critic."""

    model: Mapping[str, object] | None = knob(_MODEL, None)
    micro_batch: int = knob("sequences of one forward and backward pass of a rank, in a plan", 1, minimum=1)
    token_budget: int = knob("tokens of one forward and backward pass of a rank, in a run", 8192, minimum=1)
    weights: Literal["fp32", "bf16", "fp16"] = knob("as weights are kept", "fp32")
    compute: Literal["fp32", "bf16", "fp16"] = knob("as they compute", "bf16")
    optimizer: Literal["adamw", "adamw_master", "adamw_8bit", "sgd"] = knob("which state each weight has", "adamw")
    adam: AdamConfig = dataclasses.field(default_factory=AdamConfig)
    zero_stage: Literal[0, 1, 2, 3] = knob("what ranks share: 1 optimizer, 2 + gradients, 3 + weights (FSDP)", 3)
    checkpointing: bool = knob("keep the input of each layer only, recompute the rest", True)
    lora_rank: int | None = knob("train low-rank factors of this rank; null: all weights", None, minimum=1)
    lora_alpha: float = knob("the factors count lora_alpha / lora_rank", 16.0, above=0)
    lora_targets: tuple[str, ...] = knob("names of the modules that get factors; none: all linear layers", ())
    optimizer_on_host: bool = knob("keep the optimizer in host memory and step there", False)
    enable_offload: bool = knob("leave the accelerators in stages that do not need it", False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlmActorConfig(TrainedConfig):
    sync: SyncConfig = dataclasses.field(default_factory=SyncConfig)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig:
    """A model that only answers: a reference, a reward."""

    model: Mapping[str, object] | None = knob(_MODEL, None)
    micro_batch: int = knob("sequences of one forward pass of a rank", 1, minimum=1)
    dtype: Literal["fp32", "bf16", "fp16"] = knob("as weights are kept and compute", "bf16")
    sharded: bool = knob("over its ranks; else each rank has all of it", True)
    enable_offload: bool = knob("leave the accelerators in stages that do not need it", False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Generation engines."""

    engine: Literal["vllm", "transformers"] = knob("what generates; transformers is slower and needs no vLLM", "vllm")
    temperature: float = knob("divides the logits before a token is drawn; 0: the likeliest token", 1.0, minimum=0)
    top_p: float = knob("draw from the likeliest tokens that together have this probability", 1.0, above=0, maximum=1)
    top_k: int = knob("draw from so many likeliest tokens; 0: from all", 0, minimum=0)
    seed: int | None = knob("answers follow from it alone, which takes longer; null: drawn freely", None, minimum=0)
    enforce_eager: bool = knob("no compiled kernels and graphs: starts faster, generates slower", False)
    gpu_memory_utilization: float | Literal["auto"] = knob(
        "share of each accelerator for everything; auto: what the others leave", 0.6, above=0, maximum=1
    )
    kv_cache_memory: int | None = knob(
        "bytes of the KV cache instead; null: what is left of the share", None, unit="bytes"
    )
    dtype: Literal["fp32", "bf16", "fp16"] = knob("as weights are kept and compute", "bf16")
    cache_dtype: Literal["bf16", "fp16", "fp8", "fp32"] = knob("of the KV cache", "bf16")
    step_tokens: int = knob("most tokens of one step", 8192, minimum=1)
    step_sequences: int = knob("most sequences of one step", 256, minimum=1)
    sleep_level: Literal[1, 2] = knob("1 copies weights to the host, 2 drops them: the next sync brings new ones", 2)
    enable_offload: bool = knob("sleep in stages that do not generate", False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorConfig:
    """Environments or agents beside the models."""

    accelerator_memory: int = knob("bytes a rank holds on each of its accelerators", 0, unit="bytes")
    host_memory: int = knob("bytes a rank holds on its host", 0, unit="bytes")
    enable_offload: bool = knob("leave the accelerators in stages that do not need it", False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """One function that says what an episode was worth."""

    name: str = knob("a shipped one, or package.module:function")
    weight: float = knob("how much it counts in the reward that is learned", 1.0)
    kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict, metadata={"doc": "passed to it"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextEnvConfig(SimulatorConfig):
    """What is asked, and what answers are worth."""

    task: str | None = knob("a shipped one, or package.module:Class; null: a plan of other environments", None)
    kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict, metadata={"doc": "passed to the task"})
    eval_kwargs: Mapping[str, object] = dataclasses.field(
        default_factory=dict, metadata={"doc": "of the held-out prompts, over those of kwargs"}
    )
    rewards: tuple[RewardConfig, ...] = knob("their weighed sum is learned; none: the task's own", ())
    system: str | None = knob("system message before every prompt; null: none", None)
    chat: bool = knob("prompts go through the model's chat template; false: as plain text", True)
    max_turns: int = knob("most answers of one episode", 1, minimum=1)
    long_prompts: Literal["refuse", "drop"] = knob("what becomes of prompts above max_prompt_length", "refuse")
    reward_timeout_s: float = knob("longest that one reward of one episode may take", 30.0, above=0)
    reward_processes: int = knob("processes of a rank for reward functions that are not shipped, or slow", 1, minimum=1)
    reward_memory: int = knob("bytes that each of these processes may take", 4 << 30, unit="bytes")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlmAlgorithmConfig:
    name: Literal["rlhf", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo"] = knob(
        "the learning algorithm; rlhf, with judging models, is planned only"
    )
    sequence_length: int | None = knob("longest prompt and answer, in tokens; null: both limits", None, minimum=1)
    max_prompt_length: int = knob("longest prompt, in tokens", 1024, minimum=1)
    max_new_tokens: int = knob("longest answer, in tokens", 1024, minimum=1)
    prompts: int | None = knob("prompts of an iteration; null, in a plan: batches are not checked", None, minimum=1)
    samples_per_prompt: int = knob("answers to each prompt", 1, minimum=1)
    train_batch: int | None = knob("samples of one optimizer step; null: all", None, minimum=1)
    epochs: int = knob("passes over each iteration's samples", 1, minimum=1)
    clip_ratio_low: float = knob("how far below 1 the policy ratio may go", 0.2, above=0, below=1)
    clip_ratio_high: float | None = knob("how far above 1; null: as the algorithm has it", None, above=0)
    ratio: Literal["token", "sequence"] = knob("whose ratio is clipped: each token's or (GSPO) the sequence's", "token")
    loss: Literal["token", "sequence", "constant"] | None = knob(
        "whose mean the loss is; null: as the algorithm has it", None
    )
    entropy_coef: float = knob("weight of the entropy bonus", 0.0, minimum=0)
    tis_cap: float | None = knob("cap of the weights that correct the engine's rounding; null: none", 2.0, above=0)
    dynamic_sampling: bool | None = knob("learn only from prompts with mixed rewards; null: by algorithm", None)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return self.sequence_length or self.max_prompt_length + self.max_new_tokens

    @property
    def clip_high(self) -> float:
        return self.clip_ratio_high or (0.28 if self.name == "dapo" else self.clip_ratio_low)

    @property
    def mean(self) -> Mean:
        return self.loss or _MEANS.get(self.name, "token")

    @property
    def mixed_only(self) -> bool:
        """Whether groups whose rewards are all equal are left out."""
        return self.name == "dapo" if self.dynamic_sampling is None else self.dynamic_sampling


# As the papers have it: algo/lm_losses.py cites them.
_MEANS: Mapping[str, Mean] = {"grpo": "sequence", "rloo": "sequence", "dr_grpo": "constant"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlmRunnerConfig:
    total_iterations: int = knob("end of training", 100, minimum=1)
    stop_at_reward: float | None = knob("stop earlier once the mean reward of an iteration reaches this", None)
    eval_every: int = knob(
        "iterations between passes over held-out prompts, before the first too; 0: none", 0, minimum=0
    )
    eval_prompts: int = knob("held-out prompts of one pass, each answered once, greedily", 64, minimum=1)
    seed: int = knob("seed of everything random but the engines", 0, minimum=0)
    output_dir: str = knob("the run's files go to a new folder in here", "runs")
    sinks: tuple[Literal["console", "jsonl", "tensorboard"], ...] = knob(
        "where metrics go", ("console", "jsonl", "tensorboard")
    )
    stage_timeout_s: float = knob("longest time one stage may take", 3600.0, above=0)
    channel_timeout_s: float = knob("longest wait for one item of a channel", 1800.0, above=0)
    watchdog_s: float = knob("say who waits for whom when nothing moves for so long; 0: never", 300.0, minimum=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlmConfig:
    """Everything such a job is made from. A block counts where `component_placement` places its component."""

    cluster: ClusterConfig
    algorithm: LlmAlgorithmConfig
    model: Mapping[str, object] | None = knob(
        "path: a Hugging Face folder, whose config.json counts; keys of it beside the path: to plan without it", None
    )
    actor: LlmActorConfig = dataclasses.field(default_factory=LlmActorConfig)
    critic: TrainedConfig = dataclasses.field(default_factory=TrainedConfig)
    reference: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)
    reward: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)
    rollout: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    env: TextEnvConfig = dataclasses.field(default_factory=TextEnvConfig)
    agent: SimulatorConfig = dataclasses.field(default_factory=SimulatorConfig)
    runner: LlmRunnerConfig = dataclasses.field(default_factory=LlmRunnerConfig)
    dry_run: bool = knob("print the plan and stop", False)

    @property
    def model_path(self) -> str:
        """The model's folder; a run has one."""
        path = (self.model or {}).get("path")
        assert isinstance(path, str), "checked before a run"
        return path


def is_llm_job(mapping: Mapping[str, object]) -> bool:
    algorithm = mapping.get("algorithm")
    return isinstance(algorithm, Mapping) and algorithm.get("name") in (PLANNED, *RUN)


def is_llm_run(mapping: Mapping[str, object]) -> bool:
    algorithm = mapping.get("algorithm")
    return isinstance(algorithm, Mapping) and algorithm.get("name") in RUN


def read_llm_config(mapping: Mapping[str, object], sources: Mapping[str, Source] | None = None) -> LlmConfig:
    """Like `config.read_config`. Raises ConfigError with all problems at once."""
    reader = Reader(sources=sources or {})
    config = reader.read(LlmConfig, mapping)
    if config is not None and config.algorithm.name in RUN:
        _check_run(config, reader)
    if config is None or reader.problems:
        raise ConfigError(reader.problems)
    return config


def _check_run(config: LlmConfig, reader: Reader) -> None:
    """What a plan can do without and a run cannot."""
    missing = {
        "algorithm.prompts": (config.algorithm.prompts, "prompts of an iteration", "prompts: 32"),
        "env.task": (config.env.task, "what is asked", "task: arithmetic"),
        "model": (config.model, "what is trained", "model: {path: <a Hugging Face folder>}"),
    }
    for key, (value, why, fix) in missing.items():
        if value is None:
            reader.reject("missing-key", key, "is required in a run", why=why, fix=fix)
