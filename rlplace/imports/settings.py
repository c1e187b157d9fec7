"""Read files, `key=value` words and flags of other libraries as settings, each with the place where it was written."""

from __future__ import annotations

import dataclasses
import operator
import re
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlplace.codes import config_error, problem
from rlplace.config.keys import PLACEMENT
from rlplace.config.yaml_text import line_sources, not_yaml, show
from rlplace.errors import ConfigError, Problem, Source, did_you_mean
from rlplace.imports.shell import UnclosedQuote, entry_words
from rlplace.units import clipped

MANY = -1  # any number of words follow the flag
OPTIONAL = -2  # one word follows the flag, or none
_LONGEST = 90  # longest text of a setting that is shown
_OVERRIDE = re.compile(r"(\+{0,2}|~)([\w.@/-]+)=(.*)", re.DOTALL)
_NUMBER = re.compile(
    r"[-+]?(?:[0-9][0-9_]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9]+(?:[eE][-+]?[0-9]+)?"
)
_WORDS = {"true": True, "false": False, "null": None, "none": None, "~": None}
_EXPRESSION = re.compile(r"\$\{([^${}]+)\}")  # innermost expressions only
_LONGEST_VALUE = 10_000  # most characters of a value after references are replaced
_LARGEST = 2**63  # limit for computed numbers
_LONGEST_CHAIN = 100  # most references in a chain; OmegaConf allows fewer
_NOWHERE: object = object()  # result of an expression that cannot be resolved
_RESOLVERS: Mapping[str, Callable[[Any, Any], object]] = {
    "add": operator.add,
    "multiply": operator.mul,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
    "subtract": operator.sub,
    "int_div": operator.floordiv,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of another library.

    `key`: its name, in the newest spelling. `written`: the original text on one line. `source`: the file and line where
    it was written.
    """

    key: str
    value: object
    written: str
    source: Source | None = None

    def __str__(self) -> str:
        return self.written


def scalar(text: str) -> object:
    """Return the value of a word on a command line: a number, a boolean, None, or the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _NUMBER.fullmatch(text):
        plain = text.replace("_", "")
        if re.search(r"[.eE]", plain):
            return float(plain)
        return int(plain)
    return text


def text_of(path: Path) -> str:
    """Return the text of a file. Raises ConfigError for a file that cannot be read, and that is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = did_you_mean(path.name, beside)
        similar = None
        if near:
            similar = path.with_name(near)
        raise config_error(
            "import-source",
            "import",
            str(path),
            error="unread",
            said=(error.strerror or "cannot be read").lower(),
            similar=similar,
        ) from error
    except UnicodeDecodeError as error:
        raise config_error(
            "import-source", "import", str(path), error="binary", reason=str(error)
        ) from error


def read_yaml(text: str, file: str) -> list[Setting]:
    """Return the settings of a YAML text, one for each key whose value is not a block. `file`: its name, for errors.

    Raises ConfigError if the text is not YAML, or if it is not a mapping.
    """
    return leaves_of(read_block(text, file), line_sources(text, file))


def read_block(text: str, file: str) -> dict[str, Any]:
    """Return the mapping of a YAML text. `file`: its name, for errors.

    Raises ConfigError if the text is not YAML, or if it is not a mapping.
    """
    try:
        mapping = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise not_yaml(error, file, "import-yaml", "import") from error
    if not isinstance(mapping, dict):
        got = text.strip().split("\n", 1)[0]
        raise config_error("import-yaml", "import", got, error="no-block")
    return mapping


def settings_of(
    mapping: Mapping[Any, Any], sources: Mapping[str, Source] | None = None
) -> list[Setting]:
    """Return the settings of a whole config, one for each key whose value is not a block, with each `${...}` resolved.

    `sources`: dotted key -> file and line.
    """
    return resolved(leaves_of(mapping, sources))


def leaves_of(
    mapping: Mapping[Any, Any], sources: Mapping[str, Source] | None = None
) -> list[Setting]:
    """Return the settings of a nested mapping, one for each key whose value is not a block.

    Each `${...}` stays as written. A placement line is one setting, also if it is a block. `sources`: dotted key ->
    file and line.
    """
    found: list[Setting] = []
    for key, value in _leaves(mapping):
        written = clipped(" ".join(f"{key}: {show(value)}".split()), _LONGEST)
        found.append(
            Setting(
                key=key, value=value, written=written, source=(sources or {}).get(key)
            )
        )
    return found


def resolved(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings with each `${...}` replaced by its value. One that cannot be resolved stays as written.

    If a key is given twice, its last value is used.
    """
    settings = [each for s in settings for each in (s, *_of_block(s, settings))]
    given = {s.key: _absolute(s.value, s.key) for s in settings}
    known = dict.fromkeys(given, _NOWHERE)
    # Each round resolves the settings that refer to resolved ones.
    for _ in range(_LONGEST_CHAIN):
        known |= {
            key: _expand(value, known)
            for key, value in given.items()
            if known[key] is _NOWHERE
        }
    found: list[Setting] = []
    for setting in settings:
        value = _expand(_absolute(setting.value, setting.key), known)
        value = setting.value if value is _NOWHERE else value
        if isinstance(value, str) and not setting.key.startswith(f"{PLACEMENT}."):
            value = scalar(value)
        found.append(dataclasses.replace(setting, value=value))
    return found


def _of_block(setting: Setting, settings: Sequence[Setting]) -> Iterator[Setting]:
    """Yield the settings of a block for which a value such as `${actor.optimizer}` stands. `settings`: all settings."""
    value = setting.value
    match = _EXPRESSION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return
    for other in settings:
        if other.key.startswith(f"{match[1]}."):
            key = setting.key + other.key.removeprefix(match[1])
            yield dataclasses.replace(other, key=key, source=setting.source)


def _absolute(value: object, key: str) -> object:
    """Return a value in which each relative reference, `${.a}` or `${..a}`, names a whole key. `key`: the value's."""

    def absolute(match: re.Match[str]) -> str:
        parents = key.split(".")[: -len(match[1])]
        return "${" + ".".join([*parents, match[2]])

    if not isinstance(value, str) or "${." not in value:
        return value
    return re.sub(r"\$\{(\.+)(\w[\w.]*)", absolute, value)


def _expand(value: object, known: Mapping[str, object]) -> object:
    """Return a value with each `${...}` in it replaced; `_NOWHERE` if one of them cannot be resolved.

    In a block, entries that cannot be resolved stay as written. `known`: key -> value.
    """
    if isinstance(value, Mapping):
        parts = {name: (_expand(part, known), part) for name, part in value.items()}
        return {
            name: part if found is _NOWHERE else found
            for name, (found, part) in parts.items()
        }
    while isinstance(value, str) and (match := _EXPRESSION.search(value)):
        inner = _evaluate(match[1], known)
        if inner is _NOWHERE or len(value) > _LONGEST_VALUE:
            return _NOWHERE
        whole = match.span() == (0, len(value))
        value = (
            inner
            if whole
            else f"{value[: match.start()]}{show(inner)}{value[match.end() :]}"
        )
    return value


def _evaluate(expression: str, known: Mapping[str, object]) -> object:
    """Return the value of an expression; `_NOWHERE` if it cannot be resolved.

    An expression is `a.b`, `oc.select:a.b,default`, or one of RLinf's own resolvers, such as `multiply:2, 3`. `known`:
    key -> value.
    """
    name, colon, words = expression.partition(":")
    if not colon:
        return known.get(name, _NOWHERE)
    values = [scalar(word.strip()) for word in words.split(",")]
    match name, values:
        case "oc.select", [str(key), *default] if not key.startswith("."):
            return known.get(key, next(iter(default), _NOWHERE))
        case "not", [value]:
            return not value
        case _, [int() | float() as a, int() | float() as b] if name in _RESOLVERS and (
            b or name not in ("int_div", "div")
        ):
            if max(abs(a), abs(b)) < _LARGEST:
                return _RESOLVERS[name](a, b)
            return _NOWHERE
    return _NOWHERE


def override_value(text: str) -> object:
    """Return the value of the right side of a `key=value` word, as Hydra reads it.

    A text in quotes is this text. `[a, 'b']` is a list. Any other text is a scalar.
    """
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.startswith("[") and text.endswith("]"):
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            return text
        if isinstance(value, list):
            return value
    return scalar(text)


def read_overrides(
    text: str, file: str, variables: Mapping[str, str] | None = None
) -> list[Setting]:
    """Return the settings in the `key=value` words of a command or script.

    A word of any other form becomes a setting without a value. `file`: name of the script; "" for words typed on the
    command line. `variables`: variables of the environment that a script may use.
    """
    return overrides_of(words_of(text, file, variables))


def overrides_of(words: Iterable[tuple[str, Source]]) -> list[Setting]:
    """Return the settings in `key=value` words. `words`: (word, where it was written)."""
    settings: list[Setting] = []
    for word, source in words:
        match = _OVERRIDE.fullmatch(word)
        key, value = (match[2], override_value(match[3])) if match else (word, None)
        settings.append(
            Setting(key=key, value=value, written=" ".join(word.split()), source=source)
        )
    return settings


def read_flags(
    text: str,
    file: str,
    words_after: Mapping[str, int],
    keys: Iterable[str],
    older: Mapping[str, str],
    variables: Mapping[str, str] | None = None,
) -> list[Setting]:
    """Return the settings in the flags of a command or script, in their order.

    `file`: name of the script; "" for words typed on the command line. `words_after`, `keys`, `older`: as in
    `flags_of`. `variables`: variables of the environment that a script may use. Raises ConfigError if a flag lacks its
    value.
    """
    return flags_of(words_of(text, file, variables), words_after, keys, older)


def flags_of(
    written_words: Iterable[tuple[str, Source]],
    words_after: Mapping[str, int],
    keys: Iterable[str],
    older: Mapping[str, str],
) -> list[Setting]:
    """Return the settings in flags, in their order.

    `written_words`: (word, where it was written). `words_after`: flag -> number of words that follow it; 1 for a flag
    that is not in it. `keys`: known flags; an unknown flag takes all words up to the next flag. `older`: older spelling
    -> newest spelling. Raises ConfigError if a flag lacks its value.
    """
    words = deque(written_words)
    known = frozenset(keys)
    settings: list[Setting] = []
    problems: list[Problem] = []
    while words:
        word, source = words.popleft()
        if not _is_flag(word):
            settings.append(
                Setting(
                    key=word, value=None, written=" ".join(word.split()), source=source
                )
            )
            continue
        spelled, equals, inline = word[2:].partition("=")
        key = older.get(spelled, spelled)
        count = words_after.get(key, 1) if key in known else None
        most = (
            len(words) if count in (None, MANY) else 1 if count == OPTIONAL else count
        )
        values = [inline] if equals else []
        while words and not equals and len(values) < most and not _is_flag(words[0][0]):
            values.append(words.popleft()[0])
        if count is not None and len(values) < count and not (equals and count == 1):
            error = "several"
            if count == 1:
                error = "one"
            missing = problem(
                "import-flag-value",
                key,
                word,
                error=error,
                source=source,
                count=count,
                example=" ".join([word, *["VALUE"] * count]),
            )
            problems.append(missing)
        written = " ".join([word, *([] if equals else map(shlex.quote, values))])
        single = len(values) == 1 and count in (None, 0, 1, OPTIONAL)
        value = (
            True
            if not values
            else scalar(values[0])
            if single
            else tuple(map(scalar, values))
        )
        settings.append(
            Setting(
                key=key, value=value, written=" ".join(written.split()), source=source
            )
        )
    if problems:
        raise ConfigError(problems)
    return settings


def _is_flag(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


def words_of(
    text: str, file: str, variables: Mapping[str, str] | None
) -> list[tuple[str, Source]]:
    """Return the words of a command or script, each with the place where it was written.

    `file`: name of the script; "" for words typed on the command line. `variables`: variables of the environment.
    Raises ConfigError for a quote that is not closed.
    """

    def source(line: int) -> Source:
        if file:
            return Source(file=file, line=line)
        return Source(file="command line")

    try:
        return [
            (word.text, source(word.line))
            for word in entry_words(text, script=bool(file), variables=variables)
        ]
    except UnclosedQuote as error:
        got = text.splitlines()[error.line - 1].strip()
        place = source(error.line)
        raise config_error("import-quote", "import", got, source=place) from error


def _leaves(
    mapping: Mapping[Any, Any], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) for each key of a nested mapping whose value is not a block.

    A placement line is yielded whole, also if it is a block. `prefix`: what all keys begin with.
    """
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and not key.startswith(f"{PLACEMENT}."):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def read_mapping(text: str) -> dict[str, Any]:
    """Return the mapping in the text of a shipped YAML file."""
    mapping: dict[str, Any] = yaml.safe_load(text)
    return mapping
