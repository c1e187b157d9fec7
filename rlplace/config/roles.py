"""The config blocks of the components: environments, rollout engines, trained models, frozen models, rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from rlplace.config.fields import block, knob, lm_knob

Dtype = Literal["fp32", "bf16", "fp16"]
ModelKeys = Mapping[str, object]  # of a language model: path and keys of its config.json

_MODEL = "path: a Hugging Face folder, or keys of its config.json; null: the actor's model"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorEnvConfig:
    """Simulators of gymnasium, or of an adapter of your own."""

    kind: str = knob("gymnasium, or package.module:Class of your own adapter", "gymnasium")
    id: str = knob("simulator id, as the adapter knows it")
    total_num_envs: int = knob("environments over all env ranks", 64, minimum=1)
    max_episode_steps: int | None = knob("truncate episodes here; null: the simulator's own limit", None, minimum=1)
    kwargs: Mapping[str, object] = knob("passed to the simulator", dict)
    enable_offload: bool = knob("leave the accelerators in stages that do not need the simulator", False)
    accelerator_memory: int = knob("bytes a rank's simulator holds on its accelerators", 0, unit="bytes")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Agents beside the models: what they hold."""

    accelerator_memory: int = knob("bytes a rank holds on each of its accelerators", 0, unit="bytes")
    host_memory: int = knob("bytes a rank holds on its host", 0, unit="bytes")
    enable_offload: bool = knob("leave the accelerators in stages that do not need it", False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunctionConfig:
    """One reward function of the environment."""

    name: str = knob("a shipped one, or package.module:function")
    weight: float = knob("weight of this reward in the sum that is learned", 1.0)
    kwargs: Mapping[str, object] = knob("passed to the function", dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextEnvConfig(AgentConfig):
    """A text task: prompts and the rewards of answers."""

    kind: Literal["text"] = knob("prompts and answers", "text")
    task: str | None = knob("a shipped one, or package.module:Class; null: a plan of other environments", None)
    kwargs: Mapping[str, object] = knob("passed to the task", dict)
    eval_kwargs: Mapping[str, object] = knob("of the held-out prompts, over those of kwargs", dict)
    rewards: tuple[RewardFunctionConfig, ...] = knob("their weighted sum is learned; none: the task's own", ())
    system: str | None = knob("system message before every prompt; null: none", None)
    chat: bool = knob("format prompts by the model's chat template; false: plain text", True)
    max_turns: int = knob("most answers of one episode", 1, minimum=1)
    long_prompts: Literal["refuse", "drop"] = knob("what to do with prompts longer than max_prompt_length", "refuse")
    reward_timeout_s: float = knob("longest that one reward of one episode may take", 30.0, above=0)
    reward_processes: int = knob("processes of a rank for reward functions that are not shipped, or slow", 1, minimum=1)
    reward_memory: int = knob("bytes that each of these processes may take", 4 << 30, unit="bytes")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TorchRolloutConfig:
    """Actions of an MLP, computed by torch."""

    engine: Literal["torch"] = knob("generates actions", "torch")
    pipeline_stage_num: int = knob("stage groups: env steps one while rollout infers another", 1, minimum=1)
    merge_requests: bool = knob("answer waiting env ranks in one batch; false: results never depend on timing", False)
    enable_offload: bool = knob("leave the accelerators in stages that do not generate", False)
    workspace_memory: int = knob("bytes a rank needs beside its weights while generating", 0, unit="bytes")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextRolloutConfig:
    """Generation engines of a language model."""

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
    dtype: Dtype = knob("of weights and computation", "bf16")
    cache_dtype: Literal["bf16", "fp16", "fp8", "fp32"] | None = knob("of the KV cache; null: as dtype", None)
    step_tokens: int = knob("most tokens of one step", 8192, minimum=1)
    step_sequences: int = knob("most sequences of one step", 256, minimum=1)
    sleep_level: Literal[1, 2] = knob("1 copies weights to the host, 2 drops them: the next sync brings new ones", 2)
    enable_offload: bool = knob("sleep in stages that do not generate", False)

    @property
    def cache(self) -> Literal["bf16", "fp16", "fp8", "fp32"]:
        """The dtype of keys and values."""
        return self.cache_dtype or self.dtype


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """Policy and value network of a simulator's observations."""

    kind: Literal["mlp"] = knob("policy and value network, fully connected", "mlp")
    hidden: tuple[int, ...] = knob("widths of the hidden layers", (64, 64), minimum=1)
    activation: Literal["tanh", "relu", "silu"] = knob("between the layers", "tanh")
    initial_log_std: float = knob("log of the first action noise, continuous actions only", 0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW, or another optimizer in a plan."""

    kind: Literal["adamw", "adamw_master", "adamw_8bit", "sgd"] = lm_knob(
        "adamw | adamw_master: float32 copies of the weights | adamw_8bit, sgd: planned only", "adamw"
    )
    lr: float = knob("learning rate after the warm-up", 1e-6, above=0, mlp=3e-4)
    schedule: Literal["constant", "linear", "cosine"] = knob("the others fall to 0 at the end of the run", "constant")
    warmup_steps: int = lm_knob("optimizer steps over which the rate rises from 0", 0, minimum=0)
    beta1: float = knob("Adam's first-moment decay", 0.9, minimum=0, below=1)
    beta2: float = knob("Adam's second-moment decay", 0.999, minimum=0, below=1)
    eps: float = knob("Adam's denominator floor", 1e-8, above=0, mlp=1e-5)
    weight_decay: float = knob("decoupled weight decay", 0.0, minimum=0)
    max_grad_norm: float = knob("clip the global gradient norm here", 1.0, above=0, mlp=0.5)
    on_host: bool = lm_knob("keep the optimizer's state in host memory and step there", False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """How the rollout ranks get the actor's weights."""

    mode: Literal["all", "trainable", "lora", "delta"] = knob(
        "what is sent: all | trainable, not what is frozen | lora, the factors alone | delta, what changed", "all"
    )
    verify_every: int = knob("compare what arrived at every so many syncs; 0: never", 0, minimum=0)
    verify: Literal["checksum", "logprobs"] = lm_knob(
        "checksum of the bytes that arrived | log-probabilities of the same tokens in actor and engine", "checksum"
    )
    through_host: bool = lm_knob(
        "send through host memory on GPUs too: slower, no second copy on them; modes but all always do", False
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedConfig:
    """A trained model: the actor, a critic."""

    model: MlpConfig | ModelKeys | None = knob(_MODEL, None, by_kind={"mlp": MlpConfig, "causal_lm": ModelKeys | None})
    micro_batch: int = lm_knob("sequences of one forward and backward pass of a rank, in a plan", 1, minimum=1)
    token_budget: int = lm_knob("tokens of one forward and backward pass of a rank, in a run", 8192, minimum=1)
    weights: Dtype = lm_knob("dtype of the stored weights", "fp32")
    compute: Dtype = knob("dtype of the computation", "bf16", mlp="fp32", by_kind={"mlp": Literal["fp32", "bf16"]})
    optimizer: OptimizerConfig = block(OptimizerConfig)
    zero_stage: Literal[0, 1, 2, 3] = lm_knob("what ranks share: 1 optimizer, 2 + gradients, 3 + weights (FSDP)", 3)
    checkpointing: bool = lm_knob("keep the input of each layer only, recompute the rest", True)
    lora_rank: int | None = lm_knob("train low-rank factors of this rank; null: all weights", None, minimum=1)
    lora_alpha: float = lm_knob("the factors count lora_alpha / lora_rank", 16.0, above=0)
    lora_targets: tuple[str, ...] = lm_knob("names of the modules that get factors; none: all linear layers", ())
    enable_offload: bool = knob("leave the accelerators in stages that do not need it", False)

    @property
    def mlp(self) -> MlpConfig:
        """The model of an actor with kind mlp."""
        assert isinstance(self.model, MlpConfig), "the reader pairs kinds"
        return self.model

    @property
    def language_model(self) -> ModelKeys | None:
        """Path and keys of its language model; None where none is declared."""
        return self.model if isinstance(self.model, Mapping) else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig(TrainedConfig):
    """The policy."""

    ema_decay: float | None = lm_knob(
        "keep an average of the weights that forgets so slowly; null: none", None, above=0, below=1
    )
    sync: SyncConfig = block(SyncConfig)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig(TrainedConfig):
    """The value of each token's state."""

    model: ModelKeys | None = knob(_MODEL, None)
    on_actor: bool = knob("no component of its own: a value head on the actor's trunk", False)
    warmup_iterations: int = knob("first iterations, in which the critic learns and the actor does not", 0, minimum=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrozenConfig:
    """A model that is not trained: a reference, a reward."""

    model: ModelKeys | None = knob(_MODEL, None)
    micro_batch: int = knob("sequences of one forward pass of a rank, in a plan", 1, minimum=1)
    token_budget: int = knob("tokens of one forward pass of a rank, in a run", 8192, minimum=1)
    dtype: Dtype = knob("of weights and computation", "bf16")
    sharded: bool = knob("over its ranks; else each rank has all of it", True)
    on_host: bool = knob("weights live in host memory and come to the accelerator block by block", False)
    enable_offload: bool = knob("leave the accelerators in stages that do not need it", False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig(FrozenConfig):
    """The policy that the actor stays near."""

    share_actor: bool = knob("no component of its own: the actor without its low-rank factors", False)
    refresh_every: int = knob("iterations after which it takes the actor's weights; 0: never", 0, minimum=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(FrozenConfig):
    """The scorer of whole episodes: a model unless a function or an endpoint is named."""

    weight: float = knob("weight of its score beside the others", 1.0)
    head: str = knob("name of the head's weight in the model's folder, before .weight", "score")
    function: str | None = knob("a shipped reward, or package.module:function, on CPUs; null: none", None)
    kwargs: Mapping[str, object] = knob("passed to the function", dict)
    url: str | None = knob("of an HTTP endpoint that scores batches; null: none", None)
    batch: int = knob("episodes of one request to the endpoint", 64, minimum=1)
    concurrency: int = knob("requests to the endpoint at a time", 4, minimum=1)
    timeout_s: float = knob("longest that one answer of the endpoint or the function may take", 60.0, above=0)
    retries: int = knob("more tries after a request that failed", 3, minimum=0)
    api_key_env: str | None = knob("environment variable with the endpoint's bearer token; null: none", None)

    @property
    def kind(self) -> Literal["model", "function", "url"]:
        return "url" if self.url is not None else "function" if self.function is not None else "model"
