"""YAML texts that every reader reads back as the same values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlplace.config.yaml_text import to_yaml, values_of, with_values

CONFIGS = Path(__file__).parents[3] / "configs"
SHIPPED = (CONFIGS / "hybrid_ppo.yaml").read_text(encoding="utf-8")
WORDS = st.text(max_size=12) | st.text(alphabet="-+._:, ean01", max_size=4)
KEYS = WORDS.filter(
    lambda text: not re.fullmatch(r"[-+]?[0-9][0-9_]*", text)
)  # a line of a placement may be 0 or "0"
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), WORDS
)


@given(
    st.dictionaries(
        KEYS,
        st.recursive(
            LEAVES,
            lambda x: st.lists(x, max_size=3) | st.dictionaries(KEYS, x, max_size=3),
        ),
    )
)
def test_yaml_reads_back_as_it_was(mapping: dict[str, object]) -> None:
    assert (yaml.safe_load(to_yaml(mapping)) or {}) == mapping


@pytest.mark.parametrize(
    "text",
    [
        SHIPPED,
        "a: [010, 1:30, 1e3, 1_0, 2026-01-02, yes, ~, .inf]\nb: &x {c: |\n  d\n}\ne: *x\n",
        "",
        "a: 1\na: 2\n",
    ],
)
def test_values_are_those_of_the_parser_in_python(text: str) -> None:
    assert repr(said(values_of, text)) == repr(said(yaml.safe_load, text))


@pytest.mark.parametrize("text", ["a:\t1\n", "a: [1\n", "a: '\ud800'\n", "- a\nb: 1"])
def test_what_the_parser_in_python_refuses_is_refused_in_its_words(text: str) -> None:
    told = said(values_of, text)
    assert isinstance(told, str)
    assert told == said(yaml.safe_load, text)


def said(read: Callable[[str], object], text: str) -> object:
    try:
        return read(text)
    except yaml.YAMLError as error:
        return str(error)


def test_only_texts_that_some_reader_takes_for_something_else_are_quoted() -> None:
    mapping = {
        "a": "0-7",
        "b": 1e-6,
        "c": {"placement": "0-3", "x": [1, None, True]},
        "d": "1e-6",
        "e": "4:7",
    }
    assert to_yaml(mapping) == (
        'a: 0-7\nb: 1.0e-06\nc: {placement: 0-3, x: [1, null, true]}\nd: "1e-6"\ne: "4:7"\n'
    )


@pytest.mark.parametrize("text", ["1_000", "+1", "-1", "8", "0:0.", "-0b1"])
def test_texts_that_are_numbers_to_a_reader_stay_texts(text: str) -> None:
    mapping = {
        "a": text,
        "b": {"placement": "0-3", "c": text, "d": [text, {"e": text}], "f": 8},
    }
    assert yaml.safe_load(to_yaml(mapping)) == mapping


CONFIG = """\
# A job.
cluster:
  component_placement:   # where
    actor: 0-7           # trains
    env, rollout: 0-3
  allow_resident: []     # who stays
env: {id: A, enable_offload: true}  # simulates
runner:
  # how long
  total_iterations: 3

# the end
"""


@pytest.mark.parametrize(
    ("values", "changed"),
    [
        ({"cluster.component_placement.actor": "0-1"}, {"    actor: 0-1           # trains"}),
        ({"cluster.component_placement.actor": {"accelerators": "0-1", "process": "shared"}},
         {"    actor: {accelerators: 0-1, process: shared}  # trains"}),
        ({"cluster.allow_resident": ["env"]}, {"  allow_resident: [env]  # who stays"}),
        ({"env.enable_offload": False}, {"env: {id: A, enable_offload: false}  # simulates"}),
        ({"cluster.component_placement.env, rollout": None, "cluster.component_placement.reward.math": 3},
         {"    reward.math: 3"}),
        ({"runner.seed": 1}, {"  seed: 1"}),
        ({"rollout.pipeline_stage_num": 2, "rollout.engine": "torch"},
         {"rollout:", "  pipeline_stage_num: 2", "  engine: torch"}),
        ({"no.such": None}, set()),
    ],
)  # fmt: skip
def test_values_change_on_their_lines(
    values: dict[str, object], changed: set[str]
) -> None:
    made = with_values(CONFIG, values)
    assert {*made.splitlines()} - {*CONFIG.splitlines()} == changed
    read = yaml.safe_load(made)
    for path, value in values.items():
        block, _, name = path.partition("component_placement.")
        at = read
        for key in (
            block.rstrip(".").split(".")
            if not name
            else ["cluster", "component_placement", name]
        ):
            at = at.get(key) if key in at or value is None else at[key]
            if at is None:
                break
        assert at == value
    comments = [line.partition("#")[2] for line in CONFIG.splitlines() if "#" in line]
    assert [
        line.partition("#")[2] for line in made.splitlines() if "#" in line
    ] == comments


def test_a_block_in_braces_takes_no_new_line() -> None:
    with pytest.raises(ValueError, match="env has no lines to add seed to"):
        with_values(CONFIG, {"env.seed": 1})
