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
    """A lower bound of the seconds of one stage, which is simulated for some sizes instead of summed from loads."""

    stage: str
    # The components at work in the stage, whose sizes the bound depends on.
    components: tuple[str, ...]

    @abc.abstractmethod
    def known(
        self, sizes: Sequence[Size], acquired: Collection[frozenset[str]] | None = None
    ) -> float:
        """Return the least simulated seconds of the stage, or 0 if nothing was simulated for these sizes.

        `sizes`: one size for each of `components`. `acquired`: the sets of components that may have to onload before
        they work; None: any set is possible.
        """

    @abc.abstractmethod
    def sharpen(self, sizes: Sequence[Size]) -> bool:
        """Simulate the stage for these sizes if that was not done yet. Return whether anything was simulated.

        `sizes`: one size for each of `components`.
        """


class PerformanceModel(abc.ABC):
    """Base of the performance models, one for each kind of job. The defaults suit jobs without special behaviour."""

    # Components that share processes, rank by rank, if `Mode.shared` is set.
    pair: tuple[str, ...] = ()
    # Whether to read from channels how long ranks have waited; not needed if the workers' laps show it.
    asks_channels: bool = False
    # Components that generate ahead of learning, if generation runs ahead.
    generating: tuple[str, ...] = ()

    # ── what a run measures ──────────────────────────────────────────────────────────────────────────────────────────

    @abc.abstractmethod
    def subject(self, config: Any, component: str) -> str:
        """Return a text that names what a component runs, such as a simulator or a model.

        Its costs may be used for any job with the same text.
        """

    def laps(
        self,
        config: Any,
        plan: Plan,
        iteration: IterationCalls,
        waits: Mapping[str, float],
    ) -> Sequence[tuple[str, Part]] | None:
        """Return the (cost name, measured part) pairs of an iteration; None: each part of each call is one pair.

        `waits`: component -> mean seconds that a rank has waited at channels; empty unless `asks_channels`.
        """
        return None

    def counts(
        self, config: Any, parts: Mapping[str, Sequence[Part]]
    ) -> Mapping[str, float]:
        """Return name -> number, for numbers of an iteration other than seconds that a prediction needs.

        `parts`: cost name -> measured parts.
        """
        return {}

    def stage_counts(
        self,
        config: Any,
        plan: Plan,
        iteration: IterationCalls,
        waits: Mapping[str, float],
    ) -> Mapping[str, float]:
        """Return further numbers as `counts` does, derived from the calls of an iteration.

        `waits`: as in `laps`.
        """
        return {}

    def own_parts(self, plan: Plan, call: RankCall) -> Collection[str] | None:
        """Return the names of the parts of a call that are its own, if another component works in the same thread.

        None: all parts are its own.
        """
        return None

    def part_name(self, plan: Plan, call: RankCall, part: Part) -> str:
        """Return the name under which the cost of a call's part is kept."""
        return part.name

    def rest_size(self, plan: Plan, call: RankCall) -> float:
        """Return the size of the work that a call does outside of its parts; 0: the work has no size."""
        return 0.0

    # ── how ranks spend seconds ──────────────────────────────────────────────────────────────────────────────────────

    def can_predict(self, config: Any) -> bool:
        """Return whether a prediction of this job is possible: the behaviour of its ranks is modelled."""
        return True

    def costs(
        self, config: Any, profile: Profile, scaling: Scaling = Scaling.SHARED
    ) -> Costs:
        """Return the costs of a profile.

        `scaling`: the assumption about costs of numbers of ranks that were not measured.
        """
        return Costs(profile)

    @abc.abstractmethod
    def ranks(self, config: Any, plan: Plan) -> Mapping[str, type[Rank]]:
        """Return component -> class of its simulated ranks."""

    @abc.abstractmethod
    def site(self, config: Any, plan: Plan, costs: Costs, cores: int) -> Site:
        """Return a new object with the state that the simulated ranks of a prediction share.

        `cores`: processors of each node.
        """

    def kinds_of_iterations(self, config: Any) -> int:
        """Return the number of iterations after which their pattern repeats, such as 2 if even and odd ones differ."""
        return 1

    def published_profile(self, config: Any, plan: Plan, case: MemoryCase) -> Profile:
        """Return a profile whose costs follow from published rates of accelerators.

        Raises ConfigError if that is impossible.
        """
        raise config_error("nothing-published", "profile", error="job")

    # ── the plans that a search chooses among ────────────────────────────────────────────────────────────────────────

    def mode(self, plan: Plan) -> Mode:
        """Return the settings of a plan that hold for all components."""
        return Mode(0, False)

    def modes(self, space: Space) -> tuple[Mode, ...]:
        """Return all modes that a search may choose; the present mode comes first."""
        return (space.now,)

    def mode_changes(self, mode: Mode, now: Mode) -> Mapping[str, Any]:
        """Return config key -> value, for the keys outside of the placement that change from mode `now` to `mode`."""
        return {}

    @abc.abstractmethod
    def sizes(self, space: Space, mode: Mode) -> dict[str, tuple[Size, ...]]:
        """Return component -> the sizes that a search may choose in this mode; no sizes if the mode is impossible."""

    @abc.abstractmethod
    def stages(self, config: Any, plan: Plan, costs: Costs) -> Stages:
        """Return the loads of the stages. A search sums them to lower bounds of seconds."""

    def stage_bound(self, space: Space, profile: Profile) -> StageBound | None:
        """Return a bound of one stage that is found by simulation; None if the job has no such bound."""
        return None

    def special_costs(self, mode: Mode) -> tuple[str, ...]:
        """Return the names of the costs that only plans of this mode need."""
        return ()

    def unmeasured(
        self,
        config: Any,
        plan: Plan,
        profile: Profile,
        ranks: Mapping[str, Iterable[int]],
    ) -> dict[str, Sequence[int]]:
        """Return component -> measured numbers of ranks, for components with another number that was not measured.

        `ranks`: component -> the numbers of ranks that a search may choose.
        """
        return {}

    def scored_in(self, stages: Collection[str]) -> str | None:
        """Return the stage at whose end advantages are computed; None if no stage computes them.

        `stages`: names of all stages.
        """
        return None

    def sending(self, config: Any) -> Collection[str]:
        """Return the stages that send weights.

        A component leaves its accelerators only after such a stage has ended.
        """
        return ("sync",)

    def beside(self, stage: str) -> tuple[str, ...]:
        """Return the components that do not work in a stage, but whose number of ranks affects it."""
        return ()

    def ordered(
        self, config: Any, stage: str, ranks: Mapping[str, int], begun: bool
    ) -> bool:
        """Return whether the work of a stage depends on the order in which rollout completes groups.

        `ranks`: component at work -> its number of ranks. `begun`: whether the actor has begun to learn during rollout.
        """
        return False

    def values(self, config: Any) -> Mapping[str, Sequence[int]]:
        """Return config key -> its possible values, for keys outside of the placement that a search may vary."""
        return {}

    def learning_changes(self, varied: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line of text for each config key in `varied` whose new value changes what is learned.

        `varied`: config key -> its new value.
        """
        yield from ()

    def replaced(self, config: Any, path: Sequence[str], value: object) -> Any:
        """Return the config with `value` at the key path `path`."""
        return replaced(config, path, value)

    # ── what else is measured for a profile ──────────────────────────────────────────────────────────────────────────

    def more_variants(self, mapping: Mapping[str, Any]) -> Iterator[Variant]:
        """Yield further variants of the job to run for a profile, whose costs have other sizes.

        `mapping`: the config.
        """
        yield from ()


def model_of(config: Any) -> PerformanceModel:
    """Return the performance model of the config's job."""
    given: PerformanceModel | None = job_of(config).performance_model()
    if given is not None:
        return given
    from rlplace.foresight.measured import MeasuredModel

    return MeasuredModel()


def sizes_of(components: Sequence[str], sizes: Sizes) -> tuple[Size, ...]:
    """Return the size of each of the given components, in their order."""
    return tuple(sizes[component] for component in components)
