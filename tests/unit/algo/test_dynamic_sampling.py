"""Which groups carry signal, and how many more to ask."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.algo.dynamic_sampling import carries_signal, groups_to_ask


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [([0.0, 1.0], True), ([1.0, 1.0], False), ([0.0, 0.0, 0.0], False), ([1.0], False), ([], False)],
)
def test_only_mixed_groups_carry_signal(rewards: list[float], signal: bool) -> None:
    assert carries_signal(rewards) is signal


@pytest.mark.parametrize(
    ("wanted", "kept", "seen", "ask"),
    [
        (8, 8, 20, 0),
        (8, 9, 9, 0),
        (8, 0, 0, 8),  # nothing known: a whole iteration
        (8, 0, 100, 8),  # nothing good: no more than that either
        (8, 5, 10, 6),  # 3 missing, (5 + 1) / (10 + 2) kept
        (8, 7, 8, 2),  # 1 missing, 8 / 10 kept
    ],
)
def test_how_many_more(wanted: int, kept: int, seen: int, ask: int) -> None:
    assert groups_to_ask(wanted, kept, seen) == ask


@given(wanted=st.integers(1, 100), kept=st.integers(0, 200), more=st.integers(0, 200))
def test_asking_goes_on_until_there_are_enough(wanted: int, kept: int, more: int) -> None:
    ask = groups_to_ask(wanted, kept, kept + more)
    assert (ask == 0) == (kept >= wanted)
    assert min(wanted, max(0, wanted - kept)) <= ask <= wanted
