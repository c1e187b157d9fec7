"""Values that a key does not take, where no guess leads to one that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlplace.config.read import read_config
from rlplace.errors import ConfigError, Problem


def problem(**blocks: dict[str, Any]) -> Problem:
    mapping: dict[str, Any] = {
        "cluster": {"component_placement": {"actor": 0, "rollout": 0, "env": 0}},
        "env": {"task": "arithmetic"},
        "algorithm": {"name": "grpo"},
    }
    model = {"model": {"kind": "causal_lm"}}
    with pytest.raises(ConfigError) as caught:
        read_config(mapping | {"actor": model} | blocks)
    return caught.value.problems[0]


def test_a_size_that_no_machine_has() -> None:
    found = problem(rollout={"kv_cache_memory": "9000000000TiB"})
    assert (found.code, found.what) == ("bad-size", "is more than any machine has")


def test_a_word_where_numbers_and_some_words_are_taken() -> None:
    found = problem(rollout={"gpu_memory_utilization": "plenty"})
    assert found.what == "unknown word"
    assert (found.why or "").startswith("takes a number or one of: auto")


def test_the_folder_of_a_model_belongs_below_its_key(tmp_path: Path) -> None:
    found = problem(actor={"model": str(tmp_path)})
    assert found.what == "expected a block of keys"
    assert found.fix == f"model: {{path: {tmp_path}}}"


@pytest.mark.parametrize("value", [{"hidden": [64]}, ["mlp"]])
def test_a_block_where_other_libraries_have_a_word_is_an_unknown_key(
    value: object,
) -> None:
    found = problem(actor={"model": {"kind": "causal_lm"}, "policy": value})
    assert (found.code, found.key) == ("unknown-key", "actor.policy")
