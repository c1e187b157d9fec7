"""Make the plan and the memory proof of any job, by the methods of the job; and the defaults of these methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlplace.checks import machines, names, waste
from rlplace.checks.rule import broken
from rlplace.config.open_job import DeclaredMemory, OpenConfig
from rlplace.contract.registry import job_of
from rlplace.contract.rules import PLACED, PlacedJob
from rlplace.contract.stages import Channel, Stage
from rlplace.errors import Problem, Source
from rlplace.placement.channels import ChannelPlan, channel_plan
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.machines.topology import Topology
from rlplace.placement.memory.declared import DeclaredDemand, StageSync
from rlplace.placement.memory.demands import Demand, DeviceSync
from rlplace.placement.memory.ledger import (
    Measurements,
    MemoryCase,
    RankedMeasurements,
    SharedMemory,
    other_ranks,
)
from rlplace.placement.memory.shared_memory import count_shared
from rlplace.placement.plan import Placed, Plan
from rlplace.placement.schedule import Residency
from rlplace.units import counted

if TYPE_CHECKING:
    from rlplace.config.schema import Config


def make_plan(
    config: Config | OpenConfig,
    topology: Topology,
    sources: Mapping[str, Source] | None = None,
) -> Plan:
    """Return the plan for a config, made by the config's job. Raises PlacementError with all problems.

    `topology`: the machines. `sources`: config key -> file and line in which its value is set, for errors.
    """
    return job_of(config).plan(config, topology, sources or {})


def memory_case(
    plan: Plan,
    config: Config | OpenConfig,
    known: Any = None,
    measured: Measurements | None = None,
) -> MemoryCase:
    """Return the inputs of a plan's memory proof. The method `ledger()` of the result computes the proof.

    `known`: information from an object that the config names, such as the spaces of a simulator; None: there is no such
    object, or it was not created yet. `measured`: component -> residency -> bytes per accelerator, as an earlier run
    measured them. Raises ConfigError and PlacementError.
    """
    return job_of(config).memory(config, plan, measured, known=known)


# ── of jobs that declare their stages ────────────────────────────────────────────────────────────────────────────────


def check_placed(components: Mapping[str, Any], placed: Placed) -> Iterator[Problem]:
    """Yield the problems of a custom job's placement: wrong component names, and more ranks than a class allows.

    `components`: name -> worker class. `placed`: the placement.
    """
    yield from broken(names.RULES, placed)
    yield from broken(PLACED, PlacedJob(components=components, placed=placed))


def waste_of(placed: Placed) -> Iterator[Problem]:
    """Yield warnings about unused accelerators, and about accelerators declared with more memory than they have."""
    yield from broken(waste.WARNINGS, placed)
    yield from broken(machines.WARNINGS, placed.cluster)


def channels_of(
    channels: Sequence[Channel], placement: HybridComponentPlacement
) -> tuple[ChannelPlan, ...]:
    """Return the plans of the declared channels. Channels from or to a component that is not placed are left out."""
    placed = placement.components
    there = [c for c in channels if c.source in placed and c.target in placed]
    return tuple(_channel_of(channel, placement) for channel in there)


def _channel_of(channel: Channel, placement: HybridComponentPlacement) -> ChannelPlan:
    why = f"{channel.items} items wait in it at most, as declared"
    waiting: int | list[int] = channel.items
    if channel.by_rank:
        why = f"{channel.items} items wait for each {channel.target} rank at most, as declared"
        waiting = [channel.items] * placement.world_size(channel.target)
    plan = channel_plan(
        placement, channel.name, channel.source, channel.target, waiting, why
    )
    return dataclasses.replace(plan, declared=True)


def weight_pairs(stages: Sequence[Stage]) -> list[tuple[str, str]]:
    """Return the (source, target) pairs of components with a weight transfer in the stages, without duplicates."""
    pairs: dict[tuple[str, str], None] = {}
    for stage in stages:
        for transfer in stage.transfers:
            for target in transfer.targets:
                pairs[transfer.source, target] = None
    return list(pairs)


def sources_on_devices(config: OpenConfig) -> list[str]:
    """Return the components whose weights may go from GPU to GPU, without the memory of the host.

    The workers of the inline launcher are threads of one process, which shares nothing with itself by CUDA IPC.
    """
    if config.cluster.launcher == "inline":
        return []
    return [
        component
        for component, block in config.components.items()
        if block.through_host is not True
    ]


def memory_of(config: OpenConfig, plan: Plan, measured: Measurements) -> MemoryCase:
    """Return the inputs of the memory proof of a custom job, with the memory that the config declares.

    `measured`: component -> residency -> bytes per accelerator, as an earlier run measured them. The measured bytes are
    used for components without declared bytes on accelerators. Bytes that were measured with more ranks than are
    planned are not used, because a rank may hold more if there are fewer ranks.
    """
    fewer = _fewer_ranks(plan, measured)
    if isinstance(measured, RankedMeasurements):
        measured = measured.without(fewer)
    demands: dict[str, Demand] = {}
    unknown: list[str] = []
    working = plan.schedule.needs
    known = _known(config, plan, measured)
    for component in plan.placement.components:
        declared = known[component]
        counted_here = _is_declared(declared) or component in measured
        if not counted_here and plan.placement.accelerators(component):
            unknown.append(component)
        if not counted_here and not declared.host and not declared.working:
            continue
        stages = [s for s in working.stages if component in working.residency[s]]
        syncs = list(_syncs_of(component, config, plan, known))
        demands[component] = DeclaredDemand(
            declared=declared, stages=stages, syncs=syncs
        )
    shared: SharedMemory = {}
    if plan.channels and config.cluster.launcher != "inline":
        shared = count_shared(plan, {}, 0)
    return MemoryCase(
        placement=plan.placement,
        needs=plan.needs,
        offload=plan.offload,
        demands=demands,
        measured=measured,
        unknown=tuple(unknown),
        notes=tuple(_notes(config, plan, measured, fewer)),
        shared=shared,
        reserve=config.engine.memory.reserve,
    )


def _known(
    config: OpenConfig, plan: Plan, measured: Measurements
) -> dict[str, DeclaredMemory]:
    """Return component -> its declared memory, with measured bytes on accelerators where none are declared.

    The bytes on the host while a component is off follow from the bytes that were measured on accelerators.
    """
    known: dict[str, DeclaredMemory] = {}
    for component in plan.placement.components:
        declared = config.components[component].memory
        if component in measured and not _is_declared(declared):
            declared = _as_measured(declared, measured[component])
        known[component] = declared
    return known


def _syncs_of(
    component: str,
    config: OpenConfig,
    plan: Plan,
    known: Mapping[str, DeclaredMemory],
) -> Iterator[StageSync]:
    """Yield the ends of weight syncs between accelerators that `component` has.

    `known`: component -> its memory. One copy of the weights counts with the weights of the end that has more: a rank
    of the source may hold a part alone.
    """
    for stage in config.job.stages:
        for source, target in weight_pairs([stage]):
            if component not in (source, target):
                continue
            deliveries = [
                delivery
                for delivery in plan.deliveries
                if (delivery.source, delivery.target) == (source, target)
            ]
            if component == source:
                sync = DeviceSync.sending(deliveries)
            else:
                sync = DeviceSync.receiving(deliveries)
            if sync == DeviceSync():
                # Through the host
                continue
            size = max(known[source].weights or 0, known[target].weights or 0)
            yield StageSync(stage=stage.name, sync=sync, weights_bytes=size)


def _is_declared(declared: DeclaredMemory) -> bool:
    """Return whether bytes on accelerators are declared, for the weights or for the full state."""
    return declared.weights is not None or declared.full is not None


def _as_measured(
    declared: DeclaredMemory, measured: Mapping[Residency, int]
) -> DeclaredMemory:
    """Return the declared memory with the measured bytes on accelerators in place of the declared bytes."""
    return dataclasses.replace(
        declared,
        weights=measured.get(Residency.WEIGHTS),
        full=measured.get(Residency.FULL),
    )


def _fewer_ranks(plan: Plan, measured: Measurements) -> dict[str, tuple[int, int]]:
    """Return component -> its numbers of ranks (measured, planned), for those that have fewer than when measured."""
    found = other_ranks(measured, plan.placement)
    return {c: (then, now) for c, (then, now) in found.items() if now < then}


def _notes(
    config: OpenConfig,
    plan: Plan,
    measured: Measurements,
    fewer: Mapping[str, tuple[int, int]],
) -> Iterator[str]:
    """Yield a line of text for each component with unknown memory. The line says how to declare or measure it.

    `fewer`: the result of `_fewer_ranks`.
    """
    for component in plan.placement.components:
        declared = config.components[component].memory
        if not plan.placement.accelerators(component):
            if not declared.host:
                yield (
                    f"{component}: what it takes of its host is not measured; declare it: "
                    f"{component}.memory.host: <bytes>"
                )
            continue
        if _is_declared(declared) or component in measured:
            continue
        if component in fewer:
            then, now = fewer[component]
            yield (
                f"{component}: measured with {counted(then, 'rank')}, planned with {now}: a rank may hold more, so "
                f"nothing is proved; measure it with {now}, or declare it: "
                f"{component}.memory: {{weights: <bytes>, full: <bytes>}}"
            )
            continue
        yield (
            f"{component}: not known yet; a run measures it (memory.json in its folder, --measured), or declare it: "
            f"{component}.memory: {{weights: <bytes>, full: <bytes>}}"
        )
