"""Turns each observation of a Gymnasium space into one array, in the form that `Spaces` describes.

Entries are flattened in the same way as by Gymnasium. A value that is not in its space is refused, see `entries`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.envs.contract import Part
from rlplace.envs.entries import (
    Reader,
    Unfit,
    in_words,
    is_image,
    reader_of,
    text_bytes,
)

_Vector = spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
_NOTHING = np.empty(0, np.float32)
# Bytes up to this one are at most 0.1 after the division by 255
_DARK = 25
# Keys that lead to an entry, and the entry's space
_Place = tuple[tuple[Any, ...], gymnasium.Space[Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How the observations of one space become arrays.

    `whole`: shape and type of the array. `parts`: the entries in the array; empty if the observation is a single array.
    `read`: takes an observation, and returns the array; it raises Unfit, a ValueError, for a value that is not in the
    space. `encode`: the same function; None if the observation is that array already.
    `numbers`: the keys that lead to each array of numbers in an observation, images left out; () is the observation.
    `low`, `high`: bounds of the float32 numbers in the array, in their order, as the space declares them.
    """

    whole: Part
    read: Reader
    parts: tuple[Part, ...] = ()
    encode: Callable[[Any], NDArray[Any]] | None = None
    numbers: tuple[tuple[Any, ...], ...]
    low: NDArray[np.float32]
    high: NDArray[np.float32]


def encoding_of(space: gymnasium.Space[Any]) -> Encoding | None:
    """Return how observations of a space become arrays; None if they cannot, such as graphs or a single text."""
    places = list(_places(space))
    plain = [
        isinstance(entry, spaces.Box | spaces.Text | _Vector) for _, entry in places
    ]
    # A text is an entry beside others: by itself it is nothing that a policy reads
    if not places or not all(plain) or isinstance(space, spaces.Text):
        return None
    numbers = tuple(
        keys
        for keys, entry in places
        if isinstance(entry, spaces.Box) and not is_image(entry)
    )
    # A space without entries is a single array
    if isinstance(space, spaces.Box | _Vector):
        read = reader_of("", space)
        low, high = _bounds([space])
        encode = None if isinstance(space, spaces.Box) else read
        return Encoding(
            whole=_part("", space),
            read=read,
            encode=encode,
            numbers=numbers,
            low=low,
            high=high,
        )
    # A Dict or Tuple becomes a row
    named = [
        (_part(".".join(map(str, keys)), entry), keys, entry) for keys, entry in places
    ]
    # Numbers first, then images and texts; otherwise in their order
    named.sort(key=lambda place: place[0].dtype == "uint8")
    parts = tuple(part for part, _, _ in named)
    count = sum(part.dtype == "float32" for part in parts)
    low, high = _bounds([entry for _, _, entry in named[:count]])
    readers = [(keys, reader_of(part.name, entry)) for part, keys, entry in named]
    tuples = list(_tuples(space))

    def row_of(shown: Any) -> NDArray[Any]:
        # Entries beyond the last one of a Tuple would be lost
        for keys, size in tuples:
            _require_size(shown, keys, size)
        found = [np.ravel(read(entry_at(shown, keys))) for keys, read in readers]
        numbers = np.concatenate([_NOTHING, *found[:count]], dtype=np.float32)
        if count < len(found):
            return np.concatenate([numbers.view(np.uint8), *found[count:]])
        return numbers

    # With images it is a row of bytes, with 4 for each number
    whole = Part(name="", shape=(sum(part.size for part in parts),))
    if count < len(parts):
        number_bytes = 4 * sum(part.size for part in parts[:count])
        image_bytes = sum(part.size for part in parts[count:])
        whole = Part(name="", shape=(number_bytes + image_bytes,), dtype="uint8")
    return Encoding(
        whole=whole,
        read=row_of,
        parts=parts,
        encode=row_of,
        numbers=numbers,
        low=low,
        high=high,
    )


def dark_image(space: gymnasium.Space[Any]) -> int | None:
    """Return the largest number of an image that stays dark when its bytes are divided by 255; None without one.

    The bounds of the space say so: bytes of 0 and 1, or the numbers of a few kinds of fields on a board.
    """
    for _, entry in _places(space):
        if isinstance(entry, spaces.Box) and is_image(entry):
            brightest = int(entry.high.max())
            if brightest <= _DARK:
                return brightest
    return None


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
    """Return shape and type of an entry in the row: bytes if the entry is an image or a text, else float32 numbers.

    `name`, `space`: of the entry.
    """
    if isinstance(space, spaces.Box):
        shape = tuple(space.shape)
        dtype: Literal["float32", "uint8"] = "uint8" if is_image(space) else "float32"
        return Part(name=name, shape=shape, dtype=dtype)
    if isinstance(space, spaces.Text):
        return Part(name=name, shape=(text_bytes(space),), dtype="uint8")
    return Part(name=name, shape=(spaces.flatdim(space),))


def _tuples(
    space: gymnasium.Space[Any], keys: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield (keys, number of entries) for each Tuple within nested spaces; the keys lead to the Tuple.

    `keys`: the keys that lead to `space` itself.
    """
    if isinstance(space, spaces.Dict):
        for key, entry in space.spaces.items():
            yield from _tuples(entry, (*keys, key))
    elif isinstance(space, spaces.Tuple):
        yield keys, len(space.spaces)
        for index, entry in enumerate(space.spaces):
            yield from _tuples(entry, (*keys, index))


def _bounds(
    entries: list[gymnasium.Space[Any]],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (lower bounds, upper bounds) of the float32 numbers that the entries become, in their order.

    The zeros and ones of choices have no bounds: a wrong choice is refused.
    """
    low = [_NOTHING]
    high = [_NOTHING]
    for entry in entries:
        if isinstance(entry, spaces.Box) and not is_image(entry):
            low.append(np.asarray(entry.low, np.float32).ravel())
            high.append(np.asarray(entry.high, np.float32).ravel())
        elif not is_image(entry):
            free = np.full(spaces.flatdim(entry), np.inf, np.float32)
            low.append(-free)
            high.append(free)
    return np.concatenate(low), np.concatenate(high)


def entry_at(shown: Any, keys: tuple[Any, ...]) -> Any:
    """Return the entry of an observation that is found by following `keys`. Raises Unfit if there is none."""
    found = shown
    try:
        for key in keys:
            found = found[key]
    except (KeyError, IndexError, TypeError):
        raise _missing(shown, keys) from None
    return found


def _require_size(shown: Any, keys: tuple[Any, ...], size: int) -> None:
    """Raise Unfit unless the entry of an observation that `keys` lead to has `size` entries."""
    entries = entry_at(shown, keys)
    if not hasattr(entries, "__len__") or len(entries) != size:
        name = ".".join(map(str, keys))
        place = f"its entry {name}" if name else "the observation"
        expected = f"a tuple of {size} entries"
        raise Unfit("numbers", in_words(entries), place=place, expected=expected)


def _missing(shown: Any, keys: tuple[Any, ...]) -> Unfit:
    """Return the error that the entry which `keys` lead to is not in an observation."""
    name = ".".join(map(str, keys))
    got = in_words(shown)
    if isinstance(shown, Mapping):
        got = f"entries: {', '.join(map(str, shown))}"
    return Unfit("entry", got, name=name, expected=f"an entry {name}")
