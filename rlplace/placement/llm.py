"""The config of a language-model job x machines -> its layout, and what its components ask of memory."""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.errors import ConfigError, Problem, Source
from rlplace.llm_config import EngineConfig, JudgeConfig, LlmConfig, SimulatorConfig, TrainedConfig
from rlplace.placement.batches import BatchSizes
from rlplace.placement.layout import Layout, make_layout
from rlplace.placement.memory.case import Measurements, MemoryCase
from rlplace.placement.memory.demands import EngineModel, FrozenModel, KvBytes, KvShare, Simulator
from rlplace.placement.memory.footprint import Demand
from rlplace.placement.memory.model_config import read_model
from rlplace.placement.memory.model_shape import Head, ModelShape
from rlplace.placement.memory.trained import TrainedModel
from rlplace.placement.needs import OPTIONAL, REQUIRED, role_of
from rlplace.placement.topology import Topology

BlockConfig = TrainedConfig | JudgeConfig | EngineConfig | SimulatorConfig
_ROLES = (*REQUIRED, *OPTIONAL)
_SCORING = ("critic", "reward")  # roles whose models end in one number
_NO_MODEL = "the model is not known: its memory is not counted"


def make_llm_layout(config: LlmConfig, topology: Topology, sources: Mapping[str, Source] | None = None) -> Layout:
    """Raises PlacementError with every problem at once."""
    algorithm = config.algorithm
    batches = None
    if algorithm.prompts is not None:
        batches = BatchSizes(
            prompts=algorithm.prompts,
            samples_per_prompt=algorithm.samples_per_prompt,
            train_batch=algorithm.train_batch or algorithm.prompts * algorithm.samples_per_prompt,
            micro_batch=config.actor.micro_batch,
        )
    return make_layout(config.cluster, topology, offload=_offload(config), batches=batches, sources=sources)


def llm_memory_case(layout: Layout, config: LlmConfig, measured: Measurements | None = None) -> MemoryCase:
    """Raises ConfigError for a model that cannot be read."""
    demands: dict[str, Demand] = {}
    problems: dict[str, Problem] = {}  # by key: several components may have the same model
    for component in layout.placement.components:
        try:
            demand = _demand(config, component)
        except ConfigError as error:
            problems |= {p.key: p for p in error.problems}
            continue
        if demand is not None:
            demands[component] = demand
    if problems:
        raise ConfigError(list(problems.values()))
    offload = _offload(config)
    return MemoryCase(
        placement=layout.placement,
        needs=layout.needs,
        offload={c: offload[c] for c in layout.placement.components},
        demands=demands,
        measured=measured or {},
        notes=() if config.model is not None or demands else (_NO_MODEL,),
    )


def _block(config: LlmConfig, component: str) -> BlockConfig:
    """The block of its role: `reward.math` is a reward."""
    block: BlockConfig = getattr(config, role_of(component))
    return block


def _demand(config: LlmConfig, component: str) -> Demand | None:
    """None where its model is not known."""
    length = config.algorithm.sequence_length
    match _block(config, component):
        case SimulatorConfig() as simulator:
            return Simulator(accelerator_bytes=simulator.accelerator_memory, host_bytes=simulator.host_memory)
        case EngineConfig() as engine:
            return _engine(engine, _model(config, None, component), length)
        case TrainedConfig() as trained:
            model = _model(config, trained.model, component)
            return (
                model
                if model is None
                else TrainedModel(
                    model=model,
                    micro_batch=trained.micro_batch,
                    sequence_length=length,
                    weights=trained.weights,
                    compute=trained.compute,
                    optimizer=trained.optimizer,
                    zero_stage=trained.zero_stage,
                    checkpointing=trained.checkpointing,
                    lora_rank=trained.lora_rank,
                    optimizer_on_host=trained.optimizer_on_host,
                )
            )
        case JudgeConfig() as judge:
            model = _model(config, judge.model, component)
            return (
                model
                if model is None
                else FrozenModel(
                    model=model,
                    micro_batch=judge.micro_batch,
                    sequence_length=length,
                    dtype=judge.dtype,
                    sharded=judge.sharded,
                )
            )


def _engine(engine: EngineConfig, model: ModelShape | None, length: int) -> EngineModel | None:
    cache: KvBytes | KvShare = KvShare(gpu_memory_utilization=engine.gpu_memory_utilization)
    if engine.kv_cache_memory is not None:
        cache = KvBytes(size_bytes=engine.kv_cache_memory)
    return (
        model
        if model is None
        else EngineModel(
            model=model,
            cache=cache,
            sequence_length=length,
            dtype=engine.dtype,
            cache_dtype=engine.cache_dtype,
            step_tokens=engine.step_tokens,
            step_sequences=engine.step_sequences,
            sleep_level=engine.sleep_level,
        )
    )


def _model(config: LlmConfig, own: Mapping[str, object] | None, component: str) -> ModelShape | None:
    """The component's own model, else the job's, with the head of its role; engines generate with the job's."""
    keys = config.model if own is None else own
    if keys is None:
        return None
    role = role_of(component)
    head = Head.SCORE if role in _SCORING else Head.LANGUAGE
    return read_model(keys, head=head, key="model" if own is None else f"{role}.model")


def _offload(config: LlmConfig) -> dict[str, bool]:
    """Component -> whether it leaves its accelerators, for every name that has a role."""
    placed = (name.strip() for key in config.cluster.component_placement for name in str(key).split(","))
    return {c: _block(config, c).enable_offload for c in (*_ROLES, *placed) if role_of(c) in _ROLES}
