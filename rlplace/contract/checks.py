"""Checks of a declared job before anything starts: names, methods, arguments, channels, state."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.contract.stages import (
    CONSTANT,
    ITERATION,
    PULL,
    PUSH,
    RANKS,
    VERSION,
    Part,
    Stage,
)
from rlplace.errors import Problem, Source, did_you_mean, suggestion
from rlplace.placement.schedule import Residency

if TYPE_CHECKING:
    from rlplace.contract.job import Job
    from rlplace.placement.plan import Plan

# Name of a method parameter that a stage fills in -> the value it gets.
FILLED = {"iteration": ITERATION, "index": ITERATION, "version": VERSION}


def of_job(job: Job) -> list[Problem]:
    """Return every problem of a job's components, stages and channels."""
    return [*_components(job), *_stages(job), *_channels(job)]


def _components(job: Job) -> Iterator[Problem]:
    from rlplace.workers.worker import Worker

    worker: Any
    for name, worker in job.components.items():
        if isinstance(worker, type) and issubclass(worker, Worker):
            yield from _state_in_pairs(name, worker)
            continue
        yield Problem(
            code="not-a-worker",
            key=f"components.{name}",
            what="is no class of workers",
            got=getattr(worker, "__name__", repr(worker)),
            why="each rank of a component is an object of a class derived from rlplace.Worker",
            fix=f"class {str(name).title()}(Worker): ...",
            source=_place(worker),
        )


def _state_in_pairs(name: str, worker: type) -> Iterator[Problem]:
    """Report a worker class that defines only one of `save_state` and `load_state`."""
    saves = _defines(worker, "save_state")
    loads = _defines(worker, "load_state") or _defines(worker, "load_states")
    if saves == loads:
        return
    there, missing = (
        ("save_state", "load_state") if saves else ("load_state", "save_state")
    )
    yield Problem(
        code="missing-method",
        key=f"components.{name}",
        what=f"{worker.__name__} has {there} and no {missing}",
        got=None,
        why="what a checkpoint has of a component is written by one of the two and read by the other",
        fix=f"def {missing}(self, ...): ...",
        source=_place(worker),
    )


def _stages(job: Job) -> Iterator[Problem]:
    if not job.stages:
        yield Problem(
            code="no-stages",
            key="stages",
            what="the job has no stage",
            got="[]",
            why="an iteration is made of stages; each calls methods of components",
            fix='stages=[Stage("work", full("<component>").calls("<method>"))]',
        )
    names = [stage.name for stage in job.stages]
    for name in {name for name in names if names.count(name) > 1}:
        yield Problem(
            code="stage-exists",
            key=f"stages.{name}",
            what="two stages have this name",
            got=name,
            why="metrics, the timeline and errors call a stage by its name",
            fix=f'Stage("{name}_2", ...)',
        )
    for stage in job.stages:
        yield from _stage(job, stage)
    called = {component for stage in job.stages for component in stage.residency}
    for component in job.components:
        if component not in called:
            yield Problem(
                code="never-called",
                key=f"components.{component}",
                what="no stage names this component",
                got=None,
                why="its workers would start and do nothing",
                fix=f'full("{component}").calls("<method>") in a stage        (or leave the component out)',
                source=_place(job.components[component]),
            )


def _stage(job: Job, stage: Stage) -> Iterator[Problem]:
    """Check the components and methods that a stage names."""
    key = f"stages.{stage.name}"
    for component in stage.residency:
        if component in job.components:
            continue
        near = did_you_mean(component, job.components)
        yield Problem(
            code="unknown-component",
            key=key,
            what=f"the job has no component {component!r}{suggestion(near)}",
            got=component,
            why=f"components: {', '.join(job.components)}",
            fix=f'full("{near or next(iter(job.components), "<component>")}")',
        )
    if not stage.residency:
        yield Problem(
            code="empty-stage",
            key=key,
            what="the stage names no component",
            got=None,
            why="nothing would happen in it",
            fix=f'Stage("{stage.name}", full("<component>").calls("<method>"))',
        )
    for part in stage.parts:
        if isinstance(part, Part) and part.component in job.components:
            yield from _methods(key, part, job.components[part.component])
            yield from _scales(key, part)


def _scales(key: str, part: Part) -> Iterator[Problem]:
    """Check how the seconds of calls scale with the number of ranks."""
    for method, scales in part.scales:
        if scales in (RANKS, CONSTANT):
            continue
        near = did_you_mean(scales, (RANKS, CONSTANT)) or RANKS
        yield Problem(
            code="unknown-choice",
            key=key,
            what=f"seconds of {method} cannot scale so",
            got=f'scales="{scales}"',
            why=f'"{RANKS}": the ranks share the work; "{CONSTANT}": each rank does all of it',
            fix=f'.calls("{method}", scales="{near}")',
        )


def _methods(key: str, part: Part, worker: Any) -> Iterator[Problem]:
    """Check that the worker class has the methods, and that a stage can call them."""
    if not isinstance(worker, type):
        return
    for method in part.methods:
        function = getattr(worker, method, None)
        if not callable(function):
            near = did_you_mean(method, _public(worker))
            yield Problem(
                code="missing-method",
                key=key,
                what=f"{worker.__name__} has no method {method!r}{suggestion(near)}",
                got=f'{part.component}.calls("{method}")',
                why=f"methods of {worker.__name__}: {', '.join(_public(worker)) or 'none of its own'}",
                fix=f'.calls("{near}")'
                if near
                else f"def {method}(self, iteration): ...",
                source=_place(worker),
            )
            continue
        left = _unfilled(function)
        if left:
            yield Problem(
                code="unfilled-argument",
                key=key,
                what=f"{worker.__name__}.{method} asks for {', '.join(left)}",
                got=f'{part.component}.calls("{method}")',
                why="a stage fills in iteration and version; all else has a default, or comes by the config",
                fix=f"def {method}(self, iteration): ...",
                source=_place(function),
            )


