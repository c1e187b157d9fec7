"""From the config of a language model that learns, the actor's or a critic's, to how it is built and stepped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.errors import Problem

if TYPE_CHECKING:  # the driver imports this module too: torch waits for setup
    from rlplace.config import TrainedConfig
    from rlplace.models.causal_lm import LmSpec
    from rlplace.workers.training.optimizer import Adam
    from rlplace.workers.training.sharded_lm import ShardedLm


def spec_of(component: str, trained: TrainedConfig, folder: Path, seed: int) -> LmSpec:
    """`seed`: of the weights that the folder does not have."""
    from rlplace.models.causal_lm import LmSpec
    from rlplace.models.lora import LoraSpec

    lora = None
    if trained.lora_rank is not None:
        key = f"{component}.lora_targets"
        lora = LoraSpec(rank=trained.lora_rank, alpha=trained.lora_alpha, targets=trained.lora_targets, key=key)
    return LmSpec(
        folder=folder,
        weights=trained.weights,
        compute=trained.compute,
        checkpointing=trained.checkpointing,
        gather_again=trained.zero_stage == 3,
        lora=lora,
        seed=seed,
        key=f"{component if path_of(trained) is not None else 'actor'}.model.path",
    )


def path_of(trained: TrainedConfig) -> str | None:
    """The folder of its own model; None: that of the job."""
    path = (trained.language_model or {}).get("path")
    return None if path is None else str(path)


def optimizer_of(trained: TrainedConfig, lm: ShardedLm) -> Adam:
    from rlplace.workers.training.optimizer import Adam, HostAdam, MasterAdam

    masters = trained.optimizer.kind == "adamw_master"
    kind = HostAdam if trained.optimizer.on_host else MasterAdam if masters else Adam
    return kind(lm.trained_shards(), trained.optimizer)


def not_run(component: str, trained: TrainedConfig) -> list[Problem]:
    """What a plan may say of a model that learns and a run does not do; to be asked before launch."""
    wanted = {
        "optimizer.kind": (trained.optimizer.kind, ("adamw", "adamw_master"), "a run steps with AdamW in float32"),
        "weights": (trained.weights, ("fp32", "bf16"), "float16 needs its losses scaled, which a run does not do"),
        "compute": (trained.compute, ("fp32", "bf16"), "float16 needs its losses scaled, which a run does not do"),
        "zero_stage": (trained.zero_stage, (2, 3), "a run shards gradients and optimizer over all ranks of the model"),
    }
    return [
        Problem(
            code="plan-only",
            key=f"{component}.{key}",
            what="is planned, not run",
            got=f"{key.rpartition('.')[2]}: {value}",
            why=why,
            fix=" or ".join(f"{key.rpartition('.')[2]}: {choice}" for choice in choices),
        )
        for key, (value, choices, why) in wanted.items()
        if value not in choices
    ]
