"""Environments that are stepped in this process: each of them belongs to one row of one simulator.

A function that returns the same environment several times would mix the episodes of all rows that step it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

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
    """Return the environment within all wrappers. An object whose attribute `env` is itself is the innermost one."""
    seen: set[int] = set()
    layer = env
    while id(layer) not in seen:
        seen.add(id(layer))
        inner = getattr(layer, "__dict__", {}).get("env")
        if inner is None or not callable(getattr(inner, "step", None)):
            return layer
        layer = inner
    return layer
