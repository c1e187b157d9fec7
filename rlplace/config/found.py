"""Problems found while reading a config, and access to mappings by key paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlplace.codes import problem
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
        value: object = _NOTHING,
        *,
        error: str = "",
        got: str | None = None,
        span: tuple[int, int] | None = None,
        **facts: Any,
    ) -> None:
        """Add a problem with the texts of its code; `error`, `span` and `facts` are those of `codes.problem`.

        `value`: what is written at the key. `got`: the text of it, where that is more than the value.
        """
        if value is not _NOTHING:
            got = show(value)
        self.add(problem(code, key, got, error=error, span=span, **facts))

    def add(self, told: Problem) -> None:
        """Add a problem, if it is new."""
        located = dataclasses.replace(told, source=source_of(told.key, self.sources))
        if located not in self.problems:
            self.problems.append(located)


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
