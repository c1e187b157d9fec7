"""Who sits where and who is resident when, for any algorithm: the part of a plan that needs no simulator and no model.

`make_plan` adds what a PPO job sends through its channels, `llm.make_llm_layout` what a run with text tasks sends; a
layout holds for every job, with critics, references, rewards and agents as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

from rlplace.config import ClusterConfig
from rlplace.errors import PlacementError, Problem, Source
from rlplace.placement.batches import BatchSizes, check_batches
from rlplace.placement.channels import ChannelPlan
from rlplace.placement.checks import check_names, find_idle
from rlplace.placement.flow import Delivery, Route, copy_nearest, scatter_rows
from rlplace.placement.language.hybrid import HybridComponentPlacement, read_component_placement
from rlplace.placement.language.spec import role_of
from rlplace.placement.machines.topology import Topology
from rlplace.placement.schedule import (
    Needs,
    Schedule,
    derive_schedule,
    find_clashes,
    placed_names,
    rlhf_needs,
    split_stages,
)
from rlplace.placement.sharing import (
    Savings,
    check_partners,
    count_savings,
    find_engine_warnings,
    find_partner_warnings,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Never changes once made."""

    topology: Topology
    placement: HybridComponentPlacement
    needs: Needs  # as the algorithm declares them; in turns: `schedule.needs`
    schedule: Schedule
    routes: tuple[Route, ...]  # weights; then, where batch sizes are known, samples to all that judge or learn
    savings: Savings
    warnings: tuple[Problem, ...] = ()
    channels: tuple[ChannelPlan, ...] = ()  # of a job that runs
    deliveries: tuple[Delivery, ...] = ()  # of its weights


def make_layout(
    cluster: ClusterConfig,
    topology: Topology,
    *,
    needs: Needs | None = None,
    offload: Mapping[str, bool] | Collection[str] = (),
    blocks: Mapping[str, str] | None = None,
    batches: BatchSizes | None = None,
    check: Callable[[HybridComponentPlacement], Iterable[Problem]] | None = None,
    sources: Mapping[str, Source] | None = None,
) -> Layout:
    """The layout of a job, or a PlacementError with every problem at once.

    `needs` None: those of the components that the placement names (`rlhf_needs`). `offload` are the components with
    enable_offload, `blocks` the keys of blocks not called like their component. `check` is asked as well, about what is
    placed rightly; None: whether partners match.
    """
    places = sources or {}
    needs = needs or rlhf_needs(placed_names(cluster.component_placement))
    components = needs.components
    found = read_component_placement(cluster, topology, components, places)
    right = {name: spec for name, spec in found.specs.items() if name in components}
    placement = HybridComponentPlacement.of(right, found.groups)
    flags = offload if isinstance(offload, Mapping) else dict.fromkeys(offload, True)
    leaving = {c: flags.get(c, False) for c in components}
    problems = [*found.problems, *check_names(cluster.allow_resident, components, places)]
    turns = split_stages(needs, placement, leaving)
    problems += find_clashes(placement, turns, leaving, cluster.allow_resident, places, blocks)
    problems += check_batches(batches, placement, places) if batches is not None else ()
    problems += check(placement) if check is not None else check_partners(placement, places)
    if problems:
        raise PlacementError(problems)
    schedule = derive_schedule(placement, needs, leaving, cluster.allow_resident, places)
    return Layout(
        topology=topology,
        placement=placement,
        needs=needs,
        schedule=schedule,
        routes=_routes(placement, batches),
        savings=count_savings(placement),
        warnings=(
            *find_idle(placement),
            *find_partner_warnings(placement, places),
            *find_engine_warnings(placement, schedule.needs, places),
        ),
    )


def _routes(placement: HybridComponentPlacement, batches: BatchSizes | None) -> tuple[Route, ...]:
    """The engines' weights come from the actor; their samples go to everybody who judges them or learns from them."""
    placed = placement.components
    routes = [copy_nearest(placement, "actor", "rollout")] if {"actor", "rollout"} <= {*placed} else []
    if batches is not None and "rollout" in placed:
        takers = [c for c in placed if role_of(c) in ("actor", "critic", "reference", "reward")]
        routes += [scatter_rows(placement, "rollout", c, batches.samples) for c in takers]
    return tuple(routes)
