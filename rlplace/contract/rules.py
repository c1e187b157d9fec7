"""Rules of a custom job, checked before anything starts: its components, stages and channels.

A rule yields a `Found` for each violation: the wrong key and value, and the facts for the error text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rlplace.checks.rule import Found, Rule, at_line, broken
from rlplace.contract.classes import (
    called_components,
    declares_calls,
    defines,
    own_methods,
    unfilled,
    uses_channels_uncalled,
)
from rlplace.contract.stages import CONSTANT, RANKS, Channel, Part, Stage
from rlplace.errors import Problem, did_you_mean
from rlplace.placement.machines.topology import Ranges
from rlplace.places import place_of
from rlplace.workers.launch.construction import constructor_text, unknown_arguments

if TYPE_CHECKING:
    from rlplace.contract.job import Job
    from rlplace.placement.language.spec import ComponentSpec
    from rlplace.placement.plan import Placed, Plan
    from rlplace.workers.worker import Worker

Named = TypeVar("Named", Stage, Channel)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobStage:
    """A stage and its job: the argument of the rules about a single stage."""

    job: Job
    stage: Stage

    @property
    def key(self) -> str:
        return f"stages.{self.stage.name}"

    @property
    def parts(self) -> Iterator[Part]:
        """The parts of the stage, without weight transfers. Parts of components that the job lacks are left out."""
        for part in self.stage.parts:
            if isinstance(part, Part) and part.component in self.job.components:
                yield part


def of_job(job: Job, settings: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    """Yield every problem of a custom job's components, stages and channels.

    `settings`: component -> the part of its config block that its workers get, as keys and values.
    """
    yield from broken(_COMPONENTS, job)
    for name, kind in job.components.items():
        if _is_worker(kind):
            case = Constructed(name=name, kind=kind, keys=settings.get(name, {}))
            yield from broken(_CONSTRUCTORS, case)
    yield from broken(_STAGES, job)
    for stage in job.stages:
        yield from broken(_STAGE, JobStage(job=job, stage=stage))
    yield from broken(_CALLS, job)
    yield from broken(_CHANNELS, job)


# ── components ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_worker(kind: Any) -> bool:
    from rlplace.workers.worker import Worker

    return isinstance(kind, type) and issubclass(kind, Worker)


def _not_workers(job: Job) -> Iterator[Found]:
    """Yield a finding for each component whose value in `job.components` is not a worker class."""
    kind: Any
    for name, kind in job.components.items():
        if _is_worker(kind):
            continue
        error = ""
        source = place_of(kind) or job.place
        if _is_worker(type(kind)):
            # An object of a right class stands where the class should.
            error = "object"
            source = job.place
        yield Found(
            key=f"components.{name}",
            got=getattr(kind, "__name__", repr(kind)),
            error=error,
            source=source,
            facts={
                "name": name,
                "example": str(name).title(),
                "kind": type(kind).__name__,
            },
        )


def _half_of_state(job: Job) -> Iterator[Found]:
    """Yield a finding for each component that can save its state but not load it, or load it but not save it."""
    for name, kind in job.components.items():
        if not _is_worker(kind):
            continue
        saves = defines(kind, "save_state")
        loads = defines(kind, "load_state") or defines(kind, "load_states")
        if saves == loads:
            continue
        error = "saved-only"
        if loads:
            error = "loaded-only"
        yield Found(
            key=f"components.{name}",
            error=error,
            source=place_of(kind),
            facts={"worker": kind.__name__},
        )


def _no_most_ranks(job: Job) -> Iterator[Found]:
    """Yield a finding for each component with a wrong `most_ranks` in its worker class.

    The value has to be None or an integer of at least 1.
    """
    for name, kind in job.components.items():
        if _is_worker(kind) and not _allows(kind.most_ranks):
            yield Found(
                key=f"components.{name}",
                got=f"most_ranks = {kind.most_ranks!r}",
                error="no-number",
                source=place_of(kind),
            )


def _allows(most: object) -> bool:
    """Return whether `most` is a valid `most_ranks`: None (no limit), or an integer of at least 1."""
    return most is None or (isinstance(most, int) and most >= 1)


_COMPONENTS = (
    Rule(code="not-a-worker", facts=_not_workers),
    Rule(code="most-ranks", facts=_no_most_ranks),
    Rule(code="missing-method", facts=_half_of_state),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constructed:
    """A component and its worker class: the argument of the rules about the constructor of the class.

    `name`: name of the component. `kind`: worker class. `keys`: the part of the component's config block that its
    workers get, as keys and values.
    """

    name: str
    kind: type[Worker]
    keys: Mapping[str, Any]


def _unknown_arguments(case: Constructed) -> Iterator[Found]:
    """Yield one finding if the worker class's constructor needs arguments that rlplace does not pass."""
    wrong = unknown_arguments(case.kind, case.keys)
    if not wrong:
        return
    first = wrong[0]
    error = "of-component"
    if first in case.keys:
        error = "key-of-component"
    yield Found(
        key=f"components.{case.name}",
        got=constructor_text(case.kind),
        error=error,
        source=place_of(case.kind.__init__),
        facts={"arguments": ", ".join(wrong), "first": first},
    )


