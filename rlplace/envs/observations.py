"""Turns each observation of a Gymnasium space into one array, in the form that `Spaces` describes.

Entries are flattened in the same way as by Gymnasium.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.envs.contract import Part

# Axes of an image, at least: height and width
_IMAGE_AXES = 2
_Vector = spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
# Keys that lead to an entry, and the entry's space
_Place = tuple[tuple[Any, ...], gymnasium.Space[Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How the observations of one space become arrays.

    `whole`: shape and type of the array. `parts`: the entries in the array; empty if the observation is a single array.
    `encode`: takes an observation and returns the array; None if the observation is that array already.
    """

    whole: Part
    parts: tuple[Part, ...] = ()
    encode: Callable[[Any], NDArray[Any]] | None = None


def encoding_of(space: gymnasium.Space[Any]) -> Encoding | None:
    """Return how observations of a space become arrays; None if they cannot, such as texts or graphs."""
    places = list(_places(space))
    plain = [isinstance(entry, spaces.Box | _Vector) for _, entry in places]
    if not places or not all(plain):
        return None
    # A space without entries is a single array
    if isinstance(space, spaces.Box):
        return Encoding(whole=_part("", space))
    if isinstance(space, _Vector):
        return Encoding(
            whole=_part("", space), encode=lambda shown: _flat(space, shown)
        )
    # A Dict or Tuple becomes a row
    named = [
        (_part(".".join(map(str, keys)), entry), keys, entry) for keys, entry in places
    ]
    # Numbers first, then images; otherwise in their order
    named.sort(key=lambda place: place[0].dtype == "uint8")
    parts = tuple(part for part, _, _ in named)
    count = sum(part.dtype == "float32" for part in parts)

    def encode(shown: Any) -> NDArray[Any]:
        found = [_flat(entry, _at(shown, keys)) for _, keys, entry in named]
        numbers = np.concatenate([np.empty(0, np.float32), *found[:count]])
        if count < len(found):
            return np.concatenate([numbers.view(np.uint8), *found[count:]])
        return numbers

    # With images it is a row of bytes, with 4 for each number
    whole = Part(name="", shape=(sum(part.size for part in parts),))
    if count < len(parts):
        number_bytes = 4 * sum(part.size for part in parts[:count])
        image_bytes = sum(part.size for part in parts[count:])
        whole = Part(name="", shape=(number_bytes + image_bytes,), dtype="uint8")
    return Encoding(whole=whole, parts=parts, encode=encode)


def _places(
    space: gymnasium.Space[Any], keys: tuple[Any, ...] = ()
) -> Iterator[_Place]:
    """Yield (keys, space) for each entry of nested Dict and Tuple spaces; the keys lead to the entry.

    `keys`: the keys that lead to `space` itself.
    """
    if isinstance(space, spaces.Dict):
        for key, entry in space.spaces.items():
            yield from _places(entry, (*keys, key))
    elif isinstance(space, spaces.Tuple):
        for index, entry in enumerate(space.spaces):
            yield from _places(entry, (*keys, index))
    else:
        yield keys, space


def _part(name: str, space: gymnasium.Space[Any]) -> Part:
    """Return shape and type of an entry in the row: bytes if the entry is an image, else float32 numbers.

    `name`, `space`: of the entry.
    """
    if isinstance(space, spaces.Box):
        image = space.dtype == np.uint8 and len(space.shape) >= _IMAGE_AXES
        shape = tuple(space.shape)
        return Part(name=name, shape=shape, dtype="uint8" if image else "float32")
    return Part(name=name, shape=(spaces.flatdim(space),))


def _at(shown: Any, keys: tuple[Any, ...]) -> Any:
    """Return the entry of an observation that is found by following `keys`."""
    for key in keys:
        shown = shown[key]
    return shown


def _flat(space: gymnasium.Space[Any], shown: Any) -> NDArray[Any]:
    """Return an entry of an observation as a flat array: bytes for an image, else float32 numbers.

    `space`: the entry's space. `shown`: the entry. A choice among n values becomes n numbers: 1 for the chosen value,
    else 0.
    """
    box = isinstance(space, spaces.Box)
    row: Any = np.ravel(shown) if box else spaces.flatten(space, shown)
    image = _part("", space).dtype == "uint8"
    return np.asarray(row, np.uint8 if image else np.float32)
