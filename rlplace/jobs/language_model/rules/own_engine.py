"""Rules of a custom engine, which the user has written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule, broken
from rlplace.config.blocks.language_model import TextRolloutConfig
from rlplace.envs.registry import named, unknown_arguments
from rlplace.errors import ConfigError, Problem

_KEY = "rollout.engine"
# Required methods of `engines.contract.TextEngine`
_METHODS = ("move", "load", "close", "submit", "step", "drop", "logprobs")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnEngine:
    """A custom engine. `name`: its name in the config. `found`: the Python object that was imported by this name."""

    name: str
    found: object


def own_engine_problems(rollout: TextRolloutConfig) -> Iterator[Problem]:
    """Yield the problems of the custom engine `rollout.engine`.

    Problems: it cannot be imported, is not a class, does not take `rollout.engine_args`, or lacks methods of
    `TextEngine`.
    """
    name = rollout.engine
    try:
        found = named(name, {}, key=_KEY, code="unknown-engine", noun="engine")
    except ConfigError as error:
        yield from error.problems
        return
    case = OwnEngine(name=name, found=found)
    if isinstance(found, type):
        yield from unknown_arguments(
            found,
            rollout.engine_args,
            given=("settings", "device", "owner"),
            key="rollout.engine_args",
            code="engine-args",
        )
    yield from broken(RULES, case)


def _is_class(case: OwnEngine) -> bool:
    return isinstance(case.found, type)


def _no_class(case: OwnEngine) -> Iterator[Found]:
    """Yield a finding if the custom engine is not a class."""
    if not _is_class(case):
        yield Found(
            key=_KEY,
            got=case.name,
            error="no-class",
            facts={"kind": type(case.found).__name__},
        )


def _lacks_methods(case: OwnEngine) -> Iterator[Found]:
    """Yield a finding if the class of the custom engine lacks methods of `TextEngine`."""
    lacking = []
    for method in _METHODS:
        if not callable(getattr(case.found, method, None)):
            lacking.append(method)
    if lacking:
        yield Found(
            key=_KEY,
            got=case.name,
            error="lacks-methods",
            facts={"lacking": ", ".join(lacking), "first": lacking[0]},
        )


RULES: tuple[Rule[OwnEngine], ...] = (
    Rule(code="unknown-engine", facts=_no_class),
    Rule(code="unknown-engine", applies=_is_class, facts=_lacks_methods),
)
