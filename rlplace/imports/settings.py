"""What a config or command line of another library says, one setting at a time, each with the place it was written."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlplace.config.show import show
from rlplace.errors import Source

_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9]+(?:[eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None, "none": None, "~": None}
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One thing that was set. `key` is the library's own newest spelling, `written` the one that stands there."""

    key: str
    value: object
    written: str
    source: Source | None = None

    def __str__(self) -> str:
        return self.written


def scalar(text: str) -> object:
    """A word as the value it means: number, truth, nothing, or text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _NUMBER.fullmatch(text):
        plain = text.replace("_", "")
        return float(plain) if re.search(r"[.eE]", plain) else int(plain)
    return text


def flatten(mapping: Mapping[Any, Any], prefix: str = "", *, whole: Iterable[str] = ()) -> Iterator[tuple[str, object]]:
    """Dotted key and value of every leaf; the blocks named in `whole` are kept as they are."""
    kept = tuple(whole)
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in kept:
            yield from flatten(value, f"{key}.", whole=kept)
        else:
            yield key, value


def settings_of(
    mapping: Mapping[Any, Any], sources: Mapping[str, Source], *, whole: Iterable[str] = ()
) -> list[Setting]:
    """The leaves of a nested mapping; `${a.b}` is replaced by what stands there, where something does."""
    leaves = dict(flatten(mapping, whole=whole))
    found: list[Setting] = []
    for key, value in leaves.items():
        resolved = _resolved(value, leaves)
        if isinstance(resolved, str) and key not in whole:
            resolved = scalar(resolved)
        written = f"{key}: {show(value)}"
        found.append(Setting(key=key, value=resolved, written=_shortened(written), source=sources.get(key)))
    return found


def _resolved(value: object, leaves: Mapping[str, object]) -> object:
    """Follows references; one that leads nowhere, or in a circle, stays as written."""
    seen: set[str] = set()
    while isinstance(value, str) and (match := _REFERENCE.fullmatch(value)):
        if match[1] in seen or match[1] not in leaves:
            return value
        seen.add(match[1])
        value = leaves[match[1]]
    return value


def _shortened(text: str, limit: int = 90) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 4] + " ..."
