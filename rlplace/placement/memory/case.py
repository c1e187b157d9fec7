"""Build the memory case of a job: the demand of each component by its config, and the shared memory of each node."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlplace.config.blocks.language_model import (
    AgentConfig,
    FrozenConfig,
    ReferenceConfig,
    RewardConfig,
    TextRolloutConfig,
)
from rlplace.config.blocks.simulator import SimulatorEnvConfig, TorchRolloutConfig
from rlplace.config.blocks.training import ActorConfig, AlgorithmConfig, TrainedConfig
from rlplace.config.model_folder import text_keys
from rlplace.config.schema import Config
from rlplace.errors import ConfigError, Problem, ProblemsError
from rlplace.placement.channels import (
    LEAST_PARTICIPANTS,
    ChannelLocation,
    asked_at_once,
    participants_of,
)
from rlplace.placement.flow import (
    BUCKET_BYTES,
    Delivery,
    DeviceDelivery,
    Route,
    deliver_through_host,
)
from rlplace.placement.language.spec import role_of
from rlplace.placement.memory.demands import (
    Demand,
    DeviceSync,
    EngineDemand,
    Part,
    ScoringDemand,
    SimulatorDemand,
    TrainingDemand,
)
from rlplace.placement.memory.formulas import DTYPE_BYTES, nccl_shared, stream_buckets
from rlplace.placement.memory.ledger import Measurements, MemoryCase, SharedMemory
from rlplace.placement.memory.model import Head, ModelShape, read_model
from rlplace.placement.memory.policies import (
    PolicyShape,
    PolicySpaces,
    action_bytes,
    observation_bytes,
    policy_shape,
)
from rlplace.placement.memory.policy_demands import (
    PolicyRolloutDemand,
    PolicyTrainingDemand,
)
from rlplace.placement.memory.solve import fill_share
from rlplace.placement.schedule import Residency

if TYPE_CHECKING:
    from rlplace.placement.machines.topology import Topology
    from rlplace.placement.plan import Plan

# Sizes of a channel's file in shared memory. Each is at least the true size; a test compares them.
_FIXED_BYTES = 64 << 10
_PARTICIPANT_BYTES = 448  # name of a participant and its place among the waiters
_KEY_BYTES = 512
_RECORD_BYTES = 128  # of an entry, beside the room for its item
_SPARE_ENTRIES = 16
_LEAST_ROOM = 512
_MOST_ROOM = 16 << 10
# room of all entries together; the room of one entry is between the two bounds above
_ALL_ROOM = 16 << 20

_SMALLEST_SEGMENT = 64 << 10
_TABLE_BYTES = 64 << 10  # table of the segments of one process
ITEM_BYTES = 2 << 10  # bytes of an item beside its arrays: names, shapes, alignment
WEIGHT_BUFFERS = 2  # double buffer: one is read while the other is written
_HEADER_BYTES = 64 << 10  # header of a double buffer, beside the weights
_FLOAT32 = 4

_NO_SPACES = "the simulator's shapes are not known: the policy's weights are not counted, nor large items"
_NO_MODEL = "the model is not known: its memory is not counted"
_ONLY_MEASURED = "its model cannot be counted; known is what an earlier run measured, not what it needs while it works"
_NO_COPIES = "the hosts have no room for copies of checkpoints: the next iteration waits until one is written"
_SAVED = (TrainingDemand, ScoringDemand, PolicyTrainingDemand)
_WITH_MODEL = (TrainingDemand, ScoringDemand, EngineDemand)


# Plans a job with another config and builds its memory case.
Replan = Callable[[Config, "Topology"], tuple["Plan", MemoryCase]]


def simulator_case(
    plan: Plan,
    config: Config,
    replan: Replan,
    spaces: PolicySpaces | None = None,
    measured: Measurements | None = None,
) -> MemoryCase:
    """Return the memory case of a job on simulators. Its method `ledger()` computes the bytes that a run holds.

    `replan`: function that plans the job with another config; it is used to try remedies. `spaces`: shapes of the
    simulator's observations and actions; None: the weights of the policy are not counted, and the ledger has a note.
    `measured`: bytes that an earlier run measured; None: there was no earlier run.
    """
    policy = PolicyShape(weights=(), buffer_bytes=0)
    notes = [_NO_SPACES]
    if spaces is not None:
        normalize = config.algorithm.normalize_observations
        policy = policy_shape(
            config.actor.policy, spaces, normalize_observations=normalize
        )
        notes = []
    demands = {
        component: demand
        for component in plan.placement.components
        if (demand := _simulator_demand(config, component, plan, policy)) is not None
    }
    shared: SharedMemory = {}
    if _shares_memory(plan, config):
        items = {}
        if spaces is not None:
            items = simulator_items(plan, spaces, config.algorithm.rollout_steps)
        shared = count_shared(plan, items, policy.weights_bytes)
    case = _case(plan, config, demands, notes, shared, {}, replan, measured)
    return _without_copies(case)


def text_case(
    plan: Plan,
    config: Config,
    replan: Replan,
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
    if _shares_memory(plan, config):
        shared = _text_shared(plan, config, demands.get("actor"))
    batches = _batches(config, plan)
    case = _case(plan, config, demands, notes, shared, batches, replan, measured)
    case = _without_copies(case)
    if config.text_rollout.gpu_memory_utilization == "auto":
        return fill_share(case)
    return case


def _case(
    plan: Plan,
    config: Config,
    demands: Mapping[str, Demand],
    notes: Sequence[str],
    shared: SharedMemory,
    batches: Mapping[str, int],
    replan: Replan,
    measured: Measurements | None,
) -> MemoryCase:
    return MemoryCase(
        placement=plan.placement,
        needs=plan.needs,
        offload=plan.offload,
        blocks={c: config.key_of(c) for c in plan.placement.components},
        demands=demands,
        measured=measured or {},
        notes=tuple(notes),
        shared=shared,
        batches=batches,
        reserve=config.memory.reserve,
        job=lambda lines: _with_lines(config, plan.topology, lines, replan),
    )


def _without_copies(case: MemoryCase) -> MemoryCase:
    """Return `case` itself if all hosts have room; otherwise a case without copies for checkpoints on the hosts.

    With such a copy, a checkpoint is written while the stages go on.
    """
    saved = {
        c: d for c, d in case.demands.items() if isinstance(d, _SAVED) and d.copied
    }
    if not saved or all(account.fits for account in case.ledger().hosts):
        return case
    demands = {
        c: dataclasses.replace(demand, copied=False) for c, demand in saved.items()
    }
    notes = (*case.notes, _NO_COPIES)
    return dataclasses.replace(
        case, demands={**case.demands, **demands}, notes=notes, copies_checkpoints=False
    )


def _batches(config: Config, plan: Plan) -> dict[str, int]:
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


def _with_lines(
    config: Config,
    topology: Topology,
    lines: Mapping[str, object],
    replan: Replan,
) -> MemoryCase | None:
    """Return the memory case of a job with other config values; None if a check rejects the new plan.

    `lines`: key path -> value. `replan`: plans a job with another config.
    """
    for path, value in lines.items():
        config = replaced(config, path.split("."), value)
    try:
        plan, case = replan(config, topology)
    except ProblemsError:
        return None
    heads = text_keys(config.model or {}).get("num_attention_heads")
    spec = plan.placement.spec("rollout")
    slices = max(
        [
            spec.parallel.tensor_parallel_size,
            *(s.accelerators_per_rank for s in spec.segments),
        ]
    )
    if isinstance(heads, int) and heads % slices:
        return None
    return case


def replaced(block: Any, path: Sequence[str], value: object) -> Any:
    """Return a copy of a config, or of a block of it, in which the key at `path` has a new value.

    `path`: the keys from the outermost to the innermost block.
    """
    name = path[0]
    below = path[1:]
    # Names of components and rewards may contain dots, so the rest of the path may be one key.
    if isinstance(block, Mapping):
        rest = ".".join(path)
        name, below = (name, below) if name in block and below else (rest, ())
        return {**block, name: replaced(block[name], below, value) if below else value}
    return dataclasses.replace(
        block,
        **{name: replaced(getattr(block, name), below, value) if below else value},
    )


def _simulator_demand(
    config: Config, component: str, plan: Plan, policy: PolicyShape
) -> Demand | None:
    """Return the memory demand of one component of a job on simulators; None if the component needs no memory.

    `policy`: the sizes of the policy; without weights if they are not known.
    """
    match config.block_of(component):
        case SimulatorEnvConfig() as env:
            return SimulatorDemand(accelerator_bytes=env.accelerator_memory)
        case TorchRolloutConfig() as rollout:
            sync = DeviceSync.receiving(plan.deliveries)
            rows = _answered(plan, rollout) if policy.weights else 0
            return PolicyRolloutDemand(
                policy=policy,
                workspace_bytes=rollout.workspace_memory,
                sync=sync,
                rows=rows,
            )
        case TrainedConfig() as trained:
            samples = minibatch = 0
            if policy.weights:
                samples, minibatch = _learned(plan, config.algorithm)
            return PolicyTrainingDemand(
                policy=policy,
                sync=DeviceSync.sending(plan.deliveries),
                compute=trained.compute,
                samples=samples,
                minibatch=minibatch,
                copied=True,
            )
        case _:
            return None


def _text_demand(config: Config, component: str, plan: Plan) -> Demand | None:
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
                * (_group_bytes(config.algorithm) + _image_bytes(config)),
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
                sequence_length=length,
                sync=DeviceSync.receiving(plan.deliveries, config.actor.compute),
                taken=stream_buckets(
                    sent,
                    sent=False,
                    encrypted=config.cluster.comm.security == "encrypted",
                ),
                answers=-(-answers // plan.placement.world_size(component)) or None,
                cut=(config.runner.eval_top_p or 1.0) < 1,
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
    config: Config, trained: TrainedConfig, model: ModelShape, plan: Plan
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


def _answered(plan: Plan, rollout: TorchRolloutConfig) -> int:
    """Return for how many rows (environments), at most, a rollout rank computes actions in one call.

    The number is the rows of one env rank. With `merge_requests`, it is all rows whose observations can have arrived.
    """
    route = plan.row_routes.observations
    if not rollout.merge_requests:
        return route.most_rows
    return max(_rows(route).values()) * rollout.pipeline_stage_num


def _learned(plan: Plan, algorithm: AlgorithmConfig) -> tuple[int, int]:
    """Return (samples per iteration, samples of one minibatch) of the actor rank that has the most samples.

    Minibatches are drawn at random over all ranks, so the second number is an upper bound: the mean plus four standard
    deviations.
    """
    route = plan.row_routes.trajectories
    share = max(_rows(route).values()) / route.rows
    most = algorithm.rollout_steps * max(_rows(route).values())
    size = route.rows * algorithm.rollout_steps
    drawn = -(-size // algorithm.num_minibatches)
    spread = 4 * math.sqrt(drawn * share * (1 - share))
    return most, min(most, drawn, math.ceil(drawn * share + spread))


def _rows(route: Route) -> Counter[int]:
    """Return rank -> number of rows that it receives, for the target ranks of a route."""
    found: Counter[int] = Counter()
    for target, (start, stop) in zip(
        route.targets, itertools.pairwise(route.edges), strict=True
    ):
        found[target] += stop - start
    return found


def _sending(trained: TrainingDemand, actor: ActorConfig, plan: Plan) -> TrainingDemand:
    """Return the actor's memory demand, with the memory added that sending its weights to the rollout ranks takes."""
    deliveries = plan.deliveries
    ranks = range(plan.placement.world_size("actor"))
    # Copies on other nodes, which a rank can only send to: the number for the rank with the most.
    far = max(
        sum(rank not in delivery.near for delivery in deliveries) for rank in ranks
    )
    sent = far if actor.sync.mode == "delta" else 0
    streams = bool(_streamed(plan)) or trained.refreshes
    return dataclasses.replace(
        trained, sync=DeviceSync.sending(deliveries), sent=sent, streams=streams
    )


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
    config: Config, own: Mapping[str, object] | None, component: str
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


