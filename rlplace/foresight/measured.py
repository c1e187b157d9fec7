"""The default performance model, for jobs that declare no costs. It uses the measured seconds of whole calls.

::

    measured    env.rollout on 2 ranks     0.80 s of the slowest rank     of it 0.05 s on a processor
    predicted   env.rollout on 4 ranks     0.40 s                         of it 0.025 s

The ranks of a component are assumed to share the work of a call: with twice as many ranks, a call takes half as long. A
job can declare otherwise: `full("env").calls("rollout", scales="constant")`. For numbers of ranks that were not
measured, sharing is an assumption, and the output says so: see `foresight/scaling.py`. If a node has fewer processors
than ranks, the simulated ranks take turns on the logical clock.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

from rlplace.config.open_job import OpenConfig
from rlplace.contract.registry import job_of
from rlplace.contract.stages import CONSTANT, PULL, PUSH, Call, Part, Step
from rlplace.foresight.costs import Cost, Costs
from rlplace.foresight.loads import Load, Loads, Mode, Options, Size, Sizes, Stages
from rlplace.foresight.model import PerformanceModel
from rlplace.foresight.profile import Profile
from rlplace.foresight.ranks import Body, Rank, Site
from rlplace.foresight.scaling import RankCosts, Scaling, is_measured, measured_ranks
from rlplace.foresight.space import Space
from rlplace.foresight.world import Sleep
from rlplace.metrics import Metrics
from rlplace.placement.memory.case import replaced
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Move, Needs, Residency, base_stage
from rlplace.report.calls import IterationCalls, RankCall
from rlplace.stopwatch import Part as Lap
from rlplace.workers.worker import MoveReport

SECONDS = "seconds"  # name of the part that stands for a whole call
TAKE = "take_metrics"  # called by the loop after the work of a stage
_WEIGHTS = (PUSH, PULL)
_LEAST = 0.01  # share of the longest work; below it, turn-taking cannot be detected


class MeasuredModel(PerformanceModel):
    """The default performance model: it knows only the measured seconds of each component's calls."""

    asks_channels = True

    def subject(self, config: Any, component: str) -> str:
        worker = job_of(config).components[component]
        return str(worker.__qualname__)

    def laps(
        self,
        config: Any,
        plan: Plan,
        iteration: IterationCalls,
        waits: Mapping[str, float],
    ) -> list[tuple[str, Lap]]:
        """Return a (cost name, lap) pair for each method of a component in a stage. A lap is the seconds of one call.

        The seconds are those of the component's slowest rank. Waiting for processors and at channels is not included.
        `waits`: component -> mean seconds that a rank has waited at channels.
        """
        found: list[tuple[str, Lap]] = []
        inline = config.cluster.launcher == "inline"
        constant = _constant(config)
        pushed_s = _last_push(iteration)
        waiting = _waiting_share(iteration, waits)
        for group in _together(iteration.calls):
            crowded_s = _crowded(group, inline)
            for (component, name), calls in _by_method(group).items():
                took = [
                    (_own_seconds(call, pushed_s), _cpu_seconds(call, inline))
                    for call in calls
                ]
                longest_s = max(seconds for seconds, _ in took)
                if _works(name):
                    longest_s *= 1.0 - waiting.get(component, 0.0)
                cpu_s = min(longest_s, sum(cpu for _, cpu in took) / len(took))
                # The remaining seconds use no processor and do not wait for one.
                blocked_s = max(0.0, longest_s - max(cpu_s, crowded_s))
                ranks = plan.placement.world_size(component)
                size = 0.0
                if name.startswith("move "):
                    size = _moved_bytes(config, component, name.removeprefix("move "))
                if _works(name) and (component, name) not in constant:
                    size = 1.0 / ranks
                lap = Lap("", size, 1, longest_s, cpu_s, cpu_s, blocked_s)
                found.append((_cost(component, name.replace(" ", "_")), lap))
        return found

    def stage_counts(
        self,
        config: Any,
        plan: Plan,
        iteration: IterationCalls,
        waits: Mapping[str, float],
    ) -> Mapping[str, float]:
        """Return name -> a share from 0 to 1 that says how much the components of a stage work in turns.

        A share of 0: they work at the same time; 1: only one of them works at a time. The result has the stages in
        which components exchange items. `waits`: component -> mean seconds that a rank has waited at channels.
        """
        waiting = _waiting_share(iteration, waits)
        found: dict[str, float] = {}
        for stage, talking in _talking(config, plan.needs).items():
            seconds = {c: _seconds_of(iteration, stage, c) for c in talking}
            own = [s * (1.0 - waiting.get(c, 0.0)) for c, s in seconds.items()]
            longest_s = max(own)
            others_s = sum(own) - longest_s
            if others_s > _LEAST * longest_s:
                share = (max(seconds.values()) - longest_s) / others_s
                found[_turns(stage)] = min(1.0, max(0.0, share))
        return found

    def costs(
        self, config: Any, profile: Profile, scaling: Scaling = Scaling.SHARED
    ) -> Costs:
        workers = job_of(config).components.items()
        # Only ranks with processes of their own join a process group.
        exchanging = [name for name, worker in workers if worker.needs_own_process]
        return RankCosts(profile, exchanging, scaling)

    def unmeasured(
        self,
        config: Any,
        plan: Plan,
        profile: Profile,
        ranks: Mapping[str, Iterable[int]],
    ) -> dict[str, Sequence[int]]:
        constant = _constant(config)
        found: dict[str, Sequence[int]] = {}
        for call in _calls(config, plan.needs):
            key = (call.component, call.method)
            if not _works(call.method) or key in constant:
                continue
            known = measured_ranks(profile, _cost(*key))
            asked = ranks.get(call.component, ())
            if known and not all(is_measured(known, n) for n in asked):
                found[call.component] = known
        return found

    def ranks(self, config: Any, plan: Plan) -> Mapping[str, type[Rank]]:
        methods: dict[str, list[str]] = {c: [] for c in plan.placement.components}
        for call in _calls(config, plan.needs):
            if call.method not in _WEIGHTS:
                methods[call.component].append(call.method)
        return {
            component: _rank_with(component, names, _constant(config))
            for component, names in methods.items()
        }

    def site(self, config: Any, plan: Plan, costs: Costs, cores: int) -> Site:
        return MeasuredSite(config, plan, costs, cores)

    def sizes(self, space: Space, mode: Mode) -> dict[str, tuple[Size, ...]]:
        """Return component -> its possible sizes. Each rank has one accelerator.

        The numbers of ranks are those that divide a node's accelerators, or fill a number of nodes that divides all
        nodes. A component that the search may not change has only its present size.
        """
        node = max(node.accelerators for node in space.nodes)
        nodes = len(space.nodes)
        even = [
            n
            for n in space.lengths
            if node % n == 0 or (n % node == 0 and nodes % (n // node) == 0)
        ]
        found: dict[str, tuple[Size, ...]] = {}
        for component in space.plan.placement.components:
            now = space.size_now(component)
            if component not in space.free:
                found[component] = (now,)
                continue
            most = job_of(space.config).components[component].most_ranks
            sizes = {Size(n, n) for n in even if most is None or n <= most}
            if now.accelerators <= space.most:
                sizes.add(now)
            found[component] = tuple(sorted(sizes))
        return found

    def stages(self, config: Any, plan: Plan, costs: Costs) -> Stages:
        return MeasuredStages(config, plan, costs)

    def sending(self, config: Any) -> Collection[str]:
        return [stage.name for stage in job_of(config).stages if stage.transfers]

    def replaced(self, config: Any, path: Sequence[str], value: object) -> Any:
        """Return a copy of the config with `value` at `path`, the names of nested keys.

        If the first name is a component, the path leads into its block; else into the engine's keys.
        """
        own: OpenConfig = config
        field = "components" if path[0] in own.components else "engine"
        return replaced(own, (field, *path), value)


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class MeasuredSite(Site):
    """The state that all simulated ranks of a prediction share.

    `turns_s`: (component, its first method in a stage) -> seconds that the component waits for its turn.
    """

    def __init__(self, config: Any, plan: Plan, costs: Costs, cores: int) -> None:
        super().__init__(config, plan, costs, cores)
        sizes: dict[str, Size] = {}
        for component in plan.placement.components:
            ranks = plan.placement.world_size(component)
            sizes[component] = Size(ranks, ranks)
        work = MeasuredStages(config, plan, costs)
        # (component, its first method in a stage) -> seconds of waiting for its turn
        self.turns_s: dict[tuple[str, str], float] = {}
        for stage, talking in _talking(config, plan.needs).items():
            waited_s = work.turns_s(stage, talking, sizes)
            for step in work.steps(stage):
                for call in step.calls:
                    if call.component in talking and call.method not in _WEIGHTS:
                        self.turns_s.setdefault((call.component, call.method), waited_s)
                        talking = [c for c in talking if c != call.component]


class MeasuredRank(Rank):
    """A simulated rank. Each of its calls takes the measured seconds of the call."""

    site: MeasuredSite

    def spent(self, method: str, *, constant: bool) -> Body:
        """Let the rank work for the seconds of one call of `method`; a generator on the logical clock.

        `constant`: whether the call takes equally long with any number of ranks.
        """
        ranks = self.plan.placement.world_size(self.component)
        size = 0.0 if constant else 1.0 / ranks
        watch = self.watch(method)
        yield from self.spend(self.costs.of(_cost(self.component, method), size))
        waited_s = self.site.turns_s.get((self.component, method), 0.0)
        if waited_s > 0.0:
            yield Sleep(waited_s)
        watch.lap(method)
        return dict[str, Metrics]()

    def take_metrics(self) -> Body:
        """Return no metrics, because a prediction consists of seconds only."""
        yield from ()
        return dict[str, Metrics]()

    def move(self, to: Residency) -> Body:
        cost = _move_cost(self.costs, self.site.config, self.component, to)
        yield from self.spend(cost)
        return MoveReport(residency=to, accelerator_bytes=0, host_bytes=0)

    def push_weights(self, version: int) -> Body:
        yield from self.spend(self.costs.of(_cost(self.component, PUSH)))
        there, every = self.site.push(self.component, version)
        there.append(self.slot.rank)
        if len(there) == self.plan.placement.world_size(self.component):
            every.set()
        return dict[str, Metrics]()

    def pull_weights(self, version: int, source: str | None = None) -> Body:
        sources = [*_sources(self.site.config, self.component)]
        if source is not None:
            sources = [source]
        for each in sources:
            _, every = self.site.push(each, version)
            yield every
        yield from self.spend(self.costs.of(_cost(self.component, PULL)))
        return dict[str, Metrics]()


def _rank_with(
    component: str, methods: Sequence[str], constant: set[tuple[str, str]]
) -> type[Rank]:
    """Return a subclass of MeasuredRank with the given methods, each of which spends its measured seconds.

    `constant`: (component, method) pairs that take equally long with any number of ranks.
    """
    bodies = {
        method: _body(method, constant=(component, method) in constant)
        for method in methods
    }
    return type("MeasuredRank", (MeasuredRank,), bodies)


def _body(method: str, *, constant: bool) -> Callable[..., Body]:
    def spend(rank: MeasuredRank, *values: object) -> Body:
        return (yield from rank.spent(method, constant=constant))

    return spend


# ── stages ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class MeasuredStages(Stages):
    """Computes lower bounds of the work in each declared stage of a custom job."""

    def __init__(self, config: Any, plan: Plan, costs: Costs) -> None:
        super().__init__(config, costs)
        self._steps = _steps(config, plan.needs)
        self._constant = _constant(config)
        self._needs = plan.needs
        self.names = tuple(plan.needs.stages)

    def loads(
        self, stage: str, active: Sequence[str], mode: Mode, sizes: Sizes
    ) -> tuple[Loads, float]:
        found: dict[str, Load] = {}
        for step in self._steps.get(stage, ()):
            for call in step.calls:
                if active and call.component not in active:
                    continue
                load = self._call(call, sizes[call.component].ranks)
                before = found.get(call.component)
                found[call.component] = load if before is None else before.after(load)
        talking = [
            c for c in _talking(self._config, self._needs).get(stage, ()) if c in found
        ]
        chain_s = 0.0
        if len(talking) > 1:
            work_s = [self.work_s(stage, c, sizes[c].ranks) for c in talking]
            chain_s = max(work_s) + self.turns_s(stage, talking, sizes)
        return found, chain_s

    def steps(self, stage: str) -> Sequence[Step]:
        """Return the declared steps of a stage: calls that are made together."""
        return self._steps.get(stage, ())

    def work_s(self, stage: str, component: str, ranks: int) -> float:
        """Return the seconds that each rank of a component works in a stage, if the component has `ranks` ranks."""
        calls = [call for step in self.steps(stage) for call in step.calls]
        own = [call for call in calls if call.component == component]
        return sum(self._cost_of(c, ranks).seconds for c in own if _works(c.method))

    def turns_s(self, stage: str, talking: Sequence[str], sizes: Sizes) -> float:
        """Return the seconds that the component with the most work in a stage waits until it is its turn.

        `talking`: the components that exchange items in the stage, and so may work in turns. `sizes`: component -> its
        size.
        """
        work_s = [self.work_s(stage, c, sizes[c].ranks) for c in talking]
        share = self._costs.count(_turns(stage), 0.0)
        return share * (sum(work_s) - max(work_s))

    def depends(self, stage: str) -> tuple[str, ...]:
        calls = [call for step in self._steps.get(stage, ()) for call in step.calls]
        return tuple(dict.fromkeys(call.component for call in calls))

    def options(
        self, stage: str, mode: Mode, sizes: Mapping[str, Sequence[Size]]
    ) -> Iterator[Options]:
        components = self.depends(stage)
        for chosen in itertools.product(*(sizes[c] for c in components)):
            one = dict(zip(components, chosen, strict=True))
            loads, chain_s = self.loads(stage, (), mode, one)
            wide = {c: size.accelerators for c, size in one.items()}
            yield Options(loads, chain_s, wide)

    def move(self, move: Move, size: Size, *, joins: bool) -> Load:
        cost = _move_cost(self._costs, self._config, move.component, move.after)
        work = [cost] * size.ranks
        if not joins:
            return self._load(move.component, work)
        whole_s = cost.cpu_s * size.ranks
        return Load(size.ranks, 0, cost.seconds, whole_s, cost.cpu_s)

    def _call(self, call: Call, ranks: int) -> Load:
        cost = self._cost_of(call, ranks)
        # Further calls of a rank may share a message with its first call.
        load = self._load(call.component, [cost] * ranks)
        around = self._around(call.component)
        return load._replace(
            calls=0,
            longest_s=load.longest_s - around.seconds,
            cpu_s=load.cpu_s - ranks * around.cpu_s,
            least_s=load.least_s - around.cpu_s,
        )

    def _cost_of(self, call: Call, ranks: int) -> Cost:
        key = (call.component, call.method)
        whole = not _works(call.method) or key in self._constant
        return self._costs.of(_cost(*key), 0.0 if whole else 1.0 / ranks)


# ── what a job declares ──────────────────────────────────────────────────────────────────────────────────────────────


def _steps(config: Any, needs: Needs) -> Mapping[str, Sequence[Step]]:
    return job_of(config).work(config, needs).stages


def _calls(config: Any, needs: Needs) -> Iterator[Call]:
    for steps in _steps(config, needs).values():
        for step in steps:
            yield from step.calls


def _constant(config: Any) -> set[tuple[str, str]]:
    """Return the (component, method) pairs that take equally long with any number of ranks, as the job declares."""
    parts = [p for s in job_of(config).stages for p in s.parts if isinstance(p, Part)]
    return {
        (part.component, method)
        for part in parts
        for method, scales in part.scales
        if scales == CONSTANT
    }


def _talking(config: Any, needs: Needs) -> dict[str, list[str]]:
    """Return stage -> those components at work in the stage that exchange items with each other through a channel."""
    found: dict[str, list[str]] = {}
    for stage, steps in _steps(config, needs).items():
        calls = [call for step in steps for call in step.calls if _works(call.method)]
        working = {call.component for call in calls}
        joined: dict[str, None] = {}
        for channel in job_of(config).channels:
            ends = (channel.source, channel.target)
            if working.issuperset(ends) and len({*ends}) > 1:
                joined.update(dict.fromkeys(ends))
        if joined:
            found[stage] = list(joined)
    return found


def _works(method: str) -> bool:
    """Return whether a call of `method` is work that the job declares.

    Moves, transfers of weights, and the loop's call for metrics are not such work.
    """
    return method not in (*_WEIGHTS, TAKE) and not method.startswith("move ")


def _turns(stage: str) -> str:
    """Return the name under which a profile stores the share in which the components of a stage work in turns."""
    return f"{stage.replace(' ', '_')}/in_turns"


def _sources(config: Any, target: str) -> list[str]:
    """Return the components that send weights to the component `target`."""
    transfers = [t for stage in job_of(config).stages for t in stage.transfers]
    return list(dict.fromkeys(t.source for t in transfers if target in t.targets))


def _moved_bytes(config: Any, component: str, to: str) -> float:
    """Return the declared bytes that a component has on each accelerator after a move; 0 if they are not declared.

    `to`: the residency after the move, such as "weights" or "full". Only configs of custom jobs declare bytes.
    """
    if not isinstance(config, OpenConfig):
        return 0.0
    declared = config.components[component].memory
    least = declared.weights if to == Residency.WEIGHTS.word else declared.full
    return float(least or 0)


def _move_cost(costs: Costs, config: Any, component: str, to: Residency) -> Cost:
    """Return the cost of moving a component to the residency `to`.

    If the move was measured with only one number of bytes, the cost is scaled to the declared bytes.
    """
    name = _cost(component, f"move_{to.word}")
    size = _moved_bytes(config, component, to.word)
    cost = costs.of(name, size)
    measured = costs.profile.costs.get(name)
    if measured is None or not size:
        return cost
    sizes = {point.size for point in measured.points}
    if len(sizes) == 1 and 0.0 not in sizes:
        return cost.times(size / sizes.pop())
    return cost


def _cost(component: str, call: str) -> str:
    """Return the name of the cost of a call in a profile: `<component>.<call>/<part>`.

    The part is "rest" for a move of residency, and "seconds" for any other call.
    """
    part = "rest" if call.startswith("move_") else SECONDS
    return f"{component}.{call}/{part}"


# ── what an iteration shows ──────────────────────────────────────────────────────────────────────────────────────────


def _together(calls: Sequence[RankCall]) -> list[list[RankCall]]:
    """Return lists of calls that ran at the same time: for each stage its work, its moves, its pushes and its pulls."""
    groups: dict[tuple[str, str], list[RankCall]] = defaultdict(list)
    for call in calls:
        if call.name == TAKE:
            continue
        kind = "move" if call.name.startswith("move ") else "work"
        if call.name in _WEIGHTS:
            kind = call.name
        groups[call.stage, kind].append(call)
    return list(groups.values())


def _by_method(
    calls: Sequence[RankCall],
) -> dict[tuple[str, str], list[RankCall]]:
    """Return (component, method) -> the calls of all its ranks."""
    found: dict[tuple[str, str], list[RankCall]] = defaultdict(list)
    for call in calls:
        found[call.slot.component, call.name].append(call)
    return found


def _waiting_share(
    iteration: IterationCalls, waits: Mapping[str, float]
) -> dict[str, float]:
    """Return component -> the share of the seconds in its calls that a rank has waited at channels, from 0 to 1.

    `waits`: component -> mean seconds that a rank has waited at channels.
    """
    found: dict[str, float] = {}
    for component, waited_s in waits.items():
        seconds: dict[Any, float] = defaultdict(float)
        for call in iteration.calls:
            if call.slot.component == component and _works(call.name):
                seconds[call.slot.rank] += call.record.seconds
        mean_s = sum(seconds.values()) / max(1, len(seconds))
        if mean_s > 0.0:
            found[component] = min(1.0, waited_s / mean_s)
    return found


def _seconds_of(iteration: IterationCalls, stage: str, component: str) -> float:
    """Return the seconds of the slowest rank of a component in a stage, summed over the rank's calls."""
    seconds: dict[int, float] = defaultdict(float)
    for call in iteration.calls:
        if base_stage(call.stage) != stage or not _works(call.name):
            continue
        if call.slot.component == component:
            seconds[call.slot.rank] += call.record.seconds
    return max(seconds.values(), default=0.0)


def _last_push(iteration: IterationCalls) -> float:
    """Return the time at which the last push of weights in an iteration ended, in seconds; 0 if there was no push."""
    ends = [
        call.record.began_s + call.record.seconds
        for call in iteration.calls
        if call.name == PUSH
    ]
    return max(ends, default=0.0)


def _own_seconds(call: RankCall, pushed_s: float) -> float:
    """Return the seconds of a call. A pull of weights counts only from the end of the last push, `pushed_s`."""
    record = call.record
    if call.name != PULL:
        return record.seconds
    began_s = max(record.began_s, pushed_s)
    return max(0.0, record.began_s + record.seconds - began_s)


def _cpu_seconds(call: RankCall, inline: bool) -> float:
    """Return the processor seconds of a call. If the rank has a process to itself, all threads of the process count.

    `inline`: whether all ranks are threads of one process.
    """
    record = call.record
    beside_s = 0.0 if inline or call.slot.process else record.beside_cpu_s
    return min(record.seconds, record.cpu_s + beside_s)


def _crowded(calls: Sequence[RankCall], inline: bool) -> float:
    """Return the least seconds in which the processors of the busiest node can do these calls.

    Only nodes with more ranks than processors count; return 0 if there are none. `inline`: whether all ranks are
    threads of one process, which compute one at a time.
    """
    most_s = 0.0
    nodes: dict[int, list[RankCall]] = defaultdict(list)
    for call in calls:
        nodes[call.slot.node].append(call)
    for there in nodes.values():
        ranks = {call.slot for call in there}
        # The threads of one process compute one at a time.
        cores = 1 if inline else max(call.record.cores for call in there)
        if len(ranks) > cores:
            whole_s = sum(_cpu_seconds(call, inline) for call in there)
            most_s = max(most_s, whole_s / cores)
    return most_s
