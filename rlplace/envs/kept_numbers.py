"""Saves and restores running statistics in a user's wrappers, as far as the statistics can be recognised.

::

    class OwnNorm(ObservationWrapper):
        self.obs_rms = Running()              an object with a mean and a var, std or M2: certainly statistics
        self.n, self.m, self.v = ...          plain numbers that change with steps: perhaps statistics
        self.seen = [...]                     a list or deque of numbers or of alike arrays: as plain numbers
        self.by_name = {...}                  a mapping: it is not saved; then the plain numbers are not saved either

An evaluation uses certain statistics unchanged. Other numbers continue to change from their values in the training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rlplace.envs.layers import wrappers_of

# Prefix of the names in a state
KEPT = "kept."
_UNSAVED = "unsaved"
# Most numbers of a list that is saved
_MOST = 1 << 16
# NumPy's kinds of dtypes that are numbers
_NUMBERS = "iuf"
# Attributes of running statistics besides `mean`
_SPREADS = ("var", "variance", "std", "M2", "m2")
# Attributes of Gymnasium's wrappers; `gymnasium_state` saves their statistics
_OF_GYMNASIUM = frozenset(("_saved_kwargs", "obs_rms", "return_rms"))
_State = Mapping[str, NDArray[Any]]


class NumbersRemark(NamedTuple):
    """A remark about the numbers of one wrapper.

    `how`: "goes-on": they continue to change from their values in the training. "begins-anew": they start again.
    """

    wrapper: str
    how: Literal["goes-on", "begins-anew"]


class _Attributes(NamedTuple):
    """Attributes of a wrapper, or of an object with running statistics inside the wrapper.

    `name`: prefix of the names of these numbers in a state. `certain`: whether the numbers are certainly statistics.
    """

    name: str
    attributes: MutableMapping[str, Any]
    certain: bool


class KeptNumbers:
    """The numbers in the user's wrappers around one environment. Create this object before the first reset."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._layers = [
            wrapper for wrapper in wrappers_of(env) if _is_of_user(type(wrapper))
        ]
        self._first = [_numbers_of(layer, number) for number, layer in self._numbered]
        # Statistics that must not change: name -> value
        self._fixed: dict[str, NDArray[Any]] = {}

    @property
    def _numbered(self) -> list[tuple[int, Any]]:
        return list(enumerate(self._layers))

    def state(self) -> dict[str, NDArray[Any]]:
        """Return name -> value of the statistics, and of plain numbers that have changed since `__init__`."""
        state: dict[str, NDArray[Any]] = {}
        for (number, layer), first in zip(self._numbered, self._first, strict=True):
            certain = _certain(layer, number)
            for name, value in _numbers_of(layer, number).items():
                changed = name not in first or not _equal(first[name], value)
                if not changed and name not in certain:
                    continue
                if name in certain or not _has_unsaved(layer):
                    state[name] = value
                elif value.dtype.kind == "f":
                    state[f"{KEPT}{number}.{_UNSAVED}"] = np.array(1)
        return state

    def restore(self, state: _State) -> list[NumbersRemark]:
        """Set the numbers of the wrappers to those in `state`. Return remarks about wrappers that miss some of them."""
        return self._restore(state, fix=False)

    def fix(self, state: _State) -> list[NumbersRemark]:
        """Set the numbers of the wrappers to those of a training, and fix the certain statistics, see `put_back_fixed`.

        Return remarks about wrappers that miss some numbers, or whose numbers continue to change.
        """
        return self._restore(state, fix=True)

    def put_back_fixed(self) -> None:
        """Undo changes of the fixed statistics: set them to their fixed values. Call this before each step."""
        if self._fixed:
            self._set(self._fixed)

    def remarks_of_changed(self) -> list[NumbersRemark]:
        """Return a remark for each wrapper whose plain numbers have changed since this object was created."""
        found: list[NumbersRemark] = []
        for (number, layer), first in zip(self._numbered, self._first, strict=True):
            certain = _certain(layer, number)
            changed = [
                name
                for name, value in _numbers_of(layer, number).items()
                if value.dtype.kind == "f" and name not in certain
                if name not in first or not _equal(first[name], value)
            ]
            if changed:
                found.append(NumbersRemark(type(layer).__name__, "begins-anew"))
        return found

    def changed_wrappers(self) -> list[str]:
        """Return the classes of wrappers with numbers, statistics or others, that have changed since `__init__`."""
        found: list[str] = []
        for (number, layer), first in zip(self._numbered, self._first, strict=True):
            changed = [
                name
                for name, value in _numbers_of(layer, number).items()
                if value.dtype.kind == "f"
                if name not in first or not _equal(first[name], value)
            ]
            if changed:
                found.append(type(layer).__name__)
        return found

    @property
    def has_fixed(self) -> bool:
        """Whether there are fixed statistics."""
        return bool(self._fixed)

    def _restore(self, state: _State, *, fix: bool) -> list[NumbersRemark]:
        self._set(state)
        taken: list[NumbersRemark] = []
        for number, layer in self._numbered:
            wrapper = type(layer).__name__
            prefix = f"{KEPT}{number}."
            found = {name for name in state if name.startswith(prefix)}
            certain = _certain(layer, number)
            unsaved = f"{prefix}{_UNSAVED}" in found
            if unsaved or not certain <= found:
                taken.append(NumbersRemark(wrapper, "begins-anew"))
            elif fix and found - certain:
                taken.append(NumbersRemark(wrapper, "goes-on"))
            if fix:
                self._fixed |= {name: state[name] for name in certain & found}
        return taken

    def _set(self, state: _State) -> None:
        """Set each attribute whose number is in `state` to this number."""
        for number, layer in self._numbered:
            for holder in _holders(layer, number):
                for name, key in _names_in(holder).items():
                    if name not in state:
                        continue
                    before = holder.attributes[key]
                    if isinstance(before, list | deque):
                        # Another attribute may be the same list
                        before.clear()
                        before.extend(_entries(state[name]))
                    else:
                        holder.attributes[key] = _like(before, state[name])


