"""What the configs of both shipped jobs have; the config of each, with blocks of its own, is in `config.blocks`."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rlplace.config.blocks.engine import (
    CheckpointConfig,
    FaultsConfig,
    MemoryConfig,
    RunnerConfig,
)
from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.blocks.training import ActorConfig, AlgorithmConfig
from rlplace.config.fields import JobName, block, knob


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config(abc.ABC):
    """The whole config of a job. A block is used if `component_placement` places its component."""

    job: ClassVar[JobName]  # name of the job that such a config is for

    cluster: ClusterConfig
    # Each job has a block of its own here.
    env: Any
    rollout: Any
    actor: ActorConfig = block(ActorConfig)
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
    def run_by(self) -> str:
        """The name of the shipped job, in `contract.registry`, that runs such a config."""
        return self.job

    @property
    def placed(self) -> tuple[str, ...]:
        """The names of the placed components."""
        keys = map(str, self.cluster.component_placement)
        return tuple(name.strip() for key in keys for name in key.split(","))

    @property
    def skips_poison(self) -> bool:
        return self.faults.on_poison == "skip"

    @property
    @abc.abstractmethod
    def missing(self) -> Mapping[str, tuple[str, str]]:
        """The keys that a run needs and that are not given: key -> (why, fix). A plan does not need them."""

    @property
    def runs(self) -> bool:
        """Whether this config is meant to be run; otherwise it can only be planned."""
        return not self.missing

    def block_of(self, component: str) -> Any:
        """Return the config block of a component, such as `actor` or `reward.math`: that of its role."""
        return getattr(self, component.partition(".")[0])

    def key_of(self, component: str) -> str:
        """Return the key of the block that `block_of` returns for the component."""
        return component.partition(".")[0]
