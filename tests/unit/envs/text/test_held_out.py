"""Held-out prompts: which of them are trained on, and how many there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.codes import config_error
from rlplace.config.blocks.language_model import TextEnvConfig
from rlplace.envs.registry import check_task
from rlplace.envs.text.contract import Prompt


def rows(file: Path, name: str, numbers: range) -> str:
    lines = [json.dumps({"prompt": f"{name} {n}", "answer": f"{n}"}) for n in numbers]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def warnings(
    env: TextEnvConfig, eval_prompts: int | None = None
) -> list[tuple[str, str]]:
    found = check_task(env, seed=0, evaluated=True, eval_prompts=eval_prompts)
    return [(problem.code, problem.what) for problem in found]


def test_held_out_prompts_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    train = rows(tmp_path / "train.jsonl", "row", range(40))
    other = rows(tmp_path / "other.jsonl", "test", range(30))
    some = rows(tmp_path / "some.jsonl", "row", range(35, 50))

    def found(held_out: str, **more: object) -> list[tuple[str, str]]:
        env = TextEnvConfig(
            task="prompts",
            kwargs={"path": train},
            eval_kwargs={"path": held_out, **more},
        )
        return warnings(env)

    code = "held-out-in-training"
    assert found(other) == []
    assert found(train) == [(code, "40 of 40 held-out prompts are trained on")]
    assert found(some) == [(code, "5 of 15 held-out prompts are trained on")]
    # The answer and the order of a copy do not matter.
    assert found(train, answer=None) == found(train)


@pytest.mark.parametrize(("asked", "said"), [(None, 0), (30, 0), (31, 1)])
def test_more_prompts_than_there_are_is_said(
    tmp_path: Path, asked: int | None, said: int
) -> None:
    env = TextEnvConfig(
        task="prompts",
        kwargs={"path": rows(tmp_path / "train.jsonl", "train", range(4))},
        eval_kwargs={"path": rows(tmp_path / "test.jsonl", "test", range(30))},
    )
    what = ("few-held-out", "there are 30 held-out prompts: each is asked once")
    assert warnings(env, asked) == [what] * said


def test_a_generated_task_that_repeats_itself_is_told() -> None:
    found = warnings(TextEnvConfig(task="guess_number", max_turns=4))
    assert [code for code, _ in found] == ["held-out-in-training"]
    # A tenth of these problems is kept out of training.
    assert warnings(TextEnvConfig(task="arithmetic")) == []


def test_prompts_that_render_alike_are_equal(tmp_path: Path) -> None:
    train = rows(tmp_path / "train.jsonl", "row", range(40))
    messages = tmp_path / "messages.jsonl"
    texts = [f"row {n}" for n in range(38, 42)]
    lines = [
        {"prompt": [{"role": "user", "content": text}], "answer": "1"} for text in texts
    ]
    lines[1]["prompt"] = [{"role": "user", "content": " row 39\n"}]
    messages.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    env = TextEnvConfig(
        task="prompts",
        kwargs={"path": train},
        eval_kwargs={"path": str(messages)},
    )
    # Without a template: a text is a message of the user
    code = "held-out-in-training"
    assert warnings(env) == [(code, "1 of 4 held-out prompts are trained on")]

    def rendered(prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt.strip()
        return "".join(message.text.strip() for message in prompt)

    found = check_task(env, seed=0, evaluated=True, rendered=rendered)
    assert [each.what for each in found] == ["2 of 4 held-out prompts are trained on"]

    def refused(prompt: Prompt) -> str:
        raise config_error("no-chat-template", "env.chat", "model")

    found = check_task(env, seed=0, evaluated=True, rendered=refused)
    assert [each.what for each in found] == ["1 of 4 held-out prompts are trained on"]
