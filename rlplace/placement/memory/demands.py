"""What each role asks of memory: models that train, frozen models, engines, simulators, and the MLP policies of PPO.

Formulas of the policies follow what the workers account: shards and optimizer state of the actor, the whole policy of
a rollout rank, declared bytes of the rest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Literal, Protocol, runtime_checkable

from rlplace.config import MlpConfig
from rlplace.placement.flow import Delivery, DeviceDelivery
from rlplace.placement.memory import formulas
from rlplace.placement.memory.footprint import Bytes, Footprint, HostBytes, HostPart, Part, Placed, host_copies
from rlplace.placement.memory.formulas import DTYPE_BYTES, OPTIMIZER_STATE, communicator, pass_tokens, sync_buckets
from rlplace.placement.memory.model import ModelShape, Weight
from rlplace.placement.schedule import Residency

Dtype = Literal["fp32", "bf16", "fp16"]
_OFF, _WEIGHTS, _FULL = Residency
Optimizer = Literal["adamw", "adamw_master", "adamw_8bit", "sgd"]
Tensors = list[tuple[int, int]]  # elements of a tensor on the fullest rank, and how many such there are
_PARAMETERS, _GRADIENTS, _OPTIMIZER = 3, 2, 1  # the ZeRO stage from which ranks share them
_FLOAT32, _FLOAT64 = 4, 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSync:
    """What it holds on a rank's accelerator; nothing where it goes through the host."""

    buckets: bool = False  # two of them
    copy: bool = False  # of the weights, whole before it replaces those in use
    group: bool = False  # a communicator with the others who broadcast, from the first sync on

    @classmethod
    def giving(cls, deliveries: Iterable[Delivery]) -> DeviceSync:
        found = _past_host(deliveries)
        return cls(buckets=bool(found), group=any(len(d.group) > 1 for d in found))

    @classmethod
    def taking(cls, deliveries: Iterable[Delivery]) -> DeviceSync:
        """As the fullest rank does: a free one has buckets of its own, a guest those of its host."""
        found = _past_host(deliveries)
        free = any(owner is None for d in found for owner in d.owners)
        return cls(buckets=free, copy=bool(found), group=free)

    def beside(self, process: Mapping[Part, int]) -> dict[Part, int]:
        """What a process costs by being there, with this."""
        group = {Part.COMMUNICATOR: process.get(Part.COMMUNICATOR, 0) + communicator(1)} if self.group else {}
        return {**process, **group}

    def working(self, weights_bytes: int, placed: Placed) -> int:
        """During the sync of so many bytes."""
        buckets = sync_buckets(weights_bytes, placed.assumptions.bucket_bytes) if self.buckets else 0
        return buckets + (weights_bytes if self.copy else 0)


THROUGH_HOST = DeviceSync()