def read_again(config: Config) -> dict[str, float]:
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


def _shares_memory(plan: Plan, config: Config) -> bool:
    """Return whether the workers are processes, which need shared memory for their channels; threads do not."""
    return bool(plan.channels) and config.cluster.launcher != "inline"


def _text_shared(plan: Plan, config: Config, trained: Demand | None) -> SharedMemory:
    """Return the shared memory that a job on language models takes: purpose (channels, weights, NCCL) -> node -> bytes.

    `trained`: the actor's demand; None if it is not known.
    """
    actor = config.actor
    weights = 0
    # All weights in the dtype of the sync, plus the LoRA factors or merged weights that later versions send.
    if isinstance(trained, TrainingDemand):
        model = trained.model
        numbers = model.parameters
        if actor.lora_rank is not None and actor.sync.mode == "lora":
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
        plan, text_items(plan, config.algorithm, weights, _image_bytes(config)), weights
    )


def with_share(config: Config, case: MemoryCase) -> Config:
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


# Shared memory. A channel's file has a fixed part, a record for each key, and room for its capacity in small items; a
# larger item lies beside it in a segment while it is under way. The weights of a node have a double buffer.


def count_shared(
    plan: Plan, item_bytes: Mapping[str, int], weights_bytes: int
) -> SharedMemory:
    """Return the most shared memory that a run takes: purpose (channels, weights, NCCL) -> node -> bytes.

    `item_bytes`: channel -> bytes of its largest item; 0 or missing if not known. `weights_bytes`: bytes of one whole
    copy of the weights; 0 if not known.
    """
    by_node: Counter[int] = Counter()
    for channel in plan.channels:
        participants = participants_of(channel, plan.placement)
        for location in channel.locations():
            if not location.process:
                by_node[location.node] += channel_bytes(
                    location, item_bytes.get(channel.name, 0), participants
                )
    for source in {
        c.source for c in plan.channels if item_bytes.get(c.name, 0) > _LEAST_ROOM
    }:
        for node in plan.placement.locations(source).node:
            by_node[node] += _TABLE_BYTES
    buffers = double_buffer_bytes(weights_bytes) if weights_bytes else 0
    readers: Counter[int] = Counter()
    for delivery in deliver_through_host(plan.deliveries):
        node = plan.placement.locations(delivery.target).node[delivery.lead]
        readers[node] += buffers
    return {"channels": by_node, "weights": readers, "NCCL": _count_nccl(plan)}


