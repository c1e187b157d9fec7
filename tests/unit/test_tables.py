"""Rows -> lines of text; counts -> words."""

from __future__ import annotations

import pytest

from rlplace.tables import chapter, indented, table
from rlplace.units import counted, plural, verb


def test_each_column_is_as_wide_as_its_widest_cell() -> None:
    rows = [("name", "count"), ("a longer name", "7")]
    assert table(rows) == ["name            count", "a longer name   7"]


def test_columns_are_set_to_the_right_where_asked() -> None:
    rows = [("name", "count", "note"), ("a", "7", "x")]
    assert table(rows, gap=2, right=[1]) == ["name  count  note", "a         7  x"]


def test_lines_have_no_spaces_at_their_ends() -> None:
    assert table([("wide", ""), ("a", "b")]) == ["wide", "a      b"]


def test_a_cell_longer_than_the_largest_width_moves_its_own_line_alone() -> None:
    rows = [("a", "1"), ("a long name", "2"), ("abc", "3")]
    assert table(rows, gap=1, most=3) == ["a   1", "a long name 2", "abc 3"]


def test_no_rows_are_no_lines() -> None:
    assert table([]) == []


def test_rows_of_different_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        table([("a", "b"), ("c",)])


def test_lines_of_a_chapter_are_indented() -> None:
    assert chapter("title", ["one", "", "two"]) == "title\n  one\n\n  two"
    assert indented(["one", ""]) == ["  one", ""]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks")]
)
def test_a_noun_goes_with_its_count(count: int, text: str) -> None:
    assert counted(count, "rank") == text


def test_noun_and_verb_go_with_the_count() -> None:
    assert f"{plural(1, 'rank')} {verb(1, 'wait')}" == "rank waits"
    assert f"{plural(2, 'rank')} {verb(2, 'wait')}" == "ranks wait"
