"""`component_placement` -> slots, relations and problems."""

from __future__ import annotations

import pytest

from rlplace.errors import Source
from rlplace.placement import Topology
from tests.unit.placement.placing import EIGHT, TWO, only_problem, place, problems

PPO = ("actor", "rollout", "env")
OPEN = "actor: <numbers, such as 0-3, or all>"  # nobody knows what is meant


def accelerators(value: object, topology: Topology = EIGHT) -> list[list[int]]:
    return [
        list(s.accelerators) for s in place({"actor": value}, topology).slots("actor")
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0-3", [[0], [1], [2], [3]]),
        (3, [[3]]),
        ("3", [[3]]),
        ("all", [[i] for i in range(8)]),
        ("0-2,5,7", [[0], [1], [2], [5], [7]]),
        (["0-1", 4, "6-7"], [[0], [1], [4], [6], [7]]),
        ([0, 1], [[0], [1]]),
        (" 0 - 1 ", [[0], [1]]),
        ("0-1:0-3", [[0], [0], [1], [1]]),
        ("0-3:0-1", [[0, 1], [2, 3]]),
        ("0-7:0", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("all:0-3", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("0-1:0-3,3-5", [[0], [0], [1], [1], [3], [4], [5]]),
        ("0-1:0-3,3-4,5-6:6-9", [[0], [0], [1], [1], [3], [4], [5], [5], [6], [6]]),
        ("4-7:0-1,0-1", [[4, 5], [6, 7], [0], [1]]),
        ("4-5:2-3,0-1:0-1", [[0], [1], [4], [5]]),
        (["0-1:0-3", "2"], [[0], [0], [1], [1], [2]]),
    ],
)
def test_grammar(value: object, expected: list[list[int]]) -> None:
    assert accelerators(value) == expected


@pytest.mark.parametrize(
    ("value", "code", "span", "fix"),
    [
        ("0-8", "accelerator-out-of-range", (2, 3), "actor: 0-7"),
        ("8-9", "accelerator-out-of-range", (0, 3), OPEN),
        ([0, "4-9"], "accelerator-out-of-range", (6, 7), OPEN),
        ("0-15:0-3", "accelerator-out-of-range", (2, 4), OPEN),
        ("0 - 8", "accelerator-out-of-range", (4, 5), "actor: 0-7"),
        ("7-0", "reversed-range", (0, 3), "actor: 0-7"),
        ("0-3:3-0", "reversed-range", (4, 7), "actor: 0-3:0-3"),
        ("0\u20133", "not-a-hyphen", (0, 3), "actor: 0-3"),
        (
            "0-1,1,5",
            "duplicate-accelerator",
            (4, 5),
            'actor: "0-1,5"',
        ),  # the gap in the ranks is no second problem
        (
            "0-3,2",
            "duplicate-accelerator",
            (4, 5),
            "actor: 0-3        (or two ranks on each: 0-3:0-7)",
        ),
        ("0-1:1-4", "rank-gap", (4, 7), "actor: 0-1:0-3"),
        ("0-1:0-1,2-3:1-2", "duplicate-rank", (12, 15), "actor: 0-3"),
        ("0-2:0-3", "uneven-ranks", (0, 7), "one of\nactor: 0-2\nactor: 0-2:0-5"),
        ("0-7:0-2", "uneven-ranks", (0, 7), "one of\nactor: 0-7:0-1\nactor: 0-7:0-3"),
        ("0-1,7-4", "reversed-range", (4, 7), 'actor: "0-1,4-7"'),
        ("0\u22127", "not-a-hyphen", (0, 3), "actor: 0-7"),
        ("0..7", "bad-placement", (0, 4), "actor: 0-7"),
        ("0 to 7", "bad-placement", (0, 6), "actor: 0-7"),
        ("0~7", "bad-placement", (0, 3), "actor: 0-7"),
        ("ALL", "bad-placement", (0, 3), "actor: all"),
        ("0-3;4-7", "bad-placement", (0, 7), 'actor: "0-3,4-7"'),
        ("cuda:0-7", "bad-placement", (0, 8), "actor: 0-7"),
        ("gpu0-gpu3", "bad-placement", (0, 9), "actor: 0-3"),
        ("50%", "bad-placement", (0, 3), "actor: 1/2"),
        (
            "0:8",
            "rank-gap",
            (0, 3),
            'actor: 0-7        (or rank 0 on accelerator 0: actor: "0:0")',
        ),
        ("0:9", "rank-gap", (0, 3), 'actor: "0:0"'),
        ("0-", "bad-placement", (0, 2), OPEN),
        (
            "0-3-5",
            "bad-placement",
            (0, 5),
            'one of\nactor: "0-3,5"\nactor: 0-5',
        ),
        ("x", "bad-placement", (0, 1), OPEN),
        (
            "\uff13",
            "bad-placement",
            (0, 1),
            OPEN,
        ),  # a full-width digit is not a digit here
        ("0:0-5000", "too-many-ranks", (2, 8), "actor: 0"),
        ("0:all", "bad-placement", (2, 5), 'actor: "0:0"'),
        ("1:2:3", "bad-placement", (3, 5), OPEN),
        ("all:0:1", "bad-placement", (5, 7), OPEN),
        ("1,,2", "bad-placement", (2, 3), 'actor: "1,2"'),
        (True, "bad-placement", (0, 4), OPEN),
        (0.7, "bad-placement", (0, 3), OPEN),
        ([{"placement": "0-7"}], "bad-placement", (1, 17), OPEN),
        (-1, "bad-placement", (0, 2), "one of\nactor: 7\nactor: 0-1"),
        (9, "accelerator-out-of-range", (0, 1), OPEN),
        (247, "base-60-integer", (0, 3), "actor: 4-7        (accelerators 4 to 7)"),
        (
            60,
            "base-60-integer",
            (0, 2),
            'actor: "1:0"        (rank 0 on that accelerator)',
        ),
        (
            [0, 247],
            "base-60-integer",
            (4, 7),
            "actor: [0, 4-7]        (accelerators 4 to 7)",
        ),
        (None, "empty-placement", None, OPEN),
        ("  ", "empty-placement", None, OPEN),
        ([], "empty-placement", None, OPEN),
    ],
)
def test_a_mistake_has_code_column_and_fix(
    value: object, code: str, span: tuple[int, int] | None, fix: str
) -> None:
    (problem,) = problems({"actor": value})
    assert (problem.code, problem.fix) == (code, fix)
    if span is not None:
        assert problem.span is not None
        assert (problem.span[0], max(problem.span[1], problem.span[0] + 1)) == span
    assert problem.why


def test_a_number_beyond_60_is_plain_where_it_exists() -> None:
    assert accelerators(60, Topology.uniform(8, 8)) == [[60]]


def test_all_problems_come_at_once_with_their_lines() -> None:
    sources = {"cluster.component_placement.actor": Source(file="run.yaml", line=7)}
    found = problems(
        {"actor": "0-8,3-1", "rolout": "4-7"}, components=PPO, sources=sources
    )
    assert [p.code for p in found] == [
        "reversed-range",
        "unknown-component",
        "unplaced-component",
    ]
    assert str(found[0].source) == "run.yaml:7"
    assert found[1].fix == "rollout: 4-7"
    assert "env" in found[2].what


@pytest.mark.parametrize(
    ("text", "code", "fix"),
    [
        (
            "0-2:0-3,4-6:4-7",
            "uneven-ranks",
            'one of\nactor: "0-2,4-6"\nactor: "0-2:0-5,4-6:6-11"',
        ),
        ("6-9,0-1,4-12", "accelerator-out-of-range", OPEN),
        ("2-5:0,6-9:1", "rank-spans-nodes", 'actor: "2-5:0-1,6-9:2-3"'),
    ],
)
def test_problems_of_one_kind_have_one_fix_for_all(
    text: str, code: str, fix: str
) -> None:
    found = problems(
        {"actor": text}, Topology.uniform(4, 4) if code == "rank-spans-nodes" else EIGHT
    )
    assert [p.code for p in found] == [code] * len(found)
    assert len(found) > 1
    assert {str(p.fix).split("        (")[0] for p in found} == {fix}


def test_component_names() -> None:
    assert place({"actor, rollout": "0-7", "env": "0-1"}).components == (
        "actor",
        "rollout",
        "env",
    )
    assert (
        only_problem({"actor,env": "0-3", "env": "4-7"}).code
        == "component-placed-twice"
    )
    assert only_problem({"actor,": "0-3"}).code == "unknown-component"
    assert (
        only_problem({"critic": 0, "actor,env,rollout": "all"}, components=PPO).code
        == "unknown-component"
    )
    assert [problems(empty, components=PPO)[0].code for empty in ({}, None, "0-7")] == [
        "empty-placement"
    ] * 3


@pytest.mark.parametrize(
    ("more", "components", "fix"),
    [
        ({}, ("actor", "rollout", "reference"), "reference: 0-3"),
        ({}, ("actor", "rollout"), "remove ref"),  # the algorithm has none
        (
            {"reference": "0"},
            ("actor", "rollout", "reference"),
            "one of these names in place of ref",
        ),  # it is placed
    ],
)
def test_names_of_other_libraries_are_understood(
    more: dict[str, str], components: tuple[str, ...], fix: str
) -> None:
    (problem,) = problems(
        {"actor,rollout": "0-7", **more, "ref": "0-3"}, components=components
    )
    assert (problem.code, problem.fix) == ("unknown-component", fix)


def test_a_rank_never_spans_nodes() -> None:
    (problem,) = problems({"actor": "2-7:0-1"}, TWO)
    assert problem.code == "rank-spans-nodes"
    assert problem.fix == "actor: 2-7:0-2        (2 accelerators for each rank)"
    assert "accelerators 2-4" in problem.what
    assert accelerators("0-7:0-1", TWO) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (
        problems({"actor": "0-7:0-1"}, Topology.uneven([3, 5]))[0].code
        == "rank-spans-nodes"
    )


@pytest.mark.parametrize(
    ("actor", "env", "word", "shared"),
    [
        ("0-7", "0-7", "collocated", "0-7"),
        ("0-3", "4-7", "disaggregated", ""),
        ("0-7", "2-3", "hybrid", "2-3"),
    ],
)
def test_the_word_for_a_pair_and_for_all(
    actor: str, env: str, word: str, shared: str
) -> None:
    placement = place({"actor": actor, "env": env})
    assert placement.relation("actor", "env") == placement.mode == word
    assert str(placement.shared("actor", "env")) == shared
    assert place({"actor": actor, "env": env, "rollout": "4-7"}).mode == "hybrid"
    assert place({"actor": actor}).mode == "disaggregated"


def test_where_no_node_has_accelerators_the_numbers_are_nodes() -> None:
    placement = place({"actor": "0-1:0-3"}, Topology.uneven([0, 0]))
    assert [(s.node, s.accelerators) for s in placement.slots("actor")] == [
        (0, ()),
        (0, ()),
        (1, ()),
        (1, ()),
    ]
    assert placement.canonical() == {"actor": "0-1:0-3"}
    assert (
        problems({"actor": "all:0"}, Topology.uneven([0, 0]))[0].code
        == "rank-spans-nodes"
    )


def test_asking_for_a_component_that_is_not_placed() -> None:
    with pytest.raises(KeyError, match="did you mean 'actor'"):
        place({"actor": "0-3"}).world_size("actr")
