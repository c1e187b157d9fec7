"""What each role asks of memory, when, on each of its accelerators and on its host.

One class per kind of work: models that train or only score, engines, simulators, and in `policy_demands` the policies
of these; `footprint` gives the bytes of one rank for a place.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from rlplace.config.schema import (
    ActorConfig,
    Dtype,
    FrozenConfig,
    TextRolloutConfig,
    TrainedConfig,
)
from rlplace.placement.flow import Delivery, DeviceDelivery
from rlplace.placement.memory import formulas
from rlplace.placement.memory.formulas import DTYPE_BYTES
from rlplace.placement.memory.model import ModelShape
from rlplace.placement.memory.passes import Moment, Pass
from rlplace.placement.schedule import Residency

_OFF, _WEIGHTS, _FULL = Residency
_GRADIENTS = 2
_OPTIMIZER = 1  # the ZeRO stage from which ranks share them; weights with the gradients, as FSDP does
_FLOAT32 = 4
_MOMENTS = 2  # of Adam


class Part(enum.Enum):
    """What bytes on an accelerator are for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    GATHERED = "gathered weights"
    KV_CACHE = "KV cache"
    SIMULATOR = "simulator"
    WORKSPACE = "workspace"
    SYNC = "sync buffers"
    LOADING = "loading"  # passes through when weights are first brought in
    CONTEXT = "CUDA context"
    COMMUNICATOR = "communicator buffers"
    ASLEEP = "kept while asleep"
    MEASURED = "measured"
    UNFORESEEN = "beyond what was foreseen"


class HostPart(enum.Enum):
    """What bytes on a host are for."""

    OFFLOADED = "offloaded copies"
    OPTIMIZER = "optimizer state"
    SLEEP = "sleep copies"
    WEIGHTS = "weights"  # that live there and come to the accelerator for a moment
    AVERAGE = "averaged weights"
    RECEIVED = "weights as received"  # whole, of which a rank takes its part
    GRADIENTS = "gradients"  # on their way to an optimizer there
    # Inputs of layers, from the forward to the backward pass
    ACTIVATIONS = "activations"
    CHECKPOINT = "copy for a checkpoint"  # until it is written, behind any stage
    SAVED = "weights to be saved"  # whole, on rank 0 alone, after the last learn
    BUCKETS = "weights on their way"  # to the processes of an engine, during a sync
    STREAMED = "weights to other nodes"  # on their way there
    TAKEN = "weights from other nodes"  # on their way here, to one engine of a node
    SENT = "weights as sent"  # to other nodes, which are next sent what changed
    # What rounding adds, and blocks that wait for the next offload
    POOL = "pinned pool"
    SIMULATOR = "simulator"
    SAMPLES = "samples that may not be learned yet"
    SHARED = "in shared memory"