def double_buffer_bytes(weights_bytes: int) -> int:
    """Return the bytes that a double buffer for weights takes in the shared memory of its node.

    `weights_bytes`: bytes of one copy of the weights.
    """
    return WEIGHT_BUFFERS * weights_bytes + _HEADER_BYTES


def _count_nccl(plan: Plan) -> Counter[int]:
    """Return node -> bytes that NCCL takes in the node's shared memory if its GPUs cannot access each other directly.

    Counted are the NCCL groups of models and engines on several GPUs, and of weight syncs.
    """
    by_node: Counter[int] = Counter()
    at = {
        component: plan.placement.locations(component)
        for component in plan.placement.components
    }
    # Nodes of the GPUs in NCCL groups: one entry per GPU and group.
    members = [
        node
        for component, places in at.items()
        if role_of(component) not in ("env", "agent")
        and (max(places.count) if component == "rollout" else sum(places.count)) > 1
        for node, count in zip(places.node, places.count, strict=True)
        for _ in range(count)
    ]
    for delivery in plan.deliveries:
        if isinstance(delivery, DeviceDelivery) and len(delivery.group) > 1:
            members += [
                at[member.component].node[member.rank] for member in delivery.group
            ]
    for node in members:
        if plan.topology.nodes[node].kind == "cuda":
            by_node[node] += nccl_shared()
    return by_node


