"""Environments that are stepped in this process: each of them belongs to one row of one simulator.

A function that returns the same environment several times would mix the episodes of all rows that step it. So would an
object that several environments change.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlplace.envs.entries import Unfit

# Identity -> environment, for those in use; an environment that nothing else refers to leaves by itself
_OWNED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def own(envs: Iterable[Any]) -> None:
    """Note that environments are stepped from now on, until `disown`. Raises Unfit if one of them is stepped already.

    Wrappers may differ: the innermost environments are compared.
    """
    for env in envs:
        innermost = _innermost(env)
        if _OWNED.get(id(innermost)) is innermost:
            kind = type(innermost)
            raise Unfit("shared", f"{kind.__module__}.{kind.__qualname__}")
        try:
            _OWNED[id(innermost)] = innermost
        except TypeError:
            # A class with slots has no weak references: its environments are not compared
            continue


def disown(envs: Iterable[Any]) -> None:
    """Note that environments are no longer stepped. Those that were not noted are passed over."""
    for env in envs:
        _OWNED.pop(id(_innermost(env)), None)


def _innermost(env: Any) -> Any:
    """Return the environment within all wrappers. An object whose attribute `env` is itself is the innermost one.

    What environments merely use, such as a server with a method `step` alone, is no environment.
    """
    seen: set[int] = set()
    layer = env
    while id(layer) not in seen:
        seen.add(id(layer))
        inner = getattr(layer, "__dict__", {}).get("env")
        methods = (getattr(inner, name, None) for name in ("reset", "step"))
        if not all(map(callable, methods)):
            return layer
        layer = inner
    return layer


# ── objects that several environments share ──────────────────────────────────────────────────────────────────────────

# Larger objects are not compared, nor are those within these many others
_MOST = 4096
_DEEPEST = 4
# Two environments show what all of them share
_FEWEST = 2
_PLAIN = (int, float, str, bytes, type(None), np.generic)
# Modules whose classes are no user's
_LIBRARIES = ("gymnasium", "gym")
# Changed by libraries that step environments
_NOT_COMPARED = frozenset(("metadata", "render_mode", "spec"))


class SharedObjects:
    """Lists, mappings, sets and arrays that two environments of one class have in common, and what was in them.

    They come from an attribute of the class, or from an argument with such an object as its default. A table that stays
    as it is may be shared; an object that steps change mixes the states of the environments.
    """

    def __init__(self, envs: Sequence[Any]) -> None:
        """Take the environments before their first step."""
        # Name -> the object, and its content
        self._shared: dict[str, tuple[Any, Hashable]] = {}
        if len(envs) < _FEWEST:
            return
        first, second = (_innermost(env) for env in envs[:_FEWEST])
        others = _attributes(second)
        for name, value in _attributes(first).items():
            if others.get(name) is value:
                with contextlib.suppress(TypeError):
                    self._shared[name] = (value, _content(value))

    def changed(self) -> str | None:
        """Return the name of a shared object whose content is another one than at first; None if there is none."""
        for name, (value, before) in self._shared.items():
            try:
                same = _content(value) == before
            except TypeError:
                # It has got something that is not compared
                same = False
            if not same:
                return name
        return None


def _attributes(env: Any) -> dict[str, Any]:
    """Return name -> object, for the attributes of an environment and its classes that may be changed in place."""
    found: dict[str, Any] = {}
    classes = [
        each
        for each in type(env).__mro__
        if each.__module__.partition(".")[0] not in _LIBRARIES
    ]
    for holder in (*reversed(classes), env):
        for name, value in getattr(holder, "__dict__", {}).items():
            of_user = not name.startswith("__") and name not in _NOT_COMPARED
            if of_user and isinstance(value, list | dict | set | np.ndarray):
                found[name] = value
    return found


def _content(value: Any, depth: int = 0) -> Hashable:
    """Return what is in an object, as something that can be compared. Raises TypeError for what is not compared."""
    if isinstance(value, _PLAIN):
        return value
    if depth == _DEEPEST or not isinstance(value, Collection) or len(value) > _MOST:
        raise TypeError
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.size > _MOST:
            raise TypeError
        return (value.shape, value.tobytes())
    if isinstance(value, Mapping):
        return tuple(
            (_content(k, depth + 1), _content(v, depth + 1)) for k, v in value.items()
        )
    if isinstance(value, set | frozenset):
        return frozenset(_content(each, depth + 1) for each in value)
    return tuple(_content(each, depth + 1) for each in value)
