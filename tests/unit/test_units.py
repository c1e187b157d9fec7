"""Long texts that are cut short say so."""

from __future__ import annotations

from rlplace.units import clipped, with_length


def test_a_cut_text_is_as_long_as_it_may_be_and_says_that_it_is_cut() -> None:
    assert clipped("abcdef", 6) == "abcdef"
    assert clipped("abcdefgh", 6) == "ab ..."
    assert clipped("abcdefgh", 6, "…") == "abcde…"


def test_a_cut_text_may_say_its_length() -> None:
    assert with_length("abcdef", 6) == "abcdef"
    assert with_length("abcdefgh", 6) == "abcdef ... (8 characters)"
