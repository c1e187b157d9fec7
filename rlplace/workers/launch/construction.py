"""Check the constructors of worker classes before anything starts, and call them.

The constructor of a worker class is `__init__(self)`, `__init__(self, config)` or `__init__(self, config, context)`. In
each case `self.config` and `self.context` are set before the constructor runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from rlplace.codes import problem
from rlplace.errors import WorkerMisuse
from rlplace.places import place_of

if TYPE_CHECKING:
    from rlplace.workers.worker import Worker, WorkerContext

_CONTEXT = "context"
_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def check_constructor(worker: type[Worker]) -> None:
    """Raise WorkerMisuse if the constructor of `worker` needs other arguments than `config` and `context`."""
    if unknown_arguments(worker):
        raise WorkerMisuse(
            problem(
                "worker-constructor",
                worker.__qualname__,
                constructor_text(worker),
                source=place_of(worker.__init__),
            )
        )


def unknown_arguments(worker: type[Worker], keys: Collection[str] = ()) -> list[str]:
    """Return the names of the constructor's required arguments that the launcher does not pass.

    The launcher passes at most `config` and `context`, as the first two arguments. `keys`: keys of the worker's config.
    A required argument with the name of a key is returned too, because the launcher does not pass single keys.
    """
    wanted = _parameters(worker)
    required = [p for p in wanted if p.kind in _POSITIONAL and p.default is p.empty]
    keywords = [
        p.name
        for p in wanted
        if p.kind is p.KEYWORD_ONLY and p.default is inspect.Parameter.empty
    ]
    named = [p.name for p in required[:2] if p.name in keys]
    others = [p.name for p in required[2:]]
    return [*named, *others, *keywords]


def constructor_text(worker: type[Worker]) -> str:
    """Return the first line of the constructor's definition without types, such as `def __init__(self, config)`."""
    written = inspect.signature(worker.__init__)
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in written.parameters.values()
    ]
    signature = written.replace(
        parameters=plain, return_annotation=inspect.Signature.empty
    )
    return f"def __init__{signature}"


def construct(worker: type[Worker], config: Any, context: WorkerContext) -> Worker:
    """Create and return a worker. Its attributes `config` and `context` are set before its constructor runs."""
    made = worker.__new__(worker)
    made.config = config
    made.context = context
    worker.__init__(made, *_arguments(worker, config, context))
    return made


def _arguments(
    worker: type[Worker], config: Any, context: WorkerContext
) -> tuple[Any, ...]:
    """Return the positional arguments for the worker's constructor: a tuple of none, one or both of `config` and
    `context`.
    """
    wanted = _parameters(worker)
    if any(p.kind is p.VAR_POSITIONAL for p in wanted):
        return config, context
    given: list[Any] = []
    for parameter in wanted:
        if parameter.kind not in _POSITIONAL or len(given) == 2:
            break
        if parameter.name == _CONTEXT:
            given.append(context)
        elif not given:
            given.append(config)
        elif parameter.default is parameter.empty:
            given.append(context)
        else:
            break
    return tuple(given)


def _parameters(worker: type[Worker]) -> list[inspect.Parameter]:
    """Return the parameters of the worker's constructor without `self`."""
    return list(inspect.signature(worker.__init__).parameters.values())[1:]
