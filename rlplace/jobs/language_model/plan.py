"""Plan a language-model job: its stages, channels and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from rlplace.checks import machines
from rlplace.checks.rule import broken
from rlplace.config.blocks.language_model import LanguageModelJobConfig, RewardConfig
from rlplace.errors import Problem, Source
from rlplace.jobs.language_model.channels import plan_channels, scorers_of
from rlplace.jobs.language_model.rules import placed as rules_of_placed
from rlplace.jobs.language_model.rules.case import PlacedTextJob
from rlplace.placement.flow import (
    Delivery,
    Route,
    deliver,
    deliver_by_node,
    scatter_rows,
)
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import role_of
from rlplace.placement.machines.topology import Topology
from rlplace.placement.plan import Placed, Plan, Rules, plan_components, weight_routes
from rlplace.placement.schedule import Needs, placed_names, text_needs
from rlplace.workers.arguments import SCORERS

_SAMPLE_READERS = ("actor", *SCORERS)


def needs_of(config: LanguageModelJobConfig) -> Needs:
    """Return the least residency of each component in each stage that the algorithm of the config needs."""
    names: Iterable[str] = placed_names(config.cluster.component_placement)
    if config.runs:
        names = ("actor", "rollout", "env", *scorers_of(names))
    needs = text_needs(
        names,
        actor_infers=config.actor_infers,
        refreshed=config.reference.refresh_every > 0,
        accumulates=config.runs and config.algorithm.accumulate_early,
    )
    if not config.runs:
        return needs
    return dataclasses.replace(needs, ahead=config.algorithm.max_staleness)


def plan_of(
    config: LanguageModelJobConfig, topology: Topology, sources: Mapping[str, Source]
) -> Plan:
    """Return the plan of a job on language models. Raises PlacementError with all problems.

    `topology`: the machines. `sources`: config key -> file and line in which its value is set, for errors.
    """
    needs = needs_of(config)
    components = needs.components

    def check(placed: Placed) -> Iterator[Problem]:
        rules = rules_of_placed.PLANNED
        if config.runs:
            rules = rules_of_placed.RUN
        return broken(rules, PlacedTextJob.of(config, placed))

    def wasted(placed: Placed) -> Iterator[Problem]:
        yield from broken(rules_of_placed.WARNINGS, PlacedTextJob.of(config, placed))
        yield from broken(machines.WARNINGS, placed.cluster)

    rules = Rules(
        blocks={c: config.key_of(c) for c in components},
        check=check,
        waste=wasted,
        routes=lambda placement: _routes(config, placement),
        borrowers=("rollout",),
    )
    plan = plan_components(
        config.cluster,
        topology,
        needs=needs,
        offload=[c for c in components if _leaves(config, c)],
        sources=sources,
        rules=rules,
    )
    if not config.runs:
        return plan
    channels = plan_channels(config, plan.placement)
    deliveries = deliveries_of(config, plan.placement)
    return dataclasses.replace(plan, channels=channels, deliveries=deliveries)


def deliveries_of(
    config: LanguageModelJobConfig, placement: HybridComponentPlacement
) -> tuple[Delivery, ...]:
    """Return the planned copies of the weights that go from the actor to the engines of a run."""
    sync = config.actor.sync
    # Host memory holds a version until engines that generate ahead have loaded it.
    ahead = config.algorithm.max_staleness > 0
    on_devices = sync.mode == "all" and sync.through_host is not True and not ahead
    if not on_devices:
        return deliver_by_node(placement)
    # An engine of a class of one's own gets all weights in one call
    rollout = config.rollout
    return deliver(placement, cut=rollout.engine == "vllm", whole=rollout.own)


def _leaves(config: LanguageModelJobConfig, component: str) -> bool:
    """Return whether a component may leave accelerators that other components need.

    True if `enable_offload` is set, and for a reward without a model, since such a reward uses no accelerator.
    """
    block = config.block_of(component)
    if isinstance(block, RewardConfig) and block.kind != "model":
        return True
    return block.enable_offload


def _routes(
    config: LanguageModelJobConfig, placement: HybridComponentPlacement
) -> tuple[Route, ...]:
    """Return the data routes of a job that can be planned but not run.

    The routes carry samples to scorers and learners, and weights from the actor. The result is empty for a job that
    can run, since its data goes through channels and weight deliveries.
    """
    if config.runs:
        return ()
    routes: list[Route] = []
    algorithm = config.algorithm
    if algorithm.prompts is not None and "rollout" in placement.components:
        samples = algorithm.prompts * algorithm.samples_per_prompt
        for component in placement.components:
            if role_of(component) in _SAMPLE_READERS:
                routes.append(
                    scatter_rows(placement, "rollout", component, samples, "samples")
                )
    return (*routes, *weight_routes(placement))
