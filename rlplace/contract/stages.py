"""The calls of an iteration: as a job declares them, and as the loop executes them.

A job declares stages. A stage names components, the residency of each component, and the methods that start together::

    Stage("sync", weights("actor", to="rollout"))
    Stage("rollout", full("env").calls("run"), full("rollout").calls("generate"))
    Stage("learn", full("actor").calls("learn"))

The schedule is derived from `Needs`, and the loop executes `Work`; both follow from these stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from rlplace.errors import Source
from rlplace.placement.schedule import Needs, Residency, Schedule, base_stage
from rlplace.places import place_of_caller

ITERATION = "iteration"
VERSION = "version"
RANKS = "ranks"
CONSTANT = "constant"
PUSH = "push_weights"
PULL = "pull_weights"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a worker method: every rank of the component runs the method once in a stage.

    `arguments`: the arguments in order: ITERATION is the iteration number, VERSION the policy version. `source`: a last
    argument, the component from which weights are pulled; None: the call does not have this argument.
    """

    component: str
    method: str
    arguments: tuple[str, ...] = (ITERATION,)
    source: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Calls that start together. The next step of the stage starts when all calls of this step have ended.

    `name`: the seconds of the step are the metric `time/<name>_s`; "": they count for the stage. `last_turn`: whether
    the step runs only in the last sub-stage of its stage. `on_host`: whether the step uses no accelerator.
    `metrics_of`: the components with results that are metrics of the iteration; None: all.
    """

    calls: tuple[Call, ...]
    name: str = ""
    # If all components of the stage began in an earlier stage, the step runs at the end of that earlier stage.
    last_turn: bool = False
    # If set, residency does not matter, and no utilisation is recorded.
    on_host: bool = False
    metrics_of: tuple[str, ...] | None = None
    # Brings weights to other components by methods of the job. The engine's sending of weights needs no mark.
    brings_weights: bool = False

    @property
    def is_sync(self) -> bool:
        """Whether the seconds of the step count as sync in the use of accelerators."""
        return self.brings_weights or self.sends_weights

    @property
    def sends_weights(self) -> bool:
        """Whether the step pushes weights. Receivers may still read the sender's weights after the calls have ended."""
        return any(call.method == PUSH for call in self.calls)

    def within(self, components: Iterable[str]) -> Step:
        """Return a copy of the step with only the calls to the given components."""
        there = set(components)
        calls = tuple(call for call in self.calls if call.component in there)
        return dataclasses.replace(self, calls=calls)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All calls of an iteration.

    `stages`: stage -> its steps, in order. `trains`: the stages that change saved state. `evaluation`: the step that
    evaluates the newest weights on held-out data; None: no evaluation. `evaluated_in`: the stage that starts with this
    step. `collects`: whether methods may return values of any type, so that metrics are collected by separate calls.
    """

    stages: Mapping[str, tuple[Step, ...]]
    # After the last of these stages there is a new policy version. A failure in one of them returns the run to its
    # newest checkpoint.
    trains: tuple[str, ...]
    evaluation: Step | None = None
    evaluated_in: str = "rollout"
    collects: bool = False

    def of(self, schedule: Schedule) -> dict[str, tuple[Step, ...]]:
        """Return stage -> its steps, for every stage and sub-stage of the schedule.

        In a sub-stage, a step keeps only the calls to components that work in the sub-stage. A step with `on_host`
        keeps all its calls.
        """
        last = {base_stage(stage): stage for stage in schedule.stages}
        steps: dict[str, list[Step]] = {stage: [] for stage in schedule.stages}
        before = schedule.stages[0]
        for base, declared in self.stages.items():
            if base not in last:
                # All components of this stage ran in an earlier stage, so its last-turn steps run there.
                steps[before] += [step for step in declared if step.last_turn]
                continue
            turns = [stage for stage in schedule.stages if base_stage(stage) == base]
            for stage in turns:
                for step in declared:
                    if step.last_turn and stage != last[base]:
                        continue
                    if not step.on_host:
                        step = step.within(schedule.active[stage])
                    if step.calls:
                        steps[stage].append(step)
            before = last[base]
        return {stage: tuple(found) for stage, found in steps.items()}


# ── as a job declares them ───────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The part of a component in a stage: its residency, and the methods that its ranks run.

    `scales`: (method, "ranks" or "constant") for each method: how its seconds depend on the number of ranks.
    """

    component: str
    residency: Residency
    methods: tuple[str, ...] = ()
    scales: tuple[tuple[str, str], ...] = ()

    def calls(self, *methods: str, scales: str = RANKS) -> Part:
        """Return a copy of the part with further methods: each rank runs all methods of the part in order.

        `scales`: how the predicted seconds of these methods depend on the number of ranks. "ranks": the ranks share the
        work, so twice as many ranks need half the time. "constant": any number of ranks needs the same time.
        """
        declared = tuple((method, scales) for method in methods)
        return dataclasses.replace(
            self, methods=(*self.methods, *methods), scales=(*self.scales, *declared)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """A sync of weights from the component `source` to each component in `targets`."""

    source: str
    targets: tuple[str, ...]


def full(component: str) -> Part:
    """Return the part of a component in a stage, with all memory of the component on its accelerators."""
    return Part(component, Residency.FULL)


def loaded(component: str) -> Part:
    """Return the part of a component in a stage, with only the component's weights on its accelerators."""
    return Part(component, Residency.WEIGHTS)


def on_host(component: str) -> Part:
    """Return the part of a component in a stage, with no memory of the component on accelerators."""
    return Part(component, Residency.OFF)


def weights(source: str, to: str | Sequence[str]) -> Transfer:
    """Return a transfer of weights from component `source` to the component, or the components, `to`."""
    targets = (to,) if isinstance(to, str) else tuple(to)
    return Transfer(source, targets)


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Stage:
    """A stage of the iteration: the components at work, the calls of their methods, and weight transfers.

    Stages run in the order in which a job lists them. The residency of a component is constant within a stage. `parts`:
    the parts of components, and weight transfers. `turns`: whether components that share accelerators may work one
    after the other, since they do not depend on each other. `place`: file and line at which the stage was made, for
    errors. `trains`: whether the stage changes saved state; None: it does if a component with saved state has full
    residency in the stage.
    """

    name: str
    parts: tuple[Part | Transfer, ...]
    turns: bool
    trains: bool | None
    # File and line at which the user's code creates the stage
    place: Source | None = dataclasses.field(compare=False, repr=False)

    def __init__(
        self,
        name: str,
        *parts: Part | Transfer,
        turns: bool = False,
        trains: bool | None = None,
    ) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "turns", turns)
        object.__setattr__(self, "trains", trains)
        object.__setattr__(self, "place", place_of_caller())

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(part for part in self.parts if isinstance(part, Transfer))

    @property
    def residency(self) -> dict[str, Residency]:
        """Component -> its least residency in the stage. Both ends of a weight transfer need at least `WEIGHTS`."""
        found: dict[str, Residency] = {}
        for part in self.parts:
            if isinstance(part, Transfer):
                for component in (part.source, *part.targets):
                    found.setdefault(component, Residency.WEIGHTS)
            else:
                before = found.get(part.component, Residency.OFF)
                found[part.component] = max(before, part.residency)
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Channel:
    """A queue from the ranks of component `source` to the ranks of component `target`.

    `items`: the largest number of items in a queue; a further `put` waits until an item is taken. `by_rank`: True: each
    target rank has its own queue, with the rank as key; False: all target ranks take from one queue. Items lie in the
    shared memory of the target's node. `place`: file and line at which the channel was made, for errors.
    """

    name: str
    source: str
    target: str
    items: int = 64
    by_rank: bool = False
    # File and line at which the user's code creates the channel
    place: Source | None = dataclasses.field(
        default_factory=place_of_caller, init=False, compare=False, repr=False
    )


