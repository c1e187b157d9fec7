"""What a language-model run needs beside its config: the model's folder, checked before anything is launched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlplace.errors import ConfigError, Problem, Source
from rlplace.llm_checks import check_launch, check_sizes
from rlplace.llm_config import LlmConfig, read_llm_config
from rlplace.model_folder import with_folder
from rlplace.placement import Topology
from rlplace.placement.llm import make_llm_layout

KEYS = {"model_type": "llama", "vocab_size": 8, "num_attention_heads": 4, "max_position_embeddings": 64}
SOURCES = {"model.path": Source(file="mine.yaml", line=4), "env.task": Source(file="mine.yaml", line=9)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with files that are right and nothing in them; every letter of its prompts is unknown to it."""
    tokens = {"<eos>": 0, "<unk>": 1}
    model = {"type": "WordLevel", "vocab": tokens, "unk_token": "<unk>"}
    write(tmp_path / "config.json", KEYS | {"eos_token_id": 0})
    write(tmp_path / "tokenizer.json", {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": None})
    write(tmp_path / "tokenizer_config.json", {"eos_token": "<eos>", "chat_template": "{{ messages[-1]['content'] }}"})
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


def config(folder: Path, *, model: dict[str, Any] | None = None, **blocks: dict[str, Any]) -> LlmConfig:
    mapping: dict[str, Any] = {
        "cluster": {"component_placement": {"actor": "0", "env": "1", "rollout": "2-3"}},
        "algorithm": {"name": "grpo", "prompts": 2, "max_prompt_length": 40, "max_new_tokens": 8},
        "env": {"task": "arithmetic"},
        "rollout": {"engine": "transformers"},
        "model": {"path": str(folder)} | (model or {}),
    }
    return read_llm_config(mapping | {name: mapping.get(name, {}) | block for name, block in blocks.items()})


def problems(config: LlmConfig, check: Any = check_launch) -> list[Problem]:
    whole = with_folder(config, SOURCES)
    layout = make_llm_layout(whole, Topology.uniform(1, 4, "emulated", 1 << 30))
    found: list[Problem] = check(whole, layout, SOURCES)
    return found


def test_a_whole_folder_is_read_and_counts(folder: Path) -> None:
    found = with_folder(config(folder, model={"vocab_size": 999}), {})
    assert found.model is not None
    assert (found.model["vocab_size"], found.model["path"]) == (8, str(folder))
    assert problems(config(folder)) == []


def test_a_plan_needs_no_folder_where_the_config_has_the_keys(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    written = config(nowhere, model=KEYS)
    assert problems(written, check_sizes) == []
    assert [p.code for p in problems(written)] == ["no-model-folder"]
    with pytest.raises(ConfigError) as caught:
        with_folder(config(nowhere), SOURCES)
    (problem,) = caught.value.problems
    assert (problem.code, str(problem.source)) == ("no-model-folder", "mine.yaml:4")
    assert problem.fix is not None
    assert "scripts/get_model" in problem.fix


@pytest.mark.parametrize("content", [None, "not JSON", '{"hidden_size": 8}'])
def test_a_folder_without_a_config_of_a_model_is_none(folder: Path, content: str | None) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        with_folder(config(folder), SOURCES)
    assert caught.value.codes == ("not-a-model",)


@pytest.mark.parametrize(("part", "code"), [("tokenizer.json", "no-tokenizer"), ("model.safetensors", "not-a-model")])
def test_every_part_has_to_be_there(folder: Path, part: str, code: str) -> None:
    (folder / part).unlink()
    (problem,) = problems(config(folder))
    assert (problem.code, str(problem.source)) == (code, "mine.yaml:4")


def test_a_tokenizer_that_belongs_to_another_model_is_noticed(folder: Path) -> None:
    write(folder / "config.json", KEYS | {"vocab_size": 1})
    (problem,) = problems(config(folder))
    assert (problem.code, problem.what) == ("not-a-model", "the tokenizer knows 2 tokens, the model 1")


def test_a_chat_needs_a_template(folder: Path) -> None:
    write(folder / "tokenizer_config.json", {"eos_token": "<eos>"})
    assert [p.code for p in problems(config(folder))] == ["no-chat-template"]
    assert problems(config(folder, env={"chat": False})) == []


def test_lengths_have_to_fit_into_each_other(folder: Path) -> None:
    longer = config(folder, algorithm={"max_new_tokens": 64})
    assert [p.code for p in problems(longer, check_sizes)] == ["context-too-long"]
    shorter = config(folder, algorithm={"sequence_length": 20})
    assert [p.code for p in problems(shorter, check_sizes)] == ["context-too-short"]


def test_engines_share_heads_evenly(folder: Path) -> None:
    write(folder / "config.json", KEYS | {"num_attention_heads": 3})
    split = {"component_placement": {"actor": "0", "env": "1", "rollout": "2-3:0"}}
    by_vllm = config(folder, cluster=split, rollout={"engine": "vllm"})
    assert [p.code for p in problems(by_vllm, check_sizes)] == ["tensor-parallel-heads"]


def test_what_is_planned_and_not_run_is_said(folder: Path) -> None:
    split = {"component_placement": {"actor": "0", "env": "1", "rollout": "2-3:0"}}
    (engine,) = problems(config(folder, cluster=split), check_sizes)
    (actor,) = problems(config(folder, actor={"optimizer": "sgd"}), check_sizes)
    assert (engine.code, engine.key) == ("plan-only", "cluster.component_placement.rollout")
    assert (actor.code, actor.key) == ("plan-only", "actor.optimizer")


def test_a_task_is_made_before_anything_starts(folder: Path) -> None:
    (unknown,) = problems(config(folder, env={"task": "arithmetics"}), check_sizes)
    assert (unknown.code, str(unknown.source)) == ("unknown-task", "mine.yaml:9")
    (unrewarded,) = problems(config(folder, env={"rewards": [{"name": "math_anwser"}]}), check_sizes)
    assert unrewarded.code == "unknown-reward"
