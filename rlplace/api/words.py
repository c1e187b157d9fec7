"""Conversion of a config and overrides, given as Python values, into command-line arguments."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlplace.api.callables import Config, Overrides
from rlplace.cli.own_job import found_beside, write_config
from rlplace.codes import config_error
from rlplace.config.compose import Composed, override_word, with_hydra
from rlplace.places import place_of_caller

_NAME = "config"  # name of a config that is given as a mapping


def words_of(overrides: Overrides) -> list[str]:
    """Return overrides as command-line arguments. `overrides`: `key=value` words, or a mapping key -> value.

    Raises ConfigError for options such as `--multirun`, and for a single text in place of a list.
    """
    if isinstance(overrides, Mapping):
        return [override_word(key, value) for key, value in overrides.items()]
    if isinstance(overrides, str):
        raise config_error(
            "bad-option",
            "overrides",
            overrides,
            error="overrides-text",
            word=overrides,
        )
    words = list(overrides)
    for word in words:
        if word.startswith("-"):
            raise config_error(
                "bad-option", "overrides", word, error="overrides-option", word=word
            )
    return words


@contextlib.contextmanager
def command_words(config: Config, overrides: Overrides) -> Iterator[list[str]]:
    """Return a context manager that provides the command-line arguments for a config and its overrides.

    `config`: name of a shipped config; a YAML file, in the working folder or beside the calling script; or a mapping,
    which is written to a temporary file for the duration of the `with` statement.
    """
    words = words_of(overrides)
    if isinstance(config, Mapping):
        with tempfile.TemporaryDirectory(prefix="rlplace-") as folder:
            file = write_config(config, Path(folder) / f"{_NAME}.yaml")
            yield [str(file), *words]
        return
    named = str(config)
    if named.endswith(".yaml") and (caller := place_of_caller()) is not None:
        named = str(found_beside(Path(named), caller.file))
    yield [named, *words]


def composed_of(config: Config, overrides: Overrides) -> Composed:
    """Return the composed config of a call in Python. `config`, `overrides`: as in `rlplace.train`."""
    with command_words(config, overrides) as words:
        (composed,) = with_hydra(words)
    return composed


def as_called(function: str, config: Config, overrides: Overrides) -> str:
    """Return a call as text, such as `rlplace.train("cartpole")`, for the record of a run.

    `function`: name of the called function.
    """
    named = "{...}" if isinstance(config, Mapping) else repr(str(config))
    words = words_of(overrides)
    if words:
        named = f"{named}, {words!r}"
    return f"rlplace.{function}({named})"