def has_statistics(env: gymnasium.Env[Any, Any]) -> bool:
    """Return whether a user's wrapper around an environment has an object that certainly is running statistics."""
    layers = [layer for layer in wrappers_of(env) if _is_of_user(type(layer))]
    return any(_certain(layer, number) for number, layer in enumerate(layers))


def _is_of_user(kind: type) -> bool:
    """Return whether the user has written a class of wrappers: it comes neither from Gymnasium nor from rlplace."""
    return not kind.__module__.startswith(("gymnasium.", "rlplace.envs."))


def _holders(layer: Any, number: int) -> Iterator[_Attributes]:
    """Yield the attributes of wrapper `number`, and those of each object with running statistics inside the wrapper."""
    prefix = f"{KEPT}{number}."
    yield _Attributes(prefix, vars(layer), certain=False)
    for name, value in vars(layer).items():
        if name in _OF_GYMNASIUM and _is_normalizing(type(layer)):
            continue
        # The statistics are one object, or a dict with one object for each entry of an observation
        entries = {"": value}
        if isinstance(value, dict):
            entries = {f"{key}.": entry for key, entry in value.items()}
        for key, entry in entries.items():
            if _is_running(entry):
                yield _Attributes(f"{prefix}{name}.{key}", vars(entry), certain=True)


def _certain(layer: Any, number: int) -> set[str]:
    """Return the names of the numbers of wrapper `number` that are certainly statistics."""
    found: set[str] = set()
    for holder in _holders(layer, number):
        if holder.certain:
            found.update(_names_in(holder))
    return found


def _is_normalizing(kind: type) -> bool:
    """Return whether a class is derived from a normalizing wrapper of Gymnasium; `gymnasium_state` saves those."""
    return any("update_running_mean" in vars(base) for base in kind.__mro__)


def _is_running(value: Any) -> bool:
    """Return whether a value is an object with running statistics."""
    if isinstance(value, gymnasium.Env | gymnasium.Space | type):
        return False
    attributes = getattr(value, "__dict__", {})
    spreads = [name for name in _SPREADS if _is_number(attributes.get(name))]
    return _is_number(attributes.get("mean")) and bool(spreads)


def _names_in(holder: _Attributes) -> dict[str, str]:
    """Return name in a state -> attribute, for each attribute that is a number or a list of numbers."""
    return {
        f"{holder.name}{key}": key
        for key, value in holder.attributes.items()
        if _is_number(value) or _is_list(value)
    }


def _numbers_of(layer: Any, number: int) -> dict[str, NDArray[Any]]:
    """Return all numbers of wrapper `number` as new arrays, by their names in a state."""
    found: dict[str, NDArray[Any]] = {}
    for holder in _holders(layer, number):
        for name, key in _names_in(holder).items():
            value = holder.attributes[key]
            found[name] = np.array(list(value) if _is_list(value) else value)
    return found


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.number):
        return value.dtype.kind in _NUMBERS
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    """Return whether a value is a list of numbers or of arrays with one shape, and short enough to be saved."""
    if not isinstance(value, list | deque) or len(value) > _MOST:
        return False
    if not value:
        return True
    size = np.size(value[0])
    if not all(map(_is_number, value)) or size * len(value) > _MOST:
        return False
    return len({np.shape(entry) for entry in value}) == 1


def _has_unsaved(layer: Any) -> bool:
    """Return whether a wrapper has a container that is not empty and whose content is not saved."""
    return any(
        isinstance(value, list | dict | set | deque)
        and len(value) > 0
        and not _is_list(value)
        for name, value in vars(layer).items()
        if name not in _OF_GYMNASIUM
    )


def _entries(value: NDArray[Any]) -> list[Any]:
    """Return the entries of a list that was saved as one array: numbers, or arrays of their own."""
    if value.ndim == 1:
        numbers: list[Any] = value.tolist()
        return numbers
    return [entry.copy() for entry in value]


def _like(before: Any, value: NDArray[Any]) -> Any:
    """Return a number of a state in the type of `before`, the attribute's present value."""
    if isinstance(before, np.ndarray):
        return value.astype(before.dtype)
    if isinstance(before, np.number):
        return before.dtype.type(value)
    return type(before)(value.item()) if value.ndim == 0 else value.copy()


def _equal(first: NDArray[Any], value: NDArray[Any]) -> bool:
    return first.shape == value.shape and np.array_equal(first, value, equal_nan=True)
