"""Shipped descriptions of model families: their letters, and every weight and saved number as transformers has them."""

from __future__ import annotations

import ast
import copy
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlplace.errors import ConfigError
from rlplace.placement.memory import families, model
from rlplace.placement.memory.families import SHIPPED, shipped
from rlplace.placement.memory.letters import Letters, meaning
from rlplace.placement.memory.model import Head, read_model
from tests.unit.placement.test_model_shape import COUNTED, decoder

WEIGHT = {"name", "shape", "ways", "linear", "met", "if"}
SAVED = {"compute", "compute_cut", "float32", "float32_cut"}


def texts(written: Any) -> Iterator[str]:
    """Yield all texts in a part of a description but names and keys."""
    if isinstance(written, str):
        yield written
    elif isinstance(written, list):
        for part in written:
            yield from texts(part)
    elif isinstance(written, Mapping):
        for name, part in written.items():
            if name not in ("name", "key"):
                yield from texts(part)


def expressions(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield all expressions of a description."""
    for part, written in record.items():
        if part not in ("head", "notes", "text"):
            yield from texts(written)


def names(expression: str) -> set[str]:
    tree = ast.walk(ast.parse(expression))
    return {node.id for node in tree if isinstance(node, ast.Name)}


def test_every_shipped_family_has_a_file_and_every_file_a_family() -> None:
    folder = Path(families.__file__).with_name("descriptions")
    assert {file.stem for file in folder.iterdir()} == set(SHIPPED)


def test_the_files_are_in_the_built_package() -> None:
    project = Path(__file__).parents[3] / "pyproject.toml"
    tool = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]
    data = tool["setuptools"]["package-data"]
    assert "descriptions/*.toml" in data["rlplace.placement.memory"]


@pytest.mark.parametrize("family", SHIPPED)
def test_letters_are_known_and_used(family: str) -> None:
    record = shipped(family)
    used = set[str]()
    for expression in expressions(record):
        meaning(expression)
        used |= names(expression)
    given = {record["text"]["hidden"]} if "text" in record else set[str]()
    assert used - {"i", "count", "max"} == set(record["letters"]) | given


@pytest.mark.parametrize("family", SHIPPED)
def test_no_word_of_a_description_is_unknown(family: str) -> None:
    record = shipped(family)
    weights = [*record["root"]]
    for block in record["blocks"]:
        assert set(block) <= {"name", "layers", "weights", "saved", "passing"}
        for part in ("saved", "passing"):
            assert set(block.get(part, {})) <= SAVED
        weights += block["weights"]
    for weight in weights:
        assert set(weight) <= WEIGHT
    for kv in record.get("kv", ()):
        assert set(kv) <= {"layers", "heads", "numbers", "window"}
    for letter in record["letters"].values():
        assert isinstance(letter, str) or set(letter) <= {
            "key",
            "default",
            "null",
            "least",
        }


@pytest.mark.parametrize("name", COUNTED)
def test_a_shipped_family_needs_no_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(module: str, keys: str) -> Mapping[str, Any]:
        raise AssertionError(f"{module} was started for {keys}")

    monkeypatch.setattr(families, "ask", refuse)
    for head in Head:
        read_model(COUNTED[name][0], head=head)


def read(letters: Mapping[str, Any], **config: object) -> Letters:
    return Letters(letters, {"model_type": "some", **config}, "actor.model")


def test_a_number_has_a_default_by_other_letters() -> None:
    letters = {
        "heads": {"key": "num_heads"},
        "kv": {"key": "num_kv_heads", "default": "heads"},
        "width": "heads * 4",
    }
    found = read(letters, num_heads=6)
    assert (found["kv"], found["width"], found.problems) == (6, 24, [])
    assert read(letters, num_heads=6, num_kv_heads=2)["kv"] == 2


def test_a_letter_that_no_expression_needs_is_not_required() -> None:
    letters = {"a": {"key": "a"}, "b": {"key": "b"}}
    found = read(letters, a=3)
    assert found.value("a if a > 2 else b") == 3
    assert found.problems == []
    found.value("b")
    assert [problem.key for problem in found.problems] == ["actor.model.b"]


def test_problems_come_in_the_order_of_the_letters() -> None:
    found = read({"a": {"key": "x"}, "b": {"key": "y"}})
    assert found.value("b + a") == 2  # each counts as 1
    assert [problem.key for problem in found.problems] == [
        "actor.model.x",
        "actor.model.y",
    ]


@pytest.mark.parametrize(
    ("config", "value"), [({}, 4096), ({"window": None}, 0), ({"window": 7}, 7)]
)
def test_a_key_that_is_null_is_not_one_that_is_absent(
    config: dict[str, Any], value: int
) -> None:
    letters = {"w": {"key": "window", "default": 4096, "null": 0}}
    assert read(letters, **config)["w"] == value


def test_a_letter_by_two_names_is_read_under_the_one_that_the_config_has() -> None:
    letters = {"E": {"key": ["num_local_experts", "num_experts"]}}
    assert read(letters, num_experts=8)["E"] == 8
    assert read(letters, num_local_experts=4, num_experts=8)["E"] == 4
    found = read(letters)
    assert found["E"] == 1
    assert found.problems[0].key == "actor.model.num_local_experts"


def test_a_number_may_be_zero_where_the_letter_says_so() -> None:
    letters = {"a": {"key": "a", "default": 28, "least": 0}, "b": {"key": "b"}}
    found = read(letters, a=0, b=0)
    assert (found["a"], found["b"]) == (0, 1)
    (problem,) = found.problems
    assert problem.what == "expected a whole number of 1 to 1,000,000,000,000"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2*a - a // 3", 13),
        ("max(a, 3, 9)", 9),
        ("a / 2", 3.5),
        ("a if not on else 2", 2),
        ("count(a, i % 3 == 0)", 3),
        ("count(a, i not in dense and i >= 1)", 5),
        ("count(a, kinds[i] == 'full')", 1),
        ("on and a", True),
        ("a < 3 or a == 7", True),
    ],
)
def test_expressions(expression: str, value: object) -> None:
    letters = {
        "a": "7",
        "on": {"key": "on", "default": False},
        "dense": {"key": "dense", "default": []},
        "kinds": {"key": "kinds", "default": []},
    }
    found = read(letters, on=True, dense=[2], kinds=["full"])
    assert found.value(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["open('x')", "a.b", "__import__('os')", "(lambda: 1)()", "[1]", "a ** 9"],
)
def test_an_expression_is_arithmetic_alone(expression: str) -> None:
    with pytest.raises(ValueError, match="an expression cannot have"):
        meaning(expression)


def kept(config: dict[str, Any]) -> list[tuple[int, int]]:
    """(layers, window) of each cache."""
    return [(kv.layers, kv.window) for kv in read_model(config).kv]


WINDOWS = {"use_sliding_window": True, "sliding_window": 77, "max_window_layers": 5}


def small(family: str, **more: object) -> dict[str, Any]:
    return decoder(family, 512, 256, 512, 6, 8, 2) | more


MIXED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
}


@pytest.mark.parametrize(
    ("config", "caches"),
    [
        (small("mistral"), [(6, 4096)]),
        (small("phi3"), [(6, 0)]),
        (small("phi3", sliding_window=77), [(6, 77)]),
        (small("llama", sliding_window=77), [(6, 0)]),
        (small("gemma2", sliding_window=77), [(3, 77), (3, 0)]),
        (small("gemma3_text", sliding_window=77), [(5, 77), (1, 0)]),
        (small("qwen3", **WINDOWS), [(1, 77), (5, 0)]),
        (small("qwen3", **WINDOWS | {"use_sliding_window": False}), [(6, 0)]),
        (
            small("qwen3", **WINDOWS, layer_types=["sliding_attention"] * 2),
            [(2, 77), (4, 0)],
        ),
        (small("qwen2_moe", **MIXED, **WINDOWS), [(1, 77), (5, 0)]),
        (small("qwen3_moe", **MIXED, **WINDOWS), [(1, 77), (5, 0)]),
    ],
)
def test_layers_with_windows(
    config: dict[str, Any], caches: list[tuple[int, int]]
) -> None:
    assert kept(config) == caches


def test_layers_that_a_model_does_not_have_need_no_keys() -> None:
    config = small("qwen3_moe", **MIXED)
    del config["intermediate_size"]
    assert read_model(config).layers == 6
    with pytest.raises(ConfigError) as caught:
        read_model(config | {"mlp_only_layers": [2]})
    (problem,) = caught.value.problems
    assert problem.key == "model.intermediate_size"


def test_every_family_of_transformers_is_compared() -> None:
    pytest.importorskip("transformers")
    from scripts import check_descriptions

    compared = set(check_descriptions.MODELS)
    assert compared == set(SHIPPED) - check_descriptions.NOT_COMPARED


@pytest.mark.parametrize(
    "family", [family for family in SHIPPED if family != "openvla"]
)
def test_a_shipped_description_is_what_transformers_makes(family: str) -> None:
    pytest.importorskip("transformers")
    from scripts import check_descriptions

    for keys in check_descriptions.models_of(family):
        assert check_descriptions.differences(keys) == []


def without_a_norm(record: dict[str, Any]) -> None:
    del record["blocks"][0]["weights"][-1]


def with_swapped_widths(record: dict[str, Any]) -> None:
    record["blocks"][0]["weights"][0]["shape"].reverse()


def with_a_number_too_many(record: dict[str, Any]) -> None:
    record["blocks"][0]["saved"]["compute"] += " + 1"


def with_other_caches(record: dict[str, Any]) -> None:
    record["kv"][0]["heads"] = "heads"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (without_a_norm, "post_attention_layernorm.weight"),
        (with_swapped_widths, "self_attn.q_proj.weight"),
        (with_a_number_too_many, "saved numbers"),
        (with_other_caches, "cache of window 0"),
    ],
)
def test_the_comparison_can_fail(
    change: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from scripts import check_descriptions

    record = copy.deepcopy(dict(shipped("llama")))
    change(record)
    monkeypatch.setattr(model, "description_of", lambda *_: record)
    keys = next(check_descriptions.models_of("llama"))
    (found,) = check_descriptions.differences(keys)
    assert line in found
