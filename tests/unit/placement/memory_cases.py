"""The jobs that tests of the memory proof ask about: RLHF with PPO on real model sizes, and today's MLP job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlplace.config.blocks.language_model import FrozenConfig, TextRolloutConfig
from rlplace.config.blocks.training import OptimizerConfig, TrainedConfig
from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.contract.planning import make_plan, memory_case
from rlplace.placement import HybridComponentPlacement, Plan, Topology
from rlplace.placement.memory.demands import (
    Demand,
    EngineDemand,
    HostPart,
    Part,
    ScoringDemand,
    TrainingDemand,
)
from rlplace.placement.memory.ledger import Account, Load, MemoryCase
from rlplace.placement.memory.model import Head, read_model
from rlplace.placement.schedule import text_needs

GIB = 1 << 30
COMPONENTS = ("actor", "critic", "reference", "reward", "rollout")
RLHF = text_needs(COMPONENTS)
SIZES: Mapping[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}


def llama_3(size: str) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "num_key_value_heads": 8,
        **SIZES[size],
    }


def rlhf_demands(
    size: str, *, micro_batch: int = 4, sequence_length: int = 2048, **training: Any
) -> dict[str, Demand]:
    language, score = (
        read_model(llama_3(size)),
        read_model(llama_3(size), head=Head.SCORE),
    )
    learner, frozen = (
        TrainedConfig(micro_batch=micro_batch, **training),
        FrozenConfig(micro_batch=micro_batch),
    )
    return {
        "actor": TrainingDemand(
            model=language, block=learner, sequence_length=sequence_length
        ),
        "critic": TrainingDemand(
            model=score, block=learner, sequence_length=sequence_length
        ),
        "reference": ScoringDemand(
            model=language, block=frozen, sequence_length=sequence_length
        ),
        "reward": ScoringDemand(
            model=score, block=frozen, sequence_length=sequence_length
        ),
        "rollout": EngineDemand(
            model=language, block=TextRolloutConfig(), sequence_length=sequence_length
        ),
    }


def rlhf(
    placement: Mapping[str, object],
    topology: Topology,
    demands: Mapping[str, Demand],
    *,
    offload: bool = True,
) -> MemoryCase:
    return MemoryCase(
        placement=HybridComponentPlacement(
            {"component_placement": placement}, topology
        ),
        needs=RLHF,
        offload=dict.fromkeys(placement, offload),
        demands=demands,
    )


def colocated_8b(*, offload: bool = True, **demands: Any) -> MemoryCase:
    """Everything of a Llama-3-8B job on 8 x 80 GiB."""
    everywhere = dict.fromkeys(COMPONENTS, "0-7")
    return rlhf(
        everywhere,
        Topology.uniform(1, 8, "cuda", 80 * GIB),
        rlhf_demands("8b", **demands),
        offload=offload,
    )


def with_host_memory(case: MemoryCase, size_bytes: int) -> MemoryCase:
    placement = case.placement
    nodes = tuple(
        dataclasses.replace(n, host_memory_bytes=size_bytes)
        for n in placement.topology.nodes
    )
    block = {c: placement.spec(c).render() for c in placement.components}
    known = HybridComponentPlacement({"component_placement": block}, Topology(nodes))
    return dataclasses.replace(case, placement=known)


def spread_70b(*, on_host: bool = False) -> MemoryCase:
    """Actor 16, critic 16, reward 8, reference 8 of 48 x 80 GiB; 4 engines of 4 accelerators on the actor's."""
    placement = {
        "actor": "0-15",
        "critic": "16-31",
        "reward": "32-39",
        "reference": "40-47",
        "rollout": "0-15:0-3",
    }
    optimizer = OptimizerConfig(kind="adamw_master", on_host=on_host)
    demands = rlhf_demands("70b", micro_batch=1, weights="bf16", optimizer=optimizer)
    return rlhf(placement, Topology.uniform(6, 8, "cuda", 80 * GIB), demands)


def at(account: Account, moment: str) -> Load:
    (load,) = [load for load in account.loads if str(load.moment) == moment]
    return load


def held(load: Load, component: str, part: Part | HostPart) -> int:
    return sum(
        h.size_bytes for h in load.holds if (h.component, h.part) == (component, part)
    )


def trained(case: MemoryCase, component: str = "actor") -> TrainedConfig:
    demand = case.demands[component]
    assert isinstance(demand, TrainingDemand)
    return demand.block


def engine(case: MemoryCase) -> TextRolloutConfig:
    demand = case.demands["rollout"]
    assert isinstance(demand, EngineDemand)
    return demand.block


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Discrete:
    n: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Continuous:
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spaces:
    """As `rlplace.envs.contract`, which a test of placement does not need."""

    observation_shape: tuple[int, ...]
    actions: Discrete | Continuous
    observation_dtype: str = "float32"
    parts: tuple[Any, ...] = ()
    numbers: int = 0
    memory: int = 0


PENDULUM = Spaces(observation_shape=(4,), actions=Continuous(shape=(1,)))


def ppo(
    placement: Mapping[str, object] | None = None,
    *,
    topology: Topology | None = None,
    offload: bool = True,
    envs: int = 64,
    memory: int = 16 * GIB,
    kind: str = "emulated",
    **cluster: Any,
) -> tuple[Plan, Config]:
    """Today's hybrid job, on eight accelerators unless `topology` is given."""
    placed = placement or {"actor": "0-7", "env": "0-3", "rollout": "4-7"}
    config = read_config(
        {
            "cluster": {"component_placement": placed, **cluster},
            "env": {
                "id": "x",
                "total_num_envs": envs,
                "enable_offload": offload,
                "accelerator_memory": "256MiB",
            },
            "rollout": {
                "pipeline_stage_num": 2,
                "enable_offload": offload,
                "workspace_memory": "64MiB",
            },
            "actor": {"enable_offload": offload},
        }
    )
    return make_plan(config, topology or Topology.uniform(1, 8, kind, memory)), config


def ppo_case(
    placement: Mapping[str, object] | None = None, **options: Any
) -> MemoryCase:
    plan, config = ppo(placement, **options)
    return memory_case(plan, config, PENDULUM)