def _channels(job: Job) -> Iterator[Problem]:
    names = [channel.name for channel in job.channels]
    for name in {name for name in names if names.count(name) > 1}:
        yield Problem(
            code="channel-exists",
            key=f"channels.{name}",
            what="two channels have this name",
            got=name,
            why="a worker finds a channel by its name: self.channel(name)",
            fix=f'Channel("{name}_2", ...)',
        )
    for channel in job.channels:
        for end in (channel.source, channel.target):
            if end in job.components:
                continue
            near = did_you_mean(end, job.components)
            yield Problem(
                code="unknown-component",
                key=f"channels.{channel.name}",
                what=f"the job has no component {end!r}{suggestion(near)}",
                got=f'Channel("{channel.name}", "{channel.source}", "{channel.target}")',
                why=f"components: {', '.join(job.components)}; a channel without a reader fills up",
                fix=near or next(iter(job.components), "<component>"),
            )
        if channel.items < 1:
            yield Problem(
                code="out-of-bounds",
                key=f"channels.{channel.name}",
                what="must be >= 1",
                got=f"items={channel.items}",
                why="a put waits until there is room for its item",
                fix="items=64",
            )


def undivided_problems(
    plan: Plan, components: Iterable[str], why: str
) -> Iterator[Problem]:
    """Report parallel sizes of components whose ranks have nothing to divide. `why`: the reason, for the error."""
    for component in components:
        spec = plan.placement.spec(component)
        for key in ("tensor_parallel_size", "context_parallel_size"):
            size = getattr(spec.parallel, key)
            if size > 1:
                yield Problem(
                    code="parallel-sizes",
                    key=spec.key,
                    what="its ranks do not divide a model",
                    got=f"{key}: {size}",
                    why=why,
                    fix=f"no {key}",
                )


def inline_problems(
    components: Mapping[str, Any], config: Any, plan: Plan
) -> Iterator[Problem]:
    """Report components whose ranks join a process group but would be threads of one process (inline launcher)."""
    if config.cluster.launcher != "inline":
        return
    for component, worker in components.items():
        ranks = plan.placement.world_size(component)
        if ranks > 1 and getattr(worker, "needs_own_process", False):
            yield Problem(
                code="inline-needs-one-rank",
                key="cluster.launcher",
                what=f"{component} ({ranks} ranks) cannot run as threads of one process",
                got="inline",
                why="a process can join only one process group, so each of these ranks needs a process of its own",
                fix=f"cluster.launcher=ray     (or one rank: cluster.component_placement.{component}=0)",
            )


# ── what follows from the classes ────────────────────────────────────────────────────────────────────────────────────


def arguments_of(job: Job) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return (component, method) -> the arguments with which a stage calls that method."""
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for stage in job.stages:
        for part in stage.parts:
            if not isinstance(part, Part):
                continue
            for method in part.methods:
                function = getattr(job.components[part.component], method)
                found[part.component, method] = _filled(function)
    return found


def with_state(job: Job) -> tuple[str, ...]:
    """Return the components whose class saves state."""
    return tuple(
        name
        for name, worker in job.components.items()
        if _defines(worker, "save_state")
    )


def training_stages(job: Job) -> tuple[str, ...]:
    """Return the stages that change saved state: the declared ones, else those with a stateful component that is full.

    If no component has state, the last stage counts, since an iteration ends with it.
    """
    state = set(with_state(job))
    found = []
    for stage in job.stages:
        if stage.trains is not None:
            if stage.trains:
                found.append(stage.name)
            continue
        full = {c for c, held in stage.residency.items() if held == Residency.FULL}
        if full & state:
            found.append(stage.name)
    return tuple(found) or (job.stages[-1].name,)


def sends_and_takes(job: Job) -> tuple[set[str], set[str]]:
    """Return the components that send weights, and the components that receive them."""
    senders = {t.source for stage in job.stages for t in stage.transfers}
    takers = {c for stage in job.stages for t in stage.transfers for c in t.targets}
    return senders, takers


def _defines(worker: type, method: str) -> bool:
    """Return whether a class overrides a method of Worker."""
    from rlplace.workers.worker import Worker

    return getattr(worker, method, None) is not getattr(Worker, method, None)


def _parameters(function: Any) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(function).parameters.values())
    # Skip self.
    return parameters[1:]


def _filled(function: Any) -> tuple[str, ...]:
    """Return the values for the leading parameters of a method, up to the first name that a stage does not fill."""
    found = []
    for parameter in _parameters(function):
        if parameter.name not in FILLED or parameter.kind == parameter.KEYWORD_ONLY:
            break
        found.append(FILLED[parameter.name])
    return tuple(found)


def _unfilled(function: Any) -> list[str]:
    """Return the required parameters that a stage has no value for."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    filled = len(_filled(function))
    return [
        parameter.name
        for parameter in _parameters(function)[filled:]
        if parameter.default is parameter.empty and parameter.kind not in variadic
    ]


def _public(worker: type) -> list[str]:
    """Return the methods that a custom class and its custom bases define."""
    from rlplace.workers.worker import Worker

    taken = {*dir(Worker), PUSH, PULL}
    return [
        name
        for name in dir(worker)
        if name not in taken
        and not name.startswith("_")
        and callable(getattr(worker, name))
    ]


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
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return Source(file=str(shown), line=line)


def unplaced(job: Job, placed: Iterable[str]) -> list[str]:
    """Return the components of a job that a placement block does not name."""
    there = set(placed)
    return [name for name in job.components if name not in there]