def _past_host(deliveries: Iterable[Delivery]) -> list[DeviceDelivery]:
    return [d for d in deliveries if isinstance(d, DeviceDelivery)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """Its ranks share the state; while it is off, its host holds a copy of what it has."""

    model: ModelShape
    micro_batch: int  # sequences in one forward and backward pass of a rank
    sequence_length: int
    token_budget: int | None = None  # passes are packed with so many tokens, instead of micro_batch sequences
    weights: Dtype = "fp32"  # as they are kept
    compute: Dtype = "bf16"
    optimizer: Optimizer = "adamw"
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
        process = self.sync.beside(placed.process(placed.groups))
        weights = [(n * DTYPE_BYTES[self.weights], times) for n, times in self._trained(placed, _PARAMETERS)]
        weights += [(n * self._number, times) for n, times in self._frozen(placed)]
        tensors, each = OPTIMIZER_STATE[self.optimizer]
        state = [(n * each, times * tensors) for n, times in self._trained(placed, _OPTIMIZER)]
        here, there = ([], state) if self.optimizer_on_host else (state, [])
        copies = host_copies(placed, HostPart.OFFLOADED, off=weights + here, weights=here)
        kept = {HostPart.OPTIMIZER: _total(there)}
        if self.averaged:
            kept[HostPart.AVERAGE] = 4 * sum(n * times for n, times in self._trained(placed, _PARAMETERS))
        resident = {**process, Part.PARAMETERS: _total(weights)}
        if self.sent:
            part = self.model.parts(placed.tensor_parallel, placed.copies)
            kept[HostPart.SENT] = self.sent * _total([(n * self._number, times) for n, times in part])
        return Footprint(
            held={_OFF: process, _WEIGHTS: resident, _FULL: {**resident, Part.OPTIMIZER: _total(here)}},
            working={
                "sync": self._pushing(_total(weights), placed),
                "infer": self._forward(placed),
                "learn": self._backward(placed),
            },
            loading={Part.LOADING: self.model.largest_weight_elements * DTYPE_BYTES[self.weights]},
            host={at: {**copied, **kept} for at, copied in copies.items()},
        )

    @property
    def _number(self) -> int:
        """Bytes of one number of the computation."""
        return DTYPE_BYTES[self.compute]

    @property
    def _tokens(self) -> int:
        return formulas.pass_tokens(self.micro_batch, self.sequence_length, self.token_budget)

    def _trained(self, placed: Placed, shared_from: int) -> Tensors:
        """What is trained, shared from a ZeRO stage on."""
        shards = placed.copies if self.zero_stage >= shared_from else 1
        if self.lora_rank is None:
            return self.model.parts(placed.tensor_parallel, shards)
        return self.model.lora_parts(self.lora_rank, placed.tensor_parallel, shards)

    def _frozen(self, placed: Placed) -> Tensors:
        """What is kept as it is computed with, and never changes."""
        shards = placed.copies if self.zero_stage >= _PARAMETERS else 1
        return [] if self.lora_rank is None else self.model.parts(placed.tensor_parallel, shards)

    def _gathered(self, placed: Placed) -> int:
        if self.zero_stage >= _PARAMETERS and placed.copies > 1:
            return formulas.gathered(self.model, self._number, tensor_parallel=placed.tensor_parallel)
        if self.lora_rank is None and self.weights != self.compute:  # computed in a copy of another dtype
            return formulas.parameters(self.model, self._number, tensor_parallel=placed.tensor_parallel)
        return 0

    def _pushing(self, own: int, placed: Placed) -> Bytes:
        """`own`: bytes of this rank's weights."""
        whole = formulas.parameters(self.model, self._number, tensor_parallel=placed.tensor_parallel)
        buckets = max(formulas.sync_buckets(own, placed.assumptions.bucket_bytes), self.sync.working(whole, placed))
        merged = _total([(n * self._number, times) for n, times in self._frozen(placed)]) if self.merged else 0
        gathered = {Part.GATHERED: self._gathered(placed)} if self.probed else {}
        return {Part.SYNC: buckets + merged, **gathered}

    def _forward(self, placed: Placed) -> Bytes:
        tokens, number, parallel = self._tokens, self._number, placed.tensor_parallel
        return {
            Part.GATHERED: self._gathered(placed),
            Part.ACTIVATIONS: formulas.one_layer(self.model, tokens, number, tensor_parallel=parallel),
            Part.LOGITS: formulas.logits(self.model.vocabulary, tokens, number, tensor_parallel=parallel),
        }

    def _backward(self, placed: Placed) -> Bytes:
        """At the worst moment of a pass: all is saved, and either the logits or one recomputed layer is there too."""
        tokens, number, parallel = self._tokens, self._number, placed.tensor_parallel
        saved, again = formulas.activations(self.model, tokens, number, tensor_parallel=parallel), 0
        if self.checkpointing:
            saved = formulas.checkpoints(self.model, tokens, number)
            again = formulas.one_layer(self.model, tokens, number, tensor_parallel=parallel)
        logits = formulas.logits_backward(self.model.vocabulary, tokens, number, tensor_parallel=parallel)
        buckets = 0
        if self.zero_stage >= _GRADIENTS and placed.copies > 1 and self.lora_rank is None:
            buckets = formulas.gradient_buckets(self.model, number, tensor_parallel=parallel)
        trained = sum(n * times for n, times in self._trained(placed, _GRADIENTS))
        return {
            Part.GRADIENTS: formulas.gradients(trained, DTYPE_BYTES[self.weights]) + buckets,
            Part.GATHERED: self._gathered(placed),
            Part.ACTIVATIONS: saved + (again if again > logits else 0),
            Part.LOGITS: 0 if again > logits else logits,
        }


def _total(sizes: Tensors) -> int:
    return sum(size * times for size, times in sizes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrozenModel:
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
        process = placed.process(placed.groups)
        on_host = self.on_host or not placed.accelerators_per_rank
        copies = placed.copies if placed.accelerators_per_rank else placed.ranks
        shards = copies if self.sharded else 1
        number, parallel = DTYPE_BYTES[self.dtype], placed.tensor_parallel
        size = formulas.parameters(self.model, number, tensor_parallel=parallel, shards=shards)
        tokens = pass_tokens(self.micro_batch, self.sequence_length, self.token_budget)
        there = process if on_host else process | {Part.PARAMETERS: size}
        gathers = shards > 1 or self.on_host
        forward = {
            Part.GATHERED: formulas.gathered(self.model, number, tensor_parallel=parallel) if gathers else 0,
            Part.ACTIVATIONS: formulas.one_layer(self.model, tokens, number, tensor_parallel=parallel),
            Part.LOGITS: formulas.logits(self.model.vocabulary, tokens, number, tensor_parallel=parallel),
        }
        return Footprint(
            held={_OFF: process, _WEIGHTS: there, _FULL: there},
            working={"infer": forward, "rollout": forward},  # whichever it works in
            loading={} if on_host else {Part.LOADING: self.model.largest_weight_elements * number},
            host=self._host(placed, parallel, shards, on_host=on_host),
        )

    def _host(self, placed: Placed, parallel: int, shards: int, *, on_host: bool) -> dict[Residency, HostBytes]:
        number = DTYPE_BYTES[self.dtype]
        tensors = [(part * number, copies) for part, copies in self.model.parts(parallel, shards)]
        if on_host:
            found = dict.fromkeys(Residency, host_copies(placed, HostPart.WEIGHTS, off=tensors)[_OFF])
        else:
            found = host_copies(placed, HostPart.OFFLOADED, off=tensors)
        if self.refreshed is None:
            return found
        whole = {HostPart.RECEIVED: formulas.parameters(self.model, DTYPE_BYTES[self.refreshed])}
        return {at: kept if at is _OFF else {**kept, **whole} for at, kept in found.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvShare:
    """The engine takes this share of each accelerator for everything; the KV cache gets what is left of it."""

    gpu_memory_utilization: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvBytes:
    """The KV cache has this size on each accelerator."""

    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """A generation engine such as vLLM."""

    model: ModelShape
    cache: KvShare | KvBytes
    sequence_length: int  # the longest; the cache must hold at least one such
    dtype: Dtype = "bf16"
    cache_dtype: Literal["bf16", "fp16", "fp8", "fp32"] = "bf16"
    step_tokens: int = 8192  # most tokens of one step
    step_sequences: int = 256
    sleep_level: Literal[1, 2] = 2  # 1: weights are copied to the host; 2: dropped, the next sync brings new ones
    sync: DeviceSync = THROUGH_HOST

    def footprint(self, placed: Placed) -> Footprint:
        number, parallel = DTYPE_BYTES[self.dtype], placed.tensor_parallel
        process = self.sync.beside(placed.process(placed.groups))
        if placed.kind != "emulated":
            process[Part.ASLEEP] = placed.assumptions.graphs_bytes
        weights = formulas.parameters(self.model, number, tensor_parallel=parallel)
        workspace = formulas.engine_workspace(
            self.model, self.step_tokens, self.step_sequences, number, tensor_parallel=parallel
        )
        cache = self._cache_bytes(placed.memory_bytes, sum(process.values()) + weights + workspace)
        buckets = formulas.sync_buckets(weights, placed.assumptions.bucket_bytes)
        awake = process | {Part.PARAMETERS: weights}
        # Every accelerator of the rank has its part; the host has them all.
        copies = [
            (formulas.sleep_copy(part * number, self.sleep_level), layers * placed.accelerators_per_rank)
            for part, layers in self.model.parts(parallel)
        ]
        return Footprint(
            held={_OFF: process, _WEIGHTS: awake, _FULL: awake | {Part.KV_CACHE: cache}},
            working={
                "sync": {Part.SYNC: max(self.sync.working(weights, placed), buckets)},
                "rollout": {Part.WORKSPACE: workspace},
            },
            host=host_copies(placed, HostPart.SLEEP, off=copies),
            lacking=self._lacking(cache, parallel, placed),
        )

    def _cache_bytes(self, memory: int, taken: int) -> int:
        if isinstance(self.cache, KvBytes):
            return self.cache.size_bytes
        return formulas.kv_share(memory, self.cache.gpu_memory_utilization, taken)

    def tokens(self, cache: int, tensor_parallel: int) -> int:
        """How many tokens fit in `cache` bytes of each accelerator."""
        return cache // self._token_bytes(tensor_parallel)

    def _token_bytes(self, tensor_parallel: int) -> int:
        return formulas.kv_per_token(self.model, DTYPE_BYTES[self.cache_dtype], tensor_parallel=tensor_parallel)

    def _lacking(self, cache: int, tensor_parallel: int, placed: Placed) -> str | None:
        if isinstance(self.cache, KvShare) and not placed.memory_bytes:
            return None  # a share of nobody knows what
        room = self.tokens(cache, tensor_parallel)
        if room >= self.sequence_length:
            return None
        return f"the KV cache holds {room} tokens, the longest sequence has {self.sequence_length}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulator:
    """Environments whose memory is declared; they are there or not, nothing in between."""

    accelerator_bytes: int = 0
    host_bytes: int = 0

    def footprint(self, placed: Placed) -> Footprint:
        host = {HostPart.SIMULATOR: self.host_bytes}
        return Footprint(
            held={_OFF: {}, _WEIGHTS: {}, _FULL: {Part.SIMULATOR: self.accelerator_bytes}},
            host=dict.fromkeys(Residency, host),
        )


@runtime_checkable
class Choices(Protocol):
    """Discrete actions."""

    @property
    def n(self) -> int: ...


@runtime_checkable
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
    def parameters(self) -> int:
        return sum(w.elements for w in self.weights)

    @property
    def buffer_bytes(self) -> int:
        return self.buffer_numbers * _FLOAT64

    @property
    def weights_bytes(self) -> int:
        """Of a whole policy, as it is sent and sampled with."""
        return self.parameters * _FLOAT32 + self.buffer_bytes

    def parts(self, shards: int) -> list[int]:
        """Bytes that the fullest of `shards` ranks holds of each parameter."""
        return [w.part(1, shards) * _FLOAT32 for w in self.weights]


def policy_shape(model: MlpConfig, spaces: PolicySpaces, *, normalize_observations: bool) -> PolicyShape:
    """Two trunks, policy and value, and a log deviation per element of a continuous action."""
    actions, size = spaces.actions, math.prod(spaces.observation_shape)
    discrete = isinstance(actions, Choices)
    outputs = actions.n if isinstance(actions, Choices) else math.prod(actions.shape)
    weights = [*_trunk("policy", (size, *model.hidden, outputs)), *_trunk("value", (size, *model.hidden, 1))]
    if not discrete:
        weights.append(Weight(name="log_std", shape=(outputs,)))
    return PolicyShape(weights=tuple(weights), buffer_numbers=1 + 2 * size if normalize_observations else 0)


def _trunk(name: str, widths: tuple[int, ...]) -> list[Weight]:
    layers: list[Weight] = []
    for at, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers.append(Weight(name=f"{name}.{2 * at}.weight", shape=(outputs, inputs)))  # odd numbers: activations
        layers.append(Weight(name=f"{name}.{2 * at}.bias", shape=(outputs,)))
    return layers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLearner:
    """The actor: float32 shards and Adam state, everything whole while it computes."""

    policy: PolicyShape
    sync: DeviceSync = THROUGH_HOST

    def footprint(self, placed: Placed) -> Footprint:
        parts = self.policy.parts(placed.ranks)
        weights = sum(parts) + self.policy.buffer_bytes
        state = [(size, 2) for size in parts] + [(_FLOAT32, len(parts))]  # two moments, and a step count per tensor
        process = self.sync.beside(placed.process(groups=1))
        whole = self.policy.parameters * _FLOAT32
        there = process | {Part.PARAMETERS: weights}
        return Footprint(
            held={
                _OFF: process,
                _WEIGHTS: there,
                _FULL: there | {Part.OPTIMIZER: sum(n * times for n, times in state)},
            },
            working={
                **_syncing(self.sync, self.policy, placed),
                "learn": {Part.GATHERED: whole, Part.GRADIENTS: whole},
            },
            host=host_copies(
                placed,
                HostPart.OFFLOADED,
                off=[*((size, 1) for size in parts), (self.policy.buffer_bytes, 1), *state],
                weights=state,
            ),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicySampler:
    """A rollout rank: the whole policy, and the workspace that its config declares."""

    policy: PolicyShape
    workspace_bytes: int = 0
    sync: DeviceSync = THROUGH_HOST

    def footprint(self, placed: Placed) -> Footprint:
        process = self.sync.beside(placed.process(groups=0))
        there = process | {Part.PARAMETERS: self.policy.weights_bytes}
        return Footprint(
            held={_OFF: process, _WEIGHTS: there, _FULL: there | {Part.WORKSPACE: self.workspace_bytes}},
            working=_syncing(self.sync, self.policy, placed),
        )


def _syncing(sync: DeviceSync, policy: PolicyShape, placed: Placed) -> dict[str, Bytes]:
    """By stage."""
    size = sync.working(policy.weights_bytes, placed)
    return {"sync": {Part.SYNC: size}} if size else {}
