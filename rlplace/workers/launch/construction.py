"""Check the constructors of worker classes before anything starts, and call them.

A class has one of three: `__init__(self)`, `__init__(self, config)`, `__init__(self, config, context)`. Whichever it
is, `self.config` and `self.context` are there before it runs.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from rlplace.codes import problem
from rlplace.errors import Source, WorkerMisuse

if TYPE_CHECKING:
    from rlplace.workers.worker import Worker, WorkerContext

_CONTEXT = "context"
_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def check_constructor(worker: type[Worker]) -> None:
    """Raise WorkerMisuse if a constructor needs arguments that the launcher cannot give."""
    wanted = _parameters(worker)
    required = [p for p in wanted if p.kind in _POSITIONAL and p.default is p.empty]
    keywords = [
        p
        for p in wanted
        if p.kind is p.KEYWORD_ONLY and p.default is inspect.Parameter.empty
    ]
    if len(required) <= 2 and not keywords:
        return
    raise WorkerMisuse(
        problem(
            "worker-constructor",
            worker.__qualname__,
            f"def __init__{inspect.signature(worker.__init__)}",
            source=_source_of(worker),
        )
    )


def construct(worker: type[Worker], config: Any, context: WorkerContext) -> Worker:
    """Create a worker; `config` and `context` are set before its constructor runs."""
    made = worker.__new__(worker)
    made.config = config
    made.context = context
    worker.__init__(made, *_arguments(worker, config, context))
    return made


def _arguments(
    worker: type[Worker], config: Any, context: WorkerContext
) -> tuple[Any, ...]:
    """Return the arguments of the constructor: none, the config, or the config and the context."""
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
    """Return the parameters of the constructor without `self`."""
    return list(inspect.signature(worker.__init__).parameters.values())[1:]


def _source_of(worker: type[Worker]) -> Source | None:
    code = getattr(worker.__init__, "__code__", None)
    if code is None:
        return None
    return Source(file=code.co_filename, line=code.co_firstlineno)
