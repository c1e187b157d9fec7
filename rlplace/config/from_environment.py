"""Config values from environment variables, `${oc.env:NAME}`: their files and lines, and fixes for errors."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlplace.errors import Problem, Source, source_of

_VARIABLE = re.compile(r"\$\{oc\.env:\s*([^,{}\s]+)\s*(?:,[^{}]*)?\}")


def of_environment(
    written: object, sources: Mapping[str, Source], key: str = ""
) -> dict[str, Source]:
    """Return config key -> file and line, for each value that comes from an environment variable.

    The field `written` of each returned Source is the text `${oc.env:NAME}`. `written`: the config, or a value in it,
    before references `${...}` are replaced. `sources`: config key -> file and line in which its value is set. `key`:
    path of `written`; "" for the whole config.
    """
    if isinstance(written, Mapping):
        below = [
            of_environment(value, sources, f"{key}.{name}".removeprefix("."))
            for name, value in written.items()
        ]
        return {path: source for found in below for path, source in found.items()}
    if isinstance(written, list):
        below = [
            of_environment(value, sources, f"{key}[{at}]")
            for at, value in enumerate(written)
        ]
        return {path: source for found in below for path, source in found.items()}
    if not isinstance(written, str) or not _VARIABLE.fullmatch(written):
        return {}
    source = source_of(key, sources)
    if source is None:
        return {}
    return {key: dataclasses.replace(source, written=written)}


def with_numbers(
    mapping: Mapping[str, Any],
    sources: Mapping[str, Source],
    problems: Sequence[Problem],
) -> dict[str, Any] | None:
    """Return a copy of a config in which texts of environment variables are numbers and switches where these are due.

    Return None if that changes nothing. `problems`: the problems of the config as it is; a key counts if its type is
    wrong, it comes from an environment variable, and the variable's text is a number, `true` or `false`.
    """
    changed = copy.deepcopy(dict(mapping))
    found = False
    for problem in problems:
        source = sources.get(problem.key)
        # A key that takes a number or a word says that the text is no such word
        due = problem.code in ("wrong-type", "unknown-choice")
        if not due or source is None or source.written is None:
            continue
        *above, last = _steps(problem.key)
        block: Any = changed
        for step in above:
            block = _below(block, step)
        value = _plain(_below(block, last))
        if value is not None:
            block[last] = value
            found = True
    return changed if found else None


def _steps(key: str) -> list[str | int]:
    """Return the names and the places in lists of a key path: `a.b[1]` -> ["a", "b", 1]."""
    parts = re.findall(r"[^.\[\]]+", key)
    return [int(part) if part.isdecimal() else part for part in parts]


def _below(block: Any, step: str | int) -> Any:
    """Return the value at a name in a mapping, or at a place in a list; None if there is none."""
    if isinstance(block, Mapping):
        return block.get(step)
    if isinstance(block, list) and isinstance(step, int) and step < len(block):
        return block[step]
    return None


def _plain(text: Any) -> int | float | bool | None:
    """Return the number or the switch that a text stands for; None if it stands for neither."""
    if not isinstance(text, str):
        return None
    word = text.strip()
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if re.fullmatch(r"[+-]?\d+", word):
        return int(word)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", word):
        return float(word)
    return None


def decoded(leaf: str, variable: str, fits: bool) -> str:
    """Return a remedy for a key that gets a text from an environment variable but needs a value of another type.

    The remedy is text for an error. It uses `oc.decode`, which reads the text as YAML. `leaf`: last part of the key.
    `variable`: the text `${oc.env:NAME}`. `fits`: whether the variable's text, read as YAML, is a valid value; if not,
    the remedy also says to set the variable.
    """
    if fits:
        return f"{leaf}: ${{oc.decode:{variable}}}"
    match = _VARIABLE.fullmatch(variable)
    assert match is not None, "only variables are noted"
    return f"export {match[1]}=<such a value>        (with {leaf}: ${{oc.decode:{variable}}})"


def with_default(written: str, name: str) -> str:
    """Return the text `written` with `${oc.env:<name>}` replaced by `${oc.env:<name>,<a default>}`."""
    return written.replace(f"${{oc.env:{name}}}", f"${{oc.env:{name},<a default>}}")
