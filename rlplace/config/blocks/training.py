"""Blocks of training, which both jobs have: trained models, their optimizer and syncs, and the algorithm."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from rlplace.config.blocks.engine import MOST_SAMPLES
from rlplace.config.blocks.policies import PolicyConfig
from rlplace.config.fields import ByJob, Dtype, block, knob, lm_knob, simulator_knob
from rlplace.config.own import OwnName

AlgorithmName = Literal[
    "ppo",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "dapo",
    "distill",
    "sft",
    "serve",
]
# loss aggregation: see algo.losses.token_weights
Mean = Literal["token", "sequence", "constant"]

# Path of a language model, and keys of its config.json.
ModelKeys = Mapping[str, object]

MOMENT_BLOCK = 256  # 8-bit moments per block that shares one scale
# A larger number of steps per iteration is a typing mistake.
MOST_STEPS = 10**7
# A larger number is a typing mistake. A plan with this number takes one second at most.
MOST_PROMPTS = 10**8
_ACTOR_MODEL = "of simulators kind: mlp | cnn | module; else path: a Hugging Face folder, or keys of its config.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The AdamW optimizer."""

    kind: Literal["adamw", "adamw_master", "adamw_8bit"] = lm_knob(
        "adamw | adamw_master: float32 copies of the weights | adamw_8bit: moments of 8 bits",
        "adamw",
    )
    lr: float = knob(
        "learning rate after the warm-up", 1e-6, above=0, maximum=1, simulator=3e-4
    )
    schedule: Literal["constant", "linear", "cosine"] = knob(
        "constant, or a learning rate that falls until the end of the run", "constant"
    )
    min_lr_ratio: float = knob(
        "learning rate at the end of the run, as a share of lr",
        0.0,
        minimum=0,
        maximum=1,
    )
    warmup_steps: int = lm_knob(
        "optimizer steps over which the rate rises from 0", 0, minimum=0
    )
    beta1: float = knob("Adam's first-moment decay", 0.9, minimum=0, below=1)
    beta2: float = knob("Adam's second-moment decay", 0.999, minimum=0, below=1)
    eps: float = knob(
        "number that Adam adds to its denominator", 1e-8, above=0, simulator=1e-5
    )
    weight_decay: float = knob(
        "decoupled weight decay, also of biases and log standard deviations",
        0.0,
        minimum=0,
    )
    max_grad_norm: float = knob(
        "largest norm of all gradients together; larger ones are clipped",
        1.0,
        above=0,
        simulator=0.5,
    )
    on_host: bool = lm_knob(
        "keep the optimizer's state in host memory and step there", False
    )

    def remaining(self, progress: float) -> float:
        """Return the share of `lr` that is left by the schedule, from 1 down to `min_lr_ratio`.

        `progress`: share of the run's iterations that are over, from 0 to 1.
        """
        decay = {
            "constant": 1.0,
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        }
        least = self.min_lr_ratio
        return least + (1.0 - least) * max(0.0, decay[self.schedule])

    def rate(self, progress: float) -> float:
        """Return the learning rate after the warm-up. `progress`: as in `remaining`."""
        return self.lr * self.remaining(progress)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """How rollout ranks get the actor's weights."""

    mode: Literal["all", "trainable", "lora", "adapter", "delta"] = knob(
        "what is sent: all | trainable, not what is frozen | lora, the factors alone | "
        "adapter, the factors, which engines do not merge | delta, what changed",
        "all",
    )
    verify_every: int = knob(
        "number of syncs after which the received weights are compared; 0: never",
        0,
        minimum=0,
    )
    verify: Literal["checksum", "logprobs"] = lm_knob(
        "checksum of the bytes that arrived | log-probabilities of the same tokens in actor and engine",
        "checksum",
    )
    through_host: bool | Literal["auto"] = knob(
        "send through host memory on GPUs too: slower, less memory; auto: if processes cannot share GPU memory",
        "auto",
    )

    @property
    def factors_apart(self) -> bool:
        """Whether LoRA factors are sent beside the frozen weights, and not merged into them."""
        return self.mode in ("lora", "adapter")


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
    weights: Dtype = lm_knob(
        "dtype of the stored weights; LoRA factors are fp32, weights beside them as compute",
        "fp32",
    )
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
    def trained_dtype(self) -> Dtype:
        """The dtype of the weights that the optimizer changes: `weights`, or float32 for LoRA factors.

        PEFT makes factors in float32, whatever the dtype of the frozen weights is.
        """
        if self.lora_rank is not None:
            return "fp32"
        return self.weights

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

    lora_adapter: str | None = lm_knob(
        "begin with the factors of this PEFT folder, which also gives rank, alpha and targets; null: new ones",
        None,
    )
    ema_decay: float | None = lm_knob(
        "decay of an average of the weights; null: none is kept", None, above=0, below=1
    )
    router_replay: bool = lm_knob(
        "mixtures of experts: learn with the experts that the engine chose for each token",
        False,
    )
    router_loss_coef: float = lm_knob(
        "mixtures of experts: weight of the loss that spreads tokens evenly over experts",
        0.0,
        minimum=0,
    )
    sync: SyncConfig = block(SyncConfig)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VariantConfig:
    """A custom class that replaces advantages, losses or metrics of the algorithm `algorithm.name`.

    `kwargs`: keyword arguments of the class, after the config of the algorithm.
    """

    name: OwnName | None = knob(
        "package.module:Class, whose methods replace the shipped formulas; null: none",
        None,
    )
    kwargs: Mapping[str, object] = knob(
        "arguments of the class, after the algorithm's config", dict
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """How samples are made and used for learning. Keys that only one kind of job has are refused in the other kind."""

    name: AlgorithmName = knob(
        "ppo: with a critic | distill: from a teacher | sft: written answers | serve: for clients | others: none",
        "ppo",
    )
    rollout_steps: int = simulator_knob(
        "T: steps each env takes per iteration", 64, minimum=1, maximum=MOST_STEPS
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
        "how far above 1 the policy ratio may go; null: as clip_ratio_low, for dapo 0.28",
        None,
        above=0,
    )
    ratio: Literal["token", "sequence", "sequence_token"] = lm_knob(
        "which ratio is clipped: token | sequence (GSPO) | sequence_token (GSPO-token)",
        "token",
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
    dynamic_sampling_by: str | None = lm_knob(
        "the reward whose equal values count there; null: the weighted sum of all", None
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
    gae_lambda: float = knob(
        "lambda of GAE: lower values mean less variance and more bias",
        0.95,
        minimum=0,
        maximum=1,
    )
    value_clip: float | None = knob(
        "largest change of a value in an iteration, as in PPO; null: none",
        0.2,
        above=0,
        simulator=None,
    )
    value_coef: float = knob(
        "weight of the value loss, if policy and value share a model",
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
        "divide rewards by their running deviation; for language models, also subtract the running mean",
        False,
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
