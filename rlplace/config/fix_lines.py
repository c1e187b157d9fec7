"""Lines of fixes that are pasted together, with all keys of the text in which they are pasted: no key stands twice.

A fix may set a key that the config sets already, and two fixes may set the same key::

    train_freq: 1        -> algorithm.updates_per_step: 1.0
    gradient_steps: 1    -> remove gradient_steps, since the line above says it as well
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from rlplace.config.found import value_at
from rlplace.config.yaml_text import show
from rlplace.errors import COMMAND_LINE, Problem

# A config line; `or: ` and `and: ` begin a further fix
_LINE = re.compile(r"(?!(?:or|and): )[a-z_][\w.]*: .+")
_REMARK = " " * 8


def without_repeats(
    problems: Sequence[Problem], written: Mapping[str, object]
) -> list[Problem]:
    """Return the problems with fixes whose lines can be pasted together. `written`: the config with the problems."""
    said: set[str] = set()
    found = []
    for problem in problems:
        lines = _lines_of(problem)
        if not lines:
            found.append(problem)
            continue
        kept = _kept(problem, lines, written, said)
        said |= {line for line in kept if _is_whole_path(line)}
        found.append(_with_lines(problem, lines, kept))
    return found


def in_kwargs(key: str, near: str, name: str, kwargs: Mapping[str, object]) -> str:
    """Return the line that sets the argument `near` in place of `name`, which is unknown.

    `key`: config key of the arguments `kwargs`. The line has the whole path if the argument is set already.
    """
    line = f"{near}: {show(kwargs[name])}"
    if near not in kwargs or "[" in key:
        return line
    return f"{key}.{line}{_remark([''], name)}"


def _lines_of(problem: Problem) -> list[str]:
    """Return the lines of a fix without its remark; [] if they are no lines of a config file, or are to choose from."""
    source = problem.source
    is_typed = source is not None and str(source.file).startswith(COMMAND_LINE)
    if problem.fix is None or is_typed or "[" in problem.key:
        return []
    lines = [line.partition(_REMARK)[0] for line in problem.fix.split("\n")]
    # The digits behind a decimal comma are no key: the line replaces the number
    if problem.key.rpartition(".")[2].isdecimal():
        return []
    if not all(_LINE.fullmatch(line) for line in lines):
        return []
    return lines


def _kept(
    problem: Problem,
    lines: Sequence[str],
    written: Mapping[str, object],
    said: set[str],
) -> list[str]:
    """Return the lines that a fix needs: those that other fixes do not say, with whole paths of keys that stand."""
    block, _, leaf = problem.key.rpartition(".")
    kept = []
    for line in lines:
        name, _, text = line.partition(": ")
        path = f"{block}.{name}".removeprefix(".")
        standing = value_at(written, path)
        is_other = "." not in name and name != leaf and block and standing is not None
        if is_other and show(standing) == text and len(lines) > 1:
            continue
        if is_other:
            line = f"{path}: {text}"
        if line not in said:
            kept.append(line)
    return kept


def _with_lines(problem: Problem, lines: Sequence[str], kept: Sequence[str]) -> Problem:
    """Return a problem with the lines `kept` as its fix, in place of `lines`; unchanged if they are the same."""
    if [*kept] == [*lines]:
        return problem
    leaf = problem.key.rpartition(".")[2]
    if not kept:
        fix = f"remove {leaf}{_REMARK}(another line says the same)"
        return dataclasses.replace(problem, fix=fix)
    remark = ""
    whole = [line for line in kept if _is_whole_path(line)]
    if len(whole) == len(kept):
        remark = _remark(whole, leaf)
    elif whole:
        remark = f"{_REMARK}(a line with a dot without indent)"
    return dataclasses.replace(problem, fix="\n".join(kept) + remark)


def _remark(lines: Sequence[str], name: str) -> str:
    """Return the remark on lines with whole paths, which stand in place of the key `name`."""
    form = "a line" if len(lines) == 1 else "lines"
    return f"{_REMARK}({form} without indent, in place of {name})"


def _is_whole_path(line: str) -> bool:
    """Return whether a line has the whole path of its key."""
    return "." in line.partition(": ")[0]
