"""The config of a job as frozen dataclasses, made once from a mapping; below this nothing reads a raw config.

Every field carries its meaning in `doc`; the same text is the comment in the shipped YAML files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from rlplace.config.fields import ModelKind, block, knob, lm_knob, mlp_knob
from rlplace.config.roles import (
    ActorConfig,
    AgentConfig,
    CriticConfig,
    FrozenConfig,
    MlpConfig,
    ModelKeys,
    ReferenceConfig,
    RewardConfig,
    SimulatorEnvConfig,
    TextEnvConfig,
    TextRolloutConfig,
    TorchRolloutConfig,
    TrainedConfig,
)

AlgorithmName = Literal["ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo"]
Mean = Literal["token", "sequence", "constant"]  # of algo.losses.MEANS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorConfig:
    kind: Literal["auto", "cuda", "emulated"] = knob("auto takes the GPUs of this machine, else emulates", "auto")
    memory: int = knob("bytes of one emulated accelerator; a GPU has what it has", 16 << 30, unit="bytes")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    address: str | None = knob("null starts Ray here; auto or host:port joins a running cluster", None)
    start_timeout_s: float = knob("longest wait for Ray and for all workers to answer", 120.0, above=0)
    reserve_timeout_s: float = knob("longest wait for the cluster to have the accelerators free", 60.0, above=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommConfig:
    """Where channels and weights lie and travel."""

    shm_folder: str | None = knob("folder of shared memory, on every node; null: /dev/shm", None)
    interface: str | None = knob("address or interface that other nodes talk to; null: the node's Ray address", None)
    security: Literal["encrypted", "password"] = knob(
        "between nodes; password keeps strangers out and hides nothing: for a network that only the cluster uses",
        "encrypted",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorRunConfig:
    """Some of the accelerators of a node whose accelerators differ."""

    count: int = knob("how many, one after the other", minimum=1)
    product: str = knob("what they are sold as, such as H100", "")
    memory: int = knob("bytes of one; 0: not known", 0, unit="bytes")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Machines that are all alike, as declared."""

    count: int = knob("how many machines", 1, minimum=1)
    rank: int | None = knob("node rank of the first; null: they are numbered as written", None, minimum=0)
    host: str = knob("name or address; with a count above 1, of the first", "")
    accelerators: int = knob("accelerators of one machine", 0, minimum=0)
    product: str = knob("what the accelerators are sold as, such as H100", "")
    memory: int = knob("bytes of one accelerator; 0: not known", 0, unit="bytes")
    mixed: tuple[AcceleratorRunConfig, ...] = knob("instead, where the accelerators of a machine differ", ())
    host_memory: int = knob("bytes of the machine's own memory; 0: not known", 0, unit="bytes")
    nvlink_gb_per_s: float = knob("between two accelerators of the machine, each way; 0: not known", 0.0, minimum=0)
    pcie_gb_per_s: float = knob("between an accelerator and the machine's memory; 0: not known", 0.0, minimum=0)
    network_gb_per_s: float = knob("to other machines, for each accelerator; 0: not known", 0.0, minimum=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    component_placement: Mapping[str, object] = knob("which accelerators each component uses; kept verbatim")
    nodes: tuple[NodeConfig, ...] = knob("the machines one by one, where they are declared; else alike", ())
    node_groups: tuple[Mapping[str, object], ...] = knob("labelled nodes, hardware and environments; verbatim", ())
    num_nodes: int = knob("machines in the cluster", 1, minimum=1)
    accelerators_per_node: int | Literal["auto"] = knob("auto counts the GPUs of this machine", "auto", minimum=1)
    accelerator: AcceleratorConfig = block(AcceleratorConfig)
    allow_resident: tuple[str, ...] = knob("components that may stay on accelerators others use", ())
    launcher: Literal["ray", "inline"] = knob("ray: processes; inline: threads of this process, for debugging", "ray")
    ray: RayConfig = block(RayConfig)
    comm: CommConfig = block(CommConfig)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """How samples are made and learned from. Keys of one kind of actor model are refused with the other."""

    name: AlgorithmName = knob("ppo: with a critic | the others, of language models: without", "ppo")
    rollout_steps: int = mlp_knob("T: steps each env takes per iteration", 64, minimum=1)
    sequence_length: int | None = lm_knob("longest prompt and answer, in tokens; null: both limits", None, minimum=1)
    max_prompt_length: int = lm_knob("longest prompt, in tokens", 1024, minimum=1)
    max_new_tokens: int = lm_knob("longest answer, in tokens", 1024, minimum=1)
    prompts: int | None = lm_knob("prompts of an iteration; null, in a plan: batches are not checked", None, minimum=1)
    samples_per_prompt: int = lm_knob("answers to each prompt", 1, minimum=1)
    train_batch: int | None = lm_knob("samples of one optimizer step; null: all", None, minimum=1)
    epochs: int = knob("passes over each iteration's samples", 1, minimum=1, mlp=10)
    num_minibatches: int = mlp_knob("optimizer steps per pass", 4, minimum=1)
    clip_ratio_low: float = knob("how far below 1 the policy ratio may go", 0.2, above=0, below=1)
    clip_ratio_high: float | None = knob("how far above 1; null: as low, with dapo 0.28", None, above=0)
    ratio: Literal["token", "sequence"] = lm_knob(
        "whose ratio is clipped: each token's or (GSPO) the sequence's", "token"
    )
    loss: Mean | None = lm_knob("whose mean the loss is; null: as the algorithm has it", None)
    entropy_coef: float = knob("weight of the entropy bonus", 0.0, minimum=0)
    tis_cap: float | None = lm_knob("cap of the weights that correct the engine's rounding; null: none", 2.0, above=0)
    dynamic_sampling: bool | None = lm_knob("learn only from prompts with mixed rewards; null: with dapo", None)
    gamma: float = knob("discount per step or learned token", 1.0, minimum=0, maximum=1, mlp=0.99)
    gae_lambda: float = knob("GAE's bias/variance exchange", 0.95, minimum=0, maximum=1)
    value_clip: float | None = knob("clip of the value change; null: none", 0.2, above=0, mlp=None)
    value_coef: float = knob(
        "weight of the value loss beside the policy's, where they share a model", 0.1, minimum=0, mlp=0.5
    )
    kl_coef: float = lm_knob("weight of the KL from the reference; with kl_target the first one", 0.0, minimum=0)
    kl_in: Literal["reward", "loss"] = lm_knob("each token's KL lowers its reward, or is added to the loss", "reward")
    kl_estimator: Literal["k1", "k2", "k3"] = lm_knob(
        "of the KL: k1 log ratio, k2 its half square, k3 unbiased, >= 0", "k1"
    )
    kl_target: float | None = lm_knob("kl_coef adapts until the KL is this; null: it is constant", None, above=0)
    kl_horizon: int = lm_knob("samples over which kl_coef adapts", 10_000, minimum=1)
    target_kl: float | None = mlp_knob("end the iteration's updates above this KL; null: never", None, above=0)
    reward_clip: float | None = lm_knob("a sample's score is kept within +- this; null: as it is", None, above=0)
    normalize_rewards: bool = knob("by their running deviation; scores of text by the running mean too", False)
    normalize_advantages: bool | None = knob("zero mean, unit variance over the iteration; null: with ppo", None)
    normalize_observations: bool = mlp_knob("by running mean and variance, kept with the weights", True)
    max_staleness: int = lm_knob("versions by which samples may be older than what learns from them", 0, minimum=0)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return self.sequence_length or self.max_prompt_length + self.max_new_tokens

    @property
    def clip_high(self) -> float:
        return self.clip_ratio_high or (0.28 if self.name == "dapo" else self.clip_ratio_low)

    @property
    def mean(self) -> Mean:
        """Of token losses. As the papers have it: algo/losses.py cites them."""
        means: Mapping[str, Mean] = {"grpo": "sequence", "rloo": "sequence", "dr_grpo": "constant"}
        return self.loss or means.get(self.name, "token")

    @property
    def mixed_only(self) -> bool:
        """Whether groups whose rewards are all equal are left out."""
        return self.name == "dapo" if self.dynamic_sampling is None else self.dynamic_sampling

    @property
    def advantages_normalized(self) -> bool:
        return self.name == "ppo" if self.normalize_advantages is None else self.normalize_advantages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """When a run ends, where its files go, how long anything may take."""

    total_iterations: int = knob("end of training", 100, minimum=1)
    stop_at_return: float | None = knob("stop earlier once the mean return or reward reaches this", None)
    eval_every: int = lm_knob(
        "iterations between passes over held-out prompts, before the first too; 0: none", 0, minimum=0
    )
    eval_prompts: int = lm_knob("held-out prompts of one pass, each answered once, greedily", 64, minimum=1)
    seed: int = knob("seed of everything random; engines have rollout.seed", 0, minimum=0)
    output_dir: str = knob("each run makes its own folder in here", "runs")
    sinks: tuple[Literal["console", "jsonl", "tensorboard"], ...] = knob(
        "where metrics go", ("console", "jsonl", "tensorboard")
    )
    stage_timeout_s: float = knob("longest time one stage may take", 3600.0, above=0, mlp=600.0)
    channel_timeout_s: float = knob("longest wait for one item of a channel", 1800.0, above=0, mlp=120.0)
    watchdog_s: float = knob(
        "report which component waits for which when nothing moves for so long; 0: never", 300.0, minimum=0, mlp=30.0
    )


EnvConfig = SimulatorEnvConfig | TextEnvConfig
RolloutConfig = TorchRolloutConfig | TextRolloutConfig
BlockConfig = TrainedConfig | FrozenConfig | TextRolloutConfig | TorchRolloutConfig | AgentConfig | SimulatorEnvConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a job is made from. A block counts where `component_placement` places its component."""

    cluster: ClusterConfig
    env: EnvConfig = knob(
        "kind: gymnasium | text | package.module:Class",
        by_kind={"mlp": SimulatorEnvConfig, "causal_lm": TextEnvConfig},
    )
    rollout: RolloutConfig = knob(
        "engine: torch | transformers | vllm",
        by_kind={"mlp": TorchRolloutConfig, "causal_lm": TextRolloutConfig},
    )
    actor: ActorConfig = block(ActorConfig)
    critic: CriticConfig = block(CriticConfig, only="causal_lm")
    reference: ReferenceConfig = block(ReferenceConfig, only="causal_lm")
    reward: RewardConfig | Mapping[str, RewardConfig] = lm_knob(
        "one block for all, or for components reward.<name> one block under each name", RewardConfig
    )
    agent: AgentConfig = block(AgentConfig, only="causal_lm")
    algorithm: AlgorithmConfig = block(AlgorithmConfig)
    runner: RunnerConfig = block(RunnerConfig)
    dry_run: bool = knob("print the plan and stop", False)

    @property
    def kind(self) -> ModelKind:
        """What the actor trains."""
        return "mlp" if isinstance(self.actor.model, MlpConfig) else "causal_lm"

    @property
    def simulator_env(self) -> SimulatorEnvConfig:
        """`env` of a job with kind mlp."""
        assert isinstance(self.env, SimulatorEnvConfig), "the reader pairs kinds"
        return self.env

    @property
    def text_env(self) -> TextEnvConfig:
        """`env` of a job with kind causal_lm."""
        assert isinstance(self.env, TextEnvConfig), "the reader pairs kinds"
        return self.env

    @property
    def torch_rollout(self) -> TorchRolloutConfig:
        """`rollout` of a job with kind mlp."""
        assert isinstance(self.rollout, TorchRolloutConfig), "the reader pairs kinds"
        return self.rollout

    @property
    def text_rollout(self) -> TextRolloutConfig:
        """`rollout` of a job with kind causal_lm."""
        assert isinstance(self.rollout, TextRolloutConfig), "the reader pairs kinds"
        return self.rollout

    @property
    def model(self) -> ModelKeys | None:
        """Path and keys of the language model that the actor trains; None where none is declared."""
        return self.actor.language_model

    @property
    def placed(self) -> tuple[str, ...]:
        """The placed components, as they are written."""
        keys = map(str, self.cluster.component_placement)
        return tuple(name.strip() for key in keys for name in key.split(","))

    @property
    def missing(self) -> Mapping[str, tuple[str, str]]:
        """Keys that a run needs and this config lacks -> why, what to write. A plan can do without."""
        if self.kind == "mlp":
            return {}
        found = {
            "algorithm.prompts": (self.algorithm.prompts, "prompts of an iteration", "prompts: 32"),
            "env.task": (self.text_env.task, "the task has the prompts and the rewards", "task: arithmetic"),
            "actor.model": (self.model, "what is trained", "model: {kind: causal_lm, path: <a Hugging Face folder>}"),
        }
        missing = {key: (why, fix) for key, (value, why, fix) in found.items() if value is None}
        if "env" not in self.placed:
            missing["cluster.component_placement.env"] = ("env asks the prompts and computes the rewards", "env: cpu")
        return missing

    @property
    def actor_infers(self) -> bool:
        """Whether the actor computes log-probabilities of samples before it learns, in a stage of its own."""
        algorithm = self.algorithm
        penalised = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
        return algorithm.name == "ppo" or penalised or self.reference.share_actor or self.critic.on_actor

    @property
    def runs(self) -> bool:
        """Whether it has all that a run needs, or must have it to be read; else it is planned only."""
        asks = self.kind == "mlp" or "env" in self.placed or self.text_env.task is not None
        return not self.missing or (asks and self.algorithm.name != "ppo")

    @property
    def model_path(self) -> str:
        """The model's folder; a run has one."""
        path = (self.model or {}).get("path")
        assert isinstance(path, str), "checked before a run"
        return path

    def block_of(self, component: str) -> BlockConfig:
        """The block of a component's role, or under its own name where rewards have one block each."""
        role, _, name = component.partition(".")
        found: BlockConfig | Mapping[str, RewardConfig] = getattr(self, role)
        return found.get(name, RewardConfig()) if isinstance(found, Mapping) else found

    def reward_of(self, component: str) -> RewardConfig:
        """The block of `reward` or `reward.<name>`."""
        found = self.block_of(component)
        assert isinstance(found, RewardConfig), component
        return found

    def key_of(self, component: str) -> str:
        """The key of its block."""
        role = component.partition(".")[0]
        return component if isinstance(getattr(self, role), Mapping) else role
