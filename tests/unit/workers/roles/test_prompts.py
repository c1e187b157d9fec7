"""The prompts of a run: which rows an epoch asks, without workers."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.errors import ConfigError
from rlplace.models.tokenizer import Tokenizer
from rlplace.workers.roles import prompt_lengths
from rlplace.workers.roles import prompts as prompts_module
from rlplace.workers.roles.prompts import Prompts
from tests.tiny_tokenizer import tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("model"))


def config_of(folder: Path, env: Mapping[str, Any]) -> Config:
    config: Config = read_config(
        {
            "cluster": {"component_placement": {"env": "0"}},
            "actor": {"model": {"path": str(folder)}},
            "algorithm": {
                "name": "grpo",
                "prompts": 4,
                "samples_per_prompt": 2,
                "max_prompt_length": 60,
                "max_new_tokens": 20,
            },
            "env": {"task": "prompts", "chat": False, **env},
        }
    )
    return config


def written(file: Path, prompts: Sequence[str]) -> str:
    rows = [json.dumps({"prompt": prompt, "answer": "0"}) for prompt in prompts]
    file.write_text("\n".join(rows))
    return str(file)


def epochs(prompts: Prompts, folder: Path, size: int, count: int) -> list[Counter[str]]:
    """The texts that each of `count` epochs of `size` prompts asks, and how often."""
    tokenizer = Tokenizer.load(folder)
    return [
        Counter(
            tokenizer.decode(prompts.episodes(epoch * size + place, 1)[0])
            for place in range(size)
        )
        for epoch in range(count)
    ]


def test_a_part_of_a_data_set_is_another_one_in_each_epoch(
    folder: Path, tmp_path: Path
) -> None:
    rows = [f"row {number}" for number in range(10)]
    path = {written(tmp_path / "one.jsonl", rows): 0.5}
    prompts = Prompts(config_of(folder, {"kwargs": {"path": path}}), folder, "train")
    first, second, third = epochs(prompts, folder, 5, 3)
    assert set(first) | set(second) == set(rows)
    assert first != second
    assert first == third


@pytest.mark.parametrize(
    ("weight", "size", "count"), [(0.3, 3, 10), (1.3, 13, 10), (0.01, 1, 10)]
)
def test_each_row_comes_as_often_as_the_weight_says(
    folder: Path, tmp_path: Path, weight: float, size: int, count: int
) -> None:
    rows = [f"row {number}" for number in range(10)]
    path = {written(tmp_path / "one.jsonl", rows): weight}
    prompts = Prompts(config_of(folder, {"kwargs": {"path": path}}), folder, "train")
    asked = epochs(prompts, folder, size, count)
    total = sum(asked, Counter())
    assert set(total) == set(rows)
    assert set(total.values()) == {size * count // 10}
    assert all(max(epoch.values()) - min(epoch.values()) <= 1 for epoch in asked)


def test_rows_of_two_files_come_as_often_as_their_weights_say(
    folder: Path, tmp_path: Path
) -> None:
    files = [
        written(tmp_path / f"{name}.jsonl", [f"{name} {row}" for row in range(10)])
        for name in ("one", "other")
    ]
    path = dict(zip(files, (1.5, 0.5), strict=True))
    prompts = Prompts(config_of(folder, {"kwargs": {"path": path}}), folder, "train")
    total = sum(epochs(prompts, folder, 20, 2), Counter())
    assert {total[f"one {row}"] for row in range(10)} == {3}
    assert {total[f"other {row}"] for row in range(10)} == {1}


def test_a_part_is_of_the_rows_that_are_short_enough(
    folder: Path, tmp_path: Path
) -> None:
    short = [f"row {number}" for number in range(6)]
    rows = [*short, *(f"{'z' * 90} {number}" for number in range(14))]
    path = {written(tmp_path / "one.jsonl", rows): 0.5}
    env = {"kwargs": {"path": path}, "long_prompts": "drop"}
    prompts = Prompts(config_of(folder, env), folder, "train")
    first, second = epochs(prompts, folder, 3, 2)
    assert first + second == Counter(short)


def test_a_special_token_in_a_message_is_named_by_its_line(
    folder: Path, tmp_path: Path
) -> None:
    path = written(tmp_path / "one.jsonl", ["1 + 2", "<turn>user: 1 + 3<eos>"])
    with pytest.raises(ConfigError) as caught:
        Prompts(
            config_of(folder, {"kwargs": {"path": path}, "chat": True}), folder, "train"
        )
    (problem,) = caught.value.problems
    assert problem.code == "special-token-in-prompt"
    assert "'<turn>'" in problem.what
    assert str(problem.source).endswith("one.jsonl:2")
    # Rendered chats are prompts of plain text
    config = config_of(folder, {"kwargs": {"path": path}, "chat": False})
    assert Prompts(config, folder, "train").task.size == 2


# ── lengths that are kept ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for lengths, of data sets with three rows and more."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in (prompts_module, prompt_lengths):
        monkeypatch.setattr(module, "MANY", 3)
    return tmp_path / "cache" / "rlplace" / "prompts"


def counted(folder: Path, path: str, **env: Any) -> tuple[list[str], int]:
    """The lines that are told when the prompts of a data set are read, and how many prompts are dropped."""
    lines: list[str] = []
    config = config_of(folder, {"kwargs": {"path": path}, **env})
    found = Prompts(config, folder, "train", tell=lines.append)
    return lines, found.dropped


def test_the_tokens_of_many_prompts_are_counted_once_and_told(
    folder: Path, tmp_path: Path, cache: Path
) -> None:
    rows = ["1 + 2", "z" * 90, "3"]
    path = written(tmp_path / "one.jsonl", rows)
    lines, dropped = counted(folder, path, long_prompts="drop")
    assert lines[0] == "counting the tokens of 3 prompts ..."
    assert lines[1].endswith(f"kept in {cache}")
    assert dropped == 1
    assert counted(folder, path, long_prompts="drop") == ([], 1)
    # Whatever changes the tokens is counted anew
    assert len(counted(folder, path, long_prompts="drop", system="Be brief.")[0]) == 2
    written(tmp_path / "one.jsonl", [*rows, "4"])
    lines, dropped = counted(folder, path, long_prompts="drop")
    assert lines[0] == "counting the tokens of 4 prompts ..."


def test_few_prompts_are_not_kept(folder: Path, tmp_path: Path, cache: Path) -> None:
    path = written(tmp_path / "one.jsonl", ["1 + 2", "3"])
    assert counted(folder, path) == ([], 0)
    assert not cache.exists()


def test_lengths_are_counted_where_they_cannot_be_kept(
    folder: Path, tmp_path: Path, cache: Path
) -> None:
    path = written(tmp_path / "one.jsonl", ["1 + 2", "3", "4"])
    (tmp_path / "cache").write_text("no folder")
    for _ in range(2):
        assert re.fullmatch(r"counted in \d+\.\d s", counted(folder, path)[0][1])


def test_damaged_files_of_lengths_are_written_anew(
    folder: Path, tmp_path: Path, cache: Path
) -> None:
    path = written(tmp_path / "one.jsonl", ["1 + 2", "3", "4"])
    counted(folder, path)
    (file,) = cache.iterdir()
    file.write_bytes(b"no array")
    assert len(counted(folder, path)[0]) == 2
    assert counted(folder, path)[0] == []


def test_a_template_with_a_date_is_counted_each_time(tmp_path: Path) -> None:
    dated = tiny_tokenizer(tmp_path, chat="{{ strftime_now('%d') }}")
    assert prompt_lengths.name_of("rows", dated, {}) is None


def test_the_lengths_of_so_many_data_sets_are_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_lengths, "_KEPT", 2)
    for number in range(4):
        file = prompt_lengths.keep_lengths(str(number), np.ones(1, np.int32))
        assert file is not None
        os.utime(file, (number, number))
    assert sorted(file.name for file in cache.iterdir()) == ["2.npy", "3.npy"]


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"chat": True, "template": {"think": False}}, None),
        ({"chat": True, "template": {"thinks": False}}, "has a variable think"),
        ({"chat": True, "template": {"date": "today"}}, "same with it and without it"),
        ({"chat": False, "template": {"think": False}}, "env.chat is false"),
    ],
)
def test_a_value_that_the_template_does_not_ask_for_is_refused(
    tmp_path: Path, env: dict[str, Any], why: str | None
) -> None:
    asks = (
        "{% if think %}hm {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    folder = tiny_tokenizer(tmp_path, chat=asks)
    path = written(tmp_path / "rows.jsonl", ["What is 1 + 2?"])
    config = config_of(folder, {**env, "kwargs": {"path": path}})
    if why is None:
        assert Prompts(config, folder, "train").task.size == 1
        return
    with pytest.raises(ConfigError, match=why) as caught:
        Prompts(config, folder, "train")
    assert caught.value.codes == ("unused-template-value",)
