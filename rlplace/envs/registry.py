"""Finds the adapter a config names and asks it; the one place that knows which adapters are shipped."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from rlplace.errors import ConfigError, Problem, Source, did_you_mean

if TYPE_CHECKING:
    from rlplace.config import SimulatorEnvConfig
    from rlplace.envs.contract import Adapter
    from rlplace.envs.spaces import Spaces

SHIPPED: Mapping[str, str] = {"gymnasium": "rlplace.envs.gymnasium.adapter:GymnasiumAdapter"}
_KEY = "env.kind"


def find_adapter(name: str) -> Adapter:
    """The adapter called `name`: a shipped one, or `package.module:Class` of your own. Raises ConfigError.

    Finding is cheap: an adapter imports its library only when asked something.
    """
    module_name, colon, attribute = SHIPPED.get(name, name).partition(":")
    if not colon:
        raise ConfigError([_unknown(name)])
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the adapter is there; something it imports is not
        raise ConfigError([_not_importable(name, f"there is no module {error.name}")]) from error
    if not hasattr(module, attribute):
        raise ConfigError([_not_importable(name, f"module {module_name} has no {attribute}")])
    return cast("Adapter", getattr(module, attribute)())


def _unknown(name: str) -> Problem:
    near = did_you_mean(name, SHIPPED)
    return Problem(
        code="unknown-adapter",
        key=_KEY,
        what="unknown simulator library" + (f", did you mean {near!r}?" if near else ""),
        got=name,
        why="shipped adapters: " + ", ".join(SHIPPED) + "; your own is named package.module:Class",
        fix=f"kind: {near or next(iter(SHIPPED))}",
    )


def _not_importable(name: str, why: str) -> Problem:
    fix = "put the folder of your package on PYTHONPATH, or correct the name"
    return Problem(code="unknown-adapter", key=_KEY, what="no adapter can be found there", got=name, why=why, fix=fix)


def check(config: SimulatorEnvConfig, sources: Mapping[str, Source] | None = None) -> tuple[Problem, ...]:
    """What can be said against the `env` block without building a simulator.

    Silent where the simulator's library is not installed: a plan needs none. `sources` maps key paths to where they
    were written.
    """
    try:
        problems: Iterable[Problem] = find_adapter(config.kind).check(config)
    except ConfigError as error:
        problems = error.problems
    return _located(problems, sources)


def describe(config: SimulatorEnvConfig, sources: Mapping[str, Source] | None = None) -> Spaces:
    """What the simulator of this config shows and takes, by building one. Raises ConfigError."""
    try:
        return find_adapter(config.kind).describe(config)
    except ConfigError as error:
        raise ConfigError(_located(error.problems, sources)) from error


def _located(problems: Iterable[Problem], sources: Mapping[str, Source] | None) -> tuple[Problem, ...]:
    return tuple(dataclasses.replace(p, source=(sources or {}).get(p.key, p.source)) for p in problems)


def row_seeds(seed: int, first_row: int, rows: int) -> Sequence[int]:
    """Seeds of the simulators of global rows first_row..first_row + rows - 1: the same simulator in every placement."""
    return [random.Random(f"{seed}/{row}").getrandbits(31) for row in range(first_row, first_row + rows)]