def channel_bytes(
    location: ChannelLocation,
    item_bytes: int = 0,
    participants: int = LEAST_PARTICIPANTS,
) -> int:
    """Return an upper bound of the bytes that one location of a channel takes in shared memory.

    `item_bytes`: bytes of the channel's largest item. `participants`: how many ranks and tools may use the channel.
    """
    room = (
        min(max(_ALL_ROOM // location.capacity_items, _LEAST_ROOM), _MOST_ROOM)
        // 64
        * 64
    )
    entries = (location.capacity_items + _SPARE_ENTRIES) * (room + _RECORD_BYTES)
    segments = (
        location.capacity_items * item_segment_bytes(item_bytes)
        if item_bytes > room
        else 0
    )
    names = participants * _PARTICIPANT_BYTES
    return _FIXED_BYTES + names + len(location.keys) * _KEY_BYTES + entries + segments


def item_segment_bytes(item_bytes: int) -> int:
    """Return the bytes of the shared-memory segment that holds an item of `item_bytes` bytes.

    Only few different segment sizes are used, so that a segment can be reused for many items. At most an eighth of a
    large segment is unused.
    """
    step = max(_SMALLEST_SEGMENT, 1 << max(0, (item_bytes - 1).bit_length() - 4))
    return -(-item_bytes // step) * step


def simulator_items(
    plan: Plan, spaces: PolicySpaces, rollout_steps: int
) -> dict[str, int]:
    """Return channel -> bytes of its largest item, in a job on simulators.

    Every episode is assumed to end once per iteration. Weights pass through no channel: actor ranks write into the copy
    on their own node, and stream their part to the rank that writes the copy on another node.
    """
    routes = plan.row_routes
    observation = observation_bytes(spaces)
    # An action with its log-probability and value.
    decision = action_bytes(spaces.actions) + 2 * _FLOAT32
    # A step also has its reward and two end flags (terminated, truncated).
    step = observation + decision + _FLOAT32 + 2
    observed = routes.observations.most_rows
    gathered = routes.trajectories.most_rows
    return {
        "observations": observed * observation + ITEM_BYTES,
        "actions": observed * (decision + _FLOAT32 * spaces.memory) + ITEM_BYTES,
        "trajectories": gathered * (rollout_steps * step + 2 * observation)
        + ITEM_BYTES,
    }


def _image_bytes(config: Config) -> int:
    """Return the most bytes that the images of one prompt take; 0 for a model without vision.

    All samples of one prompt use the same images.
    """
    sees = config.model is not None and "vision_config" in config.model
    if sees:
        return config.text_env.max_image_bytes
    return 0


def text_items(
    plan: Plan, algorithm: AlgorithmConfig, weights_bytes: int, image_bytes: int = 0
) -> dict[str, int]:
    """Return channel -> bytes of its largest item, in a job on language models.

    `weights_bytes`: bytes of one whole copy of the weights. `image_bytes`: most bytes of the images of a prompt. Bytes
    per token: 4 in a request, for the token id; 12 in an answer, for id, log-probability and policy version; 13 in a
    sample, which also has a mask.
    """
    tokens = algorithm.longest
    each = algorithm.samples_per_prompt
    items = {
        "requests": 4 * tokens + image_bytes + ITEM_BYTES,
        "completions": 12 * tokens + ITEM_BYTES,
        "samples": _group_bytes(algorithm) + image_bytes,
        "scores": 4 * tokens + ITEM_BYTES,
        "returns": each * (4 * tokens + ITEM_BYTES),
        "weights": 0,  # weights pass through no channel, as in `simulator_items`
    }
    items |= {
        c.name: items[role_of(c.name)] for c in plan.channels if c.name not in items
    }
    return {**items, "weights.reference": min(BUCKET_BYTES, weights_bytes)}


def _group_bytes(algorithm: AlgorithmConfig) -> int:
    """Return the most bytes that the samples of one prompt take, without images."""
    return algorithm.samples_per_prompt * (13 * algorithm.longest + ITEM_BYTES)
