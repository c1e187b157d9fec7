"""The forms of a line beyond plain numbers: blocks, counts, fractions, rest, same_as, parallel sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from rlplace.errors import Problem, Source
from rlplace.placement import Topology
from tests.unit.placement.placing import EIGHT, SIXTEEN, only_problem, place, problems

NO_PASTE = "two fixes in one, or one of two problems"
OPEN = "the choices are said: nobody knows what is meant"


def text(
    value: object, topology: Topology = EIGHT, component: str = "rollout", **others: Any
) -> str:
    """The canonical numbers of one component beside `others`."""
    canonical = (
        place({**others, component: value}, topology).spec(component).canonical()
    )
    return canonical if isinstance(canonical, str) else str(canonical["placement"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"placement": "4-7"}, "4-7"),
        ({"placement": 4}, "4"),
        ({"placement": ["4", 6]}, "4,6"),
        ({"accelerators": [0, 1, 4]}, "0-1,4"),
        ({"accelerators": "0-1,4"}, "0-1,4"),
        ({"accelerators": [0, 1, 4], "ranks_per_accelerator": 2}, "0-1:0-3,4:4-5"),
        ({"accelerators": "0-7", "accelerators_per_rank": 4}, "0-7:0-1"),
        ({"placement": "all", "accelerators_per_rank": 8}, "0-7:0"),
        ({"placement": "4-5,2-3", "accelerators_per_rank": 2}, "4-5:0,2-3:1"),
    ],
)
def test_blocks_say_the_same_as_text(value: object, expected: str) -> None:
    assert text(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"accelerators": 2}, "4-5"),
        ({"accelerators": "2"}, "4-5"),
        ("1/4", "4-5"),
        ({"placement": "1/2"}, "4-7"),
        ({"accelerators": "1/2", "accelerators_per_rank": 2}, "4-7:0-1"),
        ("rest", "4-7"),
        ({"placement": "rest", "ranks_per_accelerator": 2}, "4-7:0-7"),
        ({"same_as": "actor"}, "0-3"),
        ({"same_as": "actor", "accelerators_per_rank": 2}, "0-3:0-1"),
    ],
)
def test_what_the_engine_picks_beside_an_actor_on_0_to_3(
    value: object, expected: str
) -> None:
    assert text(value, actor="0-3") == expected
    assert (
        place({"rollout": value, "actor": "0-3"}).canonical()["rollout"] == expected
    )  # wherever the line stands


def test_counts_take_turns_and_rest_takes_what_is_left() -> None:
    placement = place(
        {
            "actor": {"accelerators": 3},
            "env": "rest",
            "critic": {"accelerators": 2},
            "rollout": "1",
        }
    )
    assert placement.canonical() == {
        "actor": "2-4",
        "env": "0,7",
        "critic": "5-6",
        "rollout": "1",
    }
    both = place({"actor": "0-5", "env": "rest", "rollout": "rest"})
    assert both.canonical() == {"actor": "0-5", "env": "6-7", "rollout": "6-7"}


def test_counts_keep_what_belongs_together_on_one_node() -> None:
    assert (
        text({"accelerators": 8, "accelerators_per_rank": 4}, SIXTEEN, actor="0-2")
        == "8-15:0-1"
    )
    assert (
        text({"accelerators": 12, "tensor_parallel_size": 4}, SIXTEEN, actor="0-2")
        == "3-6,8-15"
    )
    assert text(
        {
            "accelerators": 12,
            "tensor_parallel_size": 4,
            "tensor_parallel_across_nodes": True,
        },
        SIXTEEN,
    ) == ("0-11")
    assert (
        place({"actor": "1,3,5", "rollout": {"accelerators": 4}}).canonical()["rollout"]
        == "0,2,4,6"
    )


def test_same_as_follows_a_chain_and_comma_keys() -> None:
    placement = place({"a,b": {"same_as": "c"}, "c": {"same_as": "d"}, "d": "0-3:0-1"})
    assert placement.canonical() == dict.fromkeys("abcd", "0-3:0-1")


@pytest.mark.parametrize(
    ("value", "code", "key", "fix"),
    [
        ({}, "bad-placement", "", OPEN),
        ({"placement": "4-7", "same_as": "actor"}, "bad-placement", "", OPEN),
        ({"placement": None}, "empty-placement", ".placement", OPEN),
        ({"placement": {"x": 1}}, "bad-placement", ".placement", OPEN),
        (
            {"placement": "4-8"},
            "accelerator-out-of-range",
            ".placement",
            "placement: 4-7",
        ),
        ({"placement": "7-4"}, "reversed-range", ".placement", "placement: 4-7"),
        (
            {"placement": 247},
            "base-60-integer",
            ".placement",
            "placement: 4-7        (accelerators 4 to 7)",
        ),
        (
            {"placement": "4-7", "tp": 2},
            "unknown-key",
            ".tp",
            "tensor_parallel_size: 2",
        ),
        (
            {"placement": "4-6", "tensor_paralel_size": 2},
            "unknown-key",
            ".tensor_paralel_size",
            NO_PASTE,
        ),
        (
            {"placement": "4-6", "tensor_parallel_size": 2},
            "parallel-sizes",
            ".tensor_parallel_size",
            OPEN,
        ),
        (
            {"node_group": "nod", "placement": "0"},
            "unknown-node-group",
            ".node_group",
            "node_group: node",
        ),
        (
            {"node_group": "node,node", "placement": "0"},
            "node-group-repeated",
            ".node_group",
            "node_group: node",
        ),
        (
            {"node_group": "node", "placement": "0-1"},
            "node-out-of-range",
            ".placement",
            None,
        ),
        ({"accelerators": 0}, "bad-count", ".accelerators", OPEN),
        ({"accelerators": True}, "bad-placement", ".accelerators", OPEN),
        ({"accelerators": 5}, "not-enough-free", ".accelerators", OPEN),
        (
            {"accelerators": 3, "tensor_parallel_size": 2},
            "uneven-ranks",
            ".accelerators",
            "accelerators: 4",
        ),
        (
            {"placement": "4-7", "ranks_per_accelerator": 10**40},
            "bad-count",
            ".ranks_per_accelerator",
            OPEN,
        ),
        (
            {"placement": "4-7", "ranks_per_accelerator": 10**5},
            "too-many-ranks",
            ".ranks_per_accelerator",
            OPEN,
        ),
        (
            {"placement": "4-7", "tensor_parallel_size": 0},
            "bad-count",
            ".tensor_parallel_size",
            OPEN,
        ),
        (
            {"placement": "4-7", "tensor_parallel_across_nodes": 1},
            "bad-placement",
            None,
            OPEN,
        ),
        (
            {
                "placement": "4-7",
                "accelerators_per_rank": 2,
                "ranks_per_accelerator": 2,
            },
            "bad-placement",
            "",
            NO_PASTE,
        ),
        (
            {"placement": "4-7:0-1", "accelerators_per_rank": 2},
            "bad-placement",
            ".placement",
            "placement: 4-7",
        ),
        (
            {"placement": "4-6", "accelerators_per_rank": 2},
            "uneven-ranks",
            ".placement",
            "accelerators_per_rank: 1",
        ),
        (
            {"placement": "0-7", "accelerators_per_rank": 3},
            "uneven-ranks",
            ".placement",
            "accelerators_per_rank: 2",
        ),
        ("3/16", "uneven-fraction", "", "rollout: {accelerators: 1}"),
        ("9/8", "uneven-fraction", "", "rollout: all"),
        (
            {"accelerators": "1/3"},
            "uneven-fraction",
            ".accelerators",
            "accelerators: 2",
        ),
        ({"same_as": "actr"}, "unknown-component", ".same_as", "same_as: actor"),
        ({"same_as": 3}, "bad-placement", ".same_as", OPEN),
        ({"same_as": "rollout"}, "circular-placement", ".same_as", "rollout: all"),
        (
            {"same_as": "actor", "accelerators_per_rank": 3},
            "uneven-ranks",
            ".same_as",
            "accelerators_per_rank: 2",
        ),
    ],
)
def test_a_mistake_is_located_and_its_fix_works_when_pasted(
    value: object, code: str, key: str | None, fix: str | None
) -> None:
    block = {"actor": "0-3", "rollout": value}
    problem = only_problem(block)
    assert problem.code == code
    if key is not None:
        assert problem.key == f"cluster.component_placement.rollout{key}"
    if fix == OPEN:
        assert re.search(r"<.*>|^one of\n", str(problem.fix))
    if fix in (NO_PASTE, OPEN):
        return
    assert problem.fix == fix or fix is None
    place(pasted(block, problem))


def pasted(block: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
    """The block with the problem's fix in its place."""
    fix = str(problem.fix).split("        (")[0]
    line = dict(block["rollout"]) if isinstance(block["rollout"], Mapping) else {}
    if fix.startswith("remove"):
        del line[fix.split()[1]]
    else:
        if problem.code == "unknown-key":
            del line[problem.key.rpartition(".")[2]]
        line |= yaml.safe_load(fix)
    return {**block, "rollout": line.pop("rollout", line)}


