"""Problems found while reading a config, and access to mappings by key paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlplace.config.yaml_text import show
from rlplace.errors import Problem, Source, source_of

_NOTHING: Any = object()  # marks a missing value


@dataclasses.dataclass(slots=True)
class Found:
    """Collects problems; each gets the source place of its key, or of the nearest key above it."""

    sources: Mapping[str, Source]
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def reject(
        self,
        code: str,
        key: str,
        what: str,
        value: object = _NOTHING,
        *,
        why: str | None = None,
        fix: str | None = None,
        got: str | None = None,
        span: tuple[int, int] | None = None,
    ) -> None:
        got = got if value is _NOTHING else show(value)
        source = source_of(key, self.sources)
        problem = Problem(
            code=code,
            key=key,
            what=what,
            got=got,
            span=span,
            source=source,
            why=why,
            fix=fix,
        )
        if problem not in self.problems:
            self.problems.append(problem)


def value_at(mapping: Mapping[str, object], path: str) -> object:
    """Return the value at a path of keys; None if there is none."""
    value: object = mapping
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def drop(mapping: Mapping[str, object], path: str) -> None:
    """Remove the key at a path, if it is there."""
    block = value_at(mapping, path.rpartition(".")[0])
    if isinstance(block, dict):
        block.pop(path.rpartition(".")[2], None)
