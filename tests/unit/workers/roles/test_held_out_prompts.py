"""Which held-out prompts an evaluation asks: each once, in one order, whatever the seed of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlplace.config.read import read_config
from rlplace.errors import ConfigError
from rlplace.workers.roles.prompts import Prompts
from tests.tiny_tokenizer import tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def held_out(
    folder: Path,
    env: dict[str, Any],
    *,
    seed: int = 0,
    eval_prompts: int | None = None,
    longest: int = 200,
) -> tuple[Prompts, list[str]]:
    """The held-out prompts of a job, and their texts in the order in which an evaluation asks them."""
    config = read_config(
        {
            "cluster": {"component_placement": {"env": "0"}},
            "actor": {"model": {"path": str(folder)}},
            "algorithm": {
                "name": "grpo",
                "prompts": 1,
                "samples_per_prompt": 2,
                "max_prompt_length": longest,
                "max_new_tokens": 4,
            },
            "env": env | {"chat": False},
            "runner": {"seed": seed, "eval_every": 1, "eval_prompts": eval_prompts},
        }
    )
    prompts = Prompts(config, folder, "held_out")
    texts = []
    for number in range(prompts.asked):
        tokens, _, _ = prompts.episodes(number, 1)
        texts.append(prompts.tokenizer.decode(tokens))
    return prompts, texts


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("rows") / "test.jsonl"
    lines = [
        json.dumps({"prompt": f"row {n:02}" + "x" * 60 * (n % 3 == 0), "answer": "1"})
        for n in range(30)
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"task": "prompts", "eval_kwargs": {"path": str(file)}}


@pytest.mark.parametrize("asked", [None, 30, 64])
def test_all_rows_are_asked_once_in_their_order(
    folder: Path, rows: dict[str, Any], asked: int | None
) -> None:
    _, texts = held_out(folder, rows, eval_prompts=asked)
    assert [text[4:6] for text in texts] == [f"{n:02}" for n in range(30)]


def test_a_part_of_the_rows_depends_on_its_own_seed_alone(
    folder: Path, rows: dict[str, Any]
) -> None:
    _, part = held_out(folder, rows, eval_prompts=20)
    assert len(set(part)) == 20
    assert part == sorted(part)
    _, with_another_seed = held_out(folder, rows, eval_prompts=20, seed=1)
    assert with_another_seed == part
    _, other = held_out(folder, rows | {"eval_seed": 1}, eval_prompts=20)
    assert len(set(other)) == 20
    assert other != part


def test_rows_that_are_left_out_make_no_other_row_count_twice(
    folder: Path, rows: dict[str, Any]
) -> None:
    dropping = rows | {"long_prompts": "drop"}
    prompts, texts = held_out(folder, dropping, eval_prompts=30, longest=30)
    assert prompts.dropped == 10
    assert len(texts) == len(set(texts)) == 20


def test_an_endless_task_asks_different_prompts(folder: Path) -> None:
    env = {"task": "arithmetic"}
    _, texts = held_out(folder, env, eval_prompts=5)
    assert len(texts) == len(set(texts)) == 5
    assert held_out(folder, env, eval_prompts=5, seed=3)[1] == texts
    # Of the 100 sums of one digit, about ten are held out.
    _, all_of_them = held_out(folder, env, eval_prompts=64)
    assert len(all_of_them) == len(set(all_of_them)) < 20


def test_a_game_is_known_by_its_identity(folder: Path) -> None:
    """All prompts are equal; the secret numbers are not."""
    env = {"task": "guess_number", "kwargs": {"highest": 15}, "max_turns": 4}
    prompts, texts = held_out(folder, env)
    assert len(texts) == 15
    episodes = [prompts.episodes(number, 1)[2][0] for number in range(15)]
    assert len({episode.facts()["answer"] for episode in episodes}) == 15


def test_prompts_of_an_endless_task_that_are_all_too_long(folder: Path) -> None:
    with pytest.raises(ConfigError, match="long-prompts"):
        held_out(folder, {"task": "arithmetic", "long_prompts": "drop"}, longest=3)
