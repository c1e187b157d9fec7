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


# Iterations of a prediction. The first one differs, because everything starts offloaded
_ITERATIONS = 3


class StageBound(abc.ABC):
    """A lower bound of the seconds of one stage, found by simulating the stage for some sizes.

    `components`: the components at work in the stage; the bound depends on their sizes.
    """

    stage: str
    components: tuple[str, ...]

    @abc.abstractmethod
    def known(
        self, sizes: Sequence[Size], acquired: Collection[frozenset[str]] | None = None
    ) -> float:
        """Return the least seconds of the stage in its simulations with these sizes; 0 if a simulation is missing.

        `sizes`: one size for each of `components`. `acquired`: possible sets of components that are moved onto their
        accelerators before they work; there is a simulation for each set. None: all sets are possible.
        """

    @abc.abstractmethod
    def sharpen(self, sizes: Sequence[Size]) -> bool:
        """Simulate the stage for these sizes, unless that was done already. Return whether anything was simulated.

        `sizes`: one size for each of `components`.
        """


class PerformanceModel(abc.ABC):
    """Base of the performance models, one for each kind of job. The defaults suit jobs without special behaviour.

    `pair`: components that share processes, rank by rank, if `Mode.shared` is set.
    `asks_channels`: whether waiting times of ranks are read from channels; not needed if the workers measure them.
    `generating`: the components that generate samples, if generation runs ahead of learning.
    """

    pair: tuple[str, ...] = ()
    asks_channels: bool = False
    generating: tuple[str, ...] = ()

    # ── what a run measures ──────────────────────────────────────────────────────────────────────────────────────────

    @abc.abstractmethod
    def subject(self, config: Any, component: str) -> str:
        """Return a text that names the simulator, model or other subject that a component runs.

        The component's costs may be used for any job in which the text is the same.
        """

    def laps(
        self,
        config: Any,
        plan: Plan,
        iteration: IterationCalls,
        waits: Mapping[str, float],
    ) -> Sequence[tuple[str, Part]] | None:
        """Return (cost name, measured part) pairs for all work of an iteration.

        Return None if each part of each call is to be one pair. `iteration`: the measured calls. `waits`: component ->
        mean seconds that a rank has waited at channels; empty unless `asks_channels` is set.
        """
        return None

    def counts(
        self, config: Any, parts: Mapping[str, Sequence[Part]]
    ) -> Mapping[str, float]:
        """Return name -> value of the numbers, other than seconds, that a prediction needs from a measured iteration.

        `parts`: cost name -> the measured parts of calls.
        """
        return {}

    def stage_counts(
        self,
        config: Any,
        plan: Plan,
        iteration: IterationCalls,
        waits: Mapping[str, float],
    ) -> Mapping[str, float]:
        """Return name -> value of further numbers that a prediction needs, computed from the calls of an iteration.

        `waits`: component -> mean seconds that a rank has waited at channels; empty unless `asks_channels` is set.
        """
        return {}

    def own_parts(self, plan: Plan, call: RankCall) -> Collection[str] | None:
        """Return the names of the parts of a call that belong to the called component.

        The parts that are left out belong to another component, which works in the same thread. None: all parts belong
        to the called component.
        """
        return None

    def part_name(self, plan: Plan, call: RankCall, part: Part) -> str:
        """Return the name of a part of a call, as it stands at the end of the name of its cost in a profile."""
        return part.name

    def rest_size(self, plan: Plan, call: RankCall) -> float:
        """Return the size of the work that a call does outside of its measured parts; 0 if that work has no size."""
        return 0.0

    # ── how ranks spend seconds ──────────────────────────────────────────────────────────────────────────────────────

    def can_predict(self, config: Any) -> bool:
        """Return whether this job can be predicted: whether there is a model of its ranks' behaviour."""
        return True

    def costs(
        self, config: Any, profile: Profile, scaling: Scaling = Scaling.SHARED
    ) -> Costs:
        """Return the costs of a profile.

        `scaling`: how costs are assumed to change with the number of ranks, for numbers that were not measured.
        """
        return Costs(profile)

    @abc.abstractmethod
    def ranks(self, config: Any, plan: Plan) -> Mapping[str, type[Rank]]:
        """Return component -> class of the component's simulated ranks."""

    @abc.abstractmethod
    def site(self, config: Any, plan: Plan, costs: Costs, cores: int) -> Site:
        """Return the state that all simulated ranks of one prediction share; a new object in each call.

        `cores`: number of processors of each node.
        """

    def kinds_of_iterations(self, config: Any) -> int:
        """Return after how many iterations the pattern of their work repeats; 2 if even and odd iterations differ."""
        return 1

    def published_profile(self, config: Any, plan: Plan, case: MemoryCase) -> Profile:
        """Return a profile with costs that are computed from published rates of accelerators, not measured.

        Raises ConfigError if that is not possible for this job.
        """
        raise config_error("nothing-published", "profile", error="job")

    # ── the plans that a search chooses among ────────────────────────────────────────────────────────────────────────

    def mode(self, plan: Plan) -> Mode:
        """Return the mode of a plan: its settings that hold for all components."""
        return Mode(0, False)

    def modes(self, space: Space) -> tuple[Mode, ...]:
        """Return all modes that a search may choose. The present mode is the first.

        A mode is the settings that hold for all components.
        """
        return (space.now,)

    def mode_changes(self, mode: Mode, now: Mode) -> Mapping[str, Any]:
        """Return config key -> new value, for the keys that have to change to get from mode `now` to `mode`.

        Keys of the placement are not included.
        """
        return {}

    @abc.abstractmethod
    def sizes(self, space: Space, mode: Mode) -> dict[str, tuple[Size, ...]]:
        """Return component -> the sizes that a search may choose in this mode; no sizes if the mode is not possible."""

    @abc.abstractmethod
    def stages(self, config: Any, plan: Plan, costs: Costs) -> Stages:
        """Return an object that computes lower bounds of the work in each stage of a plan, for a search."""

    def stage_bound(self, space: Space, profile: Profile) -> StageBound | None:
        """Return a lower bound for one stage that is found by simulation; None if the job has no such stage."""
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
        """Return component -> measured numbers of ranks, for components that may get a number that was not measured.

        `ranks`: component -> the numbers of ranks that a search may choose.
        """
        return {}

    def scored_in(self, config: Any, stages: Collection[str]) -> str | None:
        """Return the stage at whose end `compute_advantages` is called; None if no stage calls it.

        `stages`: names of all stages.
        """
        return None

    def sending(self, config: Any) -> Collection[str]:
        """Return the stages that send weights. No component leaves its accelerators before such a stage has ended."""
        return ("sync",)

    def beside(self, stage: str) -> tuple[str, ...]:
        """Return the components that do not work in a stage, but affect its seconds by their number of ranks."""
        return ()

    def ordered(
        self, config: Any, stage: str, ranks: Mapping[str, int], begun: bool
    ) -> bool:
        """Return whether the work of a stage depends on the order in which rollout completes groups.

        A group is the samples of one prompt. `ranks`: component at work -> its number of ranks. `begun`: whether the
        actor has begun to learn during rollout.
        """
        return False

    def values(self, config: Any) -> Mapping[str, Sequence[int]]:
        """Return config key -> its possible values, for the keys outside of the placement that a search may vary."""
        return {}

    def learning_changes(self, varied: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line of text for each changed key that changes what is learned, not only the speed.

        `varied`: config key -> its new value.
        """
        yield from ()

    def replaced(self, config: Any, path: Sequence[str], value: object) -> Any:
        """Return a copy of the config with `value` at `path`, the names of nested keys."""
        return replaced(config, path, value)

    # ── what else is measured for a profile ──────────────────────────────────────────────────────────────────────────

    def more_variants(self, mapping: Mapping[str, Any]) -> Iterator[Variant]:
        """Yield further variants of the job that have to run for a profile, to measure costs at other sizes.

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


def counted_iterations(config: Any, ahead: int) -> range:
    """Return the indexes of the iterations whose seconds a prediction counts, at least one of each kind.

    `ahead`: number of versions that generation may be ahead of learning. So many more iterations come before the
    counted ones, and so many more are counted.
    """
    rounds = 1 + model_of(config).kinds_of_iterations(config)
    return range(1 + ahead, max(_ITERATIONS, rounds) + 2 * ahead)


def sizes_of(components: Sequence[str], sizes: Sizes) -> tuple[Size, ...]:
    """Return the size of each of `components`, in the order of `components`. `sizes`: component -> size."""
    return tuple(sizes[component] for component in components)
