"""Remarks of a run: what several ranks, stage groups or iterations say is shown once."""

from __future__ import annotations

from rlplace.runtime.run import new_remarks

OUTSIDE = "env.id: own:Env-v{version} shows numbers outside of its space, from -0.1 to 0.1 there: {number}"


def test_remarks_that_differ_in_their_numbers_are_said_once() -> None:
    said: set[str] = set()
    first = OUTSIDE.format(version=0, number="1.87796")
    others = [
        OUTSIDE.format(version=0, number=number)
        for number in ("-1.24202", "3e+09", "1,234,567")
    ]
    assert new_remarks([first, others[0]], said) == [first]
    assert new_remarks([first, *others], said) == []


def test_remarks_about_other_things_are_said() -> None:
    said: set[str] = set()
    lines = [
        OUTSIDE.format(version=0, number="1.0"),
        OUTSIDE.format(version=1, number="1.0"),
        "env.rewards[0]: nothing is learned",
        "env.rewards[1]: nothing is learned",
    ]
    assert new_remarks(lines, said) == lines
