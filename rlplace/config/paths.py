"""Paths in configs and on command lines: `~` is the home folder, and a path may contain `=`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HOME = re.compile(r"~[\w.-]*/|~$")  # beginning of a path in a home folder
# Keys whose values are texts and never paths.
_TEXTS = (
    "env.system",
    "env.template",
    "rollout.stop",
)
_LISTED = "profile"  # the key whose value is a list of paths, separated by commas
# An unquoted path in a home folder: the value of a key, or an entry of a list or block.
_BARE_HOME = re.compile(r"(?:^|(?<=[\[,:]))(\s*)(~[\w.-]*/[^\s,:\[\]{}'\"\\$]*)")
# An unquoted path in a home folder, in which blanks are allowed
_WHOLE_HOME = re.compile(r"~[\w.-]*/[^,:\[\]{}'\"\\$]*")
_BARE_PATH = re.compile(r"(?=.*/)[\w./~@%+=-]+")


def at_home(path: str) -> str:
    """Return a path with `~` or `~name` at its beginning replaced by the home folder."""
    if _HOME.match(path):
        return os.path.expanduser(path)
    return path


def with_homes(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config with `~` expanded in all values and names that begin with `~/` or `~name/`.

    Values of keys that are texts instead of paths, such as `rollout.stop`, are not changed.
    """
    return {key: _expanded(value, str(key)) for key, value in mapping.items()}


def _expanded(value: Any, key: str) -> Any:
    if key in _TEXTS:
        return value
    if isinstance(value, Mapping):
        # Names may be paths too, as of data sets with their weights
        return {
            at_home(name) if isinstance(name, str) else name: _expanded(
                below, f"{key}.{name}"
            )
            for name, below in value.items()
        }
    if isinstance(value, list):
        return [_expanded(each, key) for each in value]
    if not isinstance(value, str):
        return value
    if key == _LISTED:
        return ",".join(at_home(path.strip()) for path in value.split(","))
    return at_home(value)


def names_file(word: str) -> bool:
    """Return whether a command-line word is the path of an existing config file.

    The path may contain `=`, as in `runs/lr=0.1/config.yaml`.
    """
    return word.endswith(".yaml") and Path(at_home(word)).is_file()


def names_config(word: str) -> bool:
    """Return whether a command-line word names a config, in contrast to an override such as `key=value` or `~key`.

    `word`: a word without leading dashes.
    """
    return names_file(word) or ("=" not in word and not word.startswith("~"))


def readable(word: str) -> str:
    """Return an override in a form that Hydra can read: paths with `~`, `=` or non-ASCII characters get quotes.

    A word that is not an override, or that already has quotes, is returned unchanged.
    """
    key, equals, value = word.partition("=")
    if (
        not equals
        or word.startswith("-")
        or names_file(word)
        or any(quote in value for quote in "'\"")
    ):
        return word
    if key == _LISTED and ("~" in value or "=" in value):
        return f'{key}="{value}"'
    if ("=" in value or not value.isascii()) and _BARE_PATH.fullmatch(value):
        return f'{key}="{value}"'
    if _WHOLE_HOME.fullmatch(value):
        return f'{key}="{value}"'
    return f"{key}=" + _BARE_HOME.sub(r'\1"\2"', value)


def unquoted(value: str) -> str:
    """Return the path that is the value of an override, without its quotes and with `~` expanded."""
    quoted = re.fullmatch(r"""(['"])(.*)\1""", value)
    return at_home(quoted[2] if quoted else value)