_CONSTRUCTORS = (Rule(code="worker-constructor", facts=_unknown_arguments),)


# ── stages ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _no_stages(job: Job) -> Iterator[Found]:
    """Yield one finding if the job has no stages."""
    if not job.stages:
        yield Found(key="stages", got="[]", source=job.place)


def _equal_stages(job: Job) -> Iterator[Found]:
    """Yield one finding for each stage name that is used more than once in the job."""
    for stage in _repeated(job.stages):
        name = stage.name
        yield Found(
            key=f"stages.{name}", got=name, source=stage.place, facts={"name": name}
        )


def _repeated(things: Iterable[Named]) -> list[Named]:
    """Return the second stage (or channel) for each name that is used more than once.

    `things`: all stages of a job, or all channels.
    """
    seen: dict[str, int] = {}
    found = []
    for thing in things:
        seen[thing.name] = seen.get(thing.name, 0) + 1
        if seen[thing.name] == 2:
            found.append(thing)
    return found


_STAGES = (
    Rule(code="no-stages", facts=_no_stages),
    Rule(code="stage-exists", facts=_equal_stages),
)


def _never_called(job: Job) -> Iterator[Found]:
    """Yield a finding for each component of the job that is not named in any stage."""
    called = {component for stage in job.stages for component in stage.residency}
    for component in job.components:
        if component not in called:
            yield Found(
                key=f"components.{component}",
                source=job.place,
                facts={"component": component},
            )


def _sent_twice(job: Job) -> Iterator[Found]:
    """Yield a finding for each stage that sends weights of a component which an earlier stage has sent already."""
    first: dict[str, Stage] = {}
    for stage in job.stages:
        for source in dict.fromkeys(transfer.source for transfer in stage.transfers):
            if source not in first:
                first[source] = stage
                continue
            every = [
                target
                for each in job.stages
                for transfer in each.transfers
                if transfer.source == source
                for target in transfer.targets
            ]
            names = ", ".join(f'"{name}"' for name in dict.fromkeys(every))
            yield Found(
                key=f"stages.{stage.name}",
                got=f'weights("{source}", ...)',
                source=stage.place,
                facts={
                    "component": source,
                    "first": first[source].name,
                    "targets": names,
                },
            )


_CALLS = (
    Rule(code="never-called", facts=_never_called),
    Rule(code="weights-twice", facts=_sent_twice),
)


# ── one stage ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _unknown_components(case: JobStage) -> Iterator[Found]:
    """Yield a finding for each component that the stage names but the job does not have."""
    components = case.job.components
    for component in case.stage.residency:
        if component in components:
            continue
        sources = [t.source for t in case.stage.transfers if component in t.targets]
        # A target is another component than its sender.
        near = did_you_mean(component, [c for c in components if c not in sources])
        error = "in-stage"
        if near and sources:
            error = "misspelt-target"
        elif near:
            error = "misspelt-in-stage"
        yield Found(
            key=case.key,
            got=component,
            error=error,
            source=case.stage.place,
            facts={
                "component": component,
                "sender": next(iter(sources), ""),
                "near": near,
                "components": ", ".join(components),
            },
        )


def _sent_to_itself(case: JobStage) -> Iterator[Found]:
    """Yield a Found for each transfer of the stage that names one component as sender and as target."""
    for transfer in case.stage.transfers:
        name = transfer.source
        if name not in transfer.targets:
            continue
        others = [target for target in transfer.targets if target != name]
        right = ", ".join(f'"{other}"' for other in others)
        if len(others) > 1:
            right = f"[{right}]"
        yield Found(
            key=case.key,
            got=f'weights("{name}", to="{name}")',
            error="in-stage",
            source=case.stage.place,
            facts={"name": name, "right": right or '"<another component>"'},
        )


