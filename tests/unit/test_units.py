"""Sizes in words: one formatter for plans, errors and summaries."""

from __future__ import annotations

import pytest

from rlplace.units import byte_unit, exact_bytes, show_bytes


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (-(3 << 20), "-3 MiB"), (80 << 30, "80 GiB")],
)
def test_sizes_are_shown_in_the_largest_unit_that_fits(size: int, text: str) -> None:
    assert show_bytes(size) == text


@pytest.mark.parametrize(("size", "text"), [(1023, "1023 bytes"), (1536, "1.5 KiB (1536)")])
def test_sizes_that_differ_by_little_are_shown_exactly_as_well(size: int, text: str) -> None:
    assert exact_bytes(size) == text


def test_a_table_has_the_unit_of_its_largest_entry() -> None:
    assert byte_unit(5 << 20) == (1 << 20, "MiB")
    assert byte_unit(5) == (1, "bytes")
