"""Plan a job on simulators: its stages, the routes of its rows, its channels, and what it takes of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlplace.config.schema import Config
from rlplace.errors import Source
from rlplace.placement import checks
from rlplace.placement.channels import plan_channels
from rlplace.placement.flow import deliver, deliver_by_node, derive_routes
from rlplace.placement.machines.topology import Topology
from rlplace.placement.memory.case import simulator_case
from rlplace.placement.memory.ledger import Measurements, MemoryCase
from rlplace.placement.plan import Plan, Rules, plan_components
from rlplace.placement.schedule import SIMULATOR_NEEDS


def plan_of(config: Config, topology: Topology, sources: Mapping[str, Source]) -> Plan:
    """Return the plan of a job on simulators. Raises PlacementError with every problem."""
    components = SIMULATOR_NEEDS.components
    rules = Rules(
        optional=(),
        blocks={c: config.key_of(c) for c in components},
        check=lambda placement, active: checks.check_simulator_job(
            config, placement, active
        ),
        waste=lambda placement, active: checks.find_waste_of_simulators(
            config, placement
        ),
    )
    plan = plan_components(
        config.cluster,
        topology,
        needs=SIMULATOR_NEEDS,
        offload=[c for c in components if config.block_of(c).enable_offload],
        sources=sources,
        rules=rules,
    )
    placement = plan.placement
    routes = derive_routes(
        placement,
        config.simulator_env.total_num_envs,
        config.torch_rollout.pipeline_stage_num,
    )
    sync = config.actor.sync
    on_devices = sync.mode == "all" and sync.through_host is not True
    return dataclasses.replace(
        plan,
        routes=routes,
        channels=plan_channels(config, placement, routes),
        deliveries=deliver(placement) if on_devices else deliver_by_node(placement),
    )


def memory_of(
    config: Config, plan: Plan, measured: Measurements | None, spaces: Any
) -> MemoryCase:
    """Return the memory of a planned job. `spaces`: of its simulator; None where they are not known."""

    def replan(other: Config, topology: Topology) -> tuple[Plan, MemoryCase]:
        planned = plan_of(other, topology, {})
        return planned, memory_of(other, planned, measured, spaces)

    return simulator_case(plan, config, replan, spaces, measured)
