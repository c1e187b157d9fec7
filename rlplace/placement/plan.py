"""Config x topology -> the plan: everything that is decided before anything runs, and all that a run executes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rlplace.config import Config
from rlplace.errors import PlacementError, Problem, Source
from rlplace.placement.channels import PPO_ENDS, ChannelPlan, flows_of, plan_channels
from rlplace.placement.checks import check_data_flow, check_names, check_sync, find_warnings
from rlplace.placement.deadlock import check_flows
from rlplace.placement.flow import Delivery, Routes, deliver, derive_routes
from rlplace.placement.language.hybrid import HybridComponentPlacement, read_component_placement
from rlplace.placement.machines.topology import Topology
from rlplace.placement.schedule import PPO_NEEDS, Needs, Schedule, derive_schedule, find_clashes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who sits where, who is resident when, who sends what to whom. Never changes once made."""

    topology: Topology
    placement: HybridComponentPlacement
    needs: Needs
    schedule: Schedule
    routes: Routes
    channels: tuple[ChannelPlan, ...]
    deliveries: tuple[Delivery, ...]  # of weights
    warnings: tuple[Problem, ...] = ()

    @property
    def stage_groups(self) -> int:
        return self.routes.trajectories.rows // self.routes.observations.rows


def make_plan(
    config: Config, topology: Topology, needs: Needs = PPO_NEEDS, sources: Mapping[str, Source] | None = None
) -> Plan:
    """The plan of a run, or a PlacementError with every problem of placement, residency and data flow at once.

    `sources` maps key paths to where their values were written.
    """
    places = sources or {}
    components, cluster = needs.components, config.cluster
    offload = {c: bool(getattr(config, c).enable_offload) for c in components}
    found = read_component_placement(cluster, topology, components, places)
    # What is placed rightly is checked further even when something else is wrong, so that one look shows everything.
    right = {name: spec for name, spec in found.specs.items() if name in components}
    placement = HybridComponentPlacement.of(right, found.groups)
    problems = [*found.problems]
    problems += check_names(cluster.allow_resident, components, places)
    problems += find_clashes(placement, needs, offload, cluster.allow_resident, places)
    problems += check_data_flow(config, placement, places)
    problems += check_sync(config, placement, needs, places)
    if problems:
        raise PlacementError(problems)
    routes = derive_routes(placement, config.simulator_env.total_num_envs, config.torch_rollout.pipeline_stage_num)
    channels = plan_channels(placement, routes, config.torch_rollout.pipeline_stage_num)
    stuck = check_flows(tuple(flows_of(channels, PPO_ENDS)), needs.stages, needs.residency)
    assert not stuck, stuck  # the capacities are our own
    return Plan(
        topology=topology,
        placement=placement,
        needs=needs,
        schedule=derive_schedule(placement, needs, offload, cluster.allow_resident, places),
        routes=routes,
        channels=channels,
        deliveries=deliver(placement),
        warnings=find_warnings(config, placement),
    )
