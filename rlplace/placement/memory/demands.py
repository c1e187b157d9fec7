"""What each role asks of memory: models that train or only score, engines, simulators, and the MLP policies of PPO.

One class per kind of work; `footprint` gives the bytes of one rank for a place. Formulas of the policies follow what
the workers account: shards and optimizer state of the actor, the whole policy of a rollout rank, declared bytes of the
rest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Literal, Protocol, runtime_checkable

from rlplace.config.schema import MlpConfig
from rlplace.placement.flow import Delivery, DeviceDelivery
from rlplace.placement.memory import formulas
from rlplace.placement.memory.footprint import (
    Bytes,
    Footprint,
    HostBytes,
    HostPart,
    Part,
    Placed,
    Tensors,
    host_copies,
    total,
)
from rlplace.placement.memory.formulas import DTYPE_BYTES, OPTIMIZER_STATE
from rlplace.placement.memory.model import ModelShape, Weight
from rlplace.placement.schedule import Residency

Dtype = Literal["fp32", "bf16", "fp16"]
_OFF, _WEIGHTS, _FULL = Residency
_PARAMETERS, _GRADIENTS, _OPTIMIZER = 3, 2, 1  # the ZeRO stage from which ranks share them
_FLOAT32, _FLOAT64 = 4, 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSync:
    """What a weight sync between accelerators holds on a rank's; nothing where it goes through the host."""

    buckets: bool = False  # two of them
    copy: bool = False  # of the weights, whole before it replaces those in use
    group: bool = False  # a communicator with the others who broadcast, from the first sync on

    @classmethod
    def sending(cls, deliveries: Iterable[Delivery]) -> DeviceSync:
        found = [d for d in deliveries if isinstance(d, DeviceDelivery)]
        return cls(buckets=bool(found), group=any(len(d.group) > 1 for d in found))

    @classmethod
    def receiving(cls, deliveries: Iterable[Delivery]) -> DeviceSync:
        """As the fullest rank does: one without an owner has buckets of its own, a consumer uses its owner's."""
        found = [d for d in deliveries if isinstance(d, DeviceDelivery)]
        free = any(owner is None for d in found for owner in d.owners)
        return cls(buckets=free, copy=bool(found), group=free)

    def beside(self, process: Mapping[Part, int]) -> dict[Part, int]:
        """What a process costs by being there, with the communicator of the sync."""
        group = {Part.COMMUNICATOR: process.get(Part.COMMUNICATOR, 0) + formulas.communicator(1)} if self.group else {}
        return {**process, **group}

    def working(self, weights_bytes: int) -> int:
        """During the sync of so many bytes."""
        buckets = formulas.sync_buckets(weights_bytes) if self.buckets else 0
        return buckets + (weights_bytes if self.copy else 0)


THROUGH_HOST = DeviceSync()


def _sized(tensors: Tensors, each: int) -> list[tuple[int, int]]:
    """Bytes of tensors that are given by their elements."""
    return [(elements * each, times) for elements, times in tensors]


