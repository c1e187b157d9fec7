"""The config of a job on simulators, and its own blocks: the simulators, and the rollout of a policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from rlplace.config.blocks.training import ActorConfig
from rlplace.config.fields import JobName, knob
from rlplace.config.schema import Config

# A larger number is a typing mistake. A plan with this number takes one second at most.
MOST_GROUPS = 1_024
# A larger number of environments is a typing mistake.
MOST_ENVS = 10**7
# Most environments that an evaluation steps side by side
MOST_PLAYED = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrapperConfig:
    """A Gymnasium wrapper around the simulator.

    `kwargs`: keyword arguments of the class, after the simulator.
    """

    name: str = knob(
        "package.module:Class, such as gymnasium.wrappers:GrayscaleObservation",
        module="gymnasium.wrappers",
    )
    kwargs: Mapping[str, object] = knob(
        "arguments of the wrapper, after the simulator; lists become tuples", dict
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorEnvConfig:
    """Simulators of Gymnasium, EnvPool or PettingZoo, or of a custom adapter."""

    kind: str = knob(
        "gymnasium, envpool, pettingzoo, or package.module:Class of your own adapter",
        "gymnasium",
    )
    id: str = knob(
        "simulator id, or package.module:function that creates one; not needed for a plan",
        "",
    )
    total_num_envs: int = knob(
        "environments over all env ranks", 64, minimum=1, maximum=MOST_ENVS
    )
    max_episode_steps: int | None = knob(
        "largest number of steps of an episode; null: the simulator's own limit",
        None,
        minimum=1,
    )
    kwargs: Mapping[str, object] = knob("arguments of the simulator", dict)
    wrappers: tuple[WrapperConfig, ...] = knob(
        "wrappers of Gymnasium around each simulator, the innermost first", ()
    )
    eval_seed: int = knob(
        "seed of the episodes of evaluations; independent of runner.seed",
        0,
        minimum=0,
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
        "bytes that a rank needs while generating, in addition to its weights",
        0,
        unit="bytes",
    )
    group_name: str | None = knob(
        "name of the worker group in a loop by hand; null: the component's", None
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorJobConfig(Config):
    """The whole config of a job on simulators."""

    job: ClassVar[JobName] = "simulator"

    env: SimulatorEnvConfig = knob(
        "kind: gymnasium | envpool | pettingzoo | package.module:Class"
    )
    rollout: TorchRolloutConfig = knob("engine: torch")
    init_from: str | None = knob(
        "start with the weights of another policy: the folder of a run, a checkpoint or an export",
        None,
    )

    @property
    def missing(self) -> Mapping[str, tuple[str, str]]:
        if self.env.id:
            return {}
        return {"env.id": ("the simulator that env steps", "id: InvertedPendulum-v5")}

    def evaluation_memory(self, env_ranks: int) -> int:
        """Return the bytes that the simulators of an evaluation hold on the accelerators of rollout rank 0.

        They have the bytes of an env rank, or more if there are more of them than environments on an env rank.
        `env_ranks`: number of env ranks in training. The result is 0 if the run does not evaluate.
        """
        if not self.runner.eval_every:
            return 0
        declared = self.env.accelerator_memory
        played = min(self.runner.eval_episodes, MOST_PLAYED)
        rows = max(1, self.env.total_num_envs // env_ranks)
        return max(declared, -(-declared * played // rows))

    def block_of(
        self, component: str
    ) -> SimulatorEnvConfig | TorchRolloutConfig | ActorConfig:
        block: SimulatorEnvConfig | TorchRolloutConfig | ActorConfig = getattr(
            self, component
        )
        return block
