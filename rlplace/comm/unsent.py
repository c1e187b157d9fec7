"""Errors for values that cannot be sent to another process. They name the part of the value that cannot be sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlplace.codes import problem
from rlplace.errors import NotSent
from rlplace.units import clipped

# Parts of parts of ... that are looked at
_DEEPEST = 8


def not_sent(
    value: object, noun: str, cause: Exception, dumps: Callable[[Any], object]
) -> NotSent:
    """Return the error for a value that cannot be sent; it names the smallest part that cannot be sent.

    `noun`: word for the value, such as "item". `cause`: the error of pickling. `dumps`: pickles a value, or raises.
    """
    path, part = _smallest(value, noun, dumps)
    return NotSent(
        problem(
            "not-sent",
            path,
            f"{type(part).__name__}: {clipped(str(part), 80)}",
            noun=noun,
            cause=f"{type(cause).__name__}: {cause}",
        )
    )


def is_sent(value: object, dumps: Callable[[Any], object]) -> bool:
    """Return whether `dumps`, which pickles a value, succeeds on `value`."""
    try:
        dumps(value)
    except Exception:  # noqa: BLE001 -- runs __reduce__ of arbitrary classes
        return False
    return True


def _smallest(
    value: object, path: str, dumps: Callable[[Any], object]
) -> tuple[str, object]:
    """Return the path and the value of the smallest part of `value` that `dumps` cannot pickle.

    `path`: path of `value` in the value to send.
    """
    for _ in range(_DEEPEST):
        for name, part in _parts(value):
            if not is_sent(part, dumps):
                path += name
                value = part
                break
        else:
            break
    return path, value


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield (index or attribute as a text, part) for each part of a mapping, list, tuple or dataclass."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield f"[{key!r}]", part
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield f"[{number}]", part
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield f".{field.name}", getattr(value, field.name)
