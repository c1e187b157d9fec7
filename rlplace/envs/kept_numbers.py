"""Saves and restores the numbers by which a user's wrappers normalize, as far as they can be recognised.

::

    class OwnNorm(ObservationWrapper):
        self.obs_rms = Running()              an object with a mean and a var, std or M2: statistics for certain
        self.n, self.m, self.v = ...          plain numbers that change with steps: may be statistics
        self.seen = [...]                     a list: its numbers are not saved, and so no plain number beside it

Statistics for certain can be kept from changing. The others go on from the numbers of the training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rlplace.envs.layers import wrappers_of

# First part of the names in a state
KEPT = "kept."
_UNSAVED = "unsaved"
# Kinds of NumPy that are numbers
_NUMBERS = "iuf"
# Attributes of running statistics besides `mean`
_SPREADS = ("var", "variance", "std", "M2", "m2")
# Attributes of Gymnasium's wrappers, and their statistics, which are saved elsewhere
_OF_GYMNASIUM = frozenset(("_saved_kwargs", "obs_rms", "return_rms"))
_State = Mapping[str, NDArray[Any]]


class Taken(NamedTuple):
    """What became of the numbers of a wrapper: they go on from those of a training, or begin anew."""

    wrapper: str
    how: Literal["goes-on", "begins-anew"]


class _Holder(NamedTuple):
    """Attributes of a wrapper, or of an object with running statistics that it has.

    `name`: first part of the names of its numbers in a state. `certain`: whether these are statistics for certain.
    """

    name: str
    attributes: MutableMapping[str, Any]
    certain: bool


class KeptNumbers:
    """The numbers of the user's wrappers around one environment. To be made before the environment is reset."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._layers = [
            wrapper for wrapper in wrappers_of(env) if _is_of_user(type(wrapper))
        ]
        self._first = [_numbers_of(layer, number) for number, layer in self._numbered]
        # Statistics that may not change
        self._fixed: dict[str, NDArray[Any]] = {}

    @property
    def _numbered(self) -> list[tuple[int, Any]]:
        return list(enumerate(self._layers))

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the statistics, and the plain numbers that have changed since the wrappers were made, by name."""
        state: dict[str, NDArray[Any]] = {}
        for (number, layer), first in zip(self._numbered, self._first, strict=True):
            certain = _certain(layer, number)
            for name, value in _numbers_of(layer, number).items():
                changed = name not in first or not _equal(first[name], value)
                if not changed and name not in certain:
                    continue
                if name in certain or not _has_lists(layer):
                    state[name] = value
                elif value.dtype.kind == "f":
                    state[f"{KEPT}{number}.{_UNSAVED}"] = np.array(1)
        return state

    def restore(self, state: _State) -> list[Taken]:
        """Give the wrappers their numbers in a state of `state`; return what is to be said of each wrapper."""
        return self._take(state, fix=False)

    def fix(self, state: _State) -> list[Taken]:
        """Give the wrappers the numbers of a training, and keep statistics from changing, see `keep`.

        Return what is to be said of each wrapper.
        """
        return self._take(state, fix=True)

    def keep(self) -> None:
        """Put statistics back that may not change. To be called before each step."""
        if self._fixed:
            self._set(self._fixed)

    def begun_anew(self) -> list[Taken]:
        """Return what is to be said of each wrapper whose plain numbers have changed since it was made."""
        found: list[Taken] = []
        for (number, layer), first in zip(self._numbered, self._first, strict=True):
            certain = _certain(layer, number)
            changed = [
                name
                for name, value in _numbers_of(layer, number).items()
                if value.dtype.kind == "f" and name not in certain
                if name not in first or not _equal(first[name], value)
            ]
            if changed:
                found.append(Taken(type(layer).__name__, "begins-anew"))
        return found

    @property
    def are_fixed(self) -> bool:
        """Whether there are statistics that may not change."""
        return bool(self._fixed)

    def _take(self, state: _State, *, fix: bool) -> list[Taken]:
        self._set(state)
        taken: list[Taken] = []
        for number, layer in self._numbered:
            wrapper = type(layer).__name__
            prefix = f"{KEPT}{number}."
            found = {name for name in state if name.startswith(prefix)}
            certain = _certain(layer, number)
            unsaved = f"{prefix}{_UNSAVED}" in found
            if unsaved or not certain <= found:
                taken.append(Taken(wrapper, "begins-anew"))
            elif fix and found - certain:
                taken.append(Taken(wrapper, "goes-on"))
            if fix:
                self._fixed |= {name: state[name] for name in certain & found}
        return taken

    def _set(self, state: _State) -> None:
        """Give all attributes their numbers in a state, as far as it has them."""
        for number, layer in self._numbered:
            for holder in _holders(layer, number):
                for name, key in _named(holder).items():
                    if name in state:
                        before = holder.attributes[key]
                        holder.attributes[key] = _like(before, state[name])


def _is_of_user(kind: type) -> bool:
    """Return whether a class of wrappers is neither of Gymnasium nor of rlplace."""
    return not kind.__module__.startswith(("gymnasium.", "rlplace.envs."))


def _holders(layer: Any, number: int) -> Iterator[_Holder]:
    """Yield the attributes of wrapper `number`, and those of each object with running statistics that it has."""
    prefix = f"{KEPT}{number}."
    yield _Holder(prefix, vars(layer), certain=False)
    for name, value in vars(layer).items():
        if name in _OF_GYMNASIUM and _is_normalizing(type(layer)):
            continue
        # One object, or one for each entry of an observation
        entries = {"": value}
        if isinstance(value, dict):
            entries = {f"{key}.": entry for key, entry in value.items()}
        for key, entry in entries.items():
            if _is_running(entry):
                yield _Holder(f"{prefix}{name}.{key}", vars(entry), certain=True)


def _certain(layer: Any, number: int) -> set[str]:
    """Return the names of the numbers of wrapper `number` that are statistics for certain."""
    found: set[str] = set()
    for holder in _holders(layer, number):
        if holder.certain:
            found.update(_named(holder))
    return found


def _is_normalizing(kind: type) -> bool:
    """Return whether a class is derived from a normalizing wrapper of Gymnasium. Its statistics are saved elsewhere."""
    return any("update_running_mean" in vars(base) for base in kind.__mro__)


def _is_running(value: Any) -> bool:
    """Return whether a value is an object with running statistics."""
    if isinstance(value, gymnasium.Env | gymnasium.Space | type):
        return False
    attributes = getattr(value, "__dict__", {})
    spreads = [name for name in _SPREADS if _is_number(attributes.get(name))]
    return _is_number(attributes.get("mean")) and bool(spreads)


def _named(holder: _Holder) -> dict[str, str]:
    """Return name in a state -> attribute, for each number of a holder."""
    return {
        f"{holder.name}{key}": key
        for key, value in holder.attributes.items()
        if _is_number(value)
    }


def _numbers_of(layer: Any, number: int) -> dict[str, NDArray[Any]]:
    """Return all numbers of wrapper `number` as new arrays, by their names in a state."""
    found: dict[str, NDArray[Any]] = {}
    for holder in _holders(layer, number):
        for name, key in _named(holder).items():
            found[name] = np.array(holder.attributes[key])
    return found


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.number):
        return value.dtype.kind in _NUMBERS
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has_lists(layer: Any) -> bool:
    """Return whether a wrapper has something in a list or a mapping, which is not saved."""
    return any(
        isinstance(value, list | dict | set | deque) and len(value) > 0
        for name, value in vars(layer).items()
        if name not in _OF_GYMNASIUM
    )


def _like(before: Any, value: NDArray[Any]) -> Any:
    """Return a number of a state as the type of the attribute's present value."""
    if isinstance(before, np.ndarray):
        return value.astype(before.dtype)
    if isinstance(before, np.number):
        return before.dtype.type(value)
    return type(before)(value.item()) if value.ndim == 0 else value.copy()


def _equal(first: NDArray[Any], value: NDArray[Any]) -> bool:
    return first.shape == value.shape and np.array_equal(first, value, equal_nan=True)
