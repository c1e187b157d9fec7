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


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("HalfCheetah-v5", "env: {id: HalfCheetah-v5}"),
        ("ALE/Pong-v5", "env: {id: ALE/Pong-v5}"),
        ("reach:Reach-v0", "env: {id: reach:Reach-v0}"),
        ("envpool", "env: {kind: envpool}"),
    ],
)
def test_an_environment_in_place_of_its_block_is_an_id(value: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({"env": value})
    fixes = [found.fix for found in caught.value.problems if found.key == "env"]
    assert fixes == [fix]


def test_a_function_in_place_of_the_block_of_a_reward_is_its_function() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({"algorithm": {"name": "grpo"}, "reward": "mine:score"})
    fixes = [found.fix for found in caught.value.problems if found.key == "reward"]
    assert fixes == ['reward: {function: "mine:score"}']
