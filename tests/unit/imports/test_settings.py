"""YAML, overrides and flags of other libraries as settings; YAML text of ours."""

from __future__ import annotations

import pytest

from rlplace.errors import ConfigError
from rlplace.imports.settings import (
    MANY,
    Setting,
    read_flags,
    read_overrides,
    read_yaml,
    resolved,
    scalar,
    settings_of,
)


def test_scalars() -> None:
    numbers = {"1": 1, "-1": -1, "1_000": 1000, "5e-7": 5e-7, ".5": 0.5, "1.": 1.0}
    words = {
        "True": True,
        "false": False,
        "None": None,
        "null": None,
        "0-7": "0-7",
        "1e": "1e",
        "v1.2.3": "v1.2.3",
    }
    for text, value in {**numbers, **words}.items():
        assert (scalar(text), type(scalar(text))) == (value, type(value))


def test_references_are_followed_where_they_lead_somewhere() -> None:
    mapping = {
        "a": {"x": "${b.y}", "loop": "${a.loop}", "lost": "${nowhere}"},
        "b": {"y": "${b.z}", "z": "1e-6"},
    }
    assert {s.key: s.value for s in settings_of(mapping)} == {
        "a.x": 1e-6,
        "a.loop": "${a.loop}",
        "a.lost": "${nowhere}",
        "b.y": 1e-6,
        "b.z": 1e-6,
    }


def test_expressions_become_their_values() -> None:
    mapping = {
        "n": 8,
        "m": "${multiply:${n}, ${a.k}}",
        "a": {
            "k": "${int_div:${subtract:${n},2}, 3}",
            "off": "${not:${n}}",
            "zero": "${int_div:${n},0}",
        },
        "name": "${n}x${a.k}",
        "chosen": "${oc.select:nowhere,${n}}",
        "taken": "${oc.select:a.k,5}",
        "unknown": "${now:%Y}-${n}",
        "loop": "${multiply:${loop},2}",
    }
    assert {s.key: s.value for s in settings_of(mapping)} == {
        "n": 8,
        "m": 16,
        "a.k": 2,
        "a.off": False,
        "a.zero": "${int_div:${n},0}",
        "name": "8x2",
        "chosen": 8,
        "taken": 2,
        "unknown": "${now:%Y}-${n}",
        "loop": "${multiply:${loop},2}",
    }


def test_references_that_grow_without_end_are_left_as_they_are() -> None:
    doubling = {f"k{n}": f"${{k{n + 1}}}${{k{n + 1}}}" for n in range(40)} | {
        "k40": "ab"
    }
    found = {s.key: s.value for s in settings_of(doubling)}
    assert found["k39"] == "abab"
    assert found["k0"] == "${k1}${k1}"


def test_numbers_that_grow_without_end_are_left_as_they_are() -> None:
    squares = {
        f"k{n}": f"${{multiply:${{k{n + 1}}},${{k{n + 1}}}}}" for n in range(40)
    } | {"k40": 10}
    halved = {"huge": 10**400, "half": "${multiply:${huge},0.5}"}
    found = {s.key: s.value for s in settings_of(squares | halved)}
    assert (found["k37"], found["k35"]) == (10**8, 10**32)
    assert (found["k0"], found["half"]) == (squares["k0"], halved["half"])


def test_a_chain_of_references_is_followed_for_a_while() -> None:
    chain: dict[str, object] = {f"k{n}": f"${{k{n + 1}}}" for n in range(1200)} | {
        "k1200": 1
    }
    found = {s.key: s.value for s in settings_of(chain)}
    assert (found["k1110"], found["k1199"], found["k0"]) == (1, 1, "${k1}")


def test_references_lead_to_the_last_setting_of_a_key() -> None:
    written = read_yaml("n: 8\nm: ${multiply:${n},4}\nk: ${n}", "f.yaml")
    found = resolved([*written, *read_overrides("n=16 +j='${m}'", "")])
    assert [(s.key, s.value) for s in found] == [
        ("n", 8),
        ("m", 64),
        ("k", 16),
        ("n", 16),
        ("j", 64),
    ]
    assert [s.written for s in found][1:3] == ["m: ${multiply:${n},4}", "k: ${n}"]


