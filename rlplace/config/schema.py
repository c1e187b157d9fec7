"""The config of a shipped job as one frozen dataclass, built once from a mapping; its blocks are in `config.blocks`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from rlplace.config.blocks.engine import (
    CheckpointConfig,
    FaultsConfig,
    MemoryConfig,
    RunnerConfig,
)
from rlplace.config.blocks.language_model import (
    AgentConfig,
    CriticConfig,
    FrozenConfig,
    ReferenceConfig,
    RewardConfig,
    TextEnvConfig,
    TextRolloutConfig,
)
from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.blocks.policies import PolicyConfig
from rlplace.config.blocks.simulator import SimulatorEnvConfig, TorchRolloutConfig
from rlplace.config.blocks.training import (
    ActorConfig,
    AlgorithmConfig,
    ModelKeys,
    TrainedConfig,
)
from rlplace.config.fields import ByJob, JobName, block, knob, lm_knob

_Block = TypeVar("_Block")


def _paired(block: object, kind: type[_Block]) -> _Block:
    """Return `block`. Assert that it has the type `kind`, which `read_config` ensures."""
    assert isinstance(block, kind), block
    return block


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
