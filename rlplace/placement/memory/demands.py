"""The memory demand of each role, by stage, on each of its accelerators and on its host.

There is one class per kind of work: trained language models, scoring models, engines and simulators; `policy_demands`
has simulator policies. `footprint` returns the bytes of one rank for a given placement.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from rlplace.config.blocks.language_model import FrozenConfig, TextRolloutConfig
from rlplace.config.blocks.training import ActorConfig, TrainedConfig
from rlplace.config.fields import Dtype
from rlplace.placement.flow import Delivery, DeviceDelivery
from rlplace.placement.memory import formulas
from rlplace.placement.memory.formulas import DTYPE_BYTES
from rlplace.placement.memory.model import ModelShape
from rlplace.placement.memory.passes import Moment, Pass
from rlplace.placement.schedule import Residency

_OFF, _WEIGHTS, _FULL = Residency
_GRADIENTS = 2
_OPTIMIZER = 1  # ZeRO stage from which ranks shard optimizer state; weights are sharded with gradients, as FSDP does
_FLOAT32 = 4
_MOMENTS = 2  # of Adam


class Part(enum.Enum):
    """The purpose of bytes on an accelerator, such as gradients or the KV cache."""

    PARAMETERS = "parameters"
    ADAPTER = "LoRA adapter"  # factors that an engine applies beside its weights
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    GATHERED = "gathered weights"
    KV_CACHE = "KV cache"
    SIMULATOR = "simulator"
    WORKSPACE = "workspace"
    SYNC = "sync buffers"
    LOADING = "loading"  # temporary, when weights are first loaded
    CONTEXT = "CUDA context"
    COMMUNICATOR = "communicator buffers"
    ASLEEP = "kept while asleep"
    FRAGMENTS = "reserved by torch, not allocated"
    MEASURED = "measured"
    UNFORESEEN = "beyond what was foreseen"


class HostPart(enum.Enum):
    """The purpose of bytes on a host, such as copies of offloaded weights."""

    OFFLOADED = "offloaded copies"
    DECLARED = "as declared"
    OPTIMIZER = "optimizer state"
    SLEEP = "sleep copies"
    # weights that stay on the host and are copied to the accelerator when they are used
    WEIGHTS = "weights"
    AVERAGE = "averaged weights"
    RECEIVED = "weights as received"  # whole weights, of which a rank keeps its part
    GRADIENTS = "gradients"  # on their way to an optimizer on the host
    # Inputs of layers, between the forward and the backward pass.
    ACTIVATIONS = "activations"
    # until the checkpoint is written; stages go on meanwhile
    CHECKPOINT = "copy for a checkpoint"
    SAVED = "weights to be saved"  # whole, on rank 0 only, after the last learn
    EVALUATION = "policy of an evaluation"  # on rank 0 only, while it evaluates
    BUCKETS = "weights on their way"  # to the processes of an engine, during a sync
    STREAMED = "weights to other nodes"  # buckets on their way to other nodes
    # buckets from other nodes, for one engine of a node
    TAKEN = "weights from other nodes"
    # last version sent to other nodes; the next sync sends only what changed
    SENT = "weights as sent"
    # Bytes added by rounding sizes up, and free blocks kept for the next offload.
    POOL = "pinned pool"
    SIMULATOR = "simulator"
    SAMPLES = "samples that may not be learned yet"
    ROUTES = "routes of answers"  # experts that the engine chose for each token of answers in flight
    SHARED = "in shared memory"


# Temporary or allocator bytes, which workers do not report.
_PASSING = frozenset(
    {
        HostPart.POOL,
        HostPart.GRADIENTS,
        HostPart.ACTIVATIONS,
        HostPart.CHECKPOINT,
        HostPart.SAVED,
        HostPart.EVALUATION,
        HostPart.BUCKETS,
        HostPart.STREAMED,
        HostPart.TAKEN,
        HostPart.ROUTES,
    }
)
# held by only one of the ranks on a host
ONCE = frozenset({HostPart.SAVED, HostPart.EVALUATION, HostPart.TAKEN})
Bytes = Mapping[Part, int]
HostBytes = Mapping[HostPart, int]
# (bytes or elements of a tensor on the fullest rank, number of such tensors)
Tensors = Sequence[tuple[int, int]]
# Parts of the process itself, which workers do not report.
_PROCESS = frozenset({Part.CONTEXT, Part.COMMUNICATOR, Part.ASLEEP})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The placement of a component on one kind of accelerator. A demand computes a footprint from it.

    `ranks`: all ranks of the component. `accelerators_per_rank`: 0 for ranks without accelerators. `tensor_parallel`:
    accelerators that split one copy of the model. `context_parallel`: model copies that split the tokens of the same
    samples. `memory_bytes`: memory of one accelerator; 0: not known. `kind`: kind of accelerator, such as "cuda".
    """

    ranks: int  # world size
    accelerators_per_rank: int  # 0 for a component on nodes or other hardware
    tensor_parallel: int = 1  # accelerators that split one copy of the model
    # Replicas that split the tokens of the same samples.
    context_parallel: int = 1
    memory_bytes: int  # of one accelerator; 0: not known
    kind: str  # "cuda", "emulated", ...

    @property
    def copies(self) -> int:
        """The number of model copies of the component, at least 1. The copies may shard their state among them."""
        return max(1, self.ranks * self.accelerators_per_rank // self.tensor_parallel)

    @property
    def groups(self) -> int:
        """The number of communicators per process: one for the copies, and one each for tensor and context parallelism.

        Tensor or context parallelism counts only if its size is above 1.
        """
        return 1 + (self.tensor_parallel > 1) + (self.context_parallel > 1)

    def tokens(self, of_pass: int) -> int:
        """Return how many tokens of a pass one context-parallel rank processes. `of_pass`: tokens of the whole pass."""
        return -(-of_pass // self.context_parallel)

    @property
    def emulated(self) -> bool:
        return self.kind == "emulated"

    def process(self, groups: int) -> dict[Part, int]:
        """Return purpose -> bytes on an accelerator that a process takes in addition to its tensors.

        `groups`: the number of communicators of the process. The result is empty on an emulated accelerator.
        """
        if self.emulated:
            return {}
        several = self.ranks * self.accelerators_per_rank > 1
        return {
            Part.CONTEXT: formulas.CONTEXT_BYTES,
            Part.COMMUNICATOR: formulas.communicator(groups) if several else 0,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The bytes of one rank on each of its accelerators, and on its host, by purpose.

    `held`: residency -> all bytes on an accelerator, including those that stay for the whole life of the process.
    `working`: stage -> bytes used while the stage runs, in addition to `held`. `loading`: bytes used in addition to
    `held` when the weights are first loaded. `host`: residency -> bytes on the host. `lacking`: the reason why the
    component cannot work, such as a KV cache without room; None if it can work.
    """

    held: Mapping[Residency, Bytes]
    # Stage -> bytes used while it runs, in addition to `held`.
    working: Mapping[str, Bytes] = dataclasses.field(default_factory=dict)
    # Bytes used in addition to `held` when the component first leaves OFF.
    loading: Bytes = dataclasses.field(default_factory=dict)
    host: Mapping[Residency, HostBytes] = dataclasses.field(default_factory=dict)
    # Reason why the component cannot work, such as a KV cache without room; None if it can.
    lacking: str | None = None

    def reported_bytes(self, residency: Residency) -> int:
        """Return the bytes on an accelerator that the worker reports after it has moved to a residency.

        Bytes of the process itself, such as its CUDA context, are not reported.
        """
        return sum(
            size for part, size in self.held[residency].items() if part not in _PROCESS
        )

    def host_bytes(self, residency: Residency) -> int:
        """Return the bytes on the host that the worker reports after it has moved to a residency.

        Temporary bytes, and bytes that the memory allocator adds, are not reported.
        """
        return sum(
            size
            for part, size in self.host.get(residency, {}).items()
            if part not in _PASSING
        )

    def corrected(
        self, measured: Mapping[Residency, int], unforeseen: Mapping[Residency, int]
    ) -> Footprint:
        """Return the footprint corrected by measurements of an earlier run.

        `measured`: residency -> measured bytes, which replace the computed bytes. `unforeseen`: residency -> bytes that
        are added to the computed bytes. With `unforeseen`, a later change of the memory demand still changes the
        result; with `measured`, it does not.
        """
        held = dict(self.held)
        for residency, parts in self.held.items():
            if residency in measured:
                process = {
                    part: size for part, size in parts.items() if part in _PROCESS
                }
                held[residency] = {Part.MEASURED: measured[residency]} | process
            if unforeseen.get(residency):
                held[residency] = {
                    **held[residency],
                    Part.UNFORESEEN: unforeseen[residency],
                }
        return dataclasses.replace(self, held=held)


def total(tensors: Tensors) -> int:
    return sum(size * times for size, times in tensors)


def host_copies(
    placed: Placed, part: HostPart, *, off: Tensors, weights: Tensors = ()
) -> dict[Residency, HostBytes]:
    """Return residency -> bytes that a rank keeps on its host: copies of tensors that are not on its accelerators.

    `part`: the purpose of the copies. `off`: the tensors that are copied while the residency is off. `weights`: the
    tensors that are copied while the residency is weights. Copies of GPU tensors are in pinned memory, and the pinned
    pool never shrinks. Set-up ends with every component off, so the pool has its full size from the first stage on,
    even if nothing moves later.
    """
    pool = (
        0
        if placed.emulated
        else sum(formulas.pinned(size) * times for size, times in off)
    )
    sizes = {
        Residency.OFF: total(off),
        Residency.WEIGHTS: total(weights),
        Residency.FULL: 0,
    }
    return {
        residency: {part: size, HostPart.POOL: max(0, pool - size)}
        for residency, size in sizes.items()
    }


def saved_copy(tensors: Tensors, copied: bool) -> int:
    return formulas.checkpoint_copy(
        total(tensors), max((size for size, _ in tensors), default=0), copied
    )


class Demand(Protocol):
    """The memory that a component needs, before its accelerators are known.

    Its method `footprint` computes the bytes of one rank in each residency, for a given placement.
    """

    def footprint(self, placed: Placed) -> Footprint: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSync:
    """The memory that a weight sync between accelerators takes on one accelerator; nothing for a sync through the host.

    `buckets`: whether the accelerator has two buckets of weights in transit. `copy`: whether it has a second copy of
    all weights, which replaces the copy in use at the end. `windows`: whether it has buffers of whole weights, from
    which an engine loads its part. `group`: whether it has a communicator for the broadcast. `number`:
    bytes per number during the transfer.
    """

    buckets: bool = False  # two buckets
    copy: bool = False  # a whole copy of the weights, before it replaces those in use
    # Windows of whole weights, from which an engine loads its part
    windows: bool = False
    # A communicator with the other members of the broadcast, from the first sync on.
    group: bool = False
    number: int = _FLOAT32  # bytes per number during the transfer

    @classmethod
    def sending(cls, deliveries: Iterable[Delivery]) -> DeviceSync:
        found = [d for d in deliveries if isinstance(d, DeviceDelivery)]
        return cls(buckets=bool(found), group=any(d.grouped for d in found))

    @classmethod
    def receiving(
        cls, deliveries: Iterable[Delivery], dtype: Dtype = "fp32"
    ) -> DeviceSync:
        """Return the memory that a sync takes on the receiving accelerator that holds the most.

        `deliveries`: the planned copies of the weights. `dtype`: dtype of the weights while they are sent. A receiver
        on the accelerator of an actor rank uses the buckets of that rank (its owner, see `DeviceDelivery`). Any other
        receiver has buckets of its own.
        """
        found = [d for d in deliveries if isinstance(d, DeviceDelivery)]
        free = any(None in d.owners for d in found)
        copy = any(d.whole and (not d.parts or 1 in d.parts) for d in found)
        windows = any(d.in_windows for d in found)
        return cls(
            buckets=free,
            copy=copy,
            windows=windows,
            group=free,
            number=DTYPE_BYTES[dtype],
        )

    def beside(self, process: Mapping[Part, int]) -> dict[Part, int]:
        """Return purpose -> bytes of a process, with the bytes of the sync's communicator added if the sync has one.

        `process`: purpose -> bytes without that communicator.
        """
        group = (
            {
                Part.COMMUNICATOR: process.get(Part.COMMUNICATOR, 0)
                + formulas.communicator(1)
            }
            if self.group
            else {}
        )
        return {**process, **group}

    def working(self, weights_bytes: int, loading: int = 0, windows: int = 0) -> int:
        """Return the peak bytes during a sync of `weights_bytes` bytes of weights.

        `loading`: bytes that the engine takes to load the weights. `windows`: bytes of the buffers of whole weights. In
        a sync with such buffers, buckets, buffers and loading exist at the same time. In any other sync, only the
        larger of buckets and loading counts.
        """
        buckets = formulas.sync_buckets(weights_bytes) if self.buckets else 0
        beside = buckets + windows + loading if self.windows else 0
        return max(buckets, loading, beside) + (weights_bytes if self.copy else 0)

    def stages(self, weights_bytes: int) -> dict[str, Bytes]:
        """Return {"sync": bytes that the sync takes, by purpose}; empty if the sync takes no bytes.

        `weights_bytes`: bytes of one copy of the weights.
        """
        size = self.working(weights_bytes)
        if size:
            return {"sync": {Part.SYNC: size}}
        return {}


def _sized(tensors: Tensors, each: int) -> list[tuple[int, int]]:
    """Return the (bytes, count) of each entry in `tensors`, which has (elements, count). `each`: bytes per element."""
    return [(elements * each, times) for elements, times in tensors]


def larger(*parts: Bytes) -> Bytes:
    return max(parts, key=lambda found: sum(found.values()))


def _parts(moment: Moment, placed: Placed) -> Bytes:
    """Return purpose -> bytes of a pass; on a GPU with the workspaces of its matrix products and torch's fragments."""
    parts = {
        Part.GRADIENTS: moment.gradients,
        Part.GATHERED: moment.gathered,
        Part.ACTIVATIONS: moment.activations,
        Part.LOGITS: moment.logits,
    }
    if placed.emulated:
        return parts
    passing = moment.gathered + moment.activations + moment.logits
    return {
        **parts,
        Part.WORKSPACE: formulas.PASS_WORKSPACE_BYTES,
        Part.FRAGMENTS: formulas.fragments(passing),
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDemand:
    """The memory demand of a language model that is trained.

    `model`: its sizes. `block`: the component's block of the config. `sequence_length`: tokens of the longest sequence.
    Ranks shard the state of the model; while the component is off its accelerators, the host holds a copy of the state.
    `packed`: True: a pass has `token_budget` tokens; False: it has `micro_batch` sequences. `sync`: what sending
    weights takes on an accelerator. `samples`: samples per optimizer step over all ranks; 0: not known. `streams`:
    whether weights are streamed to other nodes. `sent`: number of weight copies on other nodes that get only the
    changed weights. `copied`: whether checkpoints are written from a copy on the host; None: checkpoints do not include
    this model. `refreshes`: whether its weights refresh a reference. `early`: whether it starts to learn during
    rollout.
    """

    model: ModelShape
    block: TrainedConfig
    sequence_length: int
    # True: a pass has `token_budget` tokens; False: it has `micro_batch` sequences.
    packed: bool = False
    sync: DeviceSync = DeviceSync()
    samples: int = 0  # samples per optimizer step over all ranks; 0: not known
    # whether weights are streamed to other nodes through its host
    streams: bool = False
    # number of copies on other nodes; a rank keeps its part of their last version, to send only changes
    sent: int = 0
    # Whether checkpoints are written from a host copy; None: checkpoints do not include this model.
    copied: bool | None = None
    refreshes: bool = False  # whether its weights refresh a reference
    early: bool = False  # whether it starts to learn during rollout

    def footprint(self, placed: Placed) -> Footprint:
        block, number, parallel = (
            self.block,
            DTYPE_BYTES[self.block.compute],
            placed.tensor_parallel,
        )
        trained = self._trained(placed, _GRADIENTS)
        # With LoRA, the base weights are kept in the compute dtype and never change.
        # Weights: trained ones, and with LoRA the frozen base weights.
        shards = placed.copies if block.zero_stage >= _GRADIENTS else 1
        frozen = (
            []
            if block.lora_rank is None
            else _sized(self.model.parts(parallel, shards), number)
        )
        weights = _sized(trained, DTYPE_BYTES[block.trained_dtype]) + frozen
        # Optimizer state: on the accelerator (`here`) or on the host (`there`).
        masters, moments, unpacked = self._optimizer(placed)
        state = masters + moments
        here, there = ([], state) if block.optimizer.on_host else (state, [])
        process = self.sync.beside(placed.process(placed.groups))
        resident = {**process, Part.PARAMETERS: total(weights)}
        work = self._pass(placed)
        whole = formulas.parameters(self.model, number, parallel)
        forward = _parts(work.forward(), placed)
        # Weight sync: buckets, merged LoRA weights, exchanged columns, verification.
        syncing = {Part.SYNC: self.sync.working(whole)}
        kept = {HostPart.OPTIMIZER: total(there)}
        average = list[tuple[int, int]]()
        refreshing = {
            Part.SYNC: 0
            if block.lora_rank is None
            else self._merged(placed, shards, number)
        }
        exchanged = self._exchanged(placed, shards)
        if isinstance(block, ActorConfig):
            if not block.sync.factors_apart:
                syncing[Part.SYNC] += refreshing[Part.SYNC]
            if block.sync.factors_apart or block.lora_rank is None:
                syncing[Part.SYNC] += exchanged
            # Verification by log-probabilities runs a forward pass, which gathers weights.
            if block.sync.verify == "logprobs" and block.sync.verify_every > 0:
                syncing[Part.GATHERED] = forward[Part.GATHERED]
            if block.ema_decay is not None:
                average = _sized(trained, _FLOAT32)
                kept[HostPart.AVERAGE] = total(average)
        # Host memory that is kept in every residency.
        if self.sent:
            kept[HostPart.SENT] = self.sent * formulas.parameters(
                self.model, number, parallel, placed.copies
            )
        if self.streams:
            kept[HostPart.STREAMED] = formulas.stream_buckets(whole, sent=True)
        # Checkpoint copy: the weights that the optimizer steps, Adam's moments and averaged weights.
        if self.copied is not None:
            stepped = masters or _sized(trained, DTYPE_BYTES[block.trained_dtype])
            kept[HostPart.CHECKPOINT] = saved_copy(
                stepped + (unpacked or moments) + average, self.copied
            )
            kept[HostPart.CHECKPOINT] += 0 if self.copied else total(unpacked)
        # Host memory by residency: offloaded copies, and while FULL what passes through.
        copies = host_copies(
            placed, HostPart.OFFLOADED, off=weights + here, weights=here
        )
        host = {at: {**copied, **kept} for at, copied in copies.items()}
        saved = DTYPE_BYTES[block.weights if block.lora_rank is None else block.compute]
        moved = _FLOAT32 * total(trained) if block.optimizer.on_host else 0
        passing = {
            HostPart.SAVED: formulas.saved_file(self.model, saved),
            HostPart.GRADIENTS: moved,
        }
        passing[HostPart.ACTIVATIONS] = (
            self._inputs(placed, work) if block.activation_offload else 0
        )
        host[_FULL] = {**host[_FULL], **passing}
        saving = {Part.GATHERED: self._saving(shards * parallel, saved)}
        working = {
            "sync": larger(syncing, refreshing) if self.refreshes else syncing,
            "infer": forward,
            "learn": larger(
                _parts(self._learning(placed, work), placed), saving
            ),  # after the last of which it is saved
            **dict.fromkeys(("save_model", "digest"), saving),
        }
        working |= {"refresh": refreshing} if self.refreshes else {}
        working |= {"rollout": working["learn"]} if self.early else {}
        return Footprint(
            held={
                _OFF: process,
                _WEIGHTS: resident,
                _FULL: {**resident, Part.OPTIMIZER: total(here)},
            },
            working=working,
            loading={
                Part.LOADING: self.model.largest_weight_elements
                * DTYPE_BYTES[block.trained_dtype]
            },
            host=host,
        )

    def _optimizer(
        self, placed: Placed
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the tensors of the optimizer: (master weights, Adam's moments, unpacked moments).

        Each is a list of (bytes of a tensor on the fullest rank, number of tensors of this size). 8-bit moments are
        unpacked to float32 for checkpoints; the third list is empty for other optimizers.
        """
        trained = self._trained(placed, _OPTIMIZER)
        packed = self.block.optimizer.kind == "adamw_8bit"
        masters = _sized(trained, _FLOAT32) if self._masters else []
        # Moments have the dtype of the weights that the optimizer steps.
        each = _FLOAT32 if masters else DTYPE_BYTES[self.block.trained_dtype]
        moments = [
            (size, _MOMENTS * times)
            for n, times in trained
            for size in formulas.moments(n, each, packed)
        ]
        return (
            masters,
            moments,
            [(n * _FLOAT32, _MOMENTS * times) for n, times in trained]
            if packed
            else [],
        )

    @property
    def _masters(self) -> bool:
        """Whether the optimizer updates float32 master copies of the weights."""
        return (
            self.block.optimizer.on_host or self.block.optimizer.kind == "adamw_master"
        )

    def _pass(self, placed: Placed) -> Pass:
        block, shared = (
            self.block,
            self.block.zero_stage >= _GRADIENTS and placed.copies > 1,
        )
        return Pass(
            model=self.model,
            tokens=placed.tokens(
                formulas.pass_tokens(block, self.sequence_length, self.packed)
            ),
            number=DTYPE_BYTES[block.compute],
            parallel=placed.tensor_parallel,
            exchanged=placed.context_parallel,
            shared=shared,
            kept_gathered=block.zero_stage < 3,
            by_sequence=placed.kind != "cuda"
            or block.compute == "fp32",  # else by one kernel
            repeated=placed.kind == "cuda" and block.compute == "fp32",
            routes=self._replayed,
            balanced=isinstance(block, ActorConfig) and block.router_loss_coef > 0,
        )

    @property
    def _replayed(self) -> int:
        """Bytes per token of the experts that routers replay; 0: none are."""
        if isinstance(self.block, ActorConfig) and self.block.router_replay:
            return self.model.route_bytes
        return 0

    def _learning(self, placed: Placed, work: Pass) -> Moment:
        """Return the bytes, by kind, at the peak of an optimizer step, which may have several micro-batches.

        `work`: the sizes of a pass.
        """
        block = self.block
        parallel = placed.tensor_parallel
        shards = placed.copies
        if block.zero_stage < _GRADIENTS:
            shards = 1
        elements = total(self._trained(placed, _GRADIENTS))
        outside = 0
        if block.lora_rank is None:
            outside = sum(w.part(parallel, shards) for w in self.model.root)
        rounded = block.trained_dtype != "fp32" and not self._masters
        each = -(-self.samples // max(1, placed.copies // placed.context_parallel))
        return work.learning(
            trained=(elements - outside, outside),
            checkpointing=block.checkpointing,
            offload=block.activation_offload,
            earlier=not self.samples
            or placed.tokens(each * self.sequence_length) > work.tokens,
            master=DTYPE_BYTES[block.trained_dtype] if rounded else 0,
        )

    def _inputs(self, placed: Placed, work: Pass) -> int:
        """Return the host bytes that the inputs of all layers take when activations are offloaded.

        `work`: the sizes of a pass.
        """
        each = (
            formulas.checkpoints(self.model, work.tokens, work.number, work.parallel)
            // self.model.layers
        )
        return self.model.layers * (each if placed.emulated else formulas.pinned(each))

    def _saving(self, shards: int, each: int) -> int:
        """Return the bytes on an accelerator while the model is saved: one whole weight at a time is put together.

        LoRA factors are merged into the weight. `shards`: ranks that shard or split a weight. `each`: bytes per number.
        """
        factors = self.block.lora_rank is not None
        projection = max(
            (w.elements for w, _ in self.model.weights() if factors and w.projection),
            default=0,
        )
        return formulas.whole_weight(
            self.model.largest_weight_elements, projection, each, shared=shards > 1
        )

    def _exchanged(self, placed: Placed, shards: int) -> int:
        """Return the bytes of weights split by columns, after ranks have exchanged pieces so that each has whole rows.

        This happens before weights are sent. The pieces of the last weight are counted in addition. `shards`: ranks
        that shard a weight.
        """
        if placed.tensor_parallel == 1:
            return 0
        each = DTYPE_BYTES[
            self.block.weights if self.block.lora_rank is None else self.block.compute
        ]
        cut = [
            (w.part(placed.tensor_parallel, shards), n)
            for w, n in self.model.weights()
            if w.by_columns
        ]
        return each * (total(cut) + max((size for size, _ in cut), default=0))

    def _merged(self, placed: Placed, shards: int, number: int) -> int:
        """Return the bytes of merged weights (base weights plus LoRA factors), which are kept until they are sent.

        The merge is computed in float32. `shards`: ranks that shard a weight. `number`: bytes per number of the merged
        weights.
        """
        cut = placed.tensor_parallel
        parts = [
            (w.part(cut, shards), layers)
            for w, layers in self.model.weights()
            if w.projection
        ]
        return total(parts) * number + (
            2 * _FLOAT32 * max(n for n, _ in parts) if number < _FLOAT32 else 0
        )

    def _trained(self, placed: Placed, shared_from: int) -> Tensors:
        """Return the trained tensors as (elements on the fullest rank, number of tensors of this size).

        `shared_from`: the lowest ZeRO stage in which ranks shard these tensors.
        """
        shards = placed.copies if self.block.zero_stage >= shared_from else 1
        if self.block.lora_rank is None:
            return self.model.parts(placed.tensor_parallel, shards)
        return self.model.lora_parts(
            self.block.lora_rank, placed.tensor_parallel, shards
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoringDemand:
    """The memory demand of a reference or reward model, which makes only forward passes.

    `model`: its sizes. `block`: the component's block of the config. `sequence_length`: tokens of the longest sequence.
    While the component is off its accelerators, the host holds a copy of the model. Without accelerators, or with
    `on_host`, the host always holds a copy. `packed`: True: a pass has `token_budget` tokens; False: it has
    `micro_batch` sequences. `refreshed`: dtype of the weights that refresh the model; None: it is never refreshed.
    `copied`: whether checkpoints are written from a copy on the host; None: checkpoints do not include this model.
    """

    model: ModelShape
    block: FrozenConfig
    sequence_length: int
    packed: bool = False  # as in `TrainingDemand`
    # Dtype of the whole weights that refresh it, which arrive on each rank's host; None: never refreshed.
    refreshed: Dtype | None = None
    # Whether checkpoints are written from a host copy; None: checkpoints do not include this model.
    copied: bool | None = None

    def footprint(self, placed: Placed) -> Footprint:
        block, number, parallel = (
            self.block,
            DTYPE_BYTES[self.block.computed_in],
            placed.tensor_parallel,
        )
        process = placed.process(placed.groups)
        on_host = block.on_host or not placed.accelerators_per_rank
        shards = (
            (placed.copies if placed.accelerators_per_rank else placed.ranks)
            if block.sharded
            else 1
        )
        tensors = self.model.stored(number, parallel, shards)
        there = process if on_host else process | {Part.PARAMETERS: total(tensors)}
        work = Pass(
            model=self.model,
            tokens=placed.tokens(
                formulas.pass_tokens(block, self.sequence_length, self.packed)
            ),
            number=number,
            parallel=parallel,
            exchanged=placed.context_parallel,
            copied=shards > 1 or block.on_host,
            shared=shards > 1,
            repeated=placed.kind == "cuda" and block.computed_in == "fp32",
        )
        forward = _parts(work.forward(), placed)
        host: dict[Residency, HostBytes]
        if on_host:
            host = dict.fromkeys(
                Residency, host_copies(placed, HostPart.WEIGHTS, off=tensors)[_OFF]
            )
        else:
            host = host_copies(placed, HostPart.OFFLOADED, off=tensors)
        if self.refreshed is not None:
            whole = formulas.parameters(self.model, DTYPE_BYTES[self.refreshed])
            # Bound: the buckets of a streamed refresh.
            coming = formulas.stream_buckets(whole, sent=False, encrypted=True)
            received = {HostPart.RECEIVED: whole, HostPart.BUCKETS: coming}
            host = {
                at: kept if at is _OFF else {**kept, **received}
                for at, kept in host.items()
            }
            copy = (
                {}
                if self.copied is None
                else {HostPart.CHECKPOINT: saved_copy(tensors, self.copied)}
            )
            host = {at: {**kept, **copy} for at, kept in host.items()}
        return Footprint(
            held={_OFF: process, _WEIGHTS: there, _FULL: there},
            # in whichever of the two stages it runs
            working={"infer": forward, "rollout": forward},
            loading={}
            if on_host
            else {Part.LOADING: self.model.largest_weight_elements * number},
            host=host,
        )


# Ranks for which vLLM 0.32 has buffers of LoRA factors (`MaxLoRARanks`)
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def vllm_lora_rank(rank: int) -> int | None:
    """Return the rank of vLLM's buffers for LoRA factors of `rank`; None if the rank is too large for vLLM."""
    return next((most for most in VLLM_LORA_RANKS if most >= rank), None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineDemand:
    """The memory demand of a generation engine such as vLLM.

    `model`: sizes of its model. `block`: the rollout's block of the config. `adapter_rank`: rank of the LoRA factors
    that the engine applies beside its weights; None: it applies none. The engine takes a share of an accelerator's
    memory, or has a KV cache of a fixed size. `sequence_length`: tokens of the longest sequence; the KV cache must hold
    one. `sync`: what receiving weights takes on an accelerator. `taken`: host bytes of buckets of weights from other
    nodes. `answers`: answers per iteration on the rank with the most; None: not known. `cut`: whether evaluation draws
    from the likeliest tokens only (top-p). `score`: bytes that drawing tokens takes for each sequence and entry of the
    vocabulary. `routes`: whether the engine records the experts of each token.
    """

    model: ModelShape
    block: TextRolloutConfig
    # Rank of the LoRA factors that the engine applies beside its weights; None: it applies none
    adapter_rank: int | None = None
    # tokens of the longest sequence; the KV cache must hold at least one such sequence
    sequence_length: int
    sync: DeviceSync = DeviceSync()
    taken: int = 0  # host bytes of buckets for weights that come from other nodes
    # Answers per iteration on the rank with the most; None: not known. vLLM prepares for any number.
    answers: int | None = None
    # Whether evaluation samples from the likeliest tokens only (top-p), which needs sorted probabilities.
    cut: bool = False
    # Bytes of each score while tokens are drawn. Runs ask for log-probabilities of processed logits.
    score: int = formulas.SCORE_BYTES + formulas.LOGPROB_BYTES
    # Whether the engine records the experts of each token
    routes: bool = False

    def _kept(self, parallel: int) -> int:
        """Return the bytes on a GPU that the engine keeps outside of torch, also while it sleeps.

        `parallel`: accelerators that split the model.
        """
        kept = formulas.KERNELS_BYTES
        if parallel > 1:
            kept += formulas.ALL_REDUCE_BYTES
        if self.block.engine != "transformers" and not self.block.enforce_eager:
            kept += formulas.GRAPHS_BYTES
        return kept

    def _adapter(self, parallel: int) -> int:
        """Return the numbers of the LoRA factors that the engine has beside its weights, on one accelerator.

        vLLM has buffers of certain ranks only. `parallel`: accelerators that split the model.
        """
        rank = self.adapter_rank
        if rank is None:
            return 0
        if self.block.engine == "vllm":
            rank = vllm_lora_rank(rank) or rank
        return total(self.model.lora_parts(rank, parallel))

    def footprint(self, placed: Placed) -> Footprint:
        block, model, number, parallel = (
            self.block,
            self.model,
            DTYPE_BYTES[self.block.dtype],
            placed.tensor_parallel,
        )
        # Engines do not communicate with each other. What an engine of several accelerators communicates with is part
        # of what it keeps.
        context = self.sync.beside(placed.process(0))
        kept = {Part.ASLEEP: 0 if placed.emulated else self._kept(parallel)}
        process = context | kept
        weights, sent = (
            formulas.parameters(model, each, parallel)
            for each in (number, self.sync.number)
        )
        simple = block.engine == "transformers"
        adapter = self._adapter(parallel) * number
        step = functools.partial(
            formulas.engine_workspace,
            model,
            block.step_tokens,
            block.step_sequences,
            number,
            parallel,
        )
        workspace = step(self.score)
        if simple:
            cut = bool(block.top_k or block.penalties) or block.top_p < 1 or self.cut
            most = block.step_sequences
            answers = min(most, self.answers or most)
            workspace = formulas.generation(
                model, answers, self.sequence_length, number, cut
            )
        if block.own and block.workspace_memory is not None:
            workspace = block.workspace_memory
        # vLLM sizes its cache by a dummy step, which does not include the memory of penalties
        penalised = 0
        if block.engine == "vllm" and block.penalties.keys() - {"min_tokens"}:
            penalised = step(formulas.PENALTY_SCORE_BYTES)
        cache = block.kv_cache_memory
        if cache is None:
            assert not isinstance(block.gpu_memory_utilization, str), (
                "a case begins with all of it"
            )
            # vLLM measures its share after its process has created a context and communicators: these are not part of
            # the
            # share.
            of_process = kept if block.engine == "vllm" else process
            taken = sum(of_process.values()) + weights + adapter + workspace
            cache = formulas.kv_share(
                placed.memory_bytes, block.gpu_memory_utilization, taken
            )
        longest = self.sequence_length
        each = DTYPE_BYTES[block.cache]
        row = formulas.kv_sequence(model, longest, block.step_tokens, each, parallel)
        # The transformers engine allocates whole rows: only sequences of full length count.
        if simple:
            cache -= cache % row
        room = cache * longest // row
        known = block.kv_cache_memory is not None or placed.memory_bytes
        lacking = None
        if known and room < self.sequence_length:
            lacking = f"the KV cache holds {room} tokens, the longest sequence has {self.sequence_length}"
        # Weights are copied one by one from the host to their place; vLLM first rebuilds each module.
        anew = 0 if simple else formulas.reloading(model, number, parallel)
        windows = formulas.sync_windows(model, self.sync.number, 1 if simple else 2)
        awake = process | {Part.PARAMETERS: weights}
        if adapter:
            awake[Part.ADAPTER] = adapter
        # Each accelerator of the rank has a part of the weights, and the host has all parts. Sleep level 2 keeps no
        # copy.
        parts = model.parts(parallel) if block.sleep_level == 1 else []
        copies = [
            (part * number, layers * placed.accelerators_per_rank)
            for part, layers in parts
        ]
        host = host_copies(placed, HostPart.SLEEP, off=copies)
        way = {HostPart.TAKEN: self.taken}
        if self.routes:
            # Once by pass, and once joined when the answer ends
            known = min(block.step_sequences, self.answers or block.step_sequences)
            recorded = (known + 1) * self.sequence_length * model.route_bytes
            way[HostPart.ROUTES] = recorded
        if placed.accelerators_per_rank > 1 and not self.sync.windows:
            way[HostPart.BUCKETS] = formulas.cut_buckets(model)
        host = {
            at: kept if at is _OFF else {**kept, **way} for at, kept in host.items()
        }
        return Footprint(
            held={
                _OFF: process,
                _WEIGHTS: awake,
                _FULL: awake | {Part.KV_CACHE: cache},
            },
            working={
                "sync": {Part.SYNC: self.sync.working(sent, anew, windows)},
                "rollout": {Part.WORKSPACE: max(workspace, penalised)},
            },
            host=host,
            lacking=lacking,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorDemand:
    """The memory demand of environments, which is declared in the config.

    The environments are either full or off, with nothing in between. `samples_bytes`: host bytes of samples that are
    generated ahead and kept for checkpoints.
    """

    accelerator_bytes: int = 0
    host_bytes: int = 0
    # samples that are generated ahead, kept on the host for checkpoints
    samples_bytes: int = 0

    def footprint(self, placed: Placed) -> Footprint:
        host = {HostPart.SIMULATOR: self.host_bytes}
        host |= {HostPart.SAMPLES: self.samples_bytes} if self.samples_bytes else {}
        return Footprint(
            held={
                _OFF: {},
                _WEIGHTS: {},
                _FULL: {Part.SIMULATOR: self.accelerator_bytes},
            },
            host=dict.fromkeys(Residency, host),
        )