def test_nothing_left_and_no_component_to_follow() -> None:
    assert only_problem({"actor": "all", "rollout": "rest"}).code == "nothing-left"
    assert (
        only_problem({"rollout": {"same_as": "actor"}}).fix == "same_as: <a component>"
    )
    assert (
        only_problem({"rollout": {"accelerators": 9}}).fix == "accelerators: <a number>"
    )


def test_circles_are_reported_once() -> None:
    found = only_problem(
        {
            "a": {"same_as": "b"},
            "b": {"same_as": "c"},
            "c": {"same_as": "a"},
            "d": {"same_as": "a"},
        }
    )
    assert found.code == "circular-placement"
    assert "a -> b -> c -> a" in found.what


def test_what_depends_on_a_broken_line_is_not_a_second_problem() -> None:
    assert (
        only_problem({"actor": "0-8", "rollout": {"same_as": "actor"}}).code
        == "accelerator-out-of-range"
    )


def test_a_problem_inside_a_block_has_its_line() -> None:
    sources = {
        "cluster.component_placement.actor": Source(file="run.yaml", line=4),
        "cluster.component_placement.actor.placement": Source(file="run.yaml", line=6),
    }
    assert (
        str(only_problem({"actor": {"placement": "0-8"}}, sources=sources).source)
        == "run.yaml:6"
    )
    assert (
        str(
            only_problem(
                {"actor": {"placement": "0-7", "x": 1}}, sources=sources
            ).source
        )
        == "run.yaml:4"
    )


