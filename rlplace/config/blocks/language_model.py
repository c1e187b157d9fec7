"""The config of a job on language models, and its own blocks: text tasks, engines, critic, reference and rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from rlplace.config.blocks.training import ModelKeys, TrainedConfig
from rlplace.config.fields import Dtype, JobName, block, knob
from rlplace.config.own import OwnName
from rlplace.config.schema import Config

_MODEL = (
    "path: a Hugging Face folder, or keys of its config.json; null: the actor's model"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Agents or environments that work beside the models, with the memory that they use."""

    accelerator_memory: int = knob(
        "bytes a rank holds on each of its accelerators", 0, unit="bytes"
    )
    host_memory: int = knob("bytes a rank holds on its host", 0, unit="bytes")
    enable_offload: bool = knob(
        "leave the accelerators in stages that do not need it", False
    )
    group_name: str | None = knob(
        "name of the worker group in a loop by hand; null: the component's", None
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunctionConfig:
    """One reward function of the text environment."""

    name: str = knob("name of a shipped reward, or package.module:function")
    weight: float = knob("weight of this reward in the sum that is learned", 1.0)
    kwargs: Mapping[str, object] = knob("arguments of the function", dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextEnvConfig(AgentConfig):
    """A text task: prompts, and rewards for answers."""

    kind: Literal["text"] = knob("prompts and answers", "text")
    task: str | None = knob(
        "name of a shipped task, or package.module:Class; null: only for plans",
        None,
    )
    kwargs: Mapping[str, object] = knob("arguments of the task", dict)
    eval_kwargs: Mapping[str, object] = knob(
        "arguments of the task for held-out prompts; they replace those of kwargs", dict
    )
    eval_seed: int = knob(
        "seed that selects held-out prompts, if not all are used; independent of runner.seed",
        0,
        minimum=0,
    )
    rewards: tuple[RewardFunctionConfig, ...] = knob(
        "rewards, whose weighted sum is learned; none: the reward of the task", ()
    )
    system: str | None = knob("system message before every prompt; null: none", None)
    chat: bool = knob(
        "format prompts by the model's chat template; false: plain text", True
    )
    template: Mapping[str, object] = knob(
        "arguments of the chat template, such as {enable_thinking: false} or tools",
        dict,
    )
    max_turns: int = knob("most answers of one episode", 1, minimum=1)
    reply_timeout_s: float = knob(
        "largest number of seconds for one reply of the task to an answer",
        60.0,
        above=0,
    )
    replies_together: int = knob(
        "number of threads of a rank for replies; 0: one reply after the other, without threads",
        16,
        minimum=0,
    )
    max_image_tokens: int | None = knob(
        "largest number of tokens of an image; larger ones are scaled down; null: the processor's limit",
        None,
        minimum=1,
    )
    max_image_bytes: int = knob(
        "largest size of all image files of a prompt", 4 << 20, minimum=0, unit="bytes"
    )
    long_prompts: Literal["refuse", "drop"] = knob(
        "what to do with prompts longer than max_prompt_length", "refuse"
    )
    reward_timeout_s: float = knob(
        "largest number of seconds for one reward of one episode", 30.0, above=0
    )
    reward_processes: int = knob(
        "number of processes of a rank for slow reward functions and for your own",
        1,
        minimum=1,
    )
    reward_memory: int = knob(
        "largest memory of each of these processes", 4 << 30, unit="bytes"
    )

    @property
    def is_led(self) -> bool:
        """Whether programs lead the conversations: they may ask for several answers at once."""
        return self.task in ("agent", "verifiers")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextRolloutConfig:
    """Settings of the engine that generates the answers of a language model."""

    engine: Literal["vllm", "transformers"] | OwnName = knob(
        "generation engine; transformers is slower and needs no vLLM; your own: package.module:Class",
        "vllm",
    )
    temperature: float = knob(
        "divides the logits before a token is drawn; 0: the likeliest token",
        1.0,
        minimum=0,
    )
    top_p: float = knob(
        "draw from the likeliest tokens that together have this probability; a run trains with 1 only",
        1.0,
        above=0,
        maximum=1,
        unit="share",
    )
    top_k: int = knob(
        "draw from so many likeliest tokens; 0: from all; a run trains with 0 only",
        0,
        minimum=0,
    )
    seed: int | None = knob(
        "seed that alone determines the answers, which is slower; null: not repeatable",
        None,
        minimum=0,
    )
    min_tokens: int = knob(
        "smallest number of tokens of an answer; training needs algorithm.tis_cap",
        0,
        minimum=0,
    )
    repetition_penalty: float = knob(
        "divides positive and multiplies negative logits of earlier tokens; training needs algorithm.tis_cap",
        1.0,
        above=0,
    )
    presence_penalty: float = knob(
        "subtracted from the logits of tokens in the answer; training needs algorithm.tis_cap",
        0.0,
        minimum=-2,
        maximum=2,
    )
    frequency_penalty: float = knob(
        "subtracted from the logits of a token, once for each time that the answer has it",
        0.0,
        minimum=-2,
        maximum=2,
    )
    stop: tuple[str, ...] = knob(
        "additional texts that end an answer; the answer includes them", ()
    )
    engine_args: Mapping[str, object] = knob(
        "further arguments of the engine, vLLM's or your own, with its names", dict
    )
    enforce_eager: bool = knob(
        "use no compiled kernels and no graphs: faster start, slower generation", False
    )
    gpu_memory_utilization: float | Literal["auto"] = knob(
        "share of each accelerator's memory for the engine; auto: what other components leave free",
        0.6,
        above=0,
        maximum=1,
        unit="share",
    )
    kv_cache_memory: int | None = knob(
        "bytes of the KV cache; null: the rest of gpu_memory_utilization",
        None,
        unit="bytes",
    )
    workspace_memory: int | None = knob(
        "bytes of a step besides weights and cache, as an engine of your own needs them; null: as vLLM",
        None,
        unit="bytes",
    )
    dtype: Dtype = knob("of weights and computation", "bf16")
    cache_dtype: Literal["bf16", "fp16", "fp8", "fp32"] | None = knob(
        "dtype of the KV cache; null: as dtype", None
    )
    step_tokens: int = knob("largest number of tokens of one step", 8192, minimum=1)
    step_sequences: int = knob(
        "largest number of sequences of one step", 256, minimum=1
    )
    sleep_level: Literal[1, 2] = knob(
        "1: copy weights to the host; 2: drop weights, and get new ones in the next sync",
        2,
    )
    enable_offload: bool = knob("sleep in stages that do not generate", False)

    group_name: str | None = knob(
        "name of the worker group in a loop by hand; null: the component's", None
    )

    @property
    def own(self) -> bool:
        """Whether the engine is a custom class, package.module:Class."""
        return ":" in self.engine

    @property
    def penalties(self) -> Mapping[str, float]:
        """Config key -> value of the penalties that change the sampling distribution.

        Penalties whose values have no effect are left out.
        """
        none = {
            "min_tokens": 0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        return {
            name: getattr(self, name)
            for name, off in none.items()
            if getattr(self, name) != off
        }

    @property
    def cache(self) -> Literal["bf16", "fp16", "fp8", "fp32"]:
        """The dtype of keys and values in the KV cache; by default, the dtype of the engine."""
        return self.cache_dtype or self.dtype


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig(TrainedConfig):
    """The critic, which estimates the value at each token."""

    model: ModelKeys | None = knob(_MODEL, None)
    on_actor: bool = knob(
        "use a value head on the actor's model instead of a separate component", False
    )
    warmup_iterations: int = knob(
        "number of first iterations in which only the critic learns",
        0,
        minimum=0,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrozenConfig:
    """A model that is not trained: a reference, a teacher or a reward."""

    model: ModelKeys | None = knob(_MODEL, None)
    micro_batch: int = knob(
        "sequences of one forward pass of a rank, in a plan", 1, minimum=1
    )
    token_budget: int = knob(
        "tokens of one forward pass of a rank, in a run", 8192, minimum=1
    )
    dtype: Dtype | None = knob(
        "dtype of weights and computation; null: bf16, and for a reference actor.compute",
        None,
    )
    sharded: bool = knob(
        "true: each rank has a share of the model; false: each rank has the whole model",
        True,
    )
    on_host: bool = knob(
        "keep the weights in host memory, and load them onto the accelerator block by block",
        False,
    )
    enable_offload: bool = knob(
        "leave the accelerators in stages that do not need it", False
    )

    group_name: str | None = knob(
        "name of the worker group in a loop by hand; null: the component's", None
    )

    @property
    def computed_in(self) -> Dtype:
        """The dtype of weights and computation. `block_of` returns a reference with the dtype of its actor."""
        return self.dtype or "bf16"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig(FrozenConfig):
    """The reference policy of the KL penalty."""

    share_actor: bool = knob(
        "use the actor without its LoRA factors instead of a separate component", False
    )
    refresh_every: int = knob(
        "iterations between two copies of the actor's weights; 0: never", 0, minimum=0
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig(FrozenConfig):
    """The teacher of on-policy distillation: a frozen model that the actor is to become like."""

    coef: float = knob(
        "weight of log q - log p of a token in its advantage, for teacher q and actor p",
        1.0,
        above=0,
    )
    discount: float = knob(
        "discount for the log q - log p of later tokens; 0: only the token itself",
        0.0,
        minimum=0,
        maximum=1,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(FrozenConfig):
    """The scorer of whole episodes: a model, unless a function or an endpoint is named."""

    weight: float = knob("weight of this score in the sum of all scores", 1.0)
    head: str = knob(
        "name of the head's weight in the model's folder, before .weight", "score"
    )
    function: str | None = knob(
        "a shipped reward, or package.module:function, on CPUs; null: none", None
    )
    kwargs: Mapping[str, object] = knob("arguments of the function", dict)
    url: str | None = knob(
        "address of an HTTP endpoint that scores batches; null: none", None
    )
    batch: int = knob(
        "number of episodes in one request to the endpoint", 64, minimum=1
    )
    concurrency: int = knob(
        "number of simultaneous requests to the endpoint", 4, minimum=1
    )
    timeout_s: float = knob(
        "largest number of seconds for one answer of the endpoint or the function",
        60.0,
        above=0,
    )
    retries: int = knob(
        "number of retries of a failed request, with pauses up to 10 s; 30 retries take 4 minutes",
        30,
        minimum=0,
    )
    api_key_env: str | None = knob(
        "environment variable with the endpoint's bearer token; null: none", None
    )

    @property
    def kind(self) -> Literal["model", "function", "url"]:
        if self.url is not None:
            return "url"
        if self.function is not None:
            return "function"
        return "model"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The server of the training API (`algorithm.name: serve`)."""

    host: str = knob("address at which the server listens", "127.0.0.1")
    port: int = knob("port at which the server listens", 8642, minimum=1, maximum=65535)
    api_key_env: str = knob(
        "environment variable with the API key; if it is not set, the server creates and prints a key",
        "RLPLACE_API_KEY",
    )
    model_name: str | None = knob(
        "name by which clients ask for the model; null: its folder's name or path", None
    )
    folder: str | None = knob(
        "where weights are saved for clients, on a disk that all nodes share; null: served, in runner.output_dir",
        None,
    )
    models: int = knob(
        "largest number of models of clients at the same time", 4, minimum=1
    )
    kept_samplers: int = knob(
        "number of samplers without a name that are kept for each model", 4, minimum=1
    )
    turn_s: float = knob(
        "largest number of seconds of sampling or learning, before the other begins or the run saves",
        10.0,
        above=0,
    )
    session_timeout_s: float = knob(
        "seconds without a request after which a client counts as gone; its models may be removed",
        120.0,
        above=0,
    )
    requests: int = knob("largest number of waiting requests", 4096, minimum=1)
    body: int = knob("largest size of one request", 64 << 20, minimum=1, unit="bytes")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelJobConfig(Config):
    """The whole config of a job on language models."""

    job: ClassVar[JobName] = "language_model"

    env: TextEnvConfig = knob("kind: text")
    rollout: TextRolloutConfig = knob(
        "engine: transformers | vllm | package.module:Class"
    )
    critic: CriticConfig = block(CriticConfig)
    reference: ReferenceConfig = block(ReferenceConfig)
    teacher: TeacherConfig = block(TeacherConfig)
    reward: RewardConfig | Mapping[str, RewardConfig] = knob(
        "one block for all reward components, or one block for each name of reward.<name>",
        RewardConfig,
    )
    agent: AgentConfig = block(AgentConfig)
    serve: ServeConfig = block(ServeConfig)

    @property
    def run_by(self) -> str:
        if self.algorithm.name == "sft":
            return "supervised"
        if self.algorithm.name == "serve":
            return "served"
        return self.job

    @property
    def model(self) -> ModelKeys | None:
        """The path and the config.json keys of the actor's language model; None if the config has none."""
        return self.actor.language_model

    @property
    def missing(self) -> Mapping[str, tuple[str, str]]:
        missing: dict[str, tuple[str, str]] = {}
        if self.algorithm.prompts is None:
            missing["algorithm.prompts"] = ("prompts of an iteration", "prompts: 32")
        if self.env.task is None and self.algorithm.name != "serve":
            why = (
                "the task has the prompts and the rewards; for the rows of a file of yours: "
                "task: prompts, and kwargs: {path: <the file>}"
            )
            missing["env.task"] = (why, "task: arithmetic")
        if self.model is None:
            fix = "model: {kind: causal_lm, path: <a Hugging Face folder>}"
            missing["actor.model"] = ("what is trained", fix)
        if "env" not in self.placed:
            why = "env asks the prompts and computes the rewards"
            missing["cluster.component_placement.env"] = (why, "env: cpu")
        return missing

    @property
    def runs(self) -> bool:
        """Whether this config is meant to be run; otherwise it can only be planned.

        This is true for a config with all keys that a run needs. It is true for a config that trains on prompts and
        lacks more than the model, so that the missing keys are reported.
        """
        asks = self.algorithm.name != "ppo" and (
            "env" in self.placed or self.env.task is not None
        )
        return not self.missing or (asks and [*self.missing] != ["actor.model"])

    @property
    def actor_infers(self) -> bool:
        """Whether the actor computes log-probabilities of samples in a stage of its own, before it learns."""
        algorithm = self.algorithm
        penalised = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
        return (
            algorithm.name == "ppo"
            or penalised
            or self.reference.share_actor
            or self.critic.on_actor
            or self.teacher_needs_old
        )

    @property
    def has_teacher(self) -> bool:
        """Whether the config places a teacher."""
        return "teacher" in self.placed

    @property
    def teacher_needs_old(self) -> bool:
        """Whether the actor computes the log-probabilities that are compared with those of the teacher.

        Without penalties, those of the engine are used. With penalties, the engine reports the log-probabilities of
        another distribution than the actor's.
        """
        return self.has_teacher and bool(self.rollout.penalties)

    @property
    def leaves_out(self) -> bool:
        """Whether a group may lack samples: those that failed, or that have numbers that are not finite."""
        return self.skips_poison or self.faults.on_error != "stop"

    @property
    def model_path(self) -> str:
        """The path of the folder of the actor's language model. Only for configs that can run."""
        path = (self.model or {}).get("path")
        assert isinstance(path, str), "checked before a run"
        return path

    def block_of(
        self, component: str
    ) -> TrainedConfig | FrozenConfig | TextRolloutConfig | AgentConfig:
        """Return the config block of a component, such as `actor` or `reward.math`.

        If the block `reward` has a block for each reward, return that of the component's name; else return the block
        of its role. A reference without a dtype computes in that of the actor: before the first update, both have the
        same probabilities.
        """
        role = component.partition(".")[0]
        if role == "reward":
            return self.reward_of(component)
        if role == "reference" and self.reference.dtype is None:
            return dataclasses.replace(self.reference, dtype=self.actor.compute)
        found: TrainedConfig | FrozenConfig | TextRolloutConfig | AgentConfig = getattr(
            self, role
        )
        return found

    def reward_of(self, component: str) -> RewardConfig:
        """Return the config block of the component `reward` or `reward.<name>`."""
        if isinstance(self.reward, Mapping):
            return self.reward.get(component.partition(".")[2], RewardConfig())
        return self.reward

    def key_of(self, component: str) -> str:
        """Return the key of the block that `block_of` returns for the component."""
        role = component.partition(".")[0]
        if role == "reward" and isinstance(self.reward, Mapping):
            return component
        return role
