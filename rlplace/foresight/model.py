"""Everything that the performance model asks of a job, on one page.

A job gives its answers as an object: `Job.performance_model()`. The questions are of four kinds: what a run of the job
measures, how its ranks spend seconds, which plans a search may choose among, and what else is measured for a profile.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlplace.contract.registry import job_of
from rlplace.errors import ConfigError
from rlplace.foresight.loads import Mode, Size, Sizes, Stages
from rlplace.foresight.profile import Profile
from rlplace.placement.memory.case import replaced
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan
from rlplace.report.calls import IterationCalls, RankCall
from rlplace.stopwatch import Part

if TYPE_CHECKING:
    from rlplace.foresight.costs import Costs
    from rlplace.foresight.measure import Variant
    from rlplace.foresight.ranks import Rank, Site
    from rlplace.foresight.space import Space


class StageBound(abc.ABC):
    """A bound for one stage that no sum of loads gives, found by simulating the stage for some sizes."""

    stage: str
    # The components at work in the stage, whose sizes the bound depends on.
    components: tuple[str, ...]

    @abc.abstractmethod
    def known(
        self, sizes: Sequence[Size], acquired: Collection[frozenset[str]] | None = None
    ) -> float:
        """Return the least seconds that were simulated, 0 where none were.

        `sizes`: of each of the components. `acquired`: which of them move before they work; None: any of them may.
        """

    @abc.abstractmethod
    def sharpen(self, sizes: Sequence[Size]) -> bool:
        """Simulate what was not simulated yet; return whether there was anything."""


class PerformanceModel(abc.ABC):
    """What one job answers to the performance model. The defaults hold where nothing is special."""

    # Components that may share processes, rank by rank, where `Mode.shared` says so.
    pair: tuple[str, ...] = ()
    # Whether the channels are asked how long ranks have waited. Workers whose laps tell it need that not.
    asks_channels: bool = False
    # Components that generate ahead of all others, where generation runs ahead.
    generating: tuple[str, ...] = ()

    # ── what a run measures ──────────────────────────────────────────────────────────────────────────────────────────

    @abc.abstractmethod
    def subject(self, config: Any, component: str) -> str:
        """Return what a component runs, as far as its costs depend on it."""

    def laps(
        self,
        config: Any,
        plan: Plan,
        iteration: IterationCalls,
        waits: Mapping[str, float],
    ) -> Sequence[tuple[str, Part]] | None:
        """Return the names of costs with what an iteration has taken of them; None: one for each part of each call.

        `waits`: seconds that a rank of each component has waited at channels, where `asks_channels`.
        """
        return None

    def counts(
        self, config: Any, parts: Mapping[str, Sequence[Part]]
    ) -> Mapping[str, float]:
        """Return numbers of an iteration that a prediction needs beside seconds. `parts`: by the name of their cost."""
        return {}

    def stage_counts(
        self,
        config: Any,
        plan: Plan,
        iteration: IterationCalls,
        waits: Mapping[str, float],
    ) -> Mapping[str, float]:
        """Return more such numbers, of the calls of an iteration."""
        return {}

    def own_parts(self, plan: Plan, call: RankCall) -> Collection[str] | None:
        """Return the parts that are a call's own, where another component works in its thread; None: all are."""
        return None

    def part_name(self, plan: Plan, call: RankCall, part: Part) -> str:
        """Return the name of a part's cost."""
        return part.name

    def rest_size(self, plan: Plan, call: RankCall) -> float:
        """Return the size of what a call does outside of its parts: 0 where nothing is counted."""
        return 0.0

    # ── how ranks spend seconds ──────────────────────────────────────────────────────────────────────────────────────

    def can_predict(self, config: Any) -> bool:
        """Return whether it is known what the ranks do."""
        return True

    @abc.abstractmethod
    def ranks(self, config: Any, plan: Plan) -> Mapping[str, type[Rank]]:
        """Return what the ranks of each component do, on a logical clock."""

    @abc.abstractmethod
    def site(self, config: Any, plan: Plan, costs: Costs, cores: int) -> Site:
        """Return what the ranks share. `cores`: of each node."""

    def kinds_of_iterations(self, config: Any) -> int:
        """Return how many iterations differ, one after the other."""
        return 1

    def published_profile(self, config: Any, plan: Plan, case: MemoryCase) -> Profile:
        """Return a profile from published rates of accelerators. Raises ConfigError where there can be none."""
        raise nothing_published(
            "what the work of this job takes follows from no published rate", None
        )

    # ── the plans that a search chooses among ────────────────────────────────────────────────────────────────────────

    def mode(self, plan: Plan) -> Mode:
        """Return what holds for all components of a plan."""
        return Mode(0, False)

    def modes(self, space: Space) -> tuple[Mode, ...]:
        """Return what may hold for all components; what holds now is the first."""
        return (space.now,)

    def mode_changes(self, mode: Mode, now: Mode) -> Mapping[str, Any]:
        """Return the keys of the config, beside the placement, in which a mode differs from another."""
        return {}

    @abc.abstractmethod
    def sizes(self, space: Space, mode: Mode) -> dict[str, tuple[Size, ...]]:
        """Return the sizes that each component may have; none of any where the mode cannot be."""

    @abc.abstractmethod
    def stages(self, config: Any, plan: Plan, costs: Costs) -> Stages:
        """Return the loads of the stages: what bounds are sums of."""

    def stage_bound(self, space: Space, profile: Profile) -> StageBound | None:
        """Return a bound for a stage that is simulated; None where there is none."""
        return None

    def special_costs(self, mode: Mode) -> tuple[str, ...]:
        """Return the costs that plans of a mode need, and others do not."""
        return ()

    def scored_in(self, stages: Collection[str]) -> str | None:
        """Return the stage at whose end advantages are computed, of those of a schedule without turns."""
        return None

    def sending(self, config: Any) -> Collection[str]:
        """Return the stages that send weights: what leaves after them waits for their end."""
        return ("sync",)

    def beside(self, stage: str) -> tuple[str, ...]:
        """Return components whose ranks a stage depends on, though they do not work in it."""
        return ()

    def ordered(
        self, config: Any, stage: str, ranks: Mapping[str, int], begun: bool
    ) -> bool:
        """Return whether the work of a stage depends on the order in which rollout has ended groups.

        `ranks`: of the components at work. `begun`: whether the actor has learned in rollout.
        """
        return False

    def values(self, config: Any) -> Mapping[str, Sequence[int]]:
        """Return the keys, beside the placement, that a search may vary, each with the values that it may have."""
        return {}

    def learning_changes(self, varied: Mapping[str, Any]) -> Iterator[str]:
        """Say what other values of these keys change in what is learned."""
        yield from ()

    def replaced(self, config: Any, path: Sequence[str], value: object) -> Any:
        """Return the config with another value at this path of keys."""
        return replaced(config, path, value)

    # ── what else is measured for a profile ──────────────────────────────────────────────────────────────────────────

    def more_variants(self, mapping: Mapping[str, Any]) -> Iterator[Variant]:
        """Give the job in more ways whose costs have other sizes, beside numbers of ranks."""
        yield from ()


def model_of(config: Any) -> PerformanceModel:
    """Return the performance model of the job that a config is of."""
    given: PerformanceModel | None = job_of(config).performance_model()
    if given is not None:
        return given
    from rlplace.foresight.measured import MeasuredModel

    return MeasuredModel()


def sizes_of(components: Sequence[str], sizes: Sizes) -> tuple[Size, ...]:
    """Return the sizes of these components."""
    return tuple(sizes[component] for component in components)


def nothing_published(why: str, got: str | None) -> ConfigError:
    """Return the error of a job for which nothing is published."""
    what = "no seconds can be told from published rates"
    return ConfigError.of(
        "nothing-published", "profile", what, got, why, "profile=last"
    )
