"""Reads one entry of an observation as an array, and refuses a value that is not in the entry's space.

Without this check, NumPy would repeat a single number over a whole array, cut fractions of an image to zeros, and take
the choice -1 for the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.units import clipped

# Axes of an image, at least: height and width
_IMAGE_AXES = 2
# Kinds of NumPy that are numbers: bool, int, unsigned, float
_NUMBERS = "biuf"
# Whole numbers up to here are exact in float64
_EXACT = 2.0**53
# Characters of a value that an error shows
_SHOWN = 60
# Takes an entry as the environment returned it, and returns it as an array
Reader = Callable[[Any], NDArray[Any]]


class Unfit(ValueError):
    """A value that an environment returned is not what its space or Gymnasium's interface says.

    `error`: name of the texts in the code `environment-interface`. `got`: the value in words. `facts`: the values that
    these texts need.
    """

    def __init__(self, error: str, got: str, **facts: Any) -> None:
        super().__init__(f"{got}; expected: {facts.get('expected')}")
        self.error = error
        self.got = got
        self.facts = facts


def in_words(value: object) -> str:
    """Return type, shape and value of what an environment returned, short enough for an error."""
    if isinstance(value, np.ndarray):
        words = f"{value.dtype} array of shape {value.shape}"
        if value.size and value.dtype.kind in _NUMBERS:
            words += f", from {value.min():g} to {value.max():g}"
        return words
    return f"{type(value).__name__} {clipped(repr(value), _SHOWN)}"


def is_image(space: gymnasium.Space[Any]) -> bool:
    """Return whether an entry of this space stays bytes: an array of uint8 with two axes or more."""
    return (
        isinstance(space, spaces.Box)
        and space.dtype == np.uint8
        and len(space.shape) >= _IMAGE_AXES
    )


def text_bytes(space: spaces.Text) -> int:
    """Return for how many bytes of UTF-8 the longest text of a space has room."""
    widest = max(len(letter.encode()) for letter in space.characters)
    return int(space.max_length) * widest


def reader_of(name: str, space: gymnasium.Space[Any]) -> Reader:
    """Return the function that reads an entry of `space`. It raises Unfit for a value that is not in the space.

    An entry of a Box keeps its shape. A text becomes bytes of UTF-8, with zeros behind them. A choice among n values
    becomes n float32 numbers: 1 for the chosen value, else 0. `name`: name of the entry for errors; "" for an
    observation that is a single array.
    """
    place = "the observation"
    if name:
        place = f"its entry {name}"
    if isinstance(space, spaces.Discrete):
        return _choice(place, space)
    if isinstance(space, spaces.MultiDiscrete):
        return _choices(place, space)
    if isinstance(space, spaces.MultiBinary):
        return _switches(place, space)
    if isinstance(space, spaces.Text):
        return _text(place, space)
    assert isinstance(space, spaces.Box), "encoding_of has refused it"
    if is_image(space):
        return _image(place, space)
    return _box(place, space)


def _numbers(place: str, shape: tuple[int, ...], expected: str, shown: Any) -> Any:
    """Return `shown` as an array of numbers with the shape `shape`.

    A single number fits any shape of one element. `place`, `expected`: words for errors. Raises Unfit.
    """
    try:
        array = np.asarray(shown)
    except (TypeError, ValueError, RuntimeError):
        # Lists of different lengths, or a tensor on an accelerator
        raise Unfit(
            "numbers", in_words(shown), place=place, expected=expected
        ) from None
    if array.dtype.kind not in _NUMBERS:
        raise Unfit("numbers", in_words(shown), place=place, expected=expected)
    if array.shape == shape:
        return array
    if array.size == 1 == math.prod(shape):
        return array.reshape(shape)
    raise Unfit(
        "shape",
        in_words(shown),
        place=place,
        expected=expected,
        shape=shape,
        given=array.shape,
    )


def _box(place: str, space: spaces.Box) -> Reader:
    shape = tuple(space.shape)
    expected = f"numbers of shape {shape}"

    def read(shown: Any) -> NDArray[Any]:
        # What nearly all return needs no closer look
        plain = type(shown) is np.ndarray and shown.dtype.kind in _NUMBERS
        if plain and shown.shape == shape:
            return np.asarray(shown)
        array: NDArray[Any] = _numbers(place, shape, expected, shown)
        return array

    return read


def _image(place: str, space: spaces.Box) -> Reader:
    shape = tuple(space.shape)
    expected = f"bytes (uint8, 0 to 255) of shape {shape}"

    def read(shown: Any) -> NDArray[Any]:
        array = _numbers(place, shape, expected, shown)
        if array.dtype == np.uint8:
            return np.asarray(array)
        # Other whole numbers are bytes if they are in their range
        whole = array.dtype.kind in "biu"
        if not whole or (array.size and (array.min() < 0 or array.max() > 255)):
            raise Unfit(
                "image", in_words(array), place=place, expected=expected, shape=shape
            )
        return np.asarray(array, np.uint8)

    return read


def _choice(place: str, space: spaces.Discrete) -> Reader:
    count = int(space.n)
    first = int(space.start)
    expected = f"a whole number from {first} to {first + count - 1}"

    def read(shown: Any) -> NDArray[Any]:
        chosen = shown
        if type(shown) is not int:
            chosen = int(_whole(place, (), expected, shown))
        at = chosen - first
        if not 0 <= at < count:
            raise Unfit("choice", in_words(shown), place=place, expected=expected)
        row = np.zeros(count, np.float32)
        row[at] = 1.0
        return row

    return read


def _choices(place: str, space: spaces.MultiDiscrete) -> Reader:
    shape = tuple(space.shape)
    counts = np.asarray(space.nvec, np.int64).ravel()
    first = np.asarray(space.start, np.int64).ravel()
    # Where the numbers of each choice begin within the row
    begins = np.cumsum(counts) - counts
    size = int(counts.sum())
    expected = (
        f"whole numbers of shape {shape}, from {first.tolist()} "
        f"to {(first + counts - 1).tolist()}"
    )

    def read(shown: Any) -> NDArray[Any]:
        at = _whole(place, shape, expected, shown).ravel() - first
        if ((at < 0) | (at >= counts)).any():
            raise Unfit("choice", in_words(shown), place=place, expected=expected)
        row = np.zeros(size, np.float32)
        row[begins + at] = 1.0
        return row

    return read


def _switches(place: str, space: spaces.MultiBinary) -> Reader:
    shape = tuple(space.shape)
    expected = f"zeros and ones of shape {shape}"

    def read(shown: Any) -> NDArray[Any]:
        array = _numbers(place, shape, expected, shown)
        if not ((array == 0) | (array == 1)).all():
            raise Unfit("choice", in_words(shown), place=place, expected=expected)
        return np.array(array.ravel(), np.float32)

    return read


def _text(place: str, space: spaces.Text) -> Reader:
    size = text_bytes(space)
    expected = f"a text of at most {space.max_length} characters of its charset"

    def read(shown: Any) -> NDArray[Any]:
        # A zero would end the text: it is what fills the row
        if not isinstance(shown, str) or "\0" in shown:
            raise Unfit("numbers", in_words(shown), place=place, expected=expected)
        row = np.zeros(size, np.uint8)
        stored = shown.encode()
        if len(stored) > size:
            raise Unfit("numbers", in_words(shown), place=place, expected=expected)
        row[: len(stored)] = np.frombuffer(stored, np.uint8)
        return row

    return read


def _whole(
    place: str, shape: tuple[int, ...], expected: str, shown: Any
) -> NDArray[np.int64]:
    """Return `shown` as whole numbers with the shape `shape`.

    Floating-point numbers without a fraction are whole numbers. `place`, `expected`: words for errors. Raises Unfit.
    """
    array = _numbers(place, shape, expected, shown)
    if array.dtype.kind == "f":
        exact = np.abs(array) < _EXACT
        if not exact.all() or (array != np.trunc(array)).any():
            raise Unfit("choice", in_words(shown), place=place, expected=expected)
    return np.asarray(array, np.int64)
