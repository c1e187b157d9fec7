"""Rows of a data set that define tools: the chat template shows the tools, or the row is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlplace.envs.text.contract import (
    Message,
    MessagesWithTools,
    OneTurn,
    prompt_identity,
)
from rlplace.envs.text.tasks import PromptSet
from rlplace.errors import ConfigError
from rlplace.models.tokenizer import Chat, PlainText, Tokenizer
from tests.tiny_tokenizer import CHAT, tiny_tokenizer

WITH_TOOLS = (
    "{% if tools is not none %}{% for t in tools %}<turn>tool {{ t['function']['name'] }}"
    "({{ t['function']['parameters'] | tojson }})\n{% endfor %}{% endif %}" + CHAT
)
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
SHOWN = '<turn>tool add({"type": "object", "properties": {}})\n<turn>user: 1 + 2?'
ASKED = [{"role": "user", "content": "1 + 2?"}]


def first(folder: Path, column: Any, **kwargs: Any) -> OneTurn:
    """Return the episode of a row whose column `tools` is `column`."""
    row = {"prompt": ASKED, "answer": "3", "tools": column}
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    task = PromptSet(seed=0, split="train", path=str(file), **kwargs)
    return task.episode(0)


def chat(folder: Path, template: str) -> Chat:
    return Chat(Tokenizer.load(tiny_tokenizer(folder, chat=template)), system=None)


# As a text, and as Parquet returns structs with keys of other rows
COLUMNS = ([ADD], json.dumps([ADD]), [{**ADD, "strict": None}])


@pytest.mark.parametrize("column", COLUMNS)
def test_the_template_shows_the_tools_of_a_row(tmp_path: Path, column: Any) -> None:
    episode = first(tmp_path, column)
    text = chat(tmp_path / "model", WITH_TOOLS).text(episode.prompt)
    assert text.startswith(SHOWN)
    # Reward functions have the column as it is
    assert episode.facts()["tools"] == column


def test_an_answer_that_is_continued_has_the_tools_too(tmp_path: Path) -> None:
    made = chat(tmp_path / "model", WITH_TOOLS)
    prompt = first(tmp_path, [ADD]).prompt
    assert isinstance(prompt, MessagesWithTools)
    begun = MessagesWithTools.of([*prompt, Message("assistant", "It is")], [ADD])
    text = made.text(begun)
    assert text.startswith(SHOWN)
    assert text.endswith("It is")


def test_prompts_with_other_tools_are_others(tmp_path: Path) -> None:
    with_tools = first(tmp_path, [ADD]).prompt
    without = first(tmp_path, None).prompt
    assert prompt_identity(with_tools) != prompt_identity(without)


def test_tools_that_no_prompt_shows_are_refused(tmp_path: Path) -> None:
    without = chat(tmp_path / "model", CHAT)
    plain = PlainText(without._tokenizer, system=None)
    for conversation in (without, plain):
        with pytest.raises(ConfigError) as caught:
            conversation.text(first(tmp_path, [ADD]).prompt)
        assert caught.value.codes == ("tools-not-shown",)
    # The fix
    prompt = first(tmp_path, [ADD], tools=None).prompt
    assert "1 + 2?" in without.text(prompt)
    assert "1 + 2?" in plain.text(prompt)


@pytest.mark.parametrize("column", [[], None, "hammer", ["hammer"], {"a": 1}, [{}], 3])
def test_a_column_with_something_else_is_a_fact(tmp_path: Path, column: Any) -> None:
    episode = first(tmp_path, column)
    assert type(episode.prompt) is list
    assert episode.facts()["tools"] == column