def _no_components(case: JobStage) -> Iterator[Found]:
    """Yield one finding if the stage names no component."""
    if not case.stage.residency:
        yield Found(
            key=case.key,
            source=case.stage.place,
            facts={"stage": case.stage.name},
        )


def _missing_methods(case: JobStage) -> Iterator[Found]:
    """Yield a finding for each method that the stage calls but the worker class does not have."""
    for part, method, kind in _called(case):
        if callable(getattr(kind, method, None)):
            continue
        methods = own_methods(kind)
        near = did_you_mean(method, methods)
        error = "called"
        # A misspelt name is mended in the stage, a missing method in the class.
        source = place_of(kind)
        if near:
            error = "misspelt"
            source = case.stage.place
        elif not methods:
            error = "called-of-none"
        yield Found(
            key=case.key,
            got=f'{part.component}.calls("{method}")',
            error=error,
            source=source,
            facts={
                "worker": kind.__name__,
                "method": method,
                "methods": ", ".join(methods),
                "near": near,
            },
        )


def _unfilled_arguments(case: JobStage) -> Iterator[Found]:
    """Yield a finding for each method with required parameters that a stage cannot fill in.

    A stage fills in the iteration number and the policy version only.
    """
    for part, method, kind in _called(case):
        function = getattr(kind, method, None)
        if not callable(function):
            continue
        left = unfilled(function)
        if left:
            yield Found(
                key=case.key,
                got=f'{part.component}.calls("{method}")',
                source=place_of(function),
                facts={
                    "worker": kind.__name__,
                    "method": method,
                    "arguments": ", ".join(left),
                },
            )


def _called(case: JobStage) -> Iterator[tuple[Part, str, type]]:
    """Yield (part of the stage, name of the method, worker class) for each method call of the stage."""
    for part in case.parts:
        kind: Any = case.job.components[part.component]
        if isinstance(kind, type):
            for method in part.methods:
                yield part, method, kind


def _unknown_scales(case: JobStage) -> Iterator[Found]:
    """Yield a finding for each call of the stage whose `scales` is neither "ranks" nor "constant"."""
    known = (RANKS, CONSTANT)
    for part in case.parts:
        for method, scales in part.scales:
            if scales not in known:
                yield Found(
                    key=case.key,
                    got=f'scales="{scales}"',
                    error="scales",
                    source=case.stage.place,
                    facts={
                        "method": method,
                        "near": did_you_mean(scales, known) or RANKS,
                    },
                )


_STAGE = (
    Rule(code="unknown-component", facts=_unknown_components),
    Rule(code="weights-to-itself", facts=_sent_to_itself),
    Rule(code="empty-stage", facts=_no_components),
    Rule(code="missing-method", facts=_missing_methods),
    Rule(code="unfilled-argument", facts=_unfilled_arguments),
    Rule(code="unknown-choice", facts=_unknown_scales),
)


# ── channels ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _equal_channels(job: Job) -> Iterator[Found]:
    """Yield one finding for each channel name that is used more than once in the job."""
    for channel in _repeated(job.channels):
        name = channel.name
        yield Found(
            key=f"channels.{name}",
            got=name,
            error="declared",
            source=channel.place,
            facts={"name": name},
        )


def _unknown_ends(job: Job) -> Iterator[Found]:
    """Yield a finding for each end of a channel that is not a component of the job."""
    components = job.components
    for channel in job.channels:
        for end in (channel.source, channel.target):
            if end in components:
                continue
            near = did_you_mean(end, components)
            error = "end-of-channel"
            if near:
                error = "misspelt-end-of-channel"
            yield Found(
                key=f"channels.{channel.name}",
                got=_declared(channel),
                error=error,
                source=channel.place,
                facts={
                    "component": end,
                    "near": near,
                    "components": ", ".join(components),
                },
            )


def _idle_ends(job: Job) -> Iterator[Found]:
    """Yield a Found for each end of a channel whose component no stage calls, so that it neither puts nor takes.

    A component that may use channels by itself, as in `setup`, is left out.
    """
    called = called_components(job)
    for channel in job.channels:
        ends = {"source": channel.source, "target": channel.target}
        for error, component in ends.items():
            kind: Any = job.components.get(component)
            stages = [s.name for s in job.stages if component in s.residency]
            # A component that is unknown, or that no stage names, is told by another rule.
            if component in called or not stages or not _is_worker(kind):
                continue
            if uses_channels_uncalled(kind):
                continue
            yield Found(
                key=f"channels.{channel.name}",
                got=_declared(channel),
                error=error,
                source=channel.place,
                facts={
                    "component": component,
                    "stages": ", ".join(stages),
                    "method": next(iter(own_methods(kind)), "<method>"),
                },
            )


