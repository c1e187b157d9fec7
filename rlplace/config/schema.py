"""The config of a job as frozen dataclasses, built once from a mapping; all other modules use these dataclasses.

Every field has its meaning in `doc`; the same text is the comment in the shipped YAML files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeVar

from rlplace.config.engines import TextRolloutConfig as TextRolloutConfig
from rlplace.config.fields import (
    ByJob,
    JobName,
    block,
    knob,
    lm_knob,
    simulator_knob,
)
from rlplace.config.fields import Dtype as Dtype
from rlplace.config.machines import AcceleratorConfig as AcceleratorConfig
from rlplace.config.machines import AcceleratorRunConfig as AcceleratorRunConfig
from rlplace.config.machines import ClusterConfig as ClusterConfig
from rlplace.config.machines import CommConfig as CommConfig
from rlplace.config.machines import NodeConfig as NodeConfig
from rlplace.config.machines import RayConfig as RayConfig
from rlplace.config.own import CallbackConfig, OwnName, VariantConfig, WrapperConfig
from rlplace.config.policies import PolicyConfig

AlgorithmName = Literal[
    "ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo"
]
# loss aggregation: see algo.losses.token_weights
Mean = Literal["token", "sequence", "constant"]
OnPoison = Literal["stop", "skip"]
OnError = Literal["stop", "skip", "retry"]
SinkName = Literal[
    "console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"
]


# Path of a language model, and keys of its config.json.
ModelKeys = Mapping[str, object]

# Larger numbers are typing mistakes. A plan with these numbers takes one second at most.
MOMENT_BLOCK = 256  # 8-bit moments per block that shares one scale
MOST_GROUPS = 1_024
MOST_PROMPTS = 10**8
MOST_SAMPLES = 10**4

_Block = TypeVar("_Block")
_MODEL = (
    "path: a Hugging Face folder, or keys of its config.json; null: the actor's model"
)
_ACTOR_MODEL = "of simulators kind: mlp | cnn | module; else path: a Hugging Face folder, or keys of its config.json"


def _paired(block: object, kind: type[_Block]) -> _Block:
    """Return `block`. Assert that it has the type `kind`, which `read_config` ensures."""
    assert isinstance(block, kind), block
    return block


# ── components ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorEnvConfig:
    """Simulators of Gymnasium or EnvPool, or of a custom adapter."""

    kind: str = knob(
        "gymnasium, envpool, or package.module:Class of your own adapter", "gymnasium"
    )
    id: str = knob(
        "simulator id, or package.module:function that makes one; a plan can do without",
        "",
    )
    total_num_envs: int = knob("environments over all env ranks", 64, minimum=1)
    max_episode_steps: int | None = knob(
        "truncate episodes here; null: the simulator's own limit", None, minimum=1
    )
    kwargs: Mapping[str, object] = knob("passed to the simulator", dict)
    wrappers: tuple[WrapperConfig, ...] = knob(
        "of gymnasium, around each simulator, the innermost first", ()
    )
    enable_offload: bool = knob(
        "leave the accelerators in stages that do not need the simulator", False
    )
    accelerator_memory: int = knob(
        "bytes a rank's simulator holds on its accelerators", 0, unit="bytes"
    )
    group_name: str | None = knob(
        "name of the worker group in a loop by hand; null: the component's", None
    )

    def missing(self, config: Config) -> Mapping[str, tuple[str, str]]:
        """Return the keys that a run on simulators needs and that are not given: key -> (why, fix)."""
        if self.id:
            return {}
        return {"env.id": ("the simulator that env steps", "id: InvertedPendulum-v5")}


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

    name: str = knob("a shipped one, or package.module:function")
    weight: float = knob("weight of this reward in the sum that is learned", 1.0)
    kwargs: Mapping[str, object] = knob("passed to the function", dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextEnvConfig(AgentConfig):
    """A text task: prompts, and rewards for answers."""

    kind: Literal["text"] = knob("prompts and answers", "text")
    task: str | None = knob(
        "a shipped one, or package.module:Class; null: a plan of other environments",
        None,
    )
    kwargs: Mapping[str, object] = knob("passed to the task", dict)
    eval_kwargs: Mapping[str, object] = knob(
        "of the held-out prompts, over those of kwargs", dict
    )
    rewards: tuple[RewardFunctionConfig, ...] = knob(
        "their weighted sum is learned; none: the task's own", ()
    )
    system: str | None = knob("system message before every prompt; null: none", None)
    chat: bool = knob(
        "format prompts by the model's chat template; false: plain text", True
    )
    template: Mapping[str, object] = knob(
        "passed to the chat template, such as {enable_thinking: false}, tools", dict
    )
    max_turns: int = knob("most answers of one episode", 1, minimum=1)
    reply_timeout_s: float = knob(
        "longest that one reply of the task to an answer may take", 60.0, above=0
    )
    replies_together: int = knob(
        "replies of a rank at a time, in threads; 0: one by one in its own",
        16,
        minimum=0,
    )
    max_image_tokens: int | None = knob(
        "an image of more is scaled down; null: as its processor", None, minimum=1
    )
    max_image_bytes: int = knob(
        "most of the images of a prompt, as files", 4 << 20, minimum=0, unit="bytes"
    )
    long_prompts: Literal["refuse", "drop"] = knob(
        "what to do with prompts longer than max_prompt_length", "refuse"
    )
    reward_timeout_s: float = knob(
        "longest that one reward of one episode may take", 30.0, above=0
    )
    reward_processes: int = knob(
        "processes of a rank for reward functions that are not shipped, or slow",
        1,
        minimum=1,
    )
    reward_memory: int = knob(
        "bytes that each of these processes may take", 4 << 30, unit="bytes"
    )

    def missing(self, config: Config) -> Mapping[str, tuple[str, str]]:
        """Return the keys that a run on a language model needs and that are not given: key -> (why, fix)."""
        missing: dict[str, tuple[str, str]] = {}
        if config.algorithm.prompts is None:
            missing["algorithm.prompts"] = ("prompts of an iteration", "prompts: 32")
        if self.task is None:
            why = "the task has the prompts and the rewards"
            missing["env.task"] = (why, "task: arithmetic")
        if config.model is None:
            fix = "model: {kind: causal_lm, path: <a Hugging Face folder>}"
            missing["actor.model"] = ("what is trained", fix)
        if "env" not in config.placed:
            why = "env asks the prompts and computes the rewards"
            missing["cluster.component_placement.env"] = (why, "env: cpu")
        return missing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TorchRolloutConfig:
    """The rollout of a simulator policy, computed by torch."""

    engine: Literal["torch"] = knob("generates actions", "torch")
    pipeline_stage_num: int = knob(
        "stage groups: env steps one while rollout infers another",
        1,
        minimum=1,
        maximum=MOST_GROUPS,
    )
    action_chunk: int = knob(
        "actions decided at once, which the simulator takes one after the other; a step is one decision",
        1,
        minimum=1,
    )
    merge_requests: bool = knob(
        "answer waiting env ranks in one batch; false: results never depend on timing",
        False,
    )
    enable_offload: bool = knob(
        "leave the accelerators in stages that do not generate", False
    )
    workspace_memory: int = knob(
        "bytes a rank needs beside its weights while generating", 0, unit="bytes"
    )
    group_name: str | None = knob(
        "name of the worker group in a loop by hand; null: the component's", None
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The AdamW optimizer."""

    kind: Literal["adamw", "adamw_master", "adamw_8bit"] = lm_knob(
        "adamw | adamw_master: float32 copies of the weights | adamw_8bit: moments of 8 bits",
        "adamw",
    )
    lr: float = knob("learning rate after the warm-up", 1e-6, above=0, simulator=3e-4)
    schedule: Literal["constant", "linear", "cosine"] = knob(
        "the others fall to the end of the run", "constant"
    )
    min_lr_ratio: float = knob(
        "share of lr that they fall to", 0.0, minimum=0, maximum=1
    )
    warmup_steps: int = lm_knob(
        "optimizer steps over which the rate rises from 0", 0, minimum=0
    )
    beta1: float = knob("Adam's first-moment decay", 0.9, minimum=0, below=1)
    beta2: float = knob("Adam's second-moment decay", 0.999, minimum=0, below=1)
    eps: float = knob("Adam's denominator floor", 1e-8, above=0, simulator=1e-5)
    weight_decay: float = knob("decoupled weight decay", 0.0, minimum=0)
    max_grad_norm: float = knob(
        "clip the global gradient norm here", 1.0, above=0, simulator=0.5
    )
    on_host: bool = lm_knob(
        "keep the optimizer's state in host memory and step there", False
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """How rollout ranks get the actor's weights."""

    mode: Literal["all", "trainable", "lora", "delta"] = knob(
        "what is sent: all | trainable, not what is frozen | lora, the factors alone | delta, what changed",
        "all",
    )
    verify_every: int = knob(
        "compare what arrived at every so many syncs; 0: never", 0, minimum=0
    )
    verify: Literal["checksum", "logprobs"] = lm_knob(
        "checksum of the bytes that arrived | log-probabilities of the same tokens in actor and engine",
        "checksum",
    )
    through_host: bool | Literal["auto"] = knob(
        "on GPUs too, as other modes than all: slower, less memory; auto: where processes cannot share a GPU's memory",
        "auto",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedConfig:
    """A trained model: the actor or a critic."""

    model: PolicyConfig | ModelKeys | None = knob(
        _ACTOR_MODEL,
        None,
        by_job=ByJob(simulator=PolicyConfig, language_model=ModelKeys | None),
    )
    micro_batch: int = lm_knob(
        "sequences of one forward and backward pass of a rank, in a plan", 1, minimum=1
    )
    token_budget: int = lm_knob(
        "tokens of one forward and backward pass of a rank, in a run", 8192, minimum=1
    )
    weights: Dtype = lm_knob("dtype of the stored weights", "fp32")
    compute: Dtype = knob(
        "dtype of the computation",
        "bf16",
        simulator="fp32",
        by_job=ByJob(simulator=Literal["fp32", "bf16"], language_model=Dtype),
    )
    optimizer: OptimizerConfig = block(OptimizerConfig)
    zero_stage: Literal[0, 1, 2, 3] = lm_knob(
        "what ranks share: 1 optimizer, 2 + gradients, 3 + weights (FSDP)", 3
    )
    checkpointing: bool = lm_knob(
        "keep the input of each layer only, recompute the rest", True
    )
    activation_offload: bool = lm_knob(
        "keep that input on the host until it is needed again", False
    )
    lora_rank: int | None = lm_knob(
        "train low-rank factors of this rank; null: all weights", None, minimum=1
    )
    lora_alpha: float = lm_knob(
        "the factors count lora_alpha / lora_rank", 16.0, above=0
    )
    lora_targets: tuple[str, ...] = lm_knob(
        "names of the modules that get factors; none: all linear layers", ()
    )
    enable_offload: bool = knob(
        "leave the accelerators in stages that do not need it", False
    )

    @property
    def policy(self) -> PolicyConfig:
        # The reader pairs the block with the kind of the job.
        assert isinstance(self.model, PolicyConfig), self.model
        return self.model

    @property
    def language_model(self) -> ModelKeys | None:
        """The path and the config.json keys of the component's language model; None if the config has none."""
        if isinstance(self.model, Mapping):
            return self.model
        return None

    group_name: str | None = knob(
        "name of the worker group in a loop by hand; null: the component's", None
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig(TrainedConfig):
    """The trained policy."""

    ema_decay: float | None = lm_knob(
        "decay of an average of the weights; null: none is kept", None, above=0, below=1
    )
    sync: SyncConfig = block(SyncConfig)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig(TrainedConfig):
    """The critic, which estimates the value at each token."""

    model: ModelKeys | None = knob(_MODEL, None)
    on_actor: bool = knob(
        "no component of its own: a value head on the actor's trunk", False
    )
    warmup_iterations: int = knob(
        "first iterations, in which the critic learns and the actor does not",
        0,
        minimum=0,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrozenConfig:
    """A model that is not trained: a reference or a reward."""

    model: ModelKeys | None = knob(_MODEL, None)
    micro_batch: int = knob(
        "sequences of one forward pass of a rank, in a plan", 1, minimum=1
    )
    token_budget: int = knob(
        "tokens of one forward pass of a rank, in a run", 8192, minimum=1
    )
    dtype: Dtype = knob("of weights and computation", "bf16")
    sharded: bool = knob("over its ranks; else each rank has all of it", True)
    on_host: bool = knob(
        "weights live in host memory and come to the accelerator block by block", False
    )
    enable_offload: bool = knob(
        "leave the accelerators in stages that do not need it", False
    )

    group_name: str | None = knob(
        "name of the worker group in a loop by hand; null: the component's", None
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig(FrozenConfig):
    """The reference policy of the KL penalty."""

    share_actor: bool = knob(
        "no component of its own: the actor without its low-rank factors", False
    )
    refresh_every: int = knob(
        "iterations after which it takes the actor's weights; 0: never", 0, minimum=0
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(FrozenConfig):
    """The scorer of whole episodes: a model, unless a function or an endpoint is named."""

    weight: float = knob("weight of its score beside the others", 1.0)
    head: str = knob(
        "name of the head's weight in the model's folder, before .weight", "score"
    )
    function: str | None = knob(
        "a shipped reward, or package.module:function, on CPUs; null: none", None
    )
    kwargs: Mapping[str, object] = knob("passed to the function", dict)
    url: str | None = knob("of an HTTP endpoint that scores batches; null: none", None)
    batch: int = knob("episodes of one request to the endpoint", 64, minimum=1)
    concurrency: int = knob("requests to the endpoint at a time", 4, minimum=1)
    timeout_s: float = knob(
        "longest that one answer of the endpoint or the function may take",
        60.0,
        above=0,
    )
    retries: int = knob(
        "more tries after a request that failed, with pauses up to 10 s: 30 take 4 minutes",
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


# ── the job ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """How samples are made and used for learning. Keys that only one kind of job has are refused in the other kind."""

    name: AlgorithmName = knob(
        "ppo: with a critic | the others, of language models: without", "ppo"
    )
    rollout_steps: int = simulator_knob(
        "T: steps each env takes per iteration", 64, minimum=1
    )
    sequence_length: int | None = lm_knob(
        "longest prompt and answer, in tokens; null: both limits", None, minimum=1
    )
    max_prompt_length: int = lm_knob("longest prompt, in tokens", 1024, minimum=1)
    max_new_tokens: int = lm_knob("longest answer, in tokens", 1024, minimum=1)
    prompts: int | None = lm_knob(
        "prompts of an iteration; null, in a plan: batches are not checked",
        None,
        minimum=1,
        maximum=MOST_PROMPTS,
    )
    samples_per_prompt: int = lm_knob(
        "answers to each prompt", 1, minimum=1, maximum=MOST_SAMPLES
    )
    train_batch: int | None = lm_knob(
        "about so many samples of one optimizer step, in whole groups; null: all",
        None,
        minimum=1,
    )
    unroll_steps: int | None = simulator_knob(
        "steps of the sequences that a policy with memory learns from; null: rollout_steps",
        None,
        minimum=1,
    )
    burn_in: int = simulator_knob(
        "steps before such a sequence by which its memory is made anew, without learning from them",
        0,
        minimum=0,
    )
    epochs: int = knob(
        "passes over each iteration's samples", 1, minimum=1, simulator=10
    )
    num_minibatches: int = simulator_knob("optimizer steps per pass", 4, minimum=1)
    clip_ratio_low: float = knob(
        "how far below 1 the policy ratio may go", 0.2, above=0, below=1
    )
    clip_ratio_high: float | None = knob(
        "how far above 1; null: as low, with dapo 0.28", None, above=0
    )
    ratio: Literal["token", "sequence"] = lm_knob(
        "whose is clipped: each token's or (GSPO) the sequence's", "token"
    )
    surrogate: Literal["clip", "cispo"] = lm_knob(
        "clip: outside of the clip a token pushes no more | cispo: all push, with a weight that is clipped",
        "clip",
    )
    loss: Mean | None = lm_knob(
        "whose mean the loss is; null: as the algorithm has it", None
    )
    entropy_coef: float = knob("weight of the entropy bonus", 0.0, minimum=0)
    tis_cap: float | None = lm_knob(
        "cap of the weights that correct the engine's rounding; null: none",
        2.0,
        above=0,
    )
    tis_level: Literal["token", "sequence"] = lm_knob(
        "whose probabilities they compare: each token's, or the whole answer's", "token"
    )
    tis_above: Literal["cap", "drop"] = lm_knob(
        "above the cap: weigh as the cap, or learn nothing from it", "cap"
    )
    tis_floor: float | None = lm_knob(
        "nothing is learned from weights below this; null: from all", None, above=0
    )
    dual_clip: float | None = lm_knob(
        "a bad token's loss is at most this many times its weight; null: free",
        None,
        above=1,
    )
    truncated: Literal["learn", "mask"] = lm_knob(
        "answers cut at max_new_tokens: mask compares, but learns none", "learn"
    )
    dynamic_sampling: bool | None = lm_knob(
        "no group of equal rewards is learned from; null: with dapo", None
    )
    refills: int = lm_knob(
        "prompts asked in place of one with such a group, by env's rewards",
        3,
        minimum=0,
        maximum=16,
    )
    short_rounds: int = lm_knob(
        "iterations that leave their longest answers to one after them",
        0,
        minimum=0,
        maximum=64,
    )
    gamma: float = knob(
        "discount per step or learned token", 1.0, minimum=0, maximum=1, simulator=0.99
    )
    gae_lambda: float = knob("GAE's bias/variance exchange", 0.95, minimum=0, maximum=1)
    value_clip: float | None = knob(
        "clip of the value change; null: none", 0.2, above=0, simulator=None
    )
    value_coef: float = knob(
        "weight of the value loss, where policy and value share a model",
        0.1,
        minimum=0,
        simulator=0.5,
    )
    kl_coef: float = lm_knob(
        "weight of the KL from the reference; with kl_target the first one",
        0.0,
        minimum=0,
    )
    kl_in: Literal["reward", "loss"] = lm_knob(
        "each token's KL lowers its reward, or is added to the loss", "reward"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = lm_knob(
        "k1: log ratio | k2: half its square | k3: unbiased, >= 0", "k1"
    )
    kl_target: float | None = lm_knob(
        "kl_coef adapts until the KL is this; null: it is constant", None, above=0
    )
    kl_horizon: int = lm_knob("samples over which kl_coef adapts", 10_000, minimum=1)
    target_kl: float | None = simulator_knob(
        "end the iteration's updates above this KL; null: never", None, above=0
    )
    reward_clip: float | None = lm_knob(
        "a sample's score is kept within +- this; null: as it is", None, above=0
    )
    normalize_rewards: bool = knob(
        "by their running deviation; scores of text by the running mean too", False
    )
    normalize_advantages: bool | None = knob(
        "zero mean, unit variance over the iteration; null: with ppo", None
    )
    normalize_observations: bool = simulator_knob(
        "by running mean and variance, kept with the weights", True
    )
    max_staleness: int = lm_knob(
        "versions by which samples may be older than what learns from them",
        0,
        minimum=0,
    )
    share_prompts: bool = lm_knob(
        "a pass computes the prompt of several answers once", True
    )
    accumulate_early: bool = lm_knob(
        "gradients of whole groups are made while others are generated", False
    )
    variant: VariantConfig = block(VariantConfig)

    @property
    def unrolled(self) -> int:
        """The number of steps of each sequence on which a policy with memory learns."""
        return self.unroll_steps or self.rollout_steps

    @property
    def longest(self) -> int:
        """The greatest number of tokens of a prompt and its answer together."""
        return self.sequence_length or self.max_prompt_length + self.max_new_tokens

    @property
    def clip_high(self) -> float:
        return self.clip_ratio_high or (
            0.28 if self.name == "dapo" else self.clip_ratio_low
        )

    @property
    def mean(self) -> Mean:
        """How token losses are averaged; by default as in the algorithm's paper (see algo/losses.py)."""
        means: Mapping[str, Mean] = {
            "grpo": "sequence",
            "rloo": "sequence",
            "dr_grpo": "constant",
        }
        return self.loss or means.get(self.name, "token")

    @property
    def only_with_signal(self) -> bool:
        """Whether groups whose rewards are all equal are left out, since nothing can be learned from them."""
        if self.dynamic_sampling is None:
            return self.name == "dapo"
        return self.dynamic_sampling

    @property
    def advantages_normalized(self) -> bool:
        if self.normalize_advantages is None:
            return self.name == "ppo"
        return self.normalize_advantages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """How the memory proof counts, and what follows if a job does not fit."""

    check: Literal["refuse", "warn"] = knob(
        "a job that does not fit: refuse it, or run it all the same", "refuse"
    )
    reserve: int | float | Literal["auto"] = knob(
        "of each accelerator, free for what nothing counts: 5 %, or 2GiB; auto: 5 % of a GPU, 0 of an emulated one",
        "auto",
        unit="share or bytes",
    )
    verify: Literal["warn", "stop"] = knob(
        "an accelerator holds more after a move than the proof counts and the reserve leaves: say it, or end the run",
        "warn",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """When a run ends, where its files go, and the longest time of each operation."""

    total_iterations: int = knob("end of training", 100, minimum=1)
    stop_at_return: float | None = knob(
        "stop earlier once the mean return or reward reaches this", None
    )
    eval_every: int = lm_knob(
        "iterations between passes over held-out prompts; 0: none", 0, minimum=0
    )
    eval_prompts: int = lm_knob("held-out prompts of one pass", 64, minimum=1)
    eval_samples: int = lm_knob(
        "answers to each of them: 1, greedily; or more, drawn as in training",
        1,
        minimum=1,
        maximum=MOST_SAMPLES,
    )
    eval_temperature: float | None = lm_knob(
        "draw them, also one, at this temperature; 0: greedily; null: as eval_samples says",
        None,
        minimum=0,
    )
    eval_top_p: float | None = lm_knob(
        "draw them from the likeliest tokens that together have this probability; null: as rollout.top_p",
        None,
        above=0,
        maximum=1,
        unit="share",
    )
    samples: int = lm_knob(
        "samples of each iteration that are kept as text to be read; 0: none",
        4,
        minimum=0,
    )
    seed: int = knob(
        "seed of everything random; engines have rollout.seed", 0, minimum=0
    )
    output_dir: str = knob("each run makes its own folder in here", "runs")
    sinks: tuple[SinkName | OwnName, ...] = knob(
        "where metrics go; your own sink: package.module:Name",
        ("console", "jsonl", "tensorboard"),
    )
    callbacks: tuple[CallbackConfig, ...] = knob(
        "called after each iteration, and when the run ends", ()
    )
    stage_timeout_s: float = knob(
        "longest time one stage may take", 3600.0, above=0, simulator=600.0
    )
    channel_timeout_s: float = knob(
        "longest wait for one item of a channel", 1800.0, above=0, simulator=120.0
    )
    watchdog_s: float = knob(
        "report which component waits for which when nothing moves for so long; 0: never",
        300.0,
        minimum=0,
        simulator=30.0,
    )
    requeue_exit_code: int | None = knob(
        "exit code after a signal of a scheduler, if there is a checkpoint to go on with; null: 128 + signal",
        None,
        minimum=1,
        maximum=255,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What checkpoints contain and when they are written, for `resume`."""

    every: int = knob(
        "iterations between two checkpoints; 0: none but the last", 10, minimum=0
    )
    keep_last: int = knob("newest checkpoints that are kept", 2, minimum=1)
    keep_best: int = knob(
        "beside them, those with the best return or reward", 0, minimum=0
    )
    on_signal: bool = knob(
        "save one more when a signal such as Ctrl-C or SIGTERM stops the run", True
    )
    grace_s: float = knob(
        "longest time from such a signal to the end: the iteration ends, then it is saved",
        30.0,
        above=0,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FaultsConfig:
    """How a run reacts to failures."""

    on_poison: OnPoison = knob(
        "observation, reward, loss or gradient that is not finite: stop the run; or skip it, and learn nothing from it",
        "stop",
    )
    on_error: OnError = lm_knob(
        "reward, reply, fact or endpoint that fails: stop the run; skip the episode; or retry, twice more, then skip",
        "stop",
    )
    error_budget: int = lm_knob(
        "most episodes of a rank and iteration that are so skipped", 16, minimum=0
    )
    restarts: int = knob(
        "most recoveries from lost workers and nodes per hour; 0: the first failure ends the run",
        6,
        minimum=0,
    )
    on_node_loss: Literal["fail", "wait", "replan"] = knob(
        "end; wait for a machine in its place; or plan for the machines that are left; both go on from the checkpoint",
        "fail",
    )
    node_wait_s: float = knob(
        "wait so long for a machine in place of a lost one", 600.0, minimum=0
    )
    heartbeat_s: float = knob(
        "replace a worker at work that answers nothing for so long; 0: none",
        60.0,
        minimum=0,
    )


EnvConfig = SimulatorEnvConfig | TextEnvConfig
RolloutConfig = TorchRolloutConfig | TextRolloutConfig
BlockConfig = (
    TrainedConfig
    | FrozenConfig
    | TextRolloutConfig
    | TorchRolloutConfig
    | AgentConfig
    | SimulatorEnvConfig
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole config of a job. A block is used if `component_placement` places its component."""

    cluster: ClusterConfig
    env: EnvConfig = knob(
        "kind: gymnasium | envpool | text | package.module:Class",
        by_job=ByJob(simulator=SimulatorEnvConfig, language_model=TextEnvConfig),
    )
    rollout: RolloutConfig = knob(
        "engine: torch | transformers | vllm",
        by_job=ByJob(simulator=TorchRolloutConfig, language_model=TextRolloutConfig),
    )
    actor: ActorConfig = block(ActorConfig)
    critic: CriticConfig = block(CriticConfig, only="language_model")
    reference: ReferenceConfig = block(ReferenceConfig, only="language_model")
    reward: RewardConfig | Mapping[str, RewardConfig] = lm_knob(
        "one block for all, or for components reward.<name> one block under each name",
        RewardConfig,
    )
    agent: AgentConfig = block(AgentConfig, only="language_model")
    algorithm: AlgorithmConfig = block(AlgorithmConfig)
    memory: MemoryConfig = block(MemoryConfig)
    runner: RunnerConfig = block(RunnerConfig)
    checkpoint: CheckpointConfig = block(CheckpointConfig)
    faults: FaultsConfig = block(FaultsConfig)
    resume: str | None = knob(
        "auto: go on with the newest checkpoint of this job; or the folder of a run or checkpoint",
        None,
    )
    resume_allow: tuple[str, ...] = knob(
        "keys that may differ from those of the run that is resumed", ()
    )
    profile: str | None = knob(
        "predict seconds from this profile.json (several: with commas); last: that of the newest run; published: rates",
        None,
    )
    dry_run: bool = knob("print the plan and stop", False)

    @property
    def job(self) -> JobName:
        """The name of the job that this config is for: "simulator" or "language_model"."""
        if isinstance(self.actor.model, PolicyConfig):
            return "simulator"
        return "language_model"

    @property
    def simulator_env(self) -> SimulatorEnvConfig:
        return _paired(self.env, SimulatorEnvConfig)

    @property
    def text_env(self) -> TextEnvConfig:
        return _paired(self.env, TextEnvConfig)

    @property
    def torch_rollout(self) -> TorchRolloutConfig:
        return _paired(self.rollout, TorchRolloutConfig)

    @property
    def text_rollout(self) -> TextRolloutConfig:
        return _paired(self.rollout, TextRolloutConfig)

    @property
    def model(self) -> ModelKeys | None:
        """The path and the config.json keys of the actor's language model; None if the config has none."""
        return self.actor.language_model

    @property
    def placed(self) -> tuple[str, ...]:
        """The names of the placed components."""
        keys = map(str, self.cluster.component_placement)
        return tuple(name.strip() for key in keys for name in key.split(","))

    @property
    def missing(self) -> Mapping[str, tuple[str, str]]:
        """The keys that a run needs and that are not given: key -> (why, fix). A plan does not need them."""
        return self.env.missing(self)

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
        )

    @property
    def skips_poison(self) -> bool:
        return self.faults.on_poison == "skip"

    @property
    def leaves_out(self) -> bool:
        """Whether a group may lack samples: those that failed, or that have numbers that are not finite."""
        return self.skips_poison or self.faults.on_error != "stop"

    @property
    def runs(self) -> bool:
        """Whether this config is meant to be run; otherwise it can only be planned.

        This is true for a config with all keys that a run needs. It is true for a config that trains a language model
        on prompts and lacks more than the model, so that the missing keys are reported.
        """
        asks = self.algorithm.name != "ppo" and (
            "env" in self.placed or self.text_env.task is not None
        )
        return not self.missing or (asks and [*self.missing] != ["actor.model"])

    @property
    def model_path(self) -> str:
        """The path of the folder of the actor's language model. Only for configs that can run."""
        path = (self.model or {}).get("path")
        assert isinstance(path, str), "checked before a run"
        return path

    def block_of(self, component: str) -> BlockConfig:
        """Return the config block of a component, such as `actor` or `reward.math`.

        If the block `reward` has a block for each reward, return that of the component's name; else return the block
        of its role.
        """
        role, _, name = component.partition(".")
        found: BlockConfig | Mapping[str, RewardConfig] = getattr(self, role)
        if isinstance(found, Mapping):
            return found.get(name, RewardConfig())
        return found

    def reward_of(self, component: str) -> RewardConfig:
        """Return the config block of the component `reward` or `reward.<name>`."""
        return _paired(self.block_of(component), RewardConfig)

    def key_of(self, component: str) -> str:
        """Return the key of the block that `block_of` returns for the component."""
        role = component.partition(".")[0]
        if isinstance(getattr(self, role), Mapping):
            return component
        return role