# Not in what a worker reports
_PASSING = frozenset(
    {
        HostPart.POOL,
        HostPart.GRADIENTS,
        HostPart.ACTIVATIONS,
        HostPart.CHECKPOINT,
        HostPart.SAVED,
        HostPart.BUCKETS,
        HostPart.STREAMED,
        HostPart.TAKEN,
    }
)
ONCE = frozenset({HostPart.SAVED, HostPart.TAKEN})  # by one of the ranks on a host
Bytes = Mapping[Part, int]
HostBytes = Mapping[HostPart, int]
# Size of a tensor on the fullest rank, and how many such there are
Tensors = Sequence[tuple[int, int]]
# Not in what a worker reports
_PROCESS = frozenset({Part.CONTEXT, Part.COMMUNICATOR, Part.ASLEEP})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """How a component sits on one kind of accelerator: all that its footprint depends on beside its own demand."""

    ranks: int  # world size
    accelerators_per_rank: int  # 0 for a component on nodes or other hardware
    tensor_parallel: int = 1  # accelerators that cut one copy of the model between them
    # Copies that have the tokens of the same samples between them
    context_parallel: int = 1
    memory_bytes: int  # of one accelerator; 0: not known
    kind: str  # "cuda", "emulated", ...

    @property
    def copies(self) -> int:
        """How many copies of a model its accelerators hold, if each is whole; they share state between them."""
        return max(1, self.ranks * self.accelerators_per_rank // self.tensor_parallel)

    @property
    def groups(self) -> int:
        """Communicators of a process: with the other copies, those that cut its own, and those with its samples."""
        return 1 + (self.tensor_parallel > 1) + (self.context_parallel > 1)

    def tokens(self, of_pass: int) -> int:
        """How many of a pass's tokens a copy has."""
        return -(-of_pass // self.context_parallel)

    @property
    def emulated(self) -> bool:
        return self.kind == "emulated"

    def process(self, groups: int) -> dict[Part, int]:
        """What a process with `groups` communicators costs by being there; nothing where emulated."""
        if self.emulated:
            return {}
        several = self.ranks * self.accelerators_per_rank > 1
        return {
            Part.CONTEXT: formulas.CONTEXT_BYTES,
            Part.COMMUNICATOR: formulas.communicator(groups) if several else 0,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of one rank, on each of its accelerators; `host` on the host of its node.

    `held` is whole for every residency: what lives as long as the process stands in each of them.
    """

    held: Mapping[Residency, Bytes]
    # Stage -> beside what is held there
    working: Mapping[str, Bytes] = dataclasses.field(default_factory=dict)
    # Beside what is held, when it leaves OFF at the start
    loading: Bytes = dataclasses.field(default_factory=dict)
    host: Mapping[Residency, HostBytes] = dataclasses.field(default_factory=dict)
    # Why it cannot work at all, such as a KV cache without room
    lacking: str | None = None

    def reported_bytes(self, residency: Residency) -> int:
        """What the worker itself reports after a move: all but what belongs to its process."""
        return sum(
            size for part, size in self.held[residency].items() if part not in _PROCESS
        )

    def host_bytes(self, residency: Residency) -> int:
        """What the worker itself reports: copies that stay, neither the pool they are taken from nor what passes."""
        return sum(
            size
            for part, size in self.host.get(residency, {}).items()
            if part not in _PASSING
        )

    def corrected(
        self, measured: Mapping[Residency, int], unforeseen: Mapping[Residency, int]
    ) -> Footprint:
        """The same with measured bytes in place of formulas, residency by residency, and unforeseen ones beside them.

        With unforeseen bytes the formulas stay, so that a change of what they count still has an effect.
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
    """What a rank keeps on its host in each residency: copies of what is not on the accelerators.

    Copies of GPU tensors are pinned, and the pool they come from never shrinks. Setup ends with every component off, so
    the pool has its full size from the first stage on, also where nothing moves later.
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
    """What a component asks of memory, before it is placed."""

    def footprint(self, placed: Placed) -> Footprint: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSync:
    """What a weight sync between accelerators holds on a rank's; nothing where it goes through the host."""

    buckets: bool = False  # two of them
    copy: bool = False  # of the weights, whole before it replaces those in use
    # Whole weights, of which an engine that cuts them loads its part
    windows: bool = False
    # A communicator with the others who broadcast, from the first sync on
    group: bool = False
    number: int = _FLOAT32  # bytes of a number on its way

    @classmethod
    def sending(cls, deliveries: Iterable[Delivery]) -> DeviceSync:
        found = [d for d in deliveries if isinstance(d, DeviceDelivery)]
        return cls(buckets=bool(found), group=any(len(d.group) > 1 for d in found))

    @classmethod
    def receiving(
        cls, deliveries: Iterable[Delivery], dtype: Dtype = "fp32"
    ) -> DeviceSync:
        """As the fullest taker does: one without an owner has buckets of its own, a consumer uses its owner's."""
        found = [d for d in deliveries if isinstance(d, DeviceDelivery)]
        free = any(owner is None for d in found for owner in d.owners)
        whole = any(taker.part is None for d in found for taker in d.takers)
        cut = any(d.cut for d in found)
        return cls(
            buckets=free, copy=whole, windows=cut, group=free, number=DTYPE_BYTES[dtype]
        )

    def beside(self, process: Mapping[Part, int]) -> dict[Part, int]:
        """What a process costs by being there, with the communicator of the sync."""
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
        """During the sync of so many bytes; `loading`: what loading takes, when the buckets are gone or beside them."""
        buckets = formulas.sync_buckets(weights_bytes) if self.buckets else 0
        beside = buckets + windows + loading if self.windows else 0
        return max(buckets, loading, beside) + (weights_bytes if self.copy else 0)

    def stages(self, weights_bytes: int) -> dict[str, Bytes]:
        """What works in which stage, where that is anything."""
        size = self.working(weights_bytes)
        if size:
            return {"sync": {Part.SYNC: size}}
        return {}


def _sized(tensors: Tensors, each: int) -> list[tuple[int, int]]:
    """Bytes of tensors that are given by their elements."""
    return [(elements * each, times) for elements, times in tensors]


def larger(*parts: Bytes) -> Bytes:
    return max(parts, key=lambda found: sum(found.values()))


def _parts(moment: Moment) -> Bytes:
    return {
        Part.GRADIENTS: moment.gradients,
        Part.GATHERED: moment.gathered,
        Part.ACTIVATIONS: moment.activations,
        Part.LOGITS: moment.logits,
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDemand:
    """A language model that learns. Its ranks share the state; while it is off, its host holds a copy of it."""

    model: ModelShape
    block: TrainedConfig
    sequence_length: int
    # Passes have the block's token_budget, instead of micro_batch sequences
    packed: bool = False
    sync: DeviceSync = DeviceSync()
    samples: int = 0  # of one optimizer step over all ranks; 0: not known
    streams: bool = False  # weights to other nodes, by way of its host
    sent: int = 0  # copies on other nodes whose last version a rank keeps its part of, to send what changed
    # Whether checkpoints are made by way of a copy; None: it is in none
    copied: bool | None = None
    refreshes: bool = False  # a reference, by its weights
    early: bool = False  # it begins to learn in rollout

    def footprint(self, placed: Placed) -> Footprint:
        block, number, parallel = (
            self.block,
            DTYPE_BYTES[self.block.compute],
            placed.tensor_parallel,
        )
        trained = self._trained(placed, _GRADIENTS)
        # With LoRA, the model itself is kept as it is computed with, and never changes.
        shards = placed.copies if block.zero_stage >= _GRADIENTS else 1
        frozen = (
            []
            if block.lora_rank is None
            else _sized(self.model.parts(parallel, shards), number)
        )
        weights = _sized(trained, DTYPE_BYTES[block.weights]) + frozen
        masters, moments, unpacked = self._optimizer(placed)
        state = masters + moments
        here, there = ([], state) if block.optimizer.on_host else (state, [])
        process = self.sync.beside(placed.process(placed.groups))
        resident = {**process, Part.PARAMETERS: total(weights)}
        work = self._pass(placed)
        whole = formulas.parameters(self.model, number, parallel)
        forward = _parts(work.forward())
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
            if block.sync.mode != "lora":
                syncing[Part.SYNC] += refreshing[Part.SYNC]
            if block.sync.mode == "lora" or block.lora_rank is None:
                syncing[Part.SYNC] += exchanged
            # By a pass over some tokens
            if block.sync.verify == "logprobs" and block.sync.verify_every > 0:
                syncing[Part.GATHERED] = forward[Part.GATHERED]
            if block.ema_decay is not None:
                average = _sized(trained, _FLOAT32)
                kept[HostPart.AVERAGE] = total(average)
        if self.sent:
            kept[HostPart.SENT] = self.sent * formulas.parameters(
                self.model, number, parallel, placed.copies
            )
        if self.streams:
            kept[HostPart.STREAMED] = formulas.stream_buckets(whole, sent=True)
        # Of the weights, the copies that the optimizer steps
        if self.copied is not None:
            stepped = masters or _sized(trained, DTYPE_BYTES[block.weights])
            kept[HostPart.CHECKPOINT] = saved_copy(
                stepped + (unpacked or moments) + average, self.copied
            )
            kept[HostPart.CHECKPOINT] += 0 if self.copied else total(unpacked)
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
                _parts(self._learning(placed, work)), saving
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
                * DTYPE_BYTES[block.weights]
            },
            host=host,
        )

    def _optimizer(
        self, placed: Placed
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]]]:
        """Float32 copies of the weights, Adam's moments, and the moments that checkpoints unpack."""
        trained = self._trained(placed, _OPTIMIZER)
        packed = self.block.optimizer.kind == "adamw_8bit"
        masters = _sized(trained, _FLOAT32) if self._masters else []
        # Moments are of the type of what is stepped
        each = _FLOAT32 if masters else DTYPE_BYTES[self.block.weights]
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
        """Whether the optimizer steps float32 copies of the weights."""
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
        )

    def _learning(self, placed: Placed, work: Pass) -> Moment:
        """Of an optimizer step of one or several micro-batches."""
        block = self.block
        parallel = placed.tensor_parallel
        shards = placed.copies
        if block.zero_stage < _GRADIENTS:
            shards = 1
        elements = total(self._trained(placed, _GRADIENTS))
        outside = 0
        if block.lora_rank is None:
            outside = sum(w.part(parallel, shards) for w in self.model.root)
        rounded = block.weights != "fp32" and not self._masters
        each = -(-self.samples // max(1, placed.copies // placed.context_parallel))
        return work.learning(
            trained=(elements - outside, outside),
            checkpointing=block.checkpointing,
            offload=block.activation_offload,
            earlier=not self.samples
            or placed.tokens(each * self.sequence_length) > work.tokens,
            master=DTYPE_BYTES[block.weights] if rounded else 0,
        )

    def _inputs(self, placed: Placed, work: Pass) -> int:
        """Of all layers, as they wait on the host."""
        each = (
            formulas.checkpoints(self.model, work.tokens, work.number, work.parallel)
            // self.model.layers
        )
        return self.model.layers * (each if placed.emulated else formulas.pinned(each))

    def _saving(self, shards: int, each: int) -> int:
        """One whole weight after the other, as it is trained; with factors merged, as it is computed with."""
        factors = self.block.lora_rank is not None
        projection = max(
            (w.elements for w, _ in self.model.weights() if factors and w.projection),
            default=0,
        )
        return formulas.whole_weight(
            self.model.largest_weight_elements, projection, each, shared=shards > 1
        )

    def _exchanged(self, placed: Placed, shards: int) -> int:
        """Weights that are cut by columns, in whole rows until they are sent; the last by way of its pieces."""
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
        """Weights with their factors, in memory of their own until they are sent; made by way of float32."""
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
        """Elements of what is trained, shared from a ZeRO stage on."""
        shards = placed.copies if self.block.zero_stage >= shared_from else 1
        if self.block.lora_rank is None:
            return self.model.parts(placed.tensor_parallel, shards)
        return self.model.lora_parts(
            self.block.lora_rank, placed.tensor_parallel, shards
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoringDemand:
    """A reference or a reward model: forward passes only. While it is off, its host holds a copy.

    Without accelerators, or `on_host`, its host holds it at all times.
    """

    model: ModelShape
    block: FrozenConfig
    sequence_length: int
    packed: bool = False  # as of a model that learns
    # By weights that come to each rank's host, whole and in this type; None: never
    refreshed: Dtype | None = None
    # Whether checkpoints are made by way of a copy; None: it is in none
    copied: bool | None = None

    def footprint(self, placed: Placed) -> Footprint:
        block, number, parallel = (
            self.block,
            DTYPE_BYTES[self.block.dtype],
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
            repeated=placed.kind == "cuda" and block.dtype == "fp32",
        )
        forward = _parts(work.forward())
        host: dict[Residency, HostBytes]
        if on_host:
            host = dict.fromkeys(
                Residency, host_copies(placed, HostPart.WEIGHTS, off=tensors)[_OFF]
            )
        else:
            host = host_copies(placed, HostPart.OFFLOADED, off=tensors)
        if self.refreshed is not None:
            whole = formulas.parameters(self.model, DTYPE_BYTES[self.refreshed])
            # As most of it, if it is streamed
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
            working={"infer": forward, "rollout": forward},  # whichever it works in
            loading={}
            if on_host
            else {Part.LOADING: self.model.largest_weight_elements * number},
            host=host,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineDemand:
    """A generation engine such as vLLM. It takes a share of each accelerator, unless its KV cache has a size."""

    model: ModelShape
    block: TextRolloutConfig
    sequence_length: int  # the longest; the cache must hold at least one such
    sync: DeviceSync = DeviceSync()
    taken: int = 0  # bytes on a node's host, of weights that come from other nodes
    # Of an iteration, on the rank with the most; a vLLM engine prepares for any number
    answers: int | None = None
    # Answers of an evaluation are drawn from the likeliest tokens alone
    cut: bool = False

    def footprint(self, placed: Placed) -> Footprint:
        block, model, number, parallel = (
            self.block,
            self.model,
            DTYPE_BYTES[self.block.dtype],
            placed.tensor_parallel,
        )
        # Engines exchange nothing with each other, and one of a single accelerator has no group.
        process = self.sync.beside(
            placed.process(placed.groups if placed.tensor_parallel > 1 else 0)
        )
        if not placed.emulated:
            process[Part.ASLEEP] = formulas.GRAPHS_BYTES
        weights, sent = (
            formulas.parameters(model, each, parallel)
            for each in (number, self.sync.number)
        )
        simple = block.engine == "transformers"
        workspace = formulas.engine_workspace(
            model, block.step_tokens, block.step_sequences, number, parallel
        )
        if simple:
            cut = bool(block.top_k or block.penalties) or block.top_p < 1 or self.cut
            most = block.step_sequences
            answers = min(most, self.answers or most)
            workspace = formulas.generation(
                model, answers, self.sequence_length, number, cut
            )
        if block.own and block.workspace_memory is not None:
            workspace = block.workspace_memory
        cache = block.kv_cache_memory
        if cache is None:
            assert not isinstance(block.gpu_memory_utilization, str), (
                "a case begins with all of it"
            )
            taken = sum(process.values()) + weights + workspace
            cache = formulas.kv_share(
                placed.memory_bytes, block.gpu_memory_utilization, taken
            )
        longest = self.sequence_length
        each = DTYPE_BYTES[block.cache]
        row = formulas.kv_sequence(model, longest, block.step_tokens, each, parallel)
        # Rows of full length
        if simple:
            cache -= cache % row
        room = cache * longest // row
        known = block.kv_cache_memory is not None or placed.memory_bytes
        lacking = None
        if known and room < self.sequence_length:
            lacking = f"the KV cache holds {room} tokens, the longest sequence has {self.sequence_length}"
        # Weights are copied one by one from the host to where they stay; vLLM makes each module anew first.
        anew = 0 if simple else formulas.reloading(model, number, parallel)
        awake = process | {Part.PARAMETERS: weights}
        # Every accelerator of the rank has its part; the host has them all. Asleep at level 2 there is no copy.
        parts = model.parts(parallel) if block.sleep_level == 1 else []
        copies = [
            (part * number, layers * placed.accelerators_per_rank)
            for part, layers in parts
        ]
        host = host_copies(placed, HostPart.SLEEP, off=copies)
        way = {HostPart.TAKEN: self.taken}
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
                "sync": {
                    Part.SYNC: self.sync.working(
                        sent, anew, formulas.sync_windows(model, self.sync.number)
                    )
                },
                "rollout": {Part.WORKSPACE: workspace},
            },
            host=host,
            lacking=lacking,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorDemand:
    """Environments whose memory is declared; they are there or not, nothing in between."""

    accelerator_bytes: int = 0
    host_bytes: int = 0
    samples_bytes: int = 0  # of what is generated ahead, kept for checkpoints

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