def test_references_in_a_block_of_a_placement() -> None:
    block = {
        "node_group": "g",
        "placement": "0-${subtract:${n},1}",
        "lost": "${nowhere}",
    }
    found = {
        s.key: s.value
        for s in settings_of(
            {"n": 8, "cluster": {"component_placement": {"actor": block}}}
        )
    }
    assert found["cluster.component_placement.actor"] == {**block, "placement": "0-7"}


def test_placement_lines_are_kept_as_written() -> None:
    text = 'cluster:\n  component_placement:\n    "actor, env": 0-7\n    rollout: {node_group: g, placement: 0-3}\n'
    assert {
        s.key: (s.value, s.source and s.source.line) for s in read_yaml(text, "f.yaml")
    } == {
        "cluster.component_placement.actor, env": ("0-7", 3),
        "cluster.component_placement.rollout": (
            {"node_group": "g", "placement": "0-3"},
            4,
        ),
    }


def test_overrides() -> None:
    text = """a.b=1 +c=[1,2] ~d=x word "e=['a', 'b']" "f='1'" g=[a]x "h=[a" """
    found = read_overrides(text, "")
    assert [(s.key, s.value) for s in found] == [
        ("a.b", 1),
        ("c", [1, 2]),
        ("d", "x"),
        ("word", None),
        ("e", ["a", "b"]),
        ("f", "1"),
        ("g", "[a]x"),
        ("h", "[a"),
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: [1", "expected ',' or ']'"),
        ("\ta: 1", "found character '\\t'"),
        ("- 1", "expected a block of keys"),
    ],
)
def test_what_is_not_a_yaml_file_of_keys(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match="import-yaml") as caught:
        read_yaml(text, "f.yaml")
    assert what in caught.value.problems[0].what


WORDS_AFTER = {"sleep": 0, "betas": 2, "modules": MANY}


def flags(text: str, file: str = "") -> list[Setting]:
    return read_flags(
        text, file, WORDS_AFTER, {"nodes", *WORDS_AFTER}, {"num_nodes": "nodes"}
    )


def read(text: str, file: str = "") -> list[tuple[str, object, str]]:
    return [(s.key, s.value, s.written) for s in flags(text, file)]


def test_values_are_what_they_mean() -> None:
    assert read(
        "--nodes -2 --num_nodes=3 --sleep --betas 0.9 1e-3 --modules a b --nodes true"
    ) == [
        ("nodes", -2, "--nodes -2"),
        ("nodes", 3, "--num_nodes=3"),
        ("sleep", True, "--sleep"),
        ("betas", (0.9, 0.001), "--betas 0.9 1e-3"),
        ("modules", ("a", "b"), "--modules a b"),
        ("nodes", True, "--nodes true"),
    ]


def test_unknown_flags_take_what_follows_and_stray_words_stand_alone() -> None:
    assert read("--sleep on --other 1 2 --last") == [
        ("sleep", True, "--sleep"),
        ("on", None, "on"),
        ("other", (1, 2), "--other 1 2"),
        ("last", True, "--last"),
    ]


def test_missing_values_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        read("--nodes --betas 1 --sleep")
    fixes = {p.fix: p.code for p in caught.value.problems}
    assert fixes == dict.fromkeys(
        ("--nodes VALUE", "--betas VALUE VALUE"), "import-flag-value"
    )


def test_an_open_quote_is_reported_with_its_line() -> None:
    assert [
        str(s.source) for s in (*flags("--nodes 1"), *flags("x\nt --nodes 1", "run.sh"))
    ] == [
        "command line",
        "run.sh:2",
    ]
    with pytest.raises(ConfigError) as caught:
        read("a\n--nodes '1", "run.sh")
    (problem,) = caught.value.problems
    assert (problem.code, problem.got, str(problem.source)) == (
        "import-quote",
        "--nodes '1",
        "run.sh:2",
    )


def test_a_reference_to_a_block_stands_for_its_settings() -> None:
    text = "a:\n  b: {lr: 1, eps: 2}\nc: {b: '${a.b}'}\n"
    found = {s.key: s.value for s in resolved(read_yaml(text, "f.yaml"))}
    assert (found["c.b.lr"], found["c.b.eps"]) == (1, 2)
