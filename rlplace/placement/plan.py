"""Config x machines -> the plan: everything that is decided before anything runs, and all that a run executes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal

from rlplace.config.schema import ClusterConfig, Config, RewardConfig
from rlplace.errors import PlacementError, Problem, Source, source_of
from rlplace.placement import checks
from rlplace.placement.channels import ChannelPlan, plan_channels, scorers_of
from rlplace.placement.counts import Savings
from rlplace.placement.flow import (
    Delivery,
    Route,
    Routes,
    copy_nearest,
    deliver,
    deliver_by_node,
    derive_routes,
    scatter_rows,
)
from rlplace.placement.language.hybrid import (
    HybridComponentPlacement,
    read_component_placement,
)
from rlplace.placement.language.spec import role_of
from rlplace.placement.machines.topology import Topology
from rlplace.placement.schedule import (
    OPTIONAL,
    SIMULATOR_NEEDS,
    Needs,
    Schedule,
    find_clashes,
    placed_names,
    schedule_of,
    split_stages,
    text_needs,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where each component is, what is resident when, and what is sent from where to where. Immutable."""

    topology: Topology
    placement: HybridComponentPlacement
    needs: Needs  # as the algorithm declares them; in sub-stages: `schedule.needs`
    offload: Mapping[
        str, bool
    ]  # component -> whether it leaves accelerators that others need
    schedule: Schedule
    routes: (
        Routes | tuple[Route, ...]
    ) = ()  # of rows whose ranks are known before the run
    channels: tuple[ChannelPlan, ...] = ()  # of a job that runs
    deliveries: tuple[Delivery, ...] = ()  # of its weights
    security: Literal["encrypted", "password"] = (
        "encrypted"  # of what goes between nodes
    )
    warnings: tuple[Problem, ...] = ()

    @property
    def row_routes(self) -> Routes:
        """The routes of a job with simulators, which its workers follow."""
        assert isinstance(self.routes, Routes), "of simulators only"
        return self.routes

    @property
    def savings(self) -> Savings:
        """Accelerators saved by sharing."""
        sizes = {
            c: len(self.placement.accelerators(c)) for c in self.placement.components
        }
        return Savings(by_component=sizes, used=len(self.placement.used))

    @property
    def stage_groups(self) -> int:
        """Of a job with simulators."""
        return self.row_routes.trajectories.rows // self.row_routes.observations.rows


def make_plan(
    config: Config, topology: Topology, sources: Mapping[str, Source] | None = None
) -> Plan:
    """The plan of a job, or a PlacementError with every problem at once.

    `sources` maps key paths to where their values were written.
    """
    needs = needs_of(config)
    leaving = [c for c in needs.components if _leaves(config, c)]
    plan = plan_components(
        config.cluster,
        topology,
        needs=needs,
        offload=leaving,
        sources=sources,
        job=config,
    )
    placement = plan.placement
    sync = config.actor.sync
    # A version stays in host memory until engines that generate ahead of the actor load it.
    on_devices = (
        sync.mode == "all"
        and sync.through_host is not True
        and config.algorithm.max_staleness == 0
    )
    cut = config.kind == "causal_lm" and config.text_rollout.engine == "vllm"
    deliveries = (
        deliver(placement, cut=cut) if on_devices else deliver_by_node(placement)
    )
    if config.kind == "mlp":
        envs = config.simulator_env.total_num_envs
        groups = config.torch_rollout.pipeline_stage_num
        routes = derive_routes(placement, envs, groups)
        return dataclasses.replace(
            plan,
            routes=routes,
            channels=plan_channels(config, placement, routes),
            deliveries=deliveries,
        )
    if not config.runs:
        return plan
    return dataclasses.replace(
        plan,
        channels=plan_channels(config, placement),
        deliveries=deliveries,
    )


def plan_components(
    cluster: ClusterConfig,
    topology: Topology,
    *,
    needs: Needs | None = None,
    offload: Collection[str] = (),
    sources: Mapping[str, Source] | None = None,
    job: Config | None = None,
) -> Plan:
    """The plan of a cluster block, without channels, or a PlacementError with every problem at once.

    `needs` None: those of the components that the placement names (`text_needs`). `offload` are the components with
    enable_offload. `job`: whose block it is, which is checked with it.
    """
    places = sources or {}
    needs = needs or text_needs(placed_names(cluster.component_placement))
    components = needs.components
    optional = OPTIONAL if job is None or job.kind == "causal_lm" else ()
    specs, groups, problems = read_component_placement(
        cluster, topology, components, places, optional
    )
    # The components placed correctly are checked further even if others are not, so that all problems come at once.
    placement = HybridComponentPlacement.of(
        {c: spec for c, spec in specs.items() if c in components}, groups
    )
    leaving = {c: c in offload for c in components}
    active = split_stages(needs, placement, leaving)

    def written(found: Iterable[Problem]) -> Iterator[Problem]:
        return (
            dataclasses.replace(problem, source=source_of(problem.key, places))
            for problem in found
        )

    problems += written(checks.check_names(cluster.allow_resident, components))
    blocks = {} if job is None else {c: job.key_of(c) for c in components}
    problems += written(
        find_clashes(placement, active, leaving, cluster.allow_resident, blocks)
    )
    if job is None:
        problems += written(checks.check_partners(placement))
    else:
        problems += written(checks.check_job(job, placement, active))
    if problems:
        raise PlacementError(problems)
    return Plan(
        topology=topology,
        placement=placement,
        needs=needs,
        offload=leaving,
        schedule=schedule_of(placement, active, leaving),
        routes=_planned_routes(placement, job),
        security=cluster.comm.security,
        warnings=tuple(
            written(
                [
                    *checks.find_waste(job, placement, active),
                    *checks.find_overstated(cluster.nodes),
                ]
            )
        ),
    )


def needs_of(config: Config) -> Needs:
    """What the job's algorithm needs in each stage."""
    if config.kind == "mlp":
        return SIMULATOR_NEEDS
    names: Iterable[str] = placed_names(config.cluster.component_placement)
    if config.runs:
        names = ("actor", "rollout", "env", *scorers_of(names))
    early = config.runs and config.algorithm.accumulate_early
    refreshed = config.reference.refresh_every > 0
    needs = text_needs(
        names, actor_infers=config.actor_infers, refreshed=refreshed, accumulates=early
    )
    if config.runs:
        return dataclasses.replace(needs, ahead=config.algorithm.max_staleness)
    return needs


def _leaves(config: Config, component: str) -> bool:
    """Whether it has enable_offload. Rewards that are no models use no accelerator and count as offloaded."""
    block = config.block_of(component)
    return block.enable_offload or (
        isinstance(block, RewardConfig) and block.kind != "model"
    )


def _planned_routes(
    placement: HybridComponentPlacement, job: Config | None
) -> tuple[Route, ...]:
    """Of what is planned only: samples from the engines to every component that scores or learns; the actor's weights.

    None of a job that runs: what it sends goes by channels and deliveries.
    """
    if job is not None and (job.kind == "mlp" or job.runs):
        return ()
    routes: list[Route] = []
    if (
        job is not None
        and job.algorithm.prompts is not None
        and "rollout" in placement.components
    ):
        samples = job.algorithm.prompts * job.algorithm.samples_per_prompt
        takers = [
            c
            for c in placement.components
            if role_of(c) in ("actor", "critic", "reference", "reward")
        ]
        routes += [
            scatter_rows(placement, "rollout", c, samples, "samples") for c in takers
        ]
    if {"actor", "rollout"} <= {*placement.components}:
        routes.append(copy_nearest(placement, "actor", "rollout"))
    return tuple(routes)
