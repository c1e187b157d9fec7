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
    """A method that every rank of a component runs in a stage."""

    component: str
    method: str
    # Arguments of the call, in this order: the iteration number, the policy version, or both.
    arguments: tuple[str, ...] = (ITERATION,)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Calls that start together. The next step of a stage begins when all have ended."""

    calls: tuple[Call, ...]
    # The metric time/<name>_s counts its seconds. Empty: they count for the stage.
    name: str = ""
    # Only in the last sub-stage of its stage. Where all components of the stage began in an earlier one, at the end of
    # that one.
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
        """Return the step with only the calls of these components."""
        there = set(components)
        calls = tuple(call for call in self.calls if call.component in there)
        return dataclasses.replace(self, calls=calls)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All calls of an iteration, by stage."""

    stages: Mapping[str, tuple[Step, ...]]
    # Stages that change saved state. After the last of them there is a new policy version. A failure in them returns
    # the run to its newest checkpoint.
    # takes the run back to its newest checkpoint.
    trains: tuple[str, ...]
    # Step that evaluates the newest weights on held-out data; it runs first in stage `evaluated_in`.
    evaluation: Step | None = None
    evaluated_in: str = "rollout"
    # Whether workers return results of any type and collect metrics separately.
    collects: bool = False

    def of(self, schedule: Schedule) -> dict[str, tuple[Step, ...]]:
        """Return the steps of every stage and sub-stage, each with the calls of the components active there."""
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
    """A component in a stage: its residency, and the methods that it runs."""

    component: str
    residency: Residency
    methods: tuple[str, ...] = ()
    # (method, "ranks" or "constant"): how the seconds of the method scale with the number of ranks.
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
    """A sync of weights from one component to others."""

    source: str
    targets: tuple[str, ...]


def full(component: str) -> Part:
    """Return the part of a component whose whole state is on its accelerators in the stage."""
    return Part(component, Residency.FULL)


def loaded(component: str) -> Part:
    """Return the part of a component whose weights, but no other state, are on its accelerators in the stage."""
    return Part(component, Residency.WEIGHTS)


def on_host(component: str) -> Part:
    """Return the part of a component that needs none of its accelerators in the stage."""
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
    # Components do not depend on each other, so those that share accelerators may take turns.
    turns: bool
    # Whether the stage changes saved state. None: it does if a component with state is full here.
    trains: bool | None
    # Where the user's code makes it
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
    """A queue from the ranks of one component to the ranks of another.

    `by_rank`: one queue per target rank, whose key is the rank; False: one queue for all target ranks. `items`: most
    items that wait in one queue; a further `put` waits for room. Items are in the shared memory of the target's node.
    """

    name: str
    source: str
    target: str
    items: int = 64
    by_rank: bool = False
    # Where the user's code makes it
    place: Source | None = dataclasses.field(
        default_factory=place_of_caller, init=False, compare=False, repr=False
    )


def needs_of_stages(stages: Sequence[Stage], ahead: int = 0) -> Needs:
    """Return the needs that the schedule is derived from."""
    return Needs(
        stages=tuple(stage.name for stage in stages),
        residency={stage.name: stage.residency for stage in stages},
        divisible=tuple(stage.name for stage in stages if stage.turns),
        ahead=ahead,
    )


def steps_of_stage(
    stage: Stage, arguments: Mapping[tuple[str, str], tuple[str, ...]]
) -> tuple[Step, ...]:
    """Return the steps of a stage. `arguments`: (component, method) -> arguments; default: the iteration number."""
    sending: list[Call] = []
    for transfer in stage.transfers:
        sending.append(
            Call(component=transfer.source, method=PUSH, arguments=(VERSION,))
        )
        for target in transfer.targets:
            sending.append(Call(component=target, method=PULL, arguments=(VERSION,)))
    # All methods are calls of one step. The first ones of all components start together, and each rank runs its next
    # method after the one before.
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
