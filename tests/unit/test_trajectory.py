"""Cutting and joining trajectories loses nothing and keeps final observations beside their cuts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.trajectory import Observation, Trajectory, concat


def label(step: int, row: int) -> float:
    """A number that tells step and global row."""
    return 100.0 * step + row


def trajectory(
    truncated: np.ndarray[Any, Any], first_row: int = 0, **changes: Any
) -> Trajectory:
    """Every entry carries its own label, so that a misplaced one is seen; a final observation adds a half to it."""
    steps, rows = truncated.shape
    labels = np.array(
        [[label(t, first_row + b) for b in range(rows)] for t in range(steps)],
        np.float32,
    )
    cuts = np.argwhere(truncated)
    fields = {
        "first_row": first_row,
        "env_rank": 0,
        "version_min": 3,
        "version_max": 3,
        "observations": labels.reshape(steps, rows, 1),
        "actions": labels.reshape(steps, rows, 1) + 1000,
        "logprobs": labels + 2000,
        "values": labels + 3000,
        "rewards": labels + 4000,
        "terminated": (labels % 2 == 0) & ~truncated,
        "truncated": truncated,
        "last_observations": labels[-1].reshape(rows, 1) + 5000,
        "final_observations": np.array(
            [[label(t, first_row + b) + 0.5] for t, b in cuts], np.float32
        ).reshape(-1, 1),
    }
    return Trajectory(**(fields | changes))


def assert_same(left: Trajectory, right: Trajectory) -> None:
    for field in dataclasses.fields(Trajectory):
        one, other = getattr(left, field.name), getattr(right, field.name)
        np.testing.assert_array_equal(one, other, err_msg=field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype


@st.composite
def cut_in_pieces(draw: st.DrawFn) -> tuple[Trajectory, list[int]]:
    """A trajectory with truncations anywhere, and the inner borders of a division of its rows."""
    steps, rows = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    flags = draw(st.lists(st.booleans(), min_size=steps * rows, max_size=steps * rows))
    whole = trajectory(
        np.array(flags).reshape(steps, rows), first_row=draw(st.integers(0, 20))
    )
    return whole, sorted(draw(st.sets(st.integers(1, rows - 1)))) if rows > 1 else []


@given(case=cut_in_pieces(), data=st.data())
def test_pieces_are_what_their_own_rows_would_have_made_and_join_to_the_whole(
    case: tuple[Trajectory, list[int]], data: st.DataObject
) -> None:
    whole, borders = case
    pieces = [
        whole.split(a, b)
        for a, b in zip([0, *borders], [*borders, whole.rows], strict=True)
    ]
    for piece, start in zip(pieces, [0, *borders], strict=True):
        assert_same(
            piece,
            trajectory(
                whole.truncated[:, start : start + piece.rows], whole.first_row + start
            ),
        )
    pieces[-1] = dataclasses.replace(pieces[-1], version_min=1, version_max=9)
    joined = dataclasses.replace(
        whole, version_min=1, version_max=9
    )  # the versions span those of the pieces
    assert_same(concat(data.draw(st.permutations(pieces))), joined)


NONE = np.zeros((2, 2), bool)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([0, 3], "end at 1 and go on at 3"),
        ([0, 1], "end at 1 and go on at 1"),
        ([], "nothing to join"),
    ],
)
def test_pieces_must_be_neighbours(rows: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        concat([trajectory(NONE, row) for row in rows])


def test_rows_outside_cannot_be_split_off() -> None:
    for start, stop in ((-1, 1), (1, 1), (2, 1), (0, 3)):
        with pytest.raises(ValueError, match=f"rows {start}:{stop} of 2"):
            trajectory(NONE).split(start, stop)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"values": np.zeros((1, 2))},
            r"values has shape \(1, 2\), expected \[T, B\] = \(2, 2\)",
        ),
        (
            {"last_observations": np.zeros((1, 1), np.float32)},
            "1 last observations for 2 rows",
        ),
        (
            {"final_observations": np.zeros((0, 1), np.float32)},
            "0 final observations for 1 cuts",
        ),
        ({"terminated": np.ones((2, 2), bool)}, "both terminated and truncated"),
    ],
)
def test_what_contradicts_itself_is_refused(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        trajectory(np.array([[True, False], [False, False]]), **changes)


def test_an_item_weighs_its_samples_and_a_piece_shares_memory_with_the_whole() -> None:
    whole = trajectory(np.zeros((3, 4), bool))
    assert whole.weight == 12
    assert np.shares_memory(whole.split(1, 3).observations, whole.observations)
    asked = Observation(
        env_rank=0,
        stage_group=0,
        step=0,
        first_row=4,
        observations=np.zeros((5, 2), np.float32),
    )
    assert asked.weight == 5
