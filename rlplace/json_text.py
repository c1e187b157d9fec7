"""Reads JSON: a text that is damaged, nested too deeply or not in UTF-8 gives an error with a readable reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlplace.codes import config_error


def parsed(
    text: str | bytes,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Return the value of a JSON text. `pairs`: makes the value of each object from its (name, value) pairs.

    Raises ValueError with the reason: the text is no JSON, ends too early, is not in UTF-8, or is nested so deeply that
    Python cannot read it.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        # A RecursionError has a long traceback, and its text is about Python, not about the JSON
        raise ValueError("it is nested too deeply") from None


def parsed_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a text. Raises ValueError as `parsed` does, and for another value than an object."""
    found = parsed(text)
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}, not an object")
    return found


def read_object(file: Path, key: str) -> dict[str, Any]:
    """Return the JSON object in a file. `key`: the config key or option by which the file was found, for errors.

    Raises FileNotFoundError, and ConfigError for a file that cannot be read or has no JSON object.
    """
    try:
        return parsed_object(file.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise config_error(
            "damaged-json", key, str(file), reason=f"{type(error).__name__}: {error}"
        ) from error
