"""The least memory that a component needs under any change; if even that has no room, the GPUs are too small."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from rlplace.config.blocks.training import ActorConfig
from rlplace.placement.memory.demands import (
    Demand,
    EngineDemand,
    Footprint,
    Placed,
    ScoringDemand,
    TrainingDemand,
)
from rlplace.placement.memory.ledger import MemoryCase, reserved
from rlplace.placement.schedule import Schedule, base_stage
from rlplace.units import show_bytes

LORA_RANK = 16
_SWITCHES = (False, True)


def too_small(case: MemoryCase) -> str | None:
    """Return the reason, in words, why a component can never fit on the cluster; None if no such component is found.

    `case`: the inputs of the plan's memory proof. Each component is checked as if it had the whole cluster for itself
    and the config had every setting that saves memory. None means that each component fits on its own, or that its
    memory or the memory of the accelerators is not known. It does not prove that all components fit together.
    """
    nodes = [node for node in case.placement.topology.nodes if node.accelerators]
    if not nodes or not all(run.memory_bytes for node in nodes for run in node.alike):
        return None
    rooms = {
        (
            run.memory_bytes - reserved(case.reserve, node.kind, run.memory_bytes),
            run.memory_bytes,
            node.kind,
        )
        for node in nodes
        for run in node.alike
    }
    count = sum(node.accelerators for node in nodes)
    schedule = case.schedule()
    for component in case.placement.components:
        demand = case.demands.get(component)
        if demand is None or case.measured.get(component):
            continue
        # With mixed accelerators, the component only has to fit on one kind of them.
        needed = [
            (_least(demand, schedule, component, count, size, kind), room)
            for room, size, kind in rooms
        ]
        if all(least > room for least, room in needed):
            least, room = min(needed, key=lambda found: found[0] - found[1])
            return (
                f"{component} alone, spread over all {count} with the least of everything, "
                f"holds {show_bytes(least)} on each, where {show_bytes(room)} are to be had"
            )
    return None


def _least(
    demand: Demand,
    schedule: Schedule,
    component: str,
    count: int,
    memory_bytes: int,
    kind: str,
) -> int:
    """Return the smallest peak, in bytes per accelerator, that a component can have if it has the whole cluster.

    It is the minimum over all variants of the demand and all ways to spread the component. `count`: number of
    accelerators in the cluster. `memory_bytes`, `kind`: memory and kind of one accelerator.
    """
    # Spreads to try: one rank per accelerator or one rank over all; tensor parallelism of 1 or over all; context
    # parallelism of 1 or over all, which needs one more communicator.
    spread = [
        Placed(
            ranks=count // each,
            accelerators_per_rank=each,
            tensor_parallel=cut,
            context_parallel=tokens,
            memory_bytes=memory_bytes,
            kind=kind,
        )
        for (each, cut), tokens in itertools.product(
            {(1, 1), (1, count), (count, count)}, {1, count}
        )
    ]
    forms = itertools.product(_forms(demand), spread)
    return min(
        _fullest(form.footprint(placed), schedule, component) for form, placed in forms
    )


def _fullest(footprint: Footprint, schedule: Schedule, component: str) -> int:
    """Return the peak bytes per accelerator of a component over all stages.

    In each stage, the component is counted with the smallest residency that the stage needs.
    """
    return max(
        sum(footprint.held[schedule.needs.of(stage, component)].values())
        + sum(
            sum(footprint.working.get(base_stage(active), {}).values())
            for active in schedule.needs.active_stages(stage, component)
        )
        for stage in schedule.stages
    )


def _forms(demand: Demand) -> Iterator[Demand]:
    """Yield variants of a component's memory demand in which every option that saves memory is at its strongest.

    An option that saves memory only in some cases gives two variants: one with the option, and one without it.
    """
    match demand:
        case TrainingDemand(block=block):
            ranks = (
                {block.lora_rank, block.lora_rank or LORA_RANK}
                if isinstance(block, ActorConfig)
                else {None}
            )
            for rank, checkpointing, on_host in itertools.product(
                ranks, _SWITCHES, _SWITCHES
            ):
                optimizer = dataclasses.replace(
                    block.optimizer, kind="adamw_8bit", on_host=on_host
                )
                kept: dict[str, Any] = {
                    "checkpointing": checkpointing,
                    "activation_offload": checkpointing,
                }
                kept |= {"optimizer": optimizer, "zero_stage": 3}
                yield dataclasses.replace(
                    demand,
                    block=_smallest(
                        block, demand.sequence_length, lora_rank=rank, **kept
                    ),
                )
        case ScoringDemand(block=frozen):
            for on_host in _SWITCHES:
                kept = {"sharded": True, "on_host": on_host}
                yield dataclasses.replace(
                    demand, block=_smallest(frozen, demand.sequence_length, **kept)
                )
        case EngineDemand(
            block=engine
        ):  # without a cache: how small one may be depends on how the model is cut
            yield dataclasses.replace(
                demand,
                block=dataclasses.replace(engine, kv_cache_memory=0, sleep_level=2),
            )
        case _:
            yield demand


def _smallest(block: Any, sequence_length: int, **kept: Any) -> Any:
    """Return a copy of a config block whose passes have one sequence each.

    `sequence_length`: tokens of that sequence. `kept`: other keys of the block -> their new values.
    """
    return dataclasses.replace(
        block,
        micro_batch=1,
        token_budget=min(block.token_budget, sequence_length),
        **kept,
    )
