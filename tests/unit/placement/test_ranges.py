"""The grammar of number ranges and the sets they mean."""

from __future__ import annotations

import pytest

from rlplace.placement.machines.ranges import Ranges, parse_ranges


@pytest.mark.parametrize(
    ("text", "numbers", "canonical"),
    [
        ("0-7", range(8), "0-7"),
        ("3", [3], "3"),
        ("all", range(8), "0-7"),
        ("0-2,5,7", [0, 1, 2, 5, 7], "0-2,5,7"),
        (" 0 - 2 , 5 ", [0, 1, 2, 5], "0-2,5"),
        ("5,0-2", [0, 1, 2, 5], "0-2,5"),
        ("0,1,2", [0, 1, 2], "0-2"),
        ("0-3,2-5", range(6), "0-5"),
        ("4-9", range(4, 10), "4-9"),  # numbers beyond the count are the caller's to judge
    ],
)
def test_text_means_these_numbers(text: str, numbers: list[int], canonical: str) -> None:
    ranges, mistakes = parse_ranges(text, 8)
    assert (list(ranges), mistakes, str(ranges)) == (list(numbers), (), canonical)


@pytest.mark.parametrize(
    ("text", "code", "span", "replacement"),
    [
        ("7-0", "reversed-range", (0, 3), "0-7"),
        ("0-1,7-4", "reversed-range", (4, 7), "4-7"),
        ("0\u20137", "not-a-hyphen", (0, 3), "0-7"),
        ("0\u22127", "not-a-hyphen", (0, 3), "0-7"),
        ("0..7", "bad-placement", (0, 4), "0-7"),
        ("0 to 7", "bad-placement", (0, 6), "0-7"),
        ("0~7", "bad-placement", (0, 3), "0-7"),
        ("ALL", "bad-placement", (0, 3), "all"),
        ("-1", "bad-placement", (0, 2), None),
        ("0-", "bad-placement", (0, 2), None),
        ("0-3-5", "bad-placement", (0, 5), None),
        ("x", "bad-placement", (0, 1), None),
        ("1,,2", "bad-placement", (2, 2), None),
        ("", "bad-placement", (0, 0), None),
        ("\uff13", "bad-placement", (0, 1), None),  # a full-width digit is not a digit here
        ("9" * 5000, "bad-placement", (0, 5000), None),
    ],
)
def test_mistakes_have_code_column_and_replacement(
    text: str, code: str, span: tuple[int, int], replacement: str | None
) -> None:
    _, (mistake,) = parse_ranges(text, 8)
    assert (mistake.code, mistake.span, mistake.replacement) == (code, span, replacement)


def test_every_mistake_is_found() -> None:
    _, mistakes = parse_ranges("3-1,x,0\u20132", 8)
    assert [m.code for m in mistakes] == ["reversed-range", "bad-placement", "not-a-hyphen"]


def test_set_operations_on_pieces() -> None:
    a, b = Ranges.of([range(4), range(8, 12)]), Ranges.of([range(2, 9)])
    assert str(a & b) == "2-3,8"
    assert str(a | b) == "0-11"
    assert str(a - b) == "0-1,9-11"
    assert str(b - a) == "4-7"
    assert not a - a
    assert len(a) == 8
    assert 3 in a
    assert 4 not in a
    assert str(a.within(range(3, 9))) == "3,8"
    assert str(a.shifted(2)) == "2-5,10-13"


def test_sets_of_a_million_numbers_cost_nothing() -> None:
    million = Ranges.of([range(1_000_000)])
    assert len(million & Ranges.of([range(500_000, 2_000_000)])) == 500_000


def test_a_window_behind_a_piece_takes_nothing_of_it() -> None:
    ranges, _ = parse_ranges("0-1,5-6", 8)
    assert str(ranges.within(range(3, 6))) == "5"
    assert not ranges.within(range(2, 5))
