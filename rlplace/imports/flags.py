"""Words of a command line -> settings, by a table of the flags that a library has."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from rlplace.errors import ConfigError, Problem, Source
from rlplace.imports.settings import Setting, scalar
from rlplace.imports.shell import UnclosedQuote, Word, entry_words

MANY = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """How a flag is written: the names beside its key, and how many words follow it (MANY: up to the next flag)."""

    words: int = 1
    aliases: tuple[str, ...] = ()


def words_of(text: str, file: str) -> tuple[list[Word], str]:
    """The words of a command or script, and what to call it. Raises ConfigError for a quote that is never closed.

    `file` is empty for what was typed.
    """
    try:
        return entry_words(text, script=bool(file)), file or "command line"
    except UnclosedQuote as error:
        lines = text.splitlines()
        got = lines[error.line - 1].strip() if lines else ""
        source = Source(file=file or "command line", line=error.line if file else None)
        raise ConfigError(
            [
                Problem(
                    code="import-quote",
                    key="import",
                    what="a quote is opened and never closed",
                    got=got,
                    source=source,
                    why="the words of a command are read as a shell would read them",
                    fix="close the quote",
                )
            ]
        ) from error


def read_flags(text: str, file: str, table: Mapping[str, Flag]) -> list[Setting]:
    """The flags of a command or script, in order; unknown ones take the words up to the next flag.

    `file` is empty for text typed on the command line. Raises ConfigError when a flag lacks its value.
    """
    words, name = words_of(text, file)
    names = {alias: key for key, flag in table.items() for alias in (key, *flag.aliases)}
    settings: list[Setting] = []
    problems: list[Problem] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        source = Source(file=name, line=word.line if file else None)
        if not word.text.startswith("--") or len(word.text) < 3:
            settings.append(Setting(key=word.text, value=None, written=word.text, source=source))
            continue
        spelled, equals, inline = word.text[2:].partition("=")
        key = names.get(spelled, spelled)
        values = [inline] if equals else _values(words, at, table.get(key))
        at += 0 if equals else len(values)
        written = " ".join([word.text, *([] if equals else map(shlex.quote, values))])
        flag = table.get(key)
        if flag is not None and flag.words > 0 and len(values) < flag.words and not (equals and flag.words == 1):
            problems.append(_short(key, word.text, flag.words, source))
        settings.append(Setting(key=key, value=_value(values, flag), written=written, source=source))
    if problems:
        raise ConfigError(problems)
    return settings


def _values(words: Sequence[Word], at: int, flag: Flag | None) -> list[str]:
    """The words that belong to the flag before position `at`."""
    most = len(words) if flag is None or flag.words == MANY else flag.words
    values: list[str] = []
    for word in words[at:]:
        if len(values) == most or (word.text.startswith("--") and len(word.text) > 2):
            break
        values.append(word.text)
    return values


def _value(values: Sequence[str], flag: Flag | None) -> object:
    if not values:
        return True
    if len(values) == 1 and (flag is None or flag.words in (0, 1)):
        return scalar(values[0])
    return tuple(map(scalar, values))


def _short(key: str, written: str, words: int, source: Source) -> Problem:
    return Problem(
        code="import-flag-value",
        key=key,
        what="its value is missing" if words == 1 else f"takes {words} values",
        got=written,
        source=source,
        why="the next word is another flag, or there is none",
        fix=f"{written} VALUE" + " VALUE" * (words - 1),
    )
