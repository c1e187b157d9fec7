"""YAML texts that every reader reads back as the same values."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlplace.config.yaml_text import to_yaml

WORDS = st.text(max_size=12) | st.text(alphabet="-+._:, ean01", max_size=4)
KEYS = WORDS.filter(lambda text: not re.fullmatch(r"[-+]?[0-9][0-9_]*", text))  # a line of a placement may be 0 or "0"
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), WORDS)


@given(
    st.dictionaries(
        KEYS, st.recursive(LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(KEYS, x, max_size=3))
    )
)
def test_yaml_reads_back_as_it_was(mapping: dict[str, object]) -> None:
    assert (yaml.safe_load(to_yaml(mapping)) or {}) == mapping


def test_only_texts_that_some_reader_takes_for_something_else_are_quoted() -> None:
    mapping = {"a": "0-7", "b": 1e-6, "c": {"placement": "0-3", "x": [1, None, True]}, "d": "1e-6", "e": "4:7"}
    assert to_yaml(mapping) == ('a: 0-7\nb: 1.0e-06\nc: {placement: 0-3, x: [1, null, true]}\nd: "1e-6"\ne: "4:7"\n')


@pytest.mark.parametrize("text", ["1_000", "+1", "-1", "8", "0:0.", "-0b1"])
def test_texts_that_are_numbers_to_a_reader_stay_texts(text: str) -> None:
    mapping = {"a": text, "b": {"placement": "0-3", "c": text, "d": [text, {"e": text}], "f": 8}}
    assert yaml.safe_load(to_yaml(mapping)) == mapping
