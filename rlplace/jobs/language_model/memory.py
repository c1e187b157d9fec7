"""What a job on language models takes of accelerators and hosts: the demand of each component, and its channels."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Mapping

from rlplace.config.blocks.language_model import (
    AgentConfig,
    FrozenConfig,
    LanguageModelJobConfig,
    ReferenceConfig,
    RewardConfig,
    TextRolloutConfig,
)
from rlplace.config.blocks.training import ActorConfig, AlgorithmConfig, TrainedConfig
from rlplace.config.model_folder import text_keys
from rlplace.errors import ConfigError, Problem
from rlplace.placement.channels import asked_at_once
from rlplace.placement.flow import BUCKET_BYTES, Delivery, deliver_through_host
from rlplace.placement.language.spec import role_of
from rlplace.placement.memory.case import Replan, case_of, shares_memory
from rlplace.placement.memory.demands import (
    Demand,
    DeviceSync,
    EngineDemand,
    Part,
    ScoringDemand,
    SimulatorDemand,
    TrainingDemand,
)
from rlplace.placement.memory.formulas import DTYPE_BYTES, stream_buckets
from rlplace.placement.memory.ledger import Measurements, MemoryCase, SharedMemory
from rlplace.placement.memory.model import Head, ModelShape, read_model
from rlplace.placement.memory.shared_memory import ITEM_BYTES, count_shared
from rlplace.placement.memory.solve import fill_share
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency
from rlplace.workers.arguments import COMMANDS, RESULTS

_NO_MODEL = "the model is not known: its memory is not counted"
_ONLY_MEASURED = "its model cannot be counted; known is what an earlier run measured, not what it needs while it works"
_WITH_MODEL = (TrainingDemand, ScoringDemand, EngineDemand)


def text_case(
    plan: Plan,
    config: LanguageModelJobConfig,
    replan: Replan[LanguageModelJobConfig],
    measured: Measurements | None = None,
) -> MemoryCase:
    """Return the memory case of a job on language models. Its method `ledger()` computes the bytes that a run holds.

    `replan`: function that plans the job with another config; it is used to try remedies. `measured`: bytes that an
    earlier run measured; None: there was no earlier run. Raises ConfigError for a model that cannot be read, unless its
    component is in `measured`. Raises PlacementError for `gpu_memory_utilization: auto` if the memory of some
    accelerators is not known.
    """
    demands: dict[str, Demand] = {}
    notes: list[str] = []
    # By key, so that a model that several components share is reported once.
    problems: dict[str, Problem] = {}
    for component in plan.placement.components:
        try:
            demand = _text_demand(config, component, plan)
        except ConfigError as error:
            if measured and measured.get(component):
                notes.append(f"{component}: {_ONLY_MEASURED}")
            else:
                problems |= {p.key: p for p in error.problems}
            continue
        if demand is not None:
            demands[component] = demand
    if problems:
        raise ConfigError(list(problems.values()))
    if config.model is None and not demands:
        notes.append(_NO_MODEL)
    models = [d.model for d in demands.values() if isinstance(d, _WITH_MODEL)]
    notes += dict.fromkeys(note for model in models for note in model.notes)
    shared: SharedMemory = {}
    if shares_memory(plan, config):
        shared = _text_shared(plan, config, demands.get("actor"))
    batches = _batches(config, plan)
    case = case_of(plan, config, demands, notes, shared, batches, replan, measured)
    if config.rollout.gpu_memory_utilization == "auto":
        return fill_share(case)
    return case


def _batches(config: LanguageModelJobConfig, plan: Plan) -> dict[str, int]:
    """Return component -> sequences per optimizer step of each data-parallel replica.

    The micro-batch of the component must divide this number. The result is empty if micro-batches of any size are
    allowed, or if the number of prompts is not known.
    """
    algorithm = config.algorithm
    if config.runs or algorithm.prompts is None:
        return {}
    step = algorithm.train_batch or algorithm.prompts * algorithm.samples_per_prompt
    learning = [c for c in ("actor", "critic") if c in plan.placement.components]
    return {c: step // plan.placement.spec(c).data_parallel for c in learning}


def slices_heads(config: LanguageModelJobConfig, plan: Plan) -> bool:
    """Return whether each accelerator of an engine gets equally many attention heads; True for unknown models."""
    heads = text_keys(config.model or {}).get("num_attention_heads")
    if "rollout" not in plan.placement.components:
        return True
    spec = plan.placement.spec("rollout")
    slices = max(
        [
            spec.parallel.tensor_parallel_size,
            *(s.accelerators_per_rank for s in spec.segments),
        ]
    )
    return not isinstance(heads, int) or heads % slices == 0


def _text_demand(
    config: LanguageModelJobConfig, component: str, plan: Plan
) -> Demand | None:
    """Return the memory demand of one component of a job on language models; None if its memory is not known."""
    length = config.algorithm.longest
    packed = config.runs
    match config.block_of(component):
        case AgentConfig() as simulator:  # a text task as well
            ahead = config.algorithm.max_staleness
            ranks = plan.placement.world_size(component)
            # Iterations whose samples the env holds at once: the current one, and those generated ahead.
            kept = 1 + ahead if ahead and role_of(component) == "env" else 0
            groups = kept * -(-(config.algorithm.prompts or 0) // ranks)
            return SimulatorDemand(
                accelerator_bytes=simulator.accelerator_memory,
                host_bytes=simulator.host_memory,
                samples_bytes=groups
                * (
                    _group_bytes(config.algorithm, routes_of(config))
                    + _image_bytes(config)
                ),
            )
        case RewardConfig(kind="function" | "url"):
            return SimulatorDemand()
        case TextRolloutConfig() as engine if (
            model := model_of(config, None, component)
        ) is not None:
            if (
                engine.gpu_memory_utilization == "auto"
                and engine.kv_cache_memory is None
            ):
                engine = dataclasses.replace(engine, gpu_memory_utilization=1.0)
            asked = asked_at_once(
                config.algorithm.prompts or 0, config.algorithm.short_rounds
            )
            answers = asked * config.algorithm.samples_per_prompt
            sent = (
                model.parameters * DTYPE_BYTES[config.actor.compute]
                if _streamed(plan)
                else 0
            )
            return EngineDemand(
                model=model,
                block=engine,
                adapter_rank=adapter_rank(config),
                sequence_length=length,
                sync=DeviceSync.receiving(plan.deliveries, config.actor.compute),
                taken=stream_buckets(
                    sent,
                    sent=False,
                    encrypted=config.cluster.comm.security == "encrypted",
                ),
                answers=-(-answers // plan.placement.world_size(component)) or None,
                cut=(config.runner.eval_top_p or 1.0) < 1,
                routes=config.actor.router_replay,
            )
        case TrainedConfig() as trained if (
            model := model_of(config, trained.language_model, component)
        ) is not None:
            return _training(config, trained, model, plan)
        case FrozenConfig() as frozen if (
            model := model_of(config, frozen.model, component)
        ) is not None:
            refreshed = isinstance(frozen, ReferenceConfig) and frozen.refresh_every > 0
            return ScoringDemand(
                model=model,
                block=frozen,
                sequence_length=length,
                packed=packed,
                refreshed=config.actor.compute if refreshed else None,
                copied=True if refreshed else None,
            )
        case _:
            return None


def _training(
    config: LanguageModelJobConfig,
    trained: TrainedConfig,
    model: ModelShape,
    plan: Plan,
) -> TrainingDemand:
    algorithm = config.algorithm
    found = TrainingDemand(
        model=model,
        block=trained,
        sequence_length=algorithm.longest,
        packed=config.runs,
        samples=algorithm.train_batch
        or (algorithm.prompts or 0) * algorithm.samples_per_prompt,
        copied=True,
    )
    if not isinstance(trained, ActorConfig):
        return found
    refreshes = (
        "reference" in plan.placement.components and config.reference.refresh_every > 0
    )
    return _sending(
        dataclasses.replace(
            found, refreshes=refreshes, early=config.algorithm.accumulate_early
        ),
        trained,
        plan,
    )


def _sending(trained: TrainingDemand, actor: ActorConfig, plan: Plan) -> TrainingDemand:
    """Return the actor's memory demand, with the memory added that sending its weights to the rollout ranks takes."""
    deliveries = plan.deliveries
    ranks = range(plan.placement.world_size("actor"))
    # Rank -> number of copies on its own node
    near = Counter(rank for delivery in deliveries for rank in delivery.near)
    # Copies on other nodes, which a rank can only send to: the number for the rank with the most.
    far = len(deliveries) - min(near[rank] for rank in ranks)
    sent = far if actor.sync.mode == "delta" else 0
    streams = bool(_streamed(plan)) or trained.refreshes
    return dataclasses.replace(
        trained, sync=DeviceSync.sending(deliveries), sent=sent, streams=streams
    )


