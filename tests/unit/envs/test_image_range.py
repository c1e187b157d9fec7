"""Images that are no bytes, and whose numbers are not those from 0 to 1 that a network expects, are said."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.envs.contract import DiscreteActions, Part, Spaces
from rlplace.envs.image_range import ImageRange

ACTIONS = DiscreteActions(n=2)
IMAGE = Spaces(observation_shape=(8, 9, 1), actions=ACTIONS)
# A vector, a table of numbers and an image, in one row
PARTS = (
    Part(name="speed", shape=(3,)),
    Part(name="table", shape=(4, 6)),
    Part(name="camera", shape=(3, 8, 8)),
)
ROW = Spaces(observation_shape=(3 + 24 + 192,), actions=ACTIONS, parts=PARTS)


def remark(
    pixels: np.ndarray, spaces: Spaces = IMAGE, *, normalizes: bool = False
) -> str:
    images = ImageRange("odd:Camera", spaces, normalizes=normalizes, can_normalize=True)
    # A black picture says nothing
    shape = (2, *spaces.observation_shape)
    images.look(np.zeros(shape, np.float32))
    assert images.remark is None
    shown = np.zeros(shape, np.float32).reshape(2, -1)
    shown[:, -len(pixels) :] = pixels
    images.look(shown.reshape(shape))
    return images.remark or ""


BYTES = np.arange(72.0) * 3
SHARES = BYTES / 255


@pytest.mark.parametrize("spaces", [IMAGE, ROW, ROW.remembering(5)])
def test_images_outside_of_the_range_of_a_network_are_said(spaces: Spaces) -> None:
    undivided = remark(BYTES, spaces)
    assert "of odd:Camera are float32 numbers up to 213" in undivided
    assert ("camera" in undivided) == (spaces is not IMAGE)
    assert "Box(0, 255, shape, np.uint8)" in undivided
    assert "divided by 255 twice" in remark(SHARES / 255, spaces)


@pytest.mark.parametrize(
    "pixels",
    [
        SHARES,
        BYTES / 127.5 - 1,
        # Kinds of fields on a board; distances; bytes whose mean is subtracted
        np.arange(72.0) % 11,
        BYTES + 0.25,
        BYTES - 100,
    ],
)
def test_other_images_are_not(pixels: np.ndarray) -> None:
    assert remark(pixels) == ""


def test_what_is_normalised_or_no_image_is_not() -> None:
    assert remark(BYTES, normalizes=True) == ""
    table = Spaces(observation_shape=(72, 4), actions=ACTIONS)
    assert remark(BYTES / 3, table) == ""
    bytes_of = Spaces(
        observation_shape=(8, 9), actions=ACTIONS, observation_dtype="uint8"
    )
    images = ImageRange("odd:Camera", bytes_of, normalizes=False, can_normalize=True)
    images.look(np.full((1, 8, 9), 200, np.uint8))
    assert images.remark is None


@pytest.mark.parametrize("can_normalize", [True, False])
def test_large_numbers_that_nothing_normalises_are_said(can_normalize: bool) -> None:
    """The memory of a game: bytes in a vector are no image, and are not divided by 255."""
    memory = Spaces(observation_shape=(128,), actions=ACTIONS)
    seen = ImageRange("odd:Game", memory, normalizes=False, can_normalize=can_normalize)
    random = np.random.default_rng(0)
    for _ in range(6):
        assert seen.remark is None
        seen.look(random.integers(0, 256, (4, 128)).astype(np.float32))
    said = str(seen.remark)
    assert "its observations of odd:Game have numbers that are mostly above 100" in said
    assert ("algorithm.normalize_observations=true" in said) == can_normalize


def test_numbers_that_are_large_now_and_then_are_not() -> None:
    forces = Spaces(observation_shape=(2,), actions=ACTIONS)
    seen = ImageRange("odd:Robot", forces, normalizes=False, can_normalize=True)
    for _ in range(20):
        seen.look(np.array([[0, 900], [90, 1], [2, -900], [900, 90]], np.float32))
        seen.look(np.full((2, 2), 95, np.float32))
    assert seen.remark is None
    normalized = ImageRange("odd:Robot", forces, normalizes=True, can_normalize=True)
    for _ in range(20):
        normalized.look(np.full((2, 2), 900, np.float32))
    assert normalized.remark is None


@pytest.mark.parametrize(
    ("shape", "flattens", "said"),
    [
        ((24, 24, 3), True, True),
        ((3, 24, 24), True, True),
        ((4, 24, 24, 1), True, True),
        ((24, 24, 3), False, False),
        # A table, and a small board
        ((24, 24), True, False),
        ((3, 3, 2), True, False),
    ],
)
def test_float_images_that_an_mlp_takes_in_one_row_are_said(
    shape: tuple[int, ...], flattens: bool, said: bool
) -> None:
    spaces = Spaces(observation_shape=shape, actions=ACTIONS)
    images = ImageRange(
        "odd:Camera", spaces, normalizes=True, can_normalize=True, flattens=flattens
    )
    assert (images.flattened is not None) == said
    assert images.remark is None
