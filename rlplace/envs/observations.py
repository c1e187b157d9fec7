"""Observations of a Gymnasium space as one array each, as `Spaces` describes it, by Gymnasium's own flattening."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.envs.contract import Part

_IMAGE_AXES = 2  # height and width at least
_Vector = spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
# The keys to an entry, and its space
_Place = tuple[tuple[Any, ...], gymnasium.Space[Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """What `whole` and `parts` of `Spaces` have, and how an observation becomes such an array."""

    whole: Part
    parts: tuple[Part, ...] = ()
    # None: what the simulator shows is the array
    encode: Callable[[Any], NDArray[Any]] | None = None


def encoding_of(space: gymnasium.Space[Any]) -> Encoding | None:
    """Return how observations of a space become arrays; None where they do not, such as texts and graphs."""
    places = list(_places(space))
    if not places or not all(
        isinstance(entry, spaces.Box | _Vector) for _, entry in places
    ):
        return None
    if isinstance(space, spaces.Box):
        return Encoding(whole=_part("", space))
    if isinstance(space, _Vector):
        return Encoding(
            whole=_part("", space), encode=lambda shown: _flat(space, shown)
        )
    named = [
        (_part(".".join(map(str, keys)), entry), keys, entry) for keys, entry in places
    ]
    # Stable: numbers first, else as they were
    named.sort(key=lambda place: place[0].dtype == "uint8")
    parts = tuple(part for part, _, _ in named)
    count = sum(part.dtype == "float32" for part in parts)

    def encode(shown: Any) -> NDArray[Any]:
        found = [_flat(entry, _at(shown, keys)) for _, keys, entry in named]
        numbers = np.concatenate([np.empty(0, np.float32), *found[:count]])
        if count < len(found):
            return np.concatenate([numbers.view(np.uint8), *found[count:]])
        return numbers

    size = sum(part.size for part in parts)
    whole = Part(name="", shape=(size,))
    if count < len(parts):
        whole = Part(
            name="",
            shape=(size + 3 * sum(part.size for part in parts[:count]),),
            dtype="uint8",
        )
    return Encoding(whole=whole, parts=parts, encode=encode)


def _places(
    space: gymnasium.Space[Any], keys: tuple[Any, ...] = ()
) -> Iterator[_Place]:
    """Yield the entries of nested Dicts and Tuples."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inside = (
            space.spaces.items()
            if isinstance(space, spaces.Dict)
            else enumerate(space.spaces)
        )
        for key, entry in inside:
            yield from _places(entry, (*keys, key))
    else:
        yield keys, space


def _part(name: str, space: gymnasium.Space[Any]) -> Part:
    if isinstance(space, spaces.Box):
        image = space.dtype == np.uint8 and len(space.shape) >= _IMAGE_AXES
        return Part(
            name=name, shape=tuple(space.shape), dtype="uint8" if image else "float32"
        )
    return Part(name=name, shape=(spaces.flatdim(space),))


def _at(shown: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        shown = shown[key]
    return shown


def _flat(space: gymnasium.Space[Any], shown: Any) -> NDArray[Any]:
    """Return an entry as a row: an image of bytes, all else of float32; a choice among n is n numbers, one is 1."""
    row = (
        np.ravel(shown)
        if isinstance(space, spaces.Box)
        else spaces.flatten(space, shown)
    )
    return np.asarray(
        row, np.uint8 if _part("", space).dtype == "uint8" else np.float32
    )
