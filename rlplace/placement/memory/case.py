"""What each component of a plan asks of memory, by its config: one table for simulators and language models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlplace.config.schema import (
    ActorConfig,
    AgentConfig,
    Config,
    FrozenConfig,
    ReferenceConfig,
    RewardConfig,
    SimulatorEnvConfig,
    TextRolloutConfig,
    TorchRolloutConfig,
    TrainedConfig,
)
from rlplace.errors import ConfigError, Problem
from rlplace.placement.language.spec import role_of
from rlplace.placement.memory.demands import (
    DeviceSync,
    EngineDemand,
    PolicyRolloutDemand,
    PolicyShape,
    PolicySpaces,
    PolicyTrainingDemand,
    ScoringDemand,
    SimulatorDemand,
    TrainingDemand,
    policy_shape,
)
from rlplace.placement.memory.footprint import Demand
from rlplace.placement.memory.formulas import DTYPE_BYTES
from rlplace.placement.memory.ledger import Measurements, MemoryCase
from rlplace.placement.memory.model import Head, ModelShape, read_model
from rlplace.placement.memory.shared import SharedMemory, count_shared, simulator_items, text_items
from rlplace.placement.memory.solve import fill_share

if TYPE_CHECKING:
    from rlplace.placement.plan import Plan

_NO_SPACES = "the simulator's shapes are not known: the policy's weights are not counted, nor large items"
_NO_MODEL = "the model is not known: its memory is not counted"


def memory_case(
    plan: Plan, config: Config, spaces: PolicySpaces | None = None, measured: Measurements | None = None
) -> MemoryCase:
    """The plan with the demands of its components; `ledger()` of it is what a run holds.

    `spaces` are the simulator's shapes: without them a policy's weights cannot be counted, and the ledger notes it.
    Raises ConfigError for a model that cannot be read, PlacementError for `gpu_memory_utilization: auto` where no
    memory is known.
    """
    components, policy = plan.placement.components, PolicyShape(weights=(), buffer_bytes=0)
    if spaces is not None and config.kind == "mlp":
        normalize = config.algorithm.normalize_observations
        policy = policy_shape(config.actor.mlp, spaces, normalize_observations=normalize)
    demands: dict[str, Demand] = {}
    problems: dict[str, Problem] = {}  # by key: several components may have the same model
    for component in components:
        try:
            demand = _demand(config, component, plan, policy)
        except ConfigError as error:
            problems |= {p.key: p for p in error.problems}
            continue
        if demand is not None:
            demands[component] = demand
    if problems:
        raise ConfigError(list(problems.values()))
    notes: tuple[str, ...] = ()
    if config.kind == "mlp":
        notes = (_NO_SPACES,) if spaces is None else ()
    elif config.model is None and not demands:
        notes = (_NO_MODEL,)
    case = MemoryCase(
        placement=plan.placement,
        needs=plan.needs,
        offload=plan.offload,
        blocks={c: config.key_of(c) for c in components},
        demands=demands,
        measured=measured or {},
        notes=notes,
        shared=_shared(plan, config, policy, spaces),
    )
    automatic = config.kind == "causal_lm" and config.text_rollout.gpu_memory_utilization == "auto"
    return fill_share(case) if automatic else case


def _demand(config: Config, component: str, plan: Plan, policy: PolicyShape) -> Demand | None:
    """What a component asks of memory; None if its model is not known. `policy`: of a job with simulators."""
    length, packed = config.algorithm.longest, config.runs
    match config.block_of(component):
        case SimulatorEnvConfig() as env:
            return SimulatorDemand(accelerator_bytes=env.accelerator_memory)
        case AgentConfig() as simulator:  # a text task as well
            return SimulatorDemand(accelerator_bytes=simulator.accelerator_memory, host_bytes=simulator.host_memory)
        case RewardConfig(kind="function" | "url"):
            return SimulatorDemand()
        case TorchRolloutConfig() as rollout:
            sync = DeviceSync.receiving(plan.deliveries)
            return PolicyRolloutDemand(policy=policy, workspace_bytes=rollout.workspace_memory, sync=sync)
        case TextRolloutConfig() as engine if (model := _model(config, None, component)) is not None:
            if engine.gpu_memory_utilization == "auto" and engine.kv_cache_memory is None:
                engine = dataclasses.replace(engine, gpu_memory_utilization=1.0)
            sync = DeviceSync.receiving(plan.deliveries)
            return EngineDemand(model=model, block=engine, sequence_length=length, sync=sync)
        case TrainedConfig() if config.kind == "mlp":
            return PolicyTrainingDemand(policy=policy, sync=DeviceSync.sending(plan.deliveries))
        case TrainedConfig() as trained if (model := _model(config, trained.language_model, component)) is not None:
            found = TrainingDemand(model=model, block=trained, sequence_length=length, packed=packed)
            return _sending(found, trained, plan) if isinstance(trained, ActorConfig) else found
        case FrozenConfig() as frozen if (model := _model(config, frozen.model, component)) is not None:
            refreshed = isinstance(frozen, ReferenceConfig) and frozen.refresh_every > 0
            return ScoringDemand(
                model=model,
                block=frozen,
                sequence_length=length,
                packed=packed,
                refreshed=config.actor.compute if refreshed else None,
            )
        case _:
            return None


def _sending(trained: TrainingDemand, actor: ActorConfig, plan: Plan) -> TrainingDemand:
    """The actor's demand, with what a weight sync holds."""
    deliveries, ranks = plan.deliveries, range(plan.placement.world_size("actor"))
    # Copies on other nodes, which a rank cannot write itself: of the rank with the most.
    far = max(sum(rank not in delivery.near for delivery in deliveries) for rank in ranks)
    sent = far if actor.sync.mode == "delta" else 0
    return dataclasses.replace(trained, sync=DeviceSync.sending(deliveries), sent=sent)


