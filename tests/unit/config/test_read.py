"""How a mapping becomes a dataclass, and what a wrong one is told; every code of the reader is raised here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import pytest
import yaml

from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.read import read_block, read_config
from rlplace.config.yaml_text import show
from rlplace.errors import ConfigError, Problem, Source
from rlplace.workers.launch.machines import declared_topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    name: str
    size: int = dataclasses.field(default=0, metadata={"unit": "bytes"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner
    count: int = dataclasses.field(default=1, metadata={"minimum": 1, "maximum": 8})
    rate: float = dataclasses.field(default=0.5, metadata={"above": 0, "below": 1})
    flag: bool = False
    mode: Literal["fast", "slow"] = "fast"
    many: int | Literal["auto"] = dataclasses.field(
        default="auto", metadata={"minimum": 1}
    )
    limit: float | None = None
    level: Literal[1, 2, 3] = 1
    cache: Literal["bf16", "fp8"] | None = None
    sizes: tuple[int, ...] = dataclasses.field(default=(), metadata={"minimum": 1})
    modes: tuple[Literal["fast", "slow"], ...] = ()
    free: Mapping[str, object] = dataclasses.field(default_factory=dict)
    named: Inner | Mapping[str, Inner] | None = None


def read(**values: Any) -> Outer:
    outer, problems = read_block(Outer, {"inner": {"name": "n"}, **values})
    assert problems == []
    assert outer is not None
    return outer


def problem(sources: Mapping[str, Source] | None = None, **values: Any) -> Problem:
    """The only problem of a mapping."""
    outer, problems = read_block(
        Outer, {"inner": {"name": "n"}, **values}, sources=sources
    )
    assert outer is None
    assert len(problems) == 1
    return problems[0]


def test_a_block_or_blocks_by_name() -> None:
    assert read(named={"name": "n"}).named == Inner(name="n")
    assert read(
        named={"a": {"name": "n"}, "b": {"name": "m", "size": "1KiB"}}
    ).named == {
        "a": Inner(name="n"),
        "b": Inner(name="m", size=1024),
    }
    assert problem(named={"name": "n", "sise": 1}).key == "named.sise"
    wrong = problem(named={"a": {"name": "n", "sise": 1}})
    assert (wrong.code, wrong.key) == ("unknown-key", "named.a.sise")
    wrong = problem(named={"a": {"name": "n", 1: 2}})
    assert (wrong.code, wrong.what) == ("unknown-key", "unknown key")


@pytest.mark.parametrize(
    ("key", "written", "read_as"),
    [
        ("count", 8, 8),
        ("count", 8.0, 8),  # a number like 1e1 in YAML is a float
        ("rate", 0.25, 0.25),
        ("flag", True, True),
        ("mode", "slow", "slow"),
        ("many", "auto", "auto"),
        ("many", 3, 3),
        ("limit", None, None),
        ("limit", 2, 2.0),
        ("sizes", [1, 2], (1, 2)),
        ("modes", ["slow"], ("slow",)),
        ("free", {"a": {"b": 1}}, {"a": {"b": 1}}),
    ],
)
def test_values_are_read_by_the_type_of_their_field(
    key: str, written: object, read_as: object
) -> None:
    value = getattr(read(**{key: written}), key)
    assert value == read_as
    assert type(value) is type(read_as)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("16GiB", 16 << 30),
        ("1.5 KiB", 1536),
        ("2kB", 2000),
        ("3 b", 3),
        ("4096", 4096),
    ],
)
def test_sizes_have_units(text: object, size: int) -> None:
    assert read(inner={"name": "n", "size": text}).inner.size == size


def proposed(found: Problem) -> str | None:
    """The line of a fix; None where it says what is to be filled in, since nobody knows what is meant."""
    assert found.fix is not None
    return None if "<" in found.fix else found.fix


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ({"count": "several"}, "count: <a whole number, such as 1>"),
        ({"count": 9}, "count: <a value >= 1 and <= 8, such as 1>"),
        ({"level": 4}, "level: <one of 1, 2, 3>"),
        ({"rate": "half"}, "rate: <a number, such as 0.5>"),
        ({"inner": {"name": "n", "size": "lots"}}, "size: <a size, such as 16GiB>"),
        ({"sizes": [1, "a"]}, "sizes: [1, <a whole number>]"),
        ({"inner": {}}, "name: <a value>"),
    ],
)
def test_what_is_to_be_filled_in_is_said_with_the_usual_value(
    value: dict[str, Any], fix: str
) -> None:
    assert problem(**value).fix == fix


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        (-1, None),
        (True, None),
        (80, "80GiB"),  # the unit was forgotten
        ("80", "80GiB"),
        ("80G", "80GiB"),
        ("16 gigs", "16GiB"),
        ("16 GBytes", "16GB"),
        ("50%", None),
        (1.5, "1.5GiB"),
        ("GiB", None),
        ("-1GiB", None),
        (None, None),
    ],
)
def test_what_is_no_size(text: object, fix: str | None) -> None:
    found = problem(inner={"name": "n", "size": text})
    assert (found.code, found.key, proposed(found)) == (
        "bad-size",
        "inner.size",
        fix and f"size: {fix}",
    )


@pytest.mark.parametrize(
    ("key", "value", "code", "fix"),
    [
        ("count", "three", "wrong-type", "count: 3"),
        ("count", "4", "wrong-type", "count: 4"),
        ("count", True, "wrong-type", None),
        ("count", 1.5, "wrong-type", None),
        ("count", None, "wrong-type", None),
        ("count", 0, "out-of-bounds", None),
        ("count", 9, "out-of-bounds", None),
        ("rate", "3e-4", "wrong-type", "rate: 3.0e-4"),
        ("rate", "half", "wrong-type", None),
        ("rate", False, "wrong-type", None),
        ("rate", 0, "out-of-bounds", None),
        ("rate", 1.0, "out-of-bounds", None),
        ("rate", float("nan"), "out-of-bounds", None),
        ("rate", 10**400, "out-of-bounds", None),
        ("flag", 1, "wrong-type", "flag: true"),
        ("mode", "fsat", "unknown-choice", "mode: fast"),
        ("mode", None, "unknown-choice", None),
        ("level", 4, "unknown-choice", None),
        ("level", None, "unknown-choice", None),
        ("cache", 8, "unknown-choice", None),
        ("many", "atuo", "unknown-choice", "many: auto"),
        ("many", 0, "out-of-bounds", None),
        ("many", [1], "wrong-type", "many: 1"),
        ("limit", "none", "wrong-type", "limit: null"),
        ("sizes", 3, "wrong-type", "sizes: [3]"),
        ("sizes", "1,2", "wrong-type", "sizes: [1,2]"),
        ("free", [1], "wrong-type", None),
        ("inner", 3, "wrong-type", "inner: {name: ...}"),
    ],
)
def test_a_wrong_value_is_named(
    key: str, value: object, code: str, fix: str | None
) -> None:
    found = problem(**{key: value})
    assert (found.code, found.key, found.got, proposed(found)) == (
        code,
        key,
        show(value),
        fix,
    )


def test_items_bounds_and_texts() -> None:
    assert problem(sizes=[1, 0, 2]).key == "sizes[1]"
    assert problem(modes=["fast", "slwo"]).key == "modes[1]"
    assert problem(count=9).what == "must be >= 1 and <= 8"
    assert problem(rate=1.0).what == "must be > 0 and < 1"
    assert (
        problem(inner={"name": 3}).fix == 'name: "3"'
    )  # text is not made from numbers
    assert problem(free={"a": 1}, named=3).fix == "named: {name: ...}"


def test_an_unknown_key_is_met_with_the_near_one() -> None:
    found = problem(cuont=3)
    assert found.code == "unknown-key"
    assert found.what == "unknown key, did you mean 'count'?"
    assert (found.got, found.span, found.fix) == ("cuont: 3", (0, 5), "count: 3")
    assert found.why is not None
    assert "inner, count, rate" in found.why


def test_a_key_that_there_was_is_left_out_and_no_near_one_is_taken_for_it() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({"cluster": {"nodes": [{"host": "a", "accelerators": 4}]}})
    (problem,) = [
        problem
        for problem in caught.value.problems
        if problem.key == "cluster.nodes[0].host"
    ]
    assert (problem.what, problem.fix) == ("unknown key", "leave out host")


def test_of_an_unknown_key_without_a_near_one_nobody_knows_what_is_meant() -> None:
    assert problem(xyzzy=1).what == "unknown key"
    assert (
        problem(xyzzy=1).fix
        == "one of the known keys in place of xyzzy, or leave it out"
    )
    _, problems = read_block(Outer, {"inner": {"name": "n"}, 7: 1})
    assert [p.key for p in problems] == ["7"]  # keys need not be text


def test_what_is_missing_or_no_mapping() -> None:
    found = problem({"inner": Source(file="f.yaml", line=2)}, inner={})
    assert (found.code, found.key, found.got, str(found.source)) == (
        "missing-key",
        "inner.name",
        None,
        "f.yaml:2",
    )
    _, problems = read_block(Outer, ["inner"])
    assert [(p.code, p.key) for p in problems] == [("wrong-type", "config")]


def test_all_problems_are_collected() -> None:
    wrong = {
        "inner": {"name": 1, "size": "big", "nmae": 2},
        "count": 0,
        "mode": "x",
        "sizes": ["a", 0],
    }
    keys = "count inner.name inner.nmae inner.size mode sizes[0] sizes[1]"
    assert sorted(p.key for p in read_block(Outer, wrong)[1]) == keys.split()


@pytest.mark.parametrize(
    ("known", "line"),
    [("sizes[0]", 5), ("sizes", 4), ("inner", None)],
    ids=["the item", "its list", "elsewhere"],
)
def test_a_problem_shows_the_nearest_line(known: str, line: int | None) -> None:
    source = problem(
        sources={known: Source(file="f.yaml", line=line)}, sizes=[0]
    ).source
    assert (source and source.line) == line


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (False, "false"),
        ("a", "a"),
        ([1, None], "[1, null]"),
        ({"a": [True], "b": {}}, "{a: [true], b: {}}"),
    ],
)
def test_values_are_shown_as_yaml(value: object, text: str) -> None:
    assert show(value) == text


def with_reserve(written: object) -> dict[str, Any]:
    return {
        "cluster": {"component_placement": {"actor": "0"}},
        "env": {"id": "x"},
        "memory": {"reserve": written},
    }


@pytest.mark.parametrize(
    ("written", "reserve"),
    [
        ("5 %", 0.05),
        ("2.5%", 0.025),
        (0.1, 0.1),
        ("2GiB", 2 << 30),
        (0, 0),
        ("0 %", 0.0),
        ("auto", "auto"),
    ],
)
def test_a_reserve_is_a_share_or_a_size(written: object, reserve: object) -> None:
    assert read_config(with_reserve(written)).memory.reserve == reserve


@pytest.mark.parametrize(
    "written",
    ["100 %", "-1 %", 1.0, -0.1, 5, "5", "a lot", True, None, "9" * 400 + "GiB"],
)
def test_what_is_no_reserve_is_refused(written: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(with_reserve(written))
    assert caught.value.codes == ("bad-size",)
    assert "5 %" in str(caught.value)


def test_machines_without_accelerators_are_declared_in_another_key() -> None:
    cluster = {"component_placement": {"actor": "cpu"}, "accelerators_per_node": 0}
    config, (wrong,) = read_block(ClusterConfig, cluster)
    assert config is None
    assert (wrong.code, wrong.key) == ("out-of-bounds", "accelerators_per_node")
    fix, _, remark = str(wrong.fix).partition("        ")
    assert remark == "(in place of accelerators_per_node)"
    key, _, value = fix.partition(": ")
    assert key == "cluster.nodes"
    del cluster["accelerators_per_node"]
    config, problems = read_block(
        ClusterConfig, {**cluster, "nodes": yaml.safe_load(value)}
    )
    assert problems == []
    assert config is not None
    (node,) = declared_topology(config).nodes
    assert node.accelerators == 0
