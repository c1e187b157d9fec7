"""rlplace: declarative placement for reinforcement learning.

The names in `__all__` are the public ones; each is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplace.api.callables import PlanModule, SearchModule, TrainModule
    from rlplace.api.run import Run, load_run
    from rlplace.cli.own_job import run
    from rlplace.comm.channel import ChannelSpec
    from rlplace.config.blocks.machines import AcceleratorConfig
    from rlplace.contract.job import Job
    from rlplace.contract.stages import (
        Channel,
        Stage,
        full,
        loaded,
        on_host,
        weights,
    )
    from rlplace.errors import (
        ChannelBroken,
        ChannelClosed,
        ChannelTimeout,
        EndOfStream,
        RlplaceError,
        WorkerError,
        WorkerTimeout,
    )
    from rlplace.metrics import Metric, reduce_metrics
    from rlplace.models.policy import Policy
    from rlplace.placement.language.hybrid import HybridComponentPlacement
    from rlplace.placement.language.slots import (
        FlexiblePlacementStrategy,
        NodePlacementStrategy,
        PackedPlacementStrategy,
    )
    from rlplace.placement.schedule import Residency
    from rlplace.runtime.by_hand import (
        Critic,
        FSDPActor,
        Reference,
        Reward,
        Rollout,
        SimulatorEnv,
        TextEnv,
        TransformersRollout,
        VLLMRollout,
    )
    from rlplace.workers.engines.generation import GenerationEngine
    from rlplace.workers.facts import JobFacts, facts_of
    from rlplace.workers.launch.cluster import Cluster
    from rlplace.workers.launch.group import WorkerGroup, wait_all
    from rlplace.workers.worker import MoveReport, Worker, WorkerContext

    plan: PlanModule
    search: SearchModule
    train: TrainModule

__version__ = "0.2.0"

__all__ = [
    "AcceleratorConfig",
    "Channel",
    "ChannelBroken",
    "ChannelClosed",
    "ChannelSpec",
    "ChannelTimeout",
    "Cluster",
    "Critic",
    "EndOfStream",
    "FSDPActor",
    "FlexiblePlacementStrategy",
    "GenerationEngine",
    "HybridComponentPlacement",
    "Job",
    "JobFacts",
    "Metric",
    "MoveReport",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "Reference",
    "Residency",
    "Reward",
    "RlplaceError",
    "Rollout",
    "Run",
    "SimulatorEnv",
    "Stage",
    "TextEnv",
    "TransformersRollout",
    "VLLMRollout",
    "Worker",
    "WorkerContext",
    "WorkerError",
    "WorkerGroup",
    "WorkerTimeout",
    "facts_of",
    "full",
    "load_policy",
    "load_run",
    "loaded",
    "on_host",
    "plan",
    "reduce_metrics",
    "run",
    "search",
    "train",
    "wait_all",
    "weights",
]

# The module of each public name that is not defined here.
_MODULES = {
    "rlplace.api.run": ("Run", "load_run"),
    "rlplace.cli.own_job": ("run",),
    "rlplace.contract.job": ("Job",),
    "rlplace.contract.stages": (
        "Channel",
        "Stage",
        "full",
        "loaded",
        "on_host",
        "weights",
    ),
    "rlplace.comm.channel": ("ChannelSpec",),
    "rlplace.config.blocks.machines": ("AcceleratorConfig",),
    "rlplace.errors": (
        "ChannelBroken",
        "ChannelClosed",
        "ChannelTimeout",
        "EndOfStream",
        "RlplaceError",
        "WorkerError",
        "WorkerTimeout",
    ),
    "rlplace.metrics": ("Metric", "reduce_metrics"),
    "rlplace.placement.language.hybrid": ("HybridComponentPlacement",),
    "rlplace.placement.language.slots": (
        "FlexiblePlacementStrategy",
        "NodePlacementStrategy",
        "PackedPlacementStrategy",
    ),
    "rlplace.placement.schedule": ("Residency",),
    "rlplace.workers.engines.generation": ("GenerationEngine",),
    "rlplace.workers.facts": ("JobFacts", "facts_of"),
    "rlplace.runtime.by_hand": (
        "Critic",
        "FSDPActor",
        "Reference",
        "Reward",
        "Rollout",
        "SimulatorEnv",
        "TextEnv",
        "TransformersRollout",
        "VLLMRollout",
    ),
    "rlplace.workers.launch.cluster": ("Cluster",),
    "rlplace.workers.launch.group": ("WorkerGroup", "wait_all"),
    "rlplace.workers.worker": ("MoveReport", "Worker", "WorkerContext"),
}


# Modules of this package that are functions as well.
_CALLED = ("plan", "search", "train")


def __getattr__(name: str) -> Any:
    """Return the class or function of this package with the public name `name`, and import its module if necessary.

    Python calls this function for names that the package module itself does not define.
    """
    if name in _CALLED:
        return importlib.import_module(f"rlplace.{name}")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_policy(path: str | Path, *, seed: int = 0) -> Policy:
    """Return a trained simulator policy. Its method `act(observations)` returns the actions.

    `path`: folder of a run, of a checkpoint or of an export. `seed`: seed for sampled actions
    (`deterministic=False`). The function imports torch, and creates the simulator once to read its spaces. Raises
    ConfigError.
    """
    from rlplace.contract.trained import load_policy as load

    policy: Policy = load(path, seed=seed)
    return policy
