"""Lower bounds of the rollout stage, from simulations of env and engines alone, one for each pair of their sizes.

If every node has enough processor cores for all its ranks, no other work delays env and engines. So after the moves on
entry to the stage, they take as long in a whole plan as they take alone. A simulation covers effects that a sum of
costs does not cover: how full an engine's batches are, and that env still grades answers after the last engine has
ended.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Collection, Generator, Sequence
from typing import Any

from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.contract.planning import make_plan
from rlplace.errors import ProblemsError
from rlplace.foresight.collector import paused_collector
from rlplace.foresight.costs import Costs
from rlplace.foresight.loads import Size
from rlplace.foresight.model import StageBound
from rlplace.foresight.profile import ACCELERATOR, Profile
from rlplace.foresight.ranks import make_groups
from rlplace.foresight.space import Space
from rlplace.foresight.world import Channel, Event, World
from rlplace.jobs.language_model.performance.ranks import (
    TextEnvRank,
    TextRolloutRank,
    TextSite,
)
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency
from rlplace.workers.arguments import SAMPLES, samples_for

PAIR = ("env", "rollout")
_KINDS = {"env": TextEnvRank, "rollout": TextRolloutRank}
_INDEXES = (1, 2)  # iterations that a prediction counts


class _Sink(Channel):
    """A channel that drops all items. `first_s`: the simulated time at which the first item arrived."""

    def __init__(self, world: World) -> None:
        super().__init__(world, 1)
        self.first_s = math.inf

    def put(self, item: Any, key: str = "") -> Generator[Event, None, None]:
        self.put_all([item])
        yield from ()

    def put_all(self, items: Sequence[Any], key: str = "") -> None:
        self.first_s = min(self.first_s, self._world.now)


class Generation(StageBound):
    """Lower bounds of the rollout stage's seconds, one for each pair of sizes of env and rollout in a search.

    A bound comes from a simulation of env and rollout alone, with the costs of a profile. Results are kept, so each
    simulation runs once. `holds`: whether the bounds are valid for this job.
    """

    stage = "rollout"
    components = PAIR

    def __init__(self, space: Space, profile: Profile) -> None:
        self._space = space
        self._profile = profile
        self._plan = space.plan
        self._call_s = (
            Costs(profile).of(f"driver/{space.config.cluster.launcher}_call").cpu_s
        )
        self._found: dict[tuple[Size, Size, frozenset[str]], float] = {}
        # Whether the bound is valid for this job
        self.holds = self._holds()

    def _holds(self) -> bool:
        """Return whether the simulated seconds of env and engines alone are a valid lower bound.

        They are valid if no other component can delay env or the engines.
        """
        config = self._space.config
        plan = self._plan
        names = plan.placement.components
        early = {*plan.needs.early}
        if (
            plan.needs.ahead
            or config.algorithm.short_rounds
            or config.cluster.launcher == "inline"
            or not {*PAIR} <= {*names}
        ):
            return False
        on = [
            name
            for name, curve in self._profile.costs.items()
            if curve.on == ACCELERATOR
        ]
        if plan.placement.accelerators("env") and any(
            name.startswith("env.") for name in on
        ):
            # Env's moves and the engines' work would use the same accelerators.
            return False
        first, last = sorted(names.index(c) for c in PAIR)
        if early & {*names[first:last]}:
            return False
        most = max(node.accelerators for node in self._space.nodes)
        # One more for the driver
        at_work = 1 + sum(
            most
            if c in self._space.free
            else max(Counter(plan.placement.locations(c).node).values())
            for c in {*PAIR, *(early & {*names})}
        )
        return at_work <= int(self._profile.machine.get("cores", 1))

    def known(
        self, sizes: Sequence[Size], acquired: Collection[frozenset[str]] | None = None
    ) -> float:
        env, rollout = sizes
        return min(
            self._found.get((env, rollout, moved), 0.0)
            for moved in acquired or self._acquired()
        )

    def sharpen(self, sizes: Sequence[Size]) -> bool:
        env, rollout = sizes
        missing = [
            moved
            for moved in self._acquired()
            if (env, rollout, moved) not in self._found
        ]
        for moved in missing:
            with paused_collector():
                seconds = self._simulated(env, rollout, moved)
            self._found[env, rollout, moved] = seconds
        return bool(missing)

    def _acquired(self) -> list[frozenset[str]]:
        """Return the sets of components that may have to be moved onto their accelerators at the start of the stage.

        All subsets of env and rollout are listed, without a component that never leaves its accelerators.
        """
        may = [
            c
            for c in PAIR
            if self._plan.placement.accelerators(c)
            and f"{c}.move_{Residency.FULL.word}/rest" in self._profile.costs
        ]
        return [
            frozenset(few)
            for n in range(len(may) + 1)
            for few in itertools.combinations(may, n)
        ]

    def _simulated(self, env: Size, rollout: Size, moved: frozenset[str]) -> float:
        now = self._space.current()
        sizes = {**now.sizes, "env": env, "rollout": rollout}
        starts = {c: 0 if c in PAIR else start for c, start in now.starts.items()}
        layout = dataclasses.replace(now, sizes=sizes, starts=starts, stays=())
        config = self._space.config_of(layout)
        try:
            plan = make_plan(config, self._plan.topology)
        except ProblemsError:
            return 0.0
        return self._alone(config, plan, moved)

    def _alone(
        self, config: LanguageModelJobConfig, plan: Plan, moved: frozenset[str]
    ) -> float:
        """Simulate some rollout stages with env and rollout alone, and return their mean seconds.

        `moved`: the components that are moved onto their accelerators in the stage. Returns 0.0, which is always a
        lower bound, if a group of samples could be finished before the driver has called all ranks.
        """
        ranks = {c: plan.placement.world_size(c) for c in PAIR}
        names = plan.placement.components
        cores = 1 + sum(plan.placement.world_size(name) for name in names)
        site = TextSite(config, plan, Costs(self._profile), cores)
        sinks = {
            name: _Sink(site.world)
            for name in (SAMPLES, *map(samples_for, site.job.scorers))
        }
        site.channels.update(sinks)
        if {*self._plan.needs.early} & {*names}:
            # In other plans, scorers take the first group when it is complete.
            site.taken_early = True
        groups = make_groups(
            site, {c: _KINDS[c] for c in plan.placement.components if c in PAIR}
        )
        seconds = list[float]()
        first_s = math.inf
        for index in _INDEXES:
            began = site.world.now
            for group in groups.values():
                group.hold()
            pending = [groups[c].move(Residency.FULL) for c in groups if c in moved]
            pending += [groups["env"].run(index), groups["rollout"].generate(index)]
            for group in groups.values():
                group.flush()
            site.clock.wait_all(pending, math.inf)
            seconds.append(site.world.now - began)
            for sink in sinks.values():
                first_s = min(first_s, sink.first_s - began)
                sink.first_s = math.inf
        site.world.close()
        if self._asked_within(first_s, ranks):
            return statistics.fmean(seconds)
        return 0.0

    def _asked_within(self, seconds: float, ranks: dict[str, int]) -> bool:
        """Return whether the driver can call all ranks of env, rollout and early scorers within `seconds`.

        Early scorers are references and rewards that score during rollout. `seconds`: from the start of the stage to
        the first finished group of samples. `ranks`: component -> number of ranks, for env and rollout. Returns False
        if an early scorer may have more ranks than there are prompts.
        """
        early = {*self._plan.needs.early} & {*self._plan.placement.components}
        sizes = self._space.sizes(self._space.now)
        most = {c: max(size.ranks for size in sizes[c]) for c in early}
        if any(
            count > (self._space.config.algorithm.prompts or 1)
            for count in most.values()
        ):
            return False
        return (
            not early
            or (sum(most.values()) + sum(ranks.values())) * self._call_s / 2 <= seconds
        )
