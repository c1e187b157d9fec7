"""Config text as its user wrote it, so that a problem can point at a column of it and offer a line to paste."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlplace.errors import Problem, Source, did_you_mean
from rlplace.placement.machines.ranges import Mistake, split_at, stripped
from rlplace.structure import show

PATH = "cluster.component_placement"
LONGEST = 160  # characters of a text that an error repeats; around the mistake where there are more
_ONE_LINE = str.maketrans("\n\r\t", "   ")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One value of the config, on one line; problems point into its text."""

    key: str  # key path
    leaf: str  # the last key verbatim, such as "actor,rollout"
    value: object
    text: str
    items: tuple[tuple[int, int, object], ...]  # columns and value of each list item; one for a plain value
    source: Source | None = None

    def problem(self, mistake: Mistake, *, fix: str | None = None) -> Problem:
        """`fix` is a whole line; without it the mistake's own replacement is put into the text."""
        start, stop = mistake.span
        if fix is None and mistake.replacement is not None:
            if len(self.text) <= LONGEST:
                fix = self.line(self.text[:start] + mistake.replacement + self.text[stop:])
            else:
                fix = f"write {mistake.replacement} instead of {self.text[start:stop]}"
        got, span = _around(self.text, mistake.span)
        return Problem(
            code=mistake.code,
            key=self.key,
            what=mistake.what,
            got=got,
            span=span,
            source=self.source,
            why=mistake.why,
            fix=fix,
        )

    def whole(self, code: str, what: str, why: str, fix: str) -> Problem:
        """A problem of the value as a whole: the caret marks all of it."""
        return self.problem(Mistake(code=code, what=what, span=(0, len(self.text)), why=why), fix=fix)

    def line(self, value: str) -> str:
        """`actor: 0-7`, quoted where YAML would read a number out of it."""
        quoted = f'"{value}"' if re.fullmatch(r"[0-9:]*:[0-9:]*", value) else value
        return f"{self.leaf}: {quoted}"

    def part(self, span: tuple[int, int], index: int) -> tuple[int, int]:
        """Columns of what stands before (0) or, where written, after (1) the colon inside `span`."""
        parts = list(split_at(self.text, ":", *span))
        return stripped(self.text, *parts[min(index, len(parts) - 1)])


def _around(text: str, span: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """`text` and `span`, cut to what is near the span where the text is very long."""
    if len(text) <= LONGEST:
        return text, span
    start = max(0, span[0] - LONGEST // 2)
    stop = min(len(text), start + LONGEST)
    left = "... " if start else ""
    shift = len(left) - start
    cut = left + text[start:stop] + (" ..." if stop < len(text) else "")
    return cut, (span[0] + shift, min(span[1], stop) + shift)


def write_down(path: str, leaf: str, value: object, sources: Mapping[str, Source]) -> Written:
    """The value at key `leaf` below `path` as one line of text with the columns of its items; reads nothing yet."""
    key = f"{path}.{leaf}"
    items: list[tuple[int, int, object]] = []
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        text = "["
        for item in value:
            text += ", " if items else ""
            shown = show(item).translate(_ONE_LINE)
            items.append((len(text), len(text) + len(shown), item))
            text += shown
        text += "]"
    else:
        text = show(value).translate(_ONE_LINE).strip()
        items.append((0, len(text), value))
    return Written(key=key, leaf=leaf, value=value, text=text, items=tuple(items), source=source_of(key, sources))


def source_of(key: str, sources: Mapping[str, Source]) -> Source | None:
    """Where `key`, or the nearest key above it, was written."""
    while key:
        if key in sources:
            return sources[key]
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return None


def check_keys(
    mapping: Mapping[Any, object], known: Collection[str], path: str, sources: Mapping[str, Source]
) -> list[Problem]:
    """Keys of a block that mean nothing there."""
    problems: list[Problem] = []
    for key in map(str, mapping):
        if key in known:
            continue
        near = did_you_mean(key, [k for k in known if k not in mapping])
        value = show(next(v for k, v in mapping.items() if str(k) == key)).translate(_ONE_LINE)
        problems.append(
            Problem(
                code="unknown-key",
                key=f"{path}.{key}",
                what="unknown key" + (f", did you mean {near!r}?" if near else ""),
                got=f"{key}: {value}",
                span=(0, max(1, len(key))),
                source=source_of(f"{path}.{key}", sources),
                why="known keys here: " + ", ".join(known),
                fix=f"{near}: {value}" if near else f"remove {key}",
            )
        )
    return problems


def count_at(path: str, leaf: str, value: object, sources: Mapping[str, Source]) -> int | Problem:
    """A whole number of at least 1."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    written = write_down(path, leaf, value, sources)
    return written.whole("bad-count", "expected a whole number of at least 1", "it counts things", f"{leaf}: 1")
