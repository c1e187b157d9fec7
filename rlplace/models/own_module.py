"""Find the network of a config that names one of the user's own, without torch: a planner asks too."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rlplace.envs.registry import check_named, named
from rlplace.errors import Problem

if TYPE_CHECKING:
    from rlplace.config.policies import ModuleConfig

KEY = "actor.model.name"
_CODE = "unknown-module"
_NOUN = "module"


def find_module(config: ModuleConfig) -> Any:
    """Return what the name names. Raises ConfigError; errors at its import pass through."""
    return named(config.name, {}, key=KEY, code=_CODE, noun=_NOUN)


def check_module(config: ModuleConfig) -> list[Problem]:
    """Report a name that cannot be imported, is no torch.nn.Module, or does not take the arguments."""
    problems = check_named(
        config.name, config.kwargs, given=("spaces",), key=KEY, code=_CODE, noun=_NOUN
    )
    if (
        not problems
        and (problem := not_a_module(find_module(config), config.name)) is not None
    ):
        return [problem]
    return [
        dataclasses.replace(p, code="bad-module-kwargs") if ".kwargs." in p.key else p
        for p in problems
    ]


def not_a_module(kind: Any, name: str) -> Problem | None:
    """Report what is no class of torch.nn.Module."""
    bases = kind.__mro__ if isinstance(kind, type) else ()
    if any(
        (base.__module__, base.__qualname__) == ("torch.nn.modules.module", "Module")
        for base in bases
    ):
        return None
    why = "it is made with the spaces of the job and called with observations"
    fix = "name: <package.module:Class>"
    return Problem(
        code=_CODE, key=KEY, what="is no torch.nn.Module", got=name, why=why, fix=fix
    )
