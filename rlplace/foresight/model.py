"""The interface through which the performance model asks a job.

A job gives its answers as an object: `Job.performance_model()`. The questions are of four kinds: what a run of the job
measures, how its ranks spend seconds, which plans a search may choose among, and what else is measured for a profile.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlplace.codes import config_error
from rlplace.contract.registry import job_of
from rlplace.foresight.costs import Costs
from rlplace.foresight.loads import Mode, Size, Sizes, Stages
from rlplace.foresight.profile import Profile
from rlplace.foresight.scaling import Scaling
from rlplace.placement.memory.case import replaced
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan
from rlplace.report.calls import IterationCalls, RankCall
from rlplace.stopwatch import Part

if TYPE_CHECKING:
    from rlplace.foresight.measure import Variant
    from rlplace.foresight.ranks import Rank, Site
    from rlplace.foresight.space import Space


class StageBound(abc.ABC):
    """A bound for one stage that is found by simulating that stage for some sizes, not by summing loads."""

    stage: str
    # The components at work in the stage, whose sizes the bound depends on.
    components: tuple[str, ...]

    @abc.abstractmethod
    def known(
        self, sizes: Sequence[Size], acquired: Collection[frozenset[str]] | None = None
    ) -> float:
        """Return the least simulated seconds, or 0 if nothing was simulated.

        `sizes`: of each of the components. `acquired`: which of them must onload before they work; None: unknown.
        """

    @abc.abstractmethod
    def sharpen(self, sizes: Sequence[Size]) -> bool:
        """Simulate sizes that were not simulated yet; return whether there were any."""


class PerformanceModel(abc.ABC):
    """A job's answers to the performance model. The defaults suit jobs without special behaviour."""

    # Components that share processes, rank by rank, if `Mode.shared` is set.
    pair: tuple[str, ...] = ()
    # Whether to read from channels how long ranks have waited; not needed if the workers' laps show it.
    asks_channels: bool = False
    # Components that generate ahead of learning, if generation runs ahead.
    generating: tuple[str, ...] = ()

    # ── what a run measures ──────────────────────────────────────────────────────────────────────────────────────────

    @abc.abstractmethod
    def subject(self, config: Any, component: str) -> str:
        """Describe what a component runs, as far as its costs depend on it."""

    def laps(
        self,
        config: Any,
        plan: Plan,
        iteration: IterationCalls,
        waits: Mapping[str, float],
    ) -> Sequence[tuple[str, Part]] | None:
        """Return (cost name, measured part) pairs of an iteration; None: one for each part of each call.

        `waits`: seconds that a rank of each component has waited at channels, if `asks_channels`.
        """
        return None

    def counts(
        self, config: Any, parts: Mapping[str, Sequence[Part]]
    ) -> Mapping[str, float]:
        """Return numbers of an iteration, other than seconds, that a prediction needs. `parts`: by cost name."""
        return {}

    def stage_counts(
        self,
        config: Any,
        plan: Plan,
        iteration: IterationCalls,
        waits: Mapping[str, float],
    ) -> Mapping[str, float]:
        """Return further numbers of this kind, derived from the calls of an iteration."""
        return {}

    def own_parts(self, plan: Plan, call: RankCall) -> Collection[str] | None:
        """Return the parts of a call that belong to it, if another component works in its thread; None: all parts."""
        return None

    def part_name(self, plan: Plan, call: RankCall, part: Part) -> str:
        """Return the name of the cost of a call's part."""
        return part.name

    def rest_size(self, plan: Plan, call: RankCall) -> float:
        """Return the size of the work that a call does outside of its parts; 0: no size."""
        return 0.0

    # ── how ranks spend seconds ──────────────────────────────────────────────────────────────────────────────────────

    def can_predict(self, config: Any) -> bool:
        """Return whether the behaviour of the job's ranks is modelled."""
        return True

    def costs(
        self, config: Any, profile: Profile, scaling: Scaling = Scaling.SHARED
    ) -> Costs:
        """Return the costs of a profile. `scaling`: of numbers of ranks that were not measured."""
        return Costs(profile)

    @abc.abstractmethod
    def ranks(self, config: Any, plan: Plan) -> Mapping[str, type[Rank]]:
        """Return the logical-clock rank class of each component."""

    @abc.abstractmethod
    def site(self, config: Any, plan: Plan, costs: Costs, cores: int) -> Site:
        """Return the state that the ranks of a prediction share. `cores`: processors of each node."""

    def kinds_of_iterations(self, config: Any) -> int:
        """Return the period after which iterations repeat: 2 if even and odd iterations differ, and so on."""
        return 1

    def published_profile(self, config: Any, plan: Plan, case: MemoryCase) -> Profile:
        """Return a profile from published accelerator rates. Raises ConfigError if that is impossible."""
        raise config_error("nothing-published", "profile", error="job")

    # ── the plans that a search chooses among ────────────────────────────────────────────────────────────────────────

    def mode(self, plan: Plan) -> Mode:
        """Return the settings of a plan that hold for all components."""
        return Mode(0, False)

    def modes(self, space: Space) -> tuple[Mode, ...]:
        """Return all possible modes; the present one comes first."""
        return (space.now,)

    def mode_changes(self, mode: Mode, now: Mode) -> Mapping[str, Any]:
        """Return the config keys, beside the placement, in which a mode differs from the present one."""
        return {}

    @abc.abstractmethod
    def sizes(self, space: Space, mode: Mode) -> dict[str, tuple[Size, ...]]:
        """Return the possible sizes of each component; empty if the mode is impossible."""

    @abc.abstractmethod
    def stages(self, config: Any, plan: Plan, costs: Costs) -> Stages:
        """Return the loads of the stages, from which bounds are summed."""

    def stage_bound(self, space: Space, profile: Profile) -> StageBound | None:
        """Return a bound from simulating one stage; None if the job has none."""
        return None

    def special_costs(self, mode: Mode) -> tuple[str, ...]:
        """Return the costs that only plans of this mode need."""
        return ()

    def unmeasured(
        self,
        config: Any,
        plan: Plan,
        profile: Profile,
        ranks: Mapping[str, Iterable[int]],
    ) -> dict[str, Sequence[int]]:
        """Return the components of which some number of ranks was not measured -> the numbers that were.

        `ranks`: the numbers that a search may choose, by component.
        """
        return {}

    def scored_in(self, stages: Collection[str]) -> str | None:
        """Return the stage at whose end advantages are computed, given the stages without turns."""
        return None

    def sending(self, config: Any) -> Collection[str]:
        """Return the stages that send weights; components are offloaded only after such a stage has ended."""
        return ("sync",)

    def beside(self, stage: str) -> tuple[str, ...]:
        """Return components whose number of ranks affects a stage although they do not work in it."""
        return ()

    def ordered(
        self, config: Any, stage: str, ranks: Mapping[str, int], begun: bool
    ) -> bool:
        """Return whether the work of a stage depends on the order in which rollout completed groups.

        `ranks`: number of ranks of each working component. `begun`: whether the actor has learned during rollout.
        """
        return False

    def values(self, config: Any) -> Mapping[str, Sequence[int]]:
        """Return the config keys, beside the placement, that a search may vary, with their possible values."""
        return {}

    def learning_changes(self, varied: Mapping[str, Any]) -> Iterator[str]:
        """Describe how other values of these keys change what is learned."""
        yield from ()

    def replaced(self, config: Any, path: Sequence[str], value: object) -> Any:
        """Return the config with another value at this key path."""
        return replaced(config, path, value)

    # ── what else is measured for a profile ──────────────────────────────────────────────────────────────────────────

    def more_variants(self, mapping: Mapping[str, Any]) -> Iterator[Variant]:
        """Yield variants of the job whose costs have other sizes, beyond other numbers of ranks."""
        yield from ()


def model_of(config: Any) -> PerformanceModel:
    """Return the performance model of the config's job."""
    given: PerformanceModel | None = job_of(config).performance_model()
    if given is not None:
        return given
    from rlplace.foresight.measured import MeasuredModel

    return MeasuredModel()


def sizes_of(components: Sequence[str], sizes: Sizes) -> tuple[Size, ...]:
    """Return the sizes of the given components."""
    return tuple(sizes[component] for component in components)
