"""The calls of an iteration: as a job declares them, and as the loop executes them.

A job declares stages. A stage names components, the residency of each, and the methods that start together there::

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
    """A method that every rank of a component runs once in a stage."""

    component: str
    method: str
    # Arguments of the call, in this order: the iteration number, the policy version, or both.
    arguments: tuple[str, ...] = (ITERATION,)
    # The component whose weights are pulled, the last argument of the call. None: the call has no such argument.
    source: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Calls that start together. The next step of the stage starts when all of these calls have ended."""

    calls: tuple[Call, ...]
    # The metric time/<name>_s counts its seconds. Empty: they count for the stage.
    name: str = ""
    # Whether the step runs only in the last sub-stage of its stage. If all components of the stage began in an earlier
    # stage, the step runs at the end of that earlier stage.
    last_turn: bool = False
    # Uses no accelerator: residency does not matter, and no utilisation is recorded.
    on_host: bool = False
    # Components whose results are metrics of the iteration. None: all.
    metrics_of: tuple[str, ...] | None = None

    @property
    def sends_weights(self) -> bool:
        """Whether receivers may still read the sender's weights after the calls have ended."""
        return any(call.method == PUSH for call in self.calls)

    def within(self, components: Iterable[str]) -> Step:
        """Return a copy of the step that has only the calls to these components."""
        there = set(components)
        calls = tuple(call for call in self.calls if call.component in there)
        return dataclasses.replace(self, calls=calls)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All calls of an iteration. `stages`: stage -> its steps, in their order."""

    stages: Mapping[str, tuple[Step, ...]]
    # Stages that change saved state. After the last of them there is a new policy version. A failure in them returns
    # the run to its newest checkpoint.
    trains: tuple[str, ...]
    # Step that evaluates the newest weights on held-out data; it runs first in stage `evaluated_in`.
    evaluation: Step | None = None
    evaluated_in: str = "rollout"
    # Whether workers return results of any type and collect metrics separately.
    collects: bool = False

    def of(self, schedule: Schedule) -> dict[str, tuple[Step, ...]]:
        """Return stage -> its steps, for every stage and sub-stage of the schedule.

        A step of a sub-stage has only the calls to components that are active in the sub-stage. A step that runs on the
        host keeps all its calls.
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
    """What a stage says about one component: its residency, and the methods that its ranks run."""

    component: str
    residency: Residency
    methods: tuple[str, ...] = ()
    # (method, "ranks" or "constant"): how the seconds of the method scale with the number of ranks.
    scales: tuple[tuple[str, str], ...] = ()

    def calls(self, *methods: str, scales: str = RANKS) -> Part:
        """Return a copy of the part with more methods.

        Each rank of the component runs the methods one after the other in the stage. `scales`: how the predicted
        seconds of a call depend on the number of ranks. "ranks": the ranks share the work, so twice as many ranks need
        half the time. "constant": the time is the same for any number of ranks.
        """
        declared = tuple((method, scales) for method in methods)
        return dataclasses.replace(
            self, methods=(*self.methods, *methods), scales=(*self.scales, *declared)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """A sync of weights from one component to others."""

    source: str
    targets: tuple[str, ...]


def full(component: str) -> Part:
    """Return a part of a stage that has everything of the component on its accelerators."""
    return Part(component, Residency.FULL)


def loaded(component: str) -> Part:
    """Return a part of a stage that has the component's weights, and nothing else of it, on its accelerators."""
    return Part(component, Residency.WEIGHTS)


def on_host(component: str) -> Part:
    """Return a part of a stage that has nothing of the component on accelerators."""
    return Part(component, Residency.OFF)


def weights(source: str, to: str | Sequence[str]) -> Transfer:
    """Return a transfer of weights from the component `source` to another component, or to several."""
    targets = (to,) if isinstance(to, str) else tuple(to)
    return Transfer(source, targets)


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Stage:
    """A part of the iteration, in which the residency of each component stays the same.

    Stages run in the order in which a job lists them.
    """

    name: str
    parts: tuple[Part | Transfer, ...]
    # Components do not depend on each other, so those that share accelerators may take turns.
    turns: bool
    # Whether the stage changes saved state. None: it does if a component with state is full here.
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
        """Component -> its least residency in the stage. A transfer of weights needs at least `WEIGHTS`."""
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
    """A queue from the ranks of one component to the ranks of another.

    `by_rank`: whether each target rank has a queue of its own, with the rank as key; False: all target ranks share one
    queue. `items`: the most items that wait in one queue; a further `put` waits until there is room. Items are in the
    shared memory of the target's node.
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
    """Return the least residency of each component in each of these stages. The schedule is made from the result.

    `ahead`: number of weight versions by which the rollout may be ahead of learning.
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
    """Return the steps of a stage: first its weight transfers, if any, then its method calls, if any.

    `arguments`: (component, method) -> the arguments of the call; a method that `arguments` lacks gets the iteration
    number.
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