def _declared(channel: Channel) -> str:
    """Return the text that declares a channel."""
    return f'Channel("{channel.name}", "{channel.source}", "{channel.target}")'


def _without_room(job: Job) -> Iterator[Found]:
    """Yield a finding for each channel with `items` below 1."""
    for channel in job.channels:
        if channel.items < 1:
            yield Found(
                key=f"channels.{channel.name}",
                got=f"items={channel.items}",
                error="items-of-channel",
                source=channel.place,
            )


_CHANNELS = (
    Rule(code="channel-exists", facts=_equal_channels),
    Rule(code="unknown-component", facts=_unknown_ends),
    Rule(code="out-of-bounds", facts=_without_room),
    Rule(code="channel-end-never-called", applies=declares_calls, facts=_idle_ends),
)


def order_warnings(job: Job) -> Iterator[Problem]:
    """Yield a warning for each channel whose target is called only in stages before those that call its source."""
    yield from broken(_ORDER, job)


def _taken_before_put(job: Job) -> Iterator[Found]:
    called = called_components(job)
    order = [stage.name for stage in job.stages]
    for channel in job.channels:
        putting = called.get(channel.source)
        taking = called.get(channel.target)
        # Without a call of an end there is no order.
        if not putting or not taking:
            continue
        first = min(putting, key=order.index)
        last = max(taking, key=order.index)
        if order.index(last) >= order.index(first):
            continue
        yield Found(
            key=f"channels.{channel.name}",
            got=_declared(channel),
            source=channel.place,
            facts={
                "putter": channel.source,
                "taker": channel.target,
                "first": first,
                "last": last,
                "name": channel.name,
            },
        )


_ORDER = (
    Rule(code="taken-before-put", applies=declares_calls, facts=_taken_before_put),
)


# ── the planned job ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """The worker classes, the config and the plan of a custom job. `components`: name -> worker class."""

    components: Mapping[str, Any]
    config: Any
    plan: Plan


def _inline(case: PlannedJob) -> bool:
    return bool(case.config.cluster.launcher == "inline")


def _ranks_as_threads(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding for each component with several ranks of which each needs its own process.

    This rule applies to the launcher `inline`, with which all ranks are threads of one process.
    """
    for component, kind in case.components.items():
        ranks = case.plan.placement.world_size(component)
        if ranks > 1 and getattr(kind, "needs_own_process", False):
            yield Found(
                key="cluster.launcher",
                got="inline",
                facts={"groups": f"{component} ({ranks} ranks)", "first": component},
            )


PLANNED = (
    Rule(code="inline-needs-one-rank", applies=_inline, facts=_ranks_as_threads),
)


# ── the placement ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacedJob:
    """The worker classes of a job, and the placement of its components. `components`: name -> worker class."""

    components: Mapping[str, Any]
    placed: Placed


def _more_ranks(case: PlacedJob) -> Iterator[Found]:
    """Yield a finding for each component that has more ranks than its worker class allows."""
    placement = case.placed.placement
    for component in placement.components:
        kind: Any = case.components.get(component)
        if not _is_worker(kind) or kind.most_ranks is None:
            continue
        # A wrong `most_ranks` is reported by `_no_most_ranks`.
        if not _allows(kind.most_ranks):
            continue
        spec = placement.spec(component)
        if spec.world_size > kind.most_ranks:
            yield at_line(
                spec,
                component=component,
                ranks=spec.world_size,
                most=kind.most_ranks,
                worker=kind.__qualname__,
                place=_with_ranks(spec, kind.most_ranks),
            )


def _with_ranks(spec: ComponentSpec, ranks: int) -> str:
    """Return a placement text with `ranks` ranks for a component, to be suggested in an error.

    `spec`: the present placement. The text keeps its first accelerators. If it has no accelerators, the text places all
    ranks as processes on one node.
    """
    numbers = [*spec.accelerators][:ranks]
    if numbers:
        return str(Ranges.of(range(n, n + 1) for n in numbers))
    if ranks == 1:
        return "cpu"
    return f'{{node_group: node, placement: "0:0-{ranks - 1}"}}'


PLACED = (Rule(code="most-ranks", facts=_more_ranks),)
