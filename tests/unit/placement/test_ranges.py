"""Sets of numbers as ranges."""

from __future__ import annotations

from rlplace.placement.machines.ranges import Ranges


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
    ranges = Ranges.of([range(2), range(5, 7)])
    assert str(ranges.within(range(3, 6))) == "5"
    assert not ranges.within(range(2, 5))