def adapter_rank(config: LanguageModelJobConfig) -> int | None:
    """Return the rank of the LoRA factors that engines apply beside their weights; None if they apply none."""
    if config.actor.sync.mode == "adapter":
        return config.actor.lora_rank
    return None


def _streamed(plan: Plan) -> list[Delivery]:
    """Return the weight deliveries through host memory for which some actor rank is on another node than the target.

    Such an actor rank streams its weights over the network.
    """
    ranks = plan.placement.world_size("actor")
    return [
        delivery
        for delivery in deliver_through_host(plan.deliveries)
        if len(delivery.near) < ranks
    ]


def model_of(
    config: LanguageModelJobConfig, own: Mapping[str, object] | None, component: str
) -> ModelShape | None:
    """Return the shape of a component's model, with the output head of its role; None if no model is declared.

    `own`: the model in the component's config block; None: the block has no model, and the component uses the actor's
    model, as engines do.
    """
    keys = config.model if own is None else own
    if keys is None:
        return None
    role = role_of(component)
    head = Head.SCORE if role in ("critic", "reward") else Head.LANGUAGE
    if role == "actor" and config.critic.on_actor:
        head = Head.LANGUAGE_AND_VALUE
    return read_model(
        keys,
        head=head,
        key=f"{'actor' if own is None else config.key_of(component)}.model",
    )


