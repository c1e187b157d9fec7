"""Finds what a config names: something shipped by its short name, something of the user's by package.module:Name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlplace.errors import ConfigError, Problem, did_you_mean


def named(name: str, shipped: Mapping[str, str], *, key: str, code: str, noun: str) -> Any:
    """The object called `name`. Raises ConfigError; what the user's module raises when imported is not caught."""
    module_name, colon, attribute = shipped.get(name, name).partition(":")
    if not colon:
        raise ConfigError([_unknown(name, shipped, key, code, noun)])
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # it is there; something that it imports is not
        raise ConfigError([_absent(name, key, code, noun, f"there is no module {error.name}")]) from error
    if not hasattr(module, attribute):
        raise ConfigError([_absent(name, key, code, noun, f"module {module_name} has no {attribute}")])
    return getattr(module, attribute)


def _unknown(name: str, shipped: Mapping[str, str], key: str, code: str, noun: str) -> Problem:
    near = did_you_mean(name, shipped)
    return Problem(
        code=code,
        key=key,
        what=f"unknown {noun}" + (f", did you mean {near!r}?" if near else ""),
        got=name,
        why="shipped: " + ", ".join(shipped) + "; your own is named package.module:Name",
        fix=f"{key.rpartition('.')[2]}: {near or next(iter(shipped))}",
    )


def _absent(name: str, key: str, code: str, noun: str, why: str) -> Problem:
    fix = "put the folder of your package on PYTHONPATH, or correct the name"
    return Problem(code=code, key=key, what=f"no {noun} can be found there", got=name, why=why, fix=fix)


def unknown_arguments(
    call: Callable[..., Any], kwargs: Mapping[str, object], *, given: tuple[str, ...], key: str, code: str
) -> list[Problem]:
    """What of `kwargs` the callable does not take; `given` are arguments it gets from elsewhere."""
    parameters = inspect.signature(call).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    takes = [n for n, p in parameters.items() if n not in given and p.kind is not p.VAR_POSITIONAL]
    problems = []
    for name in [n for n in kwargs if n not in takes]:
        near = did_you_mean(name, takes)
        problems.append(
            Problem(
                code=code,
                key=f"{key}.{name}",
                what="unknown argument" + (f", did you mean {near!r}?" if near else ""),
                got=f"{name}: {kwargs[name]}",
                span=(0, len(name)),
                why=f"{call.__name__} takes " + (", ".join(takes) or "none"),
                fix=f"{near}: {kwargs[name]}" if near else f"remove {name}",
            )
        )
    return problems
