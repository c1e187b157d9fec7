"""Plan a job on simulators: its stages, the routes of its rows, its channels, and what it takes of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rlplace.checks import machines, names, processes, waste
from rlplace.checks.rule import Rule, broken
from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.errors import Problem, Source
from rlplace.jobs.simulator import rules
from rlplace.jobs.simulator.channels import plan_channels
from rlplace.jobs.simulator.memory import simulator_case
from rlplace.placement.flow import deliver, deliver_by_node, derive_routes
from rlplace.placement.machines.topology import Topology
from rlplace.placement.memory.ledger import Measurements, MemoryCase
from rlplace.placement.plan import Placed, Plan, Rules, plan_components
from rlplace.placement.schedule import Needs, Residency

# What each stage needs of each component
SIMULATOR_NEEDS = Needs(
    stages=("sync", "rollout", "learn"),
    residency={
        "sync": {"actor": Residency.WEIGHTS, "rollout": Residency.WEIGHTS},
        "rollout": {"env": Residency.FULL, "rollout": Residency.FULL},
        "learn": {"actor": Residency.FULL},
    },
)

# Rules of a placement, in their order
_RULES: tuple[Rule[rules.PlacedSimulatorJob], ...] = (
    *names.RULES,
    *processes.RULES,
    *rules.RULES,
)
_WARNINGS: tuple[Rule[rules.PlacedSimulatorJob], ...] = (
    *waste.WARNINGS,
    *rules.WARNINGS,
)


def plan_of(
    config: SimulatorJobConfig, topology: Topology, sources: Mapping[str, Source]
) -> Plan:
    """Return the plan of a job on simulators. Raises PlacementError with all problems.

    `topology`: the machines. `sources`: config key -> file and line in which its value is set, for errors.
    """
    components = SIMULATOR_NEEDS.components

    def check(placed: Placed) -> Iterator[Problem]:
        return broken(_RULES, rules.PlacedSimulatorJob.of(config, placed))

    def wasted(placed: Placed) -> Iterator[Problem]:
        yield from broken(_WARNINGS, rules.PlacedSimulatorJob.of(config, placed))
        yield from broken(machines.WARNINGS, placed.cluster)

    plan = plan_components(
        config.cluster,
        topology,
        needs=SIMULATOR_NEEDS,
        offload=[c for c in components if config.block_of(c).enable_offload],
        sources=sources,
        rules=Rules(
            optional=(),
            blocks={c: config.key_of(c) for c in components},
            check=check,
            waste=wasted,
        ),
    )
    placement = plan.placement
    stage_groups = config.rollout.pipeline_stage_num
    routes = derive_routes(placement, config.env.total_num_envs, stage_groups)
    sync = config.actor.sync
    on_devices = sync.mode == "all" and sync.through_host is not True
    return dataclasses.replace(
        plan,
        routes=routes,
        channels=tuple(plan_channels(placement, routes, stage_groups)),
        deliveries=deliver(placement) if on_devices else deliver_by_node(placement),
    )


def memory_of(
    config: SimulatorJobConfig, plan: Plan, measured: Measurements | None, spaces: Any
) -> MemoryCase:
    """Return all inputs of the memory proof of a planned job.

    `measured`: component -> residency -> bytes per accelerator, as an earlier run measured them; None: nothing was
    measured. `spaces`: observation and action spaces of the job's simulator; None if they are not known.
    """

    def replan(other: SimulatorJobConfig, topology: Topology) -> MemoryCase:
        planned = plan_of(other, topology, {})
        return memory_of(other, planned, measured, spaces)

    return simulator_case(plan, config, replan, spaces, measured)
