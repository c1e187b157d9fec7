"""The config of a job that trains a language model, as far as its placement and its memory depend on it.

It is read where `algorithm.name` is `rlhf`, with or without a critic, a reference or a reward, and it is for planning:
whatever decides where things are and how much they hold, and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from rlplace.config import ClusterConfig, knob
from rlplace.errors import ConfigError, Source
from rlplace.structure import Reader

_MODEL = "keys of its config.json; null: the same as the job's"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedConfig:
    """A model that learns: the actor, a critic."""

    model: Mapping[str, object] | None = knob(_MODEL, None)
    micro_batch: int = knob("sequences of one forward and backward pass of a rank", 1, minimum=1)
    weights: Literal["fp32", "bf16", "fp16"] = knob("as weights are kept", "fp32")
    compute: Literal["fp32", "bf16", "fp16"] = knob("as they compute", "bf16")
    optimizer: Literal["adamw", "adamw_master", "adamw_8bit", "sgd"] = knob("which state each weight has", "adamw")
    zero_stage: Literal[0, 1, 2, 3] = knob("what ranks share: 1 optimizer, 2 + gradients, 3 + weights (FSDP)", 3)
    checkpointing: bool = knob("keep the input of each layer only, recompute the rest", True)
    lora_rank: int | None = knob("train low-rank factors of this rank; null: all weights", None, minimum=1)
    optimizer_on_host: bool = knob("keep the optimizer in host memory and step there", False)
    enable_offload: bool = knob("leave the accelerators in stages that do not need it", False)


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

    gpu_memory_utilization: float = knob("share of each accelerator for everything", 0.6, above=0, maximum=1)
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
class RlhfConfig:
    name: Literal["rlhf"] = knob("a job that samples answers, has them judged and learns from that")
    sequence_length: int = knob("longest prompt and answer together, in tokens", 2048, minimum=1)
    prompts: int | None = knob("prompts of an iteration; null: batches are not checked", None, minimum=1)
    samples_per_prompt: int = knob("answers to each prompt", 1, minimum=1)
    train_batch: int | None = knob("samples of one optimizer step; null: all", None, minimum=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlmConfig:
    """Everything such a job is planned from. A block counts where `component_placement` places its component."""

    cluster: ClusterConfig
    algorithm: RlhfConfig
    model: Mapping[str, object] | None = knob("keys of the model's config.json; null: memory is not counted", None)
    actor: TrainedConfig = dataclasses.field(default_factory=TrainedConfig)
    critic: TrainedConfig = dataclasses.field(default_factory=TrainedConfig)
    reference: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)
    reward: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)
    rollout: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    env: SimulatorConfig = dataclasses.field(default_factory=SimulatorConfig)
    agent: SimulatorConfig = dataclasses.field(default_factory=SimulatorConfig)
    dry_run: bool = knob("print the plan and stop; such a job is planned, not run", True)


def is_llm_job(mapping: Mapping[str, object]) -> bool:
    algorithm = mapping.get("algorithm")
    return isinstance(algorithm, Mapping) and algorithm.get("name") == "rlhf"


def read_llm_config(mapping: Mapping[str, object], sources: Mapping[str, Source] | None = None) -> LlmConfig:
    """Like `config.read_config`. Raises ConfigError with all problems at once."""
    reader = Reader(sources=sources or {})
    config = reader.read(LlmConfig, mapping)
    if config is None:
        raise ConfigError(reader.problems)
    return config
