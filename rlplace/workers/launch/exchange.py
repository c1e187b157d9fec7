"""Replace values of a type inside the arguments of a call.

Channels are passed this way: the driver's end is replaced by an address for the transfer, and the address by the
worker's own end on arrival.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

_DEPTH = 4  # nesting of lists, tuples, dictionaries and dataclasses
T = TypeVar("T")


def exchanged(
    value: Any, kinds: tuple[type, ...], by: Callable[[Any], Any], depth: int = _DEPTH
) -> Any:
    """Return a copy of `value` in which each instance `x` of the types `kinds` is replaced by `by(x)`.

    Instances inside lists, tuples, dictionaries and dataclasses are replaced too, at most `depth` levels deep. Return
    `value` itself if it contains no such instance.
    """
    if isinstance(value, kinds):
        return by(value)
    if depth == 0:
        return value
    if type(value) in (list, tuple):
        items = [exchanged(item, kinds, by, depth - 1) for item in value]
        return _kept_or(value, items, value, type(value))
    if type(value) is dict:
        items = [exchanged(item, kinds, by, depth - 1) for item in value.values()]
        return _kept_or(
            value,
            items,
            value.values(),
            lambda found: dict(zip(value, found, strict=True)),
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields_exchanged(value, kinds, by, depth - 1)
    return value


def _kept_or(
    value: T, items: list[Any], before: Any, make: Callable[[list[Any]], T]
) -> T:
    """Return the container `value` if none of its items was replaced, else return the new container `make(items)`.

    `items`: the items after the replacement. `before`: the items of `value`.
    """
    if all(new is old for new, old in zip(items, before, strict=True)):
        return value
    return make(items)


def _fields_exchanged(
    value: Any, kinds: tuple[type, ...], by: Callable[[Any], Any], depth: int
) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        new = exchanged(old, kinds, by, depth)
        if field.init and new is not old:
            changed[field.name] = new
    if changed:
        return dataclasses.replace(value, **changed)
    return value
