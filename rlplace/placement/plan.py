"""From config and machines to the plan: everything that is decided before a run starts and that the run executes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

from rlplace.config.blocks.machines import ClusterConfig
from rlplace.errors import PlacementError, Problem, Source, source_of
from rlplace.placement.channels import ChannelPlan
from rlplace.placement.counts import Savings
from rlplace.placement.flow import (
    Delivery,
    Route,
    Routes,
    copy_nearest,
)
from rlplace.placement.language.hybrid import (
    HybridComponentPlacement,
    read_component_placement,
)
from rlplace.placement.language.lend import wrong_borrowers
from rlplace.placement.machines.topology import Topology
from rlplace.placement.schedule import (
    OPTIONAL,
    Needs,
    Schedule,
    find_clashes,
    offload_of_parts,
    placed_names,
    schedule_of,
    split_stages,
    text_needs,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The immutable plan of a job: places of ranks, residency in each stage, and what components send to each other.

    `needs`: needs as the algorithm declares them; `schedule.needs` has them split into sub-stages. `offload`: component
    -> whether it releases accelerators that other components need. `routes`: routes of rows. `channels`: () if the job
    is only planned and does not run. `deliveries`: how weights are sent. `security`: of the traffic between nodes.
    """

    topology: Topology
    placement: HybridComponentPlacement
    needs: Needs  # needs as the algorithm declares them; `schedule.needs` has them split into sub-stages
    # Component -> whether it releases accelerators that other components need.
    offload: Mapping[str, bool]
    schedule: Schedule
    # Routes of rows whose source and target ranks are known before the run.
    routes: Routes | tuple[Route, ...] = ()
    # Channels of a job that runs; empty for a plan-only job.
    channels: tuple[ChannelPlan, ...] = ()
    deliveries: tuple[Delivery, ...] = ()  # deliveries of its weights
    # Security of the traffic between nodes.
    security: Literal["encrypted", "password"] = "encrypted"
    warnings: tuple[Problem, ...] = ()

    @property
    def row_routes(self) -> Routes:
        """The routes of rows in a job on simulators. Raises AssertionError for any other job."""
        assert isinstance(self.routes, Routes), "of simulators only"
        return self.routes

    @property
    def savings(self) -> Savings:
        """The numbers of accelerators that the plan uses, and that it would use if components shared none."""
        sizes = {
            c: len(self.placement.accelerators(c)) for c in self.placement.components
        }
        return Savings(by_component=sizes, used=len(self.placement.used))

    @property
    def stage_groups(self) -> int:
        """The number of stage groups of each env rank, in a job on simulators.

        A stage group is a share of the environments of an env rank. The stage groups step in turn.
        """
        return self.row_routes.trajectories.rows // self.row_routes.observations.rows


def _no_routes(placement: HybridComponentPlacement) -> tuple[Route, ...]:
    return ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A placement that was read, on which the rules of a job are checked before there is a plan.

    `components`: the components of the algorithm, also those that could not be placed. `active`: their needs, split
    into sub-stages.
    """

    cluster: ClusterConfig
    # Components of the algorithm, placed or not
    components: tuple[str, ...]
    placement: HybridComponentPlacement
    # Needs, split into sub-stages
    active: Needs


def _nothing(placed: Placed) -> Iterable[Problem]:
    return ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The additions that a job makes to the planning of its cluster block; by default, none.

    `optional`: components that may be placed in addition to those of the stages. `blocks`: component -> key of its
    config block, if that is not its name. `check`, `waste`: functions that yield the problems and the warnings of a
    placement. `routes`: function that returns the routes of a job that is only planned. `borrowers`: the roles that can
    work on accelerators which other components lend.
    """

    # Components that may be placed, besides those that the stages name.
    optional: tuple[str, ...] = OPTIONAL
    # Key of a component's block, where that is not its name.
    blocks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Functions that yield problems, and warnings, of a placement.
    check: Callable[[Placed], Iterable[Problem]] = _nothing
    waste: Callable[[Placed], Iterable[Problem]] = _nothing
    # Routes that a plan-only job would use.
    routes: Callable[[HybridComponentPlacement], tuple[Route, ...]] = _no_routes
    borrowers: tuple[str, ...] = ()


def plan_components(
    cluster: ClusterConfig,
    topology: Topology,
    *,
    needs: Needs | None = None,
    offload: Collection[str] = (),
    sources: Mapping[str, Source] | None = None,
    rules: Rules | None = None,
) -> Plan:
    """Return the plan of a cluster block, without channels. Raise PlacementError with all problems at once.

    `needs`: the least residency of each component in each stage; None: `text_needs` of the placed components.
    `offload`: the components with `enable_offload`. `sources`: key path -> the place in the config where it was
    written. `rules`: the rules of the job; None: `Rules()`, which adds no check.
    """
    if rules is None:
        rules = Rules()
    places = sources or {}
    needs = needs or text_needs(placed_names(cluster.component_placement))
    needs = dataclasses.replace(needs, shared=cluster.shared)
    components = needs.components
    unable = list(wrong_borrowers(cluster.lend, components, rules.borrowers))
    if unable:
        # Checked further without lending
        cluster = dataclasses.replace(cluster, lend={})
    specs, groups, problems = read_component_placement(
        cluster, topology, components, places, rules.optional
    )
    problems = unable + problems
    # The components placed correctly are checked further even if others are not, so that all problems come at once.
    placed = {c: spec for c, spec in specs.items() if c in components}
    placement = HybridComponentPlacement.of(placed, groups)
    leaving = {c: c in offload for c in components}
    residents = placement.residents
    needs = needs.with_lent(residents.borrowers)
    leaving_parts = offload_of_parts(residents, leaving)
    active = split_stages(needs, residents, leaving_parts)
    allowed = cluster.allow_resident
    checked = Placed(
        cluster=cluster, components=components, placement=placement, active=active
    )
    found = [
        *find_clashes(residents, active, leaving_parts, allowed, rules.blocks),
        *rules.check(checked),
    ]
    problems += [_written(problem, places) for problem in found]
    if problems:
        raise PlacementError(problems)
    warnings = rules.waste(checked)
    return Plan(
        topology=topology,
        placement=placement,
        needs=needs,
        offload=leaving,
        schedule=schedule_of(residents, active, leaving_parts, residents.parts),
        routes=rules.routes(placement),
        security=cluster.comm.security,
        warnings=tuple(_written(problem, places) for problem in warnings),
    )


def _written(problem: Problem, sources: Mapping[str, Source]) -> Problem:
    """Return the problem with the file and line of its config key filled in. `sources`: key path -> file and line."""
    return dataclasses.replace(problem, source=source_of(problem.key, sources))


def weight_routes(placement: HybridComponentPlacement) -> tuple[Route, ...]:
    """Return the route of weights from the actor to the engines, for a job that is only planned and does not run.

    Return () if actor or rollout is not placed.
    """
    if {"actor", "rollout"} <= {*placement.components}:
        return (copy_nearest(placement, "actor", "rollout"),)
    return ()
