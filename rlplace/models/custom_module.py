"""Find a custom network that a config names. Needs no torch: the planner asks too."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rlplace import codes
from rlplace.envs.registry import check_named, named
from rlplace.errors import Problem

if TYPE_CHECKING:
    from rlplace.config.blocks.policies import ModuleConfig

KEY = "actor.model.name"
_CODE = "unknown-module"
_NOUN = "module"


def find_module(config: ModuleConfig) -> Any:
    """Return the object that `config.name` names.

    Raises ConfigError if there is no object of this name. Errors that are raised by the import of its module pass
    through.
    """
    return named(config.name, {}, key=KEY, code=_CODE, noun=_NOUN)


def check_module(config: ModuleConfig) -> list[Problem]:
    """Return the problems of a custom module; empty if it can be used.

    A problem is that the module cannot be imported, is not a torch.nn.Module, or does not take the arguments in the
    config.
    """
    problems = check_named(
        config.name,
        config.kwargs,
        given=("spaces",),
        key=KEY,
        code=_CODE,
        noun=_NOUN,
    )
    if not problems:
        problem = not_a_module(find_module(config), config.name)
        return [] if problem is None else [problem]
    # Problems of arguments have a code of their own
    renamed = []
    for problem in problems:
        if ".kwargs." in problem.key:
            problem = dataclasses.replace(problem, code="bad-module-kwargs")
        renamed.append(problem)
    return renamed


def not_a_module(kind: Any, name: str) -> Problem | None:
    """Return the problem of a `kind` that is not a subclass of torch.nn.Module; None if it is a subclass.

    `name`: the name of `kind` in the config.
    """
    # Compared by name, since torch is not imported
    module = ("torch.nn.modules.module", "Module")
    bases = kind.__mro__ if isinstance(kind, type) else ()
    if any((base.__module__, base.__qualname__) == module for base in bases):
        return None
    return codes.problem("unknown-module", KEY, name, error="no-module")