def _forward(model: ModelShape, tokens: int, number: int, parallel: int, gathered: int) -> Bytes:
    return {
        Part.GATHERED: gathered,
        Part.ACTIVATIONS: formulas.one_layer(model, tokens, number, parallel),
        Part.LOGITS: formulas.logits(model.vocabulary, tokens, number, parallel),
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDemand:
    """A language model that learns. Its ranks share the state; while it is off, its host holds a copy of it."""

    model: ModelShape
    micro_batch: int  # sequences in one forward and backward pass of a rank
    sequence_length: int
    token_budget: int | None = None  # passes are packed with so many tokens, instead of micro_batch sequences
    weights: Dtype = "fp32"  # as they are kept
    compute: Dtype = "bf16"
    optimizer: Literal["adamw", "adamw_master", "adamw_8bit", "sgd"] = "adamw"
    zero_stage: Literal[0, 1, 2, 3] = 3
    checkpointing: bool = True  # keep the input of each layer only, recompute the rest
    lora_rank: int | None = None  # train low-rank factors of all linear layers, freeze the weights
    optimizer_on_host: bool = False
    sync: DeviceSync = THROUGH_HOST
    merged: bool = False  # factors are, for a sync: weights of their own until it is over
    probed: bool = False  # a sync is verified by a pass over some tokens
    averaged: bool = False  # a moving average of what is trained lives on the host
    sent: int = 0  # copies on other nodes whose last version a rank keeps its part of, to send what changed

    def footprint(self, placed: Placed) -> Footprint:
        number, parallel = DTYPE_BYTES[self.compute], placed.tensor_parallel
        tokens = formulas.pass_tokens(self.micro_batch, self.sequence_length, self.token_budget)
        trained = self._trained(placed, _PARAMETERS)
        # With LoRA, the model itself is kept as it is computed with, and never changes.
        shards = placed.copies if self.zero_stage >= _PARAMETERS else 1
        frozen = [] if self.lora_rank is None else _sized(self.model.parts(parallel, shards), number)
        weights = _sized(trained, DTYPE_BYTES[self.weights]) + frozen
        tensors, each = OPTIMIZER_STATE[self.optimizer]
        state = [(n * each, times * tensors) for n, times in self._trained(placed, _OPTIMIZER)]
        here, there = ([], state) if self.optimizer_on_host else (state, [])
        process = self.sync.beside(placed.process(placed.groups))
        resident = {**process, Part.PARAMETERS: total(weights)}
        gathered = self._gathered(placed)
        whole = formulas.parameters(self.model, number, parallel)
        buckets = formulas.sync_buckets(total(weights))
        merged = total(frozen) if self.merged else 0
        syncing = {Part.SYNC: max(buckets, self.sync.working(whole)) + merged}
        kept = {HostPart.OPTIMIZER: total(there)}
        if self.averaged:
            kept[HostPart.AVERAGE] = _FLOAT32 * total(trained)
        if self.sent:
            kept[HostPart.SENT] = self.sent * formulas.parameters(self.model, number, parallel, placed.copies)
        copies = host_copies(placed, HostPart.OFFLOADED, off=weights + here, weights=here)
        return Footprint(
            held={_OFF: process, _WEIGHTS: resident, _FULL: {**resident, Part.OPTIMIZER: total(here)}},
            working={
                "sync": syncing | ({Part.GATHERED: gathered} if self.probed else {}),
                "infer": _forward(self.model, tokens, number, parallel, gathered),
                "learn": self._backward(placed, tokens, gathered),
            },
            loading={Part.LOADING: self.model.largest_weight_elements * DTYPE_BYTES[self.weights]},
            host={at: {**copied, **kept} for at, copied in copies.items()},
        )

    def _trained(self, placed: Placed, shared_from: int) -> Tensors:
        """Elements of what is trained, shared from a ZeRO stage on."""
        shards = placed.copies if self.zero_stage >= shared_from else 1
        if self.lora_rank is None:
            return self.model.parts(placed.tensor_parallel, shards)
        return self.model.lora_parts(self.lora_rank, placed.tensor_parallel, shards)

    def _gathered(self, placed: Placed) -> int:
        number = DTYPE_BYTES[self.compute]
        if self.zero_stage >= _PARAMETERS and placed.copies > 1:
            return formulas.gathered(self.model, number, placed.tensor_parallel)
        if self.lora_rank is None and self.weights != self.compute:  # computed in a copy of another dtype
            return formulas.parameters(self.model, number, placed.tensor_parallel)
        return 0

    def _backward(self, placed: Placed, tokens: int, gathered: int) -> Bytes:
        """At the worst moment of a pass: all is saved, and either the logits or one recomputed layer is there too."""
        model, number, parallel = self.model, DTYPE_BYTES[self.compute], placed.tensor_parallel
        saved, again = formulas.activations(model, tokens, number, parallel), 0
        if self.checkpointing:
            saved = formulas.checkpoints(model, tokens, number)
            again = formulas.one_layer(model, tokens, number, parallel)
        logits = formulas.logits_backward(model.vocabulary, tokens, number, parallel)
        buckets = 0
        if self.zero_stage >= _GRADIENTS and placed.copies > 1 and self.lora_rank is None:
            buckets = formulas.gradient_buckets(model, number, parallel)
        trained = total(self._trained(placed, _GRADIENTS))
        return {
            Part.GRADIENTS: formulas.gradients(trained, DTYPE_BYTES[self.weights]) + buckets,
            Part.GATHERED: gathered,
            Part.ACTIVATIONS: saved + (again if again > logits else 0),
            Part.LOGITS: 0 if again > logits else logits,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoringDemand:
    """A reference or a reward model: forward passes only. While it is off, its host holds a copy.

    Without accelerators, or `on_host`, its host holds it at all times.
    """

    model: ModelShape
    micro_batch: int
    sequence_length: int
    token_budget: int | None = None  # passes are packed with so many tokens, instead of micro_batch sequences
    dtype: Dtype = "bf16"
    sharded: bool = True  # over its ranks, gathered layer by layer; else each rank has it whole
    on_host: bool = False  # brought to the accelerator layer by layer
    refreshed: Dtype | None = None  # by weights that come to each rank's host, whole and in this type; None: never

    def footprint(self, placed: Placed) -> Footprint:
        number, parallel, process = DTYPE_BYTES[self.dtype], placed.tensor_parallel, placed.process(placed.groups)
        on_host = self.on_host or not placed.accelerators_per_rank
        shards = (placed.copies if placed.accelerators_per_rank else placed.ranks) if self.sharded else 1
        tensors = _sized(self.model.parts(parallel, shards), number)
        there = process if on_host else process | {Part.PARAMETERS: total(tensors)}
        gathered = formulas.gathered(self.model, number, parallel) if shards > 1 or self.on_host else 0
        tokens = formulas.pass_tokens(self.micro_batch, self.sequence_length, self.token_budget)
        forward = _forward(self.model, tokens, number, parallel, gathered)
        host: dict[Residency, HostBytes]
        if on_host:
            host = dict.fromkeys(Residency, host_copies(placed, HostPart.WEIGHTS, off=tensors)[_OFF])
        else:
            host = host_copies(placed, HostPart.OFFLOADED, off=tensors)
        if self.refreshed is not None:
            whole = {HostPart.RECEIVED: formulas.parameters(self.model, DTYPE_BYTES[self.refreshed])}
            host = {at: kept if at is _OFF else {**kept, **whole} for at, kept in host.items()}
        return Footprint(
            held={_OFF: process, _WEIGHTS: there, _FULL: there},
            working={"infer": forward, "rollout": forward},  # whichever it works in
            loading={} if on_host else {Part.LOADING: self.model.largest_weight_elements * number},
            host=host,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineDemand:
    """A generation engine such as vLLM. It takes a share of each accelerator, unless its KV cache has a size."""

    model: ModelShape
    gpu_memory_utilization: float = 1.0  # share of each accelerator for everything; the KV cache gets what is left
    kv_cache_memory: int | None = None  # bytes of the KV cache on each accelerator; the share counts for nothing then
    sequence_length: int  # the longest; the cache must hold at least one such
    dtype: Dtype = "bf16"
    cache_dtype: Literal["bf16", "fp16", "fp8", "fp32"] = "bf16"
    step_tokens: int = 8192  # most tokens of one step
    step_sequences: int = 256
    sleep_level: Literal[1, 2] = 2  # 1: weights are copied to the host; 2: dropped, the next sync brings new ones
    sync: DeviceSync = THROUGH_HOST

    def footprint(self, placed: Placed) -> Footprint:
        model, number, parallel = self.model, DTYPE_BYTES[self.dtype], placed.tensor_parallel
        process = self.sync.beside(placed.process(placed.groups))
        if placed.kind != "emulated":
            process[Part.ASLEEP] = formulas.GRAPHS_BYTES
        weights = formulas.parameters(model, number, parallel)
        workspace = formulas.engine_workspace(model, self.step_tokens, self.step_sequences, number, parallel)
        taken = sum(process.values()) + weights + workspace
        left = formulas.kv_share(placed.memory_bytes, self.gpu_memory_utilization, taken)
        cache = left if self.kv_cache_memory is None else self.kv_cache_memory
        room = cache // formulas.kv_per_token(model, DTYPE_BYTES[self.cache_dtype], parallel)
        known = self.kv_cache_memory is not None or placed.memory_bytes
        lacking = None
        if known and room < self.sequence_length:
            lacking = f"the KV cache holds {room} tokens, the longest sequence has {self.sequence_length}"
        buckets = formulas.sync_buckets(weights)
        awake = process | {Part.PARAMETERS: weights}
        # Every accelerator of the rank has its part; the host has them all.
        copies = [
            (formulas.sleep_copy(part * number, self.sleep_level), layers * placed.accelerators_per_rank)
            for part, layers in model.parts(parallel)
        ]
        return Footprint(
            held={_OFF: process, _WEIGHTS: awake, _FULL: awake | {Part.KV_CACHE: cache}},
            working={
                "sync": {Part.SYNC: max(self.sync.working(weights), buckets)},
                "rollout": {Part.WORKSPACE: workspace},
            },
            host=host_copies(placed, HostPart.SLEEP, off=copies),
            lacking=lacking,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorDemand:
    """Environments whose memory is declared; they are there or not, nothing in between."""

    accelerator_bytes: int = 0
    host_bytes: int = 0

    def footprint(self, placed: Placed) -> Footprint:
        return Footprint(
            held={_OFF: {}, _WEIGHTS: {}, _FULL: {Part.SIMULATOR: self.accelerator_bytes}},
            host={residency: {HostPart.SIMULATOR: self.host_bytes} for residency in Residency},
        )


@runtime_checkable
class Choices(Protocol):
    """Discrete actions."""

    @property
    def n(self) -> int: ...


class Vector(Protocol):
    """Continuous actions."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class PolicySpaces(Protocol):
    """What a policy's size depends on; every simulator's spaces are such."""

    @property
    def observation_shape(self) -> tuple[int, ...]: ...

    @property
    def actions(self) -> Choices | Vector: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyShape:
    """Parameters in float32 and the buffers of the observation normaliser in float64."""

    weights: tuple[Weight, ...]
    buffer_numbers: int

    @property
    def parameters_bytes(self) -> int:
        return _FLOAT32 * sum(w.elements for w in self.weights)

    @property
    def buffer_bytes(self) -> int:
        return self.buffer_numbers * _FLOAT64

    @property
    def weights_bytes(self) -> int:
        """Of a whole policy, as it is sent and sampled with."""
        return self.parameters_bytes + self.buffer_bytes


def policy_shape(model: MlpConfig, spaces: PolicySpaces, *, normalize_observations: bool) -> PolicyShape:
    """Two trunks, policy and value, and a log deviation per element of a continuous action."""
    actions, size = spaces.actions, math.prod(spaces.observation_shape)
    outputs = actions.n if isinstance(actions, Choices) else math.prod(actions.shape)
    weights: list[Weight] = []
    for name, end in (("policy", outputs), ("value", 1)):
        for at, (inputs, width) in enumerate(itertools.pairwise((size, *model.hidden, end))):
            weights.append(Weight(name=f"{name}.{2 * at}.weight", shape=(width, inputs)))  # odd numbers: activations
            weights.append(Weight(name=f"{name}.{2 * at}.bias", shape=(width,)))
    if not isinstance(actions, Choices):
        weights.append(Weight(name="log_std", shape=(outputs,)))
    return PolicyShape(weights=tuple(weights), buffer_numbers=1 + 2 * size if normalize_observations else 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTrainingDemand:
    """The actor of simulators: float32 shards and Adam state, everything whole while it computes."""

    policy: PolicyShape
    sync: DeviceSync = THROUGH_HOST

    def footprint(self, placed: Placed) -> Footprint:
        parts = [(w.part(1, placed.ranks) * _FLOAT32, 1) for w in self.policy.weights]
        weights = [*parts, (self.policy.buffer_bytes, 1)]
        state = [(size, 2) for size, _ in parts] + [(_FLOAT32, len(parts))]  # two moments, and a step count per tensor
        process = self.sync.beside(placed.process(groups=1))
        there = process | {Part.PARAMETERS: total(weights)}
        whole = self.policy.parameters_bytes
        return Footprint(
            held={_OFF: process, _WEIGHTS: there, _FULL: there | {Part.OPTIMIZER: total(state)}},
            working={
                **_syncing(self.sync, self.policy),
                "learn": {Part.GATHERED: whole, Part.GRADIENTS: whole},
            },
            host=host_copies(placed, HostPart.OFFLOADED, off=weights + state, weights=state),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRolloutDemand:
    """A rollout rank of simulators: the whole policy, and the workspace that its config declares."""

    policy: PolicyShape
    workspace_bytes: int = 0
    sync: DeviceSync = THROUGH_HOST

    def footprint(self, placed: Placed) -> Footprint:
        process = self.sync.beside(placed.process(groups=0))
        there = process | {Part.PARAMETERS: self.policy.weights_bytes}
        return Footprint(
            held={_OFF: process, _WEIGHTS: there, _FULL: there | {Part.WORKSPACE: self.workspace_bytes}},
            working=_syncing(self.sync, self.policy),
        )


def _syncing(sync: DeviceSync, policy: PolicyShape) -> dict[str, Bytes]:
    size = sync.working(policy.weights_bytes)
    return {"sync": {Part.SYNC: size}} if size else {}
