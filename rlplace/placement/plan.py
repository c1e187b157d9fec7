"""Config x topology -> the plan: everything that is decided before anything runs, and all that a run executes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from rlplace.config import RunConfig
from rlplace.errors import PlacementError, Problem, Source
from rlplace.placement.checks import check_data_flow, check_names, find_warnings
from rlplace.placement.deadlock import Flow, check_flows
from rlplace.placement.hybrid import HybridComponentPlacement, read_component_placement
from rlplace.placement.routes import Routes, derive_routes
from rlplace.placement.schedule import PPO_NEEDS, Needs, Schedule, derive_schedule, find_clashes
from rlplace.placement.topology import Topology

# One bucket travels while the one before it is being taken.
WEIGHT_BUCKETS_PER_TARGET = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelPlan:
    """One channel of the run. `capacity_items` is over all keys and never stops a stage for good."""

    name: str
    source: str
    target: str
    keys: tuple[str, ...]
    capacity_items: int
    under_way: int  # most items that can be in it before its source waits
    why: str  # where the capacity comes from


# Channel of a PPO run -> stage it is filled in, stage it is emptied in, channels that must have had an item before.
_STAGES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "observations": ("rollout", "rollout", ()),
    "actions": ("rollout", "rollout", ("observations",)),
    "trajectories": ("rollout", "learn", ()),
    "weights": ("sync", "sync", ()),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who sits where, who is resident when, who sends what to whom. Never changes once made."""

    topology: Topology
    placement: HybridComponentPlacement
    needs: Needs
    schedule: Schedule
    routes: Routes
    channels: tuple[ChannelPlan, ...]
    warnings: tuple[Problem, ...] = ()

    @property
    def stage_groups(self) -> int:
        return self.routes.trajectories.rows // self.routes.observations.rows


def make_plan(
    config: RunConfig, topology: Topology, needs: Needs = PPO_NEEDS, sources: Mapping[str, Source] | None = None
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
    if problems:
        raise PlacementError(problems)
    routes = derive_routes(placement, config.env.total_num_envs, config.rollout.pipeline_stage_num)
    channels = plan_channels(placement, routes, config.rollout.pipeline_stage_num)
    stuck = check_flows(flows_of(channels), needs.stages, needs.residency)
    assert not stuck, stuck  # the capacities are our own
    return Plan(
        topology=topology,
        placement=placement,
        needs=needs,
        schedule=derive_schedule(placement, needs, offload, cluster.allow_resident, places),
        routes=routes,
        channels=channels,
        warnings=find_warnings(config, placement),
    )


def plan_channels(placement: HybridComponentPlacement, routes: Routes, stage_groups: int) -> tuple[ChannelPlan, ...]:
    """The channels of a PPO run, each large enough for all that can be under way at once.

    An env rank has at most one step of each stage group unanswered, so observations and actions hold stage groups x
    shares. Trajectories are put in rollout and taken in learn: the whole iteration must fit. Weights are taken while
    they are put.
    """
    by_rank = {c: tuple(map(str, range(placement.world_size(c)))) for c in ("actor", "env", "rollout")}
    pieces = len(routes.observations.shares)
    asked = stage_groups * pieces
    return (
        ChannelPlan(
            name="observations",
            source="env",
            target="rollout",
            keys=by_rank["rollout"],
            capacity_items=asked,
            under_way=asked,
            why=f"{pieces} pieces of a step x {stage_groups} stage group{'s' * (stage_groups > 1)}",
        ),
        ChannelPlan(
            name="actions",
            source="rollout",
            target="env",
            keys=tuple(f"{rank}/{group}" for rank in by_rank["env"] for group in range(stage_groups)),
            capacity_items=asked,
            under_way=asked,
            why="one answer for each observation",
        ),
        ChannelPlan(
            name="trajectories",
            source="env",
            target="actor",
            keys=by_rank["actor"],
            capacity_items=len(routes.trajectories.shares),
            under_way=len(routes.trajectories.shares),
            why="all pieces of an iteration wait there for learn",
        ),
        ChannelPlan(
            name="weights",
            source="actor",
            target="rollout",
            keys=by_rank["rollout"],
            capacity_items=WEIGHT_BUCKETS_PER_TARGET * len(by_rank["rollout"]),
            under_way=len(by_rank["rollout"]),
            why=f"{WEIGHT_BUCKETS_PER_TARGET} buckets for each rollout rank, taken while more are put",
        ),
    )


def flows_of(channels: Iterable[ChannelPlan]) -> list[Flow]:
    """The channels of a PPO run as the deadlock check sees them."""
    return [
        Flow(
            channel=c.name,
            source=c.source,
            target=c.target,
            put_in=_STAGES[c.name][0],
            taken_in=_STAGES[c.name][1],
            items=c.under_way,
            capacity=c.capacity_items,
            after=_STAGES[c.name][2],
        )
        for c in channels
    ]