def read_again(config: LanguageModelJobConfig) -> dict[str, float]:
    """Return component -> cost of a prompt token for each answer after the first; the cost for the first counts as 1.

    The values are used as `SampleSizes.again`. The result is empty if the answers to a prompt do not share its
    computation. Reward models, and models with unknown layers, are left out: they compute the prompt anew for each
    answer.
    """
    found: dict[str, float] = {}
    for component in config.placed if config.algorithm.share_prompts else ():
        match config.block_of(component):
            case RewardConfig():
                continue
            case TrainedConfig(language_model=own) | FrozenConfig(model=own):
                # The ledger reports a model that cannot be read, unless its memory was measured.
                with contextlib.suppress(ConfigError):
                    if (model := model_of(config, own, component)) is not None:
                        found[component] = model.read_again
    return found


def _text_shared(
    plan: Plan, config: LanguageModelJobConfig, trained: Demand | None
) -> SharedMemory:
    """Return the shared memory that a job on language models takes: purpose (channels, weights, NCCL) -> node -> bytes.

    `trained`: the actor's demand; None if it is not known.
    """
    actor = config.actor
    weights = 0
    # All weights in the dtype of the sync, plus the LoRA factors or merged weights that later versions send.
    if isinstance(trained, TrainingDemand):
        model = trained.model
        numbers = model.parameters
        if actor.lora_rank is not None and actor.sync.factors_apart:
            numbers += sum(
                elements * copies
                for elements, copies in model.lora_parts(actor.lora_rank)
            )
        elif actor.lora_rank is not None and actor.sync.mode == "trainable":
            numbers += sum(
                w.elements * copies for w, copies in model.weights() if w.projection
            )
        weights = numbers * DTYPE_BYTES[actor.compute]
    return count_shared(
        plan,
        text_items(
            plan,
            config.algorithm,
            weights,
            _image_bytes(config),
            config.serve.body,
            routes_of(config),
        ),
        weights,
    )