@pytest.mark.parametrize(
    ("placement", "tensor", "more", "copies"),
    [
        ("0-7", 4, {}, 2),
        ("0-7:0-1", 4, {}, 2),
        ("0-7:0", 4, {}, 2),
        ("0-7:0-3", 4, {"data_parallel_size": 2}, 2),
        ("0-15", 16, {"tensor_parallel_across_nodes": True}, 1),
        ("0-7", 1, {"data_parallel_size": 8}, 8),
    ],
)
def test_copies(
    placement: str, tensor: int, more: Mapping[str, object], copies: int
) -> None:
    block = {
        "rollout": {"placement": placement, "tensor_parallel_size": tensor, **more}
    }
    assert place(block, SIXTEEN).spec("rollout").num_copies == copies


@pytest.mark.parametrize(
    ("placement", "tensor", "more", "code", "fix"),
    [
        (
            "0-5",
            4,
            {},
            "parallel-sizes",
            "one of\ntensor_parallel_size: 3\ntensor_parallel_size: 6",
        ),
        (
            "0-7",
            4,
            {"data_parallel_size": 4},
            "parallel-sizes",
            "one of\ndata_parallel_size: 2\ntensor_parallel_size: 2",
        ),
        (
            "0-5",
            2,
            {"context_parallel_size": 2},
            "parallel-sizes",
            "context_parallel_size: 1",
        ),
        (
            "0-7",
            1,
            {"context_parallel_size": 3},
            "parallel-sizes",
            "context_parallel_size: 2",
        ),
        (
            "0-7",
            2,
            {"context_parallel_size": 2, "data_parallel_size": 4},
            "parallel-sizes",
            "data_parallel_size: 2",
        ),
        ("0-7:0-15", 1, {"context_parallel_size": 2}, "parallel-sizes", None),
        (
            "0-1",
            1,
            {"node_group": "node", "context_parallel_size": 2},
            "parallel-sizes",
            "remove context_parallel_size",
        ),
        ("0-7:0-15", 2, {}, "parallel-sizes", None),
        ("0-5:0-1", 2, {}, "parallel-sizes", "tensor_parallel_size: 3"),
        ("0-15", 16, {}, "copy-spans-nodes", None),
        (
            "4-11",
            8,
            {},
            "copy-spans-nodes",
            "tensor_parallel_size: 4        (or accept it: {})",
        ),
        (
            "0-1",
            2,
            {"node_group": "node"},
            "parallel-sizes",
            "remove tensor_parallel_size",
        ),
        (
            "0-1",
            1,
            {"node_group": "node", "data_parallel_size": 2},
            "parallel-sizes",
            "remove data_parallel_size",
        ),
    ],
)
def test_parallel_sizes_are_checked_against_the_placement(
    placement: str, tensor: int, more: Mapping[str, object], code: str, fix: str | None
) -> None:
    problem = only_problem(
        {"rollout": {"placement": placement, "tensor_parallel_size": tensor, **more}},
        SIXTEEN,
    )
    assert problem.code == code
    assert fix is None or problem.fix == fix.format(
        "tensor_parallel_across_nodes: true"
    )