def needs_of_stages(stages: Sequence[Stage], ahead: int = 0) -> Needs:
    """Return the least residency of each component in each stage. The schedule is made from the result.

    `ahead`: the staleness limit: by how many policy versions rollout may run ahead of learning.
    """
    return Needs(
        stages=tuple(stage.name for stage in stages),
        residency={stage.name: stage.residency for stage in stages},
        divisible=tuple(stage.name for stage in stages if stage.turns),
        ahead=ahead,
    )


def steps_of_stage(
    stage: Stage, arguments: Mapping[tuple[str, str], tuple[str, ...]]
) -> tuple[Step, ...]:
    """Return the steps of a stage: first a step for its weight transfers, then a step for its method calls.

    If the stage has only one kind, it has one step. `arguments`: (component, method) -> the arguments of the call. A
    method that is not in `arguments` gets the iteration number.
    """
    # A component sends once, whatever the number of transfers from it.
    targets: dict[str, dict[str, None]] = {}
    for transfer in stage.transfers:
        targets.setdefault(transfer.source, {}).update(dict.fromkeys(transfer.targets))
    sending: list[Call] = []
    for source, takers in targets.items():
        sending.append(Call(component=source, method=PUSH, arguments=(VERSION,)))
        for target in takers:
            pull = Call(
                component=target, method=PULL, arguments=(VERSION,), source=source
            )
            sending.append(pull)
    # All methods are calls of one step. The first methods of all components start together; each rank runs its further
    # methods one after the other.
    parts = [part for part in stage.parts if isinstance(part, Part)]
    working = [
        Call(
            component=part.component,
            method=method,
            arguments=arguments.get((part.component, method), (ITERATION,)),
        )
        for part in parts
        for method in part.methods
    ]
    if sending and working:
        return (
            Step(calls=tuple(sending), name=f"{stage.name}_weights"),
            Step(calls=tuple(working)),
        )
    return (Step(calls=(*sending, *working)),)
