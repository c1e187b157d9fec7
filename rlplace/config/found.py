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
    """Collects problems of a config. Each problem gets the file and line in which its key is set.

    If the key itself is not set, the nearest enclosing key counts. `sources`: config key -> file and line in which its
    value is set.
    """

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
        """Add a problem with the texts that the tables of rlplace/codes have for `code`.

        `code`: name of the kind of problem. `key`: path of the wrong key. `value`: the wrong value, to be shown. `got`:
        the text to show if no `value` is given. `error`: name of the error text, for a code with several. `span`:
        columns of the shown text to mark. `facts`: values to be filled into the texts.
        """
        if value is not _NOTHING:
            got = show(value)
        self.add(problem(code, key, got, error=error, span=span, **facts))

    def add(self, told: Problem) -> None:
        """Add the problem `told` with the file and line of its key, unless an equal problem was added before."""
        located = dataclasses.replace(told, source=source_of(told.key, self.sources))
        if located not in self.problems:
            self.problems.append(located)


def value_at(mapping: Mapping[str, object], path: str) -> object:
    """Return the value at a path such as `actor.optimizer.lr`; None if the config does not have this path."""
    value: object = mapping
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def drop(mapping: Mapping[str, object], path: str) -> None:
    """Remove the key at a path such as `actor.optimizer.lr` from a config. A missing key is ignored."""
    block = value_at(mapping, path.rpartition(".")[0])
    if isinstance(block, dict):
        block.pop(path.rpartition(".")[2], None)
