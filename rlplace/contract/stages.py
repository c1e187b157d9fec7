"""The calls of an iteration, as a job declares them and as the loop makes them.

A job declares stages. A stage names components, how much of each has to be resident, and the methods that start there
together::

    Stage("sync", weights("actor", to="rollout"))
    Stage("rollout", full("env").calls("run"), full("rollout").calls("generate"))
    Stage("learn", full("actor").calls("learn"))

From these follow `Needs`, which the schedule is made of, and `Work`, which the loop executes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from rlplace.placement.schedule import Needs, Residency, Schedule, base_stage

ITERATION = "iteration"
VERSION = "version"
RANKS = "ranks"
CONSTANT = "constant"
PUSH = "push_weights"
PULL = "pull_weights"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A method that every rank of a component runs in a stage."""

    component: str
    method: str
    # What it is called with, in this order: the number of the iteration, the policy version.
    arguments: tuple[str, ...] = (ITERATION,)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Calls that start together. The next step of a stage begins when all have ended."""

    calls: tuple[Call, ...]
    # Its seconds are the metric time/<name>_s. Empty: those of the stage.
    name: str = ""
    # Only in the last sub-stage of its stage. Where all components of the stage began in an earlier one, at the end of
    # that one.
    last_turn: bool = False
    # No accelerator is in use: neither residency nor utilisation is asked for.
    on_host: bool = False
    # Components whose results are metrics of the iteration. None: all.
    metrics_of: tuple[str, ...] | None = None

    @property
    def sends_weights(self) -> bool:
        """Whether a receiver may still read what a sender holds when the calls have ended."""
        return any(call.method == PUSH for call in self.calls)

    def within(self, components: Iterable[str]) -> Step:
        """Return the step with the calls of these components alone."""
        there = set(components)
        calls = tuple(call for call in self.calls if call.component in there)
        return dataclasses.replace(self, calls=calls)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All calls of an iteration, by stage."""

    stages: Mapping[str, tuple[Step, ...]]
    # Stages that change what is saved. After the last of them there is a new policy version. A failure within them
    # takes the run back to its newest checkpoint.
    trains: tuple[str, ...]
    # Held-out data under the newest weights, in this stage, before its other steps.
    evaluation: Step | None = None
    evaluated_in: str = "rollout"
    # Whether workers return results of any kind, and collect metrics beside them.
    collects: bool = False

    def of(self, schedule: Schedule) -> dict[str, tuple[Step, ...]]:
        """Return the steps of every stage and sub-stage, with the calls of the components that are active there."""
        last = {base_stage(stage): stage for stage in schedule.stages}
        steps: dict[str, list[Step]] = {stage: [] for stage in schedule.stages}
        before = schedule.stages[0]
        for base, declared in self.stages.items():
            if base not in last:
                # All of its components began earlier.
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
    """A component in a stage: how much of it is resident, and the methods that it runs."""

    component: str
    residency: Residency
    methods: tuple[str, ...] = ()
    # How the seconds of each method go with the number of ranks, as (method, "ranks" or "constant").
    scales: tuple[tuple[str, str], ...] = ()

    def calls(self, *methods: str, scales: str = RANKS) -> Part:
        """Return the part with methods that all ranks of the component run in the stage, one after the other.

        `scales`: how predicted seconds of a call go with the number of ranks. "ranks": the ranks share the work, so
        twice as many need half the time. "constant": each rank does the same, however many there are.
        """
        declared = tuple((method, scales) for method in methods)
        return dataclasses.replace(
            self, methods=(*self.methods, *methods), scales=(*self.scales, *declared)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """Weights of one component that others take."""

    source: str
    targets: tuple[str, ...]


def full(component: str) -> Part:
    """Return a component that has all of its state on its accelerators in a stage."""
    return Part(component, Residency.FULL)


def loaded(component: str) -> Part:
    """Return a component that has its weights on its accelerators in a stage, and not the rest of its state."""
    return Part(component, Residency.WEIGHTS)


def on_host(component: str) -> Part:
    """Return a component that needs none of its accelerators in a stage."""
    return Part(component, Residency.OFF)


def weights(source: str, to: str | Sequence[str]) -> Transfer:
    """Return the transfer of a component's weights to another one, or to several."""
    targets = (to,) if isinstance(to, str) else tuple(to)
    return Transfer(source, targets)


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Stage:
    """A part of the iteration with its own residency. Stages run in the order in which a job lists them."""

    name: str
    parts: tuple[Part | Transfer, ...]
    # The components do not depend on each other: those that share accelerators may take turns.
    turns: bool
    # It changes what is saved. None: if a component with state of its own works in full here.
    trains: bool | None

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

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(part for part in self.parts if isinstance(part, Transfer))

    @property
    def residency(self) -> dict[str, Residency]:
        """Return the least residency of each component of the stage."""
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
    """A queue from the ranks of one component to those of another.

    `by_rank`: a queue for each target rank, whose key is its number; else one queue, from which any target rank takes.
    `items`: most items that wait in it, for each queue; a `put` beyond them waits. They are in the shared memory of the
    target's node.
    """

    name: str
    source: str
    target: str
    items: int = 64
    by_rank: bool = False


def needs_of_stages(stages: Sequence[Stage], ahead: int = 0) -> Needs:
    """Return what the schedule is made of."""
    return Needs(
        stages=tuple(stage.name for stage in stages),
        residency={stage.name: stage.residency for stage in stages},
        divisible=tuple(stage.name for stage in stages if stage.turns),
        ahead=ahead,
    )


def steps_of_stage(
    stage: Stage, arguments: Mapping[tuple[str, str], tuple[str, ...]]
) -> tuple[Step, ...]:
    """Return the calls of a stage. `arguments`: of (component, method), where they are not the iteration alone."""
    sending: list[Call] = []
    for transfer in stage.transfers:
        sending.append(
            Call(component=transfer.source, method=PUSH, arguments=(VERSION,))
        )
        for target in transfer.targets:
            sending.append(Call(component=target, method=PULL, arguments=(VERSION,)))
    # The first method of each component starts with the first of the others; a second one follows its first.
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
