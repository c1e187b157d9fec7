"""The config of a language-model job x machines -> its layout, and what its components ask of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from rlplace.config import (
    ActorConfig,
    AgentConfig,
    BlockConfig,
    Config,
    FrozenConfig,
    ReferenceConfig,
    RewardConfig,
    TextRolloutConfig,
    TrainedConfig,
)
from rlplace.errors import ConfigError, PlacementError, Problem, Source, source_of
from rlplace.placement.batches import BatchSizes
from rlplace.placement.channels import ChannelPlan, flows_of
from rlplace.placement.deadlock import check_flows
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import role_of
from rlplace.placement.layout import Layout, make_layout
from rlplace.placement.llm_channels import (
    TextSizes,
    appraised_in,
    judges_of,
    plan_judging,
    plan_text_channels,
    text_ends,
)
from rlplace.placement.llm_sync import plan_deliveries, version_bytes, with_sync
from rlplace.placement.machines.topology import Topology
from rlplace.placement.memory.demands import EngineModel, FrozenModel, KvBytes, KvShare, Simulator, TrainedModel
from rlplace.placement.memory.footprint import Demand
from rlplace.placement.memory.ledger import Measurements, MemoryCase
from rlplace.placement.memory.model import Head, ModelShape, read_model
from rlplace.placement.memory.shared import BUCKET_BYTES, ITEM_BYTES, SharedMemory, count_shared
from rlplace.placement.memory.solve import fill_share
from rlplace.placement.overlap import check_overlap
from rlplace.placement.roles import check_roles
from rlplace.placement.schedule import OPTIONAL, REQUIRED, Needs, placed_names, rlhf_needs
from rlplace.placement.sharing import check_partners

_ROLES = (*REQUIRED, *OPTIONAL)
_SCORING = ("critic", "reward")  # roles whose models end in one number
_RUN_COMPONENTS = ("actor", "rollout", "env")
_NO_MODEL = "the model is not known: its memory is not counted"


def make_llm_layout(config: Config, topology: Topology, sources: Mapping[str, Source] | None = None) -> Layout:
    """With the channels of a job that runs. Raises PlacementError with every problem at once."""
    algorithm, places = config.algorithm, sources or {}
    if config.runs:
        return _make_run_layout(config, topology, places)
    batches = None
    if algorithm.prompts is not None:
        batches = BatchSizes(
            prompts=algorithm.prompts,
            samples_per_prompt=algorithm.samples_per_prompt,
            train_batch=algorithm.train_batch or algorithm.prompts * algorithm.samples_per_prompt,
            micro_batch=config.actor.micro_batch,
        )
    names = placed_names(config.cluster.component_placement)
    return make_layout(
        config.cluster,
        topology,
        needs=_needs(config, names),
        offload=_offload(config),
        blocks=_blocks(config, names),
        batches=batches,
        check=lambda placement: [*check_roles(config, placement, places), *check_partners(placement, places)],
        sources=places,
    )


def _make_run_layout(config: Config, topology: Topology, sources: Mapping[str, Source]) -> Layout:
    """Neither batches nor ranks need divide: engines take what they have room for, others what they are given."""
    names = placed_names(config.cluster.component_placement)
    needs = _needs(config, (*_RUN_COMPONENTS, *judges_of(names)))
    needs = dataclasses.replace(needs, ahead=config.algorithm.max_staleness)
    offload = _offload(config)
    layout = make_layout(
        config.cluster,
        topology,
        needs=needs,
        offload=offload,
        blocks=_blocks(config, names),
        check=lambda placement: check_roles(config, placement, sources),
        sources=sources,
    )
    problems = _check_ranks(config, layout.placement, sources)
    problems += check_overlap(layout.placement, layout.schedule.needs, offload, sources)
    if problems:
        raise PlacementError(problems)
    deliveries = plan_deliveries(config, layout.placement)
    return dataclasses.replace(layout, routes=(), channels=_plan_channels(config, layout), deliveries=deliveries)


def _needs(config: Config, names: Iterable[str]) -> Needs:
    return rlhf_needs(names, actor_infers=config.actor_infers, refreshed=config.reference.refresh_every > 0)


def _plan_channels(config: Config, layout: Layout) -> tuple[ChannelPlan, ...]:
    algorithm, runner = config.algorithm, config.runner
    assert algorithm.prompts is not None, "checked when it was read"
    sizes = TextSizes(
        prompts=algorithm.prompts,
        samples_per_prompt=algorithm.samples_per_prompt,
        turns=config.text_env.max_turns,
        held_out=runner.eval_prompts if runner.eval_every else 0,
        ahead=algorithm.max_staleness,
    )
    channels = (
        *plan_text_channels(layout.placement, sizes),
        *plan_judging(layout.placement, sizes, refreshed=config.reference.refresh_every > 0),
    )
    schedule = layout.schedule
    working = dict(schedule.active)
    working[appraised_in(schedule)] += ("actor",)  # which needs nothing on its accelerators to gather what was said
    stuck = check_flows(tuple(flows_of(channels, text_ends(schedule))), schedule.stages, working)
    assert not stuck, stuck  # the capacities are our own
    return channels


def _check_ranks(config: Config, placement: HybridComponentPlacement, sources: Mapping[str, Source]) -> list[Problem]:
    """Every env rank has a prompt, every actor rank a sample."""
    prompts, each = config.algorithm.prompts or 0, config.algorithm.samples_per_prompt
    problems: list[Problem] = []
    for component, items, what in (("env", 1, "prompt"), ("actor", each, "sample")):
        ranks = placement.world_size(component)
        if prompts * items < ranks:
            problems.append(
                Problem(
                    code="rank-without-rows",
                    key="algorithm.prompts",
                    what=f"too few for {ranks} {component} ranks: some would have nothing to do",
                    got=f"prompts: {prompts}",
                    source=source_of("algorithm.prompts", sources),
                    why=f"each {component} rank takes at least one {what}",
                    fix=f"prompts: {-(-ranks // items)}        (or fewer {component} ranks)",
                )
            )
    return problems


def llm_memory_case(layout: Layout, config: Config, measured: Measurements | None = None) -> MemoryCase:
    """Raises ConfigError for a model that cannot be read, PlacementError for `auto` where no memory is known."""
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
    case = MemoryCase(
        placement=layout.placement,
        needs=layout.needs,
        offload={c: offload[c] for c in layout.placement.components},
        blocks=_blocks(config, layout.placement.components),
        demands=with_sync(demands, config, layout),
        measured=measured or {},
        notes=() if config.model is not None or demands else (_NO_MODEL,),
        shared=_shared(layout, config),
    )
    return fill_share(case) if config.text_rollout.gpu_memory_utilization == "auto" else case


def with_share(config: Config, case: MemoryCase) -> Config:
    """With the number that `rollout.gpu_memory_utilization: auto` is in this case of the config."""
    match case.demands.get("rollout"):
        case EngineModel(cache=KvShare(gpu_memory_utilization=share)):
            rollout = dataclasses.replace(config.text_rollout, gpu_memory_utilization=share)
            return dataclasses.replace(config, rollout=rollout)
        case _:
            return config


def _shared(layout: Layout, config: Config) -> SharedMemory:
    if not layout.channels or config.cluster.launcher == "inline":  # threads of one process need none
        return SharedMemory()
    model = _model(config, None, "actor")
    weights = 0 if model is None else version_bytes(model, config.actor)
    tokens, each = config.algorithm.longest, config.algorithm.samples_per_prompt
    bucket = min(BUCKET_BYTES, weights)
    items = {  # a token has an id; an answer's, a log-probability and a version too; a sample's, a mask besides
        "requests": 4 * tokens + ITEM_BYTES,
        "completions": 12 * tokens + ITEM_BYTES,
        "samples": each * (13 * tokens + ITEM_BYTES),
        "scores": 4 * tokens + ITEM_BYTES,
        "returns": each * (4 * tokens + ITEM_BYTES),
        "weights": bucket if len(layout.deliveries) > 1 else 0,
    }
    items |= {c.name: items[role_of(c.name)] for c in layout.channels if c.name not in items}
    return count_shared(layout, {**items, "weights.reference": bucket}, weights)


def _demand(config: Config, component: str) -> Demand | None:
    """None where its model is not known."""
    length, runs = config.algorithm.longest, config.runs
    match config.block_of(component):
        case AgentConfig() as simulator:
            return Simulator(accelerator_bytes=simulator.accelerator_memory, host_bytes=simulator.host_memory)
        case RewardConfig(kind="function" | "url"):
            return Simulator(accelerator_bytes=0)
        case TextRolloutConfig() as engine:
            return _engine(engine, _model(config, None, component), length)
        case TrainedConfig() as trained if (model := _model(config, trained.language_model, component)) is not None:
            return TrainedModel(
                model=model,
                micro_batch=trained.micro_batch,
                sequence_length=length,
                token_budget=trained.token_budget if runs else None,
                weights=trained.weights,
                compute=trained.compute,
                optimizer=trained.optimizer.kind,
                zero_stage=trained.zero_stage,
                checkpointing=trained.checkpointing,
                lora_rank=trained.lora_rank,
                optimizer_on_host=trained.optimizer.on_host,
                averaged=isinstance(trained, ActorConfig) and trained.ema_decay is not None,
            )
        case FrozenConfig() as judge if (model := _model(config, judge.model, component)) is not None:
            return FrozenModel(
                model=model,
                micro_batch=judge.micro_batch,
                sequence_length=length,
                token_budget=judge.token_budget if runs else None,
                dtype=judge.dtype,
                sharded=judge.sharded,
                on_host=judge.on_host,
                refreshed=config.actor.compute if isinstance(judge, ReferenceConfig) and judge.refresh_every else None,
            )
        case _:
            return None


def _engine(engine: TextRolloutConfig, model: ModelShape | None, length: int) -> EngineModel | None:
    share = engine.gpu_memory_utilization
    cache: KvBytes | KvShare = KvShare(gpu_memory_utilization=1.0 if share == "auto" else share)
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
            cache_dtype=engine.cache,
            step_tokens=engine.step_tokens,
            step_sequences=engine.step_sequences,
            sleep_level=engine.sleep_level,
        )
    )


def _model(config: Config, own: Mapping[str, object] | None, component: str) -> ModelShape | None:
    """The component's own model, else the job's, with the head of its role; engines generate with the job's."""
    keys = config.model if own is None else own
    if keys is None:
        return None
    role = role_of(component)
    head = Head.SCORE if role in _SCORING else Head.LANGUAGE
    if role == "actor" and config.critic.on_actor:
        head = Head.LANGUAGE_AND_VALUE
    return read_model(keys, head=head, key=f"{'actor' if own is None else config.key_of(component)}.model")


def _offload(config: Config) -> dict[str, bool]:
    """Component -> whether it leaves its accelerators, for every name that has a role; who needs none is in no way."""
    return {c: _leaves(config.block_of(c)) for c in (*_ROLES, *config.placed) if role_of(c) in _ROLES}


def _leaves(block: BlockConfig) -> bool:
    return block.enable_offload or (isinstance(block, RewardConfig) and block.kind != "model")


def _blocks(config: Config, names: Iterable[str]) -> dict[str, str]:
    """Component -> key of its block: rewards may share one."""
    return {c: config.key_of(c) for c in names if role_of(c) in _ROLES}