def test_the_canonical_form_reads_back() -> None:
    block = {
        "actor": {"accelerators": 8},
        "rollout": {
            "same_as": "actor",
            "tensor_parallel_size": 4,
            "data_parallel_size": 2,
        },
        "critic": {
            "placement": "8-15",
            "tensor_parallel_size": 2,
            "tensor_parallel_across_nodes": True,
        },
        "env": "rest",
        "agent": {"node_group": "node", "placement": "0-1:0-3"},
    }
    topology = Topology.uniform(3, 8)
    first = place(block, topology)
    again = place(first.canonical(), topology)
    assert again.canonical() == first.canonical()
    for component in first.components:
        assert again.slots(component) == first.slots(component)
        assert again.spec(component).parallel == first.spec(component).parallel


def test_a_very_long_text_is_shown_around_the_mistake() -> None:
    wide = Topology.uniform(1, 4000)
    problem = only_problem(
        {"actor": ",".join(map(str, range(0, 4000, 2))) + ",9-7"}, wide
    )
    assert problem.got is not None
    assert len(problem.got) < 200
    assert problem.span is not None
    assert problem.got[slice(*problem.span)] == "9-7"
    assert problem.fix == "write 7-9 instead of 9-7"
    assert len(problems({"actor": "x," * 500})) == 8


def test_cpu_is_a_process_of_the_first_node() -> None:
    placement = place(
        {
            "actor": "0-3",
            "reward.math": "cpu",
            "reward.style": {"node_group": "node", "placement": 0},
        }
    )
    (slot,) = placement.slots("reward.math")
    assert (slot.node, slot.accelerators, slot.node_group) == (0, (), "node")
    assert (
        placement.spec("reward.math").render()
        == placement.spec("reward.style").render()
        == "cpu"
    )
    assert place(placement.canonical()).canonical() == placement.canonical()


@pytest.mark.parametrize(
    ("text", "fixed"),
    [
        ("actor: {placement: 0-3,5-7}", 'actor: {placement: "0-3,5-7"}'),
        ("actor: {accelerators: 0-1,3,5-7, ranks_per_accelerator: 2}", None),
        (
            "actor: {node_group: a,b, placement: all}",
            'actor: {node_group: "a,b", placement: all}',
        ),
        ("{actor,rollout: 0-3, env: 4-7}", '"actor,rollout": 0-3'),
        ("{actor,rollout,env: 0-3}", '"actor,rollout,env": 0-3'),
    ],
)
def test_a_comma_that_yaml_takes_for_the_end_of_an_entry(
    text: str, fixed: str | None
) -> None:
    groups = [{"label": label, "node_ranks": i} for i, label in enumerate("ab")]
    written = yaml.safe_load(text)
    source = Source(file="run.yaml", line=3)
    sources = dict.fromkeys(
        (f"cluster.component_placement.{c}" for c in written), source
    )
    problem = only_problem(written, SIXTEEN, node_groups=groups, sources=sources)
    assert (problem.code, problem.source) == ("comma-in-braces", source)
    assert fixed is None or problem.fix == fixed
    pasted = yaml.safe_load(str(problem.fix))
    split = set(str(next(iter(pasted))).split(","))
    assert place(
        {k: v for k, v in written.items() if k not in split} | pasted,
        SIXTEEN,
        node_groups=groups,
    ).components


@pytest.mark.parametrize(
    ("text", "env"),
    [
        ("{actor: 0-3,5-7, env: 0-3}", "0-3"),
        ("{actor: 0-7, env: 0-1,3,5-7}", "0-1,3,5-7"),
        ("{actor: 0-7, env: 0,1, rollout: 4}", "0-1"),
        ("{actor: 0-7, env,rollout: 0-3,5-7}", "0-3,5-7"),
    ],
)
def test_a_comma_in_a_placement_whose_components_are_all_in_one_pair_of_braces(
    text: str, env: str
) -> None:
    problem = problems(yaml.safe_load(text))[0]
    assert (problem.code, problem.key) == (
        "comma-in-braces",
        "cluster.component_placement",
    )
    assert (
        place(yaml.safe_load(str(problem.fix))["component_placement"])
        .spec("env")
        .render()
        == env
    )


def test_an_empty_line_beside_others_is_no_split_key() -> None:
    sources = {
        f"cluster.component_placement.{c}": Source(file="x", line=i)
        for i, c in enumerate(("actor", "env"))
    }
    problem = only_problem({"actor": None, "env": "0-3"}, sources=sources)
    assert (problem.code, problem.fix) == (
        "empty-placement",
        "actor: <numbers, such as 0-3, or all>",
    )