def with_share(
    config: LanguageModelJobConfig, case: MemoryCase
) -> LanguageModelJobConfig:
    """Return the config with `gpu_memory_utilization: auto` replaced by the share of memory that `case` has computed.

    For an engine other than vLLM, `kv_cache_memory` is set instead, to the bytes that this share leaves for the KV
    cache.
    """
    engine = case.demands.get("rollout")
    if not isinstance(engine, EngineDemand):
        return config
    block = engine.block
    if block.engine != "vllm" and block.kv_cache_memory is None:
        found = [
            f.held[Residency.FULL].get(Part.KV_CACHE, 0)
            for f in case.ledger().footprints["rollout"]
        ]
        block = dataclasses.replace(
            block, kv_cache_memory=min(found, default=0) or None
        )
    return dataclasses.replace(config, rollout=block)


def _image_bytes(config: LanguageModelJobConfig) -> int:
    """Return the most bytes that the images of one prompt take; 0 for a model without vision.

    All samples of one prompt use the same images.
    """
    sees = config.model is not None and "vision_config" in config.model
    if sees:
        return config.env.max_image_bytes
    return 0


def text_items(
    plan: Plan,
    algorithm: AlgorithmConfig,
    weights_bytes: int,
    image_bytes: int = 0,
    body_bytes: int = 0,
    route_bytes: int = 0,
) -> dict[str, int]:
    """Return channel -> bytes of its largest item, in a job on language models.

    `weights_bytes`: bytes of one whole copy of the weights. `image_bytes`: most bytes of the images of a prompt.
    `body_bytes`: most bytes of a request to a training API. `route_bytes`: bytes per token of the experts that the
    engine chose, in an answer and in a sample of the actor; 0: they are not recorded. Other bytes per token: 4 in a
    request, for the token id; 12 in an answer, for id, log-probability and policy version; 13 in a sample, which also
    has a mask. A token of a training request has at least 12 bytes over HTTP, at most 12 in the command, and 4 in the
    result, for its log-probability.
    """
    tokens = algorithm.longest
    each = algorithm.samples_per_prompt
    items = {
        "requests": 4 * tokens + image_bytes + ITEM_BYTES,
        "completions": (12 + route_bytes) * tokens + ITEM_BYTES,
        "samples": _group_bytes(algorithm) + image_bytes,
        "scores": 4 * tokens + ITEM_BYTES,
        "returns": each * (4 * tokens + ITEM_BYTES),
        "weights": 0,  # weights pass through no channel
        COMMANDS: body_bytes + ITEM_BYTES,
        RESULTS: body_bytes // 3 + ITEM_BYTES,
    }
    items |= {
        c.name: items[role_of(c.name)] for c in plan.channels if c.name not in items
    }
    # Scorers get samples without routes
    items["samples"] = _group_bytes(algorithm, route_bytes) + image_bytes
    return {**items, "weights.reference": min(BUCKET_BYTES, weights_bytes)}


def _group_bytes(algorithm: AlgorithmConfig, route_bytes: int = 0) -> int:
    """Return the most bytes that the samples of one prompt take, without images.

    `route_bytes`: bytes per token of the experts that the engine chose; 0: they are not recorded.
    """
    each = (13 + route_bytes) * algorithm.longest + ITEM_BYTES
    return algorithm.samples_per_prompt * each


def routes_of(config: LanguageModelJobConfig) -> int:
    """Return the bytes per token of the experts that the engine records; 0: it records none."""
    if not config.actor.router_replay:
        return 0
    with contextlib.suppress(ConfigError):
        if (model := model_of(config, None, "actor")) is not None:
            return model.route_bytes
    return 0