def _model(config: Config, own: Mapping[str, object] | None, component: str) -> ModelShape | None:
    """The component's own model, else the actor's, with the head of its role; engines generate with the actor's."""
    keys = config.model if own is None else own
    if keys is None:
        return None
    role = role_of(component)
    head = Head.SCORE if role in ("critic", "reward") else Head.LANGUAGE
    if role == "actor" and config.critic.on_actor:
        head = Head.LANGUAGE_AND_VALUE
    return read_model(keys, head=head, key=f"{'actor' if own is None else config.key_of(component)}.model")


def _shared(plan: Plan, config: Config, policy: PolicyShape, spaces: PolicySpaces | None) -> SharedMemory:
    if not plan.channels or config.cluster.launcher == "inline":  # threads of one process need none
        return SharedMemory()
    if config.kind == "mlp":
        items = {}
        if spaces is not None:
            items = simulator_items(plan, spaces, config.algorithm.rollout_steps, policy.weights_bytes)
        return count_shared(plan, items, policy.weights_bytes)
    model, actor, weights = _model(config, None, "actor"), config.actor, 0
    if model is not None:  # all weights as they travel, and what later versions bring instead
        numbers = model.parameters
        if actor.lora_rank is not None and actor.sync.mode == "lora":
            numbers += sum(elements * copies for elements, copies in model.lora_parts(actor.lora_rank))
        elif actor.lora_rank is not None and actor.sync.mode == "trainable":
            numbers += sum(w.elements * copies for w, copies in model.weights() if w.projection)
        weights = numbers * DTYPE_BYTES[actor.compute]
    return count_shared(plan, text_items(plan, config.algorithm, weights), weights)


def with_share(config: Config, case: MemoryCase) -> Config:
    """Replace `gpu_memory_utilization: auto` by the value computed for this memory case."""
    engine = case.demands.get("rollout")
    return dataclasses.replace(config, rollout=engine.block) if isinstance(engine, EngineDemand) else config
