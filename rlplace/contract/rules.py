"""Rules of a declared job, before anything starts: its components, stages and channels."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.checks.rule import Found, Rule, broken
from rlplace.contract.classes import defines, own_methods, unfilled
from rlplace.contract.stages import CONSTANT, RANKS, Part, Stage
from rlplace.errors import Problem, Source, did_you_mean

if TYPE_CHECKING:
    from rlplace.contract.job import Job
    from rlplace.placement.plan import Plan

# Stands in a fix for the name of a component, if the job has none
_COMPONENT = "<component>"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobStage:
    """A stage of a job."""

    job: Job
    stage: Stage

    @property
    def key(self) -> str:
        return f"stages.{self.stage.name}"

    @property
    def parts(self) -> Iterator[Part]:
        """What the stage says of the components that the job has."""
        for part in self.stage.parts:
            if isinstance(part, Part) and part.component in self.job.components:
                yield part


def of_job(job: Job) -> Iterator[Problem]:
    """Report every problem of a job's components, stages and channels."""
    yield from broken(_COMPONENTS, job)
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
    """Find components that are no class of workers."""
    kind: Any
    for name, kind in job.components.items():
        if not _is_worker(kind):
            yield Found(
                key=f"components.{name}",
                got=getattr(kind, "__name__", repr(kind)),
                source=_place(kind),
                facts={"example": str(name).title()},
            )


def _half_of_state(job: Job) -> Iterator[Found]:
    """Find worker classes that define only one of `save_state` and `load_state`."""
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
            source=_place(kind),
            facts={"worker": kind.__name__},
        )


_COMPONENTS = (
    Rule(code="not-a-worker", facts=_not_workers),
    Rule(code="missing-method", facts=_half_of_state),
)


# ── stages ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _no_stages(job: Job) -> Iterator[Found]:
    """Find a job without stages."""
    if not job.stages:
        yield Found(key="stages", got="[]")


def _equal_stages(job: Job) -> Iterator[Found]:
    """Find names that two stages have."""
    names = [stage.name for stage in job.stages]
    for name in _repeated(names):
        yield Found(key=f"stages.{name}", got=name, facts={"name": name})


def _repeated(names: list[str]) -> list[str]:
    """Return the names that occur more than once, each once."""
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


_STAGES = (
    Rule(code="no-stages", facts=_no_stages),
    Rule(code="stage-exists", facts=_equal_stages),
)


def _never_called(job: Job) -> Iterator[Found]:
    """Find components that no stage names."""
    called = {component for stage in job.stages for component in stage.residency}
    for component, kind in job.components.items():
        if component not in called:
            yield Found(
                key=f"components.{component}",
                source=_place(kind),
                facts={"component": component},
            )


_CALLS = (Rule(code="never-called", facts=_never_called),)


# ── one stage ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _unknown_components(case: JobStage) -> Iterator[Found]:
    """Find components in the stage that the job does not have."""
    components = case.job.components
    for component in case.stage.residency:
        if component in components:
            continue
        near = did_you_mean(component, components)
        error = "in-stage"
        if near:
            error = "misspelt-in-stage"
        yield Found(
            key=case.key,
            got=component,
            error=error,
            facts={
                "component": component,
                "near": near,
                "first": next(iter(components), _COMPONENT),
                "components": ", ".join(components),
            },
        )


def _no_components(case: JobStage) -> Iterator[Found]:
    """Find a stage that names no component."""
    if not case.stage.residency:
        yield Found(key=case.key, facts={"stage": case.stage.name})


def _missing_methods(case: JobStage) -> Iterator[Found]:
    """Find methods that the worker class does not have."""
    for part, method, kind in _called(case):
        if callable(getattr(kind, method, None)):
            continue
        methods = own_methods(kind)
        near = did_you_mean(method, methods)
        error = "called"
        if near:
            error = "misspelt"
        elif not methods:
            error = "called-of-none"
        yield Found(
            key=case.key,
            got=f'{part.component}.calls("{method}")',
            error=error,
            source=_place(kind),
            facts={
                "worker": kind.__name__,
                "method": method,
                "methods": ", ".join(methods),
                "near": near,
            },
        )


def _unfilled_arguments(case: JobStage) -> Iterator[Found]:
    """Find methods with arguments that a stage has no value for."""
    for part, method, kind in _called(case):
        function = getattr(kind, method, None)
        if not callable(function):
            continue
        left = unfilled(function)
        if left:
            yield Found(
                key=case.key,
                got=f'{part.component}.calls("{method}")',
                source=_place(function),
                facts={
                    "worker": kind.__name__,
                    "method": method,
                    "arguments": ", ".join(left),
                },
            )


def _called(case: JobStage) -> Iterator[tuple[Part, str, type]]:
    """Yield each method that the stage calls, and the class that should have it."""
    for part in case.parts:
        kind: Any = case.job.components[part.component]
        if isinstance(kind, type):
            for method in part.methods:
                yield part, method, kind


def _unknown_scales(case: JobStage) -> Iterator[Found]:
    """Find seconds of calls that scale with the number of ranks in no known way."""
    known = (RANKS, CONSTANT)
    for part in case.parts:
        for method, scales in part.scales:
            if scales not in known:
                yield Found(
                    key=case.key,
                    got=f'scales="{scales}"',
                    error="scales",
                    facts={"method": method},
                )


_STAGE = (
    Rule(code="unknown-component", facts=_unknown_components),
    Rule(code="empty-stage", facts=_no_components),
    Rule(code="missing-method", facts=_missing_methods),
    Rule(code="unfilled-argument", facts=_unfilled_arguments),
    Rule(code="unknown-choice", facts=_unknown_scales),
)


# ── channels ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _equal_channels(job: Job) -> Iterator[Found]:
    """Find names that two channels have."""
    names = [channel.name for channel in job.channels]
    for name in _repeated(names):
        yield Found(
            key=f"channels.{name}",
            got=name,
            error="declared",
            facts={"name": name},
        )


def _unknown_ends(job: Job) -> Iterator[Found]:
    """Find channels from or to components that the job does not have."""
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
                got=f'Channel("{channel.name}", "{channel.source}", "{channel.target}")',
                error=error,
                facts={
                    "component": end,
                    "near": near,
                    "first": next(iter(components), _COMPONENT),
                    "components": ", ".join(components),
                },
            )


def _without_room(job: Job) -> Iterator[Found]:
    """Find channels that have no room for an item."""
    for channel in job.channels:
        if channel.items < 1:
            yield Found(
                key=f"channels.{channel.name}",
                got=f"items={channel.items}",
                error="items-of-channel",
            )


_CHANNELS = (
    Rule(code="channel-exists", facts=_equal_channels),
    Rule(code="unknown-component", facts=_unknown_ends),
    Rule(code="out-of-bounds", facts=_without_room),
)


def _place(of: Any) -> Source | None:
    """Return the file and line of a class or function; None if Python does not know them."""
    try:
        file = inspect.getsourcefile(of)
        _, line = inspect.getsourcelines(of)
    except (TypeError, OSError):
        return None
    if file is None:
        return None
    here = Path.cwd()
    path = Path(file)
    shown = path
    if path.is_relative_to(here):
        shown = path.relative_to(here)
    return Source(file=str(shown), line=line)


# ── the planned job ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A declared job's worker classes, its config and its plan."""

    components: Mapping[str, Any]
    config: Any
    plan: Plan


def _inline(case: PlannedJob) -> bool:
    return bool(case.config.cluster.launcher == "inline")


def _ranks_as_threads(case: PlannedJob) -> Iterator[Found]:
    """Find components whose ranks join a process group, and would be threads of one process."""
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
