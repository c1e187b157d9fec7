"""`part 2/3`: a share of whatever there is, by its place."""

from __future__ import annotations

import pytest

from rlplace.placement import Topology
from tests.unit.placement.placing import only_problem, place


def accelerators(text: str, count: int) -> list[int]:
    """Return where the ranks of one component are, on one node of `count` accelerators."""
    return [
        slot.accelerators[0]
        for slot in place({"actor": text}, Topology.uniform(1, count)).slots("actor")
    ]


@pytest.mark.parametrize(
    ("count", "halves", "thirds"),
    [
        (1, ([0], [0]), ([0], [0], [0])),
        (2, ([0], [1]), ([0], [0, 1], [1])),
        (3, ([0, 1], [1, 2]), ([0], [1], [2])),
        (4, ([0, 1], [2, 3]), ([0, 1], [1, 2], [2, 3])),
        (8, ([0, 1, 2, 3], [4, 5, 6, 7]), ([0, 1, 2], [2, 3, 4, 5], [5, 6, 7])),
    ],
)
def test_parts_are_shares_of_what_there_is(
    count: int, halves: tuple[list[int]], thirds: tuple[list[int]]
) -> None:
    """Every accelerator is in one, and those at a border that comes out uneven in both."""
    assert tuple(accelerators(f"part {i}/2", count) for i in (1, 2)) == halves
    assert tuple(accelerators(f"part {i} / 3", count) for i in (1, 2, 3)) == thirds


def test_a_part_may_be_one_of_several_pieces_and_have_ranks() -> None:
    assert accelerators("part 1/4,part 4/4", 8) == [0, 1, 6, 7]
    assert (
        accelerators("part 1/2 of 4,part 2/2 of 4", 16)
        == accelerators("all of 4", 4)
        == [0, 1, 2, 3]
    )
    assert accelerators("part 2/2:0-7", 8) == [4, 4, 5, 5, 6, 6, 7, 7]


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        # Two numbers in the wrong order, or the last part
        ("part 3/2", "one of\nactor: part 2/3\nactor: part 2/2"),
        ("part 0/2", "actor: part 1/2"),
        ("part 1/0", "actor: all"),
        ("all of 0", "actor: all"),
    ],
)
def test_a_part_that_is_not_there_is_refused(text: str, fix: str) -> None:
    problem = only_problem({"actor": text})
    assert (problem.code, problem.fix) == ("bad-placement", fix)
