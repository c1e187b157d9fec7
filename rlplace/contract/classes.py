"""Properties of a custom job that are derived from its worker classes and stages: call arguments, saved state."""

from __future__ import annotations

import inspect
from types import CodeType
from typing import TYPE_CHECKING, Any

from rlplace.contract.stages import ITERATION, PULL, PUSH, VERSION, Part
from rlplace.placement.schedule import Residency

if TYPE_CHECKING:
    from rlplace.contract.job import Job

# Name of a method parameter that a stage fills in -> the value it gets.
FILLED = {"iteration": ITERATION, "index": ITERATION, "version": VERSION}


def arguments_of(job: Job) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return (component, method) -> arguments of the call, for every method that a stage of the job calls.

    Each argument is a constant: `ITERATION` stands for the iteration number, `VERSION` for the policy version.
    """
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
    """Return the names of the components with saved state, in the order of `job.components`.

    The worker class of such a component defines `save_state`.
    """
    return tuple(
        name for name, worker in job.components.items() if defines(worker, "save_state")
    )


def training_stages(job: Job) -> tuple[str, ...]:
    """Return the names of the stages that change saved state.

    A stage with `trains=True` is returned, and a stage with `trains=False` is not. A stage without `trains` is returned
    if a component with saved state is fully on its accelerators in this stage. If no stage is found, the last stage is
    returned.
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


def defines(worker: type, method: str) -> bool:
    """Return whether the class `worker` overrides a method of `Worker`, in its own body or in a base class.

    `method`: the name of the method.
    """
    from rlplace.workers.worker import Worker

    return getattr(worker, method, None) is not getattr(Worker, method, None)


def _parameters(function: Any) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(function).parameters.values())
    # Skip self.
    return parameters[1:]


def _filled(function: Any) -> tuple[str, ...]:
    """Return the arguments that a stage passes to a method: `ITERATION` or `VERSION` for each leading parameter.

    `function`: the method. A parameter is filled in if it is called `iteration`, `index` or `version`. The result ends
    before the first parameter that has another name or is keyword-only.
    """
    found = []
    for parameter in _parameters(function):
        if parameter.name not in FILLED or parameter.kind == parameter.KEYWORD_ONLY:
            break
        found.append(FILLED[parameter.name])
    return tuple(found)


def unfilled(function: Any) -> list[str]:
    """Return the names of a method's required parameters that a stage cannot fill in.

    `function`: the method. A stage fills in parameters called `iteration`, `index` or `version`.
    """
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    filled = len(_filled(function))
    return [
        parameter.name
        for parameter in _parameters(function)[filled:]
        if parameter.default is parameter.empty and parameter.kind not in variadic
    ]


def called_components(job: Job) -> dict[str, list[str]]:
    """Return component -> the stages that call a method of the component, in their order."""
    found: dict[str, list[str]] = {}
    for stage in job.stages:
        for part in stage.parts:
            if isinstance(part, Part) and part.methods:
                found.setdefault(part.component, []).append(stage.name)
    return found


def declares_calls(job: Job) -> bool:
    """Return whether the stages of a job define all its calls, because its class does not override `work`."""
    from rlplace.contract.job import Job

    return type(job).work is Job.work


def uses_channels_uncalled(worker: type) -> bool:
    """Return whether a worker class may use a channel without a call of a stage, such as in `setup` or in a thread.

    The names in the code of methods that the engine calls are followed to further methods of the class.
    """
    from rlplace.workers.worker import Worker

    own_classes = worker.__mro__[: worker.__mro__.index(Worker)]
    left = [name for name in dir(Worker) if defines(worker, name)]
    seen: set[str] = set()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        for each in own_classes:
            function: Any = each.__dict__.get(name)
            # A decorator may hide the function that it wraps.
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            used = _names_in(function)
            if "channel" in used:
                return True
            left += used
    return False


def _names_in(function: Any) -> set[str]:
    """Return the names of attributes and globals in the code of a function, functions inside of it included.

    Return an empty set for anything without Python code. `function`: a function, or its code.
    """
    code = getattr(function, "__code__", function)
    if not isinstance(code, CodeType):
        return set()
    names = set(code.co_names)
    for constant in code.co_consts:
        names |= _names_in(constant)
    return names


def own_methods(worker: type) -> list[str]:
    """Return the names of all public methods of a custom worker class that `Worker` does not have.

    The methods `push_weights` and `pull_weights` are left out.
    """
    from rlplace.workers.worker import Worker

    taken = {*dir(Worker), PUSH, PULL}
    return [
        name
        for name in dir(worker)
        if name not in taken
        and not name.startswith("_")
        and callable(getattr(worker, name))
    ]
