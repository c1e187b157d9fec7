"""The channels of a job on simulators, and how many items each holds.

::

    env ── observations, by rollout rank ──▶ rollout      env ── trajectories, by actor rank ──▶ actor
        ◀── actions, by env rank and stage group ──       actor ── weights, by rollout rank ──▶ rollout
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rlplace.placement.channels import (
    ChannelPlan,
    channel_plan,
    plan_weights,
    producers_inside,
)
from rlplace.placement.flow import Routes
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.units import counted


def plan_channels(
    placement: HybridComponentPlacement, routes: Routes, stage_groups: int
) -> Iterator[ChannelPlan]:
    """Yield the channels of a run. Each is large enough for all items that can be under way at once.

    `routes`: the routes of rows. `stage_groups`: number of stage groups of each env rank (shares of its environments
    that step in turn). An env rank has at most one unanswered step for each stage group, so the channels of
    observations and actions have room for one item per stage group and share of a route. Trajectories are put into
    their channel in the rollout stage and taken out in learn, so a whole iteration must fit. Weights are taken out
    while they are put in.
    """
    observed = routes.observations
    gathered = routes.trajectories
    pieces = f"{len(observed.sources)} pieces of a step x {counted(stage_groups, 'stage group')}"
    answer = "one answer for each observation"
    kept = "all pieces of an iteration wait there for learn"
    for name, source, target, sources, targets, each, groups, why in (
        (
            "observations",
            "env",
            "rollout",
            observed.sources,
            observed.targets,
            stage_groups,
            0,
            pieces,
        ),
        (
            "actions",
            "rollout",
            "env",
            observed.targets,
            observed.sources,
            stage_groups,
            stage_groups,
            answer,
        ),
        (
            "trajectories",
            "env",
            "actor",
            gathered.sources,
            gathered.targets,
            1,
            0,
            kept,
        ),
    ):
        # In direct mode, env ranks call the rollout rank of their own process and need no channel.
        if routes.direct and name != "trajectories":
            continue
        counts = Counter(targets)
        waiting = [counts[rank] * each for rank in range(placement.world_size(target))]
        inside = producers_inside(
            sources, targets, placement.locations(source), placement.locations(target)
        )
        yield channel_plan(
            placement, name, source, target, waiting, why, inside=inside, groups=groups
        )
    yield plan_weights(placement, "weights", "actor", "rollout")
